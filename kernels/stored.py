"""Packed matrices in parts, so that they can lie in memory that outlives their process.

A matrix that can be stored has two methods: `stored()` gives its parts, and the class method `restored(kernels, parts)`
makes it again from equal parts without packing. A `Memory` is where it is packed to.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

Field = bool | int | float | str | None


class Stored(NamedTuple):
    """The parts of a packed matrix."""

    kind: str  # the name of its class
    tensors: tuple[Tensor | None, ...]
    fields: tuple[Field, ...]


class Memory(Protocol):
    """Where packed weights lie."""

    def filled(self, numel: int, dtype: torch.dtype, unit: int, fill: Callable[[Tensor, int], None]) -> Tensor:
        """A tensor [numel]. fill: called for one piece after the other, with memory for it and its first number; a
        piece is a multiple of `unit` numbers, as `numel` is."""


class OwnMemory:
    """This process's memory; a `Memory`."""

    def filled(self, numel: int, dtype: torch.dtype, unit: int, fill: Callable[[Tensor, int], None]) -> Tensor:
        whole = torch.empty(numel, dtype=dtype)
        fill(whole, 0)
        return whole


OWN_MEMORY = OwnMemory()
