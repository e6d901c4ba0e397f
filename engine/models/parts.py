"""Some rows or columns of a weight, which are again a weight."""

from dataclasses import replace
from typing import TypeVar

from .description import Part, Weight

_Some = TypeVar("_Some", Weight, Weight | None)


def rows(weight: _Some, first: int, last: int) -> _Some:
    """The rows [first, last) of a weight, counted through its parts."""
    if weight is None:
        return weight
    other = None if weight.other is None else rows(weight.other, first, last)
    parts = part_rows(weight.parts, first, last)
    return replace(weight, parts=parts, bias=part_rows(weight.bias, first, last), other=other)


def part_rows(parts: tuple[Part, ...], first: int, last: int) -> tuple[Part, ...]:
    """The rows [first, last), counted through the parts."""
    found: list[Part] = []
    for part in parts:
        low, high = max(0, first), min(part.rows, last)
        first, last = first - part.rows, last - part.rows
        while low < high:
            turn, offset = divmod(low, part.count)
            count = min(part.count - offset, high - low)
            start = part.first + turn * part.every + offset
            if not offset and count == part.count:
                times = (high - low) // part.count
                found.append(replace(part, first=start, times=times))
                low += times * part.count
            else:
                found.append(Part(part.name, count, start))
                low += count
    return tuple(found)


def columns(weight: Weight, first: int, last: int, *, is_first: bool) -> Weight:
    """The columns [first, last) of a weight. is_first: the rank that adds the bias to the sum."""
    other = None if weight.other is None else columns(weight.other, first, last, is_first=is_first)
    bias = weight.bias if is_first else ()
    start = weight.first_column + first
    return replace(weight, columns=last - first, first_column=start, bias=bias, other=other)


def halves(weight: Weight, heads: int, dim: int, dims: int, *, first: int = 0) -> Weight:
    """A projection into heads of `dim` rows, of which the rows [first, first + dims) turn in adjacent pairs, with these
    rows in an order in which row i turns with row i + dims / 2."""
    other = None if weight.other is None else halves(weight.other, heads, dim, dims, first=first)
    orders = [_halves(parts, heads, dim, dims, first) for parts in (weight.parts, weight.bias) if parts]
    return replace(weight, parts=orders[0], bias=orders[1] if weight.bias else (), other=other)


def _halves(parts: tuple[Part, ...], heads: int, dim: int, dims: int, first: int) -> tuple[Part, ...]:
    found: list[Part] = []
    for head in range(heads):
        (turning,) = part_rows(parts, head * dim + first, head * dim + first + dims)
        assert turning.times == 1, f"the rows of a head of {turning.name} are apart"
        found += part_rows(parts, head * dim, head * dim + first)
        found += (Part(turning.name, 1, turning.first + odd, 2, dims // 2) for odd in (0, 1))
        found += part_rows(parts, head * dim + first + dims, (head + 1) * dim)
    return tuple(found)
