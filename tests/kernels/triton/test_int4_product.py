"""Products with 4-bit weights, against `Int4Weight.dequantize`."""

import pytest
import torch

from pagewire.kernels.quantized_weight import int4_weight
from pagewire.kernels.triton.int4_product import int4_product

BIG = torch.cuda.is_available()
EVEN, UNEVEN = ((6144, 4096), (4868, 896)) if BIG else ((96, 256), (84, 192))  # n, k; no tile divides the n of UNEVEN
MAX = {torch.float16: 6e-4, torch.bfloat16: 4e-3}


def error(out, exact):
    return ((out.double() - exact).norm() / exact.norm()).item()


def make(device, shape, group, order=None):
    n, k = shape
    numbers = torch.randint(0, 16, shape, dtype=torch.uint8)
    zeros = torch.randint(0, 17, (k // group, n), dtype=torch.uint8)  # GPTQ checkpoints have zero points of 16
    scales = (0.5 + torch.rand(k // group, n)).half() / 8
    return int4_weight(numbers, scales, zeros, order).to(torch.device(device))


def run(weight, x, out, **options):
    order = {} if weight.order is None else {"order": weight.order}
    int4_product(x, weight.packed, weight.scales, weight.zeros, out, half=weight.half, **order, **options)
    return out


@pytest.mark.parametrize("dtype", list(MAX))
@pytest.mark.parametrize(
    ("shape", "group", "half"),
    [(EVEN, 128, 64), (EVEN, 64, 64), (EVEN, 32, 32), (EVEN, EVEN[1], 64), (UNEVEN, 64, 64 if BIG else 32)],
)
@pytest.mark.parametrize("rows", [0, 1, 17, 130])
def test_product(device, dtype, shape, group, half, rows):
    weight = make(device, shape, group)
    assert weight.half == half
    x = torch.randn(rows, shape[1] + 16, device=device).to(dtype)[:, : shape[1]]
    out = run(weight, x, torch.full((rows, shape[0]), torch.nan, dtype=dtype, device=device))
    assert rows == 0 or error(out, x.double() @ weight.dequantize(torch.float64).t()) < MAX[dtype]


def test_a_group_of_one_and_a_half_tiles(device):
    """Some tiles lie in one group, and some in two."""
    weight = make(device, (32, 384), 192)
    assert weight.half == 64
    x = torch.randn(3, 384, device=device).bfloat16()
    out = run(weight, x, torch.empty(3, 32, device=device))
    assert error(out, x.double() @ weight.dequantize(torch.float64).t()) < 1e-6


@pytest.mark.parametrize("dtype", list(MAX))
def test_every_int4_value_is_widened_exactly(device, dtype):
    """A product with the identity gives each number with each zero point by itself."""
    numbers = torch.arange(16, dtype=torch.uint8).repeat(32, 2)
    zeros = torch.arange(32, dtype=torch.uint8)[None, :] % 17
    weight = int4_weight(numbers, torch.ones(1, 32).half(), zeros).to(torch.device(device))
    x = torch.eye(32, device=device).to(dtype)
    out = run(weight, x, torch.empty(32, 32, device=device))
    assert torch.equal(out, (numbers.float() - zeros[0].float()[:, None]).t().to(device))


@pytest.mark.parametrize("rows", [3, 20])
def test_columns_follow_the_order_of_the_weight(device, rows):
    weight = make(device, EVEN, 64, torch.randperm(EVEN[1]).int())
    x = torch.randn(rows, EVEN[1], device=device).bfloat16()
    out = run(weight, x, torch.empty(rows, EVEN[0], device=device))
    assert error(out, x.double() @ weight.dequantize(torch.float64).t()) < 1e-6


@pytest.mark.parametrize("rows", [3, 20])
def test_bias(device, rows):
    weight = make(device, UNEVEN, 64)
    x, bias = torch.randn(rows, UNEVEN[1], device=device).bfloat16(), torch.randn(UNEVEN[0], device=device).bfloat16()
    out = run(weight, x, torch.empty(rows, UNEVEN[0], device=device), bias=bias)
    assert error(out, x.double() @ weight.dequantize(torch.float64).t() + bias.double()) < 1e-6


@pytest.mark.parametrize("rows", [3, 20])
def test_residual_is_added_in_place(device, rows):
    weight = make(device, EVEN, 64)
    x, out = (torch.randn(rows, size, device=device).bfloat16() for size in reversed(EVEN))
    exact = ((x.double() @ weight.dequantize(torch.float64).t()).bfloat16() + out).double()
    assert error(run(weight, x, out, residual=out), exact) < MAX[torch.bfloat16]


@pytest.mark.parametrize("rows", [3, 20])
def test_gated_product_of_interleaved_gates_and_ups(device, rows):
    weight = make(device, EVEN, 32)
    x = torch.randn(rows, EVEN[1], device=device).bfloat16() / 8
    gate, up = (x.double() @ weight.dequantize(torch.float64).t()).chunk(2, dim=-1)
    out = torch.empty(rows, EVEN[0] // 2, dtype=torch.bfloat16, device=device)
    exact = torch.nn.functional.silu(gate) * up
    assert error(run(weight.interleave(), x, out, is_gated=True), exact) < 2 * MAX[torch.bfloat16]


@pytest.mark.parametrize(("total", "parts"), [(16, ((0, 1), (3, 9))), (64, ((7, 17),)), (200, ((70, 129),))])
def test_a_row_has_the_same_bits_in_any_batch_with_the_same_tile(device, total, parts):
    weight = make(device, UNEVEN, 64)
    x = torch.randn(total, UNEVEN[1], device=device).bfloat16()
    together = run(weight, x, torch.empty(total, UNEVEN[0], dtype=torch.bfloat16, device=device))
    for first, count in parts:
        alone = torch.empty(count, UNEVEN[0], dtype=torch.bfloat16, device=device)
        assert torch.equal(run(weight, x[first : first + count], alone), together[first : first + count])
