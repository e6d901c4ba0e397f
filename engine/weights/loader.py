"""Fills a program's matrices and vectors from a checkpoint and proves that the two match.

Every tensor that the model needs must be present, every tensor present must be needed, and shapes must agree; otherwise
a CheckpointError names the tensor. Names and shapes are compared before any data is read. Tensors are read one by one
and cast on the way (`copy_workers.py`), so there is never a second copy of the weights.

Quantized weights are dequantized on the way, or passed on as stored where kernels can read them.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from ...errors import CheckpointError
from ...kernels.quantized_weight import StoredWeight
from ..checkpoint.quantization import Scheme
from ..models.description import Decoder
from ..models.lower import lower
from ..models.program import Matrix, Program, Vector
from .copy_workers import CopyWorker, copy_jobs
from .gguf import GgufReader
from .mapping import Names, Source, shapes_of
from .open import Reader
from .quantized import Shape, is_unused, quantized_modules, read_weight, tensors_of

_NUM_WIDENED = 1 << 24  # values that are dequantized at a time, in float32

Target = Matrix | Vector


class Sink(Protocol):
    """Takes a program's matrices and vectors, each as soon as it is filled."""

    device: torch.device

    def keeps(self, matrix: Matrix) -> bool:
        """Whether it takes this matrix as stored, if all of it is quantized."""

    def takes(self, matrix: Matrix) -> torch.dtype | None:
        """The type in which `end` takes this matrix where the file is mapped, instead of memory of `begin`; None: it
        does not. Such values may be read only until `end` returns."""

    def begin(self, target: Target) -> Tensor:
        """Memory for a matrix [rows, columns], a stack [experts, rows, columns], or a vector [rows] or [experts,
        rows]."""

    def end(self, target: Target, values: Tensor) -> None:
        """The memory is filled, on a device too."""

    def stored(self, matrix: Matrix, expert: int, parts: Sequence[StoredWeight]) -> None:
        """A matrix that it keeps, or that of an expert in a stack: its parts, from the first rows to the last."""


@dataclass(frozen=True)
class Found:
    """What a checkpoint has for a decoder."""

    names: Names
    order: Mapping[str, int]  # tensor → its place in the files
    quantized: "Mapping[str, _Quantized]"
    skipped: int  # tensors that the description ignores
    skipped_bytes: int


@dataclass(frozen=True)
class _Quantized:
    """A quantized matrix of the checkpoint."""

    module: str
    shape: tuple[int, int]  # of the whole matrix
    tensors: Mapping[str, tuple[Shape, ...]]  # its tensors, and the shapes that each may have


def check_weights(reader: Reader, decoder: Decoder, scheme: Scheme | None) -> Found:
    """Compares names and shapes. decoder: the whole model. scheme: of a quantized checkpoint. Raises
    CheckpointError."""
    present = reader.names()
    modules = set() if scheme is None else quantized_modules(scheme, reader)
    names = Names(decoder, {*present, *(f"{module}.weight" for module in modules)})
    program = lower(decoder)
    sources = [source for target in program.targets for source in names.sources(target)]
    shapes = shapes_of(sources)
    _turn_experts(reader, names, shapes)
    quantized = _quantized(scheme, modules, sources, shapes, set(present))
    needed: dict[str, tuple[Shape, ...]] = {name: (shape,) for name, shape in shapes.items() if name not in quantized}
    for stored in quantized.values():
        needed |= stored.tensors
    there = set(present)
    _refuse("lacks", [name for name in needed if name not in there], "the model needs")
    left = [name for name in present if name not in needed and not _is_head_of_tied(name, decoder)]
    ignored = [name for name in left if names.is_ignored(name)]
    left = [name for name in left if name not in set(ignored)]
    left = [name for name in left if not (scheme is not None and is_unused(scheme, name))]
    _refuse("holds", [name for name in left if not _is_idle_bias(reader, name, quantized)], "the model does not use")
    for name, expected in needed.items():
        is_vector = len(expected) == 1 and len(expected[0]) == 1 and math.prod(reader.shape(name)) == expected[0][0]
        if not is_vector and _bare(reader.shape(name)) not in [_bare(shape) for shape in expected]:
            raise CheckpointError(
                f"{name} has the shape {list(reader.shape(name))} in the checkpoint, but config.json calls for "
                f"{' or '.join(str(list(shape)) for shape in expected)}."
            )
        if name in shapes and name not in quantized and reader.dtype(name).startswith("F8"):
            raise CheckpointError(f"{name} has 8-bit values, but the checkpoint has no scale for it.")
    order = {name: place for place, name in enumerate(present)}
    return Found(names, order, quantized, len(ignored), sum(reader.num_bytes(name) for name in ignored))


