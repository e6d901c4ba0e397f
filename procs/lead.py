"""The supervisor of an engine that runs on several machines: `pagewire serve MODEL --nnodes 2 --join-address …`.

It runs the core, the api and a part of the ranks, and decides alone about epochs and deaths. The other machines run
followers (`procs/follower.py`), which start and watch the other ranks and do as they are told. `procs/leases.py` says
when a machine counts as lost. Processes of other machines are children of this supervisor like others, except that a
follower reports their states.
"""

import asyncio
import contextlib
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from ..config.config import ServerConfig, num_machines
from ..errors import ConfigError, StartError
from ..ipc.channel import ChannelFull
from ..ipc.codec import DecodeError, Decoder, encode
from ..ipc.control_messages import (
    Assign,
    Away,
    Beat,
    Begin,
    Bound,
    Copying,
    Gone,
    Join,
    Joined,
    Refused,
    StopAll,
    ToFollower,
    ToLead,
)
from ..ipc.epochs import first_epoch
from ..ipc.messages import Facts, Fault, Leave, Ping
from ..ipc.refusals import ZmqRefusals
from ..ipc.zmq_channel import Keys, PeerGone, ZmqContext, ZmqRouter, check_address, read_keys
from .leases import MAX_CLOCK_DIFFERENCE_S, Fleet, Machine, mismatch
from .machine import host_address, listen, unused_address, versions_here
from .model_share import ModelShare
from .reach import Reach
from .remote import RemoteProcess
from .supervisor import START_REPORT_S, STOP_GRACE_S, Child, Supervisor
from .topology import RENDEZVOUS, kind, lost_with, receivers

_MAX_STRANGERS = 8  # hosts with other keys that are named
_SAME_DEATH_S = 1.0  # within which ends of ranks belong together; a follower reports at once


def make_lead(config: ServerConfig) -> "Lead":
    """The supervisor of `--nnodes` machines. Raises ConfigError."""
    service = config.http.service
    if service.join_address is None:
        raise ConfigError(
            f"--nnodes {service.nnodes} needs --join-address tcp://HOST:PORT, an address of this machine that the "
            "others reach."
        )
    url = urlsplit(service.join_address)
    if url.scheme != "tcp" or url.hostname is None or url.port is None:
        raise ConfigError(f"--join-address {service.join_address}: write tcp://HOST:PORT.")
    keys = read_keys(Path(service.key_file)) if service.key_file else None
    check_address(service.join_address, keys)
    if config.engine.data_parallel_size > 1:
        raise ConfigError("--nnodes needs --data-parallel-size 1; start an engine for each part, and a router.")
    return Lead(config, keys=keys)


def _was_killed(child: Child) -> bool:
    return (child.process.returncode or 0) < 0


