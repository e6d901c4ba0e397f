"""Messages between the supervisor and the other processes."""

from msgspec import Struct


class Facts(Struct, frozen=True, array_like=True):
    """What an actor reports of its start."""

    timings: dict[str, float] = {}  # part of the start → seconds, in order
    notes: tuple[str, ...] = ()  # lines for the operator, such as the size of the KV cache


class Ready(Struct, frozen=True, array_like=True, tag=True):
    """An actor has started and reads its mailbox."""

    name: str
    schema: int
    facts: Facts
    epoch: int = 1  # in which it started


class Serving(Struct, frozen=True, array_like=True, tag=True):
    """api → supervisor: the port is open."""

    url: str


class Fault(Struct, frozen=True, array_like=True, tag=True):
    """An actor cannot go on. `summary`: a sentence for the operator. `trace`: the traceback, empty for user errors."""

    name: str
    summary: str
    trace: str
    exit_code: int


class Serve(Struct, frozen=True, array_like=True, tag=True):
    """supervisor → api: all processes are ready, open the port."""


class Ping(Struct, frozen=True, array_like=True, tag=True):
    """supervisor → all, twice a second. The loop that does the work answers, so that a hang is noticed."""


class Pong(Struct, frozen=True, array_like=True, tag=True):
    """The answer to `Ping`."""

    name: str
    epoch: int = 1  # the epoch of its state
    progress: int = 0  # grows with each unit of work that it completes
    is_busy: bool = False  # a unit of work has begun and is not complete


class Reset(Struct, frozen=True, array_like=True, tag=True):
    """supervisor → all: a process has died, and a new epoch begins. Messages under way are void.

    All processes forget the requests of the api, whose gateway submits them again after `Restored`. If `device_epoch`
    has changed as well, core and workers also forget rows, plans and results."""

    epoch: int
    device_epoch: int
    lost: tuple[str, ...]  # names of the processes that are replaced
    reason: str  # one sentence, for /health


class Restored(Struct, frozen=True, array_like=True, tag=True):
    """supervisor → api: all processes behind the api are running and in this epoch."""

    epoch: int


class Stop(Struct, frozen=True, array_like=True, tag=True):
    """supervisor → all: shut down within `grace_s` seconds."""

    grace_s: float
    reason: str
    hands_over: bool = False  # to an api: its successor has the port; finish the open connections
    is_failure: bool = False  # to an api: the engine has failed; open requests fail and /health is 503


class Leave(Struct, frozen=True, array_like=True, tag=True):
    """supervisor → every process of another launch → its supervisor: the sender's launch shuts down.

    The whole engine ends with it: the launch that has the api drains first, and the others wait for it."""

    names: tuple[str, ...]  # of the processes of the sender's launch


class Swap(Struct, frozen=True, array_like=True, tag=True):
    """api → supervisor: serve another model, or this one with other settings. `Swapped` answers."""

    name: str  # of the api process
    number: int  # of this swap; `Swapped` repeats it
    changes: bytes  # a JSON object of fields of `Config`
    version: int | None = None  # go back to this version, with the changes
    must_drain: bool = False  # drain first instead of holding both models in memory


class Swapped(Struct, frozen=True, array_like=True, tag=True):
    """supervisor → api: the outcome of a `Swap`."""

    number: int
    status: int  # of HTTP: 200: served; 202: will be served once open requests have ended; 4xx, 5xx: refused
    detail: str
