"""The operations of recurrent mixers: brings the columns and weights of a program into the shapes that scans take."""

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from ...kernels.reference_scans import Act
from ...kernels.states import Tiles, grouped
from ..models.program import (
    Convolve,
    GatedNormalize,
    ScanDelta,
    ScanLightning,
    ScanMamba1,
    ScanMamba2,
    Vector,
)
from .weights import Weights

Mixer = Convolve | ScanDelta | ScanMamba1 | ScanMamba2 | ScanLightning | GatedNormalize
MIXERS: tuple[type[Mixer], ...] = (Convolve, ScanDelta, ScanMamba1, ScanMamba2, ScanLightning, GatedNormalize)


Rows = TypeVar("Rows")  # how an implementation of the scans takes the rows of a step
Rows_co = TypeVar("Rows_co", covariant=True)
Rows_contra = TypeVar("Rows_contra", contravariant=True)


class StatePlaces(Protocol[Rows_co]):
    """Where the states of a step are; an `AttentionBackend` knows it."""

    @property
    def states(self) -> Rows_co | None: ...
    def state_tiles(self, first: int, count: int, per_tile: int) -> Tiles: ...


class Scans(Protocol[Rows_contra]):
    """The functions of `kernels/reference_scans.py`, by one of its implementations."""

    @property
    def conv(self) -> Callable[[Tensor, Tensor, Tensor | None, Act, Rows_contra, Tiles], Tensor]: ...
    @property
    def scan_delta(
        self,
    ) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Rows_contra, Tiles, float], Tensor]: ...
    @property
    def scan_mamba1(
        self,
    ) -> Callable[
        [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Rows_contra, Tiles], Tensor
    ]: ...
    @property
    def scan_mamba2(
        self,
    ) -> Callable[
        [
            Tensor,
            Tensor,
            Tensor,
            Tensor,
            Tensor,
            Tensor | None,
            Tensor | None,
            tuple[float, float],
            Rows_contra,
            Tiles,
        ],
        Tensor,
    ]: ...
    @property
    def scan_lightning(self) -> Callable[[Tensor, Tensor, Tensor, Tensor, Rows_contra, Tiles], Tensor]: ...
    @property
    def gated_norm(self) -> Callable[[Tensor, Tensor, Tensor | None, int, float, Act, bool], Tensor]: ...


class Mixers(Generic[Rows]):
    def __init__(self, weights: Weights, device: torch.device, scans: Scans[Rows]) -> None:
        self.scans = scans
        self._weights, self._device = weights, device
        self._arranged: dict[str, Tensor] = {}

    def run(self, args: Mixer, ins: list[Tensor], places: StatePlaces[Rows]) -> Tensor:
        """ins, and the result: [tokens, width]."""
        if isinstance(args, GatedNormalize):
            weight, size, eps = self.norm(args, ins[0].shape[1])
            return self.scans.gated_norm(ins[0], ins[1], weight, size, eps, args.act, args.gate_first).to(ins[0].dtype)
        states, rows = args.states, places.states
        assert rows is not None, "a step without states"
        tiles = places.state_tiles(states.first, states.count, states.per_tile)
        return self._scan(args, ins, rows, tiles).flatten(1).to(ins[0].dtype)

    def _scan(self, args: Mixer, ins: list[Tensor], rows: Rows, tiles: Tiles) -> Tensor:
        vector, scans = self._weights.vector, self.scans
        match args:
            case Convolve():
                return scans.conv(ins[0], self.taps(args.weight), vector(args.bias), args.act, rows, tiles)
            case ScanDelta():
                q, k = (_heads(part, args.key_heads) for part in ins[:2])
                v, beta, decay, dt_bias = _heads(ins[2], args.value_heads), ins[3], ins[4], vector(args.dt_bias)
                a = vector(args.a)
                assert a is not None and dt_bias is not None
                if args.decay_per == "channel":
                    decay, dt_bias = _heads(decay, args.value_heads), dt_bias.view(args.value_heads, args.key_dim)
                return scans.scan_delta(q, k, v, beta, decay, a, dt_bias, rows, tiles, args.beta_scale)
            case ScanMamba1():
                x, dt, b, c = ins
                a = self.groups(args.a)
                return scans.scan_mamba1(x, dt, b, c, a, vector(args.dt_bias), vector(args.d), rows, tiles)
            case ScanMamba2():
                x, b, c = (_heads(x, n) for x, n in zip(ins[:3], (args.heads, args.groups, args.groups), strict=True))
                a = vector(args.a)
                assert a is not None
                limits = args.dt_limits
                return scans.scan_mamba2(x, b, c, ins[3], a, vector(args.dt_bias), vector(args.d), limits, rows, tiles)
            case ScanLightning():
                q, k, v = (_heads(part, args.heads) for part in ins)
                return scans.scan_lightning(q, k, v, self.decays(args), rows, tiles)
        raise AssertionError(f"{type(args).__name__} has no state")

    # Weights as the scans take them.

    def vector(self, vector: Vector) -> Tensor:
        return self._weights.vectors[vector.key]

    def taps(self, weight: Vector) -> Tensor:
        """Of a convolution: [taps, channels]."""
        return self._arrange(weight.key, lambda: self._weights.vectors[weight.key].t().contiguous())

    def groups(self, a: Vector) -> Tensor:
        """Of Mamba 1: [groups, state_dim, 16]."""
        return self._arrange(a.key, lambda: grouped(self._weights.vectors[a.key]))

    def decays(self, args: ScanLightning) -> Tensor:
        key = f"decays {args.states.first}"
        return self._arrange(key, lambda: torch.tensor(args.decay, device=self._device))

    def norm(self, args: GatedNormalize, width: int) -> tuple[Tensor | None, int, float]:
        """(weight, size, eps); without a weight nothing is normed."""
        if args.norm is None:
            return None, width, 0.0
        weight, size = self._weights.vector(args.weight), args.norm.size
        return self._ones(size) if weight is None else weight, size, args.norm.eps

    def _ones(self, size: int) -> Tensor:
        return self._arrange(f"ones {size}", lambda: torch.ones(size, device=self._device))

    def _arrange(self, key: str, make: Callable[[], Tensor]) -> Tensor:
        if key not in self._arranged:
            self._arranged[key] = make()
        return self._arranged[key]


def _heads(x: Tensor, heads: int) -> Tensor:
    return x.view(x.shape[0], heads, -1)
