"""Tries the C kernels that a program needs, and compares them with torch.

Both sides run the same steps of the host. The kernels compute each operation by itself, on random numbers. Matrices
have fewer rows than the model's, so that the trial takes some tens of milliseconds.
"""

import ctypes
import time
from dataclasses import replace

import torch
from torch import Tensor

from ...config.config import EngineConfig
from ...kernels.cpu import build
from ...kernels.cpu.library import Kernels
from ...kernels.cpu.structs import Operation
from ..attention.base import AttentionBackend
from ..attention.kv_cache import KvShape
from ..attention.native import NativePagedAttention
from ..executors.mixers import MIXERS
from ..executors.native import NativeModel
from ..executors.reference import Reference
from ..executors.vocabulary import Vocabulary
from ..executors.weights import Options, Packing
from ..models.description import Weight
from ..models.program import (
    Attend,
    AttendLatent,
    GatedProduct,
    Mixture,
    Normalize,
    Op,
    Product,
    Program,
    Rotate,
    Vector,
    View,
)
from ..parallel.collectives import Alone
from ..steps import trial
from ..steps.host_steps import HostSteps
from ..steps.trial import Check, Expected, Fill, Report
from .backend import Backend
from .served import Served

_ROWS = 128  # of each part of a matrix
_INNER = 64  # columns between the matrices of an expert
_EXPERTS = 8
_QUANTIZED_LIMIT = 0.05  # activations are rounded to 8 bits
_INT4_LIMIT = 0.25  # and weights to 4
_tried: dict[object, tuple[Check, ...]] = {}


def try_kernels(config: EngineConfig, served: Served, fill: Fill) -> tuple[Check, ...]:
    """Once in a process for each library and kind of program."""
    backend = served.backend
    assert backend is not None and served.program is not None and backend.ops.storage is not None
    program = _cut(trial.trial_program(served.program), is_kept=served.is_kept)
    shape, config = served.kv_shape, trial.trial_config(config)
    key = (
        backend.ops.storage.layout, backend.note, tuple(map(trial.signature, program.ops)), shape.dtype,
        served.is_kept and config.model.fingerprint,
    )  # fmt: skip
    if key not in _tried:
        _tried[key] = _try(config, program, backend, shape, served.is_kept, fill)
    return _tried[key]


def _try(
    config: EngineConfig, program: Program, backend: Backend, shape: KvShape, is_kept: bool, fill: Fill
) -> tuple[Check, ...]:
    device, ops = torch.device("cpu"), backend.ops
    packing = Packing(
        Options(ops=ops, dtype=torch.float32, weight_dtype=backend.weight_dtype, device=device, keeps=is_kept)
    )
    in_torch = trial.packing_for(torch.float32, device)
    fill(program, (packing, in_torch))
    report = Report(_limit(config, shape, is_kept=is_kept))
    expected = Expected(config, program, in_torch, shape, dtype=torch.float32, samples=False)
    reference = Reference(
        program, packing.weights, max_len=config.max_model_len, dtype=torch.float32, weight_dtype=backend.weight_dtype,
        device=device, group=Alone(),
    )  # fmt: skip
    kernels = Kernels(build.find(config.cpu_level).load())
    _try_table(program, packing, in_torch, report)
    model = _Tried(reference, Vocabulary(program, packing.weights, Alone()), shape, kernels)
    model.begin_trial(expected, report)
    cache = trial.empty_cache(config, shape, device, head_major=False)
    steps = HostSteps(
        config=config, model=model, cache=cache, attention=backend.attention(cache), ops=ops, synchronize=lambda: None
    )
    for plan in trial.plans(config, shape, samples=False):
        for each in (expected.steps, steps):
            each.launch(plan)
    return tuple(report.checks.values())


def _limit(config: EngineConfig, shape: KvShape, *, is_kept: bool) -> float:
    limit = trial.report_for(torch.bfloat16 if config.arithmetic == "bfloat16" else torch.float32, shape.dtype).limit
    if config.quantization == "int4":
        return max(limit, _INT4_LIMIT)
    return max(limit, _QUANTIZED_LIMIT) if is_kept or config.quantization else limit


def _try_table(program: Program, packing: Packing, in_torch: Packing, report: Report) -> None:
    """The look-up of embeddings, and the head."""
    ours, wanted = (each.weights.matrix(program.head) for each in (packing, in_torch))
    x = torch.randn((5, program.head.columns), generator=torch.Generator().manual_seed(2))
    ids = torch.tensor([3, 0, 15, 7])
    report.compare("lookup", ours.lookup(ids), wanted.lookup(ids))
    report.compare("product", ours.product(x, None), wanted.product(x, None))
    (most, _), (wanted_most, _) = ours.greedy(x), wanted.greedy(x)
    report.compare("product", most[None], wanted_most[None])


