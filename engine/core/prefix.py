"""The prefix cache: finds blocks that hold the beginning of a request, and offers the blocks that requests compute.

Full blocks are shared. A block of which only the beginning fits is copied (copy-on-write): so the choices of one
prompt, the beams of a search and the turns of a conversation go on from the last position of another request.
"""

from typing import NamedTuple

from .block_pool import BlockPool
from .kv_events import Cleared, KvCacheEvent, Removed, Stored
from .request import Request


class Found(NamedTuple):
    """The longest cached prefix of a request; at least one position is left to compute."""

    blocks: list[int]  # full ones, not yet held
    source: int | None  # a block whose first `num_copied` positions come after them, not yet held
    num_copied: int
    missing: tuple[bytes, ...]  # keys: if one of them is computed or loaded, the prefix gets longer


NOTHING = Found([], None, 0, ())


class PrefixCache:
    """The prefix cache of one pool."""

    def __init__(self, pool: BlockPool, *, block_size: int, enabled: bool, kv_events: bool) -> None:
        """`kv_events`: whether `take_events` is going to be called."""
        self._pool = pool
        self._block_size = block_size
        self.enabled = enabled
        self._events: list[KvCacheEvent] | None = [Cleared()] if kv_events else None
        if kv_events:
            pool.removed = []

    def find(self, request: Request) -> Found:
        """The cached prefix of a request that is to be admitted."""
        if not self.enabled or request.wants_all:
            return NOTHING
        size, pool = self._block_size, self._pool
        num_known = len(request.ids) - 1
        keys = request.block_keys(num_known // size, size)
        blocks = pool.match(keys)
        num = len(blocks)
        whole = keys[num : num + 1]
        beginnings = request.partial_keys(num, min(size - 1, num_known - num * size), size)
        if num == len(keys) and len(request.ids) % size == 0:
            whole = request.block_keys(num + 1, size)[num:]  # copied but for its last position
        for num_copied in range(len(beginnings), 0, -1):
            source = pool.find(beginnings[num_copied - 1])
            if source is None and num_copied == size - 1 and whole:
                source = pool.find(whole[0])
            if source is not None:
                return Found(blocks, source, num_copied, (*whole, *beginnings[-1:]))
        return Found(blocks, None, 0, (*whole, *beginnings[-1:]))

    def upcoming(self, request: Request) -> list[bytes]:
        """Keys of the blocks that the plan under construction computes of a request: full ones, and the beginning that
        ends before the last id."""
        if not self.enabled:
            return []
        size, num_ids = self._block_size, len(request.ids)
        keys = request.block_keys(min(request.num_planned, num_ids) // size, size)[request.num_committed :]
        if request.num_planned >= num_ids and (num_ids - 1) % size:
            keys += request.partial_keys((num_ids - 1) // size, (num_ids - 1) % size, size)[-1:]
        return keys

    def commit(self, request: Request) -> None:
        """Offers its full blocks.

        Those of the plan under construction count as well: plans run in order, so a request that finds them is computed
        after them.
        """
        if not self.enabled:
            return
        size, ids = self._block_size, request.ids
        first, full = request.num_committed, min(request.num_planned, len(ids)) // size
        if full <= first:
            return
        keys, blocks, register = request.keys, request.blocks, self._pool.register
        if len(keys) < full:
            request.block_keys(full, size)
        request.commit(full)
        for i in range(first, full):
            parent = keys[i - 1] if i else None
            if register(blocks[i], keys[i], i, parent) and self._events is not None:
                self._note_removed()
                self._events.append(Stored((keys[i],), parent, ids[i * size : (i + 1) * size].tobytes(), size))

    def commit_beginning(self, request: Request, num: int) -> None:
        """Offers the block that holds position `num`, up to that position."""
        size = self._block_size
        if self.enabled and num % size and num <= len(request.ids):
            key = request.partial_keys(num // size, num % size, size)[-1]
            self._pool.register_partial(request.blocks[num // size], key)

    def take_events(self) -> list[KvCacheEvent]:
        """Blocks that can be found or no longer be found, since the last call, in order."""
        assert self._events is not None, "made without kv_events"
        self._note_removed()
        events, self._events = self._events, []
        return events

    def _note_removed(self) -> None:
        """A key may be removed and stored again between two calls of `take_events`."""
        assert self._events is not None and self._pool.removed is not None
        if self._pool.removed:
            self._events.append(Removed(tuple(self._pool.removed)))
            self._pool.removed = []
