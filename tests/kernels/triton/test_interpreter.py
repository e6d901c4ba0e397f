"""The patched interpreter against torch; on a GPU, the device against torch."""

import pytest
import torch
import triton
import triton.language as tl

SMALL = [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


@triton.jit
def _cast(source, target, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    tl.store(target + place, tl.load(source + place).to(target.dtype.element_ty))


@triton.jit
def _arithmetic(a, b, out, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    left, right = tl.load(a + place), tl.load(b + place)
    tl.store(out + place, left + right)
    tl.store(out + BLOCK + place, left * right)
    tl.store(out + 2 * BLOCK + place, tl.maximum(left, right))
    tl.store(out + 3 * BLOCK + place, tl.where(left < right, left, -right))
    tl.store(out + 4 * BLOCK + place, tl.abs(left))


@triton.jit
def _nested(x):
    return tl.sum(x, axis=1)


@triton.jit
def _dot(a, b, out, sums, BLOCK: tl.constexpr):
    rows, columns = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    place = rows * BLOCK + columns
    product = tl.dot(tl.load(a + place), tl.load(b + place), input_precision="ieee")
    tl.store(out + place, product)
    tl.store(sums + tl.arange(0, BLOCK), _nested(product))


@triton.jit
def _sum(x, out, BLOCK: tl.constexpr):
    tl.store(out, tl.sum(tl.load(x + tl.arange(0, BLOCK)), axis=0))


def numbers(count, device):
    """Random numbers of all magnitudes, with ties between bf16 numbers, zeros, infinities, and numbers out of the range
    of fp8."""
    x = torch.randn(count, device=device) * torch.logspace(-10, 6, count, device=device)
    x[:6] = torch.tensor([0.0, -0.0, 1 + 2**-8, 1 + 3 * 2**-8, torch.inf, -torch.inf])
    return x


@pytest.mark.parametrize("dtype", SMALL)
def test_casts_round_to_nearest_even(device, dtype):
    if device == "cuda" and torch.cuda.get_device_capability() < (8, 9) and dtype != torch.bfloat16:
        pytest.skip("a type of sm_89")
    x = numbers(4096, device)
    small = torch.zeros(4096, dtype=dtype, device=device)
    _cast[1,](x, small, 4096)
    max_value = torch.inf if dtype == torch.bfloat16 else torch.finfo(dtype).max  # fp8 saturates
    assert torch.equal(small.float(), x.clamp(-max_value, max_value).to(dtype).float())
    again = torch.zeros(4096, device=device)
    _cast[1,](small, again, 4096)
    assert torch.equal(again, small.float())


def test_arithmetic_in_bf16(device):
    a, b = (numbers(1024, device)[torch.randperm(1024)].bfloat16() for _ in range(2))
    out = torch.full((5, 1024), torch.nan, dtype=torch.bfloat16, device=device)
    _arithmetic[1,](a, b, out, 1024)
    expected = torch.stack((a + b, a * b, torch.maximum(a, b), torch.where(a < b, a, -b), a.abs()))
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_products_of_matrices(device, dtype):
    a, b = (torch.randn(32, 32, device=device).to(dtype) for _ in range(2))
    out, sums = torch.empty(32, 32, device=device), torch.empty(32, device=device)
    _dot[1,](a, b, out, sums, 32)
    torch.testing.assert_close(out, a.float() @ b.float())
    torch.testing.assert_close(sums, out.sum(dim=1), atol=1e-5, rtol=1e-5)


def test_sums_in_bf16_are_refused(device):
    if device == "cuda":
        pytest.skip("a rule of the interpreter")
    with pytest.raises(Exception, match="cast to float32 first"):
        _sum[1,](torch.ones(16, dtype=torch.bfloat16), torch.zeros(1), 16)
