"""Quantized matrices of 8 and 4 bits in the layout of the Triton kernels, and their meaning in plain torch:
`dequantize` is the specification that the products in `kernels/triton` are tested against.

`engine/weights/quantized.py` reads them from checkpoints.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import grouped_weight, superblock_weight
from .grouped_weight import GroupedWeight, narrowed, ordered, zero_points
from .stored import Field, Stored
from .superblock_weight import SuperblockWeight


@dataclass(frozen=True)
class Fp8Weight:
    """float8 e4m3 [n, k], with a scale per row or per block."""

    values: Tensor  # float8_e4m3fn [n, k]
    scale: Tensor  # float32 [n], or [⌈n / rows⌉, ⌈k / columns⌉] of a block
    block: tuple[int, int] | None = None  # rows and columns that share a scale; None: one scale per row
    is_interleaved: bool = False  # with blocks: rows and scales alternate between the two halves

    @property
    def shape(self) -> tuple[int, int]:
        """(n, k)"""
        return self.values.shape[0], self.values.shape[1]

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scale.nbytes

    def to(self, device: torch.device) -> "Fp8Weight":
        """A copy on another device."""
        return Fp8Weight(self.values.to(device), self.scale.to(device), self.block, self.is_interleaved)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """[n, k]: values · scale, computed in float32 and rounded once."""
        n, k = self.shape
        if self.block is None:
            return (self.values.float() * self.scale[:, None]).to(dtype)
        row = torch.arange(n, device=self.scale.device)
        row = row // 2 // self.block[0] * 2 + row % 2 if self.is_interleaved else row // self.block[0]
        scale = self.scale[row].repeat_interleave(self.block[1], dim=1)[:, :k]
        return (self.values.float() * scale).to(dtype)

    def rows(self, index: Tensor) -> "Fp8Weight":
        """Some rows, in another order; blocks of scales become scales of each row and group of columns."""
        values = self.values.view(torch.uint8)[index].view(self.values.dtype)
        if self.block is None:
            return Fp8Weight(values, self.scale[index])
        return Fp8Weight(values, self.scale[index // self.block[0]], (1, self.block[1]))

    def interleave(self) -> "Fp8Weight":
        """Interleaves the rows of the first half (gates) and the second (ups)."""
        n, _ = self.shape
        values = self.values.view(torch.uint8)[_in_turn(n)].view(self.values.dtype)
        if self.block is None:
            return Fp8Weight(values, self.scale[_in_turn(n)])
        assert not self.is_interleaved and n // 2 % self.block[0] == 0, (n, self.block)
        return Fp8Weight(values, self.scale[_in_turn(self.scale.shape[0])].contiguous(), self.block, True)


@dataclass(frozen=True)
class Int4Weight:
    """4-bit integers; the weight is (number - zero) · scale, with a zero and a scale for each group of a row.

    A byte holds number k in its low half and number k + `half` in its high half, in tiles of 2 · half, so that a kernel
    multiplies each half of a tile by adjacent columns.
    """

    packed: Tensor  # uint8 [n, k / 2]
    scales: Tensor  # float16, bfloat16 or float32 [groups, n], so that the scales of a tile's rows are adjacent
    zeros: Tensor  # uint8 [groups, n], 0 … 16
    half: int  # 64, 32 or 16; divides the size of a group, k / groups
    order: Tensor | None = None  # int32 [k]: the activations' column for each column of the weight; None: the same

    @property
    def shape(self) -> tuple[int, int]:
        """(n, k)"""
        return self.packed.shape[0], 2 * self.packed.shape[1]

    @property
    def group_size(self) -> int:
        """Numbers of a row that share a scale."""
        return self.shape[1] // self.scales.shape[0]

    @property
    def nbytes(self) -> int:
        tensors = (self.packed, self.scales, self.zeros, *(() if self.order is None else (self.order,)))
        return sum(tensor.nbytes for tensor in tensors)

    def to(self, device: torch.device) -> "Int4Weight":
        """A copy on another device."""
        order = None if self.order is None else self.order.to(device)
        return Int4Weight(self.packed.to(device), self.scales.to(device), self.zeros.to(device), self.half, order)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """[n, k], with the columns in the order of the activations; computed in float32 and rounded once."""
        n, k = self.shape
        tiles = self.packed.view(n, -1, self.half)
        numbers = torch.stack((tiles & 15, tiles >> 4), dim=2).view(n, self.scales.shape[0], self.group_size).float()
        zeros, scales = (each.t().float()[:, :, None] for each in (self.zeros, self.scales))
        return ordered(((numbers - zeros) * scales).to(dtype).view(n, k), self.order)

    def interleave(self) -> "Int4Weight":
        """Interleaves the rows of the first half (gates) and the second (ups)."""
        rows = _in_turn(self.shape[0])
        return Int4Weight(
            self.packed[rows],
            self.scales[:, rows].contiguous(),
            self.zeros[:, rows].contiguous(),
            self.half,
            self.order,
        )


@dataclass(frozen=True)
class Int8Weight:
    """Signed 8-bit integers; the weight is number · scale, with a scale for each group of a row."""

    values: Tensor  # int8 [n, k]
    scales: Tensor  # float32 [groups, n]
    order: Tensor | None = None  # int32 [k], as of an `Int4Weight`

    @property
    def shape(self) -> tuple[int, int]:
        """(n, k)"""
        return self.values.shape[0], self.values.shape[1]

    @property
    def group_size(self) -> int:
        """Numbers of a row that share a scale."""
        return self.shape[1] // self.scales.shape[0]

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes + (0 if self.order is None else self.order.nbytes)

    def to(self, device: torch.device) -> "Int8Weight":
        """A copy on another device."""
        order = None if self.order is None else self.order.to(device)
        return Int8Weight(self.values.to(device), self.scales.to(device), order)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """[n, k], with the columns in the order of the activations; computed in float32 and rounded once."""
        n, k = self.shape
        grouped = self.values.view(n, -1, self.group_size).float()
        return ordered((grouped * self.scales.t()[:, :, None]).to(dtype).view(n, k), self.order)

    def interleave(self) -> "Int8Weight":
        """Interleaves the rows of the first half (gates) and the second (ups)."""
        rows = _in_turn(self.shape[0])
        return Int8Weight(self.values[rows], self.scales[:, rows].contiguous(), self.order)


@dataclass(frozen=True)
class Fp4Weight:
    """4-bit floats (e2m1) in the bytes of an `Int4Weight`. MXFP4 has groups of 32 and scales that are powers of two;
    NVFP4 groups of 16, whose e4m3 scales are times a factor for each row."""

    packed: Tensor  # uint8 [n, k / 2]
    scales: Tensor  # [groups, n]: float8_e4m3fn of NVFP4, else bfloat16, float16 or float32
    half: int  # 64, 32 or 16
    factor: Tensor | None = None  # float32 [n]; None: 1

    @property
    def shape(self) -> tuple[int, int]:
        """(n, k)"""
        return self.packed.shape[0], 2 * self.packed.shape[1]

    @property
    def group_size(self) -> int:
        """Numbers of a row that share a scale."""
        return self.shape[1] // self.scales.shape[0]

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.scales.nbytes + (0 if self.factor is None else self.factor.nbytes)

    def to(self, device: torch.device) -> "Fp4Weight":
        """A copy on another device."""
        factor = None if self.factor is None else self.factor.to(device)
        return Fp4Weight(self.packed.to(device), self.scales.to(device), self.half, factor)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """[n, k]: number · (scale · factor), computed in float32 and rounded once."""
        n, k = self.shape
        tiles = self.packed.view(n, -1, self.half)
        codes = torch.stack((tiles & 15, tiles >> 4), dim=2).view(n, -1, self.group_size)
        numbers = torch.tensor(E2M1, device=codes.device)[codes.long()]
        scales = self.scales.float() if self.factor is None else self.scales.float() * self.factor
        return (numbers * scales.t()[:, :, None]).to(dtype).view(n, k)

    def interleave(self) -> "Fp4Weight":
        """Interleaves the rows of the first half (gates) and the second (ups)."""
        rows = _in_turn(self.shape[0])
        narrow = self.scales.dtype == torch.float8_e4m3fn
        scales = (self.scales.view(torch.uint8) if narrow else self.scales)[:, rows].contiguous()
        factor = None if self.factor is None else self.factor[rows]
        return Fp4Weight(self.packed[rows], scales.view(self.scales.dtype), self.half, factor)


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The number of each code of 4 bits."""

