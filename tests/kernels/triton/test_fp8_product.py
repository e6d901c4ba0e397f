"""Products with fp8 weights, against `Fp8Weight.dequantize`."""

import pytest
import torch

from pagewire.kernels.quantized_weight import Fp8Weight
from pagewire.kernels.triton.fp8_product import fp8_product

BIG = torch.cuda.is_available()
EVEN, UNEVEN = ((6144, 4096), (4868, 888)) if BIG else ((96, 256), (84, 152))  # n, k; no tile divides those of UNEVEN
BLOCK = (128, 128) if BIG else (32, 32)
MAX = {torch.float16: 6e-4, torch.bfloat16: 4e-3}


def error(out, exact):
    return ((out.double() - exact).norm() / exact.norm()).item()


def codes(n, k, device):
    """Random values among all finite e4m3 numbers, with subnormal numbers and both zeros."""
    finite = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
    return finite[torch.randint(len(finite), (n, k))].to(device).view(torch.float8_e4m3fn)


def fp8_weight(device, shape, block):
    n, k = shape
    if block is None:
        return Fp8Weight(codes(n, k, device), torch.rand(n, device=device) / 400)
    scale = torch.rand(-(-n // block[0]), -(-k // block[1]), device=device) / 400
    return Fp8Weight(codes(n, k, device), scale, block)


def run(weight, x, out, **options):
    block = {} if weight.block is None else {"block": weight.block}
    fp8_product(x, weight.values, weight.scale, out, **block, **options)
    return out


@pytest.mark.parametrize("dtype", list(MAX))
@pytest.mark.parametrize("block", [None, BLOCK])
@pytest.mark.parametrize("shape", [EVEN, UNEVEN])
@pytest.mark.parametrize("rows", [0, 1, 17, 130])
def test_product(device, dtype, block, shape, rows):
    weight = fp8_weight(device, shape, block)
    x = torch.randn(rows, shape[1] + 16, device=device).to(dtype)[:, : shape[1]]
    out = run(weight, x, torch.full((rows, shape[0]), torch.nan, dtype=dtype, device=device))
    assert rows == 0 or error(out, x.double() @ weight.dequantize(torch.float64).t()) < MAX[dtype]


@pytest.mark.parametrize("dtype", list(MAX))
def test_every_fp8_value_is_widened_exactly(device, dtype):
    """A product with the identity gives each value by itself."""
    values = torch.arange(256, dtype=torch.uint8, device=device).view(1, 256).repeat(16, 1).view(torch.float8_e4m3fn)
    values.view(torch.uint8)[:, [0x7F, 0xFF]] = 0
    x = torch.eye(256, device=device).to(dtype)
    out = torch.empty(256, 16, device=device)
    fp8_product(x, values, torch.ones(16, device=device), out)
    assert torch.equal(out, values.float().t())


@pytest.mark.parametrize("rows", [3, 20])
def test_bias(device, rows):
    weight = fp8_weight(device, UNEVEN, BLOCK)
    x, bias = torch.randn(rows, UNEVEN[1], device=device).bfloat16(), torch.randn(UNEVEN[0], device=device).bfloat16()
    out = run(weight, x, torch.empty(rows, UNEVEN[0], device=device), bias=bias)
    assert error(out, x.double() @ weight.dequantize(torch.float64).t() + bias.double()) < 1e-6


@pytest.mark.parametrize("block", [None, BLOCK])
@pytest.mark.parametrize("rows", [3, 20])
def test_residual_is_added_in_place(device, block, rows):
    weight = fp8_weight(device, EVEN, block)
    x, out = (torch.randn(rows, size, device=device).bfloat16() for size in reversed(EVEN))
    exact = ((x.double() @ weight.dequantize(torch.float64).t()).bfloat16() + out).double()
    assert error(run(weight, x, out, residual=out), exact) < MAX[torch.bfloat16]


@pytest.mark.parametrize("block", [None, (16, 128)])
@pytest.mark.parametrize("rows", [3, 20])
def test_gated_product_of_interleaved_gates_and_ups(device, block, rows):
    weight = fp8_weight(device, EVEN, block)
    x = torch.randn(rows, EVEN[1], device=device).bfloat16()
    gate, up = (x.double() @ weight.dequantize(torch.float64).t()).chunk(2, dim=-1)
    out = torch.empty(rows, EVEN[0] // 2, dtype=torch.bfloat16, device=device)
    exact = torch.nn.functional.silu(gate) * up
    assert error(run(weight.interleave(), x, out, is_gated=True), exact) < 2 * MAX[torch.bfloat16]


def test_float32_outputs_are_not_rounded(device):
    weight = fp8_weight(device, EVEN, None)
    x = torch.randn(3, EVEN[1], device=device).bfloat16()
    out = run(weight, x, torch.empty(3, EVEN[0], device=device))
    assert error(out, x.double() @ weight.dequantize(torch.float64).t()) < 1e-6


@pytest.mark.parametrize("block", [None, BLOCK])
@pytest.mark.parametrize(("total", "parts"), [(16, ((0, 1), (3, 9))), (64, ((7, 17),)), (200, ((70, 129),))])
def test_a_row_has_the_same_bits_in_any_batch_with_the_same_tile(device, block, total, parts):
    weight = fp8_weight(device, UNEVEN, block)
    x = torch.randn(total, UNEVEN[1], device=device).bfloat16()
    together = run(weight, x, torch.empty(total, UNEVEN[0], dtype=torch.bfloat16, device=device))
    for first, count in parts:
        alone = torch.empty(count, UNEVEN[0], dtype=torch.bfloat16, device=device)
        assert torch.equal(run(weight, x[first : first + count], alone), together[first : first + count])
