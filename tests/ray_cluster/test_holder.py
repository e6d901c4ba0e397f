"""Which line of a follower says why it has ended. No Ray."""

import pytest

from pagewire.ray.holder import why_ended

JOINED = "pagewire: 10.0.0.1/7 has joined the engine of tcp://10.0.0.9:1."
REFUSED = "pagewire: 10.0.0.1/7 cannot join: it has torch 1.0, and the lead has 2.0."


@pytest.mark.parametrize(
    ("code", "lines", "why"),
    [
        (2, [JOINED, REFUSED, "resource_tracker: 1 leaked object"], REFUSED.removeprefix("pagewire: ")),
        (2, ["pagewire: There is no key."], "10.0.0.1/7: There is no key."),
        (2, ["no line of ours"], "10.0.0.1/7: no line of ours"),
        (1, [JOINED, "Traceback (most recent call last):", "KeyError: 7"], "10.0.0.1/7: KeyError: 7"),
        (-9, [], ""),
    ],
)
def test_the_line_that_says_why(code: int, lines: list[str], why: str) -> None:
    assert why_ended(code, lines, "10.0.0.1/7") == why
