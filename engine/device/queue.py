"""Where the work of a device is put, in order: launches, recordings of them, copies to and from the host.

`CudaQueue` is a stream with CUDA graphs. `EagerQueue` does everything at once, which is what a CPU needs: the kernels
run in Triton's interpreter there, so that all that stands above them can be tested without a GPU.
"""

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from ...kernels.triton.tuned import tuned

Work = Callable[[], None]


class Mark(Protocol):
    """A place in the queue."""

    def is_reached(self) -> bool:
        """Whether all that was put before it is done."""

    def wait(self) -> None:
        """Returns when it is."""

    def ms_since(self, earlier: "Mark") -> float:
        """Milliseconds between the two on the device. Both must have been reached."""


class Queue(Protocol):
    """One device's. A single thread uses it, and whatever that thread launches goes there."""

    device: torch.device

    def num_programs(self, head_dim: int) -> int:
        """Programs of decode attention that the device holds at once."""

    def host_memory(self, size: int, dtype: torch.dtype) -> Tensor:
        """Memory on the host that the device reads and writes while the host goes on."""

    def record(self, work: Work) -> Work:
        """Work that does the same on the same memory with one launch. `work` has been done before, so that its kernels
        are loaded; it is not done here."""

    def send(self, source: Tensor, target: Tensor) -> None:
        """Copies from host memory, in order."""

    def fetch(self, pairs: tuple[tuple[Tensor, Tensor], ...]) -> Mark:
        """Copies device tensors into host memory after all that was put before, while later work goes on."""

    def mark(self) -> Mark:
        """Here."""

    def follow(self, mark: Mark) -> None:
        """What is put from here on begins after the mark, which a copy on the side may have."""


class EagerMark:
    """Everything is done when it was put."""

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
    """See `Queue`."""

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
    """An event. The host waits in a loop: a step is shorter than the system takes to wake a thread."""

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
    """See `Queue`. All graphs share one pool of memory: they never run at the same time, and what they leave for others
    lies in tensors made before them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        torch.cuda.set_stream(self._stream)
        self._pool = torch.cuda.graph_pool_handle()

    def num_programs(self, head_dim: int) -> int:
        # Two buffers of keys and values of a page of 64 positions, of what a multiprocessor has for its programs.
        properties = torch.cuda.get_device_properties(self.device)
        held = properties.shared_memory_per_multiprocessor // (2 * 2 * 64 * head_dim * 2 + 8192)
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
