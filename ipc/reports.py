"""What actors tell of themselves: counts and gauges for /metrics and /health, and when a request got how far.

Histograms are filled where things happen and travel whole, twice a second, so nothing is sent or counted a token.
"""

from bisect import bisect_left

from msgspec import Struct

SECONDS = (
    *(0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0),
)  # bounds for what happens in a step, or on a loop
POWERS = (0, *(2**i for i in range(15)))  # bounds for rows and tokens of a step


class HistogramCounts(Struct, frozen=True, array_like=True):
    """A histogram on its way. counts[i]: values ≤ bounds[i] and above the bound before; the last one: the rest."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float  # of the values


class Histogram:
    """How often a value fell at or under each bound."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # see `HistogramCounts`
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def report(self) -> HistogramCounts:
        """What was counted so far."""
        return HistogramCounts(self.bounds, tuple(self.counts), self.total)


class Times(Struct, frozen=True, array_like=True):
    """When one sequence got how far, in seconds of the machine's monotonic clock; 0: it is not known.

    Processes of one machine share that clock. Those of several do not, and what is told of such an engine's requests
    is wrong by the clocks' difference."""

    taken: float = 0.0  # the tokenizer began with it
    tokenized: float = 0.0  # its ids were there
    started: float = 0.0  # it was in a step for the first time
    num_cached: int = 0  # tokens of its prompt whose KV was there then


class Pulse(Struct, frozen=True, array_like=True, tag=True):
    """tokenizer, core, grammar, detokenizer → api, twice a second: how its event loop does."""

    name: str
    loop_lag_s: HistogramCounts  # how late the loop came to what was due
    num_stale: int = 0  # frames of epochs that are over, which it has dropped


class TierSnapshot(Struct, frozen=True, array_like=True):
    """One KV tier behind the device: gauges and running totals."""

    name: str
    num_blocks: int  # it holds
    capacity: int  # blocks; 0: no bound of its own
    num_hit_tokens: int  # prompt tokens that were loaded from it
    num_stored: int  # blocks written to it
    num_evicted: int  # blocks it dropped for others
    num_failed: int  # loads of blocks that gave nothing


class Snapshot(Struct, frozen=True, array_like=True, tag=True):
    """core → api, a few times a second while it works: gauges and running totals for /metrics and /health."""

    step: int
    num_running: int
    num_waiting: int
    num_blocks: int
    num_blocks_used: int
    num_preemptions: int
    num_prompt_tokens: int  # prompt tokens of requests that were scheduled
    num_cached_tokens: int  # of those, from the prefix cache
    num_output_tokens: int
    step_age_s: float  # how long the oldest plan in flight has been out; 0 with none
    tiers: tuple[TierSnapshot, ...] = ()  # the KV tiers behind the device
    num_drafts: int = 0  # how often a sequence's next tokens were guessed
    num_draft_tokens: int = 0  # guesses
    num_accepted_tokens: int = 0  # of them, those that came true
    histograms: dict[str, HistogramCounts] = {}  # of steps, by the name that they have in /metrics
    num_out_of_memory: int = 0  # steps that the device had no memory for, and that were tried again
    num_mended: int = 0  # how often rows and blocks did not add up while nobody was served
    is_asleep: bool = False  # memory is given back: see `Sleep`
