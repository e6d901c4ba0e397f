"""Runs a program in C: as many operations in a row as the kernels have are one call. The reference computes the others
on the same memory."""

import ctypes
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import cast

import torch
from torch import Tensor

from ...kernels import ops as kernels
from ...kernels.cpu.dense import PackedMatrix
from ...kernels.cpu.experts import NativeExperts
from ...kernels.cpu.latent import NativeLatent
from ...kernels.cpu.library import Kernels
from ...kernels.cpu.limits import LANES
from ...kernels.cpu.scans import NativeScans, rows_fields
from ...kernels.cpu.structs import Columns, MatrixFields, Operation, StepFields
from ..attention.base import AttentionBackend
from ..attention.kv_cache import KvShape
from ..attention.native import NativePagedAttention
from ..models.description import Activation
from ..models.in_c import lacks
from ..models.program import (
    Activate,
    Add,
    AllReduce,
    Attend,
    AttendLatent,
    Clip,
    Embed,
    GatedProduct,
    Glu,
    Heat,
    Keep,
    Layout,
    MatchMagnitude,
    Matrix,
    MeanSquares,
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
    Spread,
    Vector,
    View,
    layout,
)  # fmt: skip
from ..parallel.collectives import SharedMemoryGroup
from .functions import xielu_factors
from .mixers import MIXERS
from .native_experts import native_experts
from .native_mixers import mixer_fields
from .reference import Reference, ReferenceModel, Step, put_received, result_of
from .registers import Registers
from .vocabulary import Vocabulary

# `OpKind` of program.c
_EMBED, _PRODUCT, _ROTATE, _ATTEND, _EXPERTS, _MAP, _NORM, _SQUARES = range(8)
_TURN, _HEAT, _POSITIONS, _LATENT, _SUM, _MIX, _STREAMS, _SPREAD, _KEEP = range(8, 17)
_STORE, _ADD_TO, _SILU_MUL = range(3)  # `Epilogue` of matrix.h
# `MapKind` of elements.h
_COMBINE, _FACTOR, _WEIGHT, _ACT, _GLU, _GLU_CLAMPED, _MULTIPLY, _MULTIPLY_GROUPS, _CLIP = range(9)
_SPARSE, _XIELU, _MATCH = range(9, 12)
_ACTS = {
    name: number
    for number, name in enumerate(("silu", "sigmoid", "gelu_tanh", "quick_gelu", "gelu", "relu", "relu2", "tanh", ""))
}


Field = int | float


def _between(act: Activation, limit: float, sharpness: float, gate_scale: float = 1.0) -> dict[str, Field]:
    """The fields of `Map` for a gate and what it is multiplied with."""
    if act == "swiglu_clamped":
        return {"map": _GLU_CLAMPED, "alpha": sharpness, "limit": limit}
    return {"map": _GLU, "act": _ACTS[act], "alpha": gate_scale}


@dataclass(frozen=True)
class _InC:
    """Operations that follow each other."""

    numbers: list[int]  # of each, the first of the program's operations that it computes
    operations: "ctypes.Array[Operation]"


@dataclass(frozen=True)
class _InTorch:
    number: int
    op: Op


