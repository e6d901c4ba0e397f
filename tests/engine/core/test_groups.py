"""What a group needs, against positions read one by one."""

import pytest

from pagewire.engine.core.groups import PLAIN, Groups
from pagewire.ipc.messages import GroupShape

SIZE = 4
FULL, WINDOW, CHUNK = GroupShape("full", 0, 2), GroupShape("window", 6, 3), GroupShape("chunk", 10, 1)


def read_by(shape: GroupShape, position: int) -> set[int]:
    """The positions that a layer of this group reads to compute one position."""
    if shape.kind == "window":
        return {p for p in range(position + 1) if p > position - shape.span}
    if shape.kind == "chunk":
        return {p for p in range(position + 1) if p // shape.span == position // shape.span}
    return set(range(position + 1))


@pytest.mark.parametrize("shape", [FULL, WINDOW, CHUNK, GroupShape("window", 1, 1), GroupShape("chunk", 4, 1)])
def test_nothing_before_need_from_is_read_later(shape: GroupShape) -> None:
    groups = Groups([shape])
    for position in range(50):
        later = set().union(*(read_by(shape, p) for p in range(position, 60)))
        assert groups.need_from(0, position) == min(read_by(shape, position)) == min(later)


@pytest.mark.parametrize("step", [1, 3, 16])
@pytest.mark.parametrize("start", [0, 7, 20])
def test_a_row_never_holds_more_pages_than_are_counted(start: int, step: int) -> None:
    groups = Groups([FULL, WINDOW, CHUNK])
    for end in range(start + 1, 60):
        most, position = 0, start
        while position < end:
            planned = min(end, position + step)
            blocks = [-(-planned // SIZE) - groups.need_from(g, position) // SIZE for g in range(3)]
            most = max(most, sum(n * size for n, size in zip(blocks, groups.sizes, strict=True)))
            position = planned
        assert groups.num_pages(start, end, step, SIZE) >= most


def test_the_longest_row_is_the_last_that_fits() -> None:
    groups = Groups([FULL, WINDOW])
    for num_pages in range(5, 60):
        longest = groups.longest(num_pages, 100, SIZE)
        assert groups.num_pages(0, longest, 1, SIZE) <= num_pages
        assert longest == 100 or groups.num_pages(0, longest + 1, 1, SIZE) > num_pages
    assert Groups([WINDOW]).longest(9, 10**6, SIZE) == 10**6, "a window never needs more than its span"
    assert PLAIN.longest(9, 100, SIZE) == 36 and PLAIN.is_plain


def test_a_step_reads_each_position_that_its_rows_need_and_their_states() -> None:
    assert PLAIN.pages_read([10, 6], SIZE) == (10 + 6) / SIZE
    assert PLAIN.pages_read([], SIZE) == 0
    groups = Groups([FULL, WINDOW, CHUNK, GroupShape("state", 0, 5)])
    positions = 2 * (4 + 100) + 3 * (4 + 6) + 1 * (4 + 10)
    assert groups.pages_read([4, 100], SIZE) == positions / SIZE + 2 * 5
