"""The experts of a layer for the C kernels: the products of all that are chosen are one list of tasks."""

import ctypes
from collections.abc import Sequence

from .dense import PackedMatrix
from .structs import ExpertsFields, MatrixFields


class NativeExperts:
    """The packed matrices of all experts: gates and ups [2 · inner, hidden], and downs [hidden, inner]."""

    def __init__(self, experts: Sequence[tuple[PackedMatrix, PackedMatrix]], *, top_k: int, renormalize: bool) -> None:
        self._matrices = experts  # whose memory `fields` points to
        self._gate_up = (MatrixFields * len(experts))(*(gate_up.fields(None) for gate_up, _ in experts))
        self._down = (MatrixFields * len(experts))(*(down.fields(None) for _, down in experts))
        self.fields = ExpertsFields(
            gate_up=ctypes.addressof(self._gate_up),
            down=ctypes.addressof(self._down),
            num_experts=len(experts),
            top_k=top_k,
            renormalize=renormalize,
        )
