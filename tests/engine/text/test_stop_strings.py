"""Stop strings: the result does not depend on how the text is cut, no part of them is shown, time is linear."""

import random

import pytest
from counting import lines_of

from pagewire.engine.text import stop_strings
from pagewire.engine.text.stop_strings import StopStrings


def run(stop: list[str], pieces: list[str], include: bool = False) -> tuple[str, str | None]:
    found = StopStrings(stop, include)
    shown = ""
    for piece in pieces:
        text, hit = found.push(piece)
        shown += text
        if hit is not None:
            return shown, hit
    return shown + found.flush(), None


def expected(stop: list[str], text: str, include: bool) -> tuple[str, str | None]:
    """The definition: at the first character where any stop string is complete, the longest that ends there."""
    for end in range(1, len(text) + 1):
        hits = [s for s in stop if text[:end].endswith(s)]
        if hits:
            hit = max(hits, key=len)
            return text[:end] if include else text[: end - len(hit)], hit
    return text, None


@pytest.mark.parametrize("include", [True, False])
def test_agrees_with_the_definition_on_random_text(include: bool) -> None:
    for seed in range(2000):
        rng = random.Random(seed)
        stop = ["".join(rng.choices("ab", k=rng.randint(1, 4))) for _ in range(rng.randint(1, 3))]
        text = "".join(rng.choices("abc", k=rng.randrange(20)))
        pieces, at = [], 0
        while at < len(text):
            size = rng.randint(1, 4)
            pieces.append(text[at : at + size])
            at += size
        assert run(stop, pieces, include) == expected(stop, text, include), f"seed {seed}"


def test_holds_back_only_what_could_begin_a_stop_string() -> None:
    stop = StopStrings(["###END"])
    assert stop.push("one ##") == ("one ", None)
    assert stop.push("# two") == ("### two", None)
    assert stop.push(" #") == (" ", None)
    assert stop.push("##EN") == ("", None)
    assert stop.push("D!") == ("", "###END")


def test_held_back_text_is_shown_at_the_end() -> None:
    stop = StopStrings(["STOP"])
    assert stop.push("no STO") == ("no ", None)
    assert stop.flush() == "STO"
    assert stop.flush() == ""


def test_without_stop_strings_everything_passes() -> None:
    assert StopStrings([]).push("abc") == ("abc", None)
    assert StopStrings([""]).push("abc") == ("abc", None)


def test_work_is_linear_in_the_text() -> None:
    def work(length: int) -> int:
        stop = StopStrings(["a" * 200 + "b"])
        return lines_of(stop_strings, lambda: [stop.push("a") for _ in range(length)])

    # Ten times the text is ten times the work; a search from every character again would be a hundred times.
    assert work(3_000) < 12 * work(300)
