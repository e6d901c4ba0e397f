"""Products with weights of 8 and 4 bits, against their `dequantize`."""

import pytest
import torch
from narrow_weights import KINDS, make_weight

from pagewire.kernels.quantized_weight import Int8Weight, int4_weight
from pagewire.kernels.triton.quantized_product import quantized_product
from pagewire.kernels.triton.small_product import narrow_tiling, workspace_small_product

BIG = torch.cuda.is_available()
# n, k: no tile divides the n of UNEVEN and its k for 8 bits; the sums of SPLIT are split
EVEN, UNEVEN, SPLIT = ((6144, 4096), (4868, 896), (1024, 3072)) if BIG else ((96, 256), (84, 192), (40, 512))
ODD = (4868, 888) if BIG else (84, 152)
BLOCK = (128, 128) if BIG else (32, 32)
MAX = {torch.float16: 6e-4, torch.bfloat16: 4e-3}
EPS = 1e-6


def error(out, exact):
    return ((out.double() - exact).norm() / exact.norm()).item()


SHAPES = {kind: (EVEN, ODD if kind in ("fp8 row", "fp8 block", "int8 row") else UNEVEN) for kind in KINDS}


def run(weight, x, out, workspace=None, **options):
    quantized_product(x, weight, out, workspace, **options)
    return out


def exact_of(weight, x):
    """In float64; the weight is never rounded to 16 bits."""
    return x.double() @ weight.dequantize(torch.float64).t()


@pytest.mark.parametrize("dtype", list(MAX))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [0, 1, 17, 130])
def test_product(device, dtype, kind, rows):
    shape = SHAPES[kind][rows % 2]
    weight = make_weight(kind, shape, device, BLOCK)
    x = torch.randn(rows, shape[1] + 16, device=device).to(dtype)[:, : shape[1]]
    out = run(weight, x, torch.full((rows, shape[0]), torch.nan, dtype=dtype, device=device))
    assert rows == 0 or error(out, exact_of(weight, x)) < MAX[dtype]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [3, 20])
def test_bias(device, kind, rows):
    shape = SHAPES[kind][1]
    weight = make_weight(kind, shape, device, BLOCK)
    x, bias = torch.randn(rows, shape[1], device=device).bfloat16(), torch.randn(shape[0], device=device).bfloat16()
    out = run(weight, x, torch.empty(rows, shape[0], device=device), bias=bias)
    assert error(out, exact_of(weight, x) + bias.double()) < 1e-6, "float32 outputs are not rounded"


@pytest.mark.parametrize("kind", KINDS)
def test_residual_is_added_in_place(device, kind):
    weight = make_weight(kind, EVEN, device, BLOCK)
    for rows in (3, 20):
        x, out = (torch.randn(rows, size, device=device).bfloat16() for size in reversed(EVEN))
        exact = (exact_of(weight, x).bfloat16() + out).double()
        assert error(run(weight, x, out, residual=out), exact) < MAX[torch.bfloat16]


@pytest.mark.parametrize("kind", KINDS)
def test_gated_product_of_interleaved_gates_and_ups(device, kind):
    weight = make_weight(kind, EVEN, device, (16, BLOCK[1]))
    for rows in (3, 20):
        x = torch.randn(rows, EVEN[1], device=device).bfloat16() / 8
        gate, up = exact_of(weight, x).chunk(2, dim=-1)
        out = torch.empty(rows, EVEN[0] // 2, dtype=torch.bfloat16, device=device)
        exact = torch.nn.functional.silu(gate) * up
        assert error(run(weight.interleave(), x, out, is_gated=True), exact) < 2 * MAX[torch.bfloat16]


@pytest.mark.parametrize("dtype", list(MAX))
@pytest.mark.parametrize("kind", KINDS)
def test_split_sums_with_a_norm_before(device, kind, dtype):
    """The last program adds the sums of the squares, too; every row has the same bits alone."""
    n, k = SPLIT
    assert narrow_tiling(n, k).splits > 1
    weight = make_weight(kind, SPLIT, device, BLOCK)
    workspace = workspace_small_product([], device, narrow=[SPLIT])
    workspace.partials.fill_(torch.nan)
    x, by = (30 * torch.randn(5, k, device=device)).to(dtype), torch.randn(k, device=device).to(dtype)
    wide = x.float()
    normed = by * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(dtype)
    out = run(weight, x, torch.empty(5, n, dtype=dtype, device=device), workspace, norm=(by, EPS))
    assert not workspace.arrivals.any(), "arrivals must be zero for the next product"
    assert error(out, exact_of(weight, normed)) < 1.5 * MAX[dtype]
    alone = run(weight, x[3:4], torch.empty(1, n, dtype=dtype, device=device), workspace, norm=(by, EPS))
    assert torch.equal(alone, out[3:4])


@pytest.mark.parametrize("form", ["int4", "int8"])
@pytest.mark.parametrize("rows", [3, 20])
def test_columns_follow_the_order_of_the_weight(device, form, rows):
    n, k = EVEN
    order = torch.randperm(k).int()
    if form == "int8":
        weight = Int8Weight(torch.randint(-128, 128, EVEN, dtype=torch.int8), torch.rand(k // 64, n) / 256, order)
    else:
        numbers, zeros = (torch.randint(0, 16, shape, dtype=torch.uint8) for shape in (EVEN, (k // 64, n)))
        weight = int4_weight(numbers, torch.rand(k // 64, n).half(), zeros, order)
    weight = weight.to(torch.device(device))
    x = torch.randn(rows, k, device=device).bfloat16()
    assert error(run(weight, x, torch.empty(rows, n, device=device)), exact_of(weight, x)) < 1e-6
    if rows <= 16:
        by = torch.randn(k, device=device).bfloat16()
        normed = by.double() * x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + EPS)
        out = run(weight, x, torch.empty(rows, n, device=device), norm=(by, EPS))
        assert error(out, exact_of(weight, normed)) < MAX[torch.bfloat16]


@pytest.mark.parametrize("kind", ["fp8 row", "fp8 block", "int4 64", "nvfp4"])
@pytest.mark.parametrize(("total", "parts"), [(16, ((0, 1), (3, 9))), (64, ((7, 17),)), (200, ((70, 129),))])
def test_a_row_has_the_same_bits_in_any_batch_with_the_same_tile(device, kind, total, parts):
    weight = make_weight(kind, UNEVEN, device, BLOCK)
    x = torch.randn(total, UNEVEN[1], device=device).bfloat16()
    together = run(weight, x, torch.empty(total, UNEVEN[0], dtype=torch.bfloat16, device=device))
    for first, count in parts:
        alone = torch.empty(count, UNEVEN[0], dtype=torch.bfloat16, device=device)
        assert torch.equal(run(weight, x[first : first + count], alone), together[first : first + count])
