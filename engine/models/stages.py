"""Pipeline parallelism: which layers each stage computes, and the part of a program that is a stage's.

A stage computes adjacent layers. The first one has the embedding besides, the last one the final norm and the head.
What a stage sends to the next are the columns of registers that were written before the cut and are read after it: the
residual stream of most families, and whatever else a family carries along (the streams of Gemma 3n, the embedding of
Zamba 2, a branch that is added later). So no family needs code here. No torch.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

from ...errors import ConfigError
from .program import (
    Args,
    Attend,
    AttendLatent,
    Convolve,
    Matrix,
    Mixture,
    Positions,
    Program,
    ScanDelta,
    ScanLightning,
    ScanMamba1,
    ScanMamba2,
    States,
    Tile,
    Vector,
    View,
)

FLAG = "--pipeline-parallel-size"
_ROWS = 16  # of the decode step by whose time layers are dealt,
_CONTEXT = 2048  # and the positions of each row
_BYTES = 2  # of a number
_LOGIT_BYTES = 8  # of a row and token of the vocabulary: the logit is written and read
_STATEFUL = (Convolve, ScanDelta, ScanMamba1, ScanMamba2, ScanLightning)
_CostOf = Callable[[int, int, int], float]
"""(first, last, stage) → of a stage with the layers [first, last)."""


class Cost(NamedTuple):
    """Of a layer, or of what the first or last stage has besides. Bytes."""

    read: int = 0  # by a decode step of `_ROWS` rows
    weights: int = 0
    kv: int = 0  # of each position


class Layers(NamedTuple):
    """What `deal` needs to know of a program."""

    costs: tuple[Cost, ...]  # of each layer
    first: Cost  # the embedding
    last: Cost  # the final norm, the head and the sampling
    joined: frozenset[int]  # layers that must be in the stage of the layer before them


# ── which layers ─────────────────────────────────────────────────────────────────────────────────────────────────────


def layers_of(program: Program, num_layers: int) -> Layers:
    """program: a whole one. Every number counts two bytes, however the checkpoint or the cache stores it."""
    read, weights, kv = ([0] * (num_layers + 2) for _ in range(3))
    owners: dict[int, int] = {}
    last_reader: dict[int, int] = {}
    seen: set[tuple[int, Matrix | Vector]] = set()
    for op in program.ops:
        args, at = op.args, op.layer + 1
        for target in (value for value in vars(args).values() if isinstance(value, Matrix | Vector)):
            if (op.layer, target) not in seen:
                seen.add((op.layer, target))
                size = _numbers(target) * _BYTES
                weights[at] += size
                read[at] += _read(args, target, size)
        if isinstance(args, Attend | AttendLatent):
            owners.setdefault(args.tile, op.layer)
            last_reader[args.tile] = op.layer
            tile = program.tiles[args.tile]
            each = tile.kv_heads * (tile.head_dim + tile.value_dim) * _BYTES
            read[at] += _ROWS * each * _positions(tile)
            kv[at] += each if owners[args.tile] == op.layer else 0
        elif isinstance(args, _STATEFUL):
            states = program.states[args.states.first : args.states.first + args.states.count]
            read[at] += 2 * _ROWS * 4 * sum(prod(state.shape) for state in states)
    head = [program.head, program.head_project] if program.has_head else []
    sizes = [_numbers(matrix) * _BYTES for matrix in head if matrix is not None]
    weights[-1] += sum(sizes)
    read[-1] += sum(sizes) + _ROWS * program.vocab * _LOGIT_BYTES
    joined = {layer for tile, owner in owners.items() for layer in range(owner + 1, last_reader[tile] + 1)}
    costs = [Cost(*each) for each in zip(read, weights, kv, strict=True)]
    return Layers(tuple(costs[1:-1]), costs[0], costs[-1], frozenset(joined))


def _numbers(target: Matrix | Vector) -> int:
    if isinstance(target, Matrix):
        return max(1, target.experts) * target.rows * target.columns
    return sum(weight.rows * max(1, weight.columns) for weight in target.weights)


def _read(args: Args, target: Matrix | Vector, size: int) -> int:
    """Of a look-up the rows' own, of experts about those that are chosen."""
    if isinstance(target, Matrix) and target.use == "table":
        return _ROWS * target.columns * _BYTES
    if isinstance(args, Mixture) and isinstance(target, Matrix):
        return size * min(args.num_experts, _ROWS * args.router.top_k) // args.num_experts
    return size


