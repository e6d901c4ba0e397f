"""Leases of followers: who may run processes of the engine, and until when. No sockets, no processes, no clock.

The lead (`procs/lead.py`) alone declares a machine lost. It must not start other processes in the place of a follower's
before these have ended, although it cannot ask a machine that does not answer. So the follower has a lease, and ends
its processes when the lease runs out:

- Each message of the follower has a number, which the lead's answer repeats. An answer extends the lease to `lease_s`
  after the moment at which the follower *sent* that message.
- The lead waits `wait_s`, which is longer, from the moment at which it *received* the follower's last message.
- A follower that leaves goes on until another machine has mailboxes for its actors. Then it is relieved: it ends its
  processes and says so, and the lead waits for that word, or as long as for any other follower.

A message is received after it was sent, so the lease has run out before the lead acts, however long messages travel,
also if only one direction works, and without comparing two clocks. Both measure durations only.
"""

from collections.abc import Mapping, Sequence

from msgspec import Struct

from ..ipc.control_messages import Assign, Beat, Begin, Bound, ChildState, Copying, Join, Versions

MAX_CLOCK_DIFFERENCE_S = 5.0  # of the two machines' time of day; more is worth a line for the operator


class LeaseTimes(Struct, frozen=True):
    """Durations that both sides compute from `--hang-timeout-s`."""

    beat_s: float  # between two beats of a follower
    lease_s: float
    wait_s: float


def lease_times(hang_timeout_s: float) -> LeaseTimes:
    return LeaseTimes(beat_s=min(0.5, hang_timeout_s / 20), lease_s=hang_timeout_s / 2, wait_s=0.7 * hang_timeout_s)


class Lease:
    """A follower's lease of one incarnation. Times are seconds of one clock that also runs while the machine sleeps."""

    def __init__(self) -> None:
        self._lease_s = 0.0
        self._sent: dict[int, float] = {}  # number → when it was sent; those that may be answered yet
        self._number = 0
        self.ends_at: float | None = None  # None: there is no lease yet

    def send(self, now: float) -> int:
        """The number of a `Join` or `Beat` that is sent now."""
        self._number += 1
        self._sent[self._number] = now
        return self._number

    def begin(self, number: int, lease_s: float, now: float) -> bool:
        """The lead has answered the `Join` of this number. False: too late for a lease, and it answers later ones."""
        sent_at = self._sent.get(number)
        if sent_at is None or now >= sent_at + lease_s:
            return False
        self._lease_s = lease_s
        self.confirm(number)
        return True

    def confirm(self, number: int) -> None:
        """The lead has answered the message of this number."""
        if (sent_at := self._sent.get(number)) is None:
            return
        for old in [one for one in self._sent if one <= number]:
            del self._sent[old]
        ends_at = sent_at + self._lease_s
        self.ends_at = ends_at if self.ends_at is None else max(self.ends_at, ends_at)

    def has_run_out(self, now: float) -> bool:
        return self.ends_at is not None and now >= self.ends_at


class Machine:
    """A follower that has joined, as the lead knows it."""

    def __init__(self, peer: bytes, join: Join, now: float) -> None:
        self.peer = peer  # its incarnation
        self.name = join.name
        self.num_gpus = join.num_gpus
        self.number = join.number  # of its latest message
        self.heard_at = now
        self.actors: tuple[str, ...] = ()  # that it is to run; empty: it is a spare
        self.is_leaving = False  # it works until another one takes over
        self.copying: Copying | None = None  # what it has last said of it
        self.bound: Bound | None = None  # the addresses of their mailboxes
        self.begins_at = 0  # the epoch of the first `Begin` that concerns it; 0: none yet
        self.epoch = 0  # of the latest `Begin` that it has carried out
        self.children: tuple[ChildState, ...] = ()
        self.problem = ""  # why its processes cannot work, as of the latest beat
        self.unreached: Mapping[str, str] = {}  # actor → address, of the mailboxes that it names

    @property
    def is_copying(self) -> bool:
        """Whether it does not have the whole model yet."""
        said = self.copying
        return self.bound is None and said is not None and said.done_bytes < said.total_bytes

    def heard(self, beat: Beat, now: float) -> None:
        if beat.number > self.number:
            self.number, self.heard_at = beat.number, now
            self.epoch, self.children = beat.epoch, beat.children
            self.problem, self.unreached = beat.problem, beat.unreached


