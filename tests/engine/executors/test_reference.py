"""Each operation against a few lines of plain torch, on registers of its own and as columns of wider ones."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pagewire.engine.executors.mixers import MIXERS
from pagewire.engine.executors.reference import Reference, Step
from pagewire.engine.executors.registers import Registers
from pagewire.engine.executors.rotary import inverse_frequencies
from pagewire.engine.executors.weights import Weights
from pagewire.engine.models.description import Activation, Data, Norm, Part, Rope, Temperature, Weight
from pagewire.engine.models.program import (
    Activate,
    Add,
    AllReduce,
    Args,
    Clip,
    Embed,
    GatedProduct,
    Glu,
    Heat,
    Keep,
    MatchMagnitude,
    Matrix,
    MeanSquares,
    MixStreams,
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
)
from pagewire.engine.parallel.collectives import Alone, Group
from pagewire.engine.parallel.domains import Domain
from pagewire.ipc.messages import StepPlan
from pagewire.kernels.reference import TorchMatrix

TOKENS = 5
IDS = torch.tensor([3, 0, 7, 7, 2])
POSITIONS = torch.tensor([0, 1, 9, 4, 30])


@dataclass
class Case:
    """An operation, the widths of what it reads and writes, and what it should write. in_place: its result goes to its
    first input."""

    args: Args
    ins: Sequence[int]
    outs: Sequence[int]
    expected: Callable[..., Tensor | tuple[Tensor, ...]]
    matrices: dict[str, Tensor] = field(default_factory=dict)
    vectors: dict[str, Tensor] = field(default_factory=dict)
    in_place: bool = False


def matrix(key: str, rows: int, columns: int) -> Matrix:
    return Matrix(key, (Weight((), columns),))


def random(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def vector(key: str) -> Vector:
    return Vector(key, ())


W, B = random(12, 8, seed=1), random(12, seed=2)
TABLE = random(40, 8, seed=3)
SCALES, SHIFTS = random(8, seed=4), random(8, seed=5)
WIDE_SCALES = random(16, seed=6)
NORM = {"w": SCALES, "b": SHIFTS}


def rms(x: Tensor, size: int, eps: float = 1e-6) -> Tensor:
    groups = x.unflatten(1, (-1, size))
    return torch.div(groups, (groups.square().mean(-1, keepdim=True) + eps).sqrt()).flatten(1)


def rotated(x: Tensor, rope: Rope, heads: int) -> Tensor:
    """By complex numbers."""
    halves = x.unflatten(1, (heads, -1))[..., : rope.dims].double().unflatten(2, (2, -1))
    angles = POSITIONS[:, None].double() * inverse_frequencies(rope).double()
    turned = torch.complex(halves[:, :, 0], halves[:, :, 1]) * torch.polar(torch.ones(()).double(), angles)[:, None]
    out: Tensor = x.unflatten(1, (heads, -1)).clone()
    out[..., : rope.dims] = torch.cat((turned.real, turned.imag), -1).float() * rope.cos_scale
    return out.flatten(1)


def sparse(x: Tensor) -> Tensor:
    """Three quarters of normally distributed numbers lie below the mean and 0.6745 deviations."""
    return (x - x.mean(1, keepdim=True) - 0.67449 * x.std(1, keepdim=True, unbiased=False)).clamp(min=0)


def clamped(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.clamp(max=0.5), up.clamp(-0.5, 0.5)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


def gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def gelu_tanh(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "quick_gelu": lambda x: x / (1 + torch.exp(-1.702 * x)),
    "relu": lambda x: x.clamp(min=0),
    "relu2": lambda x: x.clamp(min=0) ** 2,
    "tanh": lambda x: 1 - 2 / (torch.exp(2 * x) + 1),
}
ROPE = Rope(8, 100.0)
SHORT = Rope(4, 100.0, "yarn", 4.0, 16, cos_scale=1.2)

CASES: dict[str, Case] = {
    "embed": Case(Embed(matrix("t", 40, 8)), (), (8,), lambda: TABLE[IDS], {"t": TABLE}),
    "embed scaled": Case(Embed(matrix("t", 40, 8), scale=1.7), (), (8,), lambda: TABLE[IDS] * 1.7, {"t": TABLE}),
    "embed ids that the table lacks": Case(
        Embed(Matrix("t", (Weight((Part("t", 5),), 8),)), is_whole=True), (), (8,), lambda: TABLE[[3, 0, 0, 0, 2]],
        {"t": TABLE[:5]},
    ),
    "positions": Case(
        Positions(matrix("t", 40, 8), 2), (8,), (8,), lambda x: x + TABLE[POSITIONS + 2], {"t": TABLE}, in_place=True
    ),
    "rms": Case(Normalize(Norm(8), vector("w"), None), (8,), (8,), lambda x: rms(x, 8) * SCALES, vectors=NORM),
    "rms without weight": Case(Normalize(Norm(8, eps=0.5), None, None), (8,), (8,), lambda x: rms(x, 8, 0.5)),
    "rms of heads": Case(
        Normalize(Norm(8), vector("w"), None), (24,), (24,), lambda x: rms(x, 8) * SCALES.repeat(3),
        vectors=NORM, in_place=True,
    ),
    "rms of heads with weights of their own": Case(
        Normalize(Norm(8), vector("w"), None), (16,), (16,), lambda x: rms(x, 8) * WIDE_SCALES,
        vectors={"w": WIDE_SCALES},
    ),
    "rms over several ranks": Case(
        Normalize(Norm(8, eps=9.0, ranks=2), vector("w"), None), (8, 1), (8,),
        lambda x, mean: x / (mean + 9).sqrt() * SCALES, vectors=NORM, in_place=True,
    ),
    "mean squares": Case(
        MeanSquares(24, 1, 3), (8,), (3,), lambda x: F.pad(x.square().sum(1, keepdim=True) / 24, (1, 1))
    ),
    "layer norm": Case(
        Normalize(Norm(8, kind="layer", eps=1e-3), vector("w"), vector("b")), (8,), (8,),
        lambda x: (x - x.mean(1, keepdim=True)) / (x.var(1, keepdim=True, unbiased=False) + 1e-3).sqrt() * SCALES
        + SHIFTS,
        vectors=NORM,
    ),
    "product": Case(Product(matrix("m", 12, 8)), (8,), (12,), lambda x: x @ W.t(), {"m": W}),
    "product to several views": Case(
        Product(matrix("m", 12, 8), vector("b")), (8,), (6, 4, 2), lambda x: tuple((x @ W.t() + B).split((6, 4, 2), 1)),
        {"m": W}, {"b": B},
    ),
    "gated product": Case(
        GatedProduct(matrix("m", 12, 8), vector("b")), (8,), (6,),
        lambda x: torch.sigmoid((x @ W.t() + B)[:, :6]) * (x @ W.t() + B)[:, :6] * (x @ W.t() + B)[:, 6:],
        {"m": W}, {"b": B},
    ),
    "add": Case(Add(), (8, 8), (8,), lambda x, y: x + y, in_place=True),
    "add scaled": Case(Add(0.5, -3.0), (8, 8), (8,), lambda x, y: 0.5 * x - 3 * y),
    "scale": Case(Scale(0.25), (8,), (8,), lambda x: x / 4, in_place=True),
    "copy": Case(Scale(), (8,), (8,), lambda x: x),
    "scale by a vector": Case(Scale(vector=vector("w")), (8,), (8,), lambda x: x * SCALES, vectors=NORM),
    **{
        act: Case(Activate(act), (8,), (8,), function, in_place=True) for act, function in ACTIVATIONS.items()
    },
    **{
        f"{act} of a gate": Case(Glu(act), (8, 8), (8,), lambda x, y, f=function: f(x) * y)
        for act, function in ACTIVATIONS.items()
    },
    "clamped swiglu": Case(Glu("swiglu_clamped", 0.5), (8, 8), (8,), clamped),
    "scaled gate": Case(Glu("silu", gate_scale=2.0), (8, 8), (8,), lambda x, y: 2 * x * torch.sigmoid(2 * x) * y),
    "sparse gate": Case(Glu("gelu_tanh", sparsity=0.75), (8, 8), (8,), lambda x, y: gelu_tanh(sparse(x)) * y),
    "multiply": Case(Multiply(), (8, 8), (8,), lambda x, y: x * torch.sigmoid(y), in_place=True),
    "multiply by silu": Case(Multiply("silu"), (8, 8), (8,), lambda x, y: x * y * torch.sigmoid(y)),
    "multiply by one column": Case(Multiply(""), (8, 1), (8,), lambda x, y: x * y),
    "multiply groups": Case(Multiply(""), (8, 2), (8,), lambda x, y: x * y.repeat_interleave(4, 1)),
    "mix streams": Case(
        MixStreams(4), (8, 12, 6), (8,),
        lambda x, y, w: x + torch.einsum("tkp,tpi->tki", w.view(-1, 2, 3), y.view(-1, 3, 4)).flatten(1),
    ),
    "mix a stream into others": Case(
        MixStreams(4, 1.0), (8, 4, 2), (8,), lambda x, y, w: x + (w[:, :, None] + 1).mul(y[:, None]).flatten(1),
        in_place=True,
    ),
    "match the magnitude": Case(
        MatchMagnitude(1e-5), (8, 8), (8,), lambda x, y: x * (y.norm(dim=1) / x.norm(dim=1))[:, None], in_place=True
    ),
    "match the magnitude of little": Case(
        MatchMagnitude(100.0), (8, 8), (8,), lambda x, y: x * y.square().mean(1, keepdim=True).sqrt() / 10
    ),
    "clip": Case(Clip(0.3), (8,), (8,), lambda x: x.clamp(-0.3, 0.3), in_place=True),
    "rotate": Case(Rotate(ROPE, 2), (16,), (16,), lambda x: rotated(x, ROPE, 2), in_place=True),
    "rotate some dimensions": Case(Rotate(SHORT, 2), (16,), (16,), lambda x: rotated(x, SHORT, 2), in_place=True),
    "heat": Case(
        Heat(Temperature(0.3, 8, 1)), (8,), (8,),
        lambda x: x * (1 + 0.3 * torch.log(1 + ((POSITIONS + 1) // 8).float()))[:, None], in_place=True,
    ),
    "all-reduce alone": Case(AllReduce(), (8,), (8,), lambda x: x, in_place=True),
    "spread of one domain": Case(Spread(), (8,), (8,), lambda x: x),
    "keep of one domain": Case(Keep(), (8,), (8,), lambda x: x),
}  # fmt: skip


def reference(op: Op, widths: Sequence[int], case: Case, group: Group) -> Reference:
    weights = Weights()
    weights.matrices = {key: (TorchMatrix(values),) for key, values in case.matrices.items()}
    weights.vectors = case.vectors
    program = Program(
        (op,), tuple(widths), op.outs[0], matrix("head", 1, 8), None, 1.0, 0.0, None, tiles=(), hidden=8, vocab=40
    )
    cpu, float32 = torch.device("cpu"), torch.float32
    return Reference(program, weights, max_len=64, dtype=float32, weight_dtype=float32, device=cpu, group=group)


def step() -> Step:
    class NoAttention:
        def begin(self, step: object) -> None:
            raise AssertionError

        forward = begin

    return Step(IDS, POSITIONS, NoAttention(), POSITIONS)


def run(case: Case, *, margin: int, fixed: bool, group: Group | None = None) -> tuple[list[Tensor], list[Tensor]]:
    """(inputs, outputs). margin: columns on each side of every view."""
    inputs = [random(TOKENS, width, seed=10 + i) for i, width in enumerate(case.ins)]
    widths = [width + 2 * margin for width in case.ins]
    ins = [View(number, margin, width) for number, width in enumerate(case.ins)]
    if case.in_place:
        outs = ins[:1]
    else:
        widths.append(sum(case.outs) + 2 * margin)
        starts = [margin + sum(case.outs[:i]) for i in range(len(case.outs))]
        outs = [View(len(ins), first, width) for first, width in zip(starts, case.outs, strict=True)]
    op = Op(0, case.args, tuple(ins), tuple(outs))
    memory = [torch.full((TOKENS, width), 7.0) for width in widths]
    for view, values in zip(ins, inputs, strict=True):
        memory[view.register][:, margin : margin + view.width] = values
    registers = Registers([*memory]) if fixed else Registers()
    if not fixed:
        for number, tensor in enumerate(memory[: len(ins)]):
            registers.put(View(number, 0, tensor.shape[1]), tensor.shape[1], tensor.clone())
    reference(op, widths, case, group or Alone()).run(op, registers, step())
    if margin and fixed:
        for number, tensor in enumerate(memory):
            assert (tensor[:, :margin] == 7).all() and (tensor[:, -margin:] == 7).all(), "columns of others changed"
            if number < len(ins) and View(number, margin, widths[number] - 2 * margin) not in outs:
                assert torch.equal(tensor[:, margin:-margin], inputs[number]), "an input changed"
    return inputs, [registers.get(view).clone() for view in outs]


@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize(("margin", "fixed"), [(0, False), (0, True), (3, False), (3, True)])
def test_an_operation_computes_its_formula(name: str, margin: int, fixed: bool) -> None:
    case = CASES[name]
    inputs, found = run(case, margin=margin, fixed=fixed)
    expected = case.expected(*inputs)
    for ours, theirs in zip(found, expected if isinstance(expected, tuple) else (expected,), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("num", [2, 0])
def test_a_domain_takes_part_with_its_own_tokens(num: int) -> None:
    """Between 3 tokens of the domain before and 1 of the next one; without tokens it only spreads."""
    views = [View(number, 0, 4) for number in range(3)]
    spread, keep = Op(0, Spread(), (views[0],), (views[1],)), Op(0, Keep(), (views[1],), (views[2],))
    whole = reference(spread, (4, 4, 4), Case(Spread(), (4,), (4,), lambda x: x), Alone())
    whole.program = replace(whole.program, shared=frozenset({1}))
    whole.domain = Domain(1)
    whole.domain.begin(StepPlan(1, (), b"", b"", b"", b"", b"", domain_tokens=(3, num, 1)))
    registers, own = Registers(), torch.arange(4.0 * num).view(num, 4) + 1
    if num:
        registers.put(views[0], 4, own)
    whole.run(spread, registers, step())
    expected = torch.zeros(4 + num, 4)
    expected[3 : 3 + num] = own
    assert torch.equal(registers.get(views[1]), expected)
    whole.run(keep, registers, step())
    if num:
        assert torch.equal(registers.get(views[2]), own)
    else:
        with pytest.raises(KeyError):
            registers.get(views[2])


def test_every_operation_has_a_case_or_a_test_of_its_own() -> None:
    covered = {type(case.args).__name__ for case in CASES.values()}
    mixers = {kind.__name__ for kind in MIXERS}  # test_mixers.py
    of_their_own = {"Attend", "AttendLatent", "Mixture", "Store"}  # Store: ../../test_encoder_decoders.py
    assert covered | mixers | of_their_own == {kind.__name__ for kind in Args.__args__ if issubclass(kind, Data)}
