"""Functions of activations in torch."""

from statistics import NormalDist

import torch
import torch.nn.functional as F
from torch import Tensor

from ..models.description import Activation


def normalize(x: Tensor, size: int, kind: str, eps: float, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """A norm of groups of `size` adjacent columns of x [tokens, width], in float32. weight, bias: [size], or of all
    groups [width]; those of float32 beside narrower numbers are applied before the result is rounded."""
    groups = x.view(x.shape[0], -1, size)
    is_wide = weight is not None and weight.dtype != x.dtype
    numbers = groups.float() if is_wide else groups
    if weight is not None and weight.numel() > size:
        unweighted = _normed(numbers.float(), size, kind, eps, None, None).flatten(1).to(numbers.dtype) * weight
        out = unweighted if bias is None else unweighted + bias
        return out.to(x.dtype)
    return _normed(numbers, size, kind, eps, weight, bias).flatten(1).to(x.dtype)


def _normed(x: Tensor, size: int, kind: str, eps: float, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if kind == "layer":
        return F.layer_norm(x, (size,), weight, bias, eps)
    return F.rms_norm(x, (size,), weight, eps)


def xielu_factors(weights: Tensor) -> Tensor:
    """The factors of positive and of negative numbers, [2] float32. weights: alpha_p and alpha_n."""
    return F.softplus(weights.float()) + torch.tensor([0.0, 0.5], device=weights.device)


def xielu(x: Tensor, weights: Tensor) -> Tensor:
    """arXiv 2411.13010: the integral of an ELU."""
    positive, negative = xielu_factors(weights).to(x.dtype)
    curve = torch.where(x > 0, positive * x * x, (torch.expm1(x.clamp(max=-1e-6)) - x) * negative)
    return curve + 0.5 * x


def activate(x: Tensor, act: Activation) -> Tensor:
    match act:
        case "silu":
            return F.silu(x)
        case "gelu":
            return F.gelu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "quick_gelu":
            return x * torch.sigmoid(1.702 * x)
        case "relu":
            return F.relu(x)
        case "relu2":
            return F.relu(x).square()
        case "tanh":
            return torch.tanh(x)
    raise AssertionError(f"{act} needs a gate")


def sparse(x: Tensor, whole: Tensor, share: float) -> Tensor:
    """What the numbers of a row exceed the quantile `share` of the row of `whole` by, if that is normally distributed;
    at least 0 (Gemma 3n)."""
    deviations = NormalDist().inv_cdf(share)
    return F.relu(x - whole.mean(-1, keepdim=True) - whole.std(-1, keepdim=True, unbiased=False) * deviations)


def glu(
    gate: Tensor, up: Tensor, act: Activation, *, limit: float = 0.0, sharpness: float = 1.702, gate_scale: float = 1.0
) -> Tensor:
    """act(gate · gate_scale) · up"""
    if gate_scale != 1.0:
        gate = gate * gate_scale
    if act == "swiglu_clamped":  # gpt-oss: (up + 1) · gate · sigmoid(sharpness · gate), both clamped
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (up + 1) * (gate * torch.sigmoid(gate * sharpness))
    return activate(gate, act) * up
