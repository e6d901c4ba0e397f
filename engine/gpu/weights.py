"""A program's weights on a GPU, in the layout of the checkpoint or quantized as it is stored."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ...errors import CheckpointError
from ...kernels.grouped_weight import GroupedWeight
from ...kernels.quantized_weight import (
    QuantizedWeight,
    StoredWeight,
    concatenate,
    for_triton,
    restored,
    stored,
)
from ...kernels.stored import Stored
from ...kernels.superblock_weight import SuperblockWeight
from ..executors.weights import shape_of
from ..models.program import Matrix, Mixture, Program, Vector

_PLAIN = "Tensor"  # the kind of a matrix that is not quantized


class Loaded:
    """A `Sink`. Each matrix is taken once, in the layout in which the kernels read it."""

    def __init__(
        self,
        *,
        dtype: torch.dtype,
        device: torch.device,
        keeps: bool,
        has_narrow_inputs: bool = False,
        room: Mapping[str, int] | None = None,
    ) -> None:
        """keeps: quantized matrices stay as the checkpoint stores them. has_narrow_inputs: it was made for activations
        of 8 bits. room: `room_of` the program."""
        self.device, self.has_narrow_inputs = device, has_narrow_inputs
        self.vectors: dict[str, Tensor] = {}
        self._dtype, self._keeps, self._room = dtype, keeps, room or {}
        self._filling: dict[str, Tensor] = {}  # stacks with room, until their experts are there
        self._matrices: dict[str, Tensor | QuantizedWeight] = {}
        self._halves: set[str] = set()  # matrices whose first half are gates and whose second half are ups

    @property
    def num_bytes(self) -> int:
        return sum(each.nbytes for each in (*self._matrices.values(), *self.vectors.values()))

    def bytes_of(self, matrix: Matrix) -> int:
        """Of one that is not taken."""
        return self._matrices[matrix.key].nbytes

    def is_quantized(self, matrix: Matrix) -> bool:
        return not isinstance(self._matrices[matrix.key], Tensor)

    @property
    def matrix_keys(self) -> tuple[str, ...]:
        """Of the matrices that are not taken."""
        return tuple(self._matrices)

    def take(self, matrix: Matrix) -> Tensor | QuantizedWeight:
        """[rows, columns], whose rows are gates and ups in turn if it is a gated one, or [experts, rows, columns]."""
        return self._take(matrix.key)

    def _take(self, key: str) -> Tensor | QuantizedWeight:
        weight = self._matrices.pop(key)
        if key not in self._halves:
            return weight
        self._halves.remove(key)
        return interleave(weight) if isinstance(weight, Tensor) else weight.interleave()

    def take_stored(self, key: str) -> Stored:
        """`take`, in parts."""
        weight = self._take(key)
        return Stored(_PLAIN, (weight,), ()) if isinstance(weight, Tensor) else stored(weight)

    def put_stored(self, key: str, parts: Stored) -> None:
        """A matrix as `take_stored` gave it. Raises ValueError for parts of nothing that it knows."""
        if parts.kind != _PLAIN:
            self._matrices[key] = restored(parts)
            return
        (tensor,) = parts.tensors
        if tensor is None:
            raise ValueError(f"{key} has no numbers")
        self._clear_room(key, tensor)
        self._matrices[key] = tensor

    def put_vector(self, key: str, values: Tensor) -> None:
        """One of `vectors`, as it was."""
        self._clear_room(key, values)
        self.vectors[key] = values

    def _clear_room(self, key: str, stack: Tensor) -> None:
        """So that equal weights have equal bytes."""
        if num := self._room.get(key, 0):
            stack[-num:].zero_()

    def values(self, matrix: Matrix) -> Tensor:
        """`take`, of a matrix that is not quantized."""
        found = self.take(matrix)
        assert isinstance(found, Tensor), f"{matrix.key} is quantized"
        return found

    def clear(self) -> None:
        self._matrices.clear()
        self._halves.clear()
        self.vectors.clear()

    def vector(self, vector: Vector | None) -> Tensor | None:
        return None if vector is None else self.vectors[vector.key]

    def keeps(self, matrix: Matrix) -> bool:
        return self._keeps and may_stay(matrix)

    def takes(self, matrix: Matrix) -> torch.dtype | None:
        return None

    def begin(self, target: Matrix | Vector) -> Tensor:
        dtype = torch.float32 if isinstance(target, Vector) and target.is_float32 else self._dtype
        shape, num = shape_of(target), self._room.get(target.key, 0)
        if not num:
            return torch.empty(shape, dtype=dtype, device=self.device)
        stack = self._filling[target.key] = torch.empty((shape[0] + num, *shape[1:]), dtype=dtype, device=self.device)
        self._clear_room(target.key, stack)
        return stack[: shape[0]]

    def end(self, target: Matrix | Vector, values: Tensor) -> None:
        values = self._filling.pop(target.key, values)
        if isinstance(target, Vector):
            self.vectors[target.key] = values
        else:
            self._matrices[target.key] = values
            self._note(target)

    def _note(self, matrix: Matrix) -> None:
        if matrix.use == "gated":
            self._halves.add(matrix.key)

    def stored(self, matrix: Matrix, expert: int, parts: Sequence[StoredWeight]) -> None:
        try:
            weight = concatenate(parts)
            assert not isinstance(weight, SuperblockWeight), "GGUF files are widened"
            self._matrices[matrix.key] = (for_triton(weight) if isinstance(weight, GroupedWeight) else weight).to(
                self.device
            )
            self._note(matrix)
        except ValueError as e:
            raise CheckpointError(f"The parts of {matrix.key} cannot be fused: {e}.") from None


def may_stay(matrix: Matrix) -> bool:
    """Whether there are kernels for a matrix as a checkpoint stores it."""
    is_head = matrix.key == "head_project"  # a part of the vocabulary's product
    return matrix.use in ("product", "gated", "router") and not is_head


def room_of(program: Program) -> dict[str, int]:
    """How many experts find a place behind those of a stack, by the keys of matrices and vectors."""
    found: dict[str, int] = {}
    for args in (op.args for op in program.ops if isinstance(op.args, Mixture)):
        for target in (args.gate_up, args.down, args.gate_up_bias, args.down_bias):
            if target is not None and args.num_replicas:
                found[target.key] = args.num_replicas
    return found


def interleave(x: Tensor) -> Tensor:
    """Interleaves the rows of both halves of x: gate 0, up 0, gate 1, …"""
    return torch.stack(x.chunk(2), dim=1).reshape(x.shape)
