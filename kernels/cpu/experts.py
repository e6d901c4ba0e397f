"""The experts of a layer for the C kernels: the products of all that are chosen are one list of tasks."""

import ctypes
from collections.abc import Sequence

from torch import Tensor

from .dense import PackedMatrix
from .structs import ExpertsFields, MatrixFields, RouterFields

SOFTMAX, SIGMOID, CHOSEN, NEAR = range(4)  # `Score` of experts.h


class NativeExperts:
    """The packed matrices of all experts, gates and ups [2 · inner, hidden] or ups [inner, hidden], and downs
    [hidden, inner]."""

    def __init__(
        self, gate_up: Sequence[PackedMatrix], down: Sequence[PackedMatrix], router: RouterFields, *,
        gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None, scales_input: bool = False,
        zero_scale: float = 1.0, places: Tensor | None = None, load: Tensor | None = None,
        holders: Tensor | None = None, **between: float,
    ) -> None:  # fmt: skip
        """Biases: [experts, rows]. zero_scale: of the inputs that experts without matrices return. places: int32 [all
        experts of the router, 3], slot, turn and turns, if some experts are those of other ranks. load: int64
        [experts], to which each one's assignments are added. holders: int32 [all experts of the router, 1 + 2 · ranks],
        how many ranks have it, and the rank and slot of each, if ranks exchange tokens. between: the fields of `Map`
        for what stands between the products of matrices that are not gated."""
        self._kept = (gate_up, down, gate_up_bias, down_bias, places, load, holders)  # whose memory `fields` points to
        self._biases = gate_up_bias, down_bias
        self._replaced: dict[int, tuple[PackedMatrix, PackedMatrix]] = {}
        self._gate_up, self._down = _stack(gate_up, gate_up_bias), _stack(down, down_bias)
        self.fields = ExpertsFields(
            gate_up=ctypes.addressof(self._gate_up), down=ctypes.addressof(self._down), router=router,
            num_experts=len(down), scales_input=scales_input, zero_scale=zero_scale,
            places=0 if places is None else places.data_ptr(), load=0 if load is None else load.data_ptr(),
            holders=0 if holders is None else holders.data_ptr(),
            num_ranks=0 if holders is None else holders.shape[1] // 2, **between,
        )  # fmt: skip

    def replace(self, slot: int, gate_up: PackedMatrix, down: PackedMatrix) -> None:
        """Between two calls: a slot's matrices become others. Its biases are written where they are."""
        for stack, matrix, bias in zip((self._gate_up, self._down), (gate_up, down), self._biases, strict=True):
            stack[slot] = matrix.fields(None if bias is None else bias[slot])
        self._replaced[slot] = gate_up, down


def _stack(matrices: Sequence[PackedMatrix], bias: Tensor | None) -> "ctypes.Array[MatrixFields]":
    fields = (matrix.fields(None if bias is None else bias[i]) for i, matrix in enumerate(matrices))
    return (MatrixFields * len(matrices))(*fields)