class NativeModel:
    """A `Model` on the C kernels. The reference runs all of it if attention is wrapped, because then every layer must
    call it. Where someone is told of layers (`by_layer.py`), it is several calls."""

    def __init__(self, reference: Reference, vocabulary: Vocabulary, kv_shape: KvShape, kernels: Kernels) -> None:
        self.kv_shape = kv_shape
        self._reference, self._kernels = reference, kernels
        reference.mixers.scans = NativeScans(kernels)
        self._alone = ReferenceModel(reference, vocabulary, kv_shape)
        self.logits: Callable[[Tensor], Tensor] = vocabulary.logits
        self.greedy = vocabulary.greedy
        self._layout = layout(reference.program)
        self._parts: list[_InC | _InTorch] | None = None
        self._compiler: _Compiler | None = None
        self._work = torch.empty(0)
        self._pointed: tuple[object, ...] = ()  # what the fields of a step point to
        self._capacity = 0  # tokens for which each register has room
        self._turns = torch.empty(0)  # of the tokens of all KV domains
        self._of_all = StepFields()  # of the tokens of all KV domains

    def hidden(
        self, ids: Tensor, positions: Tensor, attention: AttentionBackend, regimes: Tensor | None = None
    ) -> Tensor:
        return self.stage(ids, positions, attention, regimes, None)

    def stage(
        self,
        ids: Tensor,
        positions: Tensor,
        attention: AttentionBackend,
        regimes: Tensor | None,
        received: Tensor | None,
    ) -> Tensor:
        if not isinstance(attention, NativePagedAttention):
            return self._alone.stage(ids, positions, attention, regimes, received)
        self.parts(attention)
        tokens, program = ids.shape[0], self._reference.program
        (step, fields), registers = self.begin(ids, positions, attention, regimes), None
        by_layer = self._reference.by_layer
        if program.receives or program.sends or by_layer.hook is not None:
            registers = self._registers(tokens)
            put_received(registers, program, received)
        by_layer.run(registers, lambda first, last: self._run(first, last, step, fields, registers))
        if program.sends:
            assert registers is not None
            return result_of(registers, program)
        return self._register(program.result.register, tokens).clone()

    def help_others(self, attention: AttentionBackend) -> None:
        """Runs a step for a domain without rows: this rank's part of what all domains share."""
        if not isinstance(attention, NativePagedAttention):
            self._alone.help_others(attention)
            return
        none, fields = torch.empty(0, dtype=torch.int64), StepFields()
        self._kernels.threads()
        self._make_room(0, fields)
        self.parts(attention)
        self._run(0, len(self._reference.program.ops), Step(none, none, None, none), fields, None)

    def _run(self, first: int, last: int, step: Step, fields: StepFields, registers: Registers | None) -> None:
        """The operations [first, last) of the program, which is compiled."""
        for part in self._parts or ():
            if isinstance(part, _InC):
                at, end = bisect_left(part.numbers, first), bisect_left(part.numbers, last)
                if at == end:
                    continue
                address = ctypes.addressof(part.operations) + at * ctypes.sizeof(Operation)
                self._kernels.program(address, end - at, ctypes.addressof(fields))
                if isinstance(group := self._reference.group, SharedMemoryGroup):
                    group.check()
            elif first <= part.number < last:
                registers = registers or self._registers(fields.tokens)
                self._reference.run(part.op, registers, step)

    def begin(
        self, ids: Tensor, positions: Tensor, attention: NativePagedAttention, regimes: Tensor | None
    ) -> tuple[Step, StepFields]:
        """Makes room for the registers of a step and describes it to C, until the next call."""
        step = self._reference.step(ids, positions, attention, regimes)
        fields = attention.step_fields()
        self._make_room(ids.shape[0], fields)
        fields.ids, fields.positions = ids.data_ptr(), positions.data_ptr()
        fields.places = step.places.data_ptr()
        states = None if attention.states is None else rows_fields(attention.states)
        if states is not None:
            fields.states = ctypes.addressof(states)
        self._pointed = ids, positions, step.places, states
        return step, fields

    def _make_room(self, tokens: int, fields: StepFields) -> None:
        """tokens: of this rank's domain."""
        domain = self._reference.domain
        assert domain is None or domain.num_own == tokens, f"{tokens} tokens where the plan has {domain.num_own}"
        self._capacity = tokens if domain is None else domain.num_all
        if self._work.numel() < self._capacity * self._layout.size:
            self._work = torch.empty(self._capacity * self._layout.size)
        fields.work, fields.capacity = self._work.data_ptr(), self._capacity
        if domain is None:
            fields.shared = ctypes.addressof(fields)
            return
        self._turns = torch.arange(domain.num_all)
        self._of_all = StepFields(
            positions=self._turns.data_ptr(), tokens=domain.num_all, work=fields.work, capacity=self._capacity
        )
        fields.first, fields.shared = domain.first, ctypes.addressof(self._of_all)

    def replace_expert(self, layer: int, slot: int, gate_up: kernels.Matrix, down: kernels.Matrix) -> None:
        """Between two steps: the matrices of a slot of a layer's experts are now these, as in the weights."""
        if self._compiler is not None and (experts := self._compiler.experts.get(layer)) is not None:
            experts.replace(slot, cast(PackedMatrix, gate_up), cast(PackedMatrix, down))

    def pieces(self, attention: NativePagedAttention) -> "list[tuple[tuple[Op, ...], ctypes.Array[Operation]]]":
        """What C has of the program, piece by piece: operations, and those of C that compute them together."""
        self._compiler = _Compiler(self._reference, self._layout, attention, self._kernels)
        return self._compiler.pieces()

    def parts(self, attention: NativePagedAttention) -> "list[_InC | _InTorch]":
        """The program, compiled for an open cache."""
        if self._parts is None:
            self._compiler = _Compiler(self._reference, self._layout, attention, self._kernels)  # keeps pointers valid
            self._parts = self._compiler.parts()
        return self._parts

    def _register(self, register: int, tokens: int) -> Tensor:
        """tokens: of this rank's domain."""
        first = self._layout.offsets[register] * self._capacity
        width = self._reference.program.widths[register]
        num = self._capacity if register in self._reference.program.shared else tokens
        return self._work[first : first + num * width].view(num, width)

    def _registers(self, tokens: int) -> Registers:
        return Registers([self._register(i, tokens) for i in range(len(self._reference.program.widths))])


