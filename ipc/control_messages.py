"""Messages between the lead of an engine and its followers, the launches on other machines (`procs/lead.py`).

A follower connects a DEALER socket to the ROUTER of the lead. Each frame is one message, encoded as in `messages`. The
name of the DEALER is random bytes, the follower's incarnation: it draws new ones each time that it joins.

A connection that breaks may lose messages. Each message therefore says what is, not what has changed, and is repeated
until a `Beat` or its answer shows that it has arrived.
"""

from typing import Annotated

from msgspec import Meta, Struct

from .messages import Gap, Leave

Epoch = Annotated[int, Meta(ge=0)]


class Versions(Struct, frozen=True, array_like=True):
    """What must be equal on all machines of an engine, so that all ranks sample the same tokens."""

    package: str
    schema: int  # `SCHEMA_VERSION`
    python: str  # major and minor version
    torch: str
    levels: tuple[str, ...]  # of the C kernels that this machine can run, the best one first


class ChildState(Struct, frozen=True, array_like=True):
    """One process of a follower."""

    name: str
    started: Epoch  # in which it was started
    epoch: Epoch  # the latest that it has confirmed
    is_ready: bool
    fault: str = ""  # why it has ended or was killed, one sentence; empty: it runs
    code: int = 0  # its exit code if it has ended; negative: the signal that killed it
    broken_kernel: str = ""  # the GPU kernel whose check broke its device; empty: none
    gap: Gap | None = None  # messages to it were lost


# ── follower → lead ──────────────────────────────────────────────────────────────────────────────────────────────────


class Join(Struct, frozen=True, array_like=True, tag=True):
    """Asks for work, when all earlier processes of the follower have ended. Repeated until an answer comes."""

    number: int  # counts `Join` and `Beat`, from 1
    name: Annotated[str, Meta(max_length=256)]  # for messages
    versions: Versions
    num_gpus: int
    clock: float  # seconds since 1970
    previous: bytes = b""  # its incarnation before this one
    last_term: Annotated[int, Meta(ge=0, lt=2**32)] = 0  # the latest that it has worked in; 0: none


class Copying(Struct, frozen=True, array_like=True, tag=True):
    """The follower copies the model (`file_messages`), and takes no actors before it has all of it. Sent each second,
    and at the end."""

    done_bytes: Annotated[int, Meta(ge=0)]
    total_bytes: Annotated[int, Meta(ge=0)]


class Bound(Struct, frozen=True, array_like=True, tag=True):
    """Answers `Assign`: the mailboxes of the actors exist, although no process reads them yet. Sent again after each
    new epoch if the rendezvous is there: the next group of ranks gets another one."""

    addresses: dict[str, str]  # actor → ZeroMQ address
    rendezvous: str  # tcp://host:port where ranks can meet, if the first rank is among the actors


class Away(Struct, frozen=True, array_like=True, tag=True):
    """A follower that leaves has ended its processes, though the engine goes on. It is the last message, and a lead
    that does not get it learns the same by silence."""


# ── lead → follower ──────────────────────────────────────────────────────────────────────────────────────────────────


class Joined(Struct, frozen=True, array_like=True, tag=True):
    """The follower belongs to the engine, as a spare until `Assign`."""

    number: int  # of the `Join`
    term: Annotated[int, Meta(ge=0, lt=2**32)]
    hang_timeout_s: float  # from which both sides compute the times of the lease
    clock: float  # seconds since 1970
    engine: bytes  # `EngineConfig`, JSON
    service: bytes  # `ServiceOptions`, JSON
    files: str = ""  # tcp://host:port of the lead, where a follower that lacks the model can copy it


class Gone(Struct, frozen=True, array_like=True, tag=True):
    """The lead does not know this follower, or counts it as lost: it ends its processes and joins again. To one that
    leaves: another one takes over, so it ends its processes, answers `Away` and ends."""


class Assign(Struct, frozen=True, array_like=True, tag=True):
    """The actors that the follower is to run."""

    actors: tuple[str, ...]


class Begin(Struct, frozen=True, array_like=True, tag=True):
    """A new epoch. The follower starts those of the lost actors that are its own, and sends `Reset` to its others."""

    epoch: Epoch
    device_epoch: Epoch
    lost: tuple[str, ...]
    reason: str
    addresses: dict[str, str]  # of all mailboxes that other machines reach, and of the rendezvous
    broken_kernels: tuple[str, ...] = ()  # GPU kernels that no rank uses


class StopAll(Struct, frozen=True, array_like=True, tag=True):
    """The engine ends. The follower ends its processes, answers `Leave` and ends, too."""

    reason: str
    is_failure: bool = False  # the lead has failed and may come back: the follower joins again


# ── both ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Beat(Struct, frozen=True, array_like=True, tag=True):
    """The follower sends it several times within a lease and whenever a process changes; the lead answers each."""

    number: int
    echo: int  # the number of the latest message of the other side
    epoch: Epoch = 0  # of the latest `Begin` that the follower has carried out
    children: tuple[ChildState, ...] = ()
    problem: str = ""  # mailboxes that its processes cannot reach, a sentence without its full stop; empty: none
    unreached: dict[str, str] = {}  # actor → address, of these mailboxes


class Refused(Struct, frozen=True, array_like=True, tag=True):
    """The follower cannot work with this lead, or the lead with this follower. It ends with exit code 2."""

    reason: str  # one sentence with the values of both


ToLead = Join | Copying | Bound | Beat | Refused | Leave | Away
ToFollower = Joined | Gone | Assign | Begin | StopAll | Beat | Refused
