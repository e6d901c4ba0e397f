"""Matrices of 2 to 6 bits in superblocks of 256 columns, as GGUF files have them, and their meaning in plain torch:
what `kernels/cpu/superblocks.c` computes with.

Each group of 16 or 32 columns has an integer scale, and in some types an integer minimum; a superblock has a float16
factor for each of the two. The bytes of a superblock stay as they are in the file until the kernels pack them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from .grouped_weight import GroupedWeight

COLUMNS = 256
"""Of a superblock."""


class Form(NamedTuple):
    """How a type's superblocks are made."""

    bits: int  # of a number
    num_bytes: int  # of a superblock in the file
    groups: int  # in a superblock
    zero: int  # what is subtracted from the numbers; types with minima have none
    factors: tuple[int, ...]  # where the float16 factors are: of the scales, and of the minima


FORMS = {
    "Q2_K": Form(2, 84, 16, 0, (80, 82)),
    "Q3_K": Form(3, 110, 16, 4, (108,)),
    "Q4_K": Form(4, 144, 8, 0, (0, 2)),
    "Q5_K": Form(5, 176, 8, 0, (0, 2)),
    "Q6_K": Form(6, 210, 16, 32, (208,)),
}
"""By the type's name in ggml."""


class Values(NamedTuple):
    """A matrix [n, k] of superblocks, decoded."""

    numbers: Tensor  # uint8 [n, k], below 2 ** bits
    scales: Tensor  # int16 [n, groups], -128 … 127
    minima: Tensor | None  # int16 [n, groups], 0 … 63
    factors: Tensor  # float32 [n, k / 256], of the scales
    min_factors: Tensor | None  # float32 [n, k / 256], of the minima


@dataclass(frozen=True)
class SuperblockWeight:
    """weight = factor · scale · (number - zero), or factor · scale · number - min_factor · minimum."""

    kind: str  # a key of `FORMS`
    blocks: Tensor  # uint8 [n, k / 256 · num_bytes], as in the file

    @property
    def form(self) -> Form:
        return FORMS[self.kind]

    @property
    def shape(self) -> tuple[int, int]:
        """(n, k)"""
        n, num_bytes = self.blocks.shape
        return n, num_bytes // self.form.num_bytes * COLUMNS

    @property
    def group_size(self) -> int:
        """Columns that share a scale."""
        return COLUMNS // self.form.groups

    @property
    def nbytes(self) -> int:
        return self.blocks.nbytes

    def rows(self, index: Tensor) -> "SuperblockWeight":
        """Some rows, in another order."""
        return replace(self, blocks=self.blocks[index])

    def is_finite(self) -> bool:
        """Whether all factors are finite."""
        blocks = self.blocks.view(-1, self.form.num_bytes)
        return all(bool(_float16(blocks[:, at : at + 2]).isfinite().all()) for at in self.form.factors)

    def values(self) -> Values:
        blocks = self.blocks.view(-1, self.form.num_bytes)
        n, k = self.shape
        numbers, scales, minima = _DECODERS[self.kind](blocks)
        factors = [_float16(blocks[:, at : at + 2]).view(n, -1) for at in self.form.factors]
        return Values(
            numbers.reshape(n, k),
            scales.reshape(n, -1),
            None if minima is None else minima.reshape(n, -1),
            factors[0],
            factors[1] if minima is not None else None,
        )

    def grouped(self) -> GroupedWeight:
        """The same weight with a scale and an offset for each group. They are products of a float16 number and an
        integer of at most 9 bits, which float32 holds exactly."""
        values = self.values()
        scales = _times(values.factors, values.scales)
        if values.minima is None or values.min_factors is None:
            offsets = scales * self.form.zero
        else:
            offsets = _times(values.min_factors, values.minima)
        return GroupedWeight(
            values.numbers.contiguous(),
            scales.t().contiguous(),
            offsets.t().contiguous(),
            4 if self.form.bits <= 4 else 8,
        )

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """[n, k]; computed in float32 and rounded once."""
        return self.grouped().dequantize(dtype)


def concatenate(parts: Sequence[SuperblockWeight]) -> SuperblockWeight:
    """Stacks the rows. Raises ValueError if the types differ."""
    if any(part.kind != parts[0].kind for part in parts):
        raise ValueError(f"their types are {', '.join(part.kind for part in parts)}")
    return parts[0] if len(parts) == 1 else replace(parts[0], blocks=torch.cat([part.blocks for part in parts]))


def packed_bytes(kind: str, n: int, k: int) -> int:
    """The bytes of a matrix [n, k] as `kernels/cpu/superblocks.c` packs it: in each superblock of a row its two float16
    factors, a byte for each scale and each minimum, and the numbers."""
    form = FORMS[kind]
    return -(-n // 16) * 16 * (k // COLUMNS) * (4 + form.groups * len(form.factors) + COLUMNS * form.bits // 8)


def _times(factors: Tensor, integers: Tensor) -> Tensor:
    """[n, k / 256] and [n, groups] → [n, groups]"""
    n, num = factors.shape
    return (factors[:, :, None] * integers.view(n, num, -1)).flatten(1)


_Decoded = tuple[Tensor, Tensor, Tensor | None]
"""Of b superblocks: numbers uint8 [b, 256], scales int16 [b, groups], and minima int16 [b, groups] or None."""


def _float16(data: Tensor) -> Tensor:
    return data.contiguous().view(torch.float16).float()


def _spread(data: Tensor, run: int, bits: int) -> Tensor:
    """Numbers of `bits` bits from [b, bytes]: of each run of bytes all lowest bits first, then all next ones."""
    runs = data.reshape(len(data), -1, run)
    return torch.stack([(runs >> at) & (2**bits - 1) for at in range(0, 8, bits)], dim=2).flatten(1)


def _q2_k(blocks: Tensor) -> _Decoded:
    return _spread(blocks[:, 16:80], 32, 2), (blocks[:, :16] & 15).short(), (blocks[:, :16] >> 4).short()


def _q3_k(blocks: Tensor) -> _Decoded:
    scales = _spread(blocks[:, 96:104], 8, 4) | (_spread(blocks[:, 104:108], 4, 2) << 4)
    numbers = _spread(blocks[:, 32:96], 32, 2) | (_spread(blocks[:, :32], 32, 1) << 2)
    return numbers, scales.short() - 32, None


def _q4_k(blocks: Tensor) -> _Decoded:
    return _spread(blocks[:, 16:], 32, 4), *_scales_and_minima(blocks)


def _q5_k(blocks: Tensor) -> _Decoded:
    numbers = _spread(blocks[:, 48:], 32, 4) | (_spread(blocks[:, 16:48], 32, 1) << 4)
    return numbers, *_scales_and_minima(blocks)


def _scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Of Q4_K and Q5_K: eight of each, of 6 bits. The first four of each have a byte of their own; the others have
    their low bits in the last four bytes and their high bits at the top of those bytes."""
    scales, minima, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    return (
        torch.cat((scales & 63, (rest & 15) | (scales >> 2 & 48)), dim=1).short(),
        torch.cat((minima & 63, (rest >> 4) | (minima >> 2 & 48)), dim=1).short(),
    )


def _q6_k(blocks: Tensor) -> _Decoded:
    numbers = _spread(blocks[:, :128], 64, 4) | (_spread(blocks[:, 128:192], 32, 2) << 4)
    return numbers, blocks[:, 192:208].contiguous().view(torch.int8).short(), None


_DECODERS = {"Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k}
