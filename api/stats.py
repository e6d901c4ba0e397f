"""Counts and durations that the gateway keeps; `metrics` turns them into Prometheus text."""

from bisect import bisect_left
from collections.abc import Sequence

from ..ipc.messages import FinishReason

_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_INTER_TOKEN_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_S = (
    *(0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


class Histogram:
    """How often a value fell at or under each bound."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)  # [i]: values ≤ bounds[i] and above the bound before; the last: the rest
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Stats:
    """What the api process has seen of its requests since it started."""

    def __init__(self) -> None:
        self.finished: dict[FinishReason | str, int] = {"stop": 0, "length": 0, "abort": 0, "error": 0}  # sequences
        self.time_to_first_token_s = Histogram(_FIRST_TOKEN_S)
        self.inter_token_latency_s = Histogram(_INTER_TOKEN_S)
        self.request_latency_s = Histogram(_REQUEST_S)
