"""Runs a program layer by layer, so that a runner plugin sees the hidden states between them. The operations of a layer
are the same as without a plugin, so are their bits."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from ..models.layers import LayerSpan
from ..models.program import Program
from .registers import Registers


class LayerHook(Protocol):
    """What happens between layers of the step that runs."""

    def skipping(self, layer: int) -> Tensor | bool:
        """Which tokens of the step keep their hidden states in this layer: int64 indices, or all or none of them."""

    def after_layer(self, layer: int, hidden: Tensor) -> None:
        """hidden: [tokens, hidden_size], a layer's result, which may be changed in place."""


class ByLayer:
    """The order of layers of one program."""

    def __init__(self, program: Program, spans: tuple[LayerSpan, ...], hook: LayerHook) -> None:
        """spans: of all layers of the program."""
        self._widths, self._num_ops = program.widths, len(program.ops)
        self._spans, self._hook = spans, hook

    @property
    def cuts(self) -> tuple[int, ...]:
        """The operations with which layers begin, and the one after the last layer."""
        return (*(span.first for span in self._spans), self._spans[-1].last)

    def run(self, registers: Registers, run: Callable[[int, int], None]) -> None:
        """run: runs the operations [first, last)."""
        run(0, self._spans[0].first)
        for span in self._spans:
            self._run_layer(span, registers, run)
        run(self._spans[-1].last, self._num_ops)

    def _run_layer(self, span: LayerSpan, registers: Registers, run: Callable[[int, int], None]) -> None:
        width, skipping = self._widths[span.after.register], self._hook.skipping(span.layer)
        if skipping is True:
            if span.after != span.before:
                registers.put(span.after, width, registers.get(span.before).clone())
            return
        kept = None if isinstance(skipping, bool) else registers.get(span.before)[skipping]  # a copy
        run(span.first, span.last)
        hidden = registers.get(span.after)
        if kept is not None and not isinstance(skipping, bool):
            hidden[skipping] = kept
        self._hook.after_layer(span.layer, hidden)
