"""Rotary position embedding: the table of cosines and sines of every position, and its scaled variants.

The frequencies equal those of transformers' `modeling_rope_utils`; a test compares them. "dynamic" equals "default"
here: it changes frequencies only beyond the declared context, which is never served. (transformers then changes them
with every token, for the new positions alone, and keeps them for later calls: the tokens would depend on earlier
requests.)

Longrope has other frequencies for sequences beyond the original length. Such a model has two regimes, and its tables
hold both: first the positions of short sequences, then all positions of long ones.
"""

import math

import torch
from torch import Tensor

from ..models.description import Rope


def inverse_frequencies(rope: Rope, regime: int = 0) -> Tensor:
    """Radians per position for each pair of the dimensions that turn: [dims / 2] float32 on the CPU. regime: 1 for
    sequences of more than `original` positions, which matters for longrope alone."""
    dim = rope.dims
    base = 1.0 / (rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim))
    is_long = regime == 1 and rope.kind == "longrope"
    divisors = rope.long_divisors if is_long else rope.divisors
    if divisors:
        base = base / torch.tensor(divisors, dtype=torch.float32, device="cpu")
    match rope.kind:
        case "default" | "dynamic" | "longrope":
            return base
        case "linear":
            return base / rope.factor
        case "llama3":
            return _llama3(base, rope)
        case "yarn":
            return _yarn(base, rope, dim)
        case "ntk_alpha":
            theta = rope.theta * rope.factor ** (dim / (dim - 2))
            found: Tensor = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim))
            return found
        case "proportional":
            turning = int(rope.high * dim // 2)
            return torch.where(torch.arange(dim // 2, device="cpu") < turning, base / rope.factor, torch.zeros(()))


def _llama3(base: Tensor, rope: Rope) -> Tensor:
    """Long wavelengths are stretched by the factor, short ones kept, and those in between interpolated."""
    wavelength = 2 * math.pi / base
    longest = rope.original / rope.low
    shortest = rope.original / rope.high
    share_kept = (rope.original / wavelength - rope.low) / (rope.high - rope.low)
    between = (1 - share_kept) * base / rope.factor + share_kept * base
    return torch.where(wavelength > longest, base / rope.factor, torch.where(wavelength < shortest, base, between))


def _yarn(base: Tensor, rope: Rope, dim: int) -> Tensor:
    """Dimensions that turn often within the original context are kept, slow ones are stretched (arXiv 2309.00071)."""

    def dimension_turning(turns: float) -> float:
        return dim * math.log(rope.original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = dimension_turning(rope.beta_fast), dimension_turning(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32, device="cpu") - first) / (last - first)).clamp(0, 1)
    return base / rope.factor * ramp + base * (1 - ramp)


class RotaryTable:
    """Cosines and sines of positions 0 … max_len - 1, in the model's dtype; with a `regime_limit`, before them those of
    that many positions of shorter sequences. The first half of the sines is negated, so that a rotation is two products
    without a negation."""

    def __init__(
        self, rope: Rope, *, max_len: int, dtype: torch.dtype, device: torch.device, regime_limit: int | None = None
    ) -> None:
        angles = torch.cat(
            [
                torch.arange(length, dtype=torch.float32, device="cpu")[:, None] * inverse_frequencies(rope, regime)
                for regime, length in enumerate(regime_lengths(max_len, regime_limit))
            ]
        )
        cos, sin = angles.cos() * rope.cos_scale, angles.sin() * rope.cos_scale
        self._cos = torch.cat((cos, cos), dim=-1).to(dtype).to(device).unsqueeze(1)
        self._sin = torch.cat((-sin, sin), dim=-1).to(dtype).to(device).unsqueeze(1)

    @property
    def num_bytes(self) -> int:
        return self._cos.nbytes + self._sin.nbytes

    @property
    def tables(self) -> tuple[Tensor, Tensor]:
        """cos, sin of all places: each [max_len, 1, dims], or more with two regimes."""
        return self._cos, self._sin

    def at(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """places: [tokens] int64, see `places_of` → cos, sin: each [tokens, 1, dims]."""
        return self._cos.index_select(0, places), self._sin.index_select(0, places)


def regime_lengths(max_len: int, regime_limit: int | None) -> list[int]:
    """How many positions a table holds of each regime, one after another."""
    return [max_len] if regime_limit is None or max_len <= regime_limit else [regime_limit, max_len]


def places_of(positions: Tensor, regimes: Tensor | None, regime_limit: int | None) -> Tensor:
    """Where the tables of a model hold the positions of tokens in these regimes (None: all 0). All [tokens] int64."""
    return positions if regimes is None or regime_limit is None else positions + regimes * regime_limit