QuantizedWeight = Fp8Weight | Int8Weight | Int4Weight | Fp4Weight
"""What the Triton kernels take."""
StoredWeight = Fp8Weight | GroupedWeight | SuperblockWeight
"""What is read from checkpoints."""


def stored(weight: QuantizedWeight) -> Stored:
    """The parts of a weight, which lie in memory one by one."""
    match weight:
        case Fp8Weight():
            fields = (weight.is_interleaved, *(weight.block or ()))
            return Stored("Fp8Weight", (weight.values, weight.scale), fields)
        case Int4Weight():
            return Stored("Int4Weight", (weight.packed, weight.scales, weight.zeros, weight.order), (weight.half,))
        case Int8Weight():
            return Stored("Int8Weight", (weight.values, weight.scales, weight.order), ())
        case Fp4Weight():
            return Stored("Fp4Weight", (weight.packed, weight.scales, weight.factor), (weight.half,))


def restored(parts: Stored) -> QuantizedWeight:
    """A weight of parts that are equal to those of `stored`. Raises ValueError for others."""
    match parts:
        case Stored("Fp8Weight", (Tensor() as values, Tensor() as scale), (bool() as is_interleaved, *block)):
            return Fp8Weight(values, scale, _pair(block), is_interleaved)
        case Stored("Int4Weight", (Tensor() as packed, Tensor() as scales, Tensor() as zeros, order), (int() as half,)):
            return Int4Weight(packed, scales, zeros, half, order)
        case Stored("Int8Weight", (Tensor() as values, Tensor() as scales, order), ()):
            return Int8Weight(values, scales, order)
        case Stored("Fp4Weight", (Tensor() as packed, Tensor() as scales, factor), (int() as half,)):
            return Fp4Weight(packed, scales, half, factor)
    raise ValueError(f"a {parts.kind} of {len(parts.tensors)} tensors and {len(parts.fields)} fields is not known")


