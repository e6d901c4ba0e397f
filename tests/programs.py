"""A checkpoint's program with its weights as plain tensors."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from pagewire.engine.checkpoint.spec import read_spec
from pagewire.engine.executors.weights import shape_of
from pagewire.engine.models.program import Matrix, Vector
from pagewire.engine.runner.served import program_of
from pagewire.engine.weights.loader import check_weights, load_weights
from pagewire.engine.weights.open import open_checkpoint
from pagewire.kernels.quantized_weight import StoredWeight, concatenate


class PlainSink:
    """A `Sink` that packs nothing."""

    device = torch.device("cpu")

    def __init__(self, dtype: torch.dtype = torch.float32, *, keeps: bool = False, takes: bool = False) -> None:
        """takes: matrices that are one tensor are not copied to memory of `begin`."""
        self._dtype, self._keeps, self._takes = dtype, keeps, takes
        self.tensors: dict[str, Tensor] = {}  # by key, of those that are filled
        self.kept: dict[str, dict[int, StoredWeight]] = {}  # quantized matrices by key and expert
        self.taken: set[str] = set()
        self._begun: set[str] = set()

    def keeps(self, matrix: Matrix) -> bool:
        return self._keeps

    def takes(self, matrix: Matrix) -> torch.dtype | None:
        return self._dtype if self._takes else None

    def begin(self, target: Matrix | Vector) -> Tensor:
        assert target.key not in self._begun, f"{target.key} is filled twice"
        self._begun.add(target.key)
        is_float32 = isinstance(target, Vector) and target.is_float32
        return torch.full(shape_of(target), torch.nan, dtype=torch.float32 if is_float32 else self._dtype)

    def end(self, target: Matrix | Vector, values: Tensor) -> None:
        assert target.key not in self.tensors
        if target.key not in self._begun:
            assert isinstance(target, Matrix) and values.shape == shape_of(target) and self._takes
            self.taken.add(target.key)
            values = values.clone()
        self.tensors[target.key] = values

    def stored(self, matrix: Matrix, expert: int, parts: Sequence[StoredWeight]) -> None:
        stack = self.kept.setdefault(matrix.key, {})
        assert expert not in stack, f"matrix {expert} of {matrix.key} came twice"
        stack[expert] = concatenate(parts)


def load(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    *,
    rank: int = 0,
    size: int = 1,
    keeps: bool = False,
    takes: bool = False,
    adapter: str = "",
    progress: Callable[[int, int], None] | None = None,
) -> PlainSink:
    """All that a rank's program needs of a folder or a GGUF file."""
    spec, sink = read_spec(folder), PlainSink(dtype, keeps=keeps, takes=takes)
    assert spec.decoder is not None
    program = program_of(spec, rank, size)
    with open_checkpoint(folder, adapter) as reader:
        found = check_weights(reader, spec.decoder, spec.scheme)
        load_weights(reader, program, found, sink, scheme=spec.scheme, progress=progress)
    assert {*sink.tensors, *sink.kept} == {target.key for target in program.targets}
    return sink
