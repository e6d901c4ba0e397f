"""Activations against torch."""

import pytest
import torch

from pagewire.engine.executors import functions
from pagewire.kernels.triton.activations import activate, glu

ACTS = ("silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "tanh")
EDGES = (0.0, -0.0, 1e-7, -1e-7, 0.02, -0.02, 0.04, -0.25, -0.26, 30.0, -30.0, 1e4, -1e4)


def numbers(device: str, *shape: int) -> torch.Tensor:
    x = torch.randn(shape, device=device) * 3
    x[0, : len(EDGES)] = torch.tensor(EDGES, device=device)
    return x


@pytest.mark.parametrize("act", ACTS)
def test_an_activation_equals_torch(device, act):
    wide = numbers(device, 3, 1100)
    x = wide[:, :1030]
    out = torch.full((3, 1030), torch.nan, device=device)
    activate(x, out, act)
    torch.testing.assert_close(out, functions.activate(x, act), atol=2e-6, rtol=2e-6)
    exact = functions.activate(x.bfloat16().double(), act)
    narrow = x.bfloat16()
    activate(narrow, narrow, act)  # in place
    torch.testing.assert_close(narrow.double(), exact, atol=1e-5, rtol=5e-3)


@pytest.mark.parametrize("act", [*ACTS, "xielu"])
def test_a_nan_stays_one(device, act):
    x = torch.tensor([[torch.nan, 1.0]], device=device)
    activate(x, x, act, torch.ones(2, device=device) if act == "xielu" else None)
    assert x.isnan().tolist() == [[True, False]]


def test_xielu_equals_torch(device):
    x, weights = numbers(device, 2, 600), torch.tensor([0.7, -1.3], device=device)
    x[0, :13].clamp_(-50, 50)
    out = torch.empty_like(x)
    activate(x, out, "xielu", weights)
    torch.testing.assert_close(out, functions.xielu(x, weights), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"act": "gelu_tanh"},
        {"act": "silu", "gate_scale": 0.5},
        {"act": "gelu"},
        {"act": "swiglu_clamped", "limit": 2.0, "sharpness": 1.5},
    ],
    ids=lambda options: options["act"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gated_activation_equals_torch(device, options, dtype):
    both = numbers(device, 3, 2 * 1030 + 6).to(dtype)
    gate, up = both[:, :1030], both[:, 1036:]
    out = torch.full((3, 1030), torch.nan, dtype=dtype, device=device)
    glu(gate, up, out, **options)
    exact = functions.glu(gate.double(), up.double(), **options)
    close = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-2, "rtol": 2e-2}
    torch.testing.assert_close(out.double(), exact, **close)
    if dtype == torch.bfloat16 and options["act"] != "swiglu_clamped":
        wide = (gate * options.get("gate_scale", 1.0)).double()
        rounded = functions.activate(wide, options["act"]).bfloat16() * up  # as transformers rounds
        assert (out == rounded)[gate > -2].float().mean() > 0.98, "but for the tails of 1 + erf"
    glu(gate, up, gate, **options)
    assert torch.equal(gate, out)


def test_no_tokens(device):
    x = torch.ones(0, 8, device=device)
    activate(x, x, "relu")
    glu(x, x, x, "gelu")
