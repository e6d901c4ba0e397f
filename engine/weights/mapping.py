"""Where each tensor of a checkpoint goes: which of our parameters, and which of its rows.

Our parameters carry the checkpoint's names, but for the projections that are fused: `qkv_proj` holds q, k and v one
below the other, `gate_up_proj` gate and up. Pure arithmetic on names and sizes.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..parallel.shard import Cut, Cuts

Fused = Mapping[str, tuple[tuple[str, int], ...]]
"""Fused module → the checkpoint's modules in it, in order, with the rows each takes."""


@dataclass(frozen=True)
class Target:
    """A parameter of ours, or its rows [first, last); and the part of the checkpoint's tensor that goes there."""

    parameter: str
    rows: tuple[int, int] | None = None
    cut: Cut | None = None


def checkpoint_targets(parameters: Iterable[str], fused: Fused, cuts: Cuts) -> dict[str, Target]:
    """The checkpoint's name of every tensor the model needs → where it goes."""
    targets = {}
    for parameter in parameters:
        parent, _, leaf = parameter.rpartition(".")
        path, _, module = parent.rpartition(".")
        if module not in fused:
            targets[parameter] = Target(parameter, cut=cuts.get(module))
            continue
        first = 0
        for part, rows in fused[module]:
            targets[f"{path}.{part}.{leaf}"] = Target(parameter, (first, first + rows), cuts.get(part))
            first += rows
    return targets
