"""How the time of steps compares with the time that reading their bytes takes: the roof that the memory's bandwidth
gives.

Every step reads the weights once, of each layer the experts that its tokens choose, and the KV of its contexts. The
bytes divided by the bandwidth are the least time of a step; this time divided by the step's is the share of the roof.
The scheduler counts the steps (`Counters.passed`), the ranks know their bytes, and here they come together.
"""

from collections import deque
from typing import NamedTuple

from ..engine.core.stats import Counters
from ..ipc.messages import PassReads

_WINDOW_S = 10.0


class Passed(NamedTuple):
    """Steps, as far as their bytes depend on them."""

    seconds: float
    passes: float
    expert_passes: float  # each counts as the share of the experts that it is expected to read
    pages: float  # of the KV cache that were read

    def since(self, before: "Passed") -> "Passed":
        return Passed(*(now - then for now, then in zip(self, before, strict=True)))

    def read_bytes(self, reads: PassReads, page_bytes: int) -> float:
        """What a rank has read in them."""
        return self.passes * reads.fixed + self.expert_passes * reads.experts + self.pages * page_bytes


class Roof:
    def __init__(self) -> None:
        self._seconds = 0.0
        self._samples: deque[tuple[float, Passed]] = deque()  # (when, the totals then)

    def answered(self, device_s: float) -> None:
        """A step has taken so long."""
        self._seconds += device_s

    def report(self, now: float, counters: Counters, num_domains: int) -> tuple[Passed, Passed]:
        """The totals, and what came to them in the last ten seconds. now: of a monotonic clock, in seconds. The domains
        count together; this is their mean."""
        found = (counters.num_passes, counters.num_expert_passes, counters.num_pages_read)
        totals = Passed(self._seconds, *(number / num_domains for number in found))
        samples = self._samples
        samples.append((now, totals))
        while len(samples) > 2 and samples[1][0] <= now - _WINDOW_S:
            samples.popleft()
        return totals, totals.since(samples[0][1])


def share_of_roof(window: Passed, reads: PassReads, page_bytes: int, bandwidth: float) -> float:
    """1.0: the steps took as long as reading their bytes once. 0.0: no step has run, or the bandwidth is unknown."""
    if window.seconds <= 0 or bandwidth <= 0:
        return 0.0
    return window.read_bytes(reads, page_bytes) / bandwidth / window.seconds
