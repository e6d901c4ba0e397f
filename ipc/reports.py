"""Reports of the actors: counts and gauges for /metrics and /health, and the times of a request.

Each process fills its own histograms and sends them whole, twice a second, so nothing is sent per token.
"""

from bisect import bisect_left

from msgspec import Struct

SECONDS = (
    0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5,
    1.0, 2.5, 5.0, 10.0,
)  # bounds for the parts of a step, and for an event loop  # fmt: skip
POWERS = (0, *(2**i for i in range(15)))  # bounds for rows and tokens of a step


class HistogramCounts(Struct, frozen=True, array_like=True):
    """A histogram as a message. counts[i]: values ≤ bounds[i] and > bounds[i - 1]; the last: above all bounds."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float  # of the values


class Histogram:
    """Counts observed values by bound."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # as in `HistogramCounts`
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def report(self) -> HistogramCounts:
        return HistogramCounts(self.bounds, tuple(self.counts), self.total)
