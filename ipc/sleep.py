"""Messages that put an engine to sleep and wake it."""

from msgspec import Struct


class Sleep(Struct, frozen=True, array_like=True, tag=True):
    """api → core → workers: release the memory that can be restored. Open requests wait until `Wake`."""


class Wake(Struct, frozen=True, array_like=True, tag=True):
    """api → core → workers: restore the memory and continue."""


class Slept(Struct, frozen=True, array_like=True, tag=True):
    """workers → core → api: the outcome of `Sleep` or `Wake`."""

    is_asleep: bool
    num_bytes: int = 0  # released; of this rank, or to the api of all ranks
    problem: str = ""  # why it failed, one sentence; empty: it succeeded
    rank: int = 0
