"""How layers share the memory pages of the KV cache: plain arithmetic, without torch.

A layer keeps a *tile* of bytes for every block of positions: its keys and values. A recurrent layer keeps tiles for a
row: its state. Tiles that live equally long form a *group*: those of full attention, of a window, of a chunk, those
that a decoder reads of an encoder (`cross`, whose positions are the encoder's), and states. A block of a group is
`pages` memory pages, its *shelves*, into which the group's tiles are packed first fit, in the order of the layers. All
pages of the cache have the same size, so that a page may serve any group.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from math import gcd
from typing import Literal

ALIGNMENT = 64  # bytes; of tiles
_POSITIONS, _STATES = 4096, 2  # of the row whose memory decides the size of a page
_SLACK = 1.03  # larger pages may cost this much more memory: they mean fewer pages, tables and copies


@dataclass(frozen=True)
class Lifetime:
    """How long a tile is needed. A window of n positions ends with the position that reads it; a chunk begins at a
    multiple of n; a state belongs to a row and not to positions."""

    kind: Literal["full", "window", "chunk", "cross", "state"] = "full"
    span: int = 0  # positions of a window or chunk

    def __post_init__(self) -> None:
        assert (self.span > 0) == (self.kind in ("window", "chunk")), self

    def needed_from(self, position: int) -> int:
        """The first position that attention at `position` reads."""
        if self.kind == "window":
            return max(0, position - self.span + 1)
        return position - position % self.span if self.kind == "chunk" else 0

    def blocks(self, positions: int, block_size: int) -> int:
        """The blocks that a row of so many positions holds, before those that it no longer needs are released."""
        if self.kind == "state":
            return 1
        held = positions
        if self.kind == "window":
            held = min(positions, self.span + block_size - 1)  # a window may begin at the end of a block
        elif self.kind == "chunk":
            held = min(positions, self.span + block_size - gcd(self.span, block_size))  # so may a chunk begin
        return -(-held // block_size)


@dataclass(frozen=True)
class CacheGroup:
    lifetime: Lifetime
    pages: int  # of a block, or of a state


@dataclass(frozen=True)
class Place:
    """Where a tile lies: in page `shelf` of every block of its group, `offset` bytes from the page's beginning."""

    group: int
    shelf: int
    offset: int
    table: int  # the index of (group, shelf) among those of all groups


