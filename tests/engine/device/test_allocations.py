"""Memory behind descriptors: the host's, and a GPU's on a driver without a device. Both do the same."""

import ctypes
import mmap
import os
import subprocess
import sys
from pathlib import Path

import cuda_driver
import pytest

from pagewire.engine.device.allocations import HOST, AllocationError, memory_of

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no memfd")
CALLS = (
    "cuMemCreate",
    "cuMemExportToShareableHandle",
    "cuMemImportFromShareableHandle",
    "cuMemMap",
    "cuMemSetAccess",
)


def num_open() -> int:
    return len(os.listdir("/proc/self/fd"))


def is_mapped(address: int) -> bool:
    """Whether this process has these addresses."""
    return any(
        int(low, 16) <= address < int(high, 16)
        for line in Path("/proc/self/maps").read_text().splitlines()
        for low, high in [line.split()[0].split("-")]
    )


def check(kind: str) -> None:
    """All that a worker and a keeper do with it. Runs in a process of its own for a GPU's."""
    memory = memory_of(kind)
    before = num_open()
    allocation = memory.allocate(5000)
    size = allocation.num_bytes
    assert size >= 5000 and size % mmap.PAGESIZE == 0
    first, second = memory.reserve(size), memory.reserve(size)
    for address in (first, second):
        memory.map(address, size, allocation.fd)
    ctypes.memmove(first + 4990, b"shared", 6)
    assert ctypes.string_at(second + 4990, 6) == b"shared"
    memory.unmap(first, size)
    assert is_mapped(first), "the addresses stay reserved"
    ctypes.memmove(second, b"again", 5)
    memory.map(first, size, allocation.fd)
    assert ctypes.string_at(first, 5) == b"again"
    other = memory.reserve(2 * size)
    with pytest.raises(AllocationError):
        memory.map(other, 2 * size, allocation.fd)
    memory.release(other, 2 * size)
    memory.free(allocation)
    assert num_open() == before, "a mapping needs no descriptor"
    assert ctypes.string_at(second, 5) == b"again", "and holds the memory"
    for address in (first, second):
        memory.unmap(address, size)
        memory.release(address, size)
        assert not is_mapped(address)


def check_refusals(kind: str) -> None:
    """What the driver refuses is an error with the function's name, and leaves nothing behind."""
    memory = memory_of(kind)
    allocation = memory.allocate(1)
    address = memory.reserve(allocation.num_bytes)
    before = num_open()
    for call in CALLS:
        os.environ["REFUSE"] = call
        with pytest.raises(AllocationError, match=f"^{call}: operation not permitted$"):
            memory.map(address, allocation.num_bytes, allocation.fd)
            memory.allocate(1)
        assert num_open() == before, call
    os.environ["REFUSE"] = "an attribute"
    with pytest.raises(AllocationError, match="has no memory behind file descriptors"):
        memory_of(kind)
    os.environ["REFUSE"] = "cuInit"
    with pytest.raises(AllocationError, match="cuInit: operation not permitted"):
        memory_of(kind)
    os.environ["REFUSE"] = ""
    with pytest.raises(AllocationError, match="cuDeviceGet: error 101"):
        memory_of("cuda:7")
    with pytest.raises(AllocationError, match="cuMemCreate: out of memory"):
        memory.allocate(1 << 50)
    memory.map(address, allocation.num_bytes, allocation.fd)


def test_the_memory_of_the_host() -> None:
    check(HOST)


@cuda_driver.needs_driver
@pytest.mark.parametrize("function", ["check", "check_refusals"])
def test_the_memory_of_a_gpu(function: str) -> None:
    code = f"import test_allocations; test_allocations.{function}({cuda_driver.KIND!r})"
    subprocess.run([sys.executable, "-c", code], env=cuda_driver.environment(), cwd=Path(__file__).parent, check=True)


def test_a_machine_without_a_driver() -> None:
    with pytest.raises(AllocationError, match=r"there is no libcuda\.so\.1"):
        memory_of("cuda:0")
