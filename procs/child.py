"""The main program of an actor's process: `python -m pagewire.procs.child NAME LAUNCH_FILE`.

The supervisor starts it. It sets the process's title, ends it with the supervisor, connects the mailboxes that the
topology allows, runs the actor, and sends Ready, Fault and Pong.
"""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct, structs

from ..config.config import EngineConfig, HttpConfig
from ..engine.parallel.rank import RankInfo
from ..errors import BrokenDeviceError, CheckpointError, ConfigError, PagewireError
from ..ipc.actor import Actor, Post
from ..ipc.channel import ChannelFull, Inbox
from ..ipc.epochs import NO_ENGINE, Epochs, Link, counter_of
from ..ipc.messages import (
    SCHEMA_VERSION,
    Facts,
    Fault,
    Gap,
    Leave,
    Loading,
    Ping,
    Pong,
    Pulse,
    Ready,
    Settings,
    Stop,
)
from ..ipc.zmq_channel import Keys, ZmqContext
from .lifeline import tie_life_to
from .liveness import dump_stacks_on_quit, volunteer
from .log_lines import escaped, set_log_level, write_log_lines
from .loop_lag import LoopLag
from .post import Mailman, api_index
from .process_usage import process_usage
from .progress_bar import progress_bar
from .topology import ACTORS, index, kind, link, workers

_TELL_S = 0.25  # between two reports of how much of the weights is read
_OOM_SCORES = {"tokenizer": 500, "detokenizer": 500, "grammar": 500, "api": 200}  # see proc(5), oom_score_adj

log = logging.getLogger("pagewire")


class EngineMailboxes(Struct, frozen=True):
    """What api processes of several engines are told of each."""

    addresses: dict[str, str]  # of its mailboxes
    epoch: int
    device_epoch: int
    config: EngineConfig | None = None  # of the first engine of one of several models; the next ones serve it as well
    reason: str = ""  # why it takes no requests until it is `Restored`; empty: it takes them


class Launch(Struct, frozen=True):
    """What the supervisor gives one of its children, in a file that only their user can read and the child removes."""

    config: EngineConfig
    http: HttpConfig | None  # with the keys: for api processes only
    num_apis: int
    addresses: dict[str, str]  # of the mailboxes: actor, or "supervisor" → ZeroMQ address
    keys: Keys | None  # of tcp:// mailboxes
    supervisor_pid: int  # of the parent process, which may be a template of the supervisor
    lifeline_fd: int  # read end of a pipe whose other end only the supervisor holds
    http_fd: int  # bound socket, for api processes; -1: none
    progress: bool  # draw a progress bar while weights load
    ranks_here: tuple[int, ...] = (0,)  # see `RankInfo`
    rendezvous: str = ""
    memory_fd: int = -1  # that the ranks of a stage share, for workers; -1: none
    input_fd: int = -1  # see `RankInfo`, and the next one as well
    output_fd: int = -1
    epoch: int = 1  # in which the process begins; see `Epochs`
    device_epoch: int = 1
    weights_fd: int = -1  # of a worker: a memfd for its packed weights, or for their index; -1: there is none
    keeper: str = ""  # of a worker: the address of the process that keeps its weights; empty: there is none
    broken_kernels: tuple[str, ...] = ()  # GPU kernels whose check broke the device of an earlier worker
    mailbox_fd: int = -1  # a listening socket for its mailbox, which outlives it; -1: it binds its address itself
    engines: tuple[EngineMailboxes, ...] = ()  # for api processes of several engines, by number
    settings: Settings | None = None  # that hold instead of those above; None: nothing was changed since the start

    def part_of(self, name: str) -> "Launch":
        """What this actor may know of it."""
        if kind(name) == "api":
            return self
        settings = None if self.settings is None else settings_of(name, self.settings)
        return structs.replace(self, http=None, http_fd=-1, settings=settings)


def settings_of(name: str, settings: Settings) -> Settings:
    """What this actor may know of them."""
    return settings if kind(name) == "api" else structs.replace(settings, http=None, history=())


def shown_engine(engine: EngineConfig) -> str:
    """For operators: one of several."""
    if engine.number_in_model is None:
        return f"engine {engine.engine_number}"
    several = f", engine {engine.number_in_model}" if engine.data_parallel_size > 1 else ""
    return f"{engine.served_model_names[0]}{several}"


def exit_code(error: BaseException) -> int:
    """2 if the user can correct it, 1 if it is our fault."""
    return 2 if isinstance(error, ConfigError | CheckpointError) else 1


