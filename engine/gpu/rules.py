"""Which operations of a program the Triton kernels have, which ones torch computes between them, and which neighbours
share a launch. No Triton here: `pagewire doctor` asks on machines without it."""

from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Literal

from ..executors.mixers import MIXERS
from ..models.program import (
    Add,
    AllReduce,
    Args,
    Attend,
    AttendLatent,
    Embed,
    GatedProduct,
    Matrix,
    Mixture,
    Normalize,
    Op,
    Product,
    Program,
    Rotate,
    View,
)

_DIMS = (16, 32, 64, 128, 256)  # head dimensions that the kernels support
_MAX_GROUP = 16  # query heads per kv head that the kernels support
_LONGEST = 5  # operations of a rule

Kind = Literal[
    "attend", "product", "norm product", "product add", "norm", "add norm", "add", "experts", "latent", "mix", "sum",
    "torch",
]  # fmt: skip


_NEEDS: dict[Kind, str] = {"norm": "rms_norm", "add norm": "rms_norm"}
"""The kernel of a kind that torch can compute, too."""


class UnknownLayerError(Exception):
    """The kernels cannot compute a program. The text says why."""


@dataclass(frozen=True)
class Part:
    """Operations that follow each other and run together. torch: one that torch computes on the same registers, without
    waiting for the device."""

    kind: Kind
    ops: tuple[Op, ...]


class Facts:
    """What rules ask about a program."""

    def __init__(self, program: Program, fuses: Callable[[Matrix], bool]) -> None:
        """fuses: whether the matrix's product takes a norm or a residual into its launch."""
        self.fuses = fuses
        self._widths = program.widths
        self._uses = Counter(
            register for op in program.ops for register in {view.register for view in (*op.ins, *op.outs)}
        )

    def is_whole(self, view: View) -> bool:
        return view.width == self._widths[view.register]

    def is_between(self, view: View) -> bool:
        """Only the operation that writes it and the next one use it, so it need not be stored."""
        return self.is_whole(view) and self._uses[view.register] == 2


def body_of(program: Program) -> tuple[tuple[Op, ...], Op | None]:
    """The operations for all tokens, and the last norm, which is for the sampled tokens only."""
    *body, last = program.ops
    args = last.args
    if isinstance(args, Normalize) and args.norm.ranks == 1 and last.outs == (program.result,) != last.ins:
        return tuple(body), last
    return program.ops, None


def parts_of(
    program: Program, *, fuses: Callable[[Matrix], bool] = lambda matrix: False, without: Container[str] = ()
) -> tuple[Part, ...]:
    """The body in order. fuses: for steps of few tokens. without: kernels that torch replaces."""
    ops, _ = body_of(program)
    facts, at = Facts(program, fuses), 0
    parts: list[Part] = []
    while at < len(ops):
        next_ops = ops[at : at + _LONGEST]
        rules = ((kind, rule) for kind, rule in RULES if _NEEDS.get(kind) not in without)
        found = ((kind, num) for kind, rule in rules if (num := rule(facts, next_ops)))
        alone = kind_of(ops[at])
        kind, num = next(found, ("torch" if _NEEDS.get(alone) in without else alone, 1))
        parts.append(Part(kind, ops[at : at + num]))
        at += num
    return tuple(parts)


def in_torch(program: Program) -> tuple[Op, ...]:
    """The operations that torch computes. Raises UnknownLayerError if an operation of a program needs the lengths of
    rows, and the kernels do not have it: then torch computes the whole program, on the host's numbers."""
    for op in program.ops:
        if why := _lacks(op.args):
            raise UnknownLayerError(f"the kernels {why}")
    _, last = body_of(program)
    found = [op for part in parts_of(program) if part.kind == "torch" for op in part.ops]
    found += [] if last is None or is_rms_norm(last) else [last]
    return tuple(op for op in found if not isinstance(op.args, Embed))


