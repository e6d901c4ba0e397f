"""Measures kernels with events of their queue."""

import statistics
from collections.abc import Callable, Sequence

import torch

from ...engine.device.queue import Queue

_CACHED = 256 << 20  # bytes; several times the size of a GPU's cache


def microseconds(queue: Queue, works: Sequence[Callable[[], object]], *, repeat: int = 20) -> float:
    """Median time of one work. The works, which must be equally large, are recorded one after another and replayed
    `repeat` times, on a CPU once."""

    def run() -> None:
        for work in works:
            work()

    run()  # compiles
    replay = queue.record(run)
    replay()
    found = []
    for _ in range(repeat if queue.device.type == "cuda" else 1):
        begin = queue.mark()
        replay()
        end = queue.mark()
        end.wait()
        found.append(end.ms_since(begin))
    return statistics.median(found) * 1e3 / len(works)


def copies_beyond_cache(queue: Queue, num_bytes: int) -> int:
    """How many tensors of a size to use in turn so that none is in a GPU's cache."""
    return min(64, max(1, -(-_CACHED // num_bytes))) if queue.device.type == "cuda" else 1


def copy_gbs(queue: Queue, *, num_bytes: int) -> float:
    """GB/s that a copy within the device reads and writes, as the reference for other kernels."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=queue.device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    return 2 * num_bytes / microseconds(queue, [copy] * 4, repeat=10) / 1e3
