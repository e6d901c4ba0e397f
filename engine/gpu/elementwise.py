"""Operations on each number of a token's columns, as launches."""

from collections.abc import Callable, Sequence

from torch import Tensor

from ...kernels.reference import TorchMatrix
from ...kernels.triton import elementwise
from ...kernels.triton.activations import activate, glu
from ...kernels.triton.row_statistics import match_magnitude, sparse
from ..executors.weights import Weights
from ..models.program import (
    Activate,
    Add,
    Clip,
    Glu,
    Heat,
    MatchMagnitude,
    MixStreams,
    Multiply,
    Op,
    Positions,
    Scale,
)

Run = Callable[[Sequence[Tensor], Tensor, Tensor], None]
"""The columns of an operation's `ins`; memory for those of its `outs`; positions of the tokens, [tokens] int32."""


def run_of(op: Op, weights: Weights) -> Run:
    """op: of a kind that `rules.kind_of` calls elementwise."""
    args = op.args
    match args:
        case Activate():
            numbers = weights.vector(args.weights)
            return lambda ins, out, positions: activate(ins[0], out, args.act, numbers)
        case Glu(sparsity=share) if share:
            return lambda ins, out, positions: _sparse_glu(ins[0], ins[1], out, args)
        case Glu():
            return lambda ins, out, positions: glu(
                ins[0], ins[1], out, args.act, limit=args.limit, sharpness=args.sharpness, gate_scale=args.gate_scale
            )
        case Add():
            return lambda ins, out, positions: elementwise.add(ins[0], ins[1], out, alpha=args.alpha, beta=args.beta)
        case Scale():
            vector = weights.vector(args.vector)
            factor = args.factor if vector is None else vector
            return lambda ins, out, positions: elementwise.scale(ins[0], out, factor)
        case Multiply():
            return lambda ins, out, positions: elementwise.multiply(ins[0], ins[1], out, args.act)
        case Clip():
            return lambda ins, out, positions: elementwise.clip(ins[0], out, args.limit)
        case Heat():
            found = args.temperature
            return lambda ins, out, positions: elementwise.heat(
                ins[0], out, positions, factor=found.scale, every=found.every, shift=found.shift
            )
        case MatchMagnitude():
            return lambda ins, out, positions: match_magnitude(ins[0], ins[1], out, args.floor)
        case MixStreams():
            return lambda ins, out, positions: elementwise.mix_streams(
                ins[0], ins[1], ins[2], out, size=args.size, shift=args.shift
            )
        case Positions():
            (table,) = weights.matrices[args.table.key]
            assert isinstance(table, TorchMatrix), "tables are not quantized"
            rows = table.weight
            return lambda ins, out, positions: elementwise.add_rows(out, rows, positions, args.offset)
    raise AssertionError(f"{type(args).__name__} has no kernel")


def _sparse_glu(gate: Tensor, up: Tensor, out: Tensor, args: Glu) -> None:
    sparse(gate, out, args.sparsity)
    glu(out, up, out, args.act, limit=args.limit, sharpness=args.sharpness, gate_scale=args.gate_scale)
