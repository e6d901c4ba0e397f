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


class Stop(Struct, frozen=True, array_like=True, tag=True):
    """supervisor → anyone: end in order within `grace_s` seconds."""

    grace_s: float
    reason: str
