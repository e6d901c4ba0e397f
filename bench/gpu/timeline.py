"""When the device was busy, by torch's profiler."""

import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

_FIRST_KERNEL = "_prepare_step"  # of a step


class Interval(NamedTuple):
    """A kernel. Times are in microseconds of one clock."""

    name: str
    start: float
    end: float


def kernels_of(work: Callable[[], object]) -> list[Interval]:
    """The kernels that run on the GPU during `work`, including those in recordings; `work` must wait for the GPU."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        return read_trace(path)


def read_trace(path: Path) -> list[Interval]:
    """The kernels of a trace in Chrome's format, in the order of their starts."""
    events = json.loads(path.read_text())["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    found = [Interval(event["name"], float(event["ts"]), float(event["ts"]) + float(event["dur"])) for event in kernels]
    return sorted(found, key=lambda interval: interval.start)


def step_gaps_us(kernels: Sequence[Interval], first: str = _FIRST_KERNEL) -> list[float]:
    """The idle times before each step except the first; a step begins with the kernel of this name. Copies of inputs
    and results do not count as work, so waiting for one is a gap."""
    gaps, end = [], None
    for kernel in kernels:
        if end is not None and first in kernel.name:
            gaps.append(max(0.0, kernel.start - end))
        end = kernel.end if end is None else max(end, kernel.end)
    return gaps


def by_node(kernels: Sequence[Interval], num_steps: int) -> dict[str, tuple[float, float]]:
    """(launches of a step, microseconds of a launch) of each kernel, the one that takes most time first."""
    found: dict[str, list[float]] = {}
    for kernel in kernels:
        found.setdefault(kernel.name, []).append(kernel.end - kernel.start)
    ordered = sorted(found.items(), key=lambda item: -sum(item[1]))
    return {name: (len(times) / num_steps, statistics.median(times)) for name, times in ordered}


def node_gaps_us(kernels: Sequence[Interval], first: str = _FIRST_KERNEL) -> list[float]:
    """The idle times between the kernels of a step."""
    return [max(0.0, after.start - before.end) for before, after in pairwise(kernels) if first not in after.name]


def busy_us(kernels: Sequence[Interval]) -> float:
    """The time in which at least one kernel ran."""
    if not kernels:
        return 0.0
    ends = [kernels[0].end]
    for kernel in kernels[1:]:
        ends.append(max(ends[-1], kernel.end))
    idle = sum(max(0.0, after.start - end) for (_, after), end in zip(pairwise(kernels), ends, strict=False))
    return ends[-1] - kernels[0].start - idle
