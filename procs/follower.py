"""A machine that works for an engine on another one: `pagewire launch --join tcp://LEAD:PORT --key-file K`.

A follower joins the lead, copies the model from there if it has none (`model_copy.py`), starts the actors that the lead
gives it, watches them, and reports. It decides nothing: a process that died is replaced when the lead begins the next
epoch. When its lease runs out (`leases.py`), it kills its processes and joins anew.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from msgspec import structs

from ..config.config import EngineConfig, HttpConfig, ListenOptions, ModelFacts, ServerConfig, ServiceOptions
from ..config.machine import cache_folder
from ..engine.checkpoint.spec import fingerprint
from ..engine.kv_connector import registry as kv_connectors
from ..errors import ConfigError, PagewireError
from ..ipc.control_messages import (
    Assign,
    Away,
    Begin,
    Bound,
    ChildState,
    Copying,
    Gone,
    Join,
    Joined,
    Refused,
    StopAll,
    ToFollower,
)
from ..ipc.messages import Gap, Leave
from ..ipc.zmq_channel import Keys, ZmqContext
from .lead_link import LeadLink
from .machine import listen, num_gpus, unused_address, versions_here
from .model_copy import Interrupted, ModelCopy
from .progress_bar import progress_bar
from .reach import Reach
from .supervisor import Child, Supervisor
from .topology import RENDEZVOUS, receivers

_SILENCE_S = 5.0  # without an answer of the lead, until the operator is told
_REPORT_S = 30.0  # between such lines
_EARLIER_LEAD_S = 1.0  # until a lead that may be about to end is asked again
_PROGRESS_S = 1.0  # between what is said of a copy


class Follower:
    """`run` is called once."""

    def __init__(
        self,
        address: str,
        keys: Keys | None,
        *,
        host: str,
        name: str,
        model: Path | None,
        rejoin_s: float,
        rejoin_flag: str = "",
    ) -> None:
        """`host`: where its processes can be reached. `model`: its folder, if it is not the lead's. `rejoin_s`: how
        long to look for a lead. `rejoin_flag`: what sets this, for messages; empty: nothing that an operator says."""
        self.address = address
        self.keys = keys
        self.host = host
        self.name = name
        self.model = model
        self.rejoin_s = rejoin_s
        self.rejoin_hint = f" (see {rejoin_flag})" if rejoin_flag else ""
        self.previous = b""
        self.term = 0
        self.weight_fds: list[int] = []
        self.signals: list[signal.Signals] = []
        self.queue: asyncio.Queue[ToFollower | _Prepared | None]  # None: a signal
        self.looks_since = 0.0

    async def run(self) -> int:
        """The exit code."""
        self.queue = asyncio.Queue()
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, self._on_signal, signum)
        self.looks_since = time.monotonic()
        while not self.signals:
            membership = _Membership(self)
            code = await membership.run()
            if code is not None:
                return code
            self.queue = asyncio.Queue()
        return 0

    def _on_signal(self, signum: signal.Signals) -> None:
        self.signals.append(signum)
        self.queue.put_nowait(None)

    def say(self, text: str) -> None:
        print(f"pagewire: {text}", file=sys.stderr, flush=True)


class _Prepared(msgspec.Struct, frozen=True):
    """The machine has the model, or cannot have it."""

    config: EngineConfig | None  # with the model's path on this machine
    problem: str = ""  # a sentence


class _Membership:
    """A follower from one `Join` until it leaves, or has to join again."""

    def __init__(self, follower: Follower) -> None:
        self._of = follower
        self._queue = follower.queue
        self._link = LeadLink(
            follower.address, follower.keys, self._join, on_message=self._queue.put_nowait, kill=self._kill
        )
        self._config: EngineConfig | None = None  # once it has the model
        self._preparing: asyncio.Task[None] | None = None  # once joined
        self._is_over = False
        self._said_at, self._num_tenths = 0.0, 0  # of the copy of the model, when it was last told
        self._service = ServiceOptions()
        self._assigned: Assign | None = None  # the latest
        self._actors: tuple[str, ...] = ()
        self._listeners: dict[str, socket.socket] = {}
        self._bound: Bound | None = None
        self._host: _Host | None = None
        self._running: asyncio.Task[int] | None = None
        self._next_report = time.monotonic() + _SILENCE_S
        self._is_leaving = False
        self._has_left = False  # before the engine has ended

    def _join(self, number: int) -> Join:
        of = self._of
        return Join(number, of.name, versions_here(), num_gpus(), time.time(), of.previous, of.term)

    def _kill(self) -> None:
        """Called on the link's thread."""
        if self._host is not None:
            self._host.kill_now()

    async def run(self) -> int | None:
        """The exit code; None: join again."""
        try:
            while True:
                message: ToFollower | _Prepared | None = None
                with contextlib.suppress(TimeoutError):
                    message = await asyncio.wait_for(self._queue.get(), 0.5)
                    if message is None and (code := self._on_signal()) is not None:
                        return code
                if message is not None and (outcome := await self._handle(message)) is not None:
                    return outcome.code
                if self._is_leaving:
                    self._link.send(Leave(self._actors))
                if self._running is not None and self._running.done():
                    self._of.say("the processes of this machine cannot be watched any more.")
                    return 1
                if self._preparing is None and not self._looks():
                    return 1
        finally:
            await self._end()

    def _looks(self) -> bool:
        """Tells the operator from time to time why there is no lead. False: this has lasted too long."""
        of, now = self._of, time.monotonic()
        is_too_long = now > of.looks_since + of.rejoin_s
        if is_too_long or now > self._next_report:
            self._next_report = now + _REPORT_S
            what = f"no lead for {of.rejoin_s:g} s{of.rejoin_hint}" if is_too_long else "waiting for the lead"
            of.say(f"{what}: {of.address} {_why_silent(of.address, has_keys=of.keys is not None)}.")
        return not is_too_long

    def _on_signal(self) -> int | None:
        """The exit code; None: others take over first, or the engine drains."""
        if len(self._of.signals) > 1:
            self._has_left = True
            return 130
        if self._host is None:
            self._link.send(Leave(self._actors))
            return 0
        self._of.say(f"{self._of.name} leaves when another machine has taken over, or the engine has ended.")
        self._is_leaving = True
        return None

    async def _handle(self, message: ToFollower | _Prepared) -> "_Outcome | None":
        """What it means for this membership; None: it goes on."""
        of = self._of
        match message:
            case Joined():
                return await self._joined(message)
            case _Prepared():
                return self._prepared(message)
            case Refused():
                of.say(message.reason)
                return _Outcome(2)
            case Assign():
                self._assign(message)
            case Begin():
                self._begin(message)
            case StopAll():
                if message.is_failure:
                    of.say(f"the lead has failed ({message.reason.removesuffix('.')}); joining again.")
                    return _Outcome(None)
                if self._host is not None:
                    self._host.stop()
                    assert self._running is not None
                    await self._running
                self._link.send(Leave(self._actors))
                return _Outcome(0)
            case Gone() if self._is_leaving:
                of.say(f"another machine takes over; the processes here end ({self._shown}).")
                self._has_left = True
                return _Outcome(0)
            case Gone():
                if self._preparing is not None:
                    of.say(f"the connection to the lead is lost; its processes here have ended ({self._shown}).")
                    return _Outcome(None)
        return None

    @property
    def _shown(self) -> str:
        return ", ".join(self._actors) or "none"

    async def _joined(self, joined: Joined) -> "_Outcome | None":
        if joined.term < self._of.term:
            self._of.say(f"an earlier lead answers (term {joined.term} after {self._of.term}); looking for the latest.")
            await asyncio.sleep(_EARLIER_LEAD_S)
            return _Outcome(None)
        config = msgspec.json.decode(joined.engine, type=EngineConfig)
        self._of.term = joined.term
        self._of.previous = self._link.incarnation
        self._of.say(f"{self._of.name} has joined the engine of {self._of.address}.")
        self._service = msgspec.json.decode(joined.service, type=ServiceOptions)
        self._preparing = asyncio.ensure_future(self._prepare(config, joined.files))
        return None

    async def _prepare(self, config: EngineConfig, address: str) -> None:
        """`address`: where the lead gives its files of the model."""
        with contextlib.suppress(Interrupted):
            try:
                kv_connectors.check_follower(config.kv_connector)
                model = await asyncio.to_thread(self._find_model, config.model, address)
                self._queue.put_nowait(_Prepared(structs.replace(config, model=model)))
            except (PagewireError, OSError) as error:
                self._queue.put_nowait(_Prepared(None, str(error)))

    def _find_model(self, model: ModelFacts, address: str) -> ModelFacts:
        """The model as it is on this machine. Raises PagewireError, Interrupted."""
        of = self._of
        if of.model is not None:
            model = structs.replace(model, path=str(of.model))
        wrong = _wrong_files(model)
        if wrong is None:
            return model
        if of.model is not None or not address:
            raise ConfigError(f"{wrong}; copy the lead's there, or name another folder with --model.")
        of.say(f"{wrong}; {of.name} copies the model from the lead.")
        with contextlib.ExitStack() as stack:
            draw = progress_bar(stack, "copying the model") if sys.stderr.isatty() else None
            copy = ModelCopy(
                address,
                of.keys,
                model,
                cache=cache_folder() / "models",
                is_over=lambda: self._is_over,
                on_progress=partial(self._on_progress, draw),
            )
            found = copy.run()
        of.say(f"{of.name} has the model in {found.path}.")
        return found

    def _on_progress(self, draw: Callable[[int, int], None] | None, done_bytes: int, total_bytes: int) -> None:
        """Called on the copy's thread. `draw`: shows it on the terminal; None: the log tells each tenth."""
        if draw is not None:
            draw(done_bytes, total_bytes)
        is_done, now = done_bytes == total_bytes, time.monotonic()
        if not is_done and now < self._said_at + _PROGRESS_S:
            return
        self._said_at = now
        self._link.send(Copying(done_bytes, total_bytes))
        num_tenths = 10 * done_bytes // max(1, total_bytes)
        if num_tenths > self._num_tenths:
            self._num_tenths = num_tenths
            if draw is None:
                self._of.say(f"{self._of.name} has copied {10 * num_tenths} % of {total_bytes / 1e9:.2f} GB.")

    def _prepared(self, prepared: _Prepared) -> "_Outcome | None":
        if prepared.config is None:
            reason = f"{self._of.name} cannot take part: {prepared.problem}"
            self._of.say(reason)
            self._link.send(Refused(reason))
            return _Outcome(2)
        self._config = prepared.config
        if self._assigned is not None:
            self._assign(self._assigned)
        return None

    def _assign(self, assign: Assign) -> None:
        self._assigned = assign
        if self._config is None:  # the model is not here yet
            return
        if self._bound is None:
            self._actors = assign.actors
            self._listeners = {name: listen(self._of.host) for name in assign.actors}
            addresses = {
                name: f"tcp://{self._of.host}:{listener.getsockname()[1]}" for name, listener in self._listeners.items()
            }
            self._bound = Bound(addresses, unused_address(self._of.host) if "worker" in assign.actors else "")
        self._link.send(self._bound)

    def _begin(self, begin: Begin) -> None:
        assert self._config is not None
        if self._host is not None:
            if self._host.obey(begin):
                self._bind_again()
            return
        http = HttpConfig(listen=ListenOptions(), service=self._service)
        self._host = _Host(
            ServerConfig(engine=self._config, http=http),
            begin,
            self._actors,
            {name: listener.fileno() for name, listener in self._listeners.items()},
            keys=self._of.keys,
            here=self._of.host,
            on_change=self._link.report,
            weight_fds=self._of.weight_fds,
        )
        self._of.weight_fds = []
        self._running = asyncio.ensure_future(self._host.run())
        self._bind_again()

    def _bind_again(self) -> None:
        """Tells the lead where the ranks of the next epoch can meet, if that is here: the port of this one is used, or
        another program may have it by then."""
        assert self._bound is not None
        if self._bound.rendezvous:
            self._bound = structs.replace(self._bound, rendezvous=unused_address(self._of.host))
            self._link.send(self._bound)

    async def _end(self) -> None:
        """Ends its processes, and then the connection, which says so."""
        if self._host is not None and self._running is not None:
            assert self._config is not None
            self._host.kill_now()
            if not self._running.done():
                self._of.weight_fds = self._host.weights_for(self._config)
            self._host.give_up()
            await asyncio.wait({self._running})
            if (error := self._running.exception()) is not None:
                self._of.say(str(error))
            self._of.looks_since = time.monotonic()
        if self._preparing is not None:
            self._is_over = True
            await asyncio.wait({self._preparing})
        if self._has_left:
            self._link.send(Away())
        self._link.close()
        for listener in self._listeners.values():
            listener.close()