def _positions(tile: Tile) -> int:
    """That a query reads."""
    return _CONTEXT if tile.reach.kind == "full" else min(_CONTEXT, tile.reach.positions)


def deal(layers: Layers, num_stages: int, *, memory: int | None = None) -> tuple[int, ...]:
    """How many layers each stage gets: the cut whose slowest stage is the fastest, and of equals the one with the most
    KV blocks, which are those of the stage with the fewest. memory: bytes of each device for weights and KV; None: the
    stages share one memory. Raises ConfigError if there is no such cut."""
    num = len(layers.costs)
    may_begin = [layer for layer in range(num) if layer not in layers.joined]
    if len(may_begin) < num_stages:
        kept = f", of which {num - len(may_begin)} read keys and values of earlier ones" if layers.joined else ""
        raise ConfigError(
            f"{FLAG} {num_stages}: the model has {num} layers{kept}, enough for {len(may_begin)} stages at most."
        )
    sums = _Sums(layers, num_stages)

    def fits(first: int, last: int, stage: int) -> bool:
        return memory is None or sums.weights(first, last, stage) < memory

    def blocks(first: int, last: int, stage: int) -> float:
        """More is better."""
        kv = sums.kv(first, last)
        if memory is None:
            return -float(kv)
        return (memory - sums.weights(first, last, stage)) / kv if kv else float("inf")

    def slowest(first: int, last: int, stage: int) -> float:
        return float(sums.read(first, last, stage)) if fits(first, last, stage) else float("inf")

    found = _best(may_begin, num, num_stages, slowest)
    if found is None:
        raise ConfigError(
            f"{FLAG} {num_stages}: no cut of the {num} layers fits into devices of {memory or 0:,} bytes each; "
            "choose more stages."
        )
    limit = found[0]

    def fewest(first: int, last: int, stage: int) -> float:
        return -blocks(first, last, stage) if slowest(first, last, stage) <= limit else float("inf")

    chosen = _best(may_begin, num, num_stages, fewest)
    assert chosen is not None, (limit, num_stages)
    return chosen[1]


class _Sums:
    """Of adjacent layers."""

    def __init__(self, layers: Layers, num_stages: int) -> None:
        self._layers, self._num_stages = layers, num_stages
        self._totals = [(0, 0, 0)]
        for cost in layers.costs:
            read, weights, kv = self._totals[-1]
            self._totals.append((read + cost.read, weights + cost.weights, kv + cost.kv))

    def read(self, first: int, last: int, stage: int) -> int:
        return self._sum(0, first, last) + sum(end.read for end in self._ends(stage))

    def weights(self, first: int, last: int, stage: int) -> int:
        return self._sum(1, first, last) + sum(end.weights for end in self._ends(stage))

    def kv(self, first: int, last: int) -> int:
        return self._sum(2, first, last)

    def _sum(self, field: int, first: int, last: int) -> int:
        return self._totals[last][field] - self._totals[first][field]

    def _ends(self, stage: int) -> list[Cost]:
        first = [self._layers.first] if stage == 0 else []
        return first + ([self._layers.last] if stage == self._num_stages - 1 else [])


def _best(may_begin: Sequence[int], num: int, num_stages: int, cost: _CostOf) -> tuple[float, tuple[int, ...]] | None:
    """(the least greatest cost of a stage, the layers of each stage) of all cuts; None: each has an infinite cost.
    Dynamic programming over the ends of the stages, which is exact; of equals the cut whose later stages are longer."""
    ends = [*may_begin[1:], num]
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (float("-inf"), ())}
    for stage in range(num_stages):
        reached: dict[int, tuple[float, tuple[int, ...]]] = {}
        for first, (so_far, lengths) in best.items():
            for last in ends if stage < num_stages - 1 else [num]:
                if last <= first:
                    continue
                greatest = max(so_far, cost(first, last, stage))
                if greatest < float("inf") and (last not in reached or greatest < reached[last][0]):
                    reached[last] = greatest, (*lengths, last - first)
        best = reached
    return best.get(num)


def check_lengths(text: str, layers: Layers, num_stages: int) -> tuple[int, ...]:
    """`--pipeline-layers`, such as 18,20. Raises ConfigError if it does not fit the model."""
    flag = f"--pipeline-layers {text}"
    try:
        lengths = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{flag}: write the number of layers of each stage, such as 18,20.") from None
    num = len(layers.costs)
    if len(lengths) != num_stages or min(lengths) < 1 or sum(lengths) != num:
        raise ConfigError(f"{flag}: give {num_stages} numbers of at least 1 that add up to the model's {num} layers.")
    for first, _ in bounds_of(lengths)[1:]:
        if first in layers.joined:
            raise ConfigError(
                f"{flag}: layer {first} reads keys and values of an earlier layer, so it must be in that layer's stage."
            )
    return lengths


