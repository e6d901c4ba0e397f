"""How `CudaDriver` records: with stand-ins for torch's CUDA, whose memory is that of the model of its allocator."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from allocations import traced
from caching_allocator import CachingAllocator

from pagewire.engine.device.queue import CudaDriver

RESERVED = 12 << 20


class Cuda:
    """What of torch's CUDA the driver uses."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.allocator = allocator = CachingAllocator()
        self.pools: list[int] = []  # of the captures begun
        self.num_pools = 0
        self.is_broken = False  # CUDA refuses what is captured

        class Graph:
            pool = -1

            def capture_begin(graph, pool: int, capture_error_mode: str) -> None:
                assert capture_error_mode == "thread_local"
                allocator.begin_capture(pool)
                self.pools.append(pool)

            def capture_end(graph) -> None:
                if self.is_broken:
                    raise RuntimeError("operation failed due to a previous error during capture")
                allocator.end_capture()
                graph.pool = self.pools[-1]

            def replay(graph) -> None:
                pass

            def __del__(graph) -> None:
                if graph.pool >= 0:
                    allocator.release(graph.pool)

        def waits(*args: object) -> None:
            raise AssertionError("a recording must not wait, nor give memory back")

        patch.setattr(torch.cuda, "CUDAGraph", Graph)
        patch.setattr(torch.cuda, "Stream", lambda device: None)
        patch.setattr(torch.cuda, "set_stream", lambda stream: None)
        patch.setattr(torch.cuda, "graph_pool_handle", self._new_pool)
        patch.setattr(torch.cuda, "synchronize", waits)
        patch.setattr(torch.cuda, "empty_cache", waits)
        patch.setattr(torch.backends.cuda, "cublas_workspace_size", lambda: 32 << 20, raising=False)
        patch.setattr(torch._C, "_cuda_endAllocateToPool", lambda device, pool: allocator.end_capture(), raising=False)

    def _new_pool(self) -> int:
        self.num_pools += 1
        return self.num_pools


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(monkeypatch)


def record(driver: CudaDriver, work: Callable[[], None]) -> Callable[[], None]:
    stream: Any = None  # the one that is used
    return driver.capture(work, stream)


def nothing() -> None:
    pass


def num_bytes(work: Callable[[], object]) -> list[int]:
    """Of the tensors that the work allocates."""
    return [event.num_bytes for event in traced("work", lambda: [work()].clear()).events if event.num_bytes]


@pytest.mark.parametrize(("tells", "size"), [(True, 32 << 20), (False, 64 << 20)])
def test_what_cublas_keeps_is_assumed_where_torch_does_not_tell(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch, tells: bool, size: int
) -> None:
    """Before 2.13 torch has no function for it."""
    if not tells:
        monkeypatch.delattr(torch.backends.cuda, "cublas_workspace_size")
    assert CudaDriver(torch.device("cpu")).blas_workspace == size


def test_recordings_share_a_pool_whose_memory_the_first_one_reserves(cuda: Cuda) -> None:
    driver = CudaDriver(torch.device("cpu"))
    assert num_bytes(lambda: driver.reserve(RESERVED)) == [RESERVED], "for work that is not recorded"
    kept = []
    assert num_bytes(lambda: kept.append(record(driver, nothing))) == [RESERVED]
    assert num_bytes(lambda: kept.append(record(driver, nothing))) == []
    assert len(set(cuda.pools)) == 1


def test_a_new_pool_is_made_when_all_recordings_were_dropped(cuda: Cuda) -> None:
    """Sleep drops all graphs. torch refuses their pool afterwards, if its memory was not given back yet."""
    driver = CudaDriver(torch.device("cpu"))
    driver.reserve(RESERVED)
    kept = [record(driver, nothing), record(driver, nothing)]
    kept.clear()
    gc.collect()
    assert num_bytes(lambda: kept.append(record(driver, nothing))) == [RESERVED]
    assert cuda.pools[0] == cuda.pools[1] != cuda.pools[2]


@pytest.mark.parametrize("breaks", [False, True])
def test_a_recording_that_fails_leaves_room_for_others(cuda: Cuda, breaks: bool) -> None:
    """Whether its own work raises, or CUDA refuses it at the end."""
    driver = CudaDriver(torch.device("cpu"))
    first = record(driver, nothing)

    def fails() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    cuda.is_broken = breaks
    with pytest.raises(RuntimeError):
        record(driver, nothing if breaks else fails)
    cuda.is_broken = False
    second = record(driver, nothing)
    assert len(set(cuda.pools)) == 1 and first != second
