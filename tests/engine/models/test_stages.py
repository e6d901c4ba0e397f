"""The stages of a program together are the whole program, and each is sent what it reads."""

from itertools import combinations, pairwise

import pytest
from decoders import decoders, of_checkpoint
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagewire.engine.models.description import Decoder
from pagewire.engine.models.lower import lower
from pagewire.engine.models.program import Attend, AttendLatent, Positions, Program, View
from pagewire.engine.models.stages import (
    Cost,
    Layers,
    bounds_of,
    check_lengths,
    deal,
    layers_of,
    lengths_of,
    live_views,
    stage_program,
)
from pagewire.errors import ConfigError

# Of attention, shared embeddings, experts, windows, each recurrent layer, and the embedding beside the stream.
KINDS = ("llama", "qwen3", "qwen3_moe", "gemma3", "bamba", "jamba", "lfm2", "mamba2", "minimax", "zamba2")


def check_stages(decoder: Decoder) -> None:
    """For each layer that may begin a stage, two stages; and as many stages as there can be."""
    program, num_layers = lower(decoder), len(decoder.blocks)
    layers = layers_of(program, num_layers)
    firsts = [layer for layer in range(num_layers) if layer not in layers.joined]
    cuts = [[first, num_layers - first] for first in firsts[1:]]
    for lengths in [*cuts, [last - first for first, last in pairwise([*firsts, num_layers])]]:
        stages = [stage_program(program, first, last, num_layers) for first, last in bounds_of(lengths)]
        check_parts(program, stages)


def check_parts(program: Program, stages: list[Program]) -> None:
    ops = [op for stage in stages for op in stage.ops]
    assert [(op.layer, op.ins, op.outs) for op in ops] == [(op.layer, op.ins, op.outs) for op in program.ops]
    assert sum((stage.tiles for stage in stages), ()) == program.tiles
    assert sum((stage.states for stage in stages), ()) == program.states
    assert {target for stage in stages for target in stage.targets} == {*program.targets}
    assert [stage.has_head for stage in stages] == [False] * (len(stages) - 1) + [True]
    assert all(before.sends == after.receives for before, after in pairwise(stages))
    assert not stages[0].receives and not stages[-1].sends and stages[-1].result == program.result
    for stage in stages:
        known = set(columns(stage.receives))
        for op in stage.ops:
            reads = (*op.ins, *op.outs) if isinstance(op.args, Positions) else op.ins
            assert known.issuperset(columns(reads)), f"{op} reads what was not sent"
            known.update(columns(op.outs))
            if isinstance(op.args, Attend | AttendLatent):
                assert op.args.tile < len(stage.tiles)
        assert known.issuperset(columns((*stage.sends, stage.result)))
        in_use = {view.register for op in stage.ops for view in (*op.ins, *op.outs)}
        in_use |= {view.register for view in (*stage.receives, *stage.sends, stage.result)}
        assert all((width > 0) == (register in in_use) for register, width in enumerate(stage.widths))


def columns(views: tuple[View, ...]) -> list[tuple[int, int]]:
    return [(view.register, column) for view in views for column in range(view.first, view.first + view.width)]


@pytest.mark.parametrize("kind", KINDS)
def test_stages_are_the_whole_program(kind: str) -> None:
    decoder = of_checkpoint(kind)
    assert decoder is not None
    check_stages(decoder)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(decoders())
def test_stages_of_any_description(decoder: Decoder) -> None:
    check_stages(decoder)


def test_a_stage_sends_the_stream_and_what_is_read_beside_it() -> None:
    """Of Zamba 2, whose later layers read the embedding as well."""
    for kind, widths in (("llama", [64]), ("zamba2", [64, 64])):
        decoder = of_checkpoint(kind)
        assert decoder is not None
        program = lower(decoder)
        begin = next(index for index, op in enumerate(program.ops) if op.layer == 1)
        assert [view.width for view in live_views(program, begin)] == widths


costs = st.builds(Cost, st.integers(0, 9), st.integers(0, 9), st.integers(0, 3))


@settings(max_examples=200, deadline=None)
@given(st.lists(costs, min_size=1, max_size=7), costs, costs, st.data())
def test_the_cut_is_the_best_of_all(layers: list[Cost], first: Cost, last: Cost, data: st.DataObject) -> None:
    """Its slowest stage is the fastest, and of those cuts it leaves the most blocks."""
    num = len(layers)
    joined = frozenset(data.draw(st.sets(st.integers(1, max(1, num - 1))))) & set(range(num))
    num_stages = data.draw(st.integers(1, num))
    memory = data.draw(st.one_of(st.none(), st.integers(5, 60)))
    found = Layers(tuple(layers), first, last, joined)

    def value(lengths: tuple[int, ...]) -> tuple[float, float] | None:
        reads, blocks = [], []
        for stage, (begin, end) in enumerate(bounds_of(lengths)):
            part = [*layers[begin:end], *([first] * (stage == 0)), *([last] * (stage == num_stages - 1))]
            weights, kv = sum(cost.weights for cost in part), sum(cost.kv for cost in layers[begin:end])
            if memory is not None and weights >= memory:
                return None
            reads.append(sum(cost.read for cost in part))
            blocks.append(-kv if memory is None else (memory - weights) / kv if kv else float("inf"))
        return max(reads), -min(blocks)

    cuts = []
    for ends in combinations([layer for layer in range(1, num) if layer not in joined], num_stages - 1):
        lengths = tuple(after - before for before, after in pairwise((0, *ends, num)))
        cuts += [(found_value, lengths) for found_value in [value(lengths)] if found_value is not None]
    if not cuts:
        with pytest.raises(ConfigError, match="--pipeline-parallel-size"):
            deal(found, num_stages, memory=memory)
        return
    assert value(deal(found, num_stages, memory=memory)) == min(cuts)[0]


def test_a_large_head_leaves_the_last_stage_fewer_layers() -> None:
    layer, head = Cost(10, 10, 1), Cost(25, 25, 0)
    assert deal(Layers((layer,) * 10, Cost(), head, frozenset()), 2) == (6, 4)
    assert deal(Layers((layer,) * 10, Cost(), Cost(), frozenset()), 2) == (5, 5)


def test_layers_that_share_keys_and_values_stay_together() -> None:
    layers = Layers((Cost(1, 1, 1),) * 4, Cost(), Cost(), frozenset({2, 3}))
    assert deal(layers, 2) == (1, 3)
    with pytest.raises(ConfigError, match=r"4 layers, of which 2 read keys and values of earlier ones, enough for 2 "):
        deal(layers, 3)
    with pytest.raises(ConfigError, match="layer 2 reads keys and values of an earlier layer"):
        check_lengths("2,2", layers, 2)


@pytest.mark.parametrize("text", ["2", "3,0", "1,1", "a,b", "1,1,1", ""])
def test_layers_that_do_not_fit_are_refused(text: str) -> None:
    decoder = of_checkpoint("llama")
    assert decoder is not None
    with pytest.raises(ConfigError, match=f"--pipeline-layers {text}: (give 2 numbers|write the number)"):
        lengths_of(lower(decoder), 3, 2, text)
    assert lengths_of(lower(decoder), 3, 2, "1,2") == (1, 2)
