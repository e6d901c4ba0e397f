"""What the p2p connector's core half tells its worker half with a plan."""

from msgspec import Struct


class P2pLoad(Struct, frozen=True, array_like=True):
    """Blocks of one request to be fetched."""

    rid: int
    keys: bytes
    blocks: bytes  # int32, parallel to keys


class P2pPlan(Struct, frozen=True, array_like=True):
    """What the worker half must do with a plan, in this order."""

    coming: tuple[tuple[int, bytes], ...]  # rid of a request that is being computed, and the keys that it will bring
    drop: bytes  # keys
    keep_keys: bytes
    keep_blocks: bytes  # int32, parallel to keep_keys
    over: tuple[int, ...]  # rids of which nothing more is coming
    loads: tuple[P2pLoad, ...]
