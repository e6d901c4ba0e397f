"""Attention over the paged cache in plain torch: the reference, and the backend for devices without our kernels.

It has every kind of attention. Keys and values are gathered page by page into buffers that are kept (the page faults of
a fresh large tensor cost more than the copy) and passed to `reference.attend`. Decode rows of similar length share one
padded call. A chunk of a prompt is computed in slices of `_SLICE` queries, which bounds the scores and skips keys that
no query of the slice sees. The plan of a step is made once per distinct reach and serves all its layers.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.ops import Ops
from ...kernels.reference import alibi_bias, attend, relative_bias
from ...kernels.states import StateRows, Tiles
from .base import AttentionParameters, AttentionStep
from .kv_cache import KvCache

_SLICE = 256  # queries of a prompt chunk computed at once
_GATHER_BYTES = 2 << 20  # limit of keys gathered for several rows at once, about a CPU cache; one row may take more


@dataclass(frozen=True)
class _Reach:
    """Layers of equal reach share a plan."""

    table: int
    window: int | None
    chunk: int | None
    limit: int  # blocks gathered at once

    def first_seen(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The first position that queries at these positions see."""
        if self.chunk is not None:
            return positions - positions % self.chunk
        return np.maximum(0, positions + 1 - self.window) if self.window is not None else np.zeros_like(positions)


@dataclass(frozen=True)
class _DecodeGroup:
    """The decode rows [first, last) and their keys."""

    first: int
    last: int
    pages: Tensor  # [rows · width] int64
    mask: Tensor  # [rows, 1, 1, width · block_size]
    keys: Tensor  # [rows, 1, width · block_size] positions
    queries: Tensor  # [rows, 1, 1] positions


@dataclass(frozen=True)
class _Chunk:
    """The tokens [first, last) of one row, whose keys are in `pages`; `past` of those keys precede the tokens."""

    first: int
    last: int
    pages: Tensor  # [blocks] int64
    start: int  # position of the first key
    past: int


