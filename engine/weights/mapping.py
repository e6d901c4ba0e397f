"""Maps each tensor of a checkpoint to one of our parameters, or to some of its rows.

Our parameters have the checkpoint's names, except fused projections: `qkv_proj` stacks q, k and v, `gate_up_proj` gate
and up, `gate_up` and `down` those of all experts. Pure arithmetic on names and sizes.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..parallel.shard import Cut, Cuts

Fused = Mapping[str, tuple[tuple[str, int], ...]]
"""Fused module, or stack of expert matrices → the checkpoint's modules in it, in order, with their numbers of rows."""


@dataclass(frozen=True)
class Target:
    """A parameter of ours, or its rows [first, last), counted through the matrices of a stack; and the part of the
    checkpoint's tensor that goes there."""

    parameter: str
    rows: tuple[int, int] | None = None
    cut: Cut | None = None


def checkpoint_targets(
    parameters: Iterable[str], fused: Fused, cuts: Cuts, renamed: Mapping[str, str] | None = None
) -> dict[str, Target]:
    """The checkpoint's name of every tensor that the model needs → its target. renamed: our name of a module → the
    checkpoint's, where they differ."""
    targets = {}
    for parameter in parameters:
        parent, _, leaf = parameter.rpartition(".")
        if renamed is not None:
            parent = ".".join(renamed.get(module, module) for module in parent.split("."))
        path, _, module = parent.rpartition(".")
        if leaf in fused:  # experts, which are separate modules in the checkpoint
            parts = [(f"{parent}.{part}.weight", rows, cuts.get(leaf)) for part, rows in fused[leaf]]
        elif module in fused:
            parts = [(f"{path}.{part}.{leaf}", rows, cuts.get(part)) for part, rows in fused[module]]
        else:
            targets[f"{parent}.{leaf}"] = Target(parameter, cut=cuts.get(module))
            continue
        first = 0
        for name, rows, cut in parts:
            targets[name] = Target(parameter, (first, first + rows), cut)
            first += rows
    return targets
