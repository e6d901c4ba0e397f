"""Attention over the paged cache by the C kernels, which read it in place, page by page, without gathering."""

import ctypes
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.cpu.library import Kernels
from ...kernels.cpu.limits import attention_lacks
from ...kernels.cpu.operations import dense, page_stride
from ...kernels.cpu.structs import Pages, StepFields
from ...kernels.ops import Ops, reference_ops
from ...kernels.states import StateRows, Tiles
from .base import AttentionParameters, AttentionStep
from .kv_cache import KvCache
from .torch_paged import TorchPagedAttention


class NativePagedAttention:
    """Queries are float32; keys and values have the cache's type. A query's result has the same bits whether it is
    computed alone, in a chunk of any size, or beside other rows. Plain torch computes the layers that the kernels
    lack."""

    def __init__(self, *, cache: KvCache, ops: Ops, kernels: Kernels, rounds: bool = False) -> None:
        """rounds: queries and softmax weights are rounded to bfloat16, if that is the cache's type; faster where the
        processor multiplies bfloat16."""
        self._cache = cache
        self._rounds = rounds
        self._write_kv = ops.write_kv
        self._kernels = kernels
        self._reference = TorchPagedAttention(cache=cache, ops=reference_ops(), dtype=torch.float32)
        self._layers: dict[tuple[int, AttentionParameters], tuple[Pages, int] | None] = {}  # None: the reference's
        self._slopes: list[Tensor] = []  # to which `Pages` point
        self._slots: Tensor | None = None
        self._tables: NDArray[np.int32] = np.zeros((0, 0, 0), np.int32)
        self._contexts: NDArray[np.int64] = np.zeros(0, np.int64)
        self._counts = self._contexts
        self._make_cross = partial(NativePagedAttention, cache=cache, ops=ops, kernels=kernels, rounds=rounds)
        self._cross: NativePagedAttention | None = None  # made when a step needs it

    @property
    def cross(self) -> "NativePagedAttention":
        assert self._cross is not None, "a model without an encoder"
        return self._cross

    @property
    def states(self) -> StateRows | None:
        return self._reference.states

    def state_tiles(self, first: int, count: int, per_tile: int) -> Tiles:
        return self._cache.state_tiles(first, count, per_tile)

    def begin(self, step: AttentionStep) -> None:
        self._slots = step.slots
        self._tables = np.ascontiguousarray(step.tables)
        self._contexts = np.ascontiguousarray(step.context_lens)
        self._counts = np.ascontiguousarray(step.query_lens)
        self._reference.begin(step)
        self._kernels.threads()
        if step.cross is not None:
            self._cross = self._cross or self._make_cross()
            self._cross.begin(step.cross)

    def lacks(self, tile: int, parameters: AttentionParameters) -> str | None:
        """Why the kernels cannot compute such a layer; None: they can."""
        keys, values = self._cache.pages[tile]
        if parameters.relative is not None:
            return "relative positions"
        return attention_lacks(keys.shape[3], keys.shape[3] if parameters.latent else values.shape[3])

    def forward(
        self, tile: int, query: Tensor, key: Tensor | None, value: Tensor | None, parameters: AttentionParameters
    ) -> Tensor:
        assert self._slots is not None, "forward before begin"
        about = (tile, parameters)
        if about not in self._layers:
            self._layers[about] = None
            if self.lacks(tile, parameters) is None:
                pages = self.pages(tile, query.shape[1], parameters)
                self._layers[about] = pages, ctypes.addressof(pages)
        layer = self._layers[about]
        if layer is None:
            return self._reference.forward(tile, query, key, value, parameters)
        table = self._cache.tables[tile]
        if key is not None:
            self._write_kv(key, value, *self._cache.pages[tile], self._slots[table])
        query = dense(query)
        out = torch.empty((*query.shape[:2], layer[0].value_dim))
        self._kernels.attend(
            layer[1], query.data_ptr(), query.stride(0), self._tables[table].ctypes.data, self._tables.shape[2],
            self._contexts.ctypes.data, self._counts.ctypes.data, out.data_ptr(), len(self._counts),
        )  # fmt: skip
        return out[:, :, : parameters.latent] if parameters.latent else out

    def pages(self, tile: int, heads: int, parameters: AttentionParameters) -> Pages:
        """A layer's pages and parameters, as the C kernels get them; both must stay alive. The kernels must not lack
        the parameters."""
        keys, values = self._cache.pages[tile]
        sinks, alibi = parameters.sinks, parameters.alibi
        assert sinks is None or (sinks.dtype == torch.float32 and sinks.is_contiguous()), sinks
        pages = Pages(
            keys=keys.data_ptr(), values=(keys if parameters.latent else values).data_ptr(), heads=heads,
            kv_heads=keys.shape[2], dim=keys.shape[3], block_size=self._cache.block_size,
            window=parameters.window or 0, chunk=parameters.chunk or 0, scale=parameters.scale,
            softcap=parameters.softcap or 0.0, bf16=keys.dtype == torch.bfloat16, rounds=self._rounds,
            sinks=None if sinks is None else sinks.data_ptr(), page_stride=page_stride(keys),
            value_dim=(keys if parameters.latent else values).shape[3],
        )  # fmt: skip
        if alibi is not None:
            slopes = (alibi.slopes.bfloat16() if alibi.rounded else alibi.slopes).float().contiguous()
            self._slopes.append(slopes)
            pages.slopes, pages.rounds_slopes = slopes.data_ptr(), alibi.rounded
            pages.slope_scale = parameters.scale if alibi.before_scale else 1.0
        return pages

    def table(self, tile: int) -> int:
        """Which block table, and slots, a tile has."""
        return self._cache.tables[tile]

    def step_fields(self) -> StepFields:
        """The step, as the C program gets it; the caller fills in the tokens."""
        assert self._slots is not None, "step_fields before begin"
        return StepFields(
            slots=self._slots.data_ptr(),
            tables=self._tables.ctypes.data,
            contexts=self._contexts.ctypes.data,
            counts=self._counts.ctypes.data,
            tokens=self._slots.shape[1],
            rows=len(self._contexts),
            table_stride=self._tables.shape[2],
        )