def in_torch(model: NativeModel, attention: NativePagedAttention) -> list[Op]:
    """The operations of a model that C lacks."""
    return [part.op for part in model.parts(attention) if isinstance(part, _InTorch)]


class _Compiler:
    """Turns operations into those of C. Some that follow each other become one."""

    def __init__(self, reference: Reference, layout: Layout, attention: NativePagedAttention, kernels: Kernels) -> None:
        self._program: Program = reference.program
        self._reference, self._layout, self._attention = reference, layout, attention
        self._kernels = kernels
        self._matrices: dict[tuple[str, str], MatrixFields] = {}
        self._kept: list[object] = []  # what operations point to
        self.experts: dict[int, NativeExperts] = {}  # by layer
        self._readers = [0] * len(self._program.widths)
        for op in self._program.ops:
            for view in op.ins:
                self._readers[view.register] += 1
        for view in self._program.sends:
            self._readers[view.register] += 1

    def parts(self) -> list[_InC | _InTorch]:
        """No operation of C computes some of the program's on both sides of a layer's end that a hook sees."""
        found: list[_InC | _InTorch] = []
        run: list[Operation] = []
        numbers: list[int] = []
        ops, cuts, number = self._program.ops, [*self._reference.by_layer.cuts, len(self._program.ops)], 0

        def close() -> None:
            if run:
                found.append(_InC(numbers.copy(), (Operation * len(run))(*run)))
                run.clear()
                numbers.clear()

        while number < len(ops):
            if self._is_in_torch(ops[number]):
                close()
                found.append(_InTorch(number, ops[number]))
                number += 1
                continue
            end = min(number + 4, cuts[bisect_right(cuts, number)])
            operations, count = self._compile(ops[number:end])
            run += operations
            numbers += [number] * len(operations)
            number += count
        close()
        return found

    def pieces(self) -> "list[tuple[tuple[Op, ...], ctypes.Array[Operation]]]":
        found, ops, number = [], self._program.ops, 0
        while number < len(ops):
            count = 1
            if not self._is_in_torch(ops[number]) and not isinstance(ops[number].args, AllReduce | Spread | Keep):
                operations, count = self._compile(ops[number : number + 4])
                found.append((ops[number : number + count], (Operation * len(operations))(*operations)))
            number += count
        return found

    def _is_in_torch(self, op: Op) -> bool:
        if self._reference.exchanges(op) and not isinstance(self._reference.group, SharedMemoryGroup):
            return True
        return lacks(op.args) is not None or (isinstance(op.args, AllReduce) and not self._sums(op))

    def _compile(self, ops: Sequence[Op]) -> tuple[list[Operation], int]:
        """The C operations for the first of `ops`, and how many of `ops` they compute."""
        op = ops[0]
        match op.args:
            case Normalize() | Rotate():
                if (fused := self._rotary(ops)) is not None:
                    return [fused[0]], fused[1]
            case Product():
                return self._product(ops, op.args)
            case Mixture():
                return self._mixture(ops, op.args)
        return self._single(op), 1

    def _single(self, op: Op) -> list[Operation]:
        """The C operations that compute one operation."""
        if isinstance(op.args, MIXERS):
            fields = mixer_fields(op.args, op, self._reference.mixers, self._attention, self._columns)
            return [self._operation(op, _MIX, mixer=self._address(fields))]
        match op.args:
            case Embed() as args:
                return self._embed(op, args)
            case Normalize() as args:
                return [self._norm(op, args)]
            case MeanSquares() as args:
                return [self._operation(op, _SQUARES, size=args.groups, shift=args.group, alpha=args.count)]
            case Positions() as args:
                matrix = self._matrix(args.table, None)
                return [self._operation(op, _POSITIONS, x=op.outs[0], matrix=matrix, shift=args.offset)]
            case Rotate() as args:
                return [self._turn(op, args)]
            case GatedProduct() as args:
                matrix = self._matrix(args.matrix, args.bias)
                return [self._operation(op, _PRODUCT, matrix=matrix, epilogue=_SILU_MUL)]
            case Attend() as args:
                return [self._attend(op, args)]
            case AttendLatent() as args:
                return [self._attend_latent(op, args)]
            case AllReduce():
                return [self._sum(op)]
            case Spread():
                return [self._operation(op, _SPREAD)]
            case Keep():
                return [self._operation(op, _KEEP)]
            case MixStreams(size=size, shift=shift):
                num = op.ins[1].width // size
                return [self._operation(op, _STREAMS, size=size, dims=num, alpha=shift)]
            case Heat() as args:
                heat = args.temperature
                return [self._operation(op, _HEAT, alpha=heat.scale, every=heat.every, shift=heat.shift)]
        return self._map(op)

    def _map(self, op: Op) -> list[Operation]:
        """Operations on each number."""
        match op.args:
            case Add(alpha=alpha, beta=beta):
                return [self._operation(op, _MAP, map=_COMBINE, alpha=alpha, beta=beta)]
            case Scale(factor=factor, vector=None):
                return [self._operation(op, _MAP, map=_FACTOR, alpha=factor)]
            case Scale(vector=vector) if vector is not None and vector.weights[0].rows == 1:
                factor = float(self._reference.weights.vectors[vector.key])
                return [self._operation(op, _MAP, map=_FACTOR, alpha=factor)]
            case Scale(vector=vector) if vector is not None:
                return [self._operation(op, _MAP, map=_WEIGHT, weight=self._vector(vector))]
            case Activate(weights=vector) if vector is not None:
                positive, negative = xielu_factors(self._reference.weights.vectors[vector.key]).tolist()
                return [self._operation(op, _MAP, map=_XIELU, alpha=positive, beta=negative)]
            case Activate(act=act):
                return [self._operation(op, _MAP, map=_ACT, act=_ACTS[act])]
            case Glu() as args:
                return self._glu(op, args)
            case Multiply(act=act):
                size = op.ins[0].width // op.ins[1].width
                kind = _MULTIPLY if size == 1 else _MULTIPLY_GROUPS
                return [self._operation(op, _MAP, map=kind, act=_ACTS[act], size=size)]
            case Clip(limit=limit):
                return [self._operation(op, _MAP, map=_CLIP, limit=limit)]
            case MatchMagnitude(floor=floor):
                return [self._operation(op, _MAP, map=_MATCH, limit=floor)]
        raise AssertionError(f"C has no {type(op.args).__name__}")

    def _embed(self, op: Op, args: Embed) -> list[Operation]:
        matrix = self._matrix(args.table, None)
        found = [self._operation(op, _EMBED, x=op.outs[0], matrix=matrix, shift=-args.first_id, is_whole=args.is_whole)]
        if args.scale != 1.0:
            scale = self._reference.embedding_scale(args)
            found.append(self._operation(op, _MAP, x=op.outs[0], map=_FACTOR, alpha=scale))
        return found

    def _norm(self, op: Op, args: Normalize) -> Operation:
        weight, bias = args.weight, args.bias
        return self._operation(
            op, _NORM, size=args.norm.size, act=int(args.norm.kind == "layer"), eps=args.norm.eps,
            dims=0 if weight is None else sum(each.rows for each in weight.weights),
            weight=0 if weight is None else self._vector(weight), weight2=0 if bias is None else self._vector(bias),
        )  # fmt: skip

    def _glu(self, op: Op, args: Glu) -> list[Operation]:
        (out,), gate, scale = op.outs, op.ins[0], args.gate_scale
        found = []
        if scale != 1.0 and (args.sparsity or args.act == "swiglu_clamped"):
            found.append(self._operation(op, _MAP, map=_FACTOR, alpha=scale))
            gate, scale = out, 1.0
        if args.sparsity:
            deviations = NormalDist().inv_cdf(args.sparsity)
            found.append(self._operation(op, _MAP, x=gate, map=_SPARSE, alpha=deviations))
            gate = out
        between = _between(args.act, args.limit, args.sharpness, scale)
        return [*found, self._operation(op, _MAP, x=gate, out=out, **between)]

    def _turn(self, op: Op, args: Rotate) -> Operation:
        cos, sin = self._reference.rotary[args.rope].tables
        view = op.ins[0]
        turning = View(view.register, view.first + args.first, view.width - args.first)
        return self._operation(
            op, _TURN, x=turning, heads=args.heads, dim=op.ins[0].width // args.heads, dims=args.rope.dims,
            cos=cos.data_ptr(), sin=sin.data_ptr(),
        )  # fmt: skip

    def _rotary(self, ops: Sequence[Op]) -> tuple[Operation, int] | None:
        """[norm of queries, norm of keys,] rotation of queries and of keys."""
        norms = [op for op in ops[:2] if isinstance(op.args, Normalize)]
        rotations = ops[len(norms) : len(norms) + 2]
        if len(norms) == 1 or len(rotations) < 2:
            return None
        q, k = rotations[0].outs[0], rotations[1].outs[0]
        turns = [op.args for op in rotations if isinstance(op.args, Rotate)]
        if len(turns) < 2 or turns[0].rope != turns[1].rope or (q.register, q.first + q.width) != (k.register, k.first):
            return None
        dim = q.width // turns[0].heads
        if turns[0].rope.dims != dim or dim % LANES:
            return None
        table = self._reference.rotary[turns[0].rope].tables
        operation = self._operation(
            rotations[0], _ROTATE, heads=turns[0].heads, kv_heads=turns[1].heads, dim=dim,
            cos=table[0].data_ptr(), sin=table[1].data_ptr(),
        )  # fmt: skip
        if norms:
            args = [op.args for op in norms if isinstance(op.args, Normalize)]
            if [op.outs[0] for op in norms] != [q, k] or any(not self._is_head_norm(each, dim) for each in args):
                return None
            if args[0].norm.eps != args[1].norm.eps:
                return None
            operation.weight, operation.weight2 = (self._vector(each.weight) for each in args)
            operation.eps = args[0].norm.eps
        return operation, len(norms) + 2

    def _is_head_norm(self, args: Normalize, dim: int) -> bool:
        norm = args.norm
        is_shared = norm.weight is not None and norm.weight.rows == dim and norm.ranks == 1
        return norm.kind == "rms" and norm.size == dim and is_shared and args.bias is None

    def _product(self, ops: Sequence[Op], args: Product) -> tuple[list[Operation], int]:
        op = ops[0]
        out, matrix = op.outs[0], self._matrix(args.matrix, args.bias)
        if len(ops) > 1 and len(op.outs) == 1 and self._is_added(out, ops[1]):
            return [self._operation(op, _PRODUCT, out=ops[1].outs[0], matrix=matrix, epilogue=_ADD_TO)], 2
        return [self._operation(op, _PRODUCT, out=out, matrix=matrix, epilogue=_STORE)], 1

    def _is_added(self, view: View, op: Op) -> bool:
        """Whether all that happens to a view is that it is added to the stream."""
        is_plain = isinstance(op.args, Add) and op.args.alpha == op.args.beta == 1.0 and op.outs == op.ins[:1]
        return is_plain and op.ins[1] == view and self._readers[view.register] == 1

    def _attend(self, op: Op, args: Attend) -> Operation:
        pages = self._attention.pages(args.tile, args.heads, self._reference.attention(args))
        return self._operation(op, _ATTEND, pages=self._address(pages), table=self._attention.table(args.tile))

    def _attend_latent(self, op: Op, args: AttendLatent) -> Operation:
        keys, values = (
            [cast(PackedMatrix, matrix) for matrix in self._reference.weights.matrices[each.key]]
            for each in (args.keys, args.values)
        )
        latent = NativeLatent(self._kernels, keys, values, args.rope_dim)
        self._kept.append(latent)
        pages = self._attention.pages(args.tile, args.heads, self._reference.latent_attention(args))
        return self._operation(
            op, _LATENT, latent=ctypes.addressof(latent.fields), pages=self._address(pages),
            table=self._attention.table(args.tile),
        )  # fmt: skip

    def _sums(self, op: Op) -> bool:
        """Whether C can add the ranks' parts."""
        is_whole = op.ins[0].width == self._program.widths[op.ins[0].register]
        return is_whole and isinstance(self._reference.group, SharedMemoryGroup)

    def _sum(self, op: Op) -> Operation:
        return self._operation(op, _SUM, sum=self._ranks())

    def _ranks(self) -> int:
        """For operations that exchange something with the other ranks."""
        group = self._reference.group
        assert isinstance(group, SharedMemoryGroup), group
        return ctypes.addressof(group.sum_in_c)

    def _mixture(self, ops: Sequence[Op], args: Mixture) -> tuple[list[Operation], int]:
        op = ops[0]
        if args.has_gate:
            between = _between(args.act, args.limit, args.sharpness)
        else:
            between = {"map": _ACT, "act": _ACTS[args.act]}
        own = self._reference.own_experts.get(op.layer)
        experts = native_experts(args, self._reference.weights, own, **between)
        self.experts[op.layer] = experts
        address, ranks = ctypes.addressof(experts.fields), self._ranks() if self._reference.exchanges(op) else 0
        if len(ops) > 1 and self._is_added(op.outs[0], ops[1]):
            added = self._operation(op, _EXPERTS, out=ops[1].outs[0], experts=address, sum=ranks, epilogue=_ADD_TO)
            return [added], 2
        return [self._operation(op, _EXPERTS, experts=address, sum=ranks, epilogue=_STORE)], 1

    # Parts of operations.

    def _operation(
        self, op: Op, kind: int, *, x: View | None = None, out: View | None = None, **fields: Field
    ) -> Operation:
        """x, out: those of the operation if not given. fields: those of `structs.Operation`."""
        ins = [x or op.ins[0], *op.ins[1:3]]
        places = dict(zip(("x", "x2", "x3"), map(self._columns, ins), strict=False))
        out = out or op.outs[0]
        is_shared = kind not in (_SPREAD, _KEEP) and out.register in self._program.shared
        return Operation(kind=kind, width=ins[0].width, out=self._columns(out), is_shared=is_shared, **places, **fields)

    def _columns(self, view: View) -> Columns:
        return Columns(self._layout.offsets[view.register], view.first, self._program.widths[view.register])

    def _matrix(self, matrix: Matrix, bias: Vector | None) -> int:
        key = matrix.key, "" if bias is None else bias.key
        if key not in self._matrices:
            packed = cast(PackedMatrix, self._reference.weights.matrix(matrix))
            self._matrices[key] = packed.fields(self._reference.weights.vector(bias))
        return ctypes.addressof(self._matrices[key])

    def _vector(self, vector: Vector | None) -> int:
        assert vector is not None
        return self._reference.weights.vectors[vector.key].data_ptr()

    def _address(self, structure: ctypes.Structure) -> int:
        self._kept.append(structure)
        return ctypes.addressof(structure)
