"""The metadata that the host tier's core half sends its worker half with a plan."""

from msgspec import Struct

NO_SLOT = -1
"""The slot of a page whose block was matched but evicted before its load was planned: the load fails."""


class HostLoad(Struct, frozen=True, array_like=True):
    """One request's load, as columns of int32."""

    rid: int
    slots: bytes  # NO_SLOT: cannot be filled
    blocks: bytes  # pages


class HostMeta(Struct, frozen=True, array_like=True):
    """The worker half's work for a plan, in this order."""

    save_blocks: bytes  # int32, pages
    save_slots: bytes  # int32, each at most once
    loads: tuple[HostLoad, ...]
    returned: bytes = b""  # int32: slots that are not used any more, whose memory the system may have
