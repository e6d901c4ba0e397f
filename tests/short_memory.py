"""A plan extension whose attention runs out of memory in every Nth call: `short_memory:ShortMemory,every=N`, and with
`where=worker-1` in the process of that rank only; `where=worker` is the process of the test."""

from collections.abc import Sequence

import torch
from setproctitle import getproctitle

from pagewire.engine.attention.base import AttentionBackend, AttentionParameters, AttentionStep
from pagewire.engine.attention.kv_cache import KvCache
from pagewire.engine.extension import Options
from pagewire.kernels.states import StateRows, Tiles


class ShortMemory:
    calls = 0  # calls of attention since a test reset the count

    @staticmethod
    def core(options: Options) -> "EmptyExtension":
        return EmptyExtension()

    @staticmethod
    def wrap_attention(options: Options, backend: AttentionBackend, cache: KvCache) -> "ShortAttention":
        every, here = int(options["every"]), getproctitle().rpartition(" ")[2]
        is_short = options.get("where") in (None, here if here.startswith("worker") else "worker")
        return ShortAttention(backend, every=every if is_short else 10**9, cache=cache)


class EmptyExtension:
    def extend(self, step: int, rids: Sequence[int], counts: Sequence[int], starts: Sequence[int]) -> bytes:
        return b""


class ShortAttention:
    """Overwrites its KV cache with garbage and raises, in every Nth call."""

    def __init__(self, inner: AttentionBackend, *, every: int, cache: KvCache) -> None:
        self._inner = inner
        self._every = every
        self._cache = cache

    @property
    def states(self) -> StateRows | None:
        return self._inner.states

    def state_tiles(self, first: int, count: int, per_tile: int) -> Tiles:
        return self._inner.state_tiles(first, count, per_tile)

    def begin(self, step: AttentionStep) -> None:
        self._step = step
        self._inner.begin(step)

    def forward(
        self,
        tile: int,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        parameters: AttentionParameters,
    ) -> torch.Tensor:
        ShortMemory.calls += 1
        if ShortMemory.calls % self._every == 0:
            slots, size = self._step.slots[self._cache.tables[tile]], self._cache.block_size
            for pages in self._cache.pages[tile]:
                pages[slots // size, slots % size] = 1e4
            raise MemoryError
        return self._inner.forward(tile, query, key, value, parameters)