class _Outcome(msgspec.Struct, frozen=True):
    """How a membership ends. `code`: of the program; None: the follower joins again."""

    code: int | None


class _Host(Supervisor):
    """The processes of a follower. It watches them like every supervisor, and leaves decisions to the lead."""

    def __init__(
        self,
        config: ServerConfig,
        begin: Begin,
        actors: Sequence[str],
        mailbox_fds: dict[str, int],
        *,
        keys: Keys | None,
        here: str,
        on_change: Callable[[int, tuple[ChildState, ...], str, Mapping[str, str]], None],
        weight_fds: Sequence[int],
    ) -> None:
        """`here`: this machine's address. `on_change`: called with the epoch, the states of the processes, and which
        mailboxes they cannot reach: a sentence, and actor → address."""
        super().__init__(config, actors=actors, keys=keys, quiet=True, weight_fds=weight_fds)
        self._is_owned = True  # the follower has the signals
        self._given = dict(begin.addresses)
        self._mailbox_fds = mailbox_fds
        self._epoch, self._device_epoch, self._restored = begin.epoch, begin.device_epoch, begin.epoch
        self._on_change = on_change
        self._reach = Reach(here)
        self._told_problem = ""
        self._begins: list[Begin] = []
        self._newest = begin.epoch  # of those that were received; the lead repeats one until a beat confirms it
        self._ended: dict[str, tuple[str, str]] = {}  # actor → why it has ended, and a kernel that broke its device
        self._missed: dict[str, Gap] = {}  # by actor; the lead is told until it is replaced
        self._broken_kernels = dict.fromkeys(begin.broken_kernels)
        self._is_given_up = self._is_stopped = False

    # ── called by the follower ───────────────────────────────────────────────────────────────────────────────────────

    def obey(self, begin: Begin) -> bool:
        """Carries out an epoch, once. Whether it is a new one."""
        is_new = begin.epoch > self._newest
        if is_new:
            self._newest = begin.epoch
            self._begins.append(begin)
            self._woken.set()
        return is_new

    def stop(self) -> None:
        """Ends the processes in order."""
        self._is_stopped = True
        self._woken.set()

    def give_up(self) -> None:
        """Ends `run` at once."""
        self._is_given_up = True
        self._woken.set()

    def kill_now(self) -> None:
        """Kills all processes. Any thread may call it, also while the loop is busy."""
        self._templates.kill()  # their workers end with them
        for child in list(self._children.values()):
            if child.process.pid and child.process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.process.pid, signal.SIGKILL)

    # ── in the place of a supervisor's decisions ─────────────────────────────────────────────────────────────────────

    async def _gather(self, context: ZmqContext) -> None:
        self._seek()

    def _seek(self) -> None:
        """Finds out which mailboxes on other machines the processes here reach."""
        config = self._config
        sent_to = {
            receiver
            for name in self._actors
            for receiver in receivers(name, config.num_ranks, 1, config.pipeline_parallel_size)
        }
        self._reach.seek({name: at for name, at in self._given.items() if name in sent_to and name not in self._actors})

    async def _supervise(self) -> int:
        await self._watch(lambda: self._is_stopped or self._is_given_up)
        return 0 if self._is_given_up else await self._stop("the lead ends the engine")

    async def _replace(self, died: Sequence[Child]) -> None:
        for child in died:
            await self._last_words(child)
            fault = self._faults.get(child.name)
            cause = self._cause(child)
            self._ended[child.name] = cause, "" if fault is None else fault.broken_kernel
            self._say(cause)
            child.may_end = True

    async def _mend(self) -> None:
        self._missed |= {gap.name: gap for gap in self._gaps}
        self._gaps.clear()

    async def _look_elsewhere(self) -> None:
        while self._begins and not self._is_given_up:
            begin = self._begins.pop(0)
            self._given |= begin.addresses
            self._broken_kernels |= dict.fromkeys(begin.broken_kernels)
            self._addresses |= {name: at for name, at in begin.addresses.items() if name != RENDEZVOUS}
            lost = [name for name in begin.lost if name in self._actors]
            for name in lost:
                self._ended.pop(name, None)
                self._missed.pop(name, None)
            if lost:
                self._say(f"{begin.reason} Replacing {', '.join(lost)}.")
            await self._begin(lost, begin.reason, begin.epoch, begin.device_epoch)
            self._seek()
        problem = self._reach.problem
        if problem and problem != self._told_problem:
            self._say(f"{problem}.")
        self._told_problem = problem
        self._on_change(self._epoch, self._states(), problem, self._reach.unreached)

    async def _kill(self) -> None:
        self._reach.close()
        await super()._kill()

    def _states(self) -> tuple[ChildState, ...]:
        states = []
        for name, child in self._children.items():
            fault, kernel = self._ended.get(name, ("", ""))
            code = child.process.returncode or 0
            is_ready, gap = child.facts is not None, self._missed.get(name)
            states.append(ChildState(name, child.started, child.epoch, is_ready, fault, code, kernel, gap))
        return tuple(states)

    def _say(self, text: str) -> None:
        print(f"pagewire: {text}", file=sys.stderr, flush=True)


def _wrong_files(model: ModelFacts) -> str | None:
    """Why this machine cannot load the model, as a clause; None: it can."""
    try:
        if not Path(model.path).exists():
            return f"{model.path} does not exist there"
        found = fingerprint(Path(model.path), Path(model.adapter) if model.adapter else None)
    except OSError as error:  # of `exists`: a folder on the way may not be looked into
        return f"{model.path} cannot be read: {error.strerror}"
    except PagewireError as error:
        return str(error).removesuffix(".")
    if model.fingerprint and found != model.fingerprint:
        return (
            f"the files in {model.path} are not the lead's (fingerprint {found[:12]}, the lead's has "
            f"{model.fingerprint[:12]})"
        )
    return None


def _why_silent(address: str, *, has_keys: bool) -> str:
    """Why the lead has not answered, as far as this machine can tell: a clause without its subject, the address."""
    url = urlsplit(address)
    try:
        with socket.create_connection((url.hostname or "", url.port or 0), timeout=1.0):
            pass
    except OSError as error:
        return f"cannot be reached ({error.strerror or error})"
    key = "its key file differs from this one" if has_keys else "it has a key file, and --key-file is not given here"
    return f"accepts connections and does not answer: {key}, or it is no lead"
