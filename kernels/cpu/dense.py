"""Matrices of bfloat16 and float32, packed for the C kernels."""

import torch
from torch import Tensor

from .library import LANES, Kernels
from .structs import MatrixFields


class NativeMatrix:
    """A packed weight [n, k], bfloat16 or float32."""

    def __init__(self, kernels: Kernels, weight: Tensor) -> None:
        if weight.dtype != torch.bfloat16 or weight.shape[1] % 2:  # bfloat16 is packed in pairs
            weight = weight.float()
        self._kernels = kernels
        self._n, self._k = weight.shape
        self._bf16 = int(weight.dtype == torch.bfloat16)
        self._packed = torch.empty(-(-self._n // LANES) * LANES * self._k, dtype=weight.dtype)
        self._at = self._packed.data_ptr()
        kernels.pack(weight.contiguous().data_ptr(), self._at, self._n, self._k, self._bf16)

    @property
    def nbytes(self) -> int:
        return self._packed.nbytes

    def fields(self, bias: Tensor | None) -> MatrixFields:
        """The matrix for the C decoder; valid as long as this object."""
        return MatrixFields(self._at, 0, 0, 0 if bias is None else bias.data_ptr(), self._n, self._k, self._bf16)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        m = x.shape[0]
        out = torch.empty((m, self._n))
        panels = torch.empty(m * self._k) if m > 1 else out
        self._kernels.linear(
            x.data_ptr(), self._at, 0 if bias is None else bias.data_ptr(), out.data_ptr(), panels.data_ptr(),
            m, self._n, self._k, x.stride(0), self._bf16,
        )  # fmt: skip
        return out

    def greedy(self, x: Tensor) -> tuple[Tensor, Tensor]:
        m = x.shape[0]
        panels, best, most, ids = torch.empty(m * self._k), *best_buffers(self._kernels, m)
        self._kernels.linear_greedy(
            x.data_ptr(), self._at, panels.data_ptr(), best.data_ptr(), ids.data_ptr(), most.data_ptr(),
            m, self._n, self._k, x.stride(0), self._bf16,
        )  # fmt: skip
        return most, ids

    def lookup(self, ids: Tensor) -> Tensor:
        out = torch.empty((ids.shape[0], self._k))
        self._kernels.lookup(self._at, ids.data_ptr(), out.data_ptr(), ids.shape[0], self._k, self._bf16)
        return out


def best_buffers(kernels: Kernels, m: int) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for the `Best` of product.h of every thread, and for the results: greatest values and ids."""
    return torch.empty(kernels.threads() * m * 3 * LANES), torch.empty(m), torch.empty(m, dtype=torch.int64)
