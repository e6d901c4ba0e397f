"""Fills a model's parameters from a checkpoint and proves that the two belong together.

Every tensor the model needs must be there, every tensor that is there must be needed, and shapes must agree; a
CheckpointError says what does not. Names and shapes are compared before any data is read. Tensors are read one at a
time and cast on the way, so there is never a second copy of the weights.
"""

import re
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from ...errors import CheckpointError
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
    _refuse("lacks", [name for name in targets if name not in set(present)], "the model needs")
    _refuse("holds", [name for name in present if name not in targets], "the model has no place for")

    views = {name: _view(parameters, target) for name, target in targets.items()}
    for name in present:
        if reader.shape(name) != tuple(views[name].shape):
            raise CheckpointError(
                f"{name} has the shape {list(reader.shape(name))} in the checkpoint, but config.json calls for "
                f"{list(views[name].shape)}."
            )
    total = sum(view.nbytes for view in views.values())
    done = 0
    for name in present:
        views[name].copy_(reader.tensor(name))
        done += views[name].nbytes
        if progress is not None:
            progress(done, total)
    return total


def _view(parameters: Mapping[str, Tensor], target: Target) -> Tensor:
    parameter = parameters[target.parameter]
    return parameter if target.rows is None else parameter[target.rows[0] : target.rows[1]]


def _refuse(verb: str, names: list[str], why: str) -> None:
    if names:
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        plural = "tensor" if len(names) == 1 else "tensors"
        raise CheckpointError(f"The checkpoint {verb} {len(names)} {plural} that {why}: {shown}.")
