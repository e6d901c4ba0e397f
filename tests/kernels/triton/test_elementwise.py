"""Sums, products, factors and bounds against torch, with rows of any stride and in place."""

import pytest
import torch

from pagewire.kernels.triton import elementwise


@pytest.fixture
def x(device) -> torch.Tensor:
    """A part of the columns of a register."""
    return torch.randn(3, 1400, device=device)[:, 7:1207]


def other(x: torch.Tensor) -> torch.Tensor:
    return torch.randn_like(x)


@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.0), (1.0, 0.22), (-0.5, 3.0)])
def test_a_sum_with_factors(x, alpha, beta):
    y, out = other(x), torch.empty_like(x)
    elementwise.add(x, y, out, alpha=alpha, beta=beta)
    torch.testing.assert_close(out, alpha * x + beta * y)
    elementwise.add(x, y, x, alpha=alpha, beta=beta)
    assert torch.equal(x, out)


def test_each_product_is_rounded_before_the_sum(x):
    x, y = x.bfloat16(), other(x).bfloat16()
    out = torch.empty_like(x)
    elementwise.add(x, y, out, alpha=0.3, beta=0.7)
    assert torch.equal(out, x * 0.3 + y * 0.7)


@pytest.mark.parametrize("size", [None, 1, 1200])
def test_a_factor(x, size):
    """size: of a vector of factors."""
    factor = 0.37 if size is None else torch.randn(size, device=x.device)
    expected = x * factor
    elementwise.scale(x, x, factor)
    torch.testing.assert_close(x, expected)


def test_a_copy(x):
    out = torch.empty(x.shape, device=x.device)
    elementwise.scale(x, out, 1.0)
    assert torch.equal(out, x)


def test_bounds(x):
    x[1, 3] = torch.nan
    expected = x.clamp(-0.8, 0.8)
    elementwise.clip(x, x, 0.8)
    torch.testing.assert_close(x, expected, equal_nan=True)


@pytest.mark.parametrize("act", ["sigmoid", "silu", ""])
@pytest.mark.parametrize("groups", [1, 8, 1200])
def test_a_gate_of_each_group(x, groups, act):
    by = torch.randn(3, groups + 5, device=x.device)[:, 2 : groups + 2]
    factor = {"sigmoid": torch.sigmoid, "silu": torch.nn.functional.silu, "": lambda numbers: numbers}[act](by)
    expected = x * factor.repeat_interleave(1200 // groups, dim=1)
    elementwise.multiply(x, by, x, act)
    torch.testing.assert_close(x, expected)


def test_the_temperature_of_positions(x):
    positions = torch.tensor([0, 8191, 40_000], dtype=torch.int32, device=x.device)
    steps = ((positions + 1) / 8192).floor()
    expected = x * (0.1 * torch.log1p(steps) + 1)[:, None]
    elementwise.heat(x, x, positions, factor=0.1, every=8192, shift=1)
    torch.testing.assert_close(x, expected)


def test_rows_of_a_table_are_added(x):
    table = torch.randn(9, 1200, device=x.device)
    positions = torch.tensor([4, 0, 6], dtype=torch.int32, device=x.device)
    expected = x + table[[6, 2, 8]]
    elementwise.add_rows(x, table, positions, 2)
    torch.testing.assert_close(x, expected)


@pytest.mark.parametrize(("streams", "num"), [(4, 4), (3, 1)])
def test_streams_are_mixed_by_the_weights_of_a_token(x, streams, num):
    size = 1200 // streams
    others = torch.randn(3, num * size + 4, device=x.device)[:, 1 : 1 + num * size]
    weights = torch.randn(3, streams * num, device=x.device)
    expected = x.clone()
    for stream in range(streams):
        for number in range(num):
            weight = weights[:, stream * num + number, None] + 1.0
            expected[:, stream * size :][:, :size] += weight * others[:, number * size :][:, :size]
    elementwise.mix_streams(x, others, weights, x, size=size, shift=1.0)
    torch.testing.assert_close(x, expected, atol=1e-5, rtol=1e-5)
