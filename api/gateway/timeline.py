"""Where a sequence's time went: tokenizer, queue, prefill, decode.

All stamps are of one clock (see `Times`), so the parts add up to the whole.
"""

from collections.abc import Sequence
from typing import NamedTuple

from ...ipc.messages import Times, Usage

_PARTS = ("tokenizer_queue", "tokenize", "queue", "prefill", "decode")


class Timeline(NamedTuple):
    """Stamps in seconds; 0 if the sequence did not get that far."""

    arrived: float
    taken: float  # by the tokenizer
    tokenized: float
    started: float  # its first step
    first_token: float
    ended: float

    def parts(self) -> dict[str, float]:
        """Seconds of each part that was completed, in order."""
        return {  # no part is negative: the clocks of two machines may differ by any amount
            name: max(0.0, end - start)
            for name, start, end in zip(_PARTS, self[:-1], self[1:], strict=True)
            if start and end
        }

    @property
    def total(self) -> float:
        """Seconds from arrival to end."""
        return self.ended - self.arrived


class EndedSequence(NamedTuple):
    """One choice that has ended."""

    choice: int
    outcome: str  # its finish reason, "abort:reason" or "error:kind"
    timeline: Timeline
    usage: Usage | None


def timeline(arrived: float, times: Times | None, first_token: float | None, ended: float) -> Timeline:
    """The timeline of one sequence that ended at `ended`."""
    times = times or Times()
    return Timeline(arrived, times.taken, times.tokenized, times.started, first_token or 0.0, ended)


def together(timelines: Sequence[Timeline]) -> Timeline:
    """The timeline of a request: each stamp is the earliest of its sequences', the end is the latest."""
    *stamps, ends = zip(*timelines, strict=True)
    firsts = [min(filter(None, column), default=0.0) for column in stamps]
    return Timeline._make([*firsts, max(ends)])
