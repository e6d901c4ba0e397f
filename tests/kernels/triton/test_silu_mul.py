import pytest
import torch

from pagewire.kernels.triton.silu_mul import silu_mul

BIG = torch.cuda.is_available()
SHAPES = [(1, 3072), (257, 14336)] if BIG else [(1, 2), (3, 70), (2, 1024), (2, 1500)]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_silu_mul(device, dtype, shape, interleaved):
    gate, up = (torch.randn(shape, device=device).mul(10).to(dtype) for _ in range(2))
    gate[0, 0] = -200.0
    gate_up = torch.stack((gate, up), dim=-1).flatten(1) if interleaved else torch.cat((gate, up), dim=-1)
    out = torch.full(shape, torch.nan, dtype=dtype, device=device)
    silu_mul(gate_up, out, interleaved=interleaved)
    exact = gate.double() * torch.sigmoid(gate.double()) * up.double()
    assert ((out.double() - exact).norm() / exact.norm()).item() < (1e-6 if dtype == torch.float32 else 4e-3)
    rounded = torch.nn.functional.silu(gate) * up  # as transformers rounds
    assert (out == rounded).float().mean() > 0.99 or dtype == torch.float32
