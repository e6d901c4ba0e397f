"""The pool of KV blocks: who holds which block, which free block still holds a known prefix, who is evicted next.

It owns the reference counts and the prefix index, and knows neither tokens nor requests. Any free block serves any
request, so there is no fragmentation to mend. A block is in exactly one of three states:

    held    reference count ≥ 1: in that many block tables
    idle    count 0, but its content has a key: found again by `match`, evicted oldest first when blocks run out
    empty   count 0 and no key
"""

from collections.abc import Iterable, Sequence


class BlockPool:
    """Blocks `0 … num_blocks - 1`."""

    def __init__(self, *, num_blocks: int) -> None:
        assert num_blocks > 0, num_blocks
        self.num_blocks = num_blocks
        self._holders = [0] * num_blocks  # block → number of block tables it is in
        self._key: list[bytes | None] = [None] * num_blocks  # block → its key in _by_key, if it has one
        self._by_key: dict[bytes, int] = {}  # key → the one block registered for it
        self._empty = list(range(num_blocks - 1, -1, -1))  # a stack, so that low blocks go first
        self._idle: dict[int, None] = {}  # in the order of eviction

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` could hand out: empty ones and idle ones."""
        return len(self._empty) + len(self._idle)

    @property
    def num_held(self) -> int:
        """Blocks in at least one block table."""
        return self.num_blocks - self.num_free

    def allocate(self, num: int) -> list[int]:
        """`num` blocks with unknown content, each held once. The caller has looked at `num_free`."""
        assert num <= self.num_free, (num, self.num_free)
        blocks = []
        for _ in range(num):
            if self._empty:
                block = self._empty.pop()
            else:
                block = next(iter(self._idle))
                del self._idle[block]
                self._drop_key(block)
            self._holders[block] = 1
            blocks.append(block)
        return blocks

    def match(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks of the longest leading run of known keys. They are not yet held."""
        blocks = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_idle(self, blocks: Sequence[int]) -> int:
        """How many of `blocks` would leave the free ones if they were held."""
        return sum(block in self._idle for block in blocks)

    def num_only_held(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` one release would free."""
        return sum(self._holders[block] == 1 for block in blocks)

    def hold(self, blocks: Iterable[int]) -> None:
        """One more block table has these blocks, which are held or idle."""
        for block in blocks:
            if self._holders[block] == 0:
                del self._idle[block]
            self._holders[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """A block table lets go of its blocks. Its tail will be evicted before its head, which more prompts share."""
        for block in reversed(blocks):
            assert self._holders[block] > 0, block
            self._holders[block] -= 1
            if self._holders[block] == 0:
                if self._key[block] is None:
                    self._empty.append(block)
                else:
                    self._idle[block] = None

    def register(self, block: int, key: bytes) -> None:
        """`block`, which is held, now holds the full content named `key`. The first block with a key keeps it."""
        assert self._holders[block] > 0, block
        if key not in self._by_key and self._key[block] is None:
            self._by_key[key] = block
            self._key[block] = key

    def forget(self, blocks: Iterable[int]) -> None:
        """What these held blocks hold is no longer to be found."""
        for block in blocks:
            assert self._holders[block] > 0, block
            if self._key[block] is not None:
                self._drop_key(block)

    def forget_all(self) -> None:
        """Drops the prefix index; idle blocks become empty."""
        for block in self._by_key.values():
            self._key[block] = None
        self._by_key.clear()
        self._empty.extend(self._idle)
        self._idle.clear()

    def _drop_key(self, block: int) -> None:
        key = self._key[block]
        assert key is not None, block
        del self._by_key[key]
        self._key[block] = None

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Asserts every invariant against the block tables that exist. For tests; linear in the pool."""
        holders = [0] * self.num_blocks
        for table in tables:
            assert len(set(table)) == len(table), f"a block is twice in one table: {table}"
            for block in table:
                holders[block] += 1
        assert holders == self._holders, "reference counts differ from the tables"
        assert len(set(self._empty)) == len(self._empty), "a block is twice among the empty ones"
        states = [{b for b, n in enumerate(holders) if n}, set(self._idle), set(self._empty)]
        assert sum(map(len, states)) == self.num_blocks == len(set().union(*states)), "a block is lost or in two states"
        assert all(self._key[block] == key for key, block in self._by_key.items()), "the prefix index is torn"
        assert sum(key is not None for key in self._key) == len(self._by_key), "a key is registered twice"
