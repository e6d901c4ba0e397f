"""Attention over the paged cache by the C kernels: read where it lies, block by block, and nothing is gathered."""

import ctypes

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.cpu.native import LANES, MOST_ROWS, Kernels, Pages, dense
from ...kernels.ops import Ops
from ..cache.kv_cache import KvCache
from .base import AttentionStep


class NativePagedAttention:
    """See `AttentionBackend`. Queries are float32, keys and values of the cache's type."""

    def __init__(self, *, cache: KvCache, ops: Ops, kernels: Kernels) -> None:
        self._cache = cache
        self._write_kv = ops.write_kv
        self._kernels = kernels
        self._pages: dict[tuple[int, int, float, int | None, float | None], tuple[Pages, int]] = {}
        self._work = torch.empty(0)
        self._slots: Tensor | None = None
        self._table: NDArray[np.int32] = np.zeros((0, 0), np.int32)
        self._contexts: NDArray[np.int64] = np.zeros(0, np.int64)
        self._chunks: list[tuple[int, int, int, int]] = []  # address of the table's row, context, first token, count
        self._num_decode = self._score_stride = 0

    def begin(self, step: AttentionStep) -> None:
        self._slots = step.slots
        self._table = np.ascontiguousarray(step.block_table)
        self._contexts = np.ascontiguousarray(step.context_lens)
        self._num_decode = step.num_decode
        longest = int(self._contexts[: step.num_decode].max(initial=0))
        self._score_stride = -(-longest // LANES) * LANES
        threads = torch.get_num_threads()
        room = threads * 4 * self._score_stride
        self._chunks = []
        token = step.num_decode
        for row in range(step.num_decode, len(step.query_lens)):
            count, context = int(step.query_lens[row]), int(self._contexts[row])
            self._chunks.append((self._table.ctypes.data + row * self._table.strides[0], context, token, count))
            token += count
            n = -(-context // LANES) * LANES
            dim = self._cache.pages[0][0].shape[3]
            room = max(room, 2 * n * dim + threads * MOST_ROWS * (2 * n + 2 * dim))
        if room > self._work.numel():
            self._work = torch.empty(room)

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
        assert self._slots is not None, "forward before begin"
        k_pages, v_pages = self._cache.pages[layer]
        self._write_kv(key, value, k_pages, v_pages, self._slots)
        query = dense(query)
        tokens, heads, dim = query.shape
        what = (layer, heads, scale, window, softcap)
        if what not in self._pages:
            pages = Pages(
                *(k_pages.data_ptr(), v_pages.data_ptr(), heads, *k_pages.shape[2:], self._cache.block_size),
                *(window or 0, scale, softcap or 0.0, k_pages.dtype == torch.bfloat16),
            )
            self._pages[what] = pages, ctypes.addressof(pages)
        _, pages_at = self._pages[what]
        out = torch.empty((tokens, heads, dim))
        at, query_at, stride, work = out.data_ptr(), query.data_ptr(), query.stride(0), self._work.data_ptr()
        if self._num_decode:
            self._kernels.decode(
                *(pages_at, query_at, stride, self._table.ctypes.data, self._table.shape[1]),
                *(self._contexts.ctypes.data, at, work, self._score_stride, self._num_decode),
            )
        for table_at, context, token, count in self._chunks:
            self._kernels.extend(
                *(pages_at, query_at + 4 * token * stride, stride, table_at, context, count),
                *(at + 4 * token * heads * dim, work),
            )
        return out
