import pytest
import torch

from pagewire.kernels.triton.small_product import MAX_ROWS, small_product, tiling, workspace_small_product

BIG = torch.cuda.is_available()
# n, k of each weight; the sums of SPLIT are split
WIDE, SPLIT, UNEVEN = ((6144, 4096), (1024, 3072), (4864, 896)) if BIG else ((64, 256), (32, 1024), (48, 160))
EPS = 1e-6
MAX = {torch.float32: 1e-5, torch.bfloat16: 4e-3}


def error(out, exact):
    return ((out.double() - exact).norm() / exact.norm()).item()


class Case:
    def __init__(self, device, shape, dtype, rows):
        n, k = shape
        self.weight = (torch.randn(n, k, device=device) / k**0.5).to(dtype)
        self.x = torch.randn(MAX_ROWS, k + 16, device=device).to(dtype)[:rows, :k]
        self.out = torch.full((rows, n), torch.nan, dtype=dtype, device=device)
        self.workspace = workspace_small_product([shape, SPLIT], device)
        self.workspace.partials.fill_(torch.nan)

    def run(self, **options):
        small_product(self.x, self.weight, self.out, self.workspace, **options)
        assert not self.workspace.arrivals.any(), "arrivals must be zero for the next product"
        return self.out

    def exact(self, x=None):
        return (self.x if x is None else x).double() @ self.weight.double().t()


def test_the_tested_shapes_have_split_and_uneven_tilings():
    assert tiling(*WIDE).splits == 1 and tiling(*SPLIT).splits > 1
    assert UNEVEN[1] % tiling(*UNEVEN).block_k


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((4096, 1024), (32, 256, 1)),  # Qwen3-0.6B
        ((1024, 2048), (16, 256, 2)),
        ((6144, 1024), (16, 256, 1)),
        ((1024, 3072), (16, 256, 2)),
        ((151936, 1024), (64, 128, 1)),
        ((6144, 4096), (16, 256, 1)),  # Llama-3.1-8B
        ((4096, 4096), (32, 256, 1)),
        ((28672, 4096), (32, 256, 1)),
        ((4096, 14336), (32, 256, 1)),
    ],
)
def test_tilings(shape, expected):
    assert tiling(*shape) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [WIDE, SPLIT, UNEVEN])
@pytest.mark.parametrize("rows", [1, 5, 16])
def test_product(device, dtype, shape, rows):
    case = Case(device, shape, dtype, rows)
    assert error(case.run(), case.exact()) < MAX[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [WIDE, SPLIT, UNEVEN])
def test_norm_before_the_product(device, dtype, shape):
    case = Case(device, shape, dtype, 3)
    case.x *= 30
    weight = torch.randn(shape[1], device=device).to(dtype)
    wide = case.x.float()
    normed = weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(dtype)
    assert error(case.run(norm=(weight, EPS)), case.exact(normed)) < MAX[dtype]


def test_a_norm_of_float32_is_applied_before_the_states_are_rounded(device):
    case = Case(device, WIDE, torch.bfloat16, 3)
    weight = torch.randn(WIDE[1], device=device)
    wide = case.x.float()
    normed = (weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS))).bfloat16()
    assert error(case.run(norm=(weight, EPS)), case.exact(normed)) < MAX[torch.bfloat16]


def test_a_norm_of_large_float16_rows_does_not_overflow(device):
    """The product of a row with the weight of the norm would."""
    case = Case(device, SPLIT, torch.float16, 3)
    case.x.mul_(10000).clamp_(-60000, 60000)
    weight = torch.full((SPLIT[1],), 4.0, dtype=torch.float16, device=device)
    normed = 4 * case.x.double() * torch.rsqrt(case.x.double().square().mean(-1, keepdim=True) + EPS)
    assert error(case.run(norm=(weight, EPS)), case.exact(normed)) < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [WIDE, SPLIT])
def test_residual_is_added_in_place(device, dtype, shape):
    case = Case(device, shape, dtype, 4)
    case.out = torch.randn(4, shape[0], device=device).to(dtype)
    exact = case.exact() + case.out.double()
    assert error(case.run(residual=case.out), exact) < MAX[dtype]


@pytest.mark.parametrize("shape", [WIDE, SPLIT])
def test_bias(device, shape):
    case = Case(device, shape, torch.bfloat16, 4)
    bias = torch.randn(shape[0], device=device).bfloat16()
    assert error(case.run(bias=bias), case.exact() + bias.double()) < MAX[torch.bfloat16]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [WIDE, SPLIT])
def test_gated_product_of_interleaved_gates_and_ups(device, dtype, shape):
    case = Case(device, shape, dtype, 3)
    case.weight *= 3
    case.out = case.out[:, : shape[0] // 2].contiguous()
    product = case.exact()
    exact = torch.nn.functional.silu(product[:, 0::2]) * product[:, 1::2]
    assert error(case.run(is_gated=True), exact) < 2 * MAX[dtype]


def test_float32_outputs_are_not_rounded(device):
    case = Case(device, WIDE, torch.bfloat16, 3)
    case.out = case.out.float()
    assert error(case.run(), case.exact()) < 1e-6


@pytest.mark.parametrize("shape", [WIDE, SPLIT])
def test_a_row_has_the_same_bits_in_any_batch(device, shape):
    """And in every run, whichever program finishes last."""
    case = Case(device, shape, torch.bfloat16, 16)
    together = case.run().clone()
    assert torch.equal(case.run(), together)
    x = case.x
    for first, count in ((0, 1), (3, 2), (7, 9)):
        case.x, case.out = x[first : first + count], together.new_full((count, shape[0]), torch.nan)
        assert torch.equal(case.run(), together[first : first + count])
