"""The queue of a device's work, in order: launches, recordings of them, copies to and from the host.

`CudaQueue` is a stream with CUDA graphs. `EagerQueue` does everything at once, for CPUs: Triton's interpreter runs the
kernels there, so that the layers above can be tested without a GPU.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Protocol, cast
from weakref import WeakSet

import torch
from torch import Tensor

from ...kernels.triton.tuned import tuned
from ..parallel.ring import Transfer

Work = Callable[[], None]

# Where torch does not tell (< 2.13): cuBLAS takes 32 MiB on Hopper and Blackwell, and less on others; cuBLASLt takes as
# much again, if it does not use the same (https://github.com/pytorch/pytorch/pull/168175).
_BLAS_WORKSPACE = 2 * (32 << 20)


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

    @property
    def blas_workspace(self) -> int:
        """Bytes that the device's library for products keeps."""

    def num_programs(self, head_dim: int) -> int:
        """Programs of decode attention that the device runs at once."""

    def host_memory(self, size: int, dtype: torch.dtype) -> Tensor:
        """Host memory that the device can read and write while the host continues."""

    def reserve(self, num_bytes: int) -> None:
        """Work takes at most so many bytes for temporary tensors, and so does all recorded work together. Reserves them
        in one piece, so that it does not matter which work comes first. Raises torch.OutOfMemoryError."""

    def record(self, work: Work) -> Work:
        """Records `work` without running it; the returned work repeats it on the same memory in one launch. `work` must
        have run before, so that its kernels are loaded."""

    def send(self, source: Tensor, target: Tensor) -> None:
        """Copies from host memory, in queue order."""

    def fetch(self, pairs: tuple[tuple[Tensor, Tensor], ...]) -> Mark:
        """Copies device tensors to host memory after all earlier work. Later work does not wait for the copies."""

    def transfer(self, start: Callable[[], Transfer], *, after: Mark, is_sent: bool) -> Mark:
        """Exchanges a tensor with another device, after the mark and the transfers of the same direction. Later work
        does not wait for it. start: begins it. Returns the mark of its end."""

    def mark(self) -> Mark: ...

    def follow(self, mark: Mark) -> None:
        """Later work starts after the mark, which may be that of a `fetch` or a `transfer`."""

    def beside(self, mark: Mark) -> AbstractContextManager[object]:
        """What this thread launches while the context is open starts after the mark, and neither waits for later work
        of the queue nor delays it."""


class EagerMark:
    """Reached, because the work was done when it was queued, except for a transfer."""

    def __init__(self, transfer: Transfer | None = None) -> None:
        self._transfer = transfer
        self.at = time.perf_counter()

    def is_reached(self) -> bool:
        return self._transfer is None

    def wait(self) -> None:
        self.arrive()

    def arrive(self) -> None:
        """Ends a transfer."""
        if self._transfer is not None:
            self._transfer.wait()
            self._transfer = None

    def ms_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, EagerMark)
        return (self.at - earlier.at) * 1000


class EagerQueue:
    blas_workspace = 0

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def num_programs(self, head_dim: int) -> int:
        return 4

    def host_memory(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(size, dtype=dtype)

    def reserve(self, num_bytes: int) -> None:
        pass

    def record(self, work: Work) -> Work:
        return work

    def send(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source)

    def fetch(self, pairs: tuple[tuple[Tensor, Tensor], ...]) -> Mark:
        for source, target in pairs:
            target.copy_(source)
        return self.mark()

    def transfer(self, start: Callable[[], Transfer], *, after: Mark, is_sent: bool) -> Mark:
        return EagerMark(start())

    def mark(self) -> Mark:
        return EagerMark()

    def follow(self, mark: Mark) -> None:
        assert isinstance(mark, EagerMark)
        mark.arrive()

    def beside(self, mark: Mark) -> AbstractContextManager[object]:
        return nullcontext()


class Stream(Protocol):
    """Work that runs in its order, as `torch.cuda.Stream`."""

    def wait_stream(self, stream: "Stream") -> None:
        """Later work starts after all work that was launched on the other stream so far."""

    def wait_event(self, event: "Event") -> None:
        """Later work starts after the event."""


class Event(Protocol):
    """A point in a stream, as `torch.cuda.Event`."""

    def record(self, stream: Stream) -> None: ...

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end_event: "Event") -> float:
        """In milliseconds."""


class Driver(Protocol):
    """What `CudaQueue` takes from CUDA. In the tests, another driver runs work as late or as early as the order allows,
    and finds accesses to memory that nothing orders."""

    def stream(self) -> Stream: ...

    def event(self) -> Event: ...

    def use(self, stream: Stream) -> None:
        """From now on this thread launches its work on the stream."""

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """While the context is open, this thread launches its work on the stream."""

    def pinned(self, size: int, dtype: torch.dtype) -> Tensor:
        """Zeros in host memory from which and to which the device copies while the host continues."""

    def capture(self, work: Work, stream: Stream) -> Work:
        """Records the work, which runs on this stream, without running it. All recordings share one pool of memory."""

    def reserve(self, num_bytes: int) -> None:
        """Leaves the allocator with so many bytes in one free block, and the pool of recordings too, when the first of
        them begins. Raises torch.OutOfMemoryError."""

    @property
    def blas_workspace(self) -> int:
        """Bytes that cuBLAS keeps for itself."""

    def num_programs(self, head_dim: int) -> int:
        """Programs of decode attention that all multiprocessors hold together."""


