"""Fills a model's parameters from a checkpoint and proves that the two match.

Every tensor that the model needs must be present, every tensor present must be needed, and shapes must agree; otherwise
a CheckpointError names the tensor. Names and shapes are compared before any data is read. Tensors are read one by one
and cast on the way (`copy_workers.py`), so there is never a second copy of the weights.

Quantized weights are dequantized on the way, or passed on as stored where kernels can read them.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from ...errors import CheckpointError
from ...kernels.quantized_weight import StoredWeight
from ..checkpoint.quantization import Scheme
from ..parallel.shard import Cut
from .copy_workers import CopyWorker, copy_jobs
from .gguf import GgufReader
from .mapping import Target
from .quantized import Shape, is_unused, quantized_modules, read_weight, tensors_of
from .reader import Reader

# Buffers that old exporters saved although config.json determines them.
_DERIVED = re.compile(r"(.*\.)?rotary_emb\.inv_freq")

_NUM_WIDENED = 1 << 24  # values that are dequantized at a time, in float32

Keep = Mapping[str, Callable[[int, Sequence[StoredWeight]], None]]
"""A parameter's name → the function that takes its matrices if they are quantized in the checkpoint, each as soon as it
is read: its number in a stack of matrices, else 0, and its parts, from the first rows to the last."""


class Consumer(Protocol):
    """Takes some parameters as soon as they are filled, so that they are never all in memory."""

    @property
    def names(self) -> Collection[str]:
        """Of these parameters."""

    def begin(self, name: str) -> Tensor:
        """Gives the parameter memory, before the first of its tensors is read."""

    def end(self, name: str) -> None:
        """It is filled, or a function of `Keep` has taken all of its matrices."""


def load_weights(
    reader: Reader,
    parameters: Mapping[str, Tensor],
    targets: Mapping[str, Target],
    *,
    scheme: Scheme | None = None,
    keep: Keep = MappingProxyType({}),
    redundant: Sequence[str] = (),
    progress: Callable[[int, int], None] | None = None,
    consumer: Consumer | None = None,
) -> int:
    """Copies every tensor to its target; returns the bytes of the parameters.

    scheme: of a quantized checkpoint. Quantized weights are dequantized, except those of the parameters in `keep`:
    these are passed to its functions on the CPU, matrix by matrix, and their parameters, which may have no memory, stay
    as they are.
    redundant: tensors that may be present and are not read, such as the lm_head of tied embeddings. progress: called
    with (bytes done, bytes in all), counted in the parameters' dtype. consumer: of parameters that have no memory yet,
    on a CPU. Raises CheckpointError, and ConfigError if a quantized weight cannot be divided among the ranks.
    """
    present, quantized = check_weights(reader, parameters, targets, scheme=scheme, redundant=redundant)
    file_order = {name: i for i, name in enumerate(present)}
    views = {name: _view(parameters[target.parameter], target) for name, target in targets.items()}
    consumed = _Consumed(targets, consumer)
    collected = _Collected(targets, keep, parameters)
    total = sum(view.nbytes for view in views.values())
    done = 0
    first = {name: next(iter(quantized[name].tensors)) if name in quantized else name for name in views}

    def take(name: str, weight: StoredWeight | None) -> None:
        nonlocal done
        if weight is not None:
            collected.add(targets[name], weight)
        consumed.filled(targets[name])
        done += views[name].nbytes
        if progress is not None:
            progress(done, total)

    device = next(parameter.device for parameter in parameters.values() if parameter.device.type != "meta")
    with copy_jobs(device) as jobs:
        for name in sorted(views, key=lambda name: file_order[first[name]]):
            keeps = targets[name].parameter in keep
            view = views[name] if keeps else consumed.view(targets[name], views[name])
            job = partial(_load, view, reader, name, targets[name].cut, scheme, quantized.get(name), keeps)
            jobs.put(job, partial(take, name))
    collected.refuse_halves()
    return total


def check_weights(
    reader: Reader,
    parameters: Mapping[str, Tensor],
    targets: Mapping[str, Target],
    *,
    scheme: Scheme | None,
    redundant: Sequence[str],
) -> "tuple[list[str], dict[str, _Quantized]]":
    """Compares names and shapes. The parameters need no memory: a wrong config could ask for any amount of it.

    Returns the tensors present, in file order, and the quantized weights. Arguments and errors are those of
    `load_weights`."""
    present = [name for name in reader.names() if name not in redundant and not _DERIVED.fullmatch(name)]
    shapes = {
        name: _whole_shape(_view(parameters[target.parameter], target), target.cut) for name, target in targets.items()
    }
    quantized = _quantized(scheme, reader, shapes)
    needed: dict[str, tuple[Shape, ...]] = {name: (shape,) for name, shape in shapes.items() if name not in quantized}
    for stored in quantized.values():
        needed |= stored.tensors
    there = set(present)
    _refuse("lacks", [name for name in needed if name not in there], "the model needs")
    left = [name for name in present if name not in needed and not (scheme is not None and is_unused(scheme, name))]
    left = [name for name in left if not _is_idle_bias(reader, name, quantized)]
    _refuse("holds", left, "the model does not use")
    for name, expected in needed.items():
        if reader.shape(name) not in expected:
            raise CheckpointError(
                f"{name} has the shape {list(reader.shape(name))} in the checkpoint, but config.json calls for "
                f"{' or '.join(str(list(shape)) for shape in expected)}."
            )
        if name in shapes and name not in quantized and reader.dtype(name).startswith("F8"):
            raise CheckpointError(f"{name} has 8-bit values, but the checkpoint has no scale for it.")
    return present, quantized


def _load(
    view: Tensor,
    reader: Reader,
    name: str,
    cut: Cut | None,
    scheme: Scheme | None,
    quantized: "_Quantized | None",
    keeps: bool,
    worker: CopyWorker,
) -> StoredWeight | None:
    """Fills the view, or returns the quantized weight if it is kept. Runs in any thread."""
    if scheme is None or quantized is None:
        _fill(view, reader, name, cut, worker)
        return None
    if not keeps and isinstance(reader, GgufReader):
        _widen(view, reader, name, cut, worker)
        return None
    weight = read_weight(scheme, reader, quantized.module, *quantized.shape, cut)
    if keeps:
        return weight
    worker.fill(view, weight.dequantize(view.dtype))
    return None


def _widen(view: Tensor, reader: GgufReader, name: str, cut: Cut | None, worker: CopyWorker) -> None:
    """Dequantizes some rows at a time: there may be no memory for a second copy of an embedding, in float32."""
    begin, columns = 0, (0, reader.shape(name)[1])
    if cut is not None and cut.dim == 0:
        begin = cut.first
    elif cut is not None:
        columns = (cut.first, cut.last)
    step = max(1, _NUM_WIDENED // reader.shape(name)[1])
    for first in range(0, view.shape[0], step):
        part = view[first : first + step]
        weight = reader.grouped(name, (begin + first, begin + first + part.shape[0]), columns)
        worker.fill(part, weight.dequantize(view.dtype))


def quantized_parameters(
    reader: Reader, targets: Mapping[str, Target], scheme: Scheme, *, wholly: bool = False
) -> set[str]:
    """The parameters whose weights are quantized in the checkpoint; some of their parts, or wholly."""
    names = {f"{module}.weight" for module in quantized_modules(scheme, reader)}
    some = {targets[name].parameter for name in names if name in targets}
    return some - {target.parameter for name, target in targets.items() if name not in names} if wholly else some


@dataclass(frozen=True)
class _Quantized:
    """A quantized weight of the checkpoint."""

    module: str
    shape: tuple[int, int]  # of the whole weight
    tensors: Mapping[str, tuple[Shape, ...]]  # its tensors, and the shapes that each may have


def _quantized(scheme: Scheme | None, reader: Reader, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, _Quantized]:
    """The weights that the model needs and the checkpoint has quantized."""
    found: dict[str, _Quantized] = {}
    if scheme is None:
        return found
    names = set(reader.names())
    for module in quantized_modules(scheme, reader):
        name = f"{module}.weight"
        if len(shapes.get(name, ())) == 2:
            n, k = shapes[name]
            found[name] = _Quantized(module, (n, k), tensors_of(scheme, module, n, k, names))
    return found


def _is_idle_bias(reader: Reader, name: str, quantized: Mapping[str, _Quantized]) -> bool:
    """Whether a bias is one of those zeros that old GPTQ writers give to modules without a bias."""
    module, _, leaf = name.rpartition(".")
    return leaf == "bias" and f"{module}.weight" in quantized and not reader.tensor(name).any()


class _Consumed:
    """Tells a consumer when its parameters begin and end."""

    def __init__(self, targets: Mapping[str, Target], consumer: Consumer | None) -> None:
        self._num_left = Counter(target.parameter for target in targets.values())
        self._consumer = consumer
        self._begun: dict[str, Tensor] = {}

    def view(self, target: Target, outline: Tensor) -> Tensor:
        """The memory of the target. outline: the same without memory."""
        name, consumer = target.parameter, self._consumer
        if consumer is None or name not in consumer.names:
            return outline
        if name not in self._begun:
            self._begun[name] = consumer.begin(name)
        return _view(self._begun[name], target)

    def filled(self, target: Target) -> None:
        name = target.parameter
        self._num_left[name] -= 1
        if not self._num_left[name]:
            self._begun.pop(name, None)
            if self._consumer is not None and name in self._consumer.names:
                self._consumer.end(name)


class _Collected:
    """Collects the quantized parts of matrices and passes each matrix on when it is complete."""

    def __init__(self, targets: Mapping[str, Target], keep: Keep, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = parameters
        self._num_parts = Counter(self._matrix(target) for target in targets.values() if target.parameter in keep)
        self._parts: dict[tuple[str, int], list[tuple[int, StoredWeight]]] = {}
        self._keep = keep

    def add(self, target: Target, weight: StoredWeight) -> None:
        matrix = name, number = self._matrix(target)
        parts = self._parts.setdefault(matrix, [])
        parts.append((0 if target.rows is None else target.rows[0], weight))
        if len(parts) < self._num_parts[matrix]:
            return
        del self._parts[matrix]
        self._keep[name](number, [part for _, part in sorted(parts, key=lambda part: part[0])])

    def refuse_halves(self) -> None:
        if self._parts:
            name, _ = next(iter(self._parts))
            raise CheckpointError(f"Some parts of {name} are quantized and some are not.")

    def _matrix(self, target: Target) -> tuple[str, int]:
        """The parameter, and the number of the target's matrix in it."""
        shape = self._parameters[target.parameter].shape
        if target.rows is None or len(shape) < 3:
            return target.parameter, 0
        return target.parameter, target.rows[0] // shape[1]


