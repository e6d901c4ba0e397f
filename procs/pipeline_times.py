"""How busy the stages of a pipeline are, as the core sees it: each stage's seconds, and the share that is lost.

A stage measures how long it is busy, and how long a plan that it has waits for other stages; the numbers come twice a
second. Until then its time with plans in flight is noted; what is left of it is a wait for a plan.
"""

from collections import deque
from typing import NamedTuple

from ..ipc.messages import StageSeconds, StageSnapshot

_WINDOW_S = 10.0  # of the bubble ratio
_LEAST_BUSY_S = 1.0  # of a window of the last stage, by which others are measured: they report at other times


class _Sample(NamedTuple):
    at: float
    busy_s: float
    in_flight_s: float


class _Stage:
    def __init__(self) -> None:
        self.seconds = StageSeconds(0.0)
        self.waited_s = 0.0  # for a plan; never less than before
        self.samples: deque[_Sample] = deque([_Sample(0.0, 0.0, 0.0)])  # when it has reported

    def report(self, seconds: StageSeconds, now: float, in_flight_s: float) -> None:
        old, samples = self.seconds, self.samples
        self.seconds = StageSeconds(
            old.busy + seconds.busy, old.input + seconds.input, old.ids + seconds.ids, old.output + seconds.output
        )
        # A step or a wait counts at its end, and the time in flight at once: a long one may take back what was left.
        spent = self.seconds
        self.waited_s = max(self.waited_s, in_flight_s - spent.busy - spent.input - spent.ids - spent.output)
        samples.append(_Sample(now, spent.busy, in_flight_s))
        while len(samples) > 2 and samples[1].at <= now - _WINDOW_S:
            samples.popleft()


class PipelineTimes:
    """Of the first rank of each stage."""

    def __init__(self, num_stages: int) -> None:
        self._stages = [_Stage() for _ in range(num_stages)]
        self._in_flight_s = 0.0
        self._since: float | None = None  # plans are in flight, and the time until then is counted

    def take(self, stage: int, seconds: StageSeconds, now: float) -> None:
        """What a stage reports, in seconds of a monotonic clock."""
        self.note(now, is_in_flight=self._since is not None)
        self._stages[stage].report(seconds, now, self._in_flight_s)

    def note(self, now: float, *, is_in_flight: bool) -> None:
        """Whether plans are in flight from now on."""
        if self._since is not None:
            self._in_flight_s += now - self._since
        self._since = now if is_in_flight else None

    def slowest(self) -> float:
        """The busiest stage's busy time in the last ten seconds or more, in relation to that of the last stage; 1 if
        that was busy for less than a second, of which a report more or less is a large part."""
        busy = [stage.samples[-1].busy_s - stage.samples[0].busy_s for stage in self._stages]
        return max(busy) / busy[-1] if busy[-1] >= _LEAST_BUSY_S else 1.0

    def report(self) -> tuple[tuple[StageSnapshot, ...], float]:
        """(the stages' totals, the share of their time that was lost in the last ten seconds or more of their reports,
        while plans were in flight)"""
        snapshots = tuple(StageSnapshot(each.seconds, each.waited_s) for each in self._stages)
        busy = in_flight = 0.0
        for stage in self._stages:
            first, last = stage.samples[0], stage.samples[-1]
            busy += last.busy_s - first.busy_s
            in_flight += last.in_flight_s - first.in_flight_s
        return snapshots, min(1.0, max(0.0, 1 - busy / in_flight)) if in_flight else 0.0
