"""What the supervisor and everyone else tell each other. `messages` has all names of this file."""

from msgspec import Struct


class Facts(Struct, frozen=True, array_like=True):
    """What an actor found out while it started."""

    timings: dict[str, float] = {}  # part of the start → seconds, in order
    notes: tuple[str, ...] = ()  # lines for the operator, such as the KV accounting


class Ready(Struct, frozen=True, array_like=True, tag=True):
    """An actor is up and its mailbox is served."""

    name: str
    schema: int
    facts: Facts
    epoch: int = 1  # in which it began


class Serving(Struct, frozen=True, array_like=True, tag=True):
    """api → supervisor: the port is open."""

    url: str


class Fault(Struct, frozen=True, array_like=True, tag=True):
    """An actor cannot go on. `summary` is one sentence for the operator; `trace` is for us, empty for user errors."""

    name: str
    summary: str
    trace: str
    exit_code: int


class Serve(Struct, frozen=True, array_like=True, tag=True):
    """supervisor → api: everyone is ready, open the port."""


class Ping(Struct, frozen=True, array_like=True, tag=True):
    """supervisor → anyone, twice a second: answered by the loop that does the work, so that a hang is seen."""


class Pong(Struct, frozen=True, array_like=True, tag=True):
    """The answer to `Ping`."""

    name: str
    epoch: int = 1  # the last one that it has heard of: its state is of this epoch
    progress: int = 0  # grows with everything it completes
    is_busy: bool = False  # something has begun and is not complete


class Reset(Struct, frozen=True, array_like=True, tag=True):
    """supervisor → anyone: a process has died. What was on its way is void, and another epoch begins.

    Everyone forgets what belongs to requests of the api, whose gateway submits them again after `Restored`. With
    another `device_epoch` core and workers forget what they have of each other, too."""

    epoch: int
    device_epoch: int
    lost: tuple[str, ...]  # names of the processes that are replaced
    reason: str  # one sentence, for /health


class Restored(Struct, frozen=True, array_like=True, tag=True):
    """supervisor → api: all processes behind the api are up and of this epoch."""

    epoch: int


class Stop(Struct, frozen=True, array_like=True, tag=True):
    """supervisor → anyone: end in order within `grace_s` seconds."""

    grace_s: float
    reason: str
    hands_over: bool = False  # to an api: another one has the port now; serve the connections that there are
    is_failure: bool = False  # to an api: the engine is broken, so open requests fail and /health is 503


class Leave(Struct, frozen=True, array_like=True, tag=True):
    """supervisor → every part of another launch → its supervisor: the sender's launch ends in order.

    The engine ends with it: the launch that has the api drains first, and the others wait for it."""

    names: tuple[str, ...]  # of the parts of the sender's launch


class Swap(Struct, frozen=True, array_like=True, tag=True):
    """api → supervisor: serve another model, or this one otherwise. `Swapped` answers."""

    name: str  # of the api process
    number: int  # of its question
    changes: bytes  # a JSON object of settings by name
    version: int | None = None  # go back to this one, with the changes
    must_drain: bool = False  # do not try to have both in memory


class Swapped(Struct, frozen=True, array_like=True, tag=True):
    """supervisor → api: what becomes of a `Swap`."""

    number: int
    status: int  # of HTTP: 200, it is served; 202, it will be once open requests have ended; 4xx, 5xx: it is not
    detail: str