class Lead(Supervisor):
    """`run` is called once, as of every supervisor."""

    def __init__(self, config: ServerConfig, *, keys: Keys | None, works: bool = True) -> None:
        """`works`: this machine runs the first ranks; else all ranks are of other machines."""
        super().__init__(config, keys=keys)
        ranks = [name for name in self._names if kind(name) == "worker"]
        size = len(ranks) // num_machines(self._service, config.engine.pipeline_parallel_size)
        groups = [tuple(ranks[i : i + size]) for i in range(size if works else 0, len(ranks), size)]
        self._num_stages = config.engine.pipeline_parallel_size
        self._remote = tuple(name for group in groups for name in group)
        self._actors = [name for name in self._names if name not in self._remote]
        self._fleet = Fleet(groups, term=int(time.time()), hang_timeout_s=self._service.hang_timeout_s)
        self._versions = versions_here()
        self._join_address = self._service.join_address or ""
        self._host = host_address(urlsplit(self._join_address).hostname or "")
        self._reach = Reach(self._host)  # the mailboxes of followers that have actors
        self._decoder: Decoder[ToLead] = Decoder(ToLead)
        self._router: ZmqRouter | None = None
        self._share: ModelShare | None = None
        self._copied_at = 0.0  # when a follower last said that more of the model has arrived
        self._listeners: list[socket.socket] = []
        self._moved: set[str] = set()  # actors whose addresses will change
        self._reason = ""  # of the epoch that begins
        self._begun = 0  # the latest epoch that the followers were told
        self._begun_at = 0.0  # when they were (monotonic s)
        self._stopping: StopAll | None = None
        self._waits = ""  # what those wait for that take over from machines that leave, a clause
        self._said: set[str] = set()  # sentences that are printed once
        self._key_refusals: ZmqRefusals | None = None
        self._strangers: dict[str, None] = {}  # hosts whose keys are not ours, since the engine was last complete

    # ── start ────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _gather(self, context: ZmqContext) -> None:
        self._router = context.router(self._join_address)
        self._share = ModelShare(self._host, self._keys, self._config.model)
        self._router.subscribe(asyncio.get_running_loop(), self._read)
        self._key_refusals = self._router.refusals()
        self._key_refusals.subscribe(asyncio.get_running_loop(), self._note_strangers)
        for name in self._actors:  # those that other machines send to
            if any(name in self._receivers(one) for one in self._remote):
                listener = listen(self._host)
                self._listeners.append(listener)
                self._given[name] = f"tcp://{self._host}:{listener.getsockname()[1]}"
                self._mailbox_fds[name] = listener.fileno()
        await self._complete(self._service.start_timeout_s, "--start-timeout-s")
        if self._must_end:
            self._stop_all(StopAll("stopped while starting"))
            return
        epoch = first_epoch(self._fleet.term)
        self._epoch = self._device_epoch = self._restored = epoch
        self._begin_elsewhere(self._names, "The engine starts.")

    @property
    def _ranks(self) -> list[str]:
        return [name for name in self._names if kind(name) == "worker"]

    def _receivers(self, name: str) -> tuple[str, ...]:
        return receivers(name, len(self._ranks), self._service.api_processes, self._num_stages)

    def _waits_for(self, waiting: str) -> str:
        """What the engine does while no machine has these actors, a clause."""
        return f"waiting for a follower for {waiting}{self._tried}"

    @property
    def _tried(self) -> str:
        return f" ({', '.join(self._strangers)} tried with another key file)" if self._strangers else ""

    def _call_for(self, waiting: str) -> str:
        """What the operator is told of it."""
        key = f" --key-file {self._service.key_file}" if self._service.key_file else ""
        return f"{self._waits_for(waiting)}; run there: pagewire launch --join {self._join_address}{key}"

    @property
    def _copies(self) -> str:
        """What the engine waits for while machines that have actors copy the model, a clause; empty: none does."""
        found = [
            f"{machine.name}, which copies the model ({100 * said.done_bytes // said.total_bytes} % of "
            f"{said.total_bytes / 1e9:.2f} GB)"
            for machine in self._fleet.machines
            if machine.actors and machine.is_copying and (said := machine.copying) is not None
        ]
        return f"waiting for {', '.join(found)}" if found else ""

    async def _complete(self, timeout_s: float, flag: str, *, drains: bool = False) -> None:
        """Waits until followers have all actors of other machines and their mailboxes can be reached; longer while they
        copy the model. `drains`: also after the first signal. Raises StartError."""
        now = time.monotonic()
        deadline, next_report, told = now + timeout_s, now + 1.0, ""
        while not self._is_complete and not (self._must_end and not drains) and len(self._signals) < 2:
            for machine in self._fleet.deal():
                self._send(machine.peer, Assign(machine.actors))
            if drains:  # ranks are replaced in any case
                for machine in self._fleet.deal_heirs():
                    self._send(machine.peer, Assign(machine.actors))
                self._relieve(list(self._fleet.ready_heirs))
            now = time.monotonic()
            deadline = max(deadline, self._copied_at + timeout_s)
            waiting = ", ".join(name for group in self._fleet.missing for name in group)
            problem = self._obstacle
            clause = self._waits_for(waiting) if waiting else self._copies or problem
            if now > deadline and problem and not waiting:
                raise StartError(f"{problem} ({timeout_s:g} s; see {flag}).")
            if now > deadline:
                raise StartError(
                    f"No follower has joined at {self._join_address} for {waiting or 'all ranks'}{self._tried} "
                    f"({timeout_s:g} s; see {flag})."
                )
            if problem and clause == problem and clause != told:
                next_report = now + START_REPORT_S  # it has been said
            if now > next_report and clause:
                next_report = now + START_REPORT_S
                text = self._call_for(waiting) if waiting else f"{clause}."
                print(f"pagewire: {text}", file=sys.stderr, flush=True)
            if clause and clause != told:
                told = clause
                self._tell_apis(told)
            await self._next_event(0.1)
            self._check_followers()
        self._strangers.clear()
        if told:
            self._tell_apis("")

    @property
    def _is_complete(self) -> bool:
        return self._fleet.is_complete and self._reach.is_complete and not self._obstacle

    @property
    def _obstacle(self) -> str:
        addresses = self._given | self._fleet.addresses  # a follower may still look for a machine that was replaced
        found = (
            machine.problem
            for machine in self._fleet.machines
            if any(addresses.get(name) == address for name, address in machine.unreached.items())
        )
        return self._reach.problem or next(found, "")

    def _tell_apis(self, waits_for: str) -> None:
        """For /health; at the engine's start there are none yet."""
        for name in self._apis:
            if name in self._children:
                self._outboxes[name].send(Ping(dict(self._fleet.late_beats), waits_for))

    def _begin_elsewhere(self, lost: Sequence[str], reason: str) -> None:
        """Tells the followers of this epoch, and counts their new processes among the children."""
        self._begun, self._begun_at = self._epoch, time.monotonic()
        self._moved.difference_update(lost)
        addresses = self._fleet.addresses
        # A new port, where no rank of an earlier group comes. Stages that send messages need none, since the ranks of
        # each are on one machine.
        if not self._config.stages_by_mail and any(name in lost for name in self._ranks):
            first = next((m.bound for m in self._fleet.machines if m.bound and "worker" in m.actors), None)
            addresses[RENDEZVOUS] = unused_address(self._host) if first is None else first.rendezvous
        self._given |= addresses
        with contextlib.suppress(AttributeError):  # there are none before the start
            self._addresses |= {name: at for name, at in addresses.items() if name != RENDEZVOUS}
        for name in self._remote:
            if name in lost:
                child = self._children[name] = Child(name, RemoteProcess(), self._epoch)
                child.exited.add_done_callback(partial(self._on_exit, child))
        begin = Begin(
            self._epoch, self._device_epoch, tuple(lost), reason, dict(self._given), tuple(self._broken_kernels)
        )
        for machine in self._fleet.begin(begin):
            self._send(machine.peer, begin)

    # ── replacement ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def _replace(self, died: Sequence[Child]) -> None:
        """A rank that ends takes those of other machines with it, and its own end may be reported after theirs. So all
        ends of ranks within a moment are one death: of one that was killed, if there is any."""
        ranks = [child for child in died if kind(child.name) == "worker"]
        if ranks or any(kind(child.name) == "core" for child in died):
            self._relieve(list(self._fleet.ready_heirs))
        if ranks:
            deadline = time.monotonic() + _SAME_DEATH_S
            while not any(_was_killed(child) for child in ranks) and time.monotonic() < deadline:
                await self._next_event(0.05)
                self._check_followers()
                ranks += [one for one in self._dead if kind(one.name) == "worker" and one not in ranks]
            ranks.sort(key=lambda child: (not self._has_broken(child), not _was_killed(child)))
            for child in ranks[1:]:
                child.may_end = True
        await super()._replace([*ranks[:1], *(child for child in died if kind(child.name) != "worker")])

    def _has_broken(self, child: Child) -> bool:
        """The check of a kernel broke its device."""
        return (fault := self._faults.get(child.name)) is not None and bool(fault.broken_kernel)

    def _lost_with(self, name: str) -> tuple[str, ...]:
        """Actors connect to addresses when they start: those that send to an actor that moves are replaced, too."""
        num_ranks = self._config.num_ranks
        lost = dict.fromkeys(lost_with(name, num_ranks))
        for moved in self._moved & lost.keys():
            for sender in self._names:
                if moved in self._receivers(sender):
                    lost |= dict.fromkeys(lost_with(sender, num_ranks))
        return tuple(lost)

    def _also_lost(self, lost: Sequence[str]) -> list[str]:
        """Those that have to be replaced, too, since a machine with some of these actors was lost meanwhile."""
        found = dict.fromkeys(name for one in lost for name in self._lost_with(one))
        return [name for name in found if name in self._children and name not in lost]

    async def _begin(
        self, lost: Sequence[str], reason: str, epoch: int, device_epoch: int, *, is_planned: bool = False
    ) -> None:
        self._reason = reason
        await super()._begin(lost, reason, epoch, device_epoch, is_planned=is_planned)

    async def _spawn(self, actors: Sequence[str]) -> None:
        if self._begun < self._epoch:  # a replacement: `_gather` has begun the first epoch
            if any(name in self._remote for name in actors):
                await self._complete(self._service.outage_wait, "--outage-wait", drains=True)
                if not self._is_complete:
                    return
                if more := self._also_lost(actors):
                    lost = (*actors, *more)  # no request is suspected: those of the first death are already
                    await self._begin(lost, self._reason, self._epoch + 1, self._device_epoch + 1, is_planned=True)
                    return
            self._begin_elsewhere(actors, self._reason)
        if here := [name for name in actors if name not in self._remote]:
            await super()._spawn(here)

    async def _look_elsewhere(self) -> None:
        self._check_followers()
        await self._end_standstill()
        if not self._must_end:
            await self._see_off()

    # ── connections that cannot be made again ────────────────────────────────────────────────────────────────────────

    @property
    def _standstill(self) -> str:
        """Why the engine has work and gets no further, a sentence; empty: it does, or the cause is another one. A
        mailbox that cannot be reached is not enough: connections that were made before may work on."""
        problem, core = self._obstacle, self._children.get("core")
        if not problem or core is None:
            return ""
        if core.step_age_s > self._fleet.wait_s and core.epoch == self._epoch:
            return f"No step has ended for {core.step_age_s:.0f} s: {problem}."
        waits_s = time.monotonic() - self._begun_at
        if self._restored < self._epoch and waits_s > self._fleet.wait_s:
            return f"New processes do not get ready for {waits_s:.0f} s: {problem}."
        return ""

    async def _end_standstill(self) -> None:
        """Begins the next epoch, with new ranks, as after messages that were lost: no process has failed. It begins
        when all mailboxes can be reached. Raises StartError if that takes too long."""
        if not (reason := self._standstill):
            return
        self._deaths.add("the connections between machines", "could not be made again", time.monotonic())
        self._check_deaths(reason)
        lost = [name for name in self._lost_with("worker") if name in self._children]
        self._print(f"{reason} Replacing {', '.join(lost)}.")
        await self._begin(lost, reason, self._epoch + 1, self._device_epoch + 1, is_planned=True)

    def _ping(self) -> Ping:
        return Ping(dict(self._fleet.late_beats), self._waits or self._obstacle)

    # ── machines that leave ──────────────────────────────────────────────────────────────────────────────────────────

    async def _see_off(self) -> None:
        """Has others take over from machines that leave, as soon as they can. If none can come, the engine ends."""
        for machine in self._fleet.deal_heirs():
            self._send(machine.peer, Assign(machine.actors))
        leaving, ready = self._fleet.leaving, self._fleet.ready_heirs
        alone = [machine for machine in leaving if self._fleet.heir(machine) is None]
        may_come = self._ask_for_room(len(alone))
        waits = ""
        if ready:
            await self._hand_over(ready)
        elif alone and not may_come:
            self._elsewhere.heard(Leave(alone[0].actors), is_news=True)
        elif leaving:
            who = ", ".join(machine.name for machine in leaving)
            names = ", ".join(name for machine in alone for name in machine.actors)
            if alone:
                waits = self._waits_for(f"{names}, because {who} leaves")
            else:
                waits = f"{self._copies or 'waiting for the one that takes over'}, because {who} leaves"
        if waits and waits != self._waits:
            print(f"pagewire: {waits}.", file=sys.stderr, flush=True)
        self._waits = waits

    def _ask_for_room(self, num_machines: int) -> bool:
        """So many machines leave, and no other one is there for their actors. Whether one may come unasked."""
        return False

    async def _hand_over(self, heirs: Mapping[Machine, Machine]) -> None:
        """`heirs`: by the machines that leave."""
        parts = [f"{heir.name} takes over {', '.join(heir.actors)} from {one.name}" for one, heir in heirs.items()]
        names = [name for machine in heirs for name in machine.actors]
        self._relieve(list(heirs))
        lost = [name for name in self._children if any(name in self._lost_with(moved) for moved in names)]
        reason = f"{'; '.join(parts)}, which leaves."
        self._print(f"{reason} Replacing {', '.join(lost)}.")
        await self._begin(lost, reason, self._epoch + 1, self._device_epoch + 1, is_planned=True)

    def _relieve(self, machines: Sequence[Machine]) -> None:
        """Their heirs have their actors in the next epoch, which begins when they have ended their processes."""
        for machine in machines:
            self._moved.update(machine.actors)
            self._fleet.relieve(machine)
            self._send(machine.peer, Gone())

    def _check_followers(self) -> None:
        """Called a few times in a second, whatever the lead waits for."""
        for machine in self._fleet.overdue(time.monotonic()):
            silent_s = time.monotonic() - machine.heard_at
            self._lose(machine, f"has not answered for {silent_s:.1f} s")
        self._reach.seek(self._fleet.addresses)
        if problem := self._reach.problem:
            self._say_once(f"{problem}.")

    def _lose(self, machine: Machine, how: str) -> None:
        """This machine's processes have ended, or it has lost its lease for them. `how`: a clause without a subject."""
        names = self._fleet.lose(machine)
        self._send(machine.peer, Gone())
        self._woken.set()
        if not names:
            if machine.actors:
                self._print(f"{machine.name}, which was to run {', '.join(machine.actors)}, {how}.")
            return
        self._moved.update(names)
        running = [
            child
            for name in names
            if (child := self._children.get(name)) is not None and isinstance(child.process, RemoteProcess)
        ]
        summary = f"{machine.name}, the machine of {', '.join(names)}, {how}"
        if running and all(child.process.returncode is not None for child in running):  # they are being replaced
            self._print(f"{summary}.")
        for i, child in enumerate(running):
            assert isinstance(child.process, RemoteProcess)
            if child.process.returncode is None:
                self._faults[child.name] = Fault(child.name, summary, "", 1)
                child.may_end = child.may_end or i > 0  # one death, not one of each process
                child.process.end(-signal.SIGKILL)

    # ── messages of followers ────────────────────────────────────────────────────────────────────────────────────────

    def _read(self) -> None:
        """Handles what followers have sent, in whatever the supervisor is waiting for: their leases depend on it."""
        assert self._router is not None
        while (frames := self._router.receive()) is not None:
            peer, data = frames[0], frames[-1]
            try:
                message = self._decoder.decode(data)
            except DecodeError:
                self._send(peer, Refused("The lead cannot read this follower's messages: their versions differ."))
                continue
            self._handle(peer, message)
        if self._router.has_mail():
            asyncio.get_running_loop().call_soon(self._read)
        self._woken.set()

    def _handle(self, peer: bytes, message: ToLead) -> None:
        if isinstance(message, Join):
            self._join(peer, message)
            return
        machine = self._fleet.get(peer)
        if machine is None and isinstance(message, Away):
            self._fleet.remove(peer)
            return
        if machine is None:
            self._send(peer, StopAll("The engine ends.") if self._stopping is not None else Gone())
            return
        match message:
            case Beat():
                self._fleet.heard(machine, message, time.monotonic())
                if machine.problem:
                    self._say_once(f"{machine.problem}.")
                self._send(peer, self._fleet.answer(machine))
                self._follow(machine)
                for due in self._fleet.due(machine):
                    self._send(peer, due)
                if self._stopping is not None:
                    self._send(peer, self._stopping)
            case Copying():
                if machine.copying is None or message.done_bytes > machine.copying.done_bytes:
                    self._copied_at = time.monotonic()
                machine.copying = message
            case Bound():
                machine.bound = message
            case Refused():
                self._refuse(message.reason)
                self._lose(machine, "cannot take part")
            case Leave():
                self._leave(machine)
            case Away():
                self._lose(machine, "has left")

    def _note_strangers(self) -> None:
        assert self._key_refusals is not None
        for host in self._key_refusals.look():
            if host not in self._strangers and len(self._strangers) < _MAX_STRANGERS:
                self._strangers[host] = None
                self._say_once(
                    f"{host} was refused at {self._join_address}: its key file is not the one here. "
                    f"Copy {self._service.key_file or 'the key file'} there."
                )
                self._woken.set()

    def _join(self, peer: bytes, join: Join) -> None:
        if (before := self._fleet.get(join.previous)) is not None:
            self._lose(before, "has lost its connection to the lead and ended its processes")
        is_new = self._fleet.get(peer) is None
        config = self._config
        on_gpu = config.kernels is None
        reason = None
        if is_new:
            clause = mismatch(self._versions, join.versions, level=config.cpu_level)
            size = max((len(group) for group in self._fleet.groups), default=0)
            if clause is None and on_gpu and join.num_gpus < size:
                clause = f"it has {join.num_gpus} GPUs, and a machine of this engine needs {size}"
            reason = None if clause is None else f"{join.name} cannot join: {clause}."
            reason = reason or self._fleet.join(peer, join, time.monotonic())
        if reason is not None:
            self._refuse(reason)
            self._send(peer, Refused(reason))
            return
        if not is_new:
            self._fleet.join(peer, join, time.monotonic())
        else:
            difference_s = join.clock - time.time()
            if abs(difference_s) > MAX_CLOCK_DIFFERENCE_S:
                print(
                    f"pagewire: the clock of {join.name} differs by {difference_s:+.0f} s from this machine's: "
                    "times in its log are not comparable.",
                    file=sys.stderr,
                    flush=True,
                )
        self._send(
            peer,
            Joined(
                join.number,
                self._fleet.term,
                self._service.hang_timeout_s,
                time.time(),
                msgspec.json.encode(config),
                msgspec.json.encode(self._service),
                self._share.address if self._share is not None else "",
            ),
        )

    def _refuse(self, reason: str) -> None:
        """`reason`: why a follower cannot take part, a sentence."""
        self._say_once(reason)

    def _say_once(self, sentence: str) -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            print(f"pagewire: {sentence}", file=sys.stderr, flush=True)

    def _follow(self, machine: Machine) -> None:
        """Takes over the states of a follower's processes."""
        for state in machine.children:
            child = self._children.get(state.name)
            if child is None or not isinstance(child.process, RemoteProcess) or state.name not in machine.actors:
                continue
            if child.process.returncode is not None or state.started < child.started:
                continue
            if state.fault:
                self._faults[child.name] = Fault(child.name, state.fault.removesuffix("."), "", 1, state.broken_kernel)
                child.process.end(state.code or 1)
                continue
            if state.gap is not None:
                self._on_gap(state.gap)
            if state.is_ready and state.epoch >= child.epoch:
                child.epoch = state.epoch
                child.facts = child.facts or Facts()

    def _leave(self, machine: Machine) -> None:
        if self._stopping is not None or not machine.begins_at:  # it has ended, or has no part yet
            self._fleet.remove(machine.peer)
        else:
            machine.is_leaving = True

    def _send(self, peer: bytes, message: ToFollower) -> None:
        assert self._router is not None
        with contextlib.suppress(PeerGone, ChannelFull):  # it gets what it misses after its next `Beat`
            self._router.send(peer, encode(message))

    # ── stop ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _stop(self, reason: str, grace_s: float = 0.0, *, hands_over: bool = False) -> int:
        code = await super()._stop(reason, grace_s, hands_over=hands_over)
        self._stop_all(StopAll(reason))
        deadline = time.monotonic() + STOP_GRACE_S
        while any(machine.begins_at for machine in self._fleet.machines) and time.monotonic() < deadline:
            await self._next_event(0.1)
        return code

    def _stop_all(self, message: StopAll) -> None:
        if self._stopping is None:
            self._stopping = message
            for machine in self._fleet.machines:
                self._send(machine.peer, message)

    async def _kill(self) -> None:
        if self._router is not None:
            self._stop_all(StopAll(self.failure or "The lead has failed.", is_failure=True))
        await super()._kill()
        if self._router is not None:
            self._router.close()
        self._reach.close()
        if self._share is not None:
            self._share.close()
        for listener in self._listeners:
            listener.close()
