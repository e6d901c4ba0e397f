"""Attention over the paged cache by the C kernels, which read it in place, block by block, without gathering."""

import ctypes

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.cpu.library import LANES, MAX_ROWS, Kernels
from ...kernels.cpu.operations import dense
from ...kernels.cpu.structs import Pages, StepFields
from ...kernels.ops import Ops
from .base import AttentionStep
from .kv_cache import KvCache

_FEW = 6  # tokens of a row, such as draft tokens: reading the keys once for each is cheaper than packing them
_WORK_BYTES = 256 << 20  # limit of all threads' packed keys and values of prompts; one thread may take more


class NativePagedAttention:
    """Queries are float32; keys and values have the cache's type."""

    def __init__(self, *, cache: KvCache, ops: Ops, kernels: Kernels, is_deterministic: bool = False) -> None:
        """is_deterministic: all rows use the kernel for prompts, whose sums do not depend on how many tokens come at
        once; decode rows get slower."""
        self._cache = cache
        self._is_deterministic = is_deterministic
        self._write_kv = ops.write_kv
        self._kernels = kernels
        self._pages: dict[tuple[int, int, float, int | None, float | None], tuple[Pages, int]] = {}
        self._work = torch.empty(0)
        self._slots: Tensor | None = None
        self._table: NDArray[np.int32] = np.zeros((0, 0), np.int32)
        self._contexts: NDArray[np.int64] = np.zeros(0, np.int64)
        self._counts = self._contexts
        self._num_decode = self._score_stride = self._decode_floats = self._work_stride = self._num_works = 0

    def begin(self, step: AttentionStep) -> None:
        counts, num_decode = step.query_lens, 0 if self._is_deterministic else step.num_decode
        table, contexts = step.block_table, step.context_lens
        max_few = 0 if self._is_deterministic else _FEW
        few = num_decode + int(np.argmax(np.append(counts[num_decode:], max_few + 1) > max_few))
        if few > num_decode:  # the next rows have few tokens: each token is computed like a decode row
            rows = np.concatenate((np.repeat(np.arange(few), counts[:few]), np.arange(few, len(counts))))
            num_decode = int(counts[:few].sum())
            after = np.cumsum(counts[:few])[rows[:num_decode]] - 1 - np.arange(num_decode)  # of the row
            table, contexts, counts = table[rows], contexts[rows], counts[rows]
            contexts[:num_decode] -= after
            counts[:num_decode] = 1
        self._slots = step.slots
        self._table = np.ascontiguousarray(table)
        self._contexts = np.ascontiguousarray(contexts)
        self._counts = np.ascontiguousarray(counts)
        self._num_decode = num_decode
        self._score_stride = -(-int(contexts[:num_decode].max(initial=0)) // LANES) * LANES
        threads = self._kernels.threads()
        self._decode_floats = threads * self._score_stride
        n = -(-int(contexts[num_decode:].max(initial=0)) // LANES) * LANES
        dim = self._cache.pages[0][0].shape[3]
        self._work_stride = (2 * dim + 2 * MAX_ROWS) * n + 2 * MAX_ROWS * dim
        self._num_works = min(threads, max(1, _WORK_BYTES // (4 * self._work_stride)))

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
            pages = self.pages(layer, heads, scale, window, softcap)
            self._pages[what] = pages, ctypes.addressof(pages)
        _, pages_at = self._pages[what]
        out = torch.empty((tokens, heads, dim))
        at, query_at, stride, work = out.data_ptr(), query.data_ptr(), query.stride(0), self._scratch(heads)
        if self._num_decode:
            self._kernels.decode(
                pages_at, query_at, stride, self._table.ctypes.data, self._table.shape[1],
                self._contexts.ctypes.data, at, work, self._score_stride, self._num_decode,
            )  # fmt: skip
        first = self._num_decode  # tokens and rows so far, which are equal
        if len(self._counts) > first:
            self._kernels.extend(
                pages_at, query_at + 4 * first * stride, stride,
                self._table.ctypes.data + first * self._table.strides[0], self._table.shape[1],
                self._contexts.ctypes.data + 8 * first, self._counts.ctypes.data + 8 * first,
                at + 4 * first * heads * dim, work, self._work_stride, self._num_works, len(self._counts) - first,
            )  # fmt: skip
        return out

    def pages(self, layer: int, heads: int, scale: float, window: int | None, softcap: float | None) -> Pages:
        """A layer's pages, as the C kernels get them."""
        keys, values = self._cache.pages[layer]
        return Pages(
            keys.data_ptr(), values.data_ptr(), heads, *keys.shape[2:], self._cache.block_size,
            window or 0, scale, softcap or 0.0, keys.dtype == torch.bfloat16,
        )  # fmt: skip

    def step_fields(self, heads: int) -> StepFields:
        """The step, as the C decoder gets it; the caller fills in the tokens."""
        assert self._slots is not None, "step_fields before begin"
        return StepFields(
            slots=self._slots.data_ptr(),
            table=self._table.ctypes.data,
            contexts=self._contexts.ctypes.data,
            counts=self._counts.ctypes.data,
            tokens=self._slots.shape[0],
            rows=len(self._contexts),
            num_decode=self._num_decode,
            table_stride=self._table.shape[1],
            score_stride=self._score_stride,
            work_stride=self._work_stride,
            num_works=self._num_works,
            attention=self._scratch(heads),
        )

    def _scratch(self, heads: int) -> int:
        """Address of the kernels' scratch memory."""
        size = max(heads * self._decode_floats, self._num_works * self._work_stride)
        if size > self._work.numel():
            self._work = torch.empty(size)
        return self._work.data_ptr()
