"""Experts of every kind of matrix, together in one list of tasks, against one after the other."""

import ctypes
from copy import copy

import pytest
import torch

from pagewire.engine.models.expert_places import places, table
from pagewire.kernels import reference
from pagewire.kernels.cpu.dense import NativeMatrix
from pagewire.kernels.cpu.experts import SOFTMAX, NativeExperts
from pagewire.kernels.cpu.quantized import NativeFp8Matrix, NativeGroupedMatrix
from pagewire.kernels.cpu.structs import RouterFields
from pagewire.kernels.grouped_weight import GroupedWeight, quantize
from pagewire.kernels.quantized_weight import Fp8Weight

HIDDEN, INNER, EXPERTS, TOP_K = 96, 72, 6, 3  # INNER is no multiple of the 16 lanes
KINDS = ("4 bits", "4 bits, ordered", "4 bits, table", "8 bits", "fp8", "bfloat16")
TABLE = (12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def make(kernels, kind, n, k, *, is_gated):
    """The matrix and its specification."""
    weight = torch.randn(n, k) / k**0.5
    group = next(size for size in (128, 32, 24) if k % size == 0)
    if kind == "bfloat16":
        wide = weight.bfloat16()
        return NativeMatrix(kernels, wide, is_gated=is_gated), reference.TorchMatrix(wide.float())
    if kind == "fp8":
        scale = weight.abs().amax(dim=1) / 448
        fp8 = Fp8Weight((weight / scale[:, None]).to(torch.float8_e4m3fn), scale)
        specified = reference.TorchMatrix(fp8.dequantize(torch.float32))
        return NativeFp8Matrix(kernels, fp8, is_gated=is_gated), specified
    if kind == "8 bits":
        grouped = quantize(weight, 8, k)
    elif kind == "4 bits, table":
        scales = weight.unflatten(1, (-1, group)).abs().amax(dim=2).t() / 12
        grouped = GroupedWeight(torch.randint(0, 16, (n, k), dtype=torch.uint8), scales, 12 * scales, 4, table=TABLE)
    else:
        order = torch.randperm(k).int() if "ordered" in kind else None
        grouped = quantize(weight, 4, group)
        grouped = GroupedWeight(grouped.numbers, grouped.scales, grouped.offsets, 4, order=order)
    return NativeGroupedMatrix(kernels, grouped, is_gated=is_gated), reference.TorchGroupedMatrix(grouped)


class Layer:
    """Experts whose matrices are of these kinds, in turn."""

    def __init__(self, kernels, kinds):
        self._kernels = kernels
        pairs = []
        for i in range(EXPERTS):
            gate_up = make(kernels, kinds[i % len(kinds)], 2 * INNER, HIDDEN, is_gated=True)
            down = make(kernels, kinds[(i // 2) % len(kinds)], HIDDEN, INNER, is_gated=False)
            pairs.append((gate_up, down))
        ours, self._specified = ([(gate_up[i], down[i]) for gate_up, down in pairs] for i in range(2))
        router = RouterFields(num=EXPERTS, top_k=TOP_K, score=SOFTMAX, groups=1, renormalize=True, scale=1.0)
        self._pairs, self._router = ours, router
        self.load = torch.zeros(EXPERTS, dtype=torch.int64)
        self._experts = NativeExperts(*zip(*ours, strict=True), router)

    def part(self, own, rows):
        """Of a rank with some of the experts. rows: the table of places."""
        part = copy(self)
        pairs = [self._pairs[expert] for expert in own]
        places = torch.tensor(rows, dtype=torch.int32)
        part.load = torch.zeros(len(own), dtype=torch.int64)
        part._experts = NativeExperts(*zip(*pairs, strict=True), self._router, places=places, load=part.load)
        return part

    def forward(self, x, logits, positions=None, adds=None):
        """adds: what the result is added to."""
        m = len(x)
        weights, ids = torch.empty(m, TOP_K), torch.empty(m, TOP_K, dtype=torch.int32)
        out = torch.empty_like(x) if adds is None else adds.clone()
        self._kernels.route(
            ctypes.addressof(self._experts.fields.router), logits.data_ptr(), logits.stride(0), weights.data_ptr(),
            ids.data_ptr(), m,
        )  # fmt: skip
        if positions is not None:
            fields = ctypes.addressof(self._experts.fields)
            self._kernels.place(fields, ids.data_ptr(), positions.contiguous().data_ptr(), m)
        self._kernels.experts(
            ctypes.addressof(self._experts.fields), weights.data_ptr(), ids.data_ptr(), x.data_ptr(), x.stride(0),
            out.data_ptr(), out.stride(0), m, adds is not None,
        )  # fmt: skip
        return out

    def expected(self, x, logits):
        out = torch.zeros_like(x)
        for token, (weights, experts) in enumerate(zip(*reference.route(logits, TOP_K, True), strict=True)):
            for weight, expert in zip(weights, experts.tolist(), strict=True):
                gate_up, down = self._specified[expert]
                out[token] += weight * down.product(gate_up.silu_mul(x[token : token + 1], None), None)[0]
        return out


@pytest.mark.parametrize("kinds", [*((kind,) for kind in KINDS), KINDS], ids=str)
@pytest.mark.parametrize("tokens", [1, 5, 70])
def test_a_layer_is_the_weighted_sum_over_the_best_experts(level, kinds, tokens):
    """Rows in which an activation falls to the other side of a rounding differ a little more; they are few."""
    layer = Layer(level, kinds)
    x, logits = torch.randn(tokens, HIDDEN), torch.randn(tokens, EXPERTS)
    found, expected = layer.forward(x, logits), layer.expected(x, logits)
    errors = (found - expected).norm(dim=1) / expected.norm(dim=1)
    assert errors.max() < 0.01
    assert (errors < 1e-5).float().mean() > (0.9 if tokens > 5 else 0.7)


@pytest.mark.parametrize("kinds", [*((kind,) for kind in KINDS), KINDS], ids=str)
def test_a_row_has_the_same_bits_among_any_others(level, kinds):
    layer = Layer(level, kinds)
    x, logits = torch.randn(70, HIDDEN), torch.randn(70, EXPERTS)
    together = layer.forward(x, logits)
    for first, count in ((0, 1), (3, 2), (7, 12), (69, 1), (20, 40)):
        rows = slice(first, first + count)
        assert torch.equal(layer.forward(x[rows], logits[rows]), together[rows])


@pytest.mark.parametrize(("kind", "bits"), [("4 bits", 4 + 24 / 128), ("8 bits", 8 + 32 / 256), ("fp8", 8 + 32 / 256)])
def test_bytes_are_those_of_the_quantized_numbers(level, kind, bits):
    """And their scales: one for 128 columns with a zero point, or one for a row of 256."""
    matrix, _ = make(level, kind, 512, 256, is_gated=True)
    assert matrix.nbytes == 512 * 256 * bits / 8


def test_the_parts_of_ranks_with_whole_experts_add_up(level):
    """Of six experts two ranks have four each; those that both have are computed by turns. A rank counts its own."""
    whole = Layer(level, KINDS)
    x, logits, positions = torch.randn(70, HIDDEN), torch.randn(70, EXPERTS), torch.randint(0, 9, (70,))
    expected, slots = whole.forward(x, logits), ((0, 1, 2, 3), (5, 4, 3, 2))
    total, loads = torch.zeros_like(x), torch.zeros(EXPERTS, dtype=torch.int64)
    for rank, own in enumerate(slots):
        part = whole.part(own, table(places(EXPERTS, slots, rank), len(own), 0))
        out = part.forward(x, logits, positions)
        for first, count in ((0, 1), (7, 12), (69, 1)):
            rows = slice(first, first + count)
            assert torch.equal(part.forward(x[rows], logits[rows], positions[rows]), out[rows])
        total += out
        loads[list(own)] += part.load
    torch.testing.assert_close(total, expected, atol=1e-5, rtol=1e-5)
    chosen = reference.route(logits, TOP_K, True)[1]
    again = torch.cat([chosen, chosen[:1], chosen[7:19], chosen[69:]])
    assert torch.equal(loads, again.flatten().bincount(minlength=EXPERTS))


def test_tokens_whose_experts_are_all_elsewhere(level):
    part = Layer(level, KINDS).part((5,), table(places(EXPERTS, ((0, 1, 2, 3, 4), (5,)), 1), 1, 0))
    x, logits = torch.randn(3, HIDDEN), torch.zeros(3, EXPERTS)
    logits[:, 5] = torch.tensor([-1.0, 1.0, -1.0])
    out = part.forward(x, logits, torch.arange(3))
    assert not out[0].any() and out[1].any() and not out[2].any()
    assert not part.forward(x[:1], logits[:1], torch.arange(1)).any()
    assert torch.equal(part.forward(x, logits, torch.arange(3), adds=x), x + out)
