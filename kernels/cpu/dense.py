"""Matrices of bfloat16 and float32, packed for the C kernels."""

import ctypes
from typing import Self, cast

import torch
from torch import Tensor

from ..stored import Stored
from .library import LANES, Kernels
from .structs import MatrixFields

PADDED = 32  # of product.h: bfloat16 columns are padded with zeros to a multiple of it
KIND_F32, KIND_BF16, KIND_DOT = range(3)  # of matrix.h
STORE, ADD, SILU_MUL = range(3)  # of matrix.h


class NativeMatrix:
    """A packed weight [n, k], bfloat16 or float32."""

    def __init__(self, kernels: Kernels, weight: Tensor, *, rounds: bool = False, is_gated: bool = False) -> None:
        """rounds: activations are rounded to bfloat16, as a bfloat16 weight is. is_gated: the first half of the rows
        are gates, the second ups."""
        weight = weight if weight.dtype == torch.bfloat16 else weight.float()
        self._kernels = kernels
        self._n, self._k = weight.shape
        is_bf16 = weight.dtype == torch.bfloat16
        groups = 2 * -(-self._n // 2 // LANES) if is_gated else -(-self._n // LANES)
        columns = -(-self._k // PADDED) * PADDED if is_bf16 else self._k
        self._packed = torch.empty(groups * LANES * columns, dtype=weight.dtype)
        self._kind = KIND_F32 if not is_bf16 else KIND_DOT if rounds else KIND_BF16
        self._is_gated = is_gated
        kernels.pack(
            weight.contiguous().data_ptr(), self._packed.data_ptr(), self._n, self._k, is_gated, int(is_bf16)
        )  # fmt: skip
        self._plain = self.fields(None)

    def stored(self) -> Stored:
        return Stored(type(self).__name__, (self._packed,), (self._n, self._k, self._kind, self._is_gated))

    @classmethod
    def restored(cls, kernels: Kernels, parts: Stored) -> Self:
        matrix = cls.__new__(cls)
        matrix._kernels, (packed,) = kernels, parts.tensors
        assert packed is not None
        matrix._packed = packed
        matrix._n, matrix._k, matrix._kind, matrix._is_gated = cast(tuple[int, int, int, bool], parts.fields)
        matrix._plain = matrix.fields(None)
        return matrix

    @property
    def nbytes(self) -> int:
        return self._packed.nbytes

    def fields(self, bias: Tensor | None) -> MatrixFields:
        """The matrix for the C functions; valid as long as this object."""
        return MatrixFields(
            w=self._packed.data_ptr(),
            bias=0 if bias is None else bias.data_ptr(),
            n=self._n,
            k=self._k,
            kind=self._kind,
            is_gated=self._is_gated,
        )

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self._run(x, bias, self._n, STORE)

    def silu_mul(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self._run(x, bias, self._n // 2, SILU_MUL)

    def _run(self, x: Tensor, bias: Tensor | None, n: int, epilogue: int) -> Tensor:
        assert (epilogue == SILU_MUL) == self._is_gated
        fields = self._plain if bias is None else self.fields(bias)
        out = torch.empty((x.shape[0], n))
        self._kernels.product(
            ctypes.addressof(fields), x.data_ptr(), x.stride(0), out.data_ptr(), n, x.shape[0], epilogue
        )  # fmt: skip
        return out

    def greedy(self, x: Tensor) -> tuple[Tensor, Tensor]:
        m = x.shape[0]
        most, ids = torch.empty(m), torch.empty(m, dtype=torch.int64)
        self._kernels.product_greedy(
            ctypes.addressof(self._plain), x.data_ptr(), x.stride(0), ids.data_ptr(), most.data_ptr(), m
        )  # fmt: skip
        return most, ids

    def lookup(self, ids: Tensor) -> Tensor:
        out = torch.empty((ids.shape[0], self._k))
        self._kernels.lookup(ctypes.addressof(self._plain), ids.data_ptr(), out.data_ptr(), ids.shape[0])
        return out
