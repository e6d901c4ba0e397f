"""The operations of recurrent mixers in plain torch: the specification of `kernels/cpu/scans.h`, on any device.

A scan takes one position after another in float32. All tensors of activations are [tokens, …], the rows of a step one
after the other, and may be views of wider ones; results are float32. States lie in pages, which are changed in place.

Functions such as exp are called for one position at a time: torch's vectors and the remainders of its loops round them
differently, so the bits of a position would depend on how many there are.
"""

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .lanes import LANES
from .states import StateRows, Tiles

Act = Literal["none", "silu", "sigmoid"]
ACTS: dict[Act, Callable[[Tensor], Tensor]] = {"none": lambda x: x, "silu": F.silu, "sigmoid": torch.sigmoid}


def conv(x: Tensor, weight: Tensor, bias: Tensor | None, act: Act, rows: StateRows, tiles: Tiles) -> Tensor:
    """Depthwise and causal: act(Σ weight[j] · x[t - taps + 1 + j] + bias). x: [tokens, channels]; weight: [taps,
    channels]; bias: [channels]. State: the last taps - 1 inputs, [taps - 1, channels], one unit. Result as x."""
    taps, channels = weight.shape
    out = torch.empty_like(x, dtype=torch.float32)
    past = x.new_zeros((taps - 1, channels))
    for segment in rows.segments():
        if segment.read is not None:
            past = tiles.load(rows.memory, segment.read, (1, taps - 1, channels))[0]
        known = torch.cat((past, x[segment.first : segment.end].float()))
        num = segment.end - segment.first
        total = known[:num] * weight[0]
        for j in range(1, taps):
            total = total + known[j : j + num] * weight[j]
        for t in range(num):
            out[segment.first + t] = ACTS[act](total[t] if bias is None else total[t] + bias)
        past = known[num:]
        tiles.store(rows.memory, segment.written, past[None])
    return out


def scan_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    rows: StateRows,
    tiles: Tiles,
    beta_scale: float = 1.0,
) -> Tensor:
    """The gated delta rule. For each value head, with q and k divided by their length (and q by the root of its size),
    b = beta_scale · sigmoid(beta) and g = exp(a · softplus(decay + dt_bias)): S ← g · S; S ← S + k ⊗ (b · (v - k S));
    out = q S.

    q, k: [tokens, key heads, key dim], a key head for some adjacent value heads; v: [tokens, value heads, value dim];
    beta: [tokens, value heads]; decay, dt_bias: [tokens, value heads] and [value heads], or for each key [tokens, value
    heads, key dim] and [value heads, key dim]; a: [value heads], -exp(A_log). State: [value heads, key dim, value dim].
    Result as v.
    """
    heads, keys, values = v.shape[1], q.shape[2], v.shape[2]
    share = heads // q.shape[1]
    rate = a if decay.dim() == 2 else a[:, None]

    def step(state: Tensor, t: int) -> tuple[Tensor, Tensor]:
        query = (_unit(q[t]) * keys**-0.5).repeat_interleave(share, dim=0)[:, :, None]
        key = _unit(k[t]).repeat_interleave(share, dim=0)[:, :, None]
        g = torch.exp(rate * F.softplus(decay[t].float() + dt_bias))
        state = state * g.view(heads, -1, 1)
        b = torch.sigmoid(beta[t].float()) * beta_scale
        change = (v[t].float() - (state * key).sum(dim=1)) * b[:, None]
        state = state + key * change[:, None]
        return state, (state * query).sum(dim=1)

    return _scan(step, torch.empty_like(v, dtype=torch.float32), (heads, keys, values), rows, tiles)


def scan_mamba1(
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    a: Tensor,
    dt_bias: Tensor | None,
    d: Tensor | None,
    rows: StateRows,
    tiles: Tiles,
) -> Tensor:
    """For each channel, with dt ← softplus(dt + dt_bias): S[n] ← exp(a[n] · dt) · S[n] + dt · b[n] · x; out = Σ S[n] ·
    c[n] + d · x.

    x, dt: [tokens, channels]; b, c: [tokens, n]; a: [groups, n, 16], `states.grouped` of -exp(A_log); dt_bias, d:
    [channels]. Channels come in groups of 16, the last one padded. State: [groups, n, 16]. Result as x.
    """
    channels = x.shape[1]

    def lanes(numbers: Tensor) -> Tensor:
        return F.pad(numbers, (0, -channels % LANES)).view(-1, 1, LANES)

    def step(state: Tensor, t: int) -> tuple[Tensor, Tensor]:
        rate = lanes(_rate(dt[t], dt_bias))
        state = state * torch.exp(a * rate) + rate * b[t].float()[:, None] * lanes(x[t].float())
        result = (state * c[t].float()[:, None]).sum(dim=1).view(-1)[:channels]
        return state, result if d is None else result + x[t] * d

    return _scan(step, torch.empty_like(x, dtype=torch.float32), tuple(a.shape), rows, tiles)


