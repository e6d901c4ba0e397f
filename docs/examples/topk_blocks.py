"""Attention of decode rows over the k best KV blocks: an example of a plan extension.

    PYTHONPATH=docs/examples pagewire serve MODEL --extension topk_blocks:TopkBlocks,share=0.25,least=8

For every decode row the core half decides how many blocks it may read: `share` of its context, but at least `least`.
The worker half scores each block by an upper bound of the products of the row's query with the block's keys, and
attends to the best. It is exact where k covers all blocks, and an approximation elsewhere.

This file is the core half and imports no torch; `topk_attention.py` is the worker half.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pagewire.engine.extension import Options
from pagewire.errors import ConfigError

if TYPE_CHECKING:
    from pagewire.engine.attention.base import AttentionBackend
    from pagewire.engine.attention.kv_cache import KvCache

BLOCK_SIZE = 16


class TopkBlocks:
    """The factories of the core half and the worker half."""

    @staticmethod
    def core(options: Options) -> BlockBudget:
        if unknown := sorted(options.keys() - {"share", "least"}):
            raise ConfigError(f"topk_blocks has no option {unknown[0]!r}; it has share and least.")
        try:
            share, least = float(options.get("share", "0.25")), int(options.get("least", "8"))
        except ValueError as error:
            raise ConfigError(f"topk_blocks: {error}.") from None
        if not (0 < share <= 1 and least >= 1):
            raise ConfigError("topk_blocks: share is a number above 0 and up to 1, least a number of blocks.")
        return BlockBudget(share, least)

    @staticmethod
    def wrap_attention(options: Options, backend: AttentionBackend, cache: KvCache) -> AttentionBackend:
        from topk_attention import TopkAttention

        return TopkAttention(backend, cache)


class BlockBudget:
    """The core half: says how many blocks each row of a plan may read."""

    def __init__(self, share: float, least: int) -> None:
        self._share = share
        self._least = least

    def extend(self, step: int, rids: Sequence[int], counts: Sequence[int], starts: Sequence[int]) -> bytes:
        """How many blocks each row may read, as int32."""
        return array(
            "i", [max(self._least, int(self._share * (start // BLOCK_SIZE + 1))) for start in starts]
        ).tobytes()
