"""How an engine is put to sleep and woken. `messages` has all names of this file."""

from msgspec import Struct


class Sleep(Struct, frozen=True, array_like=True, tag=True):
    """api → core → workers: give back what memory can be brought back. Whoever is served waits until `Wake`."""


class Wake(Struct, frozen=True, array_like=True, tag=True):
    """api → core → workers: bring it back. Everybody goes on."""


class Slept(Struct, frozen=True, array_like=True, tag=True):
    """workers → core → api: what the engine is now, after `Sleep` or `Wake`."""

    is_asleep: bool
    num_bytes: int = 0  # given back, of this rank or of all together
    problem: str = ""  # why it is not what was asked for, one sentence
    rank: int = 0