class TorchPagedAttention:
    """Converts gathered keys and values if the cache's type is not that of the queries."""

    def __init__(self, *, cache: KvCache, ops: Ops, dtype: torch.dtype) -> None:
        """dtype: of the queries, keys and values that `forward` gets."""
        self._cache = cache
        self._ops = ops
        self._device = cache.device
        self._dtype = dtype
        self._buffers = [torch.empty(0, dtype=cache.shape.dtype, device=self._device) for _ in ("keys", "values")]
        self._triangles: dict[int | None, Tensor] = {}
        self._step: AttentionStep | None = None
        self._plans: dict[_Reach, tuple[list[_DecodeGroup], list[_Chunk]]] = {}
        self._cross: TorchPagedAttention | None = None  # made when a step needs it

    @property
    def cross(self) -> "TorchPagedAttention":
        assert self._cross is not None, "a model without an encoder"
        return self._cross

    @property
    def states(self) -> StateRows | None:
        assert self._step is not None, "states before begin"
        return self._step.states

    def state_tiles(self, first: int, count: int, per_tile: int) -> Tiles:
        return self._cache.state_tiles(first, count, per_tile)

    def begin(self, step: AttentionStep) -> None:
        self._step = step
        self._plans.clear()
        if step.cross is not None:
            self._cross = self._cross or TorchPagedAttention(cache=self._cache, ops=self._ops, dtype=self._dtype)
            self._cross.begin(step.cross)

    def forward(
        self, tile: int, query: Tensor, key: Tensor | None, value: Tensor | None, parameters: AttentionParameters
    ) -> Tensor:
        step = self._step
        assert step is not None, "forward before begin"
        k_pages, v_pages = self._cache.pages[tile]
        table = self._cache.tables[tile]
        if key is not None:
            self._ops.write_kv(key, value, k_pages, v_pages, step.slots[table])
        limit = max(1, _GATHER_BYTES // k_pages[0].nbytes)
        reach = _Reach(table, parameters.window, parameters.chunk, limit)
        if reach not in self._plans:
            self._plans[reach] = self._plan(step, reach)
        groups, chunks = self._plans[reach]
        kv_heads, dim = k_pages.shape[2:]
        value_dim = parameters.latent or v_pages.shape[3]
        grouped = query.reshape(query.shape[0], kv_heads, -1, dim)  # queries grouped by key head
        share = grouped.shape[2]
        sinks = parameters.sinks
        if sinks is not None:
            sinks = sinks.view(kv_heads, share, 1)
        out = torch.empty((*grouped.shape[:3], value_dim), dtype=query.dtype, device=query.device)
        for group in groups:
            rows = group.last - group.first
            keys, values = self._gather(tile, group.pages, parameters.latent)
            mask = group.mask
            if (bias := self._bias(parameters, group.keys, group.queries)) is not None:
                mask = mask + bias.view(rows, kv_heads, share, -1)
            out[group.first : group.last] = attend(
                grouped[group.first : group.last],
                keys.view(rows, -1, kv_heads, dim).transpose(1, 2),
                values.view(rows, -1, kv_heads, value_dim).transpose(1, 2),
                mask,
                parameters.scale,
                parameters.softcap,
                sinks,
            )
        for chunk in chunks:
            keys, values = self._gather(tile, chunk.pages, parameters.latent)
            # [kv_heads, queries per key head, positions, dim]: key heads are the batch, so keys need not be repeated.
            queries = grouped[chunk.first : chunk.last].permute(1, 2, 0, 3)
            keys, values = keys.transpose(0, 1).unsqueeze(1), values.transpose(0, 1).unsqueeze(1)
            begin, total = chunk.start + chunk.past, chunk.last - chunk.first
            for start, end in _slices(begin, total, parameters.chunk):
                seen_from = int(reach.first_seen(np.array([begin + start]))[0]) - chunk.start
                seen_to = chunk.past + end
                mask = self._triangle(end - start, seen_to - seen_from, parameters.window)
                positions = torch.arange(chunk.start + seen_from, begin + end, device=self._device)
                if (bias := self._bias(parameters, positions[None], positions[start - end :, None])) is not None:
                    mask = mask + bias.view(kv_heads, share, -1, bias.shape[-1])
                result = attend(
                    queries[:, :, start:end],
                    keys[:, :, seen_from:seen_to].expand(-1, share, -1, -1),
                    values[:, :, seen_from:seen_to].expand(-1, share, -1, -1),
                    mask,
                    parameters.scale,
                    parameters.softcap,
                    None if sinks is None else sinks[..., None],
                )
                out[chunk.first + start : chunk.first + end] = result.permute(2, 0, 1, 3)
        return out.view(*query.shape[:2], value_dim)

    def _gather(self, tile: int, pages: Tensor, latent: int) -> tuple[Tensor, Tensor]:
        """The keys and values of these pages, [pages · block_size, kv_heads, dim], in the kept buffers."""
        found = []
        for i, part in enumerate(self._cache.pages[tile][: 1 if latent else 2]):
            size = len(pages) * part[0].numel()
            if size > self._buffers[i].numel():
                self._buffers[i] = self._buffers[i].new_empty(max(size, 2 * self._buffers[i].numel()))
            into = self._buffers[i][:size].view(len(pages), *part.shape[1:])
            torch.index_select(part, 0, pages, out=into)
            found.append(into.flatten(0, 1).to(self._dtype))
        return found[0], found[0][..., :latent].contiguous() if latent else found[1]

    def _bias(self, parameters: AttentionParameters, keys: Tensor, queries: Tensor) -> Tensor | None:
        """What is added to the scores; None: nothing."""
        if (relative := parameters.relative) is not None:
            return relative_bias(relative, keys, queries).to(self._dtype).contiguous()
        if (alibi := parameters.alibi) is None:
            return None
        bias = alibi_bias(alibi.slopes, keys, queries, alibi.rounded)
        bias = bias * (parameters.scale if alibi.before_scale else 1.0)
        return bias.to(self._dtype).expand(*bias.shape[:-2], queries.shape[-2], -1)

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

    def _plan(self, step: AttentionStep, reach: _Reach) -> tuple[list[_DecodeGroup], list[_Chunk]]:
        size, tables = self._cache.block_size, step.tables[reach.table]
        first_seen = reach.first_seen(step.context_lens - step.query_lens)
        first_blocks = first_seen // size
        num_blocks = -(-step.context_lens // size) - first_blocks

        groups = []
        for first, last in _like_lengths(num_blocks[: step.num_decode].tolist(), reach.limit):
            width = int(num_blocks[first:last].max())
            columns = np.arange(width)
            picked = first_blocks[first:last, None] + columns
            pages = np.where(
                columns < num_blocks[first:last, None],
                np.take_along_axis(tables[first:last], np.minimum(picked, tables.shape[1] - 1), 1),
                self._cache.zero_page,
            )
            keys = first_blocks[first:last, None] * size + np.arange(width * size)
            contexts = step.context_lens[first:last, None]
            hidden = torch.from_numpy((keys >= contexts) | (keys < first_seen[first:last, None]))
            mask = torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(hidden, float("-inf"))
            groups.append(
                _DecodeGroup(
                    first,
                    last,
                    self._on_device(pages.reshape(-1)),
                    mask[:, None, None].to(self._device),
                    self._on_device(keys)[:, None],
                    self._on_device(contexts - 1)[:, None],
                )
            )

        chunks = []
        token = step.num_decode
        for row in range(step.num_decode, len(step.query_lens)):
            count, start = int(step.query_lens[row]), int(first_blocks[row])
            own = self._on_device(tables[row, start : start + int(num_blocks[row])])
            past = int(step.context_lens[row]) - count - start * size
            chunks.append(_Chunk(token, token + count, own, start * size, past))
            token += count
        return groups, chunks

    def _on_device(self, numbers: NDArray[np.integer]) -> Tensor:
        return torch.from_numpy(numbers.astype(np.int64)).to(self._device)


def _slices(begin: int, total: int, chunk: int | None) -> list[tuple[int, int]]:
    """Cuts the tokens [0, total), the first of which has the position `begin`, into slices of at most `_SLICE` tokens,
    each inside one chunk of positions."""
    slices = []
    start = 0
    while start < total:
        end = min(start + _SLICE, total)
        if chunk is not None:
            end = min(end, start + chunk - (begin + start) % chunk)
        slices.append((start, end))
        start = end
    return slices


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
