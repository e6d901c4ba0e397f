"""What the host tier's core half tells its worker half with a plan."""

from msgspec import Struct

NO_SLOT = -1
"""A block was matched, but given up before its load was planned: the load fails."""


class HostLoad(Struct, frozen=True, array_like=True):
    """Columns, int32: from which slots which blocks are filled."""

    rid: int
    slots: bytes  # NO_SLOT: cannot be filled
    blocks: bytes


class HostMeta(Struct, frozen=True, array_like=True):
    """What the worker half does with a plan, in this order."""

    save_blocks: bytes  # int32
    save_slots: bytes  # int32, each at most once
    loads: tuple[HostLoad, ...]
