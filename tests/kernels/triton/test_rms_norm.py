import pytest
import torch

from pagewire.kernels.triton.rms_norm import layer_norm, rms_norm

BIG = torch.cuda.is_available()
SHAPES = [(1, 4096), (300, 1024), (1000, 4096), (7, 5120)] if BIG else [(1, 16), (7, 96), (3, 1024)]
EPS = 1e-6


def error(out, exact):
    return ((out.double() - exact).norm() / exact.norm()).item()


def exact_norm(x, weight):
    x = x.double()
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + EPS) * weight.double()


def transformers_norm(x, weight):
    """LlamaRMSNorm.forward."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


@pytest.mark.parametrize(("dtype", "max_error"), [(torch.float32, 1e-6), (torch.bfloat16, 3e-3)])
@pytest.mark.parametrize("shape", SHAPES)
def test_norm(device, dtype, max_error, shape):
    wide = (torch.randn(shape[0], shape[1] + 32, device=device) * 30).to(dtype)
    x, weight = wide[:, : shape[1]], torch.randn(shape[1], device=device).to(dtype)
    out = torch.full(shape, torch.nan, dtype=dtype, device=device)
    rms_norm(x, weight, EPS, out)
    assert error(out, exact_norm(x, weight)) < max_error
    rms_norm(x, weight, EPS, x)
    assert torch.equal(x, out)


@pytest.mark.parametrize(("dtype", "max_error"), [(torch.float32, 1e-6), (torch.bfloat16, 3e-3)])
@pytest.mark.parametrize("shape", SHAPES)
def test_norm_of_the_residual_sum(device, dtype, max_error, shape):
    x, residual, weight = (torch.randn(size, device=device).to(dtype) for size in (shape, shape, shape[1]))
    total = x + residual
    out = torch.full(shape, torch.nan, dtype=dtype, device=device)
    rms_norm(x, weight, EPS, out, residual)
    assert torch.equal(residual, total)
    assert error(out, exact_norm(total, weight)) < max_error


def test_rounding_is_that_of_transformers(device):
    x = torch.randn(64, 256, device=device).bfloat16()
    weight = torch.randn(256, device=device).bfloat16()
    out = torch.empty_like(x)
    rms_norm(x, weight, EPS, out)
    same = (out == transformers_norm(x, weight)).float().mean()
    rounded_once = (out == exact_norm(x, weight).bfloat16()).float().mean()
    assert same > 0.995 and rounded_once < 0.9


def test_a_weight_of_float32_is_applied_before_the_states_are_rounded(device):
    """A weight of float32 is applied before the result is rounded: Gemma multiplies by 1 + weight."""
    x, residual = (torch.randn(64, 256, device=device).bfloat16() for _ in range(2))
    weight = torch.randn(256, device=device)
    out = torch.empty_like(x)
    rms_norm(x, weight, EPS, out)
    assert (out == exact_norm(x, weight).bfloat16()).float().mean() > 0.999
    total = x + residual
    rms_norm(x, weight, EPS, out, residual)
    assert (out == exact_norm(total, weight).bfloat16()).float().mean() > 0.999


def test_no_rows(device):
    x = torch.empty(0, 64, device=device)
    rms_norm(x, torch.ones(64, device=device), EPS, x)


@pytest.mark.parametrize(("dtype", "max_error"), [(torch.float32, 1e-6), (torch.bfloat16, 3e-3)])
@pytest.mark.parametrize(("weighted", "biased"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("shape", SHAPES)
def test_layer_norm(device, dtype, max_error, shape, weighted, biased):
    x = (torch.randn(shape[0], shape[1] + 32, device=device) * 3 + 5).to(dtype)[:, : shape[1]]
    weight = torch.randn(shape[1], device=device).to(dtype) if weighted else None
    bias = torch.randn(shape[1], device=device).to(dtype) if biased else None
    out = torch.full(shape, torch.nan, dtype=dtype, device=device)
    layer_norm(x, weight, bias, 1e-5, out)
    wide = [None if each is None else each.double() for each in (weight, bias)]
    exact = torch.nn.functional.layer_norm(x.double(), (shape[1],), *wide, 1e-5)
    assert error(out, exact) < max_error
    residual = torch.randn(shape, device=device).to(dtype)
    total = x + residual
    layer_norm(x, weight, bias, 1e-5, out, residual)
    assert torch.equal(residual, total)
    assert error(out, torch.nn.functional.layer_norm(total.double(), (shape[1],), *wide, 1e-5)) < max_error


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("num_weights", [0, 24, 96])
def test_norms_of_groups(device, kind, num_weights):
    """A weight may have a row for each group."""
    whole = torch.randn(5, 110, device=device)
    x = whole[:, 7:103]
    weight = torch.randn(num_weights, device=device) if num_weights else None
    groups = x.double().view(5, 4, 24)
    if kind == "layer":
        groups = groups - groups.mean(-1, keepdim=True)
    exact = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + EPS)
    if weight is not None:
        exact = exact * weight.double().view(-1, 24)
    if kind == "layer":
        layer_norm(x, weight, None, EPS, x, size=24)
    else:
        rms_norm(x, weight, EPS, x, size=24)
    assert error(x, exact.flatten(1)) < 1e-6


def test_a_norm_of_which_x_is_a_part(device):
    """Two ranks, of which each has half of the columns of two norms."""
    whole, weight = torch.randn(5, 96, device=device), torch.randn(96, device=device)
    means = torch.stack((torch.zeros(5, device=device), whole.square().mean(1)), dim=1)
    exact = exact_norm(whole, weight)
    for rank in range(2):
        at = slice(48 * rank, 48 * rank + 48)
        out = torch.empty(5, 48, device=device)
        rms_norm(whole[:, at], weight[at], EPS, out, mean_squares=means[:, 1:2])
        assert error(out, exact[:, at]) < 1e-6