class CudaDriver:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        size: Callable[[], int] | None = getattr(torch.backends.cuda, "cublas_workspace_size", None)
        self.blas_workspace = _BLAS_WORKSPACE if size is None else size()  # cuBLASLt uses the same
        self._pool = torch.cuda.graph_pool_handle()
        self._reserved = 0  # bytes
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()

    def stream(self) -> Stream:
        return cast(Stream, torch.cuda.Stream(self._device))  # type: ignore[no-untyped-call]

    def event(self) -> Event:
        return cast(Event, torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]

    def use(self, stream: Stream) -> None:
        torch.cuda.set_stream(cast(torch.cuda.Stream, stream))

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        return torch.cuda.stream(cast(torch.cuda.Stream, stream))

    def pinned(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(size, dtype=dtype, pin_memory=True)

    def capture(self, work: Work, stream: Stream) -> Work:
        """Unlike `torch.cuda.graph`, neither waits for the device nor gives back the allocator's free memory. The
        stream is the one that `use` has named."""
        is_first = not self._graphs
        if is_first:  # torch refuses a pool all of whose graphs are gone
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            if is_first:
                self._take_and_free()
            work()
        finally:
            self._end(graph)
        self._graphs.add(graph)
        return graph.replay

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        """Of a capture. Raises RuntimeError if CUDA refused something in it."""
        try:
            graph.capture_end()
        except RuntimeError:
            with suppress(RuntimeError):  # else torch's allocator takes the capture as under way for ever
                torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
            raise

    def reserve(self, num_bytes: int) -> None:
        self._reserved = num_bytes
        self._take_and_free()

    def _take_and_free(self) -> None:
        """Leaves the allocator, or the pool of the capture under way, with the reserved bytes in one free block."""
        if self._reserved:
            torch.empty(self._reserved, dtype=torch.uint8, device=self._device)

    def num_programs(self, head_dim: int) -> int:
        # Shared memory: each program has two buffers of the keys and values of a tile of at most 32 KiB.
        properties = torch.cuda.get_device_properties(self._device)
        if head_dim > 256:  # of latent attention: two programs do not fit into the registers
            held = 1
        else:
            held = properties.shared_memory_per_multiprocessor // (2 * 2 * 64 * min(head_dim, 128) * 2 + 8192)
        held = tuned("decode_attention", head_dim, programs=max(1, min(held, 4)))["programs"]
        return int(properties.multi_processor_count * held)


class CudaMark:
    """A CUDA event. The host waits in a busy loop: a step is shorter than the time to wake a thread."""

    def __init__(self, event: Event) -> None:
        self.event = event

    def is_reached(self) -> bool:
        return self.event.query()

    def wait(self) -> None:
        self.event.synchronize()

    def ms_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, CudaMark)
        return earlier.event.elapsed_time(self.event)


class CudaQueue:
    """All graphs share one memory pool: they never run at the same time, and results that outlive a graph are in
    tensors allocated outside the pool.

    The pool never gives memory back while a graph lives, and blocks are merged only within what one cudaMalloc gave.
    So the first recording reserves all that recordings take, in one piece: whatever a later one takes and frees comes
    from it, in whichever order shapes are recorded."""

    def __init__(self, device: torch.device, driver: Driver | None = None) -> None:
        """driver: None stands for CUDA."""
        self.device = device
        self._driver: Driver = CudaDriver(device) if driver is None else driver
        self._stream = self._driver.stream()
        self._copies = self._driver.stream()
        self._received, self._sent = self._driver.stream(), self._driver.stream()  # transfers
        self._aside = self._driver.stream()  # what is launched `beside`; in `_copies` it would wait for a whole step
        self._driver.use(self._stream)

    def num_programs(self, head_dim: int) -> int:
        return self._driver.num_programs(head_dim)

    def host_memory(self, size: int, dtype: torch.dtype) -> Tensor:
        return self._driver.pinned(size, dtype)

    @property
    def blas_workspace(self) -> int:
        return self._driver.blas_workspace

    def reserve(self, num_bytes: int) -> None:
        self._driver.reserve(num_bytes)

    def record(self, work: Work) -> Work:
        return self._driver.capture(work, self._stream)

    def send(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def fetch(self, pairs: tuple[tuple[Tensor, Tensor], ...]) -> Mark:
        self._copies.wait_stream(self._stream)
        with self._driver.on(self._copies):
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
        return self._mark(self._copies)

    def transfer(self, start: Callable[[], Transfer], *, after: Mark, is_sent: bool) -> Mark:
        assert isinstance(after, CudaMark)
        stream = self._sent if is_sent else self._received
        stream.wait_event(after.event)
        with self._driver.on(stream):
            transfer = start()
            transfer.wait()
        return self._mark(stream)

    def mark(self) -> Mark:
        return self._mark(self._stream)

    def follow(self, mark: Mark) -> None:
        assert isinstance(mark, CudaMark)
        self._stream.wait_event(mark.event)

    @contextmanager
    def beside(self, mark: Mark) -> Iterator[None]:
        assert isinstance(mark, CudaMark)
        self._aside.wait_event(mark.event)
        with self._driver.on(self._aside):
            yield

    def _mark(self, stream: Stream) -> CudaMark:
        mark = CudaMark(self._driver.event())
        mark.event.record(stream)
        return mark
