"""The metadata that the p2p connector's core half sends its worker half with a plan."""

from msgspec import Struct


class P2pLoad(Struct, frozen=True, array_like=True):
    """The blocks of one request to be fetched."""

    rid: int
    keys: bytes  # names of items
    blocks: bytes  # int32: the pages of each in turn
    pages: bytes = b""  # int32: how many pages each has; empty: one
    peer: str = ""  # the address where they are


class P2pPlan(Struct, frozen=True, array_like=True):
    """The worker half's work for a plan, in this order."""

    coming: tuple[tuple[int, bytes], ...]  # rid of a request being computed, and the keys of its blocks
    drop: bytes  # keys
    keep_keys: bytes  # names of items
    keep_blocks: bytes  # int32: the pages of each in turn
    over: tuple[int, ...]  # announced rids that ended
    loads: tuple[P2pLoad, ...]
    keep_pages: bytes = b""  # int32: how many pages each has; empty: one
    # Of what is kept, the recurrent states: key of the block before, its own key, positions between.
    states: tuple[tuple[bytes, bytes, int], ...] = ()
    spoiled: tuple[int, ...] = ()  # announced rids of which nothing more may be kept; done before all others
    fill: tuple[tuple[int, bytes, bytes], ...] = ()  # announced rid, names of the blocks that the pass fills, pages
