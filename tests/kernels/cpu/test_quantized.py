"""Products of 8 and 4 bits in C: the bits of the reference, near the products of the weights as floats, on every level
that this machine can run."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pagewire.kernels import grouped_weight, reference
from pagewire.kernels.cpu import build, levels, quantized
from pagewire.kernels.cpu.dense import NativeMatrix
from pagewire.kernels.cpu.library import Kernels
from pagewire.kernels.cpu.quantized import NativeFp8Matrix, NativeGroupedMatrix
from pagewire.kernels.grouped_weight import GroupedWeight
from pagewire.kernels.quantized_weight import Fp8Weight

if build.compiler() is None:
    pytest.skip("no C compiler", allow_module_level=True)

TABLE = (12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0)  # twice the numbers of MXFP4, and 12
ROWS = (1, 2, 11, 12, 13, 17, 33, 150)


@pytest.fixture
def kernels(kernels_of_level: tuple[str, Kernels]) -> Kernels:
    """The C kernels of a level of this machine."""
    name, kernels = kernels_of_level
    if name not in {level.name for level in levels.levels_here()} | {levels.EMULATED}:
        pytest.skip("this many products would take minutes under an emulator")
    kernels.threads()
    return kernels


class Pieces:
    """A `Memory` that has pieces of three units filled."""

    def filled(self, numel: int, dtype: torch.dtype, unit: int, fill: Callable[[Tensor, int], None]) -> Tensor:
        assert numel % unit == 0
        pieces = list(torch.empty(numel, dtype=dtype).split(3 * unit))
        for i, piece in enumerate(pieces):
            fill(piece, 3 * unit * i)
        return torch.cat(pieces)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def make(n: int, k: int, group: int, bits: int, kind: str) -> GroupedWeight:
    numbers = torch.randint(0, 1 << bits, (n, k), dtype=torch.uint8)
    scales = torch.randn(k // group, n) * 0.02
    if kind == "symmetric":
        return GroupedWeight(numbers, scales.bfloat16().float(), (1 << bits - 1) * scales.bfloat16().float(), bits)
    if kind == "zero points":
        scales = scales.half().float()
        return GroupedWeight(numbers, scales, scales * torch.randint(0, 17, scales.shape), bits)
    if kind == "offsets":
        return GroupedWeight(numbers, scales, torch.randn_like(scales), bits)
    if kind == "table":
        return GroupedWeight(numbers, scales, 12 * scales, bits, table=TABLE)
    assert kind == "ordered"
    order = torch.randperm(k).int()
    return GroupedWeight(numbers, scales, scales * 7, bits, order=order)


FORMS = [
    (16, 64, 64, 8, "symmetric"),
    (100, 36, 36, 8, "symmetric"),
    (40, 288, 288, 8, "offsets"),
    (33, 128, 16, 8, "zero points"),
    (1, 40, 20, 8, "ordered"),
    (129, 256, 128, 4, "symmetric"),
    (48, 384, 128, 4, "zero points"),
    (70, 192, 64, 4, "offsets"),
    (64, 96, 32, 4, "table"),
    (35, 256, 128, 4, "table"),
    (20, 256, 64, 4, "ordered"),
    (17, 60, 12, 4, "zero points"),
    (7, 200, 100, 4, "symmetric"),
]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_products_have_the_bits_of_the_reference(kernels: Kernels, form: tuple[int, int, int, int, str]) -> None:
    weight = make(*form)
    ours, theirs = NativeGroupedMatrix(kernels, weight), reference.TorchGroupedMatrix(weight)
    n, k = weight.shape
    for rows in ROWS:
        x = torch.randn(rows, 2 * k)[:, :k]  # rows need not follow one another
        x[0] *= 1000
        bias = torch.randn(n)
        assert torch.equal(ours.product(x, None), theirs.product(x, None))
        assert torch.equal(ours.product(x, bias), theirs.product(x, bias))
        most, ids = ours.greedy(x)
        expected, places = reference.greedy(theirs.product(x, None))
        assert torch.equal(most, expected) and torch.equal(ids, places)
    ids = torch.randint(0, n, (9,))
    assert torch.equal(ours.lookup(ids), theirs.lookup(ids))
    torch.testing.assert_close(ours.lookup(ids), weight.dequantize(torch.float32)[ids])


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_products_are_near_those_of_floats(kernels: Kernels, form: tuple[int, int, int, int, str]) -> None:
    """Half a step of each activation at most, times the weight."""
    weight = make(*form)
    matrix, dense = NativeGroupedMatrix(kernels, weight), weight.dequantize(torch.float64)
    x = torch.randn(20, weight.shape[1])
    ordered = x if weight.order is None else x[:, weight.order.long()]
    half_step = ordered.unflatten(1, (-1, weight.group_size)).abs().amax(dim=2) / 254
    in_order = dense if weight.order is None else dense[:, weight.order.long()]
    sizes = in_order.abs().unflatten(1, (-1, weight.group_size)).sum(dim=2)
    bound = half_step.double() @ sizes.t() * 1.001 + 1e-4
    assert ((matrix.product(x, None) - x.double() @ dense.t()).abs() <= bound).all()


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_row_has_the_same_bits_among_any_others(kernels: Kernels, form: tuple[int, int, int, int, str]) -> None:
    weight = make(*form)
    matrix = NativeGroupedMatrix(kernels, weight)
    x = torch.randn(150, weight.shape[1])
    together = matrix.product(x, None)
    for count in ROWS:
        for first in {0, 150 - count, (150 - count) // 2}:
            assert torch.equal(matrix.product(x[first : first + count], None), together[first : first + count])


@pytest.mark.parametrize("form", [form for form in FORMS if form[0] % 2 == 0], ids=str)
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_gates_and_ups(kernels: Kernels, form: tuple[int, int, int, int, str], rows: int) -> None:
    weight = make(*form)
    n, k = weight.shape
    gated, plain = NativeGroupedMatrix(kernels, weight, is_gated=True), NativeGroupedMatrix(kernels, weight)
    x, bias = torch.randn(rows, k), torch.randn(n)
    for each in (None, bias):
        expected = reference.silu_mul(plain.product(x, each))
        torch.testing.assert_close(gated.silu_mul(x, each), expected, atol=1e-5, rtol=1e-5)
    ids = torch.arange(n)
    assert torch.equal(gated.lookup(ids), plain.lookup(ids))


def test_a_row_that_is_not_finite_is_nan_alone(kernels: Kernels) -> None:
    weight = make(48, 128, 32, 4, "zero points")
    matrix = NativeGroupedMatrix(kernels, weight)
    for rows in (3, 40):
        x = torch.randn(rows, 128)
        expected = matrix.product(x, None)
        x[1, 100] = float("inf")
        x[2, 3] = float("nan")
        out = matrix.product(x, None)
        assert out[1:3].isnan().all() and torch.equal(out[3:], expected[3:]) and torch.equal(out[0], expected[0])
        assert torch.equal(out.isnan(), reference.TorchGroupedMatrix(weight).product(x, None).isnan())


def test_groups_of_zeros(kernels: Kernels) -> None:
    weight = make(16, 128, 64, 4, "symmetric")
    weight.scales[0] = weight.offsets[0] = 0
    x = torch.randn(5, 128)
    x[:, 64:] = 0
    out = NativeGroupedMatrix(kernels, weight).product(x, None)
    assert not out.any() and not NativeGroupedMatrix(kernels, weight).product(x * 0, None).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("bits", "shape", "group"), [(8, (40, 50), 50), (4, (33, 256), 128), (4, (7, 96), 32)])
def test_numbers_made_at_load(
    kernels: Kernels, dtype: torch.dtype, bits: int, shape: tuple[int, int], group: int
) -> None:
    weight = torch.randn(shape, dtype=dtype) * torch.logspace(-3, 3, shape[0])[:, None].to(dtype)
    weight[3] = 0
    weight[4] = weight[4].abs()
    ours, theirs = quantized.quantize(kernels, weight, bits, group), grouped_weight.quantize(weight, bits, group)
    assert torch.equal(ours.numbers, theirs.numbers)
    assert torch.equal(ours.scales, theirs.scales) and torch.equal(ours.offsets, theirs.offsets)
    error = (ours.dequantize(torch.float32) - weight.float()).norm() / weight.float().norm()
    assert error < (0.01 if bits == 8 else 0.12)
    weight[5, -1] = float("nan")
    ours, theirs = quantized.quantize(kernels, weight, bits, group), grouped_weight.quantize(weight, bits, group)
    assert torch.equal(ours.scales.isnan(), theirs.scales.isnan()) and ours.scales[-1, 5].isnan()
    out = NativeGroupedMatrix(kernels, ours).product(torch.ones(1, shape[1]), None)
    assert out[0].isnan().nonzero().tolist() == [[5]]


def test_bytes(kernels: Kernels) -> None:
    """What is read for one row: four bits a weight, two bytes a scale, and a byte for each zero point."""
    symmetric = make(256, 512, 128, 4, "symmetric")
    assert NativeGroupedMatrix(kernels, symmetric).nbytes == 256 * (256 + 4 * 2)
    assert NativeGroupedMatrix(kernels, make(256, 512, 128, 4, "zero points")).nbytes == 256 * (256 + 4 * 3)
    with pytest.raises(ValueError, match="larger than the 66311"):
        NativeGroupedMatrix(kernels, make(1, 66320, 66320, 8, "symmetric"))


def _fp8(n: int, k: int, block: tuple[int, int] | None) -> Fp8Weight:
    values = (torch.randn(n, k) * torch.logspace(-4, 2, n)[:, None]).to(torch.float8_e4m3fn)
    if block is None:
        return Fp8Weight(values, torch.rand(n) * 0.1)
    return Fp8Weight(values, torch.rand(-(-n // block[0]), -(-k // block[1])) * 0.1, block)


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize(
    ("shape", "block"), [((96, 64), None), ((40, 33), None), ((100, 288), (32, 128)), ((34, 50), (16, 7))]
)
def test_fp8_is_multiplied_as_the_weight_it_stands_for(
    kernels: Kernels, shape: tuple[int, int], block: tuple[int, int] | None, rounds: bool
) -> None:
    """Bit for bit the product of the dequantized weight."""
    weight = _fp8(*shape, block)
    dtype = torch.bfloat16 if rounds else torch.float32
    for is_gated in (False, True):
        ours = NativeFp8Matrix(kernels, weight, rounds=rounds, is_gated=is_gated)
        dense = NativeMatrix(kernels, weight.dequantize(dtype), rounds=rounds, is_gated=is_gated)
        call: Callable[[NativeFp8Matrix | NativeMatrix, Tensor, Tensor | None], Tensor]
        call = type(ours).silu_mul if is_gated else type(ours).product
        for rows in ROWS:
            x, bias = torch.randn(rows, shape[1]), torch.randn(shape[0])
            assert torch.equal(call(ours, x, None), call(dense, x, None))
            assert torch.equal(call(ours, x, bias), call(dense, x, bias))
        ids = torch.arange(shape[0])
        assert torch.equal(ours.lookup(ids), weight.dequantize(dtype).float())


def test_every_code_of_fp8(kernels: Kernels) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(1, 256)
    values = codes.view(torch.float8_e4m3fn)
    found = NativeFp8Matrix(kernels, Fp8Weight(values, torch.ones(1))).lookup(torch.zeros(1, dtype=torch.int64))
    assert torch.equal(found.nan_to_num(7), values.float().nan_to_num(7)) and found.isnan().sum() == 2


@pytest.mark.parametrize("is_gated", [False, True])
def test_pieces_of_a_packed_weight_are_its_parts(kernels: Kernels, is_gated: bool) -> None:
    """Of all kinds: what is packed in pieces is what is packed whole."""
    n, k = 298, 80
    float32 = torch.randn(n, k)
    grouped = make(n, k, 16, 4, "symmetric")
    values = torch.randint(0, 120, (n, k), dtype=torch.uint8)
    fp8 = Fp8Weight(values, torch.rand(n), None)
    whole = [
        NativeMatrix(kernels, float32, is_gated=is_gated),
        NativeMatrix(kernels, float32.bfloat16(), is_gated=is_gated),
        NativeGroupedMatrix(kernels, grouped, is_gated=is_gated),
        NativeFp8Matrix(kernels, fp8, is_gated=is_gated),
    ]
    pieces = [
        NativeMatrix(kernels, float32, is_gated=is_gated, memory=Pieces()),
        NativeMatrix(kernels, float32.bfloat16(), is_gated=is_gated, memory=Pieces()),
        NativeGroupedMatrix(kernels, grouped, is_gated=is_gated, memory=Pieces()),
        NativeFp8Matrix(kernels, fp8, is_gated=is_gated, memory=Pieces()),
    ]
    for one, other in zip(whole, pieces, strict=True):
        assert one.nbytes == other.nbytes
        for a, b in zip(one.stored().tensors, other.stored().tensors, strict=True):
            assert (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
