"""Rates and quantiles from two readings of /metrics, for `pagewire top`.

Names are used without their prefix, `pagewire:` or `vllm:`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

_PREFIXES = ("pagewire:", "vllm:")


@dataclass
class Reading:
    """One reading. Samples of several models or processes are added up."""

    at: float  # seconds of a monotonic clock
    values: dict[str, float] = field(default_factory=dict)  # sample name → value
    buckets: dict[str, dict[float, float]] = field(default_factory=dict)  # histogram → bound → samples at or below it
    by_label: dict[str, dict[str, float]] = field(default_factory=dict)  # "name/label" → label's value → value
    nums: dict[str, int] = field(default_factory=dict)  # sample name → samples that were added up
    # Stage of a pipeline, with several engines engine/stage → state → seconds.
    stages: dict[str, dict[str, float]] = field(default_factory=dict)
    # Rank with a GPU, with several engines engine/rank → metric → value.
    gpus: dict[str, dict[str, float]] = field(default_factory=dict)

    def get(self, name: str) -> float:
        """0 if the server does not have the metric."""
        return self.values.get(name, 0.0)

    def mean(self, name: str) -> float:
        """Of the engines, for shares; 0 if the server does not have the metric."""
        return self.get(name) / max(1, self.nums.get(name, 0))


def read(text: str, at: float) -> Reading:
    """Parses a page of /metrics. Raises ValueError if it is invalid."""
    reading = Reading(at)
    for family in text_string_to_metric_families(text):
        prefix = next((p for p in _PREFIXES if family.name.startswith(p)), None)
        if prefix is None:
            continue
        for sample in family.samples:
            name = sample.name.removeprefix(prefix)
            if family.type == "histogram" and name.endswith("_bucket"):
                bounds = reading.buckets.setdefault(name.removesuffix("_bucket"), {})
                bound = float(sample.labels["le"])
                bounds[bound] = bounds.get(bound, 0.0) + sample.value
                continue
            reading.values[name] = reading.get(name) + sample.value
            reading.nums[name] = reading.nums.get(name, 0) + 1
            if name == "stage_seconds_total":
                stage = "/".join(sample.labels[label] for label in ("engine", "stage") if label in sample.labels)
                states = reading.stages.setdefault(stage, {})
                states[sample.labels["state"]] = states.get(sample.labels["state"], 0.0) + sample.value
            if name.startswith("gpu_") and "rank" in sample.labels:
                rank = "/".join(sample.labels[label] for label in ("engine", "rank") if label in sample.labels)
                reading.gpus.setdefault(rank, {})[name] = sample.value
            for label, value in _own_labels(sample.labels).items():
                parts = reading.by_label.setdefault(f"{name}/{label}", {})
                parts[value] = parts.get(value, 0.0) + sample.value
    return reading


def _own_labels(labels: Mapping[str, str]) -> dict[str, str]:
    return {label: value for label, value in labels.items() if label != "model_name"}


def rate(before: Reading, now: Reading, name: str) -> float:
    """Increase of a counter in 1/s. If the server was restarted in between, the counter began at 0."""
    seconds = now.at - before.at
    grown = now.get(name) - before.get(name)
    return max(0.0, grown if grown >= 0 else now.get(name)) / seconds if seconds > 0 else 0.0


def cpus_used(before: Reading, now: Reading) -> dict[str, float]:
    """Process → the CPUs that it has used between two readings, of all engines together; none that it lacks before."""
    name, seconds = "process_cpu_seconds_total/process", now.at - before.at
    if seconds <= 0:
        return {}
    old = before.by_label.get(name, {})
    grown = {process: value - old[process] for process, value in now.by_label.get(name, {}).items() if process in old}
    return {process: max(0.0, value) / seconds for process, value in grown.items()}


def stage_shares(before: Reading, now: Reading) -> dict[str, dict[str, float]]:
    """Stage → state → share of the time with plans in flight between two readings; none of a stage without any."""
    shares = {}
    for stage, states in now.stages.items():
        old = before.stages.get(stage, {})
        grown = {state: max(0.0, seconds - old.get(state, 0.0)) for state, seconds in states.items()}
        total = sum(grown.values())
        shares[stage] = {state: seconds / total for state, seconds in grown.items()} if total else {}
    return shares


def quantile(before: Reading, now: Reading, name: str, q: float) -> float | None:
    """The `q` quantile of a histogram's new samples, interpolated linearly within a bucket as Prometheus'
    histogram_quantile does. None without new samples."""
    old, new = before.buckets.get(name, {}), now.buckets.get(name, {})
    bounds = sorted(new)
    counts = [new[bound] - old.get(bound, 0.0) for bound in bounds]
    if not bounds or counts[-1] <= 0:
        return None
    rank, low, below = q * counts[-1], 0.0, 0.0
    for bound, count in zip(bounds, counts, strict=True):
        if count >= rank and count > below:
            if math.isinf(bound):
                return low
            return low + (bound - low) * (rank - below) / (count - below)
        low, below = bound, count
    return low