def process_age_s() -> float:
    """Seconds since this process was started, interpreter start included; 0 without /proc."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return 0.0


def run_worker(
    name: str, launch: Launch, epochs: Epochs, inbox: Inbox[object], post: Post, on_ready: Callable[[Facts], None]
) -> None:
    """Runs the worker, which has no event loop, until `Stop`."""
    from .worker import Worker, run

    with contextlib.ExitStack() as stack:
        rank, size = index(name), launch.config.tensor_parallel_size
        rank_info = RankInfo(
            rank,
            launch.ranks_here,
            launch.rendezvous,
            launch.memory_fd,
            stage=rank // size,
            first=rank - rank % size,
            input_fd=launch.input_fd,
            output_fd=launch.output_fd,
        )
        has_bar = launch.progress and rank_info.rank == 0
        draw = progress_bar(stack, "loading weights", delay_s=1.0) if has_bar else None
        told_at = 0.0

        def progress(done: int, total: int) -> None:
            nonlocal told_at
            if draw is not None:
                draw(done, total)
            if (now := time.monotonic()) >= told_at + _TELL_S or done >= total:
                told_at = now
                post("supervisor", Loading(name, done, total))

        worker = Worker(
            launch.config, rank_info=rank_info, weights_fd=launch.weights_fd, keeper=launch.keeper,
            progress=progress, broken_kernels=launch.broken_kernels,
        )  # fmt: skip

        def pong() -> None:
            post("supervisor", Pong(name, epochs.chain, worker.num_answered, worker.num_pending > 0))

        run(worker, inbox, post, on_ready, pong)  # type: ignore[arg-type]  # the inbox's decoder knows only ToWorker


async def run_actor(
    name: str,
    actor: Actor[object],
    epochs: Epochs,
    inbox: Inbox[object],
    post: Post,
    on_ready: Callable[[Facts], None],
    settings: int = 0,
    step_age_s: Callable[[], float] = lambda: 0.0,
) -> None:
    """Hands an actor its messages, until `Stop`. `settings`: the number of those that it was given. `step_age_s`: as
    `Pong` has it."""
    woken = asyncio.Event()
    on_ready(actor.start(post))
    inbox.subscribe(asyncio.get_running_loop(), woken.set)
    lag = LoopLag(asyncio.get_running_loop())
    num_handled = 0
    while True:
        await woken.wait()
        woken.clear()
        messages = inbox.drain()
        if inbox.has_more:
            woken.set()
        if messages:
            actor.handle(messages)
        for message in messages:
            if isinstance(message, Ping):
                num_handled += 1
                pong = Pong(name, epochs.chain, num_handled, settings=settings, step_age_s=step_age_s())
                post("supervisor", pong)
                pulse = Pulse(name, lag.seconds.report(), epochs.num_stale, epochs.engine, process_usage())
                if kind(name) == "api":
                    actor.handle([pulse])  # a process has no outbox to itself
                else:
                    post("api", pulse)
            elif isinstance(message, Settings) and message.number > settings:
                settings = message.number
                set_log_level(message.engine.log_level)
            elif isinstance(message, Leave):
                post("supervisor", message)
            elif isinstance(message, Stop):
                lag.stop()
                stopping = asyncio.ensure_future(actor.stop(message.grace_s))
                while not stopping.done():  # its open streams still need messages
                    waiting = asyncio.ensure_future(woken.wait())
                    await asyncio.wait({stopping, waiting}, return_when=asyncio.FIRST_COMPLETED)
                    waiting.cancel()
                    woken.clear()
                    if late := inbox.drain():
                        actor.handle(late)
                    if inbox.has_more:
                        woken.set()
                return await stopping


def rank_hosts(addresses: Mapping[str, str], num_ranks: int) -> tuple[str, ...]:
    """`ConnectorFacts.hosts`: a rank on another machine than the core has a mailbox that the core reaches over TCP.
    addresses: of the mailboxes."""
    mailboxes = [addresses.get(name, "") for name in workers(num_ranks)]
    hosts = [one.removeprefix("tcp://").rpartition(":")[0] if one.startswith("tcp://") else "" for one in mailboxes]
    return tuple(hosts) if any(hosts) else ()


def make_actor(name: str, launch: Launch, engines: Sequence[Post] = ()) -> Actor[object]:
    """Imports only this actor's modules. `engines`: as of `ApiActor`."""
    config = launch.config
    actor: object
    match kind(name):
        case "core":
            from .core import CoreActor

            actor = CoreActor(
                config,
                keys=launch.keys,
                epoch=counter_of(launch.epoch),
                device_epoch=launch.device_epoch,
                settings=launch.settings,
                hosts=rank_hosts(launch.addresses, config.num_ranks),
            )
        case "grammar":
            from .grammar import GRAMMAR_BYTES, GrammarActor

            actor = GrammarActor(config, memory_bytes=GRAMMAR_BYTES)
        case "tokenizer":
            from .limits import CpuLimit
            from .tokenizer import TokenizerActor

            is_replacement = counter_of(launch.epoch) > 1
            actor = TokenizerActor(config, limit=CpuLimit(), has_prompt_sandbox=True, is_replacement=is_replacement)
        case "detokenizer":
            from .detokenizer import DetokenizerActor

            actor = DetokenizerActor(config)
        case "api":
            from .api import ApiActor

            assert launch.http is not None, name
            first_rid = api_index(index(name), counter_of(launch.epoch), launch.num_apis)
            models = [each.config for each in launch.engines if each.config is not None]
            actor = ApiActor(
                config,
                launch.http,
                http_fd=launch.http_fd,
                name=name,
                index=first_rid,
                engines=engines,
                outages=[each.reason for each in launch.engines],
                models=models,
                settings=launch.settings,
            )
        case _:
            raise ConfigError(f"There is no actor {name!r}; there are {', '.join(ACTORS)}.")
    return actor  # type: ignore[return-value]  # each accepts the union that its mailbox decodes


