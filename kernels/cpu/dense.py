"""Matrices of bfloat16 and float32, packed for the C kernels."""

import ctypes
from typing import ClassVar, Self

import torch
from torch import Tensor

from ..stored import OWN_MEMORY, Memory, Stored
from .library import Kernels
from .limits import LANES
from .structs import MatrixFields

PADDED = 32  # of product.h: bfloat16 columns are padded with zeros to a multiple of it
KIND_F32, KIND_BF16, KIND_DOT = range(3)  # of matrix.h
STORE, ADD, SILU_MUL = range(3)  # of matrix.h


def num_groups(n: int, *, is_gated: bool) -> int:
    """Groups of 16 rows of a packed weight, as in product.h."""
    return 2 * -(-n // 2 // LANES) if is_gated else -(-n // LANES)


class PackedMatrix:
    """A weight [n, k] in the layout of its kind, and the functions that all kinds share."""

    lasting: ClassVar[tuple[str, ...]] = ("_packed",)  # the attributes with tensors, or None
    about: ClassVar[tuple[str, ...]] = ("_n", "_k", "_kind", "_is_gated")  # the other ones

    def __init__(self, kernels: Kernels, n: int, k: int, kind: int, *, is_gated: bool) -> None:
        """Call it when `fill` can be called. is_gated: the first half of the rows are gates, the second ups."""
        self._kernels, self._n, self._k, self._kind, self._is_gated = kernels, n, k, kind, is_gated
        self._plain = self.fields(None)

    def fill(self, fields: MatrixFields) -> None:
        """Sets the fields that are the kind's own: the packed weight, and what belongs to it."""
        raise NotImplementedError

    def stored(self) -> Stored:
        return Stored(
            type(self).__name__,
            tuple(getattr(self, name) for name in self.lasting),
            tuple(getattr(self, name) for name in self.about),
        )

    @classmethod
    def restored(cls, kernels: Kernels, parts: Stored) -> Self:
        matrix = cls.__new__(cls)
        matrix._kernels = kernels
        for name, part in zip((*cls.lasting, *cls.about), (*parts.tensors, *parts.fields), strict=True):
            setattr(matrix, name, part)
        matrix._plain = matrix.fields(None)
        return matrix

    @property
    def shape(self) -> tuple[int, int]:
        """(n, k)"""
        return self._n, self._k

    @property
    def nbytes(self) -> int:
        tensors: list[Tensor | None] = [getattr(self, name) for name in self.lasting]
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def fields(self, bias: Tensor | None) -> MatrixFields:
        """The matrix for the C functions; valid as long as this object."""
        fields = MatrixFields(
            bias=0 if bias is None else bias.data_ptr(),
            n=self._n,
            k=self._k,
            kind=self._kind,
            is_gated=self._is_gated,
        )
        self.fill(fields)
        return fields

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


class NativeMatrix(PackedMatrix):
    """A packed weight [n, k], bfloat16 or float32."""

    def __init__(
        self,
        kernels: Kernels,
        weight: Tensor,
        *,
        rounds: bool = False,
        is_gated: bool = False,
        memory: Memory = OWN_MEMORY,
    ) -> None:
        """rounds: activations are rounded to bfloat16, as a bfloat16 weight is. is_gated: the first half of the rows
        are gates, the second ups."""
        weight = (weight if weight.dtype == torch.bfloat16 else weight.float()).contiguous()
        n, k = weight.shape
        is_bf16 = weight.dtype == torch.bfloat16
        unit = LANES * (-(-k // PADDED) * PADDED if is_bf16 else k)

        def pack(piece: Tensor, first: int) -> None:
            last = first + piece.numel()
            kernels.pack(
                weight.data_ptr(), piece.data_ptr(), n, k, is_gated, int(is_bf16), first // unit, last // unit
            )  # fmt: skip

        self._packed = memory.filled(num_groups(n, is_gated=is_gated) * unit, weight.dtype, unit, pack)
        super().__init__(
            kernels, n, k, KIND_F32 if not is_bf16 else KIND_DOT if rounds else KIND_BF16, is_gated=is_gated
        )

    def fill(self, fields: MatrixFields) -> None:
        fields.w = self._packed.data_ptr()
