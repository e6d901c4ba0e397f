"""Attention over the paged cache by the C kernels, which read it in place, block by block, without gathering."""

import ctypes

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.cpu.library import Kernels
from ...kernels.cpu.operations import dense
from ...kernels.cpu.structs import Pages, StepFields
from ...kernels.ops import Ops
from .base import AttentionStep
from .kv_cache import KvCache


class NativePagedAttention:
    """Queries are float32; keys and values have the cache's type. A query's result has the same bits whether it is
    computed alone, in a chunk of any size, or beside other rows."""

    def __init__(self, *, cache: KvCache, ops: Ops, kernels: Kernels, rounds: bool = False) -> None:
        """rounds: queries and softmax weights are rounded to bfloat16, if that is the cache's type; faster where the
        processor multiplies bfloat16."""
        self._cache = cache
        self._rounds = rounds
        self._write_kv = ops.write_kv
        self._kernels = kernels
        self._pages: dict[tuple[int, int, float, int | None, float | None], tuple[Pages, int]] = {}
        self._slots: Tensor | None = None
        self._table: NDArray[np.int32] = np.zeros((0, 0), np.int32)
        self._contexts: NDArray[np.int64] = np.zeros(0, np.int64)
        self._counts = self._contexts

    def begin(self, step: AttentionStep) -> None:
        self._slots = step.slots
        self._table = np.ascontiguousarray(step.block_table)
        self._contexts = np.ascontiguousarray(step.context_lens)
        self._counts = np.ascontiguousarray(step.query_lens)
        self._kernels.threads()

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
        what = (layer, query.shape[1], scale, window, softcap)
        if what not in self._pages:
            pages = self.pages(*what)
            self._pages[what] = pages, ctypes.addressof(pages)
        _, pages_at = self._pages[what]
        out = torch.empty(query.shape)
        self._kernels.attend(
            pages_at, query.data_ptr(), query.stride(0), self._table.ctypes.data, self._table.shape[1],
            self._contexts.ctypes.data, self._counts.ctypes.data, out.data_ptr(), len(self._counts),
        )  # fmt: skip
        return out

    def pages(self, layer: int, heads: int, scale: float, window: int | None, softcap: float | None) -> Pages:
        """A layer's pages, as the C kernels get them."""
        keys, values = self._cache.pages[layer]
        return Pages(
            keys.data_ptr(), values.data_ptr(), heads, *keys.shape[2:], self._cache.block_size,
            window or 0, scale, softcap or 0.0, keys.dtype == torch.bfloat16, self._rounds,
        )  # fmt: skip

    def step_fields(self) -> StepFields:
        """The step, as the C decoder gets it; the caller fills in the tokens."""
        assert self._slots is not None, "step_fields before begin"
        return StepFields(
            slots=self._slots.data_ptr(),
            table=self._table.ctypes.data,
            contexts=self._contexts.ctypes.data,
            counts=self._counts.ctypes.data,
            tokens=self._slots.shape[0],
            rows=len(self._contexts),
            table_stride=self._table.shape[1],
        )
