"""Memory of a device that outlives this process, as tensors."""

import ctypes
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from .allocations import HOST, AllocationError, DescribedMemory, memory_of


class Mapped:
    """An allocation that is mapped here. `bytes` stays valid while it is unmapped and mapped again, at the same
    addresses, but must not be used meanwhile."""

    def __init__(self, memory: DescribedMemory, num_bytes: int, fd: int, tensor_at: "TensorAt") -> None:
        """Raises AllocationError."""
        self.num_bytes = num_bytes
        self._memory = memory
        self._address = memory.reserve(num_bytes)
        try:
            memory.map(self._address, num_bytes, fd)
        except AllocationError:
            memory.release(self._address, num_bytes)
            raise
        try:
            self.bytes = tensor_at(self._address, num_bytes)  # uint8 [num_bytes]
        except RuntimeError as error:
            self.close()
            raise AllocationError(f"torch does not take the memory: {error}") from error
        if self.bytes.data_ptr() != self._address:
            self.close()
            raise AllocationError("torch has copied the memory instead of taking it")

    def unmap(self) -> None:
        """No work that uses it may be under way. Raises AllocationError."""
        self._memory.unmap(self._address, self.num_bytes)

    def remap(self, fd: int) -> None:
        """fd: of an allocation of the same size. Raises AllocationError."""
        self._memory.map(self._address, self.num_bytes, fd)

    def close(self) -> None:
        """`bytes` must not be used any more. Without it the mapping lasts as long as the process. Raises
        AllocationError."""
        self.unmap()
        self._memory.release(self._address, self.num_bytes)


TensorAt = Callable[[int, int], Tensor]
"""(address, number of bytes) → uint8 [bytes] there."""


class KeptMemory:
    """The memory of one device that a keeper allocates and this process maps."""

    def __init__(self, kind: str, tensor_at: TensorAt) -> None:
        """kind: see `allocations.memory_of`."""
        self.kind = kind
        self._tensor_at = tensor_at
        self._memory: DescribedMemory | None = None

    def map(self, fd: int, num_bytes: int) -> Mapped:
        """A whole allocation. Does not take the descriptor. Raises AllocationError."""
        if self._memory is None:
            self._memory = memory_of(self.kind)
        return Mapped(self._memory, num_bytes, fd, self._tensor_at)


def host_memory() -> KeptMemory:
    """Of the second implementation, in which the host's memory takes the place of a GPU's."""
    return KeptMemory(HOST, _at_host)


def cuda_memory(number: int) -> KeptMemory:
    """Of a GPU, which is this process's current device."""
    return KeptMemory(f"cuda:{number}", partial(_at_cuda, number))


def _at_host(address: int, num_bytes: int) -> Tensor:
    return torch.frombuffer((ctypes.c_ubyte * num_bytes).from_address(address), dtype=torch.uint8)


class _CudaArray:
    """What torch takes from other libraries that have memory on a GPU."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None,
        }  # fmt: skip


def _at_cuda(number: int, address: int, num_bytes: int) -> Tensor:
    return torch.as_tensor(_CudaArray(address, num_bytes), device=f"cuda:{number}")  # else torch copies it to the host
