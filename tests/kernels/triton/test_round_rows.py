"""Rows rounded to 8 bits, and the scales of integer sums, against torch."""

import pytest
import torch

from pagewire.kernels.reference import round_activations
from pagewire.kernels.triton.round_rows import round_rows, scale_sums


@pytest.mark.parametrize("k", [64, 2500])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_are_rounded_to_int8_like_the_reference(device, k, dtype):
    x = (torch.randn(7, k + 16, device=device) * torch.logspace(-3, 2, 7, device=device)[:, None]).to(dtype)[:, :k]
    x[3], x[4, 5] = 0, torch.nan
    codes, scales = round_rows(x, torch.int8)
    expected, of_rows = round_activations(x.cpu(), k, None)
    assert torch.equal(codes.cpu(), expected)
    assert torch.allclose(scales.cpu(), of_rows[:, 0], rtol=1e-6, equal_nan=True)


def test_rows_are_rounded_to_fp8(device):
    x = (30 * torch.randn(5, 700, device=device)).bfloat16()
    x[1], x[2, 3] = 0, torch.inf
    codes, scales = round_rows(x, torch.float8_e4m3fn)
    assert scales[2].isnan() and not codes[1].float().any()
    for row in (0, 3, 4):
        scale = x[row].float().abs().max() / 448
        assert torch.allclose(scales[row], scale)
        error = (codes[row].float() * scale - x[row].float()).abs()
        assert (error <= x[row].float().abs() / 16 + scale * 2**-10).all(), "three bits of mantissa"


@pytest.mark.parametrize("n", [48, 260])
def test_sums_are_scaled(device, n):
    sums = torch.randint(-100000, 100000, (21, n), dtype=torch.int32, device=device)
    rows, columns = torch.rand(21, device=device) / 1000, torch.rand(n, device=device) / 10
    bias = torch.randn(n, device=device).bfloat16()
    exact = sums.double() * rows.double()[:, None] * columns.double() + bias.double()
    area = torch.full((21, n + 3), torch.nan, dtype=torch.bfloat16, device=device)
    scale_sums(sums, rows, columns, area[:, :n], bias=bias)
    assert torch.allclose(area[:, :n].double(), exact, rtol=5e-3, atol=1e-3) and area[:, n:].isnan().all()
    out = torch.empty(21, n // 2, dtype=torch.bfloat16, device=device)
    scale_sums(sums, rows, columns, out, bias=bias, is_gated=True)
    gates, ups = exact.bfloat16().double()[:, ::2], exact.bfloat16().double()[:, 1::2]
    assert torch.allclose(out.double(), torch.nn.functional.silu(gates) * ups, rtol=2e-2, atol=1e-2)
