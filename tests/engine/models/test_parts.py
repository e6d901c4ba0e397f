"""Rows, columns and halves of weights, against plain lists of rows."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.engine.models.description import Part, Weight
from pagewire.engine.models.parts import columns, halves, part_rows, rows

Row = tuple[str, int]


def listed(parts: tuple[Part, ...]) -> list[Row]:
    """(tensor, its row) in order."""
    return [
        (part.name, part.first + turn * part.every + row)
        for part in parts
        for turn in range(part.times)
        for row in range(part.count)
    ]


@st.composite
def part(draw: st.DrawFn) -> Part:
    count, first, times = draw(st.integers(1, 5)), draw(st.integers(0, 7)), draw(st.integers(1, 4))
    every = 0 if times == 1 else draw(st.integers(count, 9))
    return Part(draw(st.sampled_from("ab")), count, first, every, times)


@given(st.lists(part(), min_size=1, max_size=4).map(tuple), st.data())
def test_rows_are_a_slice_of_the_list(parts: tuple[Part, ...], data: st.DataObject) -> None:
    whole = listed(parts)
    first = data.draw(st.integers(0, len(whole)))
    last = data.draw(st.integers(first, len(whole)))
    assert listed(part_rows(parts, first, last)) == whole[first:last]


def test_adjacent_turns_stay_one_part() -> None:
    assert part_rows((Part("a", 2, 1, 6, 4),), 2, 6) == (Part("a", 2, 7, 6, 2),)


def test_rows_of_a_weight_are_those_of_its_bias_and_of_its_other() -> None:
    other = Weight((Part("qkv", 8, 4),), 3)
    weight = Weight((Part("w", 8),), 3, bias=(Part("b", 8),), other=other)
    found = rows(weight, 2, 5)
    assert listed(found.parts) == [("w", i) for i in (2, 3, 4)]
    assert listed(found.bias) == [("b", i) for i in (2, 3, 4)]
    assert found.other is not None and listed(found.other.parts) == [("qkv", i) for i in (6, 7, 8)]
    assert found.columns == 3 and rows(None, 0, 2) is None


@pytest.mark.parametrize("is_first", [False, True])
def test_columns_of_columns(is_first: bool) -> None:
    weight = Weight((Part("w", 8),), 10, bias=(Part("b", 8),), other=Weight((Part("v", 8),), 10))
    found = columns(columns(weight, 4, 10, is_first=is_first), 1, 3, is_first=is_first)
    assert (found.first_column, found.columns) == (5, 2) and found.parts == weight.parts
    assert found.bias == (weight.bias if is_first else ()), "only one rank adds the bias"
    assert found.other is not None and (found.other.first_column, found.other.columns) == (5, 2)


@given(st.integers(1, 3), st.integers(0, 2), st.integers(1, 3), st.integers(0, 2), st.booleans())
def test_halves_bring_adjacent_pairs_apart(heads: int, before: int, pairs: int, after: int, strided: bool) -> None:
    """strided: heads of a tensor that also holds others."""
    dim = before + 2 * pairs + after
    every = dim + 3 if strided else dim
    parts = (Part("w", dim, 5, every, heads),) if heads > 1 else (Part("w", dim, 5),)
    weight = replace(Weight(parts, 4), bias=(Part("b", heads * dim),))
    found = halves(weight, heads, dim, 2 * pairs, first=before)
    whole, bias, expected, expected_bias = listed(weight.parts), listed(weight.bias), [], []
    for head in range(heads):
        at = head * dim
        order = [*range(at, at + before)]
        order += [at + before + 2 * i for i in range(pairs)] + [at + before + 2 * i + 1 for i in range(pairs)]
        order += range(at + before + 2 * pairs, at + dim)
        expected += [whole[i] for i in order]
        expected_bias += [bias[i] for i in order]
    assert listed(found.parts) == expected and listed(found.bias) == expected_bias
