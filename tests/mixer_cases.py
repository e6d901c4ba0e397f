"""Scans and convolutions of many shapes, as functions of a step's activations and its states."""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pagewire.kernels.reference_scans import Act
from pagewire.kernels.states import StateRows, Tiles, grouped

if TYPE_CHECKING:
    from pagewire.kernels.cpu.scans import NativeScans

    Scans = ModuleType | NativeScans  # `reference_scans`, or what has its functions

Call = Callable[["Scans", Tensor, StateRows, Tiles], Tensor]


@dataclass(frozen=True)
class Case:
    """An operation with its weights. `run` takes activations [tokens, width], of which it reads views."""

    width: int
    units: int
    unit_shape: tuple[int, ...]
    run: Call

    @property
    def unit_bytes(self) -> int:
        return 4 * torch.Size(self.unit_shape).numel()


def heads_of(x: Tensor, dim: int) -> Tensor:
    return x.view(x.shape[0], x.shape[1] // dim, dim)


def conv(channels: int, taps: int, act: Act, has_bias: bool) -> Case:
    weight, bias = torch.randn(taps, channels), torch.randn(channels) if has_bias else None

    def run(scans: "Scans", x: Tensor, rows: StateRows, tiles: Tiles) -> Tensor:
        out: Tensor = scans.conv(x[:, 5:], weight, bias, act, rows, tiles)
        return out

    return Case(channels + 5, 1, (taps - 1, channels), run)


def delta(
    key_heads: int, value_heads: int, key_dim: int, value_dim: int, per_channel: bool, beta_scale: float = 1.0
) -> Case:
    keys, values, channels = key_heads * key_dim, value_heads * value_dim, key_dim if per_channel else 1
    a = -torch.rand(value_heads) * 3
    dt_bias = torch.randn((value_heads, key_dim) if per_channel else (value_heads,))

    def run(scans: "Scans", x: Tensor, rows: StateRows, tiles: Tiles) -> Tensor:
        q, k, v, beta, decay, _ = torch.split(x, [keys, keys, values, value_heads, value_heads * channels, 3], dim=1)
        q, k, v = heads_of(q, key_dim), heads_of(k, key_dim), heads_of(v, value_dim)
        decay = heads_of(decay, key_dim) if per_channel else decay
        out: Tensor = scans.scan_delta(q, k, v, beta, decay, a, dt_bias, rows, tiles, beta_scale)
        return out

    width = 2 * keys + values + value_heads * (1 + channels) + 3
    return Case(width, value_heads, (key_dim, value_dim), run)


def mamba1(channels: int, n: int, has_extras: bool = True) -> Case:
    a = grouped(-torch.rand(channels, n) * 4)
    dt_bias, d = (torch.randn(channels), torch.randn(channels)) if has_extras else (None, None)

    def run(scans: "Scans", x: Tensor, rows: StateRows, tiles: Tiles) -> Tensor:
        x, dt, b, c = torch.split(x, [channels, channels, n, n], dim=1)
        out: Tensor = scans.scan_mamba1(x, dt, b, c, a, dt_bias, d, rows, tiles)
        return out

    return Case(2 * channels + 2 * n, a.shape[0], (n, 16), run)


def mamba2(heads: int, groups: int, dim: int, n: int, limits: tuple[float, float], has_extras: bool = True) -> Case:
    a = -torch.rand(heads) * 4
    dt_bias, d = (torch.randn(heads), torch.randn(heads)) if has_extras else (None, None)

    def run(scans: "Scans", x: Tensor, rows: StateRows, tiles: Tiles) -> Tensor:
        x, b, c, dt = torch.split(x, [heads * dim, groups * n, groups * n, heads], dim=1)
        x, b, c = heads_of(x, dim), heads_of(b, n), heads_of(c, n)
        out: Tensor = scans.scan_mamba2(x, b, c, dt, a, dt_bias, d, limits, rows, tiles)
        return out

    return Case(heads * (dim + 1) + 2 * groups * n, heads, (n, dim), run)


def lightning(heads: int, dim: int) -> Case:
    decay = torch.exp(-torch.rand(heads))

    def run(scans: "Scans", x: Tensor, rows: StateRows, tiles: Tiles) -> Tensor:
        q, k, v = (heads_of(part, dim) for part in x.chunk(3, dim=1))
        out: Tensor = scans.scan_lightning(q, k, v, decay, rows, tiles)
        return out

    return Case(3 * heads * dim, heads, (dim, dim), run)


ENDLESS = (0.0, float("inf"))
CASES: dict[str, Callable[[], Case]] = {
    "conv, 4 taps, silu": lambda: conv(70, 4, "silu", True),
    "conv, 3 taps": lambda: conv(320, 3, "none", False),
    "conv, many channels": lambda: conv(5000, 4, "silu", False),
    "delta, odd sizes": lambda: delta(2, 6, 23, 41, False),
    "delta, small values": lambda: delta(1, 2, 16, 7, False),
    "delta, negative eigenvalues": lambda: delta(2, 4, 12, 24, False, beta_scale=2.0),
    "delta, by channel": lambda: delta(3, 3, 32, 32, True),
    "delta, large": lambda: delta(2, 4, 128, 128, False),
    "delta, large by channel": lambda: delta(2, 2, 128, 128, True),
    "mamba1": lambda: mamba1(70, 16),
    "mamba1, small states": lambda: mamba1(32, 5, has_extras=False),
    "mamba1, many channels": lambda: mamba1(1024, 16),
    "mamba2, odd sizes": lambda: mamba2(6, 2, 22, 19, ENDLESS),
    "mamba2, limits": lambda: mamba2(4, 1, 64, 128, (0.3, 1.5)),
    "mamba2, bare": lambda: mamba2(2, 2, 48, 16, ENDLESS, has_extras=False),
    "lightning, odd sizes": lambda: lightning(3, 21),
    "lightning, large": lambda: lightning(2, 96),
}
