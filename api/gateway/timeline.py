"""How the time of a sequence passed: from its arrival over the tokenizer, the queue and its prompt to its last token.

All stamps are of one clock (see `Times`), so the parts between them add up to the whole.
"""

from collections.abc import Sequence
from typing import NamedTuple

from ...ipc.messages import Times, Usage

_PARTS = ("tokenizer_queue", "tokenize", "queue", "prefill", "decode")


class Timeline(NamedTuple):
    """Stamps in seconds; 0: it did not come to that."""

    arrived: float
    taken: float  # the tokenizer began with it
    tokenized: float
    started: float  # it was in a step for the first time
    first_token: float
    ended: float

    def parts(self) -> dict[str, float]:
        """Seconds of each part that came to its end, in order."""
        return {  # between the clocks of two machines anything may lie: a part never takes less than nothing
            name: max(0.0, end - start)
            for name, start, end in zip(_PARTS, self[:-1], self[1:], strict=True)
            if start and end
        }

    @property
    def total(self) -> float:
        """Seconds from arrival to end."""
        return self.ended - self.arrived


class EndedSequence(NamedTuple):
    """What is remembered of one choice when it has ended."""

    choice: int
    outcome: str  # its finish reason, or abort or error with a reason of their own
    timeline: Timeline
    usage: Usage | None


def timeline(arrived: float, times: Times | None, first_token: float | None, ended: float) -> Timeline:
    """Of one sequence, as far as it came."""
    times = times or Times()
    return Timeline(arrived, times.taken, times.tokenized, times.started, first_token or 0.0, ended)


def together(timelines: Sequence[Timeline]) -> Timeline:
    """Of the whole request: each stamp is that of the first sequence which came to it, the end that of the last one."""
    *stamps, ends = zip(*timelines, strict=True)
    firsts = [min(filter(None, column), default=0.0) for column in stamps]
    return Timeline._make([*firsts, max(ends)])
