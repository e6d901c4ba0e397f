"""The pool of KV blocks: their reference counts, the prefix index, and which block is evicted next.

It knows neither tokens nor requests. Any free block serves any request, so there is no fragmentation. A block is in
exactly one of three states:

    held    reference count ≥ 1: in that many block tables
    idle    count 0, but its content has a key: found again by `match`, evicted when blocks run out
    empty   count 0 and no key

A key names either a full block or the beginning of one, after which its holder may still be writing. The latter can
only be copied, and the key of the full block replaces it.
"""

from collections.abc import Iterable, Sequence
from itertools import chain

from .eviction import RANKINGS, EvictionName, EvictionQueue
from .kv_connector import Evicted

_PARTIAL = -1  # place of a block whose key names only its beginning


class BlockPool:
    """Blocks `0 … num_blocks - 1`."""

    def __init__(self, *, num_blocks: int, eviction: EvictionName = "lru") -> None:
        """`eviction`: which idle block is evicted first."""
        assert num_blocks > 0, num_blocks
        self.num_blocks = num_blocks
        self._holders = [0] * num_blocks  # block → number of block tables it is in
        self._key: list[bytes | None] = [None] * num_blocks  # block → its key in _by_key, if it has one
        self._place = [0] * num_blocks  # which block of its sequence a keyed block is, from 0, or _PARTIAL
        self._parent: list[bytes | None] = [None] * num_blocks  # key of the block before a keyed full one
        self._by_key: dict[bytes, int] = {}  # key → the one block registered for it
        self._empty = list(range(num_blocks - 1, -1, -1))  # a stack, so that low blocks go first
        self._idle: dict[int, None] = {}  # the block that was released longest ago comes first
        self._eviction: EvictionName = eviction
        self._queue = None if eviction == "lru" else EvictionQueue(RANKINGS[eviction]())  # of the idle ones' keys
        self._uses = [0] * num_blocks  # how often a keyed block was found; only counted for the queue
        self.evicted: list[Evicted] = []  # full blocks that `allocate` has evicted; the scheduler takes them
        self.removed: list[bytes] | None = None  # keys of full blocks that can no longer be found; None: not recorded

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` could hand out: empty ones and idle ones."""
        return len(self._empty) + len(self._idle)

    @property
    def num_held(self) -> int:
        """Blocks in at least one block table."""
        return self.num_blocks - self.num_free

    def allocate(self, num: int) -> list[int]:
        """`num` blocks with undefined content, each held once. `num` is at most `num_free`."""
        assert num <= self.num_free, (num, self.num_free)
        blocks = []
        for _ in range(num):
            block = self._empty.pop() if self._empty else self._evict()
            self._holders[block] = 1
            self._uses[block] = 0
            blocks.append(block)
        return blocks

    def _evict(self) -> int:
        """Takes an idle block out of the prefix index."""
        if self._queue is None:
            block = next(iter(self._idle))
        else:
            victim = self._queue.evict()
            assert victim is not None, "there are idle blocks, and none is pinned"
            block = self._by_key[victim.key]
        del self._idle[block]
        if self._place[block] != _PARTIAL:
            key = self._key[block]
            assert key is not None, block
            self.evicted.append(Evicted(block, key, self._place[block], self._parent[block]))
        self._drop_key(block)
        return block

    def match(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks of the longest leading run of known keys. They are not yet held."""
        blocks = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def find(self, key: bytes) -> int | None:
        """The block with this key, full or partial. It is not yet held."""
        return self._by_key.get(key)

    def num_idle(self, blocks: Sequence[int]) -> int:
        """How many of `blocks` are idle, so `hold` would make `num_free` smaller by so many."""
        return sum(block in self._idle for block in blocks)

    def num_only_held(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` have one holder, so its `release` would free them."""
        return sum(self._holders[block] == 1 for block in blocks)

    def hold(self, blocks: Iterable[int]) -> None:
        """Another block table has these blocks, which are held or idle."""
        for block in blocks:
            if self._holders[block] == 0:
                del self._idle[block]
                if self._queue is not None:
                    key = self._key[block]
                    assert key is not None, block
                    self._queue.removed(key)
            self._holders[block] += 1
            self._uses[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """A block table gives its blocks back. Its tail is evicted before its head, which more prompts share."""
        for block in reversed(blocks):
            assert self._holders[block] > 0, block
            self._holders[block] -= 1
            if self._holders[block] == 0:
                key = self._key[block]
                if key is None:
                    self._empty.append(block)
                    continue
                self._idle[block] = None
                if self._queue is not None:
                    self._queue.added(key, max(0, self._place[block]), self._parent[block], self._uses[block])

    def register(self, block: int, key: bytes, place: int, parent: bytes | None = None) -> bool:
        """`block`, which is held, is full, and `key` names its content: it is block `place` of a sequence, from 0, and
        comes after the block with key `parent`. False: another block has this key already, and keeps it, or this block
        has a key."""
        assert self._holders[block] > 0, block
        if self._key[block] is not None:
            if self._place[block] != _PARTIAL:
                return False
            self._drop_key(block)
        if key in self._by_key:
            return False
        self._by_key[key] = block
        self._key[block] = key
        self._place[block] = place
        self._parent[block] = parent
        return True

    def register_partial(self, block: int, key: bytes) -> None:
        """`key` names the beginning of `block`, which is held. It replaces the key of another beginning of it."""
        if self._key[block] is None or self._place[block] == _PARTIAL:
            self.register(block, key, _PARTIAL)

    def forget(self, blocks: Iterable[int]) -> None:
        """Takes these held blocks out of the prefix index."""
        for block in blocks:
            assert self._holders[block] > 0, block
            if self._key[block] is not None:
                self._drop_key(block)

    def forget_all(self) -> None:
        """Drops the prefix index; idle blocks become empty."""
        for key, block in list(self._by_key.items()):
            if self._queue is not None and block in self._idle:
                self._queue.removed(key)
            self._drop_key(block)
        self._empty.extend(self._idle)
        self._idle.clear()

    def _drop_key(self, block: int) -> None:
        key = self._key[block]
        assert key is not None, block
        del self._by_key[key]
        self._key[block] = None
        if self.removed is not None and self._place[block] != _PARTIAL:
            self.removed.append(key)

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Asserts that there is no flaw. For tests."""
        flaw = self.flaw(tables)
        assert flaw is None, flaw

    def flaw(self, tables: Iterable[Sequence[int]]) -> str | None:
        """The first invariant that does not hold, given all block tables; None: all hold. Linear in the pool."""
        holders = [0] * self.num_blocks
        for table in tables:
            if len(set(table)) != len(table):
                return f"a block is in one table twice: {table}"
            for block in table:
                holders[block] += 1
        if holders != self._holders:
            return "reference counts differ from the tables"
        if len(set(self._empty)) != len(self._empty):
            return "a block is among the empty ones twice"
        states = [{b for b, n in enumerate(holders) if n}, set(self._idle), set(self._empty)]
        if not sum(map(len, states)) == self.num_blocks == len(set().union(*states)):
            return "a block is lost or in two states"
        if self._queue is not None and set(self._queue.keys()) != {self._key[block] for block in self._idle}:
            return "an idle block is not in the eviction queue"
        if not all(self._key[block] == key for key, block in self._by_key.items()):
            return "the prefix index names a block with another key"
        if sum(key is not None for key in self._key) != len(self._by_key):
            return "a key is registered twice"
        return None

    def rebuild(self, tables: Iterable[Sequence[int]]) -> None:
        """Counts everything again from these block tables, which are all: the prefix index is empty, and so are all
        other blocks."""
        if self.removed is not None:
            self.removed += [key for key, block in self._by_key.items() if self._place[block] != _PARTIAL]
        self._by_key.clear()
        self._key = [None] * self.num_blocks
        self._idle.clear()
        if self._queue is not None:
            self._queue = EvictionQueue(RANKINGS[self._eviction]())
        self._holders = [0] * self.num_blocks
        for block in chain.from_iterable(tables):
            self._holders[block] += 1
        self._empty = [block for block in range(self.num_blocks - 1, -1, -1) if not self._holders[block]]
