"""The metadata that the p2p connector's core half sends its worker half with a plan."""

from msgspec import Struct


class P2pLoad(Struct, frozen=True, array_like=True):
    """The blocks of one request to be fetched."""

    rid: int
    keys: bytes  # names of items
    blocks: bytes  # int32: the pages of each in turn
    pages: bytes = b""  # int32: how many pages each has; empty: one
    peers: tuple[str, ...] = ()  # the address of each rank that has its part of them, by rank


class P2pComing(Struct, frozen=True, array_like=True):
    """What a request is going to leave behind: its blocks of all groups, of a window those that are read behind its
    prompt, and perhaps a recurrent state."""

    rid: int
    names: bytes  # of items, in any order
    states: tuple[tuple[bytes, bytes, int], ...] = ()  # of these, as in `P2pPlan.states`


class P2pFill(Struct, frozen=True, array_like=True):
    """Blocks of one group that the pass over the plan fills."""

    rid: int  # announced
    group: int
    names: bytes
    blocks: bytes  # int32: the pages of each in turn


class P2pPlan(Struct, frozen=True, array_like=True):
    """The worker half's work for a plan, in this order."""

    coming: tuple[P2pComing, ...]  # of requests that are computed from now on
    drop: bytes  # names of items
    keep_keys: bytes  # names of items
    keep_blocks: bytes  # int32: the pages of each in turn
    over: tuple[int, ...]  # announced rids that ended
    loads: tuple[P2pLoad, ...]
    keep_pages: bytes = b""  # int32: how many pages each has; empty: one
    # Of what is kept, the recurrent states: key of the block before, its own key, positions between.
    states: tuple[tuple[bytes, bytes, int], ...] = ()
    spoiled: tuple[int, ...] = ()  # announced rids of which nothing more may be kept; done before all others
    fills: tuple[P2pFill, ...] = ()
    is_first: bool = False  # of its core: what the worker half has is another core's, and is dropped before all else
