"""The product of `--deterministic`: its error, and the same bits of a row in any batch."""

import pytest
import torch

from pagewire.kernels.triton.product import product

BIG = torch.cuda.is_available()
EVEN, UNEVEN = ((6144, 4096), (4868, 888)) if BIG else ((64, 128), (50, 88))  # n, k; no tile divides those of UNEVEN
MAX = {torch.float32: 1e-5, torch.float16: 6e-4, torch.bfloat16: 4e-3}


def error(out, exact):
    return ((out.double() - exact).norm() / exact.norm()).item()


class Case:
    def __init__(self, device, shape, dtype, rows):
        n, k = shape
        self.weight = (torch.randn(n, k, device=device) / k**0.5).to(dtype)
        self.x = torch.randn(rows, k + 16, device=device).to(dtype)[:, :k]
        self.out = torch.full((rows, n), torch.nan, dtype=dtype, device=device)

    def run(self, **options):
        product(self.x, self.weight, self.out, **options)
        return self.out

    def exact(self):
        return self.x.double() @ self.weight.double().t()


@pytest.mark.parametrize("dtype", list(MAX))
@pytest.mark.parametrize("shape", [EVEN, UNEVEN])
@pytest.mark.parametrize("rows", [0, 1, 63, 65])
def test_product(device, dtype, shape, rows):
    case = Case(device, shape, dtype, rows)
    out = case.run()
    assert rows == 0 or error(out, case.exact()) < MAX[dtype]


@pytest.mark.parametrize("shape", [EVEN, UNEVEN])
def test_bias(device, shape):
    case = Case(device, shape, torch.bfloat16, 4)
    bias = torch.randn(shape[0], device=device).bfloat16()
    assert error(case.run(bias=bias), case.exact() + bias.double()) < MAX[torch.bfloat16]


@pytest.mark.parametrize("shape", [EVEN, UNEVEN])
def test_residual_is_added_in_place(device, shape):
    case = Case(device, shape, torch.bfloat16, 66)
    case.out = torch.randn(66, shape[0], device=device).bfloat16()
    exact = (case.exact().bfloat16() + case.out).double()
    assert error(case.run(residual=case.out), exact) < MAX[torch.bfloat16]


def test_the_product_is_rounded_before_the_residual_is_added(device):
    """Sums of whole numbers are exact, so every bit is known."""
    case = Case(device, EVEN, torch.bfloat16, 5)
    for tensor in (case.x, case.weight):
        tensor.copy_(torch.randint(-8, 9, tensor.shape))
    case.out = torch.randn(5, EVEN[0], device=device).bfloat16()
    expected = case.exact().bfloat16() + case.out
    assert torch.equal(case.run(residual=case.out), expected)


@pytest.mark.parametrize("shape", [EVEN, UNEVEN])
def test_gated_product_of_interleaved_gates_and_ups(device, shape):
    case = Case(device, shape, torch.bfloat16, 3)
    case.weight *= 3
    case.out = case.out[:, : shape[0] // 2].contiguous()
    together = case.exact()
    exact = torch.nn.functional.silu(together[:, 0::2]) * together[:, 1::2]
    assert error(case.run(is_gated=True), exact) < 2 * MAX[torch.bfloat16]


def test_float32_outputs_are_not_rounded(device):
    case = Case(device, EVEN, torch.bfloat16, 3)
    case.out = case.out.float()
    assert error(case.run(), case.exact()) < 1e-6


@pytest.mark.parametrize("shape", [EVEN, UNEVEN])
def test_a_row_has_the_same_bits_in_any_batch(device, shape):
    """At any position of a batch of any size."""
    case = Case(device, shape, torch.bfloat16, 1000)
    together = case.run().clone()
    x = case.x
    for first, count in ((0, 1), (3, 7), (70, 64), (936, 64), (999, 1)):
        case.x, case.out = x[first : first + count], together.new_full((count, shape[0]), torch.nan)
        assert torch.equal(case.run(), together[first : first + count])


def test_nothing_beside_the_output_is_written(device):
    case = Case(device, UNEVEN, torch.bfloat16, 3)
    area = torch.full((5, UNEVEN[0] + 7), 7.0, dtype=torch.bfloat16, device=device)
    case.out = area[1:4, 3:-4]
    case.run()
    assert (area[0] == 7).all() and (area[4] == 7).all() and (area[:, :3] == 7).all() and (area[:, -4:] == 7).all()
