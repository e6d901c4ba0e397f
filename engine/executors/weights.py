"""The weights of a program in memory: matrices as the kernels packed them, and vectors."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels import ops as kernels
from ...kernels.ops import Ops
from ...kernels.quantized_weight import StoredWeight, concatenate
from ..models.program import Matrix, Program, Vector
from ..weights.dummy import Dummy
from ..weights.loader import Sink


class Weights:
    """Matrices and vectors by their keys. A stack of experts or heads has a matrix for each."""

    def __init__(self) -> None:
        self.matrices: dict[str, tuple[kernels.Matrix, ...]] = {}
        self.vectors: dict[str, Tensor] = {}

    def matrix(self, matrix: Matrix) -> kernels.Matrix:
        (found,) = self.matrices[matrix.key]
        return found

    def vector(self, vector: Vector | None) -> Tensor | None:
        return None if vector is None else self.vectors[vector.key]

    def bytes_of(self, matrix: Matrix) -> int:
        return sum(each.nbytes for each in self.matrices[matrix.key])

    @property
    def num_bytes(self) -> int:
        matrices = sum(matrix.nbytes for stack in self.matrices.values() for matrix in stack)
        return matrices + sum(vector.nbytes for vector in self.vectors.values())


@dataclass(frozen=True, kw_only=True)
class Options:
    """How weights are packed."""

    ops: Ops
    dtype: torch.dtype  # of vectors
    weight_dtype: torch.dtype  # of matrices before they are packed
    device: torch.device
    keeps: bool  # quantized matrices stay as they are stored, where the kernels can compute with them


class Packing:
    """Packs each matrix as soon as it is filled, so that there is a second copy of one matrix only; a `Sink`."""

    def __init__(self, options: Options) -> None:
        self.options, self.device = options, options.device
        self.weights = Weights()
        self._ops = options.ops
        self._stored: dict[str, dict[int, kernels.Matrix]] = {}  # stacks of which some are packed

    def keeps(self, matrix: Matrix) -> bool:
        return self.options.keeps and self._ops.quantized is not None and matrix.use != "router" and not matrix.heads

    def takes(self, matrix: Matrix) -> torch.dtype | None:
        return None if self._ops.storage is None or matrix.heads else self.options.weight_dtype

    def begin(self, target: Matrix | Vector) -> Tensor:
        return torch.empty(*shape_of(target), dtype=self.dtype_of(target), device=self.device)

    def dtype_of(self, target: Matrix | Vector) -> torch.dtype:
        if isinstance(target, Matrix):
            return self.options.weight_dtype
        return torch.float32 if target.is_float32 else self.options.dtype

    def end(self, target: Matrix | Vector, values: Tensor) -> None:
        if isinstance(target, Vector):
            self.take_vector(target, values)
        else:
            stack = values if target.experts else values.view(max(1, target.heads), -1, values.shape[1])
            self.take(target, (self._pack(target, matrix) for matrix in stack))

    def stored(self, matrix: Matrix, expert: int, parts: Sequence[StoredWeight]) -> None:
        stack = self._stored.setdefault(matrix.key, {})
        stack[expert] = self._pack_stored(matrix, parts)
        if len(stack) == max(1, matrix.experts):
            del self._stored[matrix.key]
            self.take(matrix, (stack[i] for i in range(len(stack))))

    def take(self, target: Matrix, packed: Iterable[kernels.Matrix]) -> None:
        self.weights.matrices[target.key] = tuple(packed)

    def take_vector(self, target: Vector, values: Tensor) -> None:
        self.weights.vectors[target.key] = values

    def _pack(self, target: Matrix, values: Tensor) -> kernels.Matrix:
        match target.use:
            case "gated" | "gated experts":
                return self._ops.gated(values)
            case "table":
                return self._ops.table(values)
            case "router":
                return self._ops.router(values)
            case "heads, transposed":
                return self._ops.matrix(values.t().contiguous())
        return self._ops.matrix(values)

    def _pack_stored(self, target: Matrix, parts: Sequence[StoredWeight]) -> kernels.Matrix:
        assert self._ops.quantized is not None
        try:
            parts = [concatenate(parts)]
        except ValueError:  # the parts are quantized differently
            if target.experts:
                widened = torch.cat([part.dequantize(self.options.weight_dtype) for part in parts])
                return self._pack(target, widened)
        return self._ops.quantized(parts, target.use in ("gated", "gated experts"))


def shape_of(target: Matrix | Vector) -> tuple[int, ...]:
    """[rows, columns] or [experts, rows, columns]; of a vector without columns [rows] or [experts, rows]."""
    rows = sum(weight.rows for weight in target.weights)
    experts, columns = target.weights[0].experts, target.weights[0].columns
    shape = (rows, columns) if columns else (rows,)
    return (experts, *shape) if experts else shape


def fill_dummy(program: Program, sink: Sink) -> None:
    """Random weights, for benchmarks."""
    dummy = Dummy()
    for target in program.targets:
        values = sink.begin(target)
        dummy.fill(target.key, values, is_vector=isinstance(target, Vector))
        if target.weights[0].map == "neg_exp":
            values.neg_()  # else states would grow
        sink.end(target, values)