def _view(parameter: Tensor, target: Target) -> Tensor:
    if target.rows is None:
        return parameter
    rows = parameter.flatten(0, 1) if parameter.dim() == 3 else parameter
    return rows[target.rows[0] : target.rows[1]]


def _whole_shape(view: Tensor, cut: Cut | None) -> tuple[int, ...]:
    shape = list(view.shape)
    if cut is not None and cut.dim < len(shape):
        shape[cut.dim] = cut.whole
    return tuple(shape)


def _fill(view: Tensor, reader: Reader, name: str, cut: Cut | None, worker: CopyWorker) -> None:
    if cut is None:
        worker.fill(view, reader.tensor(name))
    elif cut.dim < view.dim():
        part = slice(cut.first, cut.last)
        worker.fill(view, reader.tensor(name, part if cut.dim == 0 else (slice(None), part)))
    elif cut.first == 0:
        worker.fill(view, reader.tensor(name))
    else:
        worker.fill(view, torch.zeros(view.shape))  # the bias of a matrix cut by columns: only the first rank adds it


def _refuse(verb: str, names: list[str], why: str) -> None:
    if names:
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        plural = "tensor" if len(names) == 1 else "tensors"
        raise CheckpointError(f"The checkpoint {verb} {len(names)} {plural} that {why}: {shown}.")