def largest_group(program: Program) -> int:
    """Query heads per kv head, of the layer that has most; of latent attention all heads."""
    latent = [op.args.heads for op in program.ops if isinstance(op.args, AttendLatent)]
    return max([args.heads // args.kv_heads for args in program.attention] + latent, default=1)


def kind_of(op: Op) -> Kind:
    """Of an operation by itself."""
    if isinstance(op.args, MIXERS):
        return "mix"
    match op.args:
        case Attend():
            return "attend"
        case Product() | GatedProduct():
            return "product"
        case Normalize() if is_rms_norm(op):
            return "norm"
        case Add() if op.args == Add():
            return "add"
        case Mixture():
            return "experts"
        case AttendLatent():
            return "latent"
        case AllReduce():
            return "sum"
    return "torch"


def is_rms_norm(op: Op) -> bool:
    """Over a whole view, with a weight."""
    args = op.args
    return isinstance(args, Normalize) and args.norm.size == op.ins[0].width and _is_weighted(args)


def _is_weighted(args: Normalize) -> bool:
    norm, weight = args.norm, args.weight
    if weight is None or args.bias is not None or norm.kind != "rms" or norm.ranks > 1:
        return False
    return sum(part.rows for part in weight.weights) == norm.size


def _lacks(args: Args) -> str:
    """Why a program with this operation cannot run on the kernels."""
    match args:
        case AttendLatent() if not _is_power(args.rank) or not _is_power(args.rope_dim):
            return f"have no latent attention of rank {args.rank} with rotated keys of {args.rope_dim} numbers"
        case Attend():
            return _lacks_attention(args)
        case Mixture() if args.down.columns % 32 or args.down.rows % 32:
            return "need experts whose sizes are multiples of 32"
        case Mixture() if args.router.zero_experts:
            return "have no experts that return their input"
    return ""


def _is_power(size: int) -> bool:
    """That kernels take at once."""
    return size >= 16 and size & (size - 1) == 0


def _lacks_attention(args: Attend) -> str:
    if args.head_dim not in _DIMS:
        return f"do not support a head dimension of {args.head_dim}"
    if args.value_dim != args.head_dim:
        return f"do not support values of {args.value_dim} numbers beside keys of {args.head_dim}"
    if args.heads // args.kv_heads > _MAX_GROUP:
        return f"support at most {_MAX_GROUP} query heads per key/value head"
    if args.alibi is not None:
        return "have no attention with ALiBi"
    return "have no chunked attention" if args.reach.kind == "chunk" else ""


# The rules: how many of the next operations run together as this kind; 0: the rule does not apply.


def _attention(facts: Facts, ops: Sequence[Op]) -> int:
    """The launch that writes keys and values norms the heads and rotates them before."""
    for norms, turns in ((2, 2), (2, 0), (0, 2)):
        *before, last = ops[: norms + turns + 1]
        if len(before) == norms + turns and isinstance(last.args, Attend) and len(last.ins) == 3:
            views = last.ins[:2]
            in_place = all(op.ins == op.outs == (views[i % 2],) for i, op in enumerate(before))
            if in_place and _are_norms(before[:norms], last.args) and _are_turns(before[norms:], last.args):
                return len(before) + 1
    return 0


def _are_norms(ops: Sequence[Op], of: Attend) -> bool:
    args = [op.args for op in ops if isinstance(op.args, Normalize) and _is_weighted(op.args)]
    kinds = {(each.norm.size, each.norm.eps, each.weight is not None and each.weight.is_float32) for each in args}
    return len(args) == len(ops) and len(kinds) <= 1 and all(size == of.head_dim for size, _, _ in kinds)


def _are_turns(ops: Sequence[Op], of: Attend) -> bool:
    args = [op.args for op in ops if isinstance(op.args, Rotate)]
    is_first = all(each.first == 0 and each.rope.dims <= of.head_dim for each in args)
    return len(args) == len(ops) and is_first and len({each.rope for each in args}) <= 1


def _norm_product(facts: Facts, ops: Sequence[Op]) -> int:
    match ops:
        case [
            Op(args=Normalize()) as norm,
            Op(args=Product(matrix=matrix) | GatedProduct(matrix=matrix)) as product,
            *_,
        ]:
            reads = product.ins == norm.outs and facts.is_between(norm.outs[0])
            return 2 if reads and is_rms_norm(norm) and facts.fuses(matrix) else 0
    return 0


def _product_add(facts: Facts, ops: Sequence[Op]) -> int:
    match ops:
        case [Op(args=Product(matrix=matrix)) as product, Op(args=Add()) as add, *_] if add.args == Add():
            reads = product.outs == add.ins[1:] and facts.is_between(add.ins[1])
            is_apart = product.ins[0].register != add.outs[0].register  # the launch writes while it still reads
            return 2 if reads and is_apart and facts.fuses(matrix) else 0
    return 0


def _add_norm(facts: Facts, ops: Sequence[Op]) -> int:
    match ops:
        case [Op(args=Add()) as add, Op(args=Normalize()) as norm, *_] if add.args == Add():
            in_place = add.ins[:1] == add.outs == norm.ins != norm.outs and facts.is_whole(add.outs[0])
            return 2 if in_place and is_rms_norm(norm) and not _norm_product(facts, ops[1:]) else 0
    return 0


RULES: tuple[tuple[Kind, Callable[[Facts, Sequence[Op]], int]], ...] = (
    ("attend", _attention),
    ("norm product", _norm_product),
    ("product add", _product_add),
    ("add norm", _add_norm),
)
