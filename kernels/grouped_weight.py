"""Matrices of 8 or 4 bits whose columns share scales in groups, and their meaning in plain torch: what the C kernels
compute with (`kernels/cpu`), whatever format the checkpoint has.

`engine/weights/quantized.py` and `engine/weights/gguf.py` read them from checkpoints, and `quantize` makes them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class GroupedWeight:
    """weight = scale · value - offset, with a scale and an offset for each group of adjacent columns of a row.

    The value is the number itself, or with a `table` the entry that the number selects.
    """

    numbers: Tensor  # uint8 [n, k], each less than 2 ** bits
    scales: Tensor  # float32 [groups, n]
    offsets: Tensor  # float32 [groups, n]; scale · zero point for formats with zero points
    bits: int  # 8 or 4
    table: tuple[int, ...] | None = None  # 16 values of 0 … 255, for 4 bits
    order: Tensor | None = None  # int32 [k]: the activations' column for each column of the weight; None: the same

    @property
    def shape(self) -> tuple[int, int]:
        """(n, k)"""
        return self.numbers.shape[0], self.numbers.shape[1]

    @property
    def group_size(self) -> int:
        """Columns that share a scale; divides k."""
        return self.shape[1] // self.scales.shape[0]

    @property
    def nbytes(self) -> int:
        tensors = (self.numbers, self.scales, self.offsets, *(() if self.order is None else (self.order,)))
        return sum(tensor.nbytes for tensor in tensors)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """[n, k], with the columns in the order of the activations; computed in float32 and rounded once."""
        n, k = self.shape
        values = self.numbers if self.table is None else torch.tensor(self.table)[self.numbers.long()]
        grouped = values.view(n, -1, self.group_size).float()
        scales, offsets = (each.t()[:, :, None] for each in (self.scales, self.offsets))
        weight = grouped.mul_(scales).sub_(offsets).to(dtype).view(n, k)
        if self.order is None:
            return weight
        out = torch.empty_like(weight)
        out[:, self.order.long()] = weight
        return out


def concatenate(parts: Sequence[GroupedWeight]) -> GroupedWeight:
    """Stacks the rows, as in fused projections. Raises ValueError if the parts do not fit together."""
    first = parts[0]
    for part in parts[1:]:
        if (part.bits, part.table, part.group_size) != (first.bits, first.table, first.group_size):
            raise ValueError("their groups, tables or numbers of bits differ")
        is_same = (
            part.order is first.order if part.order is None or first.order is None else part.order.equal(first.order)
        )
        if not is_same:
            raise ValueError("their columns are ordered differently")
    if len(parts) == 1:
        return first
    return replace(
        first,
        numbers=torch.cat([part.numbers for part in parts]),
        scales=torch.cat([part.scales for part in parts], dim=1),
        offsets=torch.cat([part.offsets for part in parts], dim=1),
    )
