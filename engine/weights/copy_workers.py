"""Copies weights from files to their parameters: directly on a CPU, where reading is copying; to a device by several
threads, each of which reads into its own pinned memory while its previous copy of the same tensor is still under
way."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from threading import local
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

_T = TypeVar("_T")

_NUM_WORKERS = 4
_NUM_AHEAD = 16  # limit of jobs whose results are not taken yet
_CHUNK_BYTES = 32 << 20  # of pinned memory; a worker has two


class CopyWorker(Protocol):
    """Fills tensors. Used by one thread."""

    def fill(self, target: Tensor, source: Tensor) -> None:
        """target = source, cast; done when `wait` returns. source: on the CPU, of the same shape."""

    def wait(self) -> None:
        """Returns when all targets are filled."""


class DirectCopy:
    """Fills at once."""

    def fill(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def wait(self) -> None:
        pass


class StagedCopy:
    """Fills through two buffers: one is read into while the device copies from the other."""

    def __init__(self, buffers: Sequence[Tensor], send: Callable[[Tensor, Tensor], Callable[[], None]]) -> None:
        """buffers: uint8, of one size, in memory that the device can read while the host continues. send: starts a copy
        (to, from) and returns a function that waits for its end."""
        self._send = send
        self._buffers: deque[tuple[Tensor, Callable[[], None]]] = deque((buffer, _nothing) for buffer in buffers)
        self._num_bytes = len(buffers[0])

    def fill(self, target: Tensor, source: Tensor) -> None:
        assert target.is_contiguous() and target.shape == source.shape, (target.shape, source.shape)
        size = self._num_bytes // target.element_size()
        for to, part in zip(torch.split(target.view(-1), size), torch.split(source.reshape(-1), size), strict=True):
            buffer, wait = self._buffers.popleft()
            wait()
            staged = buffer.view(target.dtype)[: len(part)]
            staged.copy_(part)  # reads the file, casts, and releases the GIL meanwhile
            self._buffers.append((buffer, self._send(to, staged)))

    def wait(self) -> None:
        for _, wait in self._buffers:
            wait()


def _nothing() -> None:
    pass


def _cuda_worker(device: torch.device) -> StagedCopy:
    stream, of_caller = torch.cuda.Stream(device), torch.cuda.current_stream(device)  # type: ignore[no-untyped-call]

    def send(target: Tensor, staged: Tensor) -> Callable[[], None]:
        stream.wait_stream(of_caller)  # work launched there may still use what lay in the target's memory before
        with torch.cuda.stream(stream):
            target.copy_(staged, non_blocking=True)
            event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
        wait: Callable[[], None] = event.synchronize
        return wait

    return StagedCopy([torch.empty(_CHUNK_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)], send)


class Jobs:
    """Runs jobs on copy workers and takes their results in the order in which the jobs were put."""

    def __init__(self, workers: Sequence[CopyWorker], begin: Callable[[], None] = _nothing) -> None:
        """begin: each thread that is not the caller's calls it first."""
        self._workers, self._begin = workers, begin
        self._free: SimpleQueue[CopyWorker] = SimpleQueue()
        self._of_thread = local()
        self._pool: ThreadPoolExecutor | None = None
        if len(workers) > 1:
            for worker in workers:
                self._free.put(worker)
            self._pool = ThreadPoolExecutor(len(workers), "weights", initializer=self._take_worker)
        self._waiting: deque[tuple[Future[Any], Callable[[Any], None]]] = deque()

    def put(self, job: Callable[[CopyWorker], _T], then: Callable[[_T], None]) -> None:
        """Runs `job`, then `then` with its result, when all tensors of the job are filled. Raises the error of this job
        or an earlier one."""
        if self._pool is None:
            then(_run(self._workers[0], job))
            return
        self._waiting.append((self._pool.submit(self._run_in_thread, job), then))
        if len(self._waiting) > _NUM_AHEAD:
            self._take()

    def finish(self) -> None:
        """Returns when all jobs are done."""
        while self._waiting:
            self._take()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _take(self) -> None:
        future, then = self._waiting.popleft()
        then(future.result())

    def _take_worker(self) -> None:
        self._begin()
        self._of_thread.worker = self._free.get_nowait()

    def _run_in_thread(self, job: Callable[[CopyWorker], _T]) -> _T:
        with torch.inference_mode():
            return _run(self._of_thread.worker, job)


def _run(worker: CopyWorker, job: Callable[[CopyWorker], _T]) -> _T:
    """Returns, or raises, when no copy is under way any more: who then reads or frees a target does not know on which
    stream it is filled. Other workers copy meanwhile."""
    try:
        return job(worker)
    finally:
        worker.wait()


@contextmanager
def copy_jobs(device: torch.device) -> Iterator[Jobs]:
    """Jobs that fill tensors on this device; all are done when the context ends without an error."""
    if device.type == "cuda":
        # A thread begins on GPU 0, where CUDA would make a context of some hundred MB.
        jobs = Jobs([_cuda_worker(device) for _ in range(_NUM_WORKERS)], partial(torch.cuda.set_device, device))
    else:
        jobs = Jobs([DirectCopy()])
    try:
        yield jobs
        jobs.finish()
    finally:
        jobs.close()
