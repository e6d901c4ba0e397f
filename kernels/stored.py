"""Packed matrices in parts, so that they can lie in memory that outlives their process.

A matrix that can be stored has two methods: `stored()` gives its parts, and the class method `restored(kernels, parts)`
makes it again from equal parts without packing.
"""

from typing import NamedTuple

from torch import Tensor

Field = bool | int | float | str | None


class Stored(NamedTuple):
    """The parts of a packed matrix."""

    kind: str  # the name of its class
    tensors: tuple[Tensor | None, ...]
    fields: tuple[Field, ...]
