"""The network of the hybrid demo model: gated delta rule in most layers, attention in the others (Qwen3.5).

The names of the parameters are those of `Qwen3_5ForCausalLM` below `model.`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from .network import FeedForward, Shape, rotate

CHUNK = 64  # positions that are computed together


@dataclass(frozen=True)
class HybridShape(Shape):
    """Sizes of the network; the defaults give about two million parameters."""

    intermediate: int = 448
    norm_epsilon: float = 1e-6
    interval: int = 4  # every so many layers one has attention
    delta_heads: int = 4
    delta_keys: int = 32
    delta_values: int = 64
    taps: int = 4

    @property
    def rotary(self) -> int:
        return self.head // 4

    def make_layer(self, index: int) -> nn.Module:
        return HybridLayer(self, has_attention=(index + 1) % self.interval == 0)

    def make_norm(self) -> nn.Module:
        return ShiftedNorm(self.hidden, self.norm_epsilon)

    def settings(self) -> dict[str, object]:
        pairs = self.rotary // 2
        rope = {
            "rope_type": "default",
            "rope_theta": self.rope_theta,
            "partial_rotary_factor": 0.25,
            "mrope_section": [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3],  # of text all three are one position
            "mrope_interleaved": True,
        }
        return {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            "rope_parameters": rope,
            "full_attention_interval": self.interval,
            "linear_num_key_heads": self.delta_heads,
            "linear_num_value_heads": self.delta_heads,
            "linear_key_head_dim": self.delta_keys,
            "linear_value_head_dim": self.delta_values,
            "linear_conv_kernel_dim": self.taps,
        }


class ShiftedNorm(nn.Module):
    """RMS norm with the factor 1 + weight."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), 1 + self.weight, self.epsilon)