def step_age_of(name: str, actor: object) -> Callable[[], float]:
    """The `step_age_s` of `run_actor`."""
    if kind(name) != "core":
        return lambda: 0.0
    from .core import CoreActor

    assert isinstance(actor, CoreActor)
    return lambda: actor.step_age_s


def main(name: str, launch_file: str) -> int:
    """Runs one actor. The exit code: 0 after `Stop`, else see `exit_code`."""
    launch = msgspec.json.decode(Path(launch_file).read_bytes(), type=Launch)
    Path(launch_file).unlink()
    return run_child(name, launch, {})


def run_child(name: str, launch: Launch, inherited: Mapping[str, float]) -> int:
    """Runs one actor in this process. inherited: parts of the start that passed before this process was forked, with
    their seconds. The exit code is that of `main`."""
    tie_life_to(launch.supervisor_pid, launch.lifeline_fd)
    if kind(name) != "worker":
        gc.disable()  # until it is ready: what it imports and makes until then stays
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the supervisor decides
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    dump_stacks_on_quit()
    volunteer(_OOM_SCORES.get(kind(name), 0))
    number = NO_ENGINE if launch.engines else launch.config.engine_number
    has_others = launch.config.data_parallel_size > 1 or launch.config.number_in_model is not None
    is_one_of_several = has_others and not launch.engines
    shown = f"{name} of {shown_engine(launch.config)}" if is_one_of_several else name
    _set_title(shown)
    write_log_lines(shown)
    set_log_level((launch.config if launch.settings is None else launch.settings.engine).log_level)
    epochs = Epochs(launch.epoch, launch.device_epoch, engine=number)
    context = ZmqContext(launch.keys, epochs)

    def mailman(addresses: Mapping[str, str], engine: int) -> Post:
        return Mailman(
            name,
            addresses,
            context,
            num_ranks=launch.config.num_ranks,
            num_apis=launch.num_apis,
            num_stages=launch.config.pipeline_parallel_size,
            engine=engine,
        ).post

    post = mailman(launch.addresses, number)
    engines = []
    for index_of, mailboxes in enumerate(launch.engines):
        epochs.join(index_of, mailboxes.epoch, mailboxes.device_epoch)
        engines.append(mailman(mailboxes.addresses, index_of))

    is_ready = False

    def on_ready(facts: Facts) -> None:
        nonlocal is_ready
        is_ready = True
        own = {"python": python_s, **facts.timings}
        rest = {"rest": max(0.0, process_age_s() - sum(own.values()))}
        timings = {**own, **inherited, **rest} if inherited else own | rest
        gc.freeze()  # what exists now stays: collections skip it
        gc.enable()
        post("supervisor", Ready(name, SCHEMA_VERSION, structs.replace(facts, timings=timings), launch.epoch))

    def on_gap(sender: str) -> None:
        epoch = epochs.device if link(sender, name) is Link.DEVICE else epochs.chain
        post("supervisor", Gap(name, sender, epoch))

    python_s = process_age_s()
    code = 0
    try:
        inbox: Inbox[object] = context.inbox(
            launch.addresses[name], ACTORS[kind(name)], fd=launch.mailbox_fd, on_gap=on_gap
        )
        if kind(name) == "worker":
            run_worker(name, launch, epochs, inbox, post, on_ready)
        else:
            import uvloop

            number = 0 if launch.settings is None else launch.settings.number
            actor = make_actor(name, launch, engines)
            age = step_age_of(name, actor)
            uvloop.run(run_actor(name, actor, epochs, inbox, post, on_ready, number, age))
    except Exception as error:
        code = exit_code(error)
        if isinstance(error, PagewireError):
            summary, trace = str(error), ""
        else:  # once requests are served, its message may contain their text
            summary = type(error).__name__ if is_ready else escaped(f"{type(error).__name__}: {error}")
            trace = "".join(traceback.format_tb(error.__traceback__))
        with contextlib.suppress(ChannelFull):
            broken = error.kernel if isinstance(error, BrokenDeviceError) else ""
            post("supervisor", Fault(name, summary, trace, code, broken))
    context.close()
    return code


def _set_title(name: str) -> None:
    import setproctitle

    setproctitle.setproctitle(f"pagewire: {name}")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
