"""The host tier's worker half: one tensor of slots in host memory, and copies between it and the KV cache."""

import mmap
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from msgspec import msgpack

from ...ipc.messages import bytes_to_ids
from ..attention.kv_cache import KvCache, advise
from .base import ConnectorFacts
from .block_copy import BlockCopier
from .host_meta import NO_SLOT, HostMeta

_CHUNKS_AT_ONCE = 4  # of `BlockCopier.chunk` blocks


class _Chunk(NamedTuple):
    rid: int
    slots: list[int]
    blocks: list[int]


class HostWorker:
    """The core half reuses a slot that is being loaded only after it knows that the load is over."""

    def __init__(self, *, num_slots: int, facts: ConnectorFacts) -> None:
        self._num_slots = num_slots
        self._facts = facts
        self._decoder = msgpack.Decoder(HostMeta)
        self._meta: HostMeta | None = None
        self._chunks: deque[_Chunk] = deque()  # not copied yet
        self._left: dict[int, int] = {}  # rid → blocks that are not copied yet
        self._failed: dict[int, set[int]] = {}  # rid → blocks that cannot be filled
        self._failed_of_named: set[int] = set()
        self._num_loaded = 0
        self._load_ms = 0.0

    @property
    def num_pending(self) -> int:
        return len(self._left)

    def register_kv_caches(self, cache: KvCache) -> None:
        """The system provides memory only as slots come into use. It is not pinned: copies from and to the device go
        through tensors of chunks, and torch would round it up to a power of two."""
        self._copier = BlockCopier(cache)
        assert self._copier.block_bytes == self._facts.block_bytes, (self._copier.block_bytes, self._facts)
        self._slots = torch.empty(self._num_slots, self._facts.block_bytes, dtype=torch.uint8)

    def bind_connector_metadata(self, metadata: bytes) -> None:
        self._meta = self._decoder.decode(metadata)

    def start_load_kv(self) -> None:
        meta, self._meta = self._meta, None
        if meta is None:
            return
        slots = self._slots.view(torch.int64)  # copying words is several times as fast as copying bytes
        to = torch.tensor(bytes_to_ids(meta.save_slots), dtype=torch.int64)
        start = 0
        for rows in self._copier.read(bytes_to_ids(meta.save_blocks)):
            slots.index_copy_(0, to[start : start + len(rows)], rows.view(torch.int64))
            start += len(rows)
        self._give_back(sorted(bytes_to_ids(meta.returned)))
        for load in meta.loads:
            slots_of, blocks = bytes_to_ids(load.slots), bytes_to_ids(load.blocks)
            there = [i for i, slot in enumerate(slots_of) if slot != NO_SLOT]
            self._failed.setdefault(load.rid, set()).update(b for b, s in zip(blocks, slots_of, strict=True) if s < 0)
            self._left[load.rid] = len(there)
            for first in range(0, len(there), self._copier.chunk):
                part = there[first : first + self._copier.chunk]
                self._chunks.append(_Chunk(load.rid, [slots_of[i] for i in part], [blocks[i] for i in part]))

    def _give_back(self, slots: Sequence[int]) -> None:
        """Lets the system have the memory of these slots, in runs of neighbours."""
        first = 0
        for end in range(1, len(slots) + 1):
            if end == len(slots) or slots[end] != slots[end - 1] + 1:
                advise(self._slots[slots[first] : slots[end - 1] + 1], mmap.MADV_DONTNEED)
                first = end

    def wait_for_layer_load(self, layer: int) -> None:
        pass

    def save_kv_layer(self, layer: int) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_finished(self) -> tuple[set[int], set[int]]:
        """Copies a few chunks of the loads, so that a step is not held up for long."""
        started = time.perf_counter()
        for chunk in [self._chunks.popleft() for _ in range(min(_CHUNKS_AT_ONCE, len(self._chunks)))]:
            rows = self._slots.view(torch.int64).index_select(0, torch.tensor(chunk.slots))
            self._copier.write(chunk.blocks, rows.view(torch.uint8))
            self._left[chunk.rid] -= len(chunk.blocks)
            self._num_loaded += len(chunk.blocks)
        loaded = {rid for rid, left in self._left.items() if left == 0}
        if self._left:
            self._load_ms += (time.perf_counter() - started) * 1e3
        self._failed_of_named = set()
        for rid in loaded:
            del self._left[rid]
            self._failed_of_named |= self._failed.pop(rid)
        return set(), loaded

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_of_named = self._failed_of_named, set()
        return failed

    def take_load_cost(self) -> tuple[int, float]:
        cost = (self._num_loaded, self._load_ms)
        self._num_loaded, self._load_ms = 0, 0.0
        return cost

    def close(self) -> None:
        pass
