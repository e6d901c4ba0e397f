"""How busy the stages of a pipeline are, as the core sees it: each stage's seconds, and the share that is lost.

A stage measures how long it is busy, and how long a plan that it has waits for input or for ids; the numbers come with
each result. While plans are in flight, the rest of a stage's time is a wait for a plan.
"""

import struct
from collections import deque

from ..ipc.messages import StageSnapshot

_WINDOW_S = 10.0  # of `bubble_ratio`


class PipelineTimes:
    """Of the first rank of each stage."""

    def __init__(self, num_stages: int) -> None:
        self._format = struct.Struct(f"<{3 * num_stages}f")
        self._seconds = [[0.0] * 3 for _ in range(num_stages)]  # busy, input, ids
        self._in_flight_s = 0.0
        self._since: float | None = None  # plans are in flight, and the time until then is counted
        self._samples: deque[tuple[float, float, float]] = deque()  # (when, busy seconds of all stages, in flight)

    def answered(self, stage_times: bytes) -> None:
        """The numbers of a `StepResult`."""
        found = self._format.unpack(stage_times)
        for stage, seconds in enumerate(self._seconds):
            for state in range(3):
                seconds[state] += found[3 * stage + state]

    def note(self, now: float, *, is_in_flight: bool) -> None:
        """Whether plans are in flight from now on, in seconds of a monotonic clock."""
        if self._since is not None:
            self._in_flight_s += now - self._since
        self._since = now if is_in_flight else None

    def report(self, now: float) -> tuple[tuple[StageSnapshot, ...], float]:
        """(the stages' totals, the share of their time that was lost in the last ten seconds in flight)"""
        self.note(now, is_in_flight=self._since is not None)
        stages = tuple(
            StageSnapshot(busy, max(0.0, self._in_flight_s - busy - waited - ids), waited, ids)
            for busy, waited, ids in self._seconds
        )
        busy = sum(seconds[0] for seconds in self._seconds)
        samples = self._samples
        samples.append((now, busy, self._in_flight_s))
        while len(samples) > 2 and samples[1][0] <= now - _WINDOW_S:
            samples.popleft()
        in_flight = self._in_flight_s - samples[0][2]
        if not in_flight:
            return stages, 0.0
        return stages, min(1.0, max(0.0, 1 - (busy - samples[0][1]) / (len(stages) * in_flight)))
