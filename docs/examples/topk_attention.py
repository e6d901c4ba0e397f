"""The worker half of `topk_blocks`: a backend that shortens the block tables of decode rows, layer by layer.

The summary of a block is the smallest and the largest value of each dimension of its keys. A query's product with any
key of the block is at most Σ max(q · smallest, q · largest), which is the block's score. The scores of all heads are
combined by their maximum, so that a block is kept if any head may need it. A row's last block is always kept. The
engine's own backend then computes attention over the shortened tables. Steps, layers and rows whose tables are not
shortened it computes as usual.

Summaries are computed again at every step from the pages, which keeps the example short and always right; a fast
implementation would store them beside the pages and update those of the blocks that a step writes to.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pagewire.engine.attention.base import AttentionBackend, AttentionParameters, AttentionStep
from pagewire.engine.attention.kv_cache import KvCache
from pagewire.kernels.states import StateRows, Tiles


class TopkAttention:
    """An attention backend that reads only the chosen blocks."""

    def __init__(self, inner: AttentionBackend, cache: KvCache) -> None:
        self._inner = inner
        self._cache = cache
        self._step: AttentionStep | None = None
        self._budget = np.zeros(0, np.int32)  # blocks that each row of the step may read

    @property
    def states(self) -> StateRows | None:
        """Recurrent layers are computed as usual."""
        return self._inner.states

    def state_tiles(self, first: int, count: int, per_tile: int) -> Tiles:
        return self._inner.state_tiles(first, count, per_tile)

    def begin(self, step: AttentionStep) -> None:
        """Reads the core half's bytes, which are in the plan's order; `step.order` maps the step's rows to it."""
        self._step = step
        self._budget = np.frombuffer(step.extension, "<i4")[step.order]
        self._inner.begin(step)

    def forward(
        self, tile: int, query: Tensor, key: Tensor | None, value: Tensor | None, parameters: AttentionParameters
    ) -> Tensor:
        """Computes every row over its whole table, which also writes the keys; then again, over fewer blocks, the rows
        that are to leave some out."""
        assert self._step is not None, "forward before begin"
        out = self._inner.forward(tile, query, key, value, parameters)
        step, size = self._step, self._cache.block_size
        num_blocks = -(-step.context_lens[: step.num_decode] // size)
        rows = np.flatnonzero(num_blocks > self._budget[: step.num_decode])
        if len(rows) and parameters.window is None:
            tables = [self._best_blocks(tile, query[row], int(row)) for row in rows]
            short = self._shortened(step, rows, tables)
            self._inner.begin(short)
            order = torch.from_numpy(rows[short.order]).to(query.device)
            out[order] = self._inner.forward(tile, query[order], None, None, parameters)  # the keys are written
            self._inner.begin(step)  # for the next layer
        return out

    def _best_blocks(self, tile: int, query: Tensor, row: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        """The blocks that a row keeps, in the order of its context. query: [heads, dim]."""
        assert self._step is not None
        size, context = self._cache.block_size, int(self._step.context_lens[row])
        table = self._step.tables[0, row, : -(-context // size)]
        full = torch.from_numpy(table[:-1].astype(np.int64)).to(query.device)
        keys = self._cache.pages[tile][0][full]  # [blocks, block_size, kv_heads, dim]
        grouped = query.view(keys.shape[2], -1, keys.shape[3])  # [kv_heads, heads per key head, dim]
        smallest, largest = keys.amin(1)[:, :, None], keys.amax(1)[:, :, None]
        bound = torch.maximum(grouped * smallest, grouped * largest).sum(-1)  # [blocks, kv_heads, heads per key head]
        kept = bound.flatten(1).amax(1).topk(int(self._budget[row]) - 1).indices.sort().values
        return np.append(table[kept.cpu().numpy()], table[-1])

    def _shortened(
        self, step: AttentionStep, rows: np.ndarray[tuple[int], np.dtype[np.intp]], tables: list[np.ndarray]
    ) -> AttentionStep:
        """A step of these decode rows alone, over these blocks. Positions do not matter any more: keys are rotated
        already, and a decode row sees all blocks of its table."""
        size = self._cache.block_size
        lens = np.array(
            [len(t) * size - -int(step.context_lens[row]) % size for row, t in zip(rows, tables, strict=True)]
        )
        order = np.argsort(lens, kind="stable")  # decode rows come in ascending order of context
        short = np.zeros((1, len(rows), max(map(len, tables))), np.int32)
        for place, i in enumerate(order):
            short[0, place, : len(tables[i])] = tables[i]
        return AttentionStep(
            num_decode=len(rows),
            context_lens=lens[order],
            query_lens=np.ones(len(rows), np.int64),
            tables=short,
            slots=step.slots[:, torch.from_numpy(rows[order]).to(step.slots.device)],
            order=order,
        )
