"""Where the layers of a program begin and end, and which columns hold the hidden states between them.

The residual stream of most families is one view that each layer changes. Families that carry more from layer to layer
(several streams, branches that are added later) have no hidden states that stand for the whole, which `layer_spans`
says. No torch.
"""

from itertools import pairwise
from typing import NamedTuple

from .program import Attend, AttendLatent, Op, Program, View
from .stages import live_views


class NoHiddenStatesError(ValueError):
    """A clause that says why a program has no hidden states between its layers."""


class LayerSpan(NamedTuple):
    """One layer: the operations [first, last) turn the hidden states in `before` into those in `after`, which may be
    the same view."""

    layer: int
    first: int
    last: int
    before: View
    after: View
    is_read_elsewhere: bool  # another layer reads the keys and values that it writes


def layer_spans(program: Program, num_layers: int) -> tuple[LayerSpan, ...]:
    """The layers of a whole program, in order. Raises NoHiddenStatesError."""
    ops = program.ops
    first_of: dict[int, int] = {}
    for number, op in enumerate(ops):
        first_of.setdefault(min(op.layer, num_layers), number)
    first_of.setdefault(num_layers, len(ops))
    if missing := set(range(num_layers)) - first_of.keys():
        raise NoHiddenStatesError(f"layer {min(missing)} computes nothing")
    bounds = [first_of[layer] for layer in range(num_layers + 1)]
    afters = [_changed(ops[first:last], live_views(program, last), program.hidden) for first, last in pairwise(bounds)]
    before = _first(live_views(program, bounds[0]), afters[0], program.hidden)
    owners = _read_elsewhere(ops)
    spans = []
    for layer, after in enumerate(afters):
        spans.append(LayerSpan(layer, bounds[layer], bounds[layer + 1], before, after, layer in owners))
        before = after
    return tuple(spans)


def _changed(ops: tuple[Op, ...], live: tuple[View, ...], hidden: int) -> View:
    """The only one of these live views that a layer has written to."""
    written = [view for op in ops for view in op.outs]
    found = [view for view in live if any(_overlap(view, other) for other in written)]
    if len(found) != 1 or found[0].width != hidden:
        widths = " and ".join(str(view.width) for view in found)
        raise NoHiddenStatesError(f"its layers pass on {widths or 'no'} columns instead of {hidden} hidden states")
    return found[0]


def _first(live: tuple[View, ...], after: View, hidden: int) -> View:
    """What the first layer reads: the view that it changes in place, or else the only one of that width."""
    found = [view for view in live if view == after] or [view for view in live if view.width == hidden]
    if len(found) != 1:
        raise NoHiddenStatesError("its first layer reads more than the hidden states")
    return found[0]


def _overlap(a: View, b: View) -> bool:
    return a.register == b.register and a.first < b.first + b.width and b.first < a.first + a.width


def _read_elsewhere(ops: tuple[Op, ...]) -> frozenset[int]:
    """The layers whose tile of the cache another layer reads."""
    owner: dict[int, int] = {}
    found = set()
    for op in ops:
        if isinstance(op.args, Attend | AttendLatent) and owner.setdefault(op.args.tile, op.layer) != op.layer:
            found.add(owner[op.args.tile])
    return frozenset(found)