class Fleet:
    """The followers of one lead, and which of them runs which actors."""

    def __init__(self, groups: Sequence[tuple[str, ...]], *, term: int, hang_timeout_s: float) -> None:
        """`groups`: the actors of other machines, each group for one machine. `term`: of the lead."""
        self.groups = tuple(groups)
        self._times = lease_times(hang_timeout_s)
        self.term = term
        self._machines: dict[bytes, Machine] = {}  # in the order of joining
        self._relieved: dict[bytes, Machine] = {}  # others have their actors, and they end their processes
        self._begins: list[Begin] = []
        self._number = 0
        self.late_beats: dict[str, int] = {}  # by name: leases that were half over when the follower was heard again

    @property
    def machines(self) -> tuple[Machine, ...]:
        return tuple(self._machines.values())

    # ── who belongs to it ────────────────────────────────────────────────────────────────────────────────────────────

    def join(self, peer: bytes, join: Join, now: float) -> str | None:
        """Adds a follower. Why it is refused, in a sentence; None: it belongs to the engine now.

        Before the first epoch, a lead whose clock is behind an earlier lead's takes a later term."""
        if (machine := self._machines.get(peer)) is not None:  # it was repeated before the answer came
            if join.number > machine.number:
                machine.number, machine.heard_at = join.number, now
            return None
        if self._begins:
            if join.last_term > self.term:
                return (
                    f"{join.name} has worked for a lead of term {join.last_term}, and this one has term {self.term}: "
                    "another lead has been started after it. End one of them."
                )
        else:
            self.term = max(self.term, join.last_term + 1)
        self._machines[peer] = Machine(peer, join, now)
        self.late_beats.setdefault(join.name, 0)
        return None

    def heard(self, machine: Machine, beat: Beat, now: float) -> None:
        """A follower, or this lead, may have been too busy, or messages slow: a warning before leases are lost."""
        self.late_beats[machine.name] += now - machine.heard_at >= self._times.lease_s / 2
        machine.heard(beat, now)

    def get(self, peer: bytes) -> Machine | None:
        return self._machines.get(peer)

    def remove(self, peer: bytes) -> Machine | None:
        """Forgets a follower, whose actors may then be given to another one."""
        self._relieved.pop(peer, None)
        return self._machines.pop(peer, None)

    def lose(self, machine: Machine) -> tuple[str, ...]:
        """Forgets a follower whose processes have ended. Returns their actors: none of an heir, since another machine
        still runs those, nor of one that has begun nothing."""
        self.remove(machine.peer)
        return machine.actors if machine.begins_at else ()

    def relieve(self, machine: Machine) -> None:
        """Its heir has its actors now. Until it is removed, its processes may run, and no others begin."""
        del self._machines[machine.peer]
        self._relieved[machine.peer] = machine
        machine.actors = ()

    @property
    def wait_s(self) -> float:
        """Seconds without a sign of life after which a machine counts as lost."""
        return self._times.wait_s

    def overdue(self, now: float) -> list[Machine]:
        """Followers from which nothing came for so long that their processes have ended."""
        known = (*self._machines.values(), *self._relieved.values())
        return [machine for machine in known if now - machine.heard_at >= self.wait_s]

    # ── who runs what ────────────────────────────────────────────────────────────────────────────────────────────────

    def deal(self) -> list[Machine]:
        """Gives the groups that no machine has to spares, the longest joined first of those that have the model.
        Returns these."""
        return self._give(self.missing)

    def deal_heirs(self) -> list[Machine]:
        """Gives the groups of machines that leave to spares, which bind mailboxes for them and begin nothing yet.
        Returns these."""
        return self._give([machine.actors for machine in self.leaving if self.heir(machine) is None])

    @property
    def leaving(self) -> list[Machine]:
        """Those that leave and have actors."""
        return [machine for machine in self._machines.values() if machine.is_leaving and machine.actors]

    def heir(self, machine: Machine) -> Machine | None:
        """The machine that takes over from one that leaves."""
        others = (one for one in self._machines.values() if one is not machine)
        return next((one for one in others if one.actors == machine.actors and not one.is_leaving), None)

    @property
    def ready_heirs(self) -> dict[Machine, Machine]:
        """By the machines that leave: those that can take over now, since their mailboxes exist."""
        heirs = {machine: self.heir(machine) for machine in self.leaving}
        return {machine: heir for machine, heir in heirs.items() if heir is not None and heir.bound is not None}

    @property
    def _working(self) -> list[Machine]:
        """Those that have actors, without the heirs of others that still work."""
        heirs = [self.heir(machine) for machine in self.leaving]
        return [machine for machine in self._machines.values() if machine.actors and machine not in heirs]

    def _give(self, groups: Sequence[tuple[str, ...]]) -> list[Machine]:
        dealt = []
        for group in groups:
            spares = [one for one in self._machines.values() if not one.actors and not one.is_leaving]
            if not spares:
                break
            spare = min(spares, key=lambda machine: machine.is_copying)  # the first of the least
            spare.actors = group
            dealt.append(spare)
        return dealt

    @property
    def missing(self) -> list[tuple[str, ...]]:
        """Groups that no machine has."""
        taken = {machine.actors for machine in self._machines.values()}
        return [group for group in self.groups if group not in taken]

    @property
    def is_complete(self) -> bool:
        """Every group has a machine whose mailboxes exist, and no relieved one may still run anything."""
        ready = {machine.actors for machine in self._machines.values() if machine.bound is not None}
        return not self._relieved and all(group in ready for group in self.groups)

    @property
    def addresses(self) -> dict[str, str]:
        """Of the actors of all machines."""
        return {
            name: address
            for machine in self._working
            if machine.bound is not None
            for name, address in machine.bound.addresses.items()
        }

    # ── what it is told ──────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, begin: Begin) -> list[Machine]:
        """A new epoch. Returns the machines to which `begin` is sent; those that miss it get it again (`due`)."""
        self._begins.append(begin)
        working = self._working
        for machine in working:
            machine.begins_at = machine.begins_at or begin.epoch
        first = min((max(machine.begins_at, machine.epoch) for machine in working), default=begin.epoch)
        self._begins = [one for one in self._begins if one.epoch >= first]
        return working

    def due(self, machine: Machine) -> list[Assign | Begin]:
        """What this machine has to be told (again), in order."""
        if machine.actors and machine.bound is None:
            return [Assign(machine.actors)]
        if not machine.begins_at:
            return []
        return [begin for begin in self._begins if begin.epoch > max(machine.epoch, machine.begins_at - 1)]

    def answer(self, machine: Machine) -> Beat:
        self._number += 1
        return Beat(self._number, machine.number)


def mismatch(ours: Versions, theirs: Versions, *, level: str | None) -> str | None:
    """What is different on a follower's machine, as a clause; None: nothing. `level`: the C kernels that all ranks
    load; None: they use others."""
    pairs: Mapping[str, tuple[object, object]] = {
        "pagewire": (ours.package, theirs.package),
        "message schema": (ours.schema, theirs.schema),
        "Python": (ours.python, theirs.python),
        "torch": (ours.torch, theirs.torch),
    }
    for what, (here, there) in pairs.items():
        if here != there:
            return f"it has {what} {there}, and the lead has {here}; install the same version on both"
    if level is not None and level not in theirs.levels:
        common = next((one for one in ours.levels if one in theirs.levels), "torch")
        theirs_best = theirs.levels[0] if theirs.levels else "none"
        return (
            f"its best C kernels are {theirs_best}, and the lead uses {level}; start that with --cpu-kernels {common}"
        )
    return None