def _turn_experts(reader: Reader, names: Names, shapes: dict[str, tuple[int, ...]]) -> None:
    """Files of one family have stacked experts both ways (Qwen3-VL-MoE): takes them as they are. Square ones are as the
    others of the file."""
    present = set(reader.names())
    stacks = {name: shape for name, shape in shapes.items() if len(shape) == 3 and name in present}
    turned = {name: (shape[0], shape[2], shape[1]) for name, shape in stacks.items()}
    if any(reader.shape(name) == shape != stacks[name] for name, shape in turned.items()):
        for name, shape in turned.items():
            if reader.shape(name) == shape:
                names.turn(name)
                shapes[name] = shape


def load_weights(
    reader: Reader,
    program: Program,
    found: Found,
    sink: Sink,
    *,
    scheme: Scheme | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Fills every matrix and vector of a program, which may be a rank's part of the decoder that was checked. progress:
    called with (numbers done, numbers in all). Raises CheckpointError, and ConfigError if a quantized weight cannot be
    divided among the ranks."""
    load_targets(reader, program.targets, found, sink, scheme=scheme, progress=progress)


def load_targets(
    reader: Reader,
    targets: Sequence[Target],
    found: Found,
    sink: Sink,
    *,
    scheme: Scheme | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """`load_weights` of some matrices and vectors."""
    _Loading(reader, targets, found, sink, scheme, progress).run()


def kept_matrices(program: Program, found: Found) -> set[str]:
    """The keys of the matrices that may stay as they are stored: all of their tensors are quantized, and the kernels
    take them."""
    return _kept(program.matrices, found)


def _kept(matrices: Iterable[Matrix], found: Found) -> set[str]:
    return {
        matrix.key
        for matrix in matrices
        if matrix.use != "router" and all(source.tensor in found.quantized for source in found.names.sources(matrix))
    }


class _Loading:
    def __init__(
        self,
        reader: Reader,
        targets: Sequence[Target],
        found: Found,
        sink: Sink,
        scheme: Scheme | None,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._reader, self._found, self._sink = reader, found, sink
        self._scheme, self._progress = scheme, progress
        self._sources = [(target, source) for target in targets for source in found.names.sources(target)]
        self._num_left = Counter(target.key for target, _ in self._sources)
        matrices = {target.key: target for target, _ in self._sources if isinstance(target, Matrix)}
        self._kept = {key for key in _kept(matrices.values(), found) if sink.keeps(matrices[key])}
        self._memory: dict[str, Tensor] = {}
        self._num_parts = Counter((target.key, source.expert or 0) for target, source in self._sources)
        self._stored: dict[tuple[str, int], list[tuple[int, StoredWeight]]] = {}
        self._total = sum(_numbers(source) for _, source in self._sources)
        self._done = 0

    def run(self) -> None:
        with copy_jobs(self._sink.device) as jobs:
            for target, source in sorted(self._sources, key=lambda each: self._place(each[1])):
                if target.key in self._kept:
                    jobs.put(partial(self._read, source), partial(self._keep, target, source))
                elif (dtype := self._taken_as(target, source)) is not None:
                    jobs.put(partial(self._as_stored, source, dtype), partial(self._take, target, source))
                else:
                    jobs.put(
                        partial(self._fill, self._view(target, source), source), partial(self._filled, target, source)
                    )

    def _place(self, source: Source) -> int:
        quantized = self._found.quantized.get(source.tensor)
        return self._found.order[source.tensor if quantized is None else next(iter(quantized.tensors))]

    def _taken_as(self, target: Target, source: Source) -> torch.dtype | None:
        """The type of a matrix that the sink takes from where the file is mapped: one that is a part of one tensor."""
        is_part = source.expert is None and not source.num_experts and not source.map
        if not isinstance(target, Matrix) or not is_part or self._num_parts[target.key, 0] != 1:
            return None
        return None if source.tensor in self._found.quantized else self._sink.takes(target)

    def _as_stored(self, source: Source, dtype: torch.dtype, _: CopyWorker) -> Tensor:
        """Runs in any thread."""
        (first, last), (left, right) = source.to, source.columns
        return self._tensor(source).reshape(last - first, right - left).to(dtype)

    def _take(self, target: Target, source: Source, values: Tensor) -> None:
        self._sink.end(target, values)
        self._report(source)

    def _view(self, target: Target, source: Source) -> Tensor:
        if target.key not in self._memory:
            self._memory[target.key] = self._sink.begin(target)
        memory = self._memory[target.key]
        first, last = source.to
        if source.expert is not None:
            return memory[source.expert, first:last]
        return memory[:, first:last] if source.num_experts else memory[first:last]

    def _fill(self, view: Tensor, source: Source, worker: CopyWorker) -> None:
        """Runs in any thread."""
        if source.tensor in self._found.quantized:
            self._widen(view, source, worker)
            return
        values = self._tensor(source).reshape(view.shape)
        worker.fill(view, _mapped(values, source.map))

    def _tensor(self, source: Source) -> Tensor:
        """The rows and columns of a tensor that is not quantized."""
        reader, name = self._reader, source.tensor
        rows = slice(*(source.run or (0, source.end)))
        columns = slice(*source.columns)
        if not source.columns[1] and not source.num_experts and len(_bare(reader.shape(name))) != 1:
            values = reader.tensor(name).reshape(-1)  # such as norms of heads: [heads, size]
            return values[rows] if source.run is not None else values[source.indices()]
        if source.num_experts or len(reader.shape(name)) != (2 if source.columns[1] else 1):
            values = _experts(reader, name, source.only) if source.only else reader.tensor(name)
            values = values if source.num_experts else values.squeeze()
            if source.columns[1]:
                values = (values.transpose(-1, -2) if source.is_transposed else values)[..., columns]
                values = values[..., rows, :]
            else:
                values = values[..., rows]
        elif not source.columns[1]:
            values = reader.tensor(name, rows)
        elif source.is_transposed:
            values = reader.tensor(name, (columns, rows)).t()
        else:
            is_whole = (rows.stop - rows.start, columns.stop - columns.start) == reader.shape(name)
            values = reader.tensor(name, None if is_whole else (rows, columns))
        if source.run is None:
            dim = -1 if not source.columns[1] else -2
            values = values.index_select(dim, torch.tensor(source.indices()))
        return values

    def _widen(self, view: Tensor, source: Source, worker: CopyWorker) -> None:
        """Dequantizes some rows at a time: there may be no memory for a second copy of an embedding, in float32."""
        if source.run is None or not isinstance(self._reader, GgufReader):
            worker.fill(view, self._read(source, worker).dequantize(view.dtype))
            return
        begin = source.run[0]
        step = max(1, _NUM_WIDENED // self._reader.shape(source.tensor)[1])
        for first in range(0, view.shape[0], step):
            part = view[first : first + step]
            weight = self._reader.stored(source.tensor, (begin + first, begin + first + part.shape[0]), source.columns)
            worker.fill(part, weight.dequantize(view.dtype))

    def _read(self, source: Source, worker: CopyWorker) -> StoredWeight:
        """A quantized matrix as it is stored. Runs in any thread."""
        assert self._scheme is not None
        quantized = self._found.quantized[source.tensor]
        rows = source.run or source.span(quantized.shape[0])
        weight = read_weight(self._scheme, self._reader, quantized.module, *quantized.shape, rows, source.columns)
        return weight if source.run is not None else weight.rows(torch.tensor(source.indices()) - rows[0])

    def _filled(self, target: Target, source: Source, _: None) -> None:
        self._num_left[target.key] -= 1
        if not self._num_left[target.key]:
            self._sink.end(target, self._memory.pop(target.key))
        self._report(source)

    def _keep(self, target: Target, source: Source, weight: StoredWeight) -> None:
        assert isinstance(target, Matrix)
        matrix = target.key, source.expert or 0
        parts = self._stored.setdefault(matrix, [])
        parts.append((source.to[0], weight))
        if len(parts) == self._num_parts[matrix]:
            del self._stored[matrix]
            self._sink.stored(target, matrix[1], [part for _, part in sorted(parts, key=lambda part: part[0])])
        self._report(source)

    def _report(self, source: Source) -> None:
        self._done += _numbers(source)
        if self._progress is not None:
            self._progress(self._done, self._total)


def _experts(reader: Reader, name: str, only: Sequence[int]) -> Tensor:
    """Some experts of a tensor of all; adjacent ones are read at once."""
    runs: list[list[int]] = []
    for expert in only:
        if runs and expert == runs[-1][1]:
            runs[-1][1] += 1
        else:
            runs.append([expert, expert + 1])
    parts = [reader.tensor(name, slice(first, last)) for first, last in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _numbers(source: Source) -> int:
    return (source.to[1] - source.to[0]) * max(1, source.columns[1] - source.columns[0]) * max(1, source.num_experts)


def _mapped(values: Tensor, how: str) -> Tensor:
    match how:
        case "plus_one":
            return values.float() + 1
        case "neg_exp":
            return -values.float().exp()
    return values


def _quantized(
    scheme: Scheme | None,
    modules: set[str],
    sources: Sequence[Source],
    shapes: Mapping[str, tuple[int, ...]],
    present: set[str],
) -> dict[str, _Quantized]:
    """The matrices that the model needs and the checkpoint has quantized."""
    found: dict[str, _Quantized] = {}
    if scheme is None:
        return found
    for source in sources:
        name, module = source.tensor, source.tensor.removesuffix(".weight")
        if name in found or module == name or module not in modules:
            continue
        if source.is_module:
            n, k = shapes[name]
            found[name] = _Quantized(module, (n, k), tensors_of(scheme, module, n, k, present))
        elif source.is_transposed:
            raise CheckpointError(
                f"{module} is quantized, and pagewire reads matrices of this family, whose columns come first, only "
                "unquantized; choose another checkpoint."
            )
    return found


def _is_idle_bias(reader: Reader, name: str, quantized: Mapping[str, _Quantized]) -> bool:
    """Whether a bias is one of those zeros that old GPTQ writers give to modules without a bias."""
    module, _, leaf = name.rpartition(".")
    return leaf == "bias" and f"{module}.weight" in quantized and not reader.tensor(name).any()


def _is_head_of_tied(name: str, decoder: Decoder) -> bool:
    """Whether a tensor is a copy of the embedding as the head."""
    return decoder.head.weight is None and name.endswith("lm_head.weight")


def _bare(shape: Sequence[int]) -> tuple[int, ...]:
    """Without dimensions of size 1, which some files have and others not."""
    return tuple(size for size in shape if size != 1)


def _refuse(verb: str, names: list[str], why: str) -> None:
    if names:
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        plural = "tensor" if len(names) == 1 else "tensors"
        raise CheckpointError(f"The checkpoint {verb} {len(names)} {plural} that {why}: {shown}.")
