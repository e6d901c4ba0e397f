"""Matrices of 8 or 4 bits whose columns share scales in groups, and their meaning in plain torch: what the C kernels
compute with (`kernels/cpu`), whatever format the checkpoint has.

`engine/weights/quantized.py` reads them from checkpoints, and `quantize` makes them.
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
    factor: Tensor | None = None  # float32 [n], of NVFP4: scales over factors, rounded to e4m3, are those of the file

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
        tensors = (self.numbers, self.scales, self.offsets, self.order, self.factor)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def rows(self, index: Tensor) -> "GroupedWeight":
        """Some rows, in another order."""
        return replace(
            self,
            numbers=self.numbers[index],
            scales=self.scales[:, index].contiguous(),
            offsets=self.offsets[:, index].contiguous(),
            factor=None if self.factor is None else self.factor[index],
        )

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """[n, k], with the columns in the order of the activations; computed in float32 and rounded once."""
        n, k = self.shape
        values = self.numbers if self.table is None else torch.tensor(self.table)[self.numbers.long()]
        grouped = values.view(n, -1, self.group_size).float()
        scales, offsets = (each.t()[:, :, None] for each in (self.scales, self.offsets))
        if (zeros := zero_points(self)) is not None:  # then nothing is rounded but the product
            weight = grouped.sub_(zeros.t()[:, :, None]).mul_(scales)
        else:
            weight = grouped.mul_(scales).sub_(offsets)
        return ordered(weight.to(dtype).view(n, k), self.order)


def concatenate(parts: Sequence[GroupedWeight]) -> GroupedWeight:
    """Stacks the rows, as in fused projections. Raises ValueError if the parts do not fit together."""
    first = parts[0]
    for part in parts[1:]:
        if (part.bits, part.table, part.group_size) != (first.bits, first.table, first.group_size) or (
            (part.factor is None) != (first.factor is None)
        ):
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
        factor=None if first.factor is None else torch.cat([part.factor for part in parts if part.factor is not None]),
    )


def ordered(weight: Tensor, order: Tensor | None) -> Tensor:
    """The weight with its columns in the order of the activations."""
    if order is None:
        return weight
    out = torch.empty_like(weight)
    out[:, order.long()] = weight
    return out


def form(quantization: str, k: int) -> tuple[int, int]:
    """(bits, group size) of matrices with k columns, for a value of `--quantization`."""
    group = next((size for size in (128, 64, 32) if k % size == 0), None)
    return (8, k) if quantization == "int8" or group is None else (4, group)


def zero_points(weight: GroupedWeight) -> Tensor | None:
    """uint8 [groups, n], with which the offsets are exactly scale · zero point; None if there are none. Where a scale
    is zero or NaN, any zero point is right, and it is that of another group."""
    is_scaled = (weight.scales != 0) & weight.scales.isfinite()
    zeros = (weight.offsets / weight.scales).round()
    others = zeros[is_scaled]
    zeros = torch.where(is_scaled, zeros, others[0] if len(others) else 0)
    is_exact = (weight.scales * zeros == weight.offsets) | ~weight.scales.isfinite()
    if ((zeros >= 0) & (zeros <= 255) & is_exact).all():
        return zeros.to(torch.uint8)
    return None


def narrowed(numbers: Tensor) -> Tensor:
    """float32 numbers in the first of bfloat16, float16 and float32 that holds them exactly."""
    for dtype in (torch.bfloat16, torch.float16):
        narrow = numbers.to(dtype)
        if torch.equal(narrow.float(), numbers):
            return narrow
    return numbers


_PARTS = tuple(1 - i / 16 for i in range(5))  # of a group's range, for 4 bits


def quantize(weight: Tensor, bits: int, group_size: int) -> GroupedWeight:
    """Rounds a float weight [n, k], whose k is a multiple of the group size.

    8 bits: symmetric, with the scale max |w| / 127. 4 bits: each group's range, which includes zero, is divided into 15
    steps; of five parts of the range, which cut off the extremes, the one with the least squared error is taken. The
    scales of 4 bits are bfloat16 numbers. The scale of a group with a number that is not finite is NaN.
    """
    n, k = weight.shape
    x = weight.float().view(n, -1, group_size)
    is_finite = x.isfinite().all(dim=2)
    x = x.masked_fill(~is_finite[:, :, None], 0)
    if bits == 8:
        most = x.abs().amax(dim=2)
        inverse = torch.where(most > 1e-30, torch.tensor(127.0) / most, 0)  # 127 / most is 127 · (1 / most) in torch
        numbers = (x * inverse[:, :, None]).round() + 128
        scales = (most / 127).masked_fill(~is_finite, torch.nan).t().contiguous()
        return GroupedWeight(numbers.to(torch.uint8).view(n, k), scales, 128 * scales, 8)
    high, low = x.amax(dim=2).clamp(min=0), (-x).amax(dim=2).clamp(min=0)
    best: tuple[Tensor, ...] | None = None
    for part in _PARTS:
        step = ((high + low) * part / 15).bfloat16().float()
        inverse = torch.where(step > 1e-30, 1 / step, 0)
        zero = (low * part * inverse).round().clamp(max=15)
        numbers = ((x * inverse[:, :, None]).round() + zero[:, :, None]).clamp(0, 15)
        error = _sum((x - (numbers - zero[:, :, None]) * step[:, :, None]).square_())
        found: tuple[Tensor, ...] = error, step, zero, numbers
        if best is not None:
            is_better = error < best[0]
            masks = is_better, is_better, is_better, is_better[:, :, None]
            found = tuple(map(torch.where, masks, found, best))
        best = found
    assert best is not None
    _, step, zero, numbers = best
    scales = step.masked_fill(~is_finite, torch.nan).t().contiguous()
    return GroupedWeight(numbers.to(torch.uint8).view(n, k), scales, zero.t() * scales, 4)


def _sum(x: Tensor) -> Tensor:
    """Over the last dimension: 16 sums of every sixteenth number, then their sum, in this order as in C."""
    lanes = torch.nn.functional.pad(x, (0, -x.shape[-1] % 16))
    lanes = lanes.view(*x.shape[:-1], -1, 16)
    total = torch.zeros_like(lanes[..., 0, :])
    for i in range(lanes.shape[-2]):
        total = total + lanes[..., i, :]
    out = torch.zeros_like(total[..., 0])
    for i in range(16):
        out = out + total[..., i]
    return out
