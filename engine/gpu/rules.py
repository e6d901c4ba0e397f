"""Which operations of a program the Triton kernels have, which ones torch computes between them, and which neighbours
share a launch. No Triton here: `pagewire doctor` asks on machines without it."""

from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Literal

from ...kernels.triton import limits
from ..executors.mixers import MIXERS
from ..models.program import (
    Activate,
    Add,
    AllReduce,
    Args,
    Attend,
    AttendLatent,
    Clip,
    Embed,
    GatedProduct,
    Glu,
    Heat,
    Keep,
    MatchMagnitude,
    Matrix,
    MixStreams,
    Mixture,
    Multiply,
    Normalize,
    Op,
    Positions,
    Product,
    Program,
    Rotate,
    Scale,
    ScanDelta,
    ScanLightning,
    ScanMamba2,
    Spread,
    View,
)

_MAX_DIM = 512  # numbers of a head whose tile fits into the shared memory of every GPU
_LONGEST = 5  # operations of a rule

Kind = Literal[
    "attend", "product", "norm product", "product add", "norm", "add norm", "add", "elementwise",
    "rotate", "experts", "latent", "mix", "sum", "gather", "scatter", "torch",
]  # fmt: skip


_NEEDS: dict[Kind, str] = {"norm": "rms_norm", "add norm": "rms_norm", "rotate": "rotate"}
"""The kernel of a kind that torch can compute, too. Of other such kinds `needs` knows it by the operation."""


class UnknownLayerError(Exception):
    """The kernels cannot compute a program. The text says why."""


@dataclass(frozen=True)
class Target:
    """The device and the types that kernels are compiled for."""

    architecture: int  # 90: sm_90
    dtype: str  # of activations, as in `EngineConfig`
    kv_dtype: str

    def misfit(self, kernel: str, size: int) -> str:
        """Why a kernel of this size does not run on the device, as the end of a sentence; empty: it runs."""
        return limits.misfit(kernel, size, self.architecture, self.dtype, self.kv_dtype)


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
        self._fuses, self._shared = fuses, program.shared
        self._widths = program.widths
        self._uses = Counter(
            register for op in program.ops for register in {view.register for view in (*op.ins, *op.outs)}
        )
        self._uses.update(program.passed)

    def fuses(self, product: Op, matrix: Matrix) -> bool:
        """With the tokens of all KV domains a step is not one of few tokens."""
        return product.outs[0].register not in self._shared and self._fuses(matrix)

    def is_whole(self, view: View) -> bool:
        return view.width == self._widths[view.register]

    def is_between(self, view: View) -> bool:
        """Only the operation that writes it and the next one use it, so it need not be stored."""
        return self.is_whole(view) and self._uses[view.register] == 2


def body_of(program: Program) -> tuple[tuple[Op, ...], Op | None]:
    """The operations for all tokens, and the last norm, which is for the sampled tokens only. None: there is none, as
    in a stage before the last one."""
    *body, last = program.ops
    if program.sends:
        return program.ops, None
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
        kind, num = next(found, ("torch" if needs(alone, ops[at]) in without else alone, 1))
        parts.append(Part(kind, ops[at : at + num]))
        at += num
    return tuple(parts)


def in_torch(program: Program, target: Target | None = None) -> tuple[Op, ...]:
    """The operations that torch computes. Raises UnknownLayerError if an operation of a program needs the lengths of
    rows, and the kernels do not have it, or not for the target: then torch computes the whole program, on the host's
    numbers. target: None: any kernel fits."""
    for op in program.ops:
        if why := _lacks(op.args):
            raise UnknownLayerError(f"the kernels {why}")
        if target is not None and (why := _misfit(op.args, target)):
            raise UnknownLayerError(why)
    found = [op for part in parts_of(program) if part.kind == "torch" for op in part.ops]
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
        case Normalize():
            return "norm"
        case Add() if op.args == Add():
            return "add"
        case Rotate():
            return "rotate"
        case Glu() if op.args.ranks > 1 and op.args.sparsity:
            return "torch"  # needs the gates of all ranks
        case Activate() | Add() | Clip() | Glu() | Heat() | Multiply() | Positions() | Scale():
            return "elementwise"
        case MatchMagnitude() | MixStreams():
            return "elementwise"
        case Mixture():
            return "experts"
        case AttendLatent():
            return "latent"
        case AllReduce():
            return "sum"
    return "torch"


def needs(kind: Kind, op: Op) -> str:
    """The module of the kernel of an operation by itself that torch can compute, too; empty: there is none."""
    match op.args:
        case _ if kind != "elementwise":
            return _NEEDS.get(kind, "")
        case MatchMagnitude():
            return "row_statistics"
        case Glu(sparsity=share) if share:
            return "row_statistics"
        case Activate() | Glu():
            return "activations"
    return "elementwise"


