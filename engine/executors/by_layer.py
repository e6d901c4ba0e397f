"""Runs a program layer by layer where someone needs to know of the layers while a pass is under way: a runner plugin
sees the hidden states between them, and a KV connector is told which keys and values are written, or on a GPU which are
by what was launched so far. The operations of a layer are the same as in one go, so are their bits."""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from ..models.layers import LayerSpan
from ..models.program import Attend, AttendLatent, Program
from .registers import Registers


class LayerHook(Protocol):
    """What happens between layers of the step that runs."""

    def skipping(self, layer: int) -> Tensor | bool:
        """Which tokens of the step keep their hidden states in this layer: int64 indices, or all or none of them."""

    def after_layer(self, layer: int, hidden: Tensor) -> None:
        """hidden: [tokens, hidden_size], a layer's result, which may be changed in place."""


class ByLayer:
    """The order of layers of one program, and who is told of them."""

    def __init__(self, program: Program, spans: tuple[LayerSpan, ...] = (), hook: LayerHook | None = None) -> None:
        """spans: of all layers of the program, if there is a hook."""
        self._widths, self._num_ops = program.widths, len(program.ops)
        self._spans, self.hook = spans, hook
        ends: dict[int, int] = {}  # tile of the cache → the operation after the one that writes it
        for number, op in enumerate(program.ops):
            if isinstance(op.args, Attend | AttendLatent):
                ends.setdefault(op.args.tile, number + 1)  # later layers may read it, too
        self._ends = [ends[tile] for tile in range(len(ends))] if sorted(ends) == list(range(len(ends))) else []
        self._stops: list[int] = []  # operations before which a pass tells of tiles
        self._tell: Callable[[int], None] = _ignore
        self._num_told = 0  # tiles, in the pass under way

    @property
    def cuts(self) -> tuple[int, ...]:
        """The operations with which layers begin, and the one after the last layer, if there is a hook."""
        return (*(span.first for span in self._spans), self._spans[-1].last) if self._spans else ()

    def listen(self, stops: Sequence[int], tell: Callable[[int], None]) -> None:
        """The next pass calls `tell` with each tile of the cache up to the last of `stops`, in order: those up to a
        stop as soon as this one is written."""
        ends = self._ends
        self._stops = sorted({max(ends[: tile + 1]) for tile in stops if tile < len(ends)})
        self._tell, self._num_told = tell, 0

    def end(self) -> int:
        """The pass is over, or was not run. Returns how many tiles, from the first on, were told of."""
        num, self._num_told = self._num_told, 0
        self._stops, self._tell = [], _ignore
        return num

    def run(self, registers: Registers | None, run: Callable[[int, int], None]) -> None:
        """run: runs the operations [first, last). registers: not needed without a hook."""

        def run_to(first: int, last: int) -> None:
            for stop in self._stops:
                if first < stop <= last:
                    run(first, stop)
                    self._reach(stop)
                    first = stop
            if first < last:
                run(first, last)

        first = 0
        if self.hook is not None:
            assert registers is not None, "a hook is shown registers"
            run_to(0, self._spans[0].first)
            for span in self._spans:
                self._run_layer(span, self.hook, registers, run_to)
            first = self._spans[-1].last
        run_to(first, self._num_ops)

    def _run_layer(
        self, span: LayerSpan, hook: LayerHook, registers: Registers, run: Callable[[int, int], None]
    ) -> None:
        width, skipping = self._widths[span.after.register], hook.skipping(span.layer)
        if skipping is True:
            if span.after != span.before:
                registers.put(span.after, width, registers.get(span.before).clone())
            return
        kept = None if isinstance(skipping, bool) else registers.get(span.before)[skipping]  # a copy
        run(span.first, span.last)
        hidden = registers.get(span.after)
        if kept is not None and not isinstance(skipping, bool):
            hidden[skipping] = kept
        hook.after_layer(span.layer, hidden)

    def _reach(self, number: int) -> None:
        """All operations before this one have run, or their layers were skipped."""
        while self._num_told < len(self._ends) and self._ends[self._num_told] <= number:
            self._num_told += 1
            self._tell(self._num_told - 1)


def _ignore(tile: int) -> None:
    """Nobody listens."""