def lengths_of(
    program: Program, num_layers: int, num_stages: int, asked: str | None, *, memory: int | None = None
) -> tuple[int, ...]:
    """How many layers each stage gets, on every rank alike. program: the whole one of the first rank of a stage. asked:
    `--pipeline-layers`. Raises ConfigError."""
    layers = layers_of(program, num_layers)
    return deal(layers, num_stages, memory=memory) if asked is None else check_lengths(asked, layers, num_stages)


def step_reads(layers: Layers, lengths: Sequence[int]) -> list[int]:
    """Bytes that each stage reads in a decode step."""
    sums = _Sums(layers, len(lengths))
    return [sums.read(first, last, stage) for stage, (first, last) in enumerate(bounds_of(lengths))]


def bounds_of(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """[first, last) of each stage's layers."""
    firsts = [sum(lengths[:stage]) for stage in range(len(lengths))]
    return [(first, first + length) for first, length in zip(firsts, lengths, strict=True)]


# ── the part of a stage ──────────────────────────────────────────────────────────────────────────────────────────────


def stage_program(program: Program, first: int, last: int, num_layers: int) -> Program:
    """The layers [first, last) of a program of `num_layers` layers, with what is before the first layer or after the
    last one. Its tiles and states are counted from 0."""
    is_first, is_last = first == 0, last == num_layers
    own = [
        index
        for index, op in enumerate(program.ops)
        if first <= op.layer < last or (is_first and op.layer < 0) or (is_last and op.layer >= num_layers)
    ]
    begin, end = own[0], own[-1] + 1
    assert own == list(range(begin, end)), "the operations of a stage do not follow each other"
    ops = program.ops[begin:end]
    used_tiles = [op.args.tile for op in ops if isinstance(op.args, Attend | AttendLatent)]
    used_states = [op.args.states for op in ops if isinstance(op.args, _STATEFUL)]
    first_tile, num_tiles = min(used_tiles, default=0), len(set(used_tiles))
    first_state = min((states.first for states in used_states), default=0)
    num_states = sum(states.count for states in used_states)
    receives = () if is_first else live_views(program, begin)
    sends = () if is_last else live_views(program, end)
    ops = tuple(replace(op, args=_renumbered(op.args, first_tile, first_state)) for op in ops)
    in_use = {view.register for op in ops for view in (*op.ins, *op.outs)}
    in_use.update(view.register for view in (*receives, *sends, *((program.result,) if is_last else ())))
    return replace(
        program,
        ops=ops,
        widths=tuple(width if register in in_use else 0 for register, width in enumerate(program.widths)),
        result=program.result if is_last else sends[0],
        tiles=program.tiles[first_tile : first_tile + num_tiles],
        states=program.states[first_state : first_state + num_states],
        has_head=program.has_head and is_last,
        receives=receives,
        sends=sends,
    )


def live_views(program: Program, begin: int) -> tuple[View, ...]:
    """The columns of registers that hold something before operation `begin` which it or a later one reads, in the order
    of registers and columns."""
    live: dict[int, bytearray] = {}

    def put(view: View, value: bytes) -> None:
        columns = live.setdefault(view.register, bytearray(program.widths[view.register]))
        columns[view.first : view.first + view.width] = value * view.width

    put(program.result, b"\1")
    for op in reversed(program.ops[begin:]):
        for view in op.outs:
            put(view, b"\0")
        for view in (*op.ins, *(op.outs if isinstance(op.args, Positions) else ())):
            put(view, b"\1")
    found = []
    for register in sorted(live):
        columns, first = bytes(live[register]), 0
        while (first := columns.find(b"\1", first)) >= 0:
            after = columns.find(b"\0", first)
            after = len(columns) if after < 0 else after
            found.append(View(register, first, after - first))
            first = after
    return tuple(found)


def _renumbered(args: Args, first_tile: int, first_state: int) -> Args:
    if isinstance(args, Attend | AttendLatent):
        return replace(args, tile=args.tile - first_tile)
    if isinstance(args, _STATEFUL):
        states = args.states
        return replace(args, states=States(states.first - first_state, states.count, states.per_tile))
    return args
