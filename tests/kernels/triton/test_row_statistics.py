import pytest
import torch

from pagewire.engine.executors import functions
from pagewire.kernels.triton.row_statistics import match_magnitude, sparse


@pytest.mark.parametrize("dim", [7, 64, 1500])
def test_a_row_gets_the_magnitude_of_another(device, dim):
    whole = torch.randn(4, dim + 9, device=device)
    x, to = whole[:, 3 : 3 + dim], torch.randn(4, dim, device=device) * 7
    x[2] *= 1e-6  # less than the floor
    own = x.square().mean(-1, keepdim=True).clamp(min=1e-5).sqrt()
    expected = x * to.square().mean(-1, keepdim=True).sqrt() / own
    match_magnitude(x, to, x, 1e-5)
    torch.testing.assert_close(x, expected)


@pytest.mark.parametrize("share", [0.25, 0.5, 0.95])
@pytest.mark.parametrize("dim", [40, 1100])
def test_what_a_row_exceeds_its_quantile_by(device, dim, share):
    x = torch.randn(3, dim + 9, device=device)[:, 3 : 3 + dim] + 2
    out = torch.full((3, dim), torch.nan, device=device)
    sparse(x, out, share)
    torch.testing.assert_close(out, functions.sparse(x, x, share), atol=1e-5, rtol=1e-5)
    assert (out == 0).float().mean().item() == pytest.approx(share, abs=0.15)
