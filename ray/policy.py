"""How many engines a Ray Serve application wants: from their own queues and latencies. No Ray, no clock."""

import math
from collections.abc import Mapping
from typing import Any

WAITING, RUNNING, TTFT_MS = "waiting", "running", "ttft_p90_ms"
"""What each engine reports (`Engine.record_autoscaling_stats`): sequences in its queue and in its batch; and the 90th
percentile of the time to the first token since the last report, 0 without requests."""


class Scale:
    """A policy in the sense of Ray Serve's `AutoscalingPolicy`; Serve applies its delays and bounds to the answer."""

    def __init__(self, requests_per_replica: float, ttft_target_ms: float) -> None:
        """`ttft_target_ms`: 0: none."""
        self._requests_per_replica = requests_per_replica
        self._ttft_target_ms = ttft_target_ms

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """`context`: Serve's AutoscalingContext."""
        wanted = num_wanted(
            context.aggregated_metrics or {},
            context.current_num_replicas,
            requests_per_replica=self._requests_per_replica,
            ttft_target_ms=self._ttft_target_ms,
        )
        return (context.target_num_replicas if wanted is None else wanted), {}


def num_wanted(
    metrics: Mapping[str, Mapping[Any, float]],
    num_running: int,
    *,
    requests_per_replica: float,
    ttft_target_ms: float,
) -> int | None:
    """`metrics`: name → replica → value. `num_running`: replicas that serve. None: nothing is known yet."""
    if not num_running or not metrics.get(RUNNING):
        return None
    num_open = sum(sum(metrics.get(name, {}).values()) for name in (WAITING, RUNNING))
    # Replicas that have not reported yet are taken to be like the others: else each start of one would ask for more.
    num_open *= num_running / len(metrics[RUNNING])
    wanted = math.ceil(num_open / requests_per_replica)
    times = [value for value in metrics.get(TTFT_MS, {}).values() if value]
    if ttft_target_ms and times and sum(metrics.get(WAITING, {}).values()):
        if max(times) > ttft_target_ms:
            wanted = max(wanted, num_running + 1)
        elif max(times) > ttft_target_ms / 2:  # fewer engines would be too slow
            wanted = max(wanted, num_running)
    return wanted
