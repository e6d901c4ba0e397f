"""The memory of what a step's launches hand to each other: the registers, and what one launch needs for itself.

It is allocated once, at the size of the largest step, and every step takes slices of it at offsets that depend on its
shape alone. So a recorded step takes nothing from the allocator for them, and neither the order in which shapes are
recorded nor their number changes how much memory they take. Steps run one after another, so they share it.
"""

from math import prod

import torch
from torch import Tensor

_ALIGNED = 256  # bytes: pointers that are no multiples of 16 would make Triton compile other kernels


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED) * _ALIGNED


class Scratch:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._of_launch = 0  # bytes that a launch takes at most
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)
        self._typed: dict[torch.dtype, Tensor] = {}
        self._num_bytes = 0
        self._at = 0  # bytes

    @property
    def nbytes(self) -> int:
        return self._num_bytes

    def expect(self, *sizes: int) -> None:
        """A launch of the largest step will take tensors of so many bytes each."""
        self._of_launch = max(self._of_launch, sum(map(aligned, sizes)))

    def allocate(self, *, registers: int, least: int) -> None:
        """registers: bytes of those of the largest step; least: bytes in all, of work that is no step."""
        self._num_bytes = max(aligned(registers) + self._of_launch, aligned(least))
        self._memory = torch.empty(self._num_bytes, dtype=torch.uint8, device=self._device)
        self._typed.clear()

    def drop(self) -> None:
        """Frees the memory, which holds nothing between steps."""
        self._memory.untyped_storage().resize_(0)

    def restore(self) -> None:
        """Raises torch.OutOfMemoryError."""
        if self._memory.untyped_storage().nbytes() < self._num_bytes:
            self._memory.untyped_storage().resize_(self._num_bytes)

    def at(self, first: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor that begins at a byte."""
        if dtype not in self._typed:
            self._typed[dtype] = self._memory.view(dtype)
        strides, stride = [], 1
        for size in reversed(shape):
            strides.append(stride)
            stride *= size
        return torch.as_strided(self._typed[dtype], shape, strides[::-1], first // dtype.itemsize)

    def begin(self, first: int = 0) -> None:
        """The next launch takes from this byte on."""
        self._at = first

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory for the present launch."""
        first, num_bytes = self._at, prod(shape) * dtype.itemsize
        assert first + num_bytes <= self._num_bytes, f"a scratch of {self._num_bytes} bytes is too small for {shape}"
        self._at = aligned(first + num_bytes)
        return self.at(first, shape, dtype)