def is_whole_norm(op: Op) -> bool:
    """Over a whole view."""
    args = op.args
    return isinstance(args, Normalize) and args.norm.size == op.ins[0].width and len(op.ins) == 1


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
        case Attend(reach=reach) if reach.kind == "cross":
            return "have no cross-attention"
        case Attend(relative=relative) if relative is not None:
            return "have no attention with relative positions"
        case Attend():
            return _lacks_attention(args)
    return ""


def _misfit(args: Args, target: Target) -> str:
    """Why the kernels of an operation do not run on the target."""
    names: tuple[str, ...]
    types = target.dtype + (f" with {target.kv_dtype} KV" if target.kv_dtype != target.dtype else "")
    match args:
        case Attend():
            names, size, what = limits.ATTENTION, args.head_dim, f"attention with heads of {args.head_dim} in {types}"
        case AttendLatent():
            names, size, what = limits.LATENT, args.rank, f"latent attention of rank {args.rank} in {types}"
        case Mixture():
            names, size, what = limits.EXPERTS, 0, f"the product of experts in {target.dtype}"
        case ScanDelta():
            names, size, what = ("scan_delta",), args.key_dim, f"the gated delta rule in {target.dtype}"
        case ScanMamba2():
            names, size, what = ("scan_mamba2",), args.state_dim, f"Mamba 2's scan in {target.dtype}"
        case ScanLightning():
            names, size, what = ("scan_lightning",), args.head_dim, f"linear attention in {target.dtype}"
        case _:
            return ""
    reasons = (target.misfit(name, size) for name in names)
    return next((f"the kernel of {what} {why}" for why in reasons if why), "")


def unfused(program: Program, target: Target) -> str:
    """Why products of few tokens run in the vendor's library, without norm and residual in their launch; empty: they
    run in the kernel of `small_product.py`, or there are none."""
    if not any(isinstance(op.args, Product | GatedProduct) for op in program.ops):
        return ""
    reasons = (target.misfit("small_product", columns) for columns in limits.SMALL_PRODUCT)
    return next((f"the kernel for products of few tokens in {target.dtype} {why}" for why in reasons if why), "")


def variant(target: Target) -> str:
    """Why products whose bits depend on one row alone cannot run; empty: they can."""
    reasons = (target.misfit("product", columns) for columns in limits.INVARIANT_PRODUCT)
    return next((f"the kernel for such products in {target.dtype} {why}" for why in reasons if why), "")


def _is_power(size: int) -> bool:
    """That kernels take at once."""
    return size >= 16 and size & (size - 1) == 0


def _lacks_attention(args: Attend) -> str:
    for what, dim in (("keys", args.head_dim), ("values", args.value_dim)):
        if dim % 2 or dim > _MAX_DIM:
            return f"have no attention with {what} of {dim} numbers"
    return ""


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
            return 2 if reads and is_rms_norm(norm) and facts.fuses(product, matrix) else 0
    return 0


def _product_add(facts: Facts, ops: Sequence[Op]) -> int:
    match ops:
        case [Op(args=Product(matrix=matrix)) as product, Op(args=Add()) as add, *_] if add.args == Add():
            reads = product.outs == add.ins[1:] and facts.is_between(add.ins[1])
            is_apart = product.ins[0].register != add.outs[0].register  # the launch writes while it still reads
            return 2 if reads and is_apart and facts.fuses(product, matrix) else 0
    return 0


def _add_norm(facts: Facts, ops: Sequence[Op]) -> int:
    match ops:
        case [Op(args=Add()) as add, Op(args=Normalize()) as norm, *_] if add.args == Add():
            in_place = add.ins[:1] == add.outs == norm.ins != norm.outs and facts.is_whole(add.outs[0])
            return 2 if in_place and is_whole_norm(norm) and not _norm_product(facts, ops[1:]) else 0
    return 0


def _gather(facts: Facts, ops: Sequence[Op]) -> int:
    """A sum of tokens that each stand in one rank's part."""
    match ops:
        case [Op(args=Spread()) as spread, Op(args=AllReduce()) as total, *_]:
            return 2 if total.ins == spread.outs and facts.is_whole(spread.outs[0]) else 0
    return 0


def _scatter(facts: Facts, ops: Sequence[Op]) -> int:
    match ops:
        case [Op(args=AllReduce()) as total, Op(args=Keep()) as keep, *_]:
            return 2 if keep.ins == total.outs and facts.is_whole(keep.ins[0]) else 0
    return 0


RULES: tuple[tuple[Kind, Callable[[Facts, Sequence[Op]], int]], ...] = (
    ("attend", _attention),
    ("norm product", _norm_product),
    ("product add", _product_add),
    ("add norm", _add_norm),
    ("gather", _gather),
    ("scatter", _scatter),
)
