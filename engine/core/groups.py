"""The cache groups of a model, as numbers.

A group is the part of the cache whose content lives equally long: `full` (every position is read by all later ones),
`window` and `chunk` (only by those that follow soon), `cross` (what an encoder has made of the prompt, which all of the
decoder's positions read: it neither grows nor shrinks), `state` (one recurrent state a row instead of a value a
position). A block of group g is `sizes[g]` pages of memory, and all groups take their pages from one pool. The groups
but `cross` and `state` hold something of each position, have the same block size and grow at the same moments.
"""

from bisect import bisect_right
from collections.abc import Sequence

from ...ipc.messages import GroupShape

_LEAST, _MOST, _NO_ATTENTION = 256, 8192, 1024  # positions between two states of a prompt


class Groups:
    """The groups of one model; `cross` or `state` comes last. A group is named by its index."""

    def __init__(
        self, shapes: Sequence[GroupShape] = (GroupShape("full", 0, 1),), *, interval: int | None = None
    ) -> None:
        """`interval`: positions between the states that a prompt leaves behind; default: by their cost."""
        kinds = [shape.kind for shape in shapes]
        assert kinds and {"cross", "state"}.isdisjoint(kinds[:-1]) and all(shape.pages > 0 for shape in shapes), shapes
        self.shapes = tuple(shapes)
        self.sizes = tuple(shape.pages for shape in shapes)  # pages of a block
        # The groups whose block tables grow with the positions; they come first.
        self.num_tables = len(kinds) - (kinds[-1] in ("cross", "state"))
        self.cross = self.num_tables if kinds[-1] == "cross" else None
        self.state = self.num_tables if kinds[-1] == "state" else None
        self.state_pages = 0 if self.state is None else self.sizes[self.state]
        self._interval = interval
        self.full = kinds.index("full") if "full" in kinds else None
        self.moving = [g for g in range(self.num_tables) if shapes[g].span]  # whose blocks are released behind a row
        self.unit = sum(self.sizes[: self.num_tables])  # pages that a row takes for each block of positions

    def __repr__(self) -> str:
        return " ".join(f"{shape.kind}({shape.span})×{shape.pages}" for shape in self.shapes)

    @property
    def is_plain(self) -> bool:
        """One full group with one page a block: blocks are pages."""
        return self.sizes == (1,) and self.full == 0

    def told(self, group: int) -> int | None:
        """The number of a group in KV events; None: the full group."""
        return None if group == self.full else group

    def shape_told(self, group: int) -> GroupShape | None:
        """The shape of a group in KV events; None: the full group."""
        return None if group == self.full else self.shapes[group]

    def need_from(self, group: int, position: int) -> int:
        """The first position that is read to compute `position` and all later ones."""
        shape = self.shapes[group]
        if shape.kind == "window":
            return max(0, position - shape.span + 1)
        return position // shape.span * shape.span if shape.kind == "chunk" else 0

    def num_pages(self, start: int, end: int, step: int, block_size: int) -> int:
        """The most pages that a row holds which begins at position `start` and gets to `end`, at most `step` positions
        at a time."""
        total = self.state_pages
        for group in range(self.num_tables):
            num = -(-end // block_size) - self.need_from(group, start) // block_size
            if span := self.shapes[group].span:
                num = min(num, (span + step + block_size - 3) // block_size + 1)
            total += num * self.sizes[group]
        return total

    def pages_read(self, ends: Sequence[int], block_size: int) -> float:
        """What a step reads of the cache for rows that end at these positions, in pages: each position that their
        last one needs, and each row's state, once."""
        total = float(self.state_pages * len(ends))
        for group in range(self.num_tables):
            span = self.shapes[group].span
            positions = sum([min(end, span) for end in ends]) if span else sum(ends)
            total += positions * self.sizes[group] / block_size
        return total

    def cross_blocks(self, num_encoded: int, block_size: int) -> int:
        """Blocks of the group `cross` for a prompt of so many tokens; 0 without such a group."""
        return 0 if self.cross is None else -(-num_encoded // block_size)

    def cross_pages(self, num_encoded: int, block_size: int) -> int:
        return 0 if self.cross is None else self.cross_blocks(num_encoded, block_size) * self.sizes[self.cross]

    def longest(self, num_pages: int, limit: int, block_size: int) -> int:
        """The most positions, up to `limit`, of a row that has a pool of `num_pages` for itself, beside a prompt of as
        many tokens if there is an encoder."""

        def pages(end: int) -> int:
            return self.num_pages(0, end, 1, block_size) + self.cross_pages(end, block_size)

        return bisect_right(range(1, limit + 1), num_pages, key=pages)

    def interval(self, block_size: int) -> int:
        """Every so many positions a prompt leaves a state behind: where it costs no more memory than the attention to
        the positions between, within bounds; a multiple of the block size."""
        if self._interval is not None:
            return self._interval
        num_pages = sum(shape.pages for shape in self.shapes if shape.kind == "full")
        num = -(-self.state_pages // num_pages) * block_size if num_pages else _NO_ATTENTION
        return -(-min(max(num, _LEAST), _MOST) // block_size) * block_size


PLAIN = Groups()
