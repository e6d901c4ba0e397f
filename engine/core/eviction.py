"""Which block a full tier evicts next.

`EvictionQueue` knows the blocks of one tier by key and place, and keeps two rules whatever the policy: a pinned block
stays, and a block stays as long as a block that follows it is there, which would be of no use without it. Of the other
blocks the one of least rank is evicted; of equal ranks the one that was used longest ago, and of one sequence the tail
before the head. Every operation costs amortized O(log n).

`added`, `touched` and `used` say which block follows which; a block whose predecessor was never named has none.
"""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import Literal, NamedTuple, Protocol

EvictionName = Literal["lru", "lfu", "cost"]

_EVEN = 256  # the place at which attention to all earlier blocks costs about as much as the rest of a block's work
_SLACK = 64  # outdated entries that a heap may have in addition to one for each block


class Ranking(Protocol):
    """The worth of blocks. It must not shrink from use to use."""

    def rank(self, place: int, uses: int) -> float:
        """The rank, now, of block `place` of a sequence, from 0, that was used `uses` times."""

    def evicted(self, rank: float) -> None:
        """A block of this rank was evicted."""


class Lru:
    """All ranks are equal, so the block that was used longest ago is evicted."""

    def rank(self, place: int, uses: int) -> float:
        return 0.0

    def evicted(self, rank: float) -> None: ...


class Lfu:
    """A block that was used more often ranks higher."""

    def rank(self, place: int, uses: int) -> float:
        return float(uses)

    def evicted(self, rank: float) -> None: ...


class CostAware:
    """A block ranks by what it costs to compute again, which grows with its place: attention reads all blocks before.

    Unused blocks lose worth as others are evicted: a rank counts from the highest rank that was ever evicted
    (GreedyDual), so an expensive block outlives cheap ones for a while, but not for ever.
    """

    def __init__(self) -> None:
        self._floor = 0.0

    def rank(self, place: int, uses: int) -> float:
        return self._floor + 1.0 + place / _EVEN

    def evicted(self, rank: float) -> None:
        self._floor = max(self._floor, rank)


RANKINGS: dict[str, type[Lru] | type[Lfu] | type[CostAware]] = {"lru": Lru, "lfu": Lfu, "cost": CostAware}
"""By the name of the option."""

_Worth = tuple[float, int, int]  # (rank, when it was used last, minus its place): the least is evicted first


class Victim(NamedTuple):
    """A block that was evicted."""

    key: bytes
    place: int


class _Block:
    __slots__ = ("parent", "place", "uses", "worth")

    def __init__(self, place: int) -> None:
        self.place = place
        self.parent: bytes | None = None  # key of the block before it, if it is known
        self.uses = 0
        self.worth: _Worth = (0.0, 0, 0)


class EvictionQueue:
    """The blocks of one tier in the order of their eviction."""

    def __init__(self, ranking: Ranking) -> None:
        self._ranking = ranking
        self._blocks: dict[bytes, _Block] = {}
        self._children: dict[bytes, set[bytes]] = {}  # key, of any tier → blocks of this tier that follow it
        self._pins: dict[bytes, int] = {}  # key → how many times it is pinned; it may have been removed since
        self._heap: list[tuple[_Worth, bytes]] = []  # all blocks that may be evicted, and outdated entries
        self._age = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: bytes) -> bool:
        return key in self._blocks

    def keys(self) -> list[bytes]:
        """The keys of all its blocks."""
        return list(self._blocks)

    def added(self, key: bytes, place: int, parent: bytes | None = None, uses: int = 0) -> None:
        """Adds a block. `parent`: the key of the block before it, if there is one and it is known."""
        assert key not in self._blocks, key.hex()
        self._blocks[key] = block = _Block(place)
        block.uses = uses
        self._link(key, block, parent)
        self._age += 1
        self._value(key, block)

    def touched(self, key: bytes, parent: bytes | None = None) -> None:
        """Counts a block as recent, but not as used. `parent` as in `added`."""
        block = self._blocks[key]
        self._link(key, block, parent)
        self._age += 1
        self._value(key, block)

    def used(self, keys: Sequence[bytes]) -> None:
        """A sequence was served that begins with these blocks. Some of them may not be in the tier."""
        self._age += 1
        for i in range(len(keys) - 1, -1, -1):
            if (block := self._blocks.get(keys[i])) is not None:
                block.uses += 1
                self._link(keys[i], block, keys[i - 1] if i else None)
                self._value(keys[i], block)

    def pin(self, key: bytes) -> None:
        """The block stays until `unpin` was called as often."""
        self._pins[key] = self._pins.get(key, 0) + 1
        if (block := self._blocks.get(key)) is not None:
            self._uncover(block.parent)

    def unpin(self, key: bytes) -> None:
        """Takes one `pin` back."""
        self._pins[key] -= 1
        if self._pins[key] == 0:
            del self._pins[key]
            if (block := self._blocks.get(key)) is not None:
                self._push(key, block)

    def removed(self, key: bytes) -> None:
        """The block is no longer in the tier, pinned or not."""
        block = self._blocks.pop(key)
        if block.parent is not None:
            siblings = self._children[block.parent]
            siblings.discard(key)
            if not siblings:
                del self._children[block.parent]
            self._uncover(block.parent)

    def evict(self) -> Victim | None:
        """Removes the block that is evicted next. None: all are pinned, or there are none."""
        while self._heap:
            worth, key = self._heap[0]
            block = self._blocks.get(key)
            if block is None or block.worth != worth or key in self._pins:
                heappop(self._heap)
                continue
            heappop(self._heap)
            if self._is_followed(key):
                continue  # `_uncover` puts it back
            self.removed(key)
            self._ranking.evicted(worth[0])
            return Victim(key, block.place)
        return None

    def _is_followed(self, key: bytes) -> bool:
        """Whether a block that is not pinned follows it."""
        return any(child not in self._pins for child in self._children.get(key, ()))

    def _uncover(self, key: bytes | None) -> None:
        """A block that followed it was removed or pinned."""
        if key is not None and (block := self._blocks.get(key)) is not None and not self._is_followed(key):
            self._push(key, block)

    def _link(self, key: bytes, block: _Block, parent: bytes | None) -> None:
        if parent is not None and block.parent is None:
            block.parent = parent
            self._children.setdefault(parent, set()).add(key)

    def _value(self, key: bytes, block: _Block) -> None:
        rank = max(block.worth[0], self._ranking.rank(block.place, block.uses))
        block.worth = (rank, self._age, -block.place)
        self._push(key, block)

    def _push(self, key: bytes, block: _Block) -> None:
        if key in self._pins:
            return
        heappush(self._heap, (block.worth, key))
        if len(self._heap) > 2 * len(self._blocks) + _SLACK:
            self._heap = [(b.worth, k) for k, b in self._blocks.items() if k not in self._pins]
            heapify(self._heap)