def _pair(fields: Sequence[Field]) -> tuple[int, int] | None:
    match fields:
        case []:
            return None
        case [int() as rows, int() as columns]:
            return rows, columns
    raise ValueError(f"{fields} is no block")


def int4_weight(numbers: Tensor, scales: Tensor, zeros: Tensor, order: Tensor | None = None) -> Int4Weight:
    """Packs numbers [n, k] uint8 < 16, whose groups are consecutive; the rest as in `Int4Weight`. Raises ValueError if
    k or the group size is no multiple of 16."""
    packed, half = _packed(numbers, numbers.shape[1] // scales.shape[0])
    return Int4Weight(packed, scales.contiguous(), zeros.contiguous(), half, order)


def fp4_weight(codes: Tensor, scales: Tensor, factor: Tensor | None = None) -> Fp4Weight:
    """Packs the codes [n, k] uint8 of e2m1; the rest as in `Fp4Weight`. Raises ValueError if k is no multiple of 32."""
    is_narrow = scales.dtype == torch.float8_e4m3fn  # then no half of a tile needs scales of its own
    packed, half = _packed(codes, codes.shape[1] if is_narrow else codes.shape[1] // scales.shape[0])
    return Fp4Weight(packed, scales.contiguous(), half, factor)


def _packed(numbers: Tensor, group: int) -> tuple[Tensor, int]:
    """(the bytes of an `Int4Weight`, its half)."""
    n, k = numbers.shape
    half = next((h for h in (64, 32, 16) if group % h == 0 and k % (2 * h) == 0), None)
    if half is None:
        raise ValueError(f"{k} columns in groups of {group} cannot be packed in tiles of 32")
    tiles = numbers.view(n, -1, 2, half)
    return (tiles[:, :, 0] | tiles[:, :, 1] << 4).view(n, k // 2), half


def for_triton(weight: GroupedWeight) -> Int8Weight | Int4Weight | Fp4Weight:
    """The same weight for the Triton kernels. Raises ValueError if they cannot represent it."""
    zeros = zero_points(weight)
    if weight.table is not None:
        return _fp4_of(weight)
    if zeros is not None and weight.bits == 4:
        return int4_weight(weight.numbers, narrowed(weight.scales), zeros, weight.order)
    is_signed = (weight.offsets == 128 * weight.scales) | ~weight.scales.isfinite()
    if weight.bits == 8 and is_signed.all():
        values = (weight.numbers.to(torch.int16) - 128).to(torch.int8)
        return Int8Weight(values, weight.scales, weight.order)
    raise ValueError("its numbers are no integers of 4 bits with zero points, and no signed ones of 8 bits")


def _fp4_of(weight: GroupedWeight) -> Fp4Weight:
    numbers = [2 * number + 12 for number in E2M1]
    if weight.table != tuple(map(int, numbers)) or weight.order is not None:
        raise ValueError("its numbers are no floats of 4 bits in order")
    scales = 2 * weight.scales  # the numbers of the table are twice those of the format
    if weight.factor is None:
        return fp4_weight(weight.numbers, narrowed(scales))
    # The factor times a number of e4m3 was rounded to float32, so the quotient is next to a number of four bits.
    return fp4_weight(weight.numbers, (scales / weight.factor).to(torch.float8_e4m3fn), weight.factor)


def concatenate(parts: Sequence[StoredWeight]) -> StoredWeight:
    """Stacks the rows, as in fused projections. Raises ValueError if the parts do not fit together."""
    if len(parts) == 1:
        return parts[0]
    grouped = [part for part in parts if isinstance(part, GroupedWeight)]
    if len(grouped) == len(parts):
        return grouped_weight.concatenate(grouped)
    superblocks = [part for part in parts if isinstance(part, SuperblockWeight)]
    if len(superblocks) == len(parts):
        return superblock_weight.concatenate(superblocks)
    fp8 = [part for part in parts if isinstance(part, Fp8Weight)]
    if len(fp8) < len(parts):
        raise ValueError("they are quantized in different ways")
    block = fp8[0].block
    if any(part.block != block or part.is_interleaved for part in fp8):
        raise ValueError("their blocks differ")
    if block is not None and any(part.shape[0] % block[0] for part in fp8[:-1]):
        raise ValueError(f"their rows are no multiples of {block[0]}, which share a scale")
    values = torch.cat([part.values.view(torch.uint8) for part in fp8]).view(fp8[0].values.dtype)
    return Fp8Weight(values, torch.cat([part.scale for part in fp8]), block)


def _in_turn(n: int) -> Tensor:
    """0, n / 2, 1, n / 2 + 1, …"""
    assert n % 2 == 0, n
    return torch.arange(n).view(2, n // 2).t().reshape(n)
