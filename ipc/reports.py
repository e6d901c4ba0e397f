"""Reports of the actors: counts and gauges for /metrics and /health, and the times of a request.

Each process fills its own histograms and sends them whole, twice a second, so nothing is sent per token.
"""

from bisect import bisect_left

from msgspec import Struct

SECONDS = (
    *(0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0),
)  # bounds for the parts of a step, and for an event loop
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


class Times(Struct, frozen=True, array_like=True):
    """Times of one sequence, in seconds of the machine's monotonic clock; 0: unknown.

    Processes of one machine share that clock. Between machines the times are wrong by the difference of the clocks."""

    taken: float = 0.0  # the tokenizer began
    tokenized: float = 0.0  # the tokenizer was done
    started: float = 0.0  # its first step was planned
    num_cached: int = 0  # prompt tokens found in the prefix cache then


class Pulse(Struct, frozen=True, array_like=True, tag=True):
    """tokenizer, core, grammar, detokenizer → api, twice a second: the state of its event loop."""

    name: str
    loop_lag_s: HistogramCounts  # delay of the loop's timers
    num_stale: int = 0  # frames of earlier epochs that it has dropped


class TierSnapshot(Struct, frozen=True, array_like=True):
    """One KV tier behind the device: gauges and running totals."""

    name: str
    num_blocks: int  # stored now
    capacity: int  # blocks; 0: not bounded
    num_hit_tokens: int  # prompt tokens loaded from it
    num_stored: int  # blocks written to it
    num_evicted: int  # blocks dropped to make room
    num_failed: int  # blocks that could not be loaded


class Snapshot(Struct, frozen=True, array_like=True, tag=True):
    """core → api, a few times a second while it works: gauges and running totals for /metrics and /health."""

    step: int
    num_running: int
    num_waiting: int
    num_blocks: int
    num_blocks_used: int
    num_preemptions: int
    num_prompt_tokens: int  # prompt tokens of scheduled sequences
    num_cached_tokens: int  # of those, from the prefix cache
    num_output_tokens: int
    step_age_s: float  # age of the oldest plan in flight; 0: none is in flight
    tiers: tuple[TierSnapshot, ...] = ()  # beyond the device
    num_drafts: int = 0  # how often draft tokens were proposed for a sequence
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0  # of the draft tokens
    histograms: dict[str, HistogramCounts] = {}  # of steps, by their name in /metrics
    num_out_of_memory: int = 0  # steps that were repeated because the device had no memory for them
    num_mended: int = 0  # repairs of rows and blocks that did not add up while the engine was idle
    is_asleep: bool = False  # after `Sleep`
