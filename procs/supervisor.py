"""The supervisor: starts the actors, watches them, replaces those that die or hang, and stops them all in order.

It is the process that a user starts and that a service manager watches. It never waits for a device or a client.

When an actor dies, the next epoch begins (`ipc/epochs.py`): the others get `Reset`, drop messages of older epochs, and
answer `Ping` with the new epoch. When every actor is ready and in this epoch, the api gets `Restored` and goes on. The
same begins when a connection between two actors has lost messages (`ipc/gaps.py`).
"""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec

from ..config.config import EngineConfig, HttpConfig, ServerConfig
from ..config.live import with_live_engine, with_live_http
from ..config.machine import usable_cores
from ..errors import StartError
from ..ipc.epochs import Epochs, Link
from ..ipc.messages import (
    SCHEMA_VERSION,
    Change,
    Demand,
    Facts,
    Fault,
    Gap,
    Leave,
    Loading,
    Ping,
    Pong,
    Ready,
    Reset,
    Restored,
    Serve,
    Serving,
    Settings,
    Stop,
    Swap,
    Swapped,
    ToSupervisor,
    Vacated,
)
from ..ipc.zmq_channel import Keys, ZmqContext, ZmqInbox, ZmqOutbox, check_address, make_run_folder, remove_run_folder
from . import interpreter
from .announcement import announcement
from .child import EngineMailboxes, Launch, process_age_s, settings_of
from .elsewhere import Elsewhere
from .environment import environment_of
from .listening import Listening
from .live_settings import LiveSettings
from .liveness import STORM_S, Deaths, Liveness
from .rank_memory import RankMemory
from .remote import RemoteProcess
from .template import ForkedProcess, Templates, can_fork
from .topology import RENDEZVOUS, apis, index, kind, link, lost_with, names
from .weight_keeper import WeightKeeper
from .weight_memory import close_segments, keeps_on_device, new_segment, new_segments

PING_INTERVAL_S = 0.5
STOP_GRACE_S = 5.0  # for each actor, on top of what open requests are given
FAULT_WAIT_S = 1.0  # for the `Fault` of a child that has ended, which may still be on its way
START_REPORT_S = 30.0  # between messages that say which actors are not ready
_HANDOVER_S = 600.0  # for open requests, after another model has taken over; idle connections end at once
_LATE = "not ready in time"
_MAX_KEEPERS = 5  # of a rank; if they end so often, its weights stay in the workers
STACKS_WAIT_S = 0.2  # for a hanging process to print its stacks


Process = asyncio.subprocess.Process | ForkedProcess | RemoteProcess


def with_state(http: HttpConfig, folder: Path) -> HttpConfig:
    """With a state file in this folder, unless the user names one."""
    if http.reports.state is not None:
        return http
    reports = msgspec.structs.replace(http.reports, state=str(folder / "state"))
    return msgspec.structs.replace(http, reports=reports)


class Child:
    """One actor's process."""

    def __init__(self, name: str, process: Process, epoch: int) -> None:
        self.name = name
        self.process = process
        self.started = epoch
        self.epoch = epoch  # the latest that it has confirmed
        self.started_at = time.monotonic()
        self.facts: Facts | None = None  # once ready
        self.liveness: Liveness | None = None  # once ready
        self.loading: Loading | None = None  # the last one of a worker
        self.may_end = False  # it was asked to end
        self.settings = 0  # number of the `Settings` that hold in it
        self.step_age_s = 0.0  # of the core: how long no step has ended although plans are in flight, as of its epoch
        self.exited = asyncio.ensure_future(process.wait())


