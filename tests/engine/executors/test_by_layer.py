"""A program runs layer by layer: all of its operations in order, the hook after each layer, and rows that skip some."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from decoders import of_checkpoint
from torch import Tensor

from pagewire.engine.executors.by_layer import ByLayer
from pagewire.engine.executors.registers import Registers
from pagewire.engine.models.layers import layer_spans
from pagewire.engine.models.lower import lower
from pagewire.engine.models.program import Attend, View

TOKENS = 4


class Hook:
    """Notes the hidden states of each layer, and skips what it is told."""

    def __init__(self, **skips: list[int] | bool) -> None:
        self._skips = skips
        self.seen: dict[int, list[float]] = {}

    def skipping(self, layer: int) -> Tensor | bool:
        found = self._skips.get(f"layer{layer}", False)
        return found if isinstance(found, bool) else torch.tensor(found)

    def after_layer(self, layer: int, hidden: Tensor) -> None:
        self.seen[layer] = hidden[:, 0].tolist()


@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("moves", [True, False])  # a layer's result is in another register than its input
def test_layers_run_in_order_and_rows_skip_them(fixed: bool, moves: bool) -> None:
    """Layer n adds 10 ** n."""
    decoder = of_checkpoint("qwen3")
    assert decoder is not None
    program = lower(decoder)
    spans = layer_spans(program, 3)
    places = [spans[0].before, *(View(len(program.widths) + n, 0, 64) if moves else spans[0].before for n in range(3))]
    spans = tuple(
        span._replace(before=before, after=after)
        for span, before, after in zip(spans, places, places[1:], strict=False)
    )
    widths = (*program.widths, 64, 64, 64)
    hook = Hook(layer1=[0, 2], layer2=True)
    registers = Registers([torch.zeros(TOKENS, width) for width in widths]) if fixed else Registers()
    ran: list[tuple[int, int]] = []

    def run(first: int, last: int) -> None:
        ran.append((first, last))
        layer = next((span for span in spans if span.first == first), None)
        if layer is None:
            if first == 0:
                registers.put(places[0], 64, torch.zeros(TOKENS, 64))
        else:
            registers.put(layer.after, 64, registers.get(layer.before) + 10**layer.layer)

    by_layer = ByLayer(replace(program, widths=widths), spans, hook)
    by_layer.run(registers, run)
    ends = [0, *by_layer.cuts[:3], spans[-1].last, len(program.ops)]
    assert ran == [(a, b) for a, b in pairwise(ends) if a != spans[2].first]
    assert hook.seen == {0: [1, 1, 1, 1], 1: [1, 11, 1, 11]}
    assert registers.get(places[-1])[:, 0].tolist() == [1, 11, 1, 11]


@pytest.mark.parametrize("skips", [False, True])
def test_a_pass_tells_of_tiles_at_stops(skips: bool) -> None:
    """In order, once the operations have run that write them. The end of a layer that all rows skip is no stop."""
    decoder = of_checkpoint("qwen3")
    assert decoder is not None
    program = lower(decoder)
    spans = layer_spans(program, 3)
    ends = [number + 1 for number, op in enumerate(program.ops) if isinstance(op.args, Attend)]
    registers = Registers([torch.zeros(TOKENS, width) for width in program.widths])
    by_layer = ByLayer(program, spans, Hook(layer1=True)) if skips else ByLayer(program)
    ran: list[tuple[int, int]] = []
    seen: list[tuple[int, int]] = []  # tiles, and the operation up to which all had run

    def run(first: int, last: int) -> None:
        assert first < last
        ran.append((first, last))

    for stops, expected in (
        ((0, 1), [(0, ends[0])] if skips else [(0, ends[0]), (1, ends[1])]),
        ((1,), [] if skips else [(0, ends[1]), (1, ends[1])]),
        ((2, 7), [(0, ends[2]), (1, ends[2]), (2, ends[2])]),
        ((), []),
    ):
        by_layer.listen(stops, lambda tile: seen.append((tile, ran[-1][1])))
        by_layer.run(registers, run)
        assert seen == expected and by_layer.end() == len(expected)
        done = [number for first, last in ran for number in range(first, last)]
        skipped = range(spans[1].first, spans[1].last) if skips else ()
        assert done == [number for number in range(len(program.ops)) if number not in skipped]
        ran.clear()
        seen.clear()
    by_layer.listen((0,), lambda tile: pytest.fail("it has ended"))
    assert by_layer.end() == 0
    by_layer.run(registers, run)
