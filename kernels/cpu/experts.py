"""The experts of a layer for the C kernels: the products of all that are chosen are one list of tasks."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from .dense import PackedMatrix
from .library import Kernels
from .structs import ExpertsFields, MatrixFields


class NativeExperts:
    """The packed matrices of all experts: gates and ups [2 · inner, hidden], and downs [hidden, inner]."""

    def __init__(
        self, kernels: Kernels, experts: Sequence[tuple[PackedMatrix, PackedMatrix]], *, top_k: int, renormalize: bool
    ) -> None:
        self._kernels = kernels
        self._matrices = experts
        self._top_k = top_k
        self._gate_up = (MatrixFields * len(experts))(*(gate_up.fields(None) for gate_up, _ in experts))
        self._down = (MatrixFields * len(experts))(*(down.fields(None) for _, down in experts))
        self.fields = ExpertsFields(
            gate_up=ctypes.addressof(self._gate_up),
            down=ctypes.addressof(self._down),
            num_experts=len(experts),
            top_k=top_k,
            renormalize=renormalize,
        )

    @property
    def nbytes(self) -> int:
        return sum(matrix.nbytes for expert in self._matrices for matrix in expert)

    def forward(self, x: Tensor, router_logits: Tensor) -> Tensor:
        m, num_experts = router_logits.shape
        weights, ids = torch.empty((m, self._top_k)), torch.empty((m, self._top_k), dtype=torch.int32)
        self._kernels.route(
            router_logits.data_ptr(), weights.data_ptr(), ids.data_ptr(),
            m, num_experts, self._top_k, self.fields.renormalize,
        )  # fmt: skip
        out = torch.empty_like(x)
        self._kernels.experts(
            ctypes.addressof(self.fields), weights.data_ptr(), ids.data_ptr(), x.data_ptr(), x.stride(0),
            out.data_ptr(), out.stride(0), m, 0,
        )  # fmt: skip
        return out
