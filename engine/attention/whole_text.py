"""Attention of an encoder beside a decoder: each text sees all of itself, and only what the decoder reads of the result
is kept, in the cache's tiles of the reach `cross`.

An encoder computes whole texts in one pass, so nothing of its own layers needs a cache. Plain torch, text by text.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...kernels.ops import Ops
from ...kernels.reference import attend, relative_bias
from ...kernels.states import StateRows, Tiles
from .base import AttentionParameters, AttentionStep
from .kv_cache import KvCache


class WholeTextAttention:
    """The `AttentionBackend` of the pass over some texts, which follow each other."""

    states: StateRows | None = None

    def __init__(self, cache: KvCache, ops: Ops, lengths: Sequence[int], slots: dict[int, Tensor]) -> None:
        """lengths: tokens of each text. slots: table → where the keys and values of each token are stored."""
        self._cache, self._ops, self._lengths, self._slots = cache, ops, lengths, slots

    def begin(self, step: AttentionStep) -> None:
        raise AssertionError("the pass over texts is described when this is made")

    def state_tiles(self, first: int, count: int, per_tile: int) -> Tiles:
        raise AssertionError("an encoder has no recurrent states")

    def forward(
        self, tile: int, query: Tensor, key: Tensor | None, value: Tensor | None, parameters: AttentionParameters
    ) -> Tensor:
        """Two-sided attention of one layer, within each text."""
        assert key is not None and value is not None, "an encoder's layer reads its own keys"
        parts = []
        first = 0
        for length in self._lengths:
            q, k, v = (part[first : first + length].transpose(0, 1)[None] for part in (query, key, value))
            mask = torch.zeros((), dtype=query.dtype, device=query.device).expand(1, 1, length, length)
            if (relative := parameters.relative) is not None:
                places = torch.arange(length, device=query.device)
                mask = relative_bias(relative, places, places[:, None])[None].to(query.dtype)
            share = q.shape[1] // k.shape[1]
            k, v = (part.repeat_interleave(share, dim=1) if share > 1 else part for part in (k, v))
            parts.append(attend(q, k, v, mask, parameters.scale, parameters.softcap)[0].transpose(0, 1))
            first += length
        return torch.cat(parts)

    def store(self, tile: int, key: Tensor, value: Tensor) -> None:
        """Keys and values that the decoder reads. Both [tokens, kv_heads, dim]."""
        self._ops.write_kv(key, value, *self._cache.pages[tile], self._slots[self._cache.tables[tile]])
