"""Matrices of 8 bits, packed for the C kernels."""

from typing import Self, cast

import torch
from torch import Tensor

from .. import reference
from ..stored import Stored
from .library import LANES, Kernels


class NativeInt8Matrix:
    """A weight [n, k] of 8 bits with a scale per column."""

    def __init__(self, kernels: Kernels, weight: Tensor) -> None:
        if weight.dtype != torch.bfloat16:
            weight = weight.float()
        self._kernels = kernels
        self._n, self._k = weight.shape
        columns = -(-self._n // LANES) * LANES
        self._words = -(-self._k // 4)
        self._packed = torch.empty(columns * self._words, dtype=torch.int32)
        self._scales, self._sums = torch.empty(columns), torch.empty(columns, dtype=torch.int32)
        self._at = self._packed.data_ptr(), self._scales.data_ptr(), self._sums.data_ptr()
        kernels.pack_int8(
            weight.contiguous().data_ptr(), *self._at, self._n, self._k, int(weight.dtype == torch.bfloat16)
        )  # fmt: skip

    def stored(self) -> Stored:
        return Stored(type(self).__name__, (self._packed, self._scales, self._sums), (self._n, self._k))

    @classmethod
    def restored(cls, kernels: Kernels, parts: Stored) -> Self:
        matrix = cls.__new__(cls)
        packed, scales, sums = parts.tensors
        assert packed is not None and scales is not None and sums is not None
        matrix._kernels, (matrix._n, matrix._k) = kernels, cast(tuple[int, int], parts.fields)
        matrix._words = -(-matrix._k // 4)
        matrix._packed, matrix._scales, matrix._sums = packed, scales, sums
        matrix._at = packed.data_ptr(), scales.data_ptr(), sums.data_ptr()
        return matrix

    @property
    def nbytes(self) -> int:
        return self._packed.nbytes + self._scales.nbytes + self._sums.nbytes

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        m = x.shape[0]
        out = torch.empty((m, self._n))
        work = torch.empty(m * (self._words + 1))
        self._kernels.linear_int8(
            x.data_ptr(), *self._at, 0 if bias is None else bias.data_ptr(), out.data_ptr(), work.data_ptr(),
            m, self._n, self._k, x.stride(0),
        )  # fmt: skip
        return out

    def silu_mul(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return reference.silu_mul(self.product(x, bias))

    def greedy(self, x: Tensor) -> tuple[Tensor, Tensor]:
        m = x.shape[0]
        work, best, most, ids = torch.empty(m * (self._words + 1)), *best_buffers(self._kernels, m)
        self._kernels.linear_greedy_int8(
            x.data_ptr(), *self._at, work.data_ptr(), best.data_ptr(), ids.data_ptr(), most.data_ptr(),
            m, self._n, self._k, x.stride(0),
        )  # fmt: skip
        return most, ids

    def lookup(self, ids: Tensor) -> Tensor:
        out = torch.empty((ids.shape[0], self._k))
        packed, scales, _ = self._at
        self._kernels.lookup_int8(packed, scales, ids.data_ptr(), out.data_ptr(), ids.shape[0], self._k)
        return out


def best_buffers(kernels: Kernels, m: int) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for the `Best` of product.h of every thread, and for the results: greatest values and ids."""
    return torch.empty(kernels.threads() * m * 3 * LANES), torch.empty(m), torch.empty(m, dtype=torch.int64)