def scan_mamba2(
    x: Tensor,
    b: Tensor,
    c: Tensor,
    dt: Tensor,
    a: Tensor,
    dt_bias: Tensor | None,
    d: Tensor | None,
    dt_limits: tuple[float, float],
    rows: StateRows,
    tiles: Tiles,
) -> Tensor:
    """For each head, with dt ← softplus(dt + dt_bias) within dt_limits: S ← exp(a · dt) · S + (dt · b) ⊗ x; out = c S +
    d · x.

    x: [tokens, heads, head dim]; b, c: [tokens, groups, n], a group for some adjacent heads; dt: [tokens, heads]; a (it
    is -exp(A_log)), dt_bias, d: [heads]. State: [heads, n, head dim]. Result as x.
    """
    heads, dim = x.shape[1:]
    share = heads // b.shape[1]

    def step(state: Tensor, t: int) -> tuple[Tensor, Tensor]:
        rate = _rate(dt[t], dt_bias).clamp(*dt_limits)
        key = b[t].float().repeat_interleave(share, dim=0) * rate[:, None]
        query = c[t].float().repeat_interleave(share, dim=0)
        state, result = _linear(state, torch.exp(rate * a), query, key, x[t])
        return state, result if d is None else result + x[t] * d[:, None]

    return _scan(step, torch.empty_like(x, dtype=torch.float32), (heads, b.shape[2], dim), rows, tiles)


def scan_lightning(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rows: StateRows, tiles: Tiles) -> Tensor:
    """For each head: S ← decay · S + k ⊗ v; out = q S. q, k, v: [tokens, heads, dim]; decay: [heads]. State: [heads,
    dim, dim]. Result as v."""
    heads, dim = v.shape[1:]

    def step(state: Tensor, t: int) -> tuple[Tensor, Tensor]:
        return _linear(state, decay, q[t].float(), k[t].float(), v[t])

    return _scan(step, torch.empty_like(v, dtype=torch.float32), (heads, dim, dim), rows, tiles)


def gated_norm(
    x: Tensor, z: Tensor, weight: Tensor | None, size: int, eps: float, act: Act, gate_first: bool
) -> Tensor:
    """norm(x) · act(z), or with gate_first norm(x · act(z)). norm(x) = x / sqrt(mean(x²) + eps) · weight over groups of
    `size` numbers; the weight is repeated over a token's groups, and without one there is no norm. x, z: [tokens,
    width]; weight: [size] or [width]. Result as x."""
    x, gate = x.float(), ACTS[act](z.float())
    if weight is None:
        return x * gate
    groups = (x * gate if gate_first else x).view(x.shape[0], x.shape[1] // size, size)
    normed = groups * torch.rsqrt(groups.square().mean(dim=-1, keepdim=True) + eps) * weight.view(-1, size)
    return normed.view(x.shape) if gate_first else normed.view(x.shape) * gate


def _unit(x: Tensor) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + 1e-6)


def _rate(dt: Tensor, bias: Tensor | None) -> Tensor:
    return F.softplus(dt.float() if bias is None else dt.float() + bias)


def _linear(state: Tensor, decay: Tensor, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """decay: [heads]; query, key: [heads, n]; value: [heads, dim]; state: [heads, n, dim]."""
    state = state * decay[:, None, None] + key[:, :, None] * value[:, None].float()
    return state, (state * query[:, :, None]).sum(dim=1)


def _scan(
    step: Callable[[Tensor, int], tuple[Tensor, Tensor]],
    out: Tensor,
    shape: tuple[int, ...],
    rows: StateRows,
    tiles: Tiles,
) -> Tensor:
    """step: (state, token) → (the state after it, its result)."""
    state = out.new_zeros(shape)
    for segment in rows.segments():
        if segment.read is not None:
            state = tiles.load(rows.memory, segment.read, shape)
        for t in range(segment.first, segment.end):
            state, out[t] = step(state, t)
        tiles.store(rows.memory, segment.written, state)
    return out