@dataclass(frozen=True)
class CacheGroups:
    page_bytes: int
    groups: tuple[CacheGroup, ...]  # at least one
    places: tuple[Place, ...]  # of each tile, in the order that was given

    @classmethod
    def of(cls, tiles: Sequence[tuple[Lifetime, int]], *, block_size: int) -> "CacheGroups":
        """tiles: the lifetime of each tile, and its bytes for a block or state. Groups come in the order of their first
        tiles, but those of positions of the decoder come first and states last."""
        sizes: dict[Lifetime, list[int]] = {}
        for lifetime, size in sorted(tiles, key=lambda tile: (tile[0].kind == "state", tile[0].kind == "cross")):
            sizes.setdefault(lifetime, []).append(padded(size))
        if not sizes:
            return ONE_GROUP
        page_bytes = choose_page_bytes(sizes, block_size=block_size)
        groups, places, first_table = [], {}, 0
        for number, (lifetime, of_group) in enumerate(sizes.items()):
            packed = [
                Place(number, shelf, offset, first_table + shelf) for shelf, offset in _packed(of_group, page_bytes)
            ]
            groups.append(CacheGroup(lifetime, 1 + max(place.shelf for place in packed)))
            places[lifetime] = iter(packed)
            first_table += groups[-1].pages
        return cls(page_bytes, tuple(groups), tuple(next(places[lifetime]) for lifetime, _ in tiles))

    @classmethod
    def within(cls, tiles: Sequence[tuple[Lifetime, int]], whole: "CacheGroups") -> "CacheGroups":
        """Some tiles of a model whose cache has the groups `whole`: the same groups with as many pages each, in the
        smallest pages that hold these tiles. So the ranks of all stages can use one assignment of pages."""
        if not tiles:
            return cls(0, whole.groups, ())
        sizes: dict[Lifetime, list[int]] = {}
        for lifetime, size in tiles:
            sizes.setdefault(lifetime, []).append(padded(size))
        num_shelves = {group.lifetime: group.pages for group in whole.groups}
        step = min(min(of_group) for of_group in sizes.values())
        page_bytes = max(
            max(max(of_group), padded(-(-sum(of_group) // num_shelves[lifetime])))
            for lifetime, of_group in sizes.items()
        )
        while any(_num_shelves(of_group, page_bytes) > num_shelves[lifetime] for lifetime, of_group in sizes.items()):
            page_bytes += step
        packed = {lifetime: iter(_packed(of_group, page_bytes)) for lifetime, of_group in sizes.items()}
        first_tables, first_table = {}, 0
        for number, group in enumerate(whole.groups):
            first_tables[group.lifetime] = number, first_table
            first_table += group.pages
        places = []
        for lifetime, _ in tiles:
            number, first_table = first_tables[lifetime]
            shelf, offset = next(packed[lifetime])
            places.append(Place(number, shelf, offset, first_table + shelf))
        return cls(page_bytes, whole.groups, tuple(places))

    @property
    def num_tables(self) -> int:
        """Pairs of a group and a shelf, each of which has a block table."""
        return sum(group.pages for group in self.groups)

    @property
    def state_pages(self) -> int:
        """Pages of a row's recurrent state; 0: the model has none."""
        return sum(group.pages for group in self.groups if group.lifetime.kind == "state")

    def tables(self, group: int) -> range:
        """The tables of a group's shelves."""
        first = sum(before.pages for before in self.groups[:group])
        return range(first, first + self.groups[group].pages)

    def pages(self, positions: int, *, block_size: int) -> int:
        """The pages that a row of so many positions holds."""
        return sum(group.pages * group.lifetime.blocks(positions, block_size) for group in self.groups)


FULL = Lifetime()
ONE_GROUP = CacheGroups(0, (CacheGroup(FULL, 1),), ())
"""Of a model without tiles. Its pages have no bytes."""


def padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def choose_page_bytes(sizes: dict[Lifetime, list[int]], *, block_size: int) -> int:
    """The page size for these tiles of each group: a sum of a group's first tiles, and of these sums the largest with
    which a row of 4,096 positions and two states takes at most 3 % more memory than with the best one."""
    least = max(max(of_group) for of_group in sizes.values())
    candidates = sorted({total for of_group in sizes.values() for total in accumulate(of_group) if total >= least})
    weights = [_STATES if lifetime.kind == "state" else lifetime.blocks(_POSITIONS, block_size) for lifetime in sizes]

    def bytes_of_row(page_bytes: int) -> int:
        pages = (_num_shelves(of_group, page_bytes) for of_group in sizes.values())
        return page_bytes * sum(weight * number for weight, number in zip(weights, pages, strict=True))

    totals = {page_bytes: bytes_of_row(page_bytes) for page_bytes in candidates}
    limit = _SLACK * min(totals.values())
    return max(page_bytes for page_bytes, total in totals.items() if total <= limit)


def _packed(sizes: Iterable[int], page_bytes: int) -> list[tuple[int, int]]:
    """(shelf, offset) of each tile: in the first shelf that has room for it."""
    return [
        (shelf, offset + i * size)
        for size, shelf, offset, number in _runs(list(sizes), page_bytes)
        for i in range(number)
    ]


def _num_shelves(sizes: list[int], page_bytes: int) -> int:
    return 1 + max(shelf for _, shelf, _, _ in _runs(sizes, page_bytes))


def _runs(sizes: list[int], page_bytes: int) -> Iterator[tuple[int, int, int, int]]:
    """(size, shelf, offset of the first, number) of tiles of one size that lie next to each other."""
    smallest = min(sizes)
    used: dict[int, int] = {}  # shelves with room for the smallest tile → their bytes in use
    num_shelves = 0
    for size, equal in groupby(sizes):
        left = len(list(equal))
        for shelf, offset in list(used.items()):
            number = min(left, (page_bytes - offset) // size)
            if number:
                yield size, shelf, offset, number
                left -= number
                used[shelf] = offset + number * size
                if page_bytes - used[shelf] < smallest:
                    del used[shelf]
            if not left:
                break
        while left:
            number = min(left, page_bytes // size)
            yield size, num_shelves, 0, number
            left -= number
            if page_bytes - number * size >= smallest:
                used[num_shelves] = number * size
            num_shelves += 1