class _Tried(NativeModel):
    """Its step compares each operation with the reference. Logits are those of the trial."""

    def begin_trial(self, expected: Expected, report: Report) -> None:
        self._expected, self._report = expected, report
        self._seen: set[object] = set()
        self._pieces: list[tuple[tuple[Op, ...], ctypes.Array[Operation]]] | None = None
        self.logits, self.greedy = expected.logits, expected.greedy

    def hidden(
        self, ids: Tensor, positions: Tensor, attention: AttentionBackend, regimes: Tensor | None = None
    ) -> Tensor:
        assert isinstance(attention, NativePagedAttention), attention
        if self._pieces is None:
            self._pieces = self.pieces(attention)
        _, fields = self.begin(ids, positions, attention, regimes)
        for number, (ops, operations) in enumerate(self._pieces):
            key = tuple(map(trial.signature, ops)), len(ids)
            if key in self._seen:
                continue
            self._seen.add(key)
            inputs = self._expected.inputs(ops, len(ids), number)
            for register, values in inputs.items():
                self._register(register, len(ids)).copy_(values)
            started = time.perf_counter()
            self._kernels.program(ctypes.addressof(operations), len(operations), ctypes.addressof(fields))
            ms = (time.perf_counter() - started) * 1000
            wanted = self._expected.run(ops, inputs)
            is_routed = isinstance(ops[0].args, Mixture)
            for view in (view for op in ops if op is ops[-1] or isinstance(op.args, Rotate) for view in op.outs):
                found = self._register(view.register, len(ids))[:, view.first : view.first + view.width]
                self._report.compare(_kernel_of(ops), found, wanted.get(view), ms=ms, is_routed=is_routed)
                ms = 0.0
        return self._expected.places(ids, positions)


def _kernel_of(ops: tuple[Op, ...]) -> str:
    """In the words of the C files."""
    args = ops[0].args
    if isinstance(args, MIXERS):
        return "scans"
    match args:
        case Product() | GatedProduct():
            return "product"
        case Attend():
            return "attention"
        case AttendLatent():
            return "latent"
        case Mixture():
            return "experts"
        case Normalize() | Rotate():
            return "rows"
    return "elements"


def _cut(program: Program, *, is_kept: bool) -> Program:
    """The same operations with smaller matrices. is_kept: experts are those of the checkpoint, and left out."""
    ops = []
    for op in program.ops:
        if isinstance(op.args, Product | GatedProduct):
            op = _cut_product(op, op.args)
        elif isinstance(op.args, Mixture):
            if is_kept:
                continue
            op = _cut_experts(op, op.args)
        ops.append(op)
    return replace(program, ops=tuple(ops))


def _cut_product(op: Op, args: Product | GatedProduct) -> Op:
    matrix = replace(args.matrix, weights=tuple(_few(weight, _ROWS) for weight in args.matrix.weights))
    bias: Vector | None = args.bias
    if bias is not None:
        bias = replace(bias, weights=tuple(_few(weight, _ROWS) for weight in bias.weights))
    rows = matrix.rows // 2 if isinstance(args, GatedProduct) else matrix.rows
    if bias is not None and sum(weight.rows for weight in bias.weights) != matrix.rows:
        return op
    first = op.outs[0]
    out = View(first.register, first.first, rows)
    return replace(op, args=replace(args, matrix=matrix, bias=bias), outs=(out,))


def _few(weight: Weight, rows: int) -> Weight:
    if weight.rows <= rows or weight.other is not None:
        return weight
    first = weight.parts[0]
    return replace(weight, parts=(replace(first, count=min(first.count, rows), times=1),))


def _cut_experts(op: Op, args: Mixture) -> Op:
    """Fewer and smaller ones, if nothing else has their number or size."""
    router, vectors = args.router, (args.gate_up_bias, args.down_bias, args.correction, args.expert_scale)
    num = max(_EXPERTS, router.top_k)
    if any(vectors) or router.zero_experts or router.groups > 1 or num >= args.num_experts:
        return op
    if len(args.gate_up.weights) != (2 if args.has_gate else 1) or args.down.columns <= _INNER:
        return op
    gate_up = tuple(replace(_few(weight, _INNER), experts=num, only=()) for weight in args.gate_up.weights)
    down = tuple(replace(weight, columns=_INNER, experts=num, only=()) for weight in args.down.weights)
    cut = replace(
        args,
        num_experts=num,
        places=(),
        num_replicas=0,
        gate_up=replace(args.gate_up, weights=gate_up),
        down=replace(args.down, weights=down),
    )
    x, logits = op.ins
    return replace(op, args=cut, ins=(x, View(logits.register, logits.first, num)))
