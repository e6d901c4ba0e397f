"""Reading fields of a config.json, good and bad."""

from collections.abc import Callable
from pathlib import Path

import pytest

from pagewire.engine.models.fields import MAX_SIZE, Fields
from pagewire.errors import ConfigError


def fields(**raw: object) -> Fields:
    return Fields(raw, Path("config.json"))


def test_values_and_their_defaults() -> None:
    c = fields(a=3, zero=0, f=0.5, t="x", flag=True, null=None)
    assert c.size("b", "a") == 3 and c.size("b", default=7) == 7 and c.size("null", "a") == 3
    assert (c.count("zero"), c.count("a"), c.count("b"), c.count("null", 2)) == (0, 3, 0, 2)
    assert (c.number("f", 1.0), c.number("a", 1.0), c.number("null", 1.0)) == (0.5, 3.0, 1.0)
    assert (c.text("t", "y"), c.text("null", "y"), c.flag("flag", False), c.flag("null", True)) == (
        "x",
        "y",
        True,
        True,
    )
    assert "a" in c and "null" not in c and "b" not in c


def test_lists_and_objects() -> None:
    c = fields(ids=[3, -1, 2], id=4, ints=[1, 0], numbers=[1, 0.5], texts=["a"], part={"x": 1}, null=None)
    assert (c.ids("ids"), c.ids("id"), c.ids("b")) == ([3, 2], [4], [])
    assert (c.integers("ints"), c.numbers("numbers"), c.texts("texts")) == ((1, 0), (1.0, 0.5), ("a",))
    assert [c.integers("b"), c.numbers("null"), c.texts("b"), c.part("null")] == [None] * 4
    inner = c.part("part")
    assert inner is not None and inner.size("x") == 1 and inner.file == c.file
    assert c.divided("heads", 12, "groups", 4) == 3


@pytest.mark.parametrize(
    ("raw", "read", "complaint"),
    [
        ({}, lambda c: c.size("x", "y"), "has no x."),
        ({}, lambda c: c.size("x", default=0), "has no x, and its other sizes give 0"),
        *(({"x": bad}, lambda c: c.size("x"), f"x = {bad!r}, which should be a positive whole number")
          for bad in (0, -1, 2.0, "3", True, [3])),
        ({"x": MAX_SIZE + 1}, lambda c: c.size("x"), f"x = {MAX_SIZE + 1}; the limit is {MAX_SIZE}"),
        ({"x": 9}, lambda c: c.size("x", most=8), "x = 9; the limit is 8"),
        *(({"x": bad}, lambda c: c.count("x"), f"x = {bad!r}, which should be a positive whole number")
          for bad in (-1, False, 0.5)),
        *(({"x": bad}, lambda c: c.number("x", 1.0), f"x = {bad!r}, which should be a positive number")
          for bad in (0, -0.5, True, "1", float("nan"), float("inf"))),
        ({"x": 1}, lambda c: c.flag("x", False), "x = 1, which should be true or false"),
        ({"x": 1}, lambda c: c.text("x", ""), "x = 1, which should be a text"),
        *(({"x": bad}, lambda c: c.ids("x"), "should be a token id or a list of them") for bad in ("a", [1, True])),
        *(({"x": bad}, lambda c: c.integers("x"), "should be a list of numbers") for bad in (1, [1.0], [True], "12")),
        *(({"x": bad}, lambda c: c.numbers("x"), "should be a list of positive numbers")
          for bad in (1, [0], [True], ["1"], "12", [float("nan")])),
        *(({"x": bad}, lambda c: c.texts("x"), "should be a list of texts") for bad in ("a", [1])),
        ({"x": [1]}, lambda c: c.part("x"), "which should be an object"),
        ({}, lambda c: c.divided("heads", 10, "groups", 4), "has 10 heads, no multiple of its 4 groups"),
    ],
)  # fmt: skip
def test_each_error_names_the_file_and_the_field(
    raw: dict[str, object], read: Callable[[Fields], object], complaint: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        read(fields(**raw))
    assert str(raised.value).startswith("config.json has ") and complaint in str(raised.value)
    assert str(raised.value).endswith(".") and "\n" not in str(raised.value)
