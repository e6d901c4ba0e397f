import pytest
import torch

from pagewire.kernels import reference_scans
from pagewire.kernels.triton.gated_norm import gated_norm


@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize(
    ("width", "size", "num_weights", "act"),
    [(96, 24, 24, "silu"), (90, 45, 90, "sigmoid"), (64, 64, 64, "silu"), (1500, 0, 0, "silu"), (40, 8, 8, "none")],
)
def test_it_equals_the_reference(device, width, size, num_weights, act, gate_first):
    both = torch.randn(3, 2 * width + 7, device=device) * 3
    x, z = both[:, :width], both[:, width + 7 :]
    weight = torch.randn(num_weights, device=device) if num_weights else None
    args = (weight, size, 1e-5, act, gate_first)
    torch.testing.assert_close(gated_norm(x, z, *args), reference_scans.gated_norm(x, z, *args), atol=1e-5, rtol=1e-5)
    narrow = gated_norm(x.bfloat16(), z.bfloat16(), *args)
    assert narrow.dtype == torch.bfloat16
    expected = reference_scans.gated_norm(x.bfloat16(), z.bfloat16(), *args)
    torch.testing.assert_close(narrow.float(), expected, atol=2e-2, rtol=1e-2)


def test_no_tokens(device):
    assert gated_norm(torch.ones(0, 8, device=device), torch.ones(0, 8), None, 0, 0.0, "silu", True).shape == (0, 8)