class GatedNorm(nn.Module):
    """RMS norm, times silu of a gate."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), self.weight, self.epsilon) * functional.silu(gate)


class GatedAttention(nn.Module):
    """Attention whose output is multiplied by sigmoid of a gate."""

    def __init__(self, shape: HybridShape) -> None:
        super().__init__()
        self.shape = shape
        queries, keys = shape.query_heads * shape.head, shape.key_heads * shape.head
        self.q_proj = nn.Linear(shape.hidden, 2 * queries, bias=False)
        self.k_proj = nn.Linear(shape.hidden, keys, bias=False)
        self.v_proj = nn.Linear(shape.hidden, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden, bias=False)
        self.q_norm = ShiftedNorm(shape.head, shape.norm_epsilon)
        self.k_norm = ShiftedNorm(shape.head, shape.norm_epsilon)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        shape = self.shape
        q, gate = self.q_proj(x).view(rows, tokens, shape.query_heads, 2 * shape.head).chunk(2, -1)
        k = self.k_proj(x).view(rows, tokens, shape.key_heads, shape.head)
        v = self.v_proj(x).view(rows, tokens, shape.key_heads, shape.head).transpose(1, 2)
        q = _rotate_first(self.q_norm(q).transpose(1, 2), cos, sin)
        k = _rotate_first(self.k_norm(k).transpose(1, 2), cos, sin)
        group = shape.query_heads // shape.key_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        mixed: Tensor = self.o_proj((out * gate.sigmoid()).reshape(rows, tokens, -1))
        return mixed


def _rotate_first(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned = cos.shape[-1]
    return torch.cat((rotate(x[..., :turned], cos, sin), x[..., turned:]), -1)


class Convolution(nn.Module):
    """Depthwise and causal."""

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(channels, 1, taps) / math.sqrt(taps))

    def forward(self, x: Tensor) -> Tensor:
        """x: [rows, tokens, channels]."""
        taps = self.weight.shape[-1]
        padded, tokens = functional.pad(x, (0, 0, taps - 1, 0)), x.shape[1]
        out = torch.zeros_like(x)
        for tap in range(taps):  # faster than a convolution whose groups have one channel each
            out = out + padded[:, tap : tap + tokens] * self.weight[:, 0, tap]
        return out


class GatedDeltaNet(nn.Module):
    """The gated delta rule (arXiv 2412.06464)."""

    def __init__(self, shape: HybridShape) -> None:
        super().__init__()
        self.shape = shape
        keys, values = shape.delta_heads * shape.delta_keys, shape.delta_heads * shape.delta_values
        self.in_proj_qkv = nn.Linear(shape.hidden, 2 * keys + values, bias=False)
        self.in_proj_z = nn.Linear(shape.hidden, values, bias=False)
        self.in_proj_b = nn.Linear(shape.hidden, shape.delta_heads, bias=False)
        self.in_proj_a = nn.Linear(shape.hidden, shape.delta_heads, bias=False)
        self.conv1d = Convolution(2 * keys + values, shape.taps)
        # The decay of a step begins between exp(-16 / 10) and exp(-1 / 1000): some heads forget at once, others late.
        steps = torch.exp(torch.empty(shape.delta_heads).uniform_(math.log(1e-3), math.log(1e-1)))
        self.dt_bias = nn.Parameter(steps + torch.log(-torch.expm1(-steps)))
        self.A_log = nn.Parameter(torch.empty(shape.delta_heads).uniform_(1, 16).log())
        self.norm = GatedNorm(shape.delta_values, shape.norm_epsilon)
        self.out_proj = nn.Linear(values, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        shape = self.shape
        heads, keys = shape.delta_heads, shape.delta_heads * shape.delta_keys
        mixed = functional.silu(self.conv1d(self.in_proj_qkv(x)))
        parts = (mixed[..., :keys], mixed[..., keys : 2 * keys], mixed[..., 2 * keys :])
        q, k, v = (part.reshape(rows, tokens, heads, -1).transpose(1, 2) for part in parts)
        decay = -self.A_log.exp() * functional.softplus(self.in_proj_a(x).float() + self.dt_bias)
        beta = self.in_proj_b(x).float().sigmoid()
        out = delta_rule(_unit(q) / math.sqrt(shape.delta_keys), _unit(k), v.float(), decay.mT, beta.mT)
        z = self.in_proj_z(x).view(rows, tokens, heads, -1)
        result: Tensor = self.out_proj(self.norm(out.transpose(1, 2), z).reshape(rows, tokens, -1))
        return result


def _unit(x: Tensor) -> Tensor:
    x = x.float()
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """The outputs of the gated delta rule from a state of zeros, computed in chunks (section 3 of the paper).

    q, k: [rows, heads, tokens, keys]; v: [rows, heads, tokens, values]; decay, as its logarithm, and beta: [rows,
    heads, tokens]; all float32 → [rows, heads, tokens, values].
    """
    tokens = q.shape[2]
    rest = -tokens % CHUNK
    chunks = (*q.shape[:2], -1, CHUNK)
    q, k, v = (functional.pad(part, (0, 0, 0, rest)).view(*chunks, part.shape[-1]) for part in (q, k, v))
    decay, beta = (functional.pad(part, (0, rest)).view(chunks) for part in (decay, beta))
    total = decay.cumsum(-1)
    between = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    weighted = k * beta[..., None]
    # What each position adds to the state depends on what those before it have added: a triangular system.
    system = (weighted @ k.mT * between).tril(-1) + torch.eye(CHUNK)
    right = torch.cat((v * beta[..., None], weighted * total.exp()[..., None]), -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    added, read = solved[..., : v.shape[-1]], solved[..., v.shape[-1] :]
    scores = q @ k.mT * between
    from_state = q * total.exp()[..., None]
    to_state = (k * (total[..., -1:] - total).exp()[..., None]).mT
    kept = total[..., -1].exp()[..., None, None]
    state = q.new_zeros(*q.shape[:2], k.shape[-1], v.shape[-1])
    outs = []
    for i in range(q.shape[2]):
        new = added[:, :, i] - read[:, :, i] @ state
        outs.append(from_state[:, :, i] @ state + scores[:, :, i] @ new)
        state = state * kept[:, :, i] + to_state[:, :, i] @ new
    return torch.cat(outs, 2)[:, :, :tokens]


class HybridLayer(nn.Module):
    def __init__(self, shape: HybridShape, *, has_attention: bool) -> None:
        super().__init__()
        self.has_attention = has_attention
        if has_attention:
            self.self_attn = GatedAttention(shape)
        else:
            self.linear_attn = GatedDeltaNet(shape)
        self.mlp = FeedForward(shape)
        self.input_layernorm = ShiftedNorm(shape.hidden, shape.norm_epsilon)
        self.post_attention_layernorm = ShiftedNorm(shape.hidden, shape.norm_epsilon)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.input_layernorm(x)
        x = x + (self.self_attn(y, cos, sin) if self.has_attention else self.linear_attn(y))
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out
