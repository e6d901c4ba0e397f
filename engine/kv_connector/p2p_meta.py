"""The metadata that the p2p connector's core half sends its worker half with a plan."""

from msgspec import Struct


class P2pLoad(Struct, frozen=True, array_like=True):
    """The blocks of one request to be fetched."""

    rid: int
    keys: bytes
    blocks: bytes  # int32, parallel to keys


class P2pPlan(Struct, frozen=True, array_like=True):
    """The worker half's work for a plan, in this order."""

    coming: tuple[tuple[int, bytes], ...]  # rid of a request being computed, and the keys of its blocks
    drop: bytes  # keys
    keep_keys: bytes
    keep_blocks: bytes  # int32, parallel to keep_keys
    over: tuple[int, ...]  # announced rids that ended
    loads: tuple[P2pLoad, ...]
