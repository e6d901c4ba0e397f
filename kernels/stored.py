"""Packed matrices in parts, so that they can lie in memory that outlives their process.

A matrix that can be stored has two methods: `stored()` gives its parts, and the class method `restored(kernels, parts)`
makes it again from equal parts without packing. Its constructor takes the memory of its lasting tensors from
`Kernels.empty`; a tensor from elsewhere is copied when it is stored.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .ops import Matrix

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


@dataclass(frozen=True)
class Storage:
    """What a table of operations can do with the parts of its matrices."""

    layout: str  # differs if the parts of equal weights may differ
    restored: Callable[[Stored], "Matrix"]
    placed: Callable[[Empty], AbstractContextManager[None]]  # within it, matrices are packed into memory of `Empty`
