"""Fills a model's parameters from a checkpoint and proves that the two belong together.

Every tensor the model needs must be there, every tensor that is there must be needed, and shapes must agree; a
CheckpointError says what does not. Names and shapes are compared before any data is read. Tensors are read one at a
time and cast on the way, so there is never a second copy of the weights.
"""

import re
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from ...errors import CheckpointError
from ..parallel.shard import Cut
from .mapping import Target
from .reader import CheckpointReader

# Buffers that old exporters saved although they follow from config.json.
_DERIVED = re.compile(r"(.*\.)?rotary_emb\.inv_freq")


def load_weights(
    reader: CheckpointReader,
    parameters: Mapping[str, Tensor],
    targets: Mapping[str, Target],
    *,
    redundant: Sequence[str] = (),
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Copies every tensor to its target; returns the bytes the parameters take.

    `redundant` names tensors that may be there and are not read, such as the lm_head of tied embeddings. `progress` is
    told (bytes done, bytes in all), counted in the parameters' dtype. Raises CheckpointError.
    """
    present = [name for name in reader.names() if name not in redundant and not _DERIVED.fullmatch(name)]
    held = set(present)
    _refuse("lacks", [name for name in targets if name not in held], "the model needs")
    _refuse("holds", [name for name in present if name not in targets], "the model has no place for")

    views = {name: _view(parameters, target) for name, target in targets.items()}
    for name in present:
        expected = _whole_shape(views[name], targets[name].cut)
        if reader.shape(name) != expected:
            raise CheckpointError(
                f"{name} has the shape {list(reader.shape(name))} in the checkpoint, but config.json calls for "
                f"{list(expected)}."
            )
    total = sum(view.nbytes for view in views.values())
    done = 0
    for name in present:
        _fill(views[name], reader, name, targets[name].cut)
        done += views[name].nbytes
        if progress is not None:
            progress(done, total)
    return total


def _view(parameters: Mapping[str, Tensor], target: Target) -> Tensor:
    parameter = parameters[target.parameter]
    if target.rows is None:
        return parameter
    rows = parameter.flatten(0, 1) if parameter.dim() == 3 else parameter
    return rows[target.rows[0] : target.rows[1]]


def _whole_shape(view: Tensor, cut: Cut | None) -> tuple[int, ...]:
    shape = list(view.shape)
    if cut is not None and cut.dim < len(shape):
        shape[cut.dim] = cut.whole
    return tuple(shape)


def _fill(view: Tensor, reader: CheckpointReader, name: str, cut: Cut | None) -> None:
    if cut is None:
        view.copy_(reader.tensor(name))
    elif cut.dim < view.dim():
        part = slice(cut.first, cut.last)
        view.copy_(reader.tensor(name, part if cut.dim == 0 else (slice(None), part)))
    elif cut.first == 0:
        view.copy_(reader.tensor(name))
    else:
        view.zero_()  # a bias beside columns that are cut: the first rank adds it


def _refuse(verb: str, names: list[str], why: str) -> None:
    if names:
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        plural = "tensor" if len(names) == 1 else "tensors"
        raise CheckpointError(f"The checkpoint {verb} {len(names)} {plural} that {why}: {shown}.")
