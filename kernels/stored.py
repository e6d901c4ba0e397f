"""Packed matrices in parts, so that they can lie in memory that outlives their process.

A matrix that can be stored has two methods: `stored()` gives its parts, and the class method `restored(kernels, parts)`
makes it again from equal parts without packing. Its constructor takes the memory of its lasting tensors from
`Kernels.empty`; a tensor from elsewhere is copied when it is stored.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

Field = bool | int | float | str | None


class Stored(NamedTuple):
    """The parts of a packed matrix."""

    kind: str  # the name of its class
    tensors: tuple[Tensor | None, ...]  # contiguous
    fields: tuple[Field, ...]


class Empty(Protocol):
    """Allocates memory for a packed weight."""

    def __call__(self, size: int, dtype: torch.dtype) -> Tensor: ...


def own_memory(size: int, dtype: torch.dtype) -> Tensor:
    """Memory of this process."""
    return torch.empty(size, dtype=dtype)