class Supervisor:
    """All actors of one launch on this machine. `run` is called once."""

    def __init__(
        self,
        config: ServerConfig,
        *,
        actors: Sequence[str] | None = None,
        addresses: dict[str, str] | None = None,
        keys: Keys | None = None,
        quiet: bool = False,
        listening: Listening | None = None,
        on_swap: Callable[[Swap], None] | None = None,
        weight_fds: Sequence[int] = (),
        templates: Templates | None = None,
        settings: LiveSettings | None = None,
        asked_at_s: float = 0.0,
    ) -> None:
        """`actors`: those to start here (default: all). `addresses`: mailboxes outside this launch's run folder, and
        `ranks`, where the ranks of a tensor-parallel group meet. `quiet`: no timeline, no banner.

        With `listening`, the caller owns the socket and the signals (see `Generations`). `on_swap` is called when an
        administrator asks for another model. `weight_fds`: shared memory for the ranks' packed weights, which this
        object closes; it makes its own if there is none. `templates`: those that it shares with other engines.
        `settings`: that may change meanwhile (default: its own). `asked_at_s`: this process's age when the start was
        asked for, from which the timeline counts."""
        self._config = config.engine
        self._service = config.http.service
        self._http = config.http
        self.settings = LiveSettings(config) if settings is None else settings
        self._told: Settings | None = None  # those that processes were told last
        self._unsettled: list[tuple[int, asyncio.Future[None]]] = []  # number of `Settings` → done when they hold
        self._answering: set[asyncio.Task[None]] = set()  # a task for each `Change`
        self._names = names(config.engine.num_ranks, config.http.service.api_processes)
        self._actors = [name for name in self._names if actors is None or name in actors]
        self._given = addresses or {}
        self._elsewhere = Elsewhere(self._actors, self._given, hang_timeout_s=self._service.hang_timeout_s)
        self._keys = keys
        self._quiet = quiet
        self._children: dict[str, Child] = {}
        self._outboxes: dict[str, ZmqOutbox] = {}  # of what is started here, and of `_other_apis`
        self._dead: list[Child] = []  # oldest first: the first death may have caused the others
        self._gaps: list[Gap] = []  # that were reported and may concern this epoch
        self._inbox: ZmqInbox[ToSupervisor] | None = None
        self._listening = listening
        self._engine = config.engine.engine_number
        self._shown = ""  # before what is printed; of one of several engines its number
        self._other_apis: dict[str, str] = {}  # mailboxes of api processes that another supervisor here owns
        self._given_folder: Path | None = None  # for mailboxes, instead of a new one
        self._is_owned = listening is not None  # signals are for another object
        self._on_swap = on_swap
        self._may_serve = not self._is_owned
        self._is_retired = self._is_over = False
        self.is_ready = asyncio.Event()  # every actor is ready
        self.failure: str | None = None  # why it ended, unless it was stopped
        self._faults: dict[str, Fault] = {}
        self._url: str | None = None
        self._woken = asyncio.Event()
        self._signals: list[signal.Signals] = []
        self._marks: list[tuple[str, float]] = []  # phase of the start → when it ended
        self._asked_at_s = asked_at_s
        self._epoch = self._device_epoch = self._restored = 1  # `_restored`: epoch of the last `Restored`
        self._deaths = Deaths()
        self._lost_at: dict[str, float] = {}  # actors that are being replaced → when they were lost
        self._looked_at = 0.0  # when `_hung` last ran
        self._weight_fds = list(weight_fds)
        self._keepers: dict[int, WeightKeeper] = {}  # by rank; of those whose weights are on a GPU
        self._num_keepers = 0  # that were started
        self._templates = Templates() if templates is None else templates
        self._owns_templates = templates is None
        self._unstarted: list[str] = []  # actors that no process was started for yet
        self._broken_kernels: dict[str, None] = {}  # their check broke a device: workers leave them out
        self._mailbox_fds: dict[str, int] = {}  # listening sockets of mailboxes that other machines reach

    def weights_for(self, config: EngineConfig) -> list[int]:
        """New descriptors of this engine's packed weights, if another engine's are the same; else none. A keeper's
        weights are those of one engine."""
        can_share = config.weights_key == self._config.weights_key and not keeps_on_device(config)
        return [os.dup(fd) for fd in self._weight_fds] if can_share else []

    async def run(self) -> int:
        """From start to stop. The exit code: 0 after a signal, 2 for what the user can correct, else 1."""
        loop = asyncio.get_running_loop()
        for signum in () if self._is_owned else (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, self.on_signal, signum)
        self._mark("configuration")
        self._run_folder = run_folder = self._given_folder or make_run_folder()
        self._http = with_state(self._http, run_folder)
        if (settings := self.settings.message) is not None:
            self._take_over(settings)
        context = ZmqContext(self._keys, Epochs(engine=self._engine))
        self._lifeline, self._lifeline_held = os.pipe()
        if any(kind(name) == "worker" for name in self._actors):
            self._weight_fds = self._weight_fds or new_segments(self._config)
        try:
            if "api" in self._actors and self._listening is None:
                self._listening = Listening(self._http.listen)
            await self._gather(context)
            if self._must_end:
                return 0
            for address in self._given.values():
                check_address(address, self._keys)
            self._addresses = {
                name: self._given.get(name, f"ipc://{run_folder}/{name}")
                for name in (*self._names, "supervisor")
                if name in self._given or name in (*self._actors, "supervisor")
            } | self._other_apis
            self._inbox = context.inbox(self._addresses["supervisor"], ToSupervisor)
            self._inbox.subscribe(loop, self._woken.set)
            self._elsewhere.watch(context, loop, self._woken.set)
            receivers = (*self._actors, *self._other_apis)
            self._outboxes = {name: context.outbox(self._addresses[name], Link.CONTROL) for name in receivers}
            first = [name for name in self._actors if kind(name) == "worker"] or self._actors[:1]
            self._waits_since = time.monotonic()
            self._next_report = self._waits_since + START_REPORT_S
            self._unstarted = [name for name in self._actors if name not in first]
            for name in self._actors if keeps_on_device(self._config) else ():
                if kind(name) == "worker":
                    await self._start_keeper(index(name))
            await self._spawn(first)
            self._mark("start of processes")
            return await self._supervise()
        except StartError as error:
            self.failure = str(error)
            self._print(str(error))
            await self._fail_requests()
            return max((fault.exit_code for fault in self._faults.values()), default=1)
        finally:
            self._is_over = True
            self._settle()
            await self._kill()
            for keeper in self._keepers.values():
                await keeper.end()
            if self._owns_templates:
                self._templates.close()
            if self._listening is not None and not self._is_owned:
                self._listening.close()
            os.close(self._lifeline)
            os.close(self._lifeline_held)
            close_segments(self._weight_fds)
            self._elsewhere.close()
            if self._inbox is not None:
                self._inbox.close()
            context.close()
            if self._given_folder is None:
                remove_run_folder(run_folder)

    # ── start ────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _gather(self, context: ZmqContext) -> None:
        """Waits for other machines, if there are any. Raises StartError, ConfigError."""

    async def _spawn(self, actors: Sequence[str]) -> None:
        """Starts these processes at the same time. Either all ranks of the model are among them or none is."""
        http_fd = -1 if self._listening is None else self._listening.fd
        ranks = {index(name) for name in self._actors if kind(name) == "worker"}
        memory = None
        if any(kind(name) == "worker" for name in actors):
            are_alone = len(ranks) == self._config.num_ranks and RENDEZVOUS not in self._given
            memory = RankMemory(self._config, are_alone=are_alone)
        launch = Launch(
            config=self._config,
            http=self._http,
            num_apis=self._service.api_processes,
            addresses=self._addresses,
            keys=self._keys,
            supervisor_pid=os.getpid(),
            lifeline_fd=self._lifeline,
            http_fd=http_fd,
            progress=not self._quiet and sys.stderr.isatty(),
            ranks_here=tuple(index(name) for name in self._actors if kind(name) == "worker"),
            rendezvous=self._given.get(RENDEZVOUS, f"file://{self._run_folder}/{RENDEZVOUS}-{self._device_epoch}"),
            epoch=self._epoch,
            device_epoch=self._device_epoch,
            broken_kernels=tuple(self._broken_kernels),
            engines=self._mailboxes_of_engines(),
            settings=self._told,
        )
        try:
            for name in actors:
                group = launch
                if memory is not None and kind(name) == "worker":
                    group = msgspec.structs.replace(launch, **memory.fields(index(name)))
                    # With messages between the stages, the ranks of each are a group of their own.
                    if self._config.stages_by_mail and RENDEZVOUS not in self._given:
                        stage = index(name) // self._config.tensor_parallel_size
                        group = msgspec.structs.replace(group, rendezvous=f"{launch.rendezvous}-{stage}")
                await self._start(name, group)
        finally:
            if memory is not None:
                memory.close()

    def _mailboxes_of_engines(self) -> tuple[EngineMailboxes, ...]:
        """For api processes of several engines."""
        return ()

    async def _start_others(self) -> None:
        """Starts at any time as many as there are cores besides the one on which the worker starts, which takes
        longest: others beside it would only delay it."""
        num_cores = max(1, usable_cores() - 1)
        while self._unstarted:
            await self._until(lambda: self._num_starting < num_cores, _LATE)
            if self._must_end:
                return
            num = num_cores - self._num_starting
            starting, self._unstarted = self._unstarted[:num], self._unstarted[num:]
            await self._spawn(starting)

    @property
    def _num_starting(self) -> int:
        """Actors that are not ready, besides workers."""
        return sum(child.facts is None and kind(child.name) != "worker" for child in self._children.values())

    async def _start(self, name: str, launch: Launch) -> None:
        is_worker = kind(name) == "worker"
        keeper = self._keepers[index(name)].address if is_worker and index(name) in self._keepers else ""
        has_segment = is_worker and self._weight_fds and (keeper or not keeps_on_device(self._config))
        weights_fd = self._weight_fds[index(name)] if has_segment else -1
        mailbox_fd = self._mailbox_fds.get(name, -1)
        part = msgspec.structs.replace(
            launch.part_of(name), weights_fd=weights_fd, keeper=keeper, mailbox_fd=mailbox_fd
        )
        launch_file = self._run_folder / f"launch-{self._epoch}-{name}.json"
        with os.fdopen(os.open(launch_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(msgspec.json.encode(part))
        environment = self._environment_of(name)
        fds = {"http_fd": part.http_fd}
        if is_worker:
            own = ("memory_fd", "input_fd", "output_fd")
            fds = {"weights_fd": weights_fd} | {field: getattr(part, field) for field in own}
        fds["mailbox_fd"] = part.mailbox_fd
        process: Process
        if is_worker and can_fork(self._config):
            forked = fds | {"lifeline_fd": self._lifeline}
            process = self._templates.fork(name, str(launch_file), forked, environment)
        else:
            process = await asyncio.create_subprocess_exec(
                *interpreter.COMMAND,
                "pagewire.procs.child",
                name,
                str(launch_file),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=[fd for fd in (self._lifeline, *fds.values()) if fd >= 0],
                env=environment,
            )
        child = self._children[name] = Child(name, process, self._epoch)
        child.settings = 0 if launch.settings is None else launch.settings.number
        child.exited.add_done_callback(partial(self._on_exit, child))

    def _environment_of(self, name: str) -> dict[str, str]:
        return environment_of(name, self._config, ranks_are_here=RENDEZVOUS not in self._given)

    async def _start_keeper(self, rank: int) -> None:
        """Without a keeper, or memory for its index, the weights stay in the worker."""
        address = f"{self._run_folder}/weights-{rank}"
        try:
            while len(self._weight_fds) <= rank:
                self._weight_fds.append(new_segment())
            keeper = await WeightKeeper.start(rank, address, self._lifeline, self._environment_of("worker"))
        except OSError:
            return
        self._keepers[rank] = keeper
        self._num_keepers += 1
        keeper.exited.add_done_callback(lambda _: self._woken.set())

    async def _replace_keepers(self) -> None:
        """After the death of a keeper. Its worker goes on, since it has the memory mapped, but the next one has to
        fill that of another keeper."""
        for rank, keeper in list(self._keepers.items()):
            if not keeper.exited.done():
                continue
            del self._keepers[rank]
            self._renew_segment(rank)
            is_replaced = self._num_keepers < _MAX_KEEPERS * self._config.tensor_parallel_size
            if is_replaced:
                await self._start_keeper(rank)
            later = "" if is_replaced else ", and so do all later ones"
            self._print(
                f"the weight keeper of rank {rank} has ended. A worker that is replaced now reads the "
                f"checkpoint again{later}."
            )

    def _renew_segment(self, rank: int) -> None:
        """So that the next worker finds memory that it can use."""
        fd, self._weight_fds[rank] = self._weight_fds[rank], new_segment()
        os.close(fd)

    async def _supervise(self) -> int:
        """Starts the other actors, waits until all are ready, has the api listen, and watches until the end. The exit
        code."""
        await self._start_others()
        await self._until(lambda: all(child.facts is not None for child in self._children.values()), _LATE)
        if self._must_end:
            return await self._stop("stopped while starting")
        slowest = max(self._children.values(), key=lambda child: sum((child.facts or Facts()).timings.values()))
        self._mark(f"{slowest.name} ready")
        self._tell_restored()
        self.is_ready.set()
        await self._watch(lambda: self._may_serve or self._must_end)
        if self._listening is not None:
            for name in self._apis:
                self._outboxes[name].send(Serve())
            self._waits_since = time.monotonic()
            await self._until(lambda: self._url is not None, "the api did not open its port")
            self._mark("port open")
        self._announce(slowest)
        await self._watch(lambda: self._must_end or self._is_retired)
        if self._is_retired:
            return await self._stop("another model is served now", grace_s=_HANDOVER_S, hands_over=True)
        reason = self._signals[0].name if self._signals else "another launch of the engine ends"
        return await self._stop(reason, grace_s=self._service.drain_timeout)

    def serve(self) -> None:
        """Has the api listen as soon as every actor is ready."""
        self._may_serve = True
        self._woken.set()

    def retire(self) -> None:
        """Stops accepting connections, which another supervisor does now, and ends when the open ones have ended."""
        self._is_retired = True
        self._woken.set()

    def answer(self, name: str, answer: Swapped) -> None:
        """Answers the `Swap` of an api process."""
        if not self._is_over:
            self._outboxes[name].send(answer)

    async def _until(self, condition: Callable[[], bool], what: str) -> None:
        """Handles events until `condition()`. Raises StartError if a child dies that cannot do better the next time, or
        the start takes too long."""
        while not condition() and not self._must_end:
            died, self._dead = [child for child in self._dead if not child.may_end], []
            if died:
                await self._replace_broken(died)
            await self._mend()
            await self._next_event(0.5)
            await self._look_elsewhere()
            now = time.monotonic()
            late = ", ".join(child.name for child in self._children.values() if child.facts is None)
            if now > self._waits_since + self._service.start_timeout_s:
                names = f"{late}: " if what == _LATE and late else ""
                why = f" {self._obstacle}." if self._obstacle else ""
                raise StartError(f"{names}{what} ({self._service.start_timeout_s:g} s; see --start-timeout-s).{why}")
            if now > self._next_report and late:
                self._next_report = now + START_REPORT_S
                why = f": {self._obstacle}" if self._obstacle else ""
                self._print(f"still waiting for {late} after {now - self._waits_since:.0f} s{why}")

    @property
    def _obstacle(self) -> str:
        """Why processes cannot work, as far as this is known; a sentence without its full stop."""
        return ""

    @property
    def notes(self) -> list[str]:
        """What the processes tell the operator of their start."""
        return [note for child in self._children.values() for note in (child.facts or Facts()).notes]

    def _print(self, text: str) -> None:
        """Tells the operator."""
        print(f"pagewire: {self._shown}{text}", file=sys.stderr, flush=True)

    def _mark(self, phase: str) -> None:
        self._marks.append((phase, process_age_s() - self._asked_at_s))

    def _announce(self, slowest: Child) -> None:
        if self._quiet:
            return
        timings = {f"{slowest.name} ready": (slowest.facts or Facts()).timings}
        text = announcement(
            self._config, self.notes, self._marks, timings, self._url, has_keys=bool(self._http.api_keys)
        )
        print(text, file=sys.stderr, flush=True)

    # ── settings that change ─────────────────────────────────────────────────────────────────────────────────────────

    async def apply(self, settings: Settings) -> None:
        """Tells every process, and those that start later. Returns when the settings hold in the core and the api
        processes."""
        if self._is_over:
            return
        told = self._take_over(settings)
        for name in self._actors:
            if name in self._children:
                self._outboxes[name].send(settings_of(name, told))
                self._outboxes[name].send(self._ping())
        held: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._unsettled.append((settings.number, held))
        self._settle()
        await held

    def _take_over(self, settings: Settings) -> Settings:
        """Starts processes with these from now on. Returns them as processes are told."""
        assert settings.http is not None, "a supervisor is told everything"
        self._http = with_live_http(self._http, settings.http)
        self._service = self._http.service
        engine = with_live_engine(self._config, settings.engine)  # of several engines, this one's
        self._told = told = msgspec.structs.replace(settings, engine=engine, http=self._http)
        return told

    def _settle(self) -> None:
        """Notes which settings hold. A process that has ended does not count: its successor is started with them."""
        if self._unsettled:
            asked = [
                child.settings
                for child in self._children.values()
                if kind(child.name) in ("core", "api") and not child.may_end and not child.exited.done()
            ]
            least = min(asked, default=sys.maxsize)
            for number, held in self._unsettled:
                if (number <= least or self._is_over) and not held.done():
                    held.set_result(None)
            self._unsettled = [one for one in self._unsettled if not one[1].done()]

    def _on_asked(self, change: Change) -> None:
        """An api process asks for changed settings."""
        task = asyncio.ensure_future(self._answer_change(change))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _answer_change(self, change: Change) -> None:
        if self._elsewhere:
            text = "The settings of an engine in several launches cannot be changed while it runs."
            self.answer(change.name, Swapped(change.number, 409, text))
        else:
            self.answer(change.name, await self.settings.answer(change, self.apply))

    # ── watch ────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _watch(self, is_over: Callable[[], bool]) -> None:
        """Replaces actors that die or hang, until `is_over()`. Raises StartError if they cannot be replaced."""
        next_ping = 0.0
        while not is_over():
            await self._look_elsewhere()
            await self._replace_keepers()
            died, self._dead = [child for child in self._dead if not child.may_end], []
            died += [child for child in await self._hung() if child not in died]
            if died:
                await self._replace(died)
            await self._mend()
            self._restore()
            if time.monotonic() >= next_ping:  # not in every turn: the answer to a ping is an event, too
                next_ping = time.monotonic() + PING_INTERVAL_S
                for name in self._actors:
                    self._outboxes[name].send(self._ping())
            await self._next_event(PING_INTERVAL_S)

    def _ping(self) -> Ping:
        return Ping()

    async def _hung(self) -> list[Child]:
        """Kills the children that hang or are not ready in time, and returns them."""
        now = time.monotonic()
        was_away = now - self._looked_at > self._service.hang_timeout_s / 2  # this process or the machine was stopped
        self._looked_at = now
        hung = []
        for child in self._children.values():
            if child.exited.done() or child.may_end:
                continue
            if child.facts is None:
                late = now > child.started_at + self._service.start_timeout_s
                complaint = "did not become ready in time" if late else None
            elif child.liveness is None:  # on another machine, where a follower watches it
                continue
            else:
                if was_away:
                    child.liveness.excuse(now)
                complaint = child.liveness.complaint(self._service.hang_timeout_s, now)
            if complaint is not None:
                self._faults[child.name] = Fault(child.name, f"{child.name} {complaint}", "", 1)
                with contextlib.suppress(ProcessLookupError):
                    child.process.send_signal(signal.SIGQUIT)
                    await asyncio.wait([child.exited], timeout=STACKS_WAIT_S)
                    child.process.kill()
                await child.exited
                hung.append(child)
        return hung

    async def _replace_broken(self, died: Sequence[Child]) -> None:
        """Replaces workers that died in the start if the check of a kernel broke a device: the next ones leave that
        kernel out. Raises StartError if they died of anything else."""
        for child in died:
            await self._last_words(child)
        kernels = {fault.broken_kernel for child in died if (fault := self._faults.get(child.name)) is not None}
        if not kernels - {"", *self._broken_kernels}:
            raise StartError(self._cause(died[0]))
        await self._replace(died)

    async def _replace(self, died: Sequence[Child]) -> None:
        """Begins the next epoch with new processes for these and for those that depend on them. Raises StartError."""
        now = time.monotonic()
        lost: dict[str, None] = {}
        reason = ""
        for child in died:
            await self._last_words(child)
            cause = self._cause(child)
            reason = reason or cause
            self._deaths.add(child.name, cause.removeprefix(f"{child.name} ").removesuffix("."), now)
            lost.update(dict.fromkeys(self._lost_with(child.name)))
            if (fault := self._faults.get(child.name)) is not None and fault.broken_kernel:
                self._broken_kernels[fault.broken_kernel] = None
        lost = {name: None for name in lost if name in self._children}  # the others are not started yet
        self._check_deaths(reason)
        self._print(f"{reason} Replacing {', '.join(lost)}.")
        is_device = any(kind(name) in ("core", "worker") for name in lost)
        await self._begin(list(lost), reason, self._epoch + 1, self._device_epoch + is_device)

    def _check_deaths(self, reason: str) -> None:
        """Raises StartError if beginning anew is impossible or does not help."""
        if self._elsewhere:
            raise StartError(f"{reason} Stopping: what runs in several launches is not replaced.")
        if self._deaths.are_a_storm:
            raise StartError(f"{reason} Stopping: {self._deaths.summary()}")

    async def _mend(self) -> None:
        """Begins the next epoch if a connection has lost messages of this one, with new ranks if it was theirs. No
        process has failed, so no request is suspected. Raises StartError."""
        gaps, self._gaps = self._gaps, []
        for gap in gaps:
            is_device = link(gap.sender, gap.name) is Link.DEVICE
            if gap.epoch != (self._device_epoch if is_device else self._epoch):
                continue  # its consequences have been dealt with
            where = f"{gap.sender} to {gap.name} ({self._addresses[gap.name]})"
            num = self._deaths.add(f"the connection of {where}", "has lost messages", time.monotonic())
            again = f", {num} times within {STORM_S:.0f} s" if num > 1 else ""
            reason = f"The connection of {where} broke and has lost messages{again}."
            self._check_deaths(reason)
            lost = [name for name in self._lost_with("worker") if is_device and name in self._children]
            self._print(f"{reason} Replacing {', '.join(lost) or 'no process'}.")
            await self._begin(lost, reason, self._epoch + 1, self._device_epoch + is_device, is_planned=True)

    def _lost_with(self, name: str) -> tuple[str, ...]:
        """The actors to replace when this one has ended."""
        return lost_with(name, self._config.num_ranks)

    async def _begin(
        self, lost: Sequence[str], reason: str, epoch: int, device_epoch: int, *, is_planned: bool = False
    ) -> None:
        """Begins this epoch: ends the lost processes, tells the others, and starts new ones in their place.
        `is_planned`: nothing has failed, so no request is suspected."""
        now = time.monotonic()
        for name in lost:
            child = self._children[name]
            child.may_end = True
            with contextlib.suppress(ProcessLookupError):
                child.process.kill()
            await child.exited
            self._faults.pop(name, None)
            self._lost_at.setdefault(name, now)
        self._epoch, self._device_epoch = epoch, device_epoch
        self._tell_reset(lost, reason, is_planned=is_planned)
        await self._spawn(lost)

    def _tell_reset(self, lost: Sequence[str], reason: str, *, is_planned: bool = False) -> None:
        """Tells all but the lost actors of the epoch that has begun."""
        reset = Reset(self._epoch, self._device_epoch, () if is_planned else tuple(lost), reason, self._engine)
        for name in (name for name in self._actors if name in self._children):
            if name not in lost:
                self._outboxes[name].send(reset)
                self._outboxes[name].send(self._ping())
        for name in self._other_apis:
            self._outboxes[name].send(reset)

    async def _look_elsewhere(self) -> None:
        """Raises StartError if an actor of another launch is lost, unless that launch ends in order: its `Leave` may
        arrive after its actors have ended."""
        was_told = self._must_end
        deadline = time.monotonic() + FAULT_WAIT_S
        while (complaint := self._elsewhere.complaint(in_order=was_told)) is not None:
            if was_told or time.monotonic() > deadline:
                raise StartError(f"{complaint} Stopping: what runs in several launches is not replaced.")
            await self._next_event(0.05)
            if self._must_end:
                return

    def _restore(self) -> None:
        """Sends the api `Restored` once every other actor is ready and in this epoch."""
        if not self._lost_at and self._restored == self._epoch:
            return
        behind = [child for child in self._children.values() if kind(child.name) != "api"]
        if any(child.facts is None or child.epoch < self._epoch for child in behind):
            return
        self._tell_restored()
        for name in [name for name in self._lost_at if self._children[name].facts is not None]:
            passed_s = time.monotonic() - self._lost_at.pop(name)
            self._print(f"{name} is replaced, {passed_s:.1f} s after it was lost.")

    def _tell_restored(self) -> None:
        if self._restored < self._epoch:
            self._restored = self._epoch
            for name in (*self._apis, *self._other_apis):
                self._outboxes[name].send(Restored(self._epoch, self._engine))

    @property
    def _must_end(self) -> bool:
        """This launch, or another launch of this engine, was told to stop."""
        return bool(self._signals) or self._elsewhere.is_leaving

    @property
    def _apis(self) -> list[str]:
        return [name for name in apis(self._service.api_processes) if name in self._actors]

    def on_signal(self, signum: signal.Signals) -> None:
        """The first signal stops in order, a second one at once."""
        self._signalled_at = time.monotonic()
        self._signals.append(signum)
        self._woken.set()

    def _on_exit(self, child: Child, _: object) -> None:
        self._dead.append(child)
        self._woken.set()

    async def _next_event(self, timeout_s: float) -> None:
        """Waits for a message, a signal, the end of a child or the timeout, and handles the messages."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._woken.wait(), timeout_s)
        self._woken.clear()
        self._elsewhere.look()
        for message in self._inbox.drain() if self._inbox is not None else ():
            match message:
                case Ready():
                    self._ready(message)
                case Serving():
                    self._url = message.url
                case Swap() if self._on_swap is not None:
                    self._on_swap(message)
                case Swap():
                    self.answer(message.name, Swapped(message.number, 409, "This launch cannot swap its model."))
                case Change():
                    self._on_asked(message)
                case Vacated():
                    self._on_vacated(message)
                case Demand():
                    self._on_demand(message)
                case Fault():
                    self._faults[message.name] = message
                case Gap():
                    self._on_gap(message)
                case Loading():
                    self._children[message.name].loading = message
                    self._on_progress()
                case Leave():
                    self._elsewhere.heard(message, is_news=not self._must_end)
                case Pong():
                    child = self._children[message.name]
                    if child.liveness is not None and message.epoch >= child.epoch:
                        child.epoch = message.epoch
                        child.settings = max(child.settings, message.settings)
                        child.step_age_s = message.step_age_s
                        child.liveness.heard(message, time.monotonic())
        self._settle()

    def _on_gap(self, gap: Gap) -> None:
        if gap not in self._gaps:  # followers repeat it
            self._gaps.append(gap)

    def _on_progress(self) -> None:
        """A worker has read more of its weights."""

    def _on_vacated(self, message: Vacated) -> None:
        """An api process of several engines has nothing open at one of them."""

    def _on_demand(self, message: Demand) -> None:
        """An api process of several models has requests for one of them, or has no more."""

    def _ready(self, message: Ready) -> None:
        if message.schema != SCHEMA_VERSION:
            raise StartError(f"{message.name} speaks schema {message.schema}, not {SCHEMA_VERSION}.")
        child = self._children[message.name]
        if child.facts is not None or message.epoch < child.epoch:  # of a process that was replaced
            return
        child.facts = message.facts
        is_worker = kind(child.name) == "worker"
        child.liveness = Liveness(child.process.pid, may_be_busy=is_worker, now=time.monotonic())
        if not message.facts.weights_fit:
            self._renew_segment(index(child.name))
        if self._url is not None and kind(child.name) == "api":
            self._outboxes[child.name].send(Serve())

    async def _last_words(self, child: Child) -> None:
        """Waits for the `Fault` of a child that has ended by itself."""
        deadline = time.monotonic() + FAULT_WAIT_S
        while child.name not in self._faults and time.monotonic() < deadline and child.process.returncode:
            if child.process.returncode < 0:
                return  # killed by a signal: it sent nothing
            await self._next_event(0.05)

    def _cause(self, child: Child) -> str:
        fault = self._faults.get(child.name)
        if fault is not None:
            if fault.trace:
                print(fault.trace, file=sys.stderr, end="")
                return f"{child.name} failed: {fault.summary}."
            return f"{fault.summary.removesuffix('.')}."
        code = child.process.returncode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"{child.name} {how}."

    # ── stop ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _stop(self, reason: str, grace_s: float = 0.0, *, hands_over: bool = False) -> int:
        """Stops the api first and the worker last, each with a deadline, after actors of other launches that are nearer
        to the api. While the api drains, actors that die are replaced. A second signal ends everything at once; if the
        first went to another launch, or with `hands_over`, the next one does. The exit code."""
        num_signals = len(self._signals) + (hands_over or not self._signals)
        self._elsewhere.leave()
        api_children = [self._children[name] for name in self._apis if name in self._children]
        for child in api_children:
            child.may_end = True
            self._outboxes[child.name].send(Stop(grace_s, reason, hands_over))
        deadline = time.monotonic() + grace_s + STOP_GRACE_S

        def is_drained() -> bool:
            nonlocal deadline
            if hands_over and len(self._signals) == num_signals:
                deadline = min(deadline, self._signalled_at + self._service.drain_timeout)
            is_hurried = len(self._signals) > num_signals or time.monotonic() > deadline
            return is_hurried or (all(child.exited.done() for child in api_children) and not self._elsewhere.is_awaited)

        await self._watch(is_drained)
        for name in [name for name in reversed(self._actors) if name in self._children]:
            child = self._children[name]
            child.may_end = True
            if kind(name) != "api":
                self._outboxes[name].send(Stop(0.0, reason))
                deadline = time.monotonic() + STOP_GRACE_S
            while not child.exited.done() and time.monotonic() < deadline and len(self._signals) <= num_signals:
                await self._next_event(0.2)
        if len(self._signals) > num_signals:
            self._print("stopped at once")
            return 130
        return 0

    async def _fail_requests(self) -> None:
        """Has the api fail every open request before all processes are killed."""
        stop = Stop(0.0, "The engine has failed: a part of it has ended.", is_failure=True)
        api_children = [self._children[name] for name in self._apis if self._url is not None]
        for child in api_children:
            self._outboxes[child.name].send(stop)
        if api_children:
            await asyncio.wait([child.exited for child in api_children], timeout=STOP_GRACE_S)

    async def _kill(self) -> None:
        for child in self._children.values():
            if not child.exited.done():
                with contextlib.suppress(ProcessLookupError):
                    child.process.kill()
        for child in self._children.values():
            await child.exited
