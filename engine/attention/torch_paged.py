"""Attention over the paged cache in plain torch: the reference, and the backend for devices without our kernels.

Keys and values are gathered block by block into buffers that are kept (the page faults of a fresh large tensor cost
more than the copy) and passed to scaled_dot_product_attention. Decode rows of similar length share one padded call. A
chunk of a prompt is computed in slices of `_SLICE` queries, which bounds the scores and skips keys that no query of the
slice sees. The plan of a step is made once per distinct window and serves all its layers.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...kernels.ops import Ops
from ...kernels.reference import attend
from .base import AttentionStep
from .kv_cache import KvCache

_SLICE = 256  # queries of a prompt chunk computed at once
_GATHER_BYTES = 2 << 20  # limit of keys gathered for several rows at once, about a CPU cache; one row may take more


@dataclass(frozen=True)
class _DecodeGroup:
    """The decode rows [first, last) and their keys."""

    first: int
    last: int
    blocks: Tensor | slice  # [rows · width] int64, or the consecutive blocks of a single row
    mask: Tensor  # [rows, 1, 1, width · block_size]


@dataclass(frozen=True)
class _Chunk:
    """The tokens [first, last) of one row, whose keys are in `blocks`; `past` of those keys precede the tokens."""

    first: int
    last: int
    blocks: Tensor | slice
    past: int


class TorchPagedAttention:
    """Converts gathered keys and values if the cache's type is not that of the queries."""

    def __init__(self, *, cache: KvCache, ops: Ops, dtype: torch.dtype) -> None:
        """dtype: of the queries, keys and values that `forward` gets."""
        self._cache = cache
        self._ops = ops
        keys = cache.pages[0][0]
        self._device = keys.device
        self._dtype = dtype
        self._block_bytes = keys[0].numel() * keys.element_size()
        self._key_buffer = torch.empty((0, *keys.shape[1:]), dtype=keys.dtype, device=keys.device)
        self._value_buffer = torch.empty_like(self._key_buffer)
        self._triangles: dict[int | None, Tensor] = {}
        self._step: AttentionStep | None = None
        self._plans: dict[int | None, tuple[list[_DecodeGroup], list[_Chunk]]] = {}

    def begin(self, step: AttentionStep) -> None:
        self._step = step
        self._plans.clear()
        if step.fresh_blocks is not None:
            self._cache.clear(step.fresh_blocks)

    def forward(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        assert self._step is not None, "forward before begin"
        k_pages, v_pages = self._cache.pages[layer]
        self._ops.write_kv(key, value, k_pages, v_pages, self._step.slots)
        plan = self._plans.get(window)
        if plan is None:
            plan = self._plans[window] = self._plan(self._step, window)
        groups, chunks = plan
        kv_heads, dim = key.shape[1:]
        grouped = query.view(query.shape[0], kv_heads, -1, dim)  # queries grouped by key head
        out = torch.empty(grouped.shape, dtype=query.dtype, device=query.device)
        for group in groups:
            rows = group.last - group.first
            keys, values = self._gather(k_pages, v_pages, group.blocks)
            out[group.first : group.last] = attend(
                grouped[group.first : group.last],
                keys.view(rows, -1, kv_heads, dim).transpose(1, 2),
                values.view(rows, -1, kv_heads, dim).transpose(1, 2),
                group.mask,
                scale,
                softcap,
            )
        for chunk in chunks:
            keys, values = self._gather(k_pages, v_pages, chunk.blocks)
            # [kv_heads, queries per key head, positions, dim]: key heads are the batch, so keys need not be repeated.
            queries = grouped[chunk.first : chunk.last].permute(1, 2, 0, 3)
            keys = keys.view(-1, kv_heads, dim).transpose(0, 1).unsqueeze(1)
            values = values.view(-1, kv_heads, dim).transpose(0, 1).unsqueeze(1)
            share = queries.shape[1]
            for start in range(0, chunk.last - chunk.first, _SLICE):
                end = min(start + _SLICE, chunk.last - chunk.first)
                seen_to = chunk.past + end
                seen_from = 0 if window is None else max(0, chunk.past + start + 1 - window)
                result = attend(
                    queries[:, :, start:end],
                    keys[:, :, seen_from:seen_to].expand(-1, share, -1, -1),
                    values[:, :, seen_from:seen_to].expand(-1, share, -1, -1),
                    self._triangle(end - start, seen_to - seen_from, window),
                    scale,
                    softcap,
                )
                out[chunk.first + start : chunk.first + end] = result.permute(2, 0, 1, 3)
        return out.view(query.shape)

    def _gather(self, k_pages: Tensor, v_pages: Tensor, blocks: Tensor | slice) -> tuple[Tensor, Tensor]:
        """The keys and values of these blocks: views if the blocks are consecutive, else copies in the kept buffers."""
        if isinstance(blocks, slice):
            return k_pages[blocks].to(self._dtype), v_pages[blocks].to(self._dtype)
        n = blocks.numel()
        if n > self._key_buffer.shape[0]:
            size = (max(n, 2 * self._key_buffer.shape[0]), *self._key_buffer.shape[1:])
            self._key_buffer = torch.empty(size, dtype=k_pages.dtype, device=self._device)
            self._value_buffer = torch.empty_like(self._key_buffer)
        keys, values = self._key_buffer[:n], self._value_buffer[:n]
        torch.index_select(k_pages, 0, blocks, out=keys)
        torch.index_select(v_pages, 0, blocks, out=values)
        return keys.to(self._dtype), values.to(self._dtype)

    def _triangle(self, queries: int, keys: int, window: int | None) -> Tensor:
        """The causal mask [queries, keys] of queries that are the last of the keys.

        Whether a query sees a key depends on their distance alone, so every mask is the lower right corner of the one
        that is kept for each window.
        """
        triangle = self._triangles.get(window)
        if triangle is None or triangle.shape[1] < keys:
            width = max(keys, 2 * triangle.shape[1] if triangle is not None else 512)
            behind = torch.arange(width - _SLICE, width, device=self._device)[:, None] - torch.arange(
                width, device=self._device
            )
            hidden = behind < 0 if window is None else (behind < 0) | (behind >= window)
            triangle = torch.zeros((_SLICE, width), dtype=self._dtype, device=self._device)
            self._triangles[window] = triangle.masked_fill_(hidden, float("-inf"))
        return triangle[_SLICE - queries :, triangle.shape[1] - keys :]

    def _plan(self, step: AttentionStep, window: int | None) -> tuple[list[_DecodeGroup], list[_Chunk]]:
        size = self._cache.block_size
        first_seen = step.context_lens - step.query_lens + 1 - (window or 0) if window else None
        first_blocks = np.maximum(first_seen, 0) // size if first_seen is not None else np.zeros_like(step.context_lens)
        num_blocks = -(-step.context_lens // size) - first_blocks

        groups = []
        limit = max(1, _GATHER_BYTES // self._block_bytes)
        for first, last in _like_lengths(num_blocks[: step.num_decode].tolist(), limit):
            width = int(num_blocks[first:last].max())
            columns = np.arange(width)
            picked = first_blocks[first:last, None] + columns
            table = np.where(
                columns < num_blocks[first:last, None],
                np.take_along_axis(step.block_table[first:last], np.minimum(picked, step.block_table.shape[1] - 1), 1),
                self._cache.zero_block,
            )
            context = torch.from_numpy(step.context_lens[first:last, None] - first_blocks[first:last, None] * size)
            keys = torch.arange(width * size)
            hidden = keys >= context
            if window is not None:
                hidden |= keys < context - window
            mask = torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(hidden, float("-inf"))
            groups.append(
                _DecodeGroup(first, last, self._block_ids(table.reshape(-1)), mask[:, None, None].to(self._device))
            )

        chunks = []
        token = step.num_decode
        for row in range(step.num_decode, len(step.query_lens)):
            count, start = int(step.query_lens[row]), int(first_blocks[row])
            blocks = step.block_table[row, start : start + int(num_blocks[row])]
            past = int(step.context_lens[row]) - count - start * size
            chunks.append(_Chunk(token, token + count, self._block_ids(blocks), past))
            token += count
        return groups, chunks

    def _block_ids(self, blocks: np.ndarray[tuple[int, ...], np.dtype[np.integer]]) -> Tensor | slice:
        start = int(blocks[0])
        if int(blocks[-1]) - start == len(blocks) - 1 and bool((np.diff(blocks) == 1).all()):
            return slice(start, start + len(blocks))
        return torch.from_numpy(blocks.astype(np.int64)).to(self._device)


def _like_lengths(lengths: list[int], limit: int) -> list[tuple[int, int]]:
    """Cuts rows into groups [first, last) to be padded to their longest.

    lengths: blocks per row, roughly ascending. A group holds at most `limit` padded blocks (a single row any number),
    and at most half of it is padding: beyond that, another call costs less.
    """
    groups = []
    last = len(lengths)
    while last > 0:
        first = last - 1
        longest = total = lengths[first]
        while first > 0:
            longest_then = max(longest, lengths[first - 1])
            padded = longest_then * (last - first + 1)
            if padded > limit or (padded > 2 * (total + lengths[first - 1]) and padded > 64):
                break
            longest = longest_then
            total += lengths[first - 1]
            first -= 1
        groups.append((first, last))
        last = first
    return groups
