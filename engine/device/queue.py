"""The queue of a device's work, in order: launches, recordings of them, copies to and from the host.

`CudaQueue` is a stream with CUDA graphs. `EagerQueue` does everything at once, for CPUs: Triton's interpreter runs the
kernels there, so that the layers above can be tested without a GPU.
"""

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from ...kernels.triton.tuned import tuned

Work = Callable[[], None]


class Mark(Protocol):
    """A point in the queue."""

    def is_reached(self) -> bool:
        """Whether all work before it is done."""

    def wait(self) -> None:
        """Returns when all work before it is done."""

    def ms_since(self, earlier: "Mark") -> float:
        """Milliseconds on the device between the two marks. Both must have been reached."""


class Queue(Protocol):
    """The queue of one device. One thread uses it, and everything which that thread launches goes there."""

    device: torch.device

    def num_programs(self, head_dim: int) -> int:
        """Programs of decode attention that the device runs at once."""

    def host_memory(self, size: int, dtype: torch.dtype) -> Tensor:
        """Host memory that the device can read and write while the host continues."""

    def record(self, work: Work) -> Work:
        """Records `work` without running it; the returned work repeats it on the same memory in one launch. `work` must
        have run before, so that its kernels are loaded."""

    def send(self, source: Tensor, target: Tensor) -> None:
        """Copies from host memory, in queue order."""

    def fetch(self, pairs: tuple[tuple[Tensor, Tensor], ...]) -> Mark:
        """Copies device tensors to host memory after all earlier work. Later work does not wait for the copies."""

    def mark(self) -> Mark: ...

    def follow(self, mark: Mark) -> None:
        """Later work starts after the mark, which may be that of a `fetch`."""


class EagerMark:
    """Always reached: the work was done when it was queued."""

    def __init__(self) -> None:
        self.at = time.perf_counter()

    def is_reached(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def ms_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, EagerMark)
        return (self.at - earlier.at) * 1000


class EagerQueue:
    def __init__(self, device: torch.device) -> None:
        self.device = device

    def num_programs(self, head_dim: int) -> int:
        return 4

    def host_memory(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(size, dtype=dtype)

    def record(self, work: Work) -> Work:
        return work

    def send(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source)

    def fetch(self, pairs: tuple[tuple[Tensor, Tensor], ...]) -> Mark:
        for source, target in pairs:
            target.copy_(source)
        return self.mark()

    def mark(self) -> Mark:
        return EagerMark()

    def follow(self, mark: Mark) -> None:
        pass


class CudaMark:
    """A CUDA event. The host waits in a busy loop: a step is shorter than the time to wake a thread."""

    def __init__(self) -> None:
        self.event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def is_reached(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()

    def ms_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, CudaMark)
        return float(earlier.event.elapsed_time(self.event))


class CudaQueue:
    """All graphs share one memory pool: they never run at the same time, and results that outlive a graph are in
    tensors allocated outside the pool."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        torch.cuda.set_stream(self._stream)
        self._pool = torch.cuda.graph_pool_handle()

    def num_programs(self, head_dim: int) -> int:
        # Shared memory: each program has two buffers of the keys and values of a tile of at most 32 KiB.
        properties = torch.cuda.get_device_properties(self.device)
        if head_dim > 256:  # of latent attention: two programs do not fit into the registers
            held = 1
        else:
            held = properties.shared_memory_per_multiprocessor // (2 * 2 * 64 * min(head_dim, 128) * 2 + 8192)
        held = tuned("decode_attention", head_dim, programs=max(1, min(held, 4)))["programs"]
        return int(properties.multi_processor_count * held)

    def host_memory(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(size, dtype=dtype, pin_memory=True)

    def record(self, work: Work) -> Work:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            work()
        return graph.replay

    def send(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def fetch(self, pairs: tuple[tuple[Tensor, Tensor], ...]) -> Mark:
        self._copies.wait_stream(self._stream)
        with torch.cuda.stream(self._copies):
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
            mark = CudaMark()
            mark.event.record(self._copies)
        return mark

    def mark(self) -> Mark:
        mark = CudaMark()
        mark.event.record(self._stream)
        return mark

    def follow(self, mark: Mark) -> None:
        assert isinstance(mark, CudaMark)
        self._stream.wait_event(mark.event)
