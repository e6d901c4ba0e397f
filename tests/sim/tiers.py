"""The core half of a KV connector that uses everything the protocol allows.

It defers its answers, keeps the blocks of ended requests until they are read, and drops the blocks stored longest ago.
"""

from collections.abc import Sequence
from random import Random

from msgspec import Struct, msgpack

from pagewire.engine.core.kv_connector import Evicted, KvEvent, KvRequest
from pagewire.ipc.messages import TierSnapshot, Transferred

NAME = "free"


class Load(Struct, array_like=True):
    """The blocks to fill for a request, and their keys."""

    rid: int
    keys: list[bytes]
    blocks: list[int]


class Metadata(Struct, array_like=True):
    """The worker half's tasks with a plan, in this order."""

    dropped: list[bytes]
    saves: list[tuple[int, bytes]]  # (block, key), to be read before the plan's pass
    loads: list[Load]
    sends: list[tuple[int, list[int], list[bytes]]]  # (ended rid, blocks, keys), to be read at any later time


_encode = msgpack.Encoder().encode


class FreeTier:
    def __init__(
        self,
        *,
        capacity: int,
        keeps_evicted: bool,
        saves_ended: bool,
        delays_sends: bool,
        defer_rate: float,
        block_size: int,
        rng: Random,
    ) -> None:
        """`keeps_evicted`: stores blocks evicted from the device's prefix cache. `saves_ended`: stores the full blocks
        of ended requests, which are read only after the plan if `delays_sends`. `defer_rate`: how likely the answer
        to a query is not known yet."""
        self._capacity = capacity
        self._keeps_evicted = keeps_evicted
        self._saves_ended = saves_ended
        self._delays_sends = delays_sends
        self._defer_rate = defer_rate
        self._block_size = block_size
        self._rng = rng
        self._index: dict[bytes, int] = {}  # key → loads that read it, in the order of eviction
        self._loading: dict[int, list[bytes]] = {}
        self._metadata = Metadata([], [], [], [])
        self._events: list[KvEvent] = []

    def get_num_new_matched_tokens(self, request: KvRequest, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._rng.random() < self._defer_rate:
            return None, True
        size = self._block_size
        keys = request.block_keys((len(request.ids) - 1) // size, size)[num_computed_tokens // size :]
        num = next((i for i, key in enumerate(keys) if key not in self._index), len(keys))
        return num * size, True

    def update_state_after_alloc(self, request: KvRequest, block_ids: Sequence[int], num_external_tokens: int) -> None:
        num = num_external_tokens // self._block_size
        keys = request.block_keys(len(block_ids), self._block_size)[-num:]
        for key in keys:
            self._index[key] = self._index.pop(key) + 1
        self._loading[request.rid] = keys
        self._metadata.loads.append(Load(request.rid, keys, list(block_ids[-num:])))

    def build_connector_meta(self) -> bytes:
        metadata, self._metadata = self._metadata, Metadata([], [], [], [])
        is_empty = not (metadata.saves or metadata.loads or metadata.sends or metadata.dropped)
        return b"" if is_empty else _encode(metadata)

    def request_finished(self, request: KvRequest, block_ids: Sequence[int]) -> bool:
        num = min(request.num_computed, len(request.ids)) // self._block_size
        keys = request.block_keys(num, self._block_size)
        new = [(block, key) for block, key in zip(block_ids, keys, strict=False) if key not in self._index]
        if not self._saves_ended or not new or not self._make_room(len(new)):
            return False
        self._store([key for _, key in new])
        if self._delays_sends:
            self._metadata.sends.append((request.rid, [block for block, _ in new], [key for _, key in new]))
            return True
        self._metadata.saves += new
        return False

    def blocks_evicted(self, evicted: Sequence[Evicted]) -> None:
        for entry in evicted:
            if self._keeps_evicted and entry.key not in self._index and self._make_room(1):
                self._store([entry.key])
                self._metadata.saves.append((entry.block, entry.key))

    def update_connector_output(self, output: Transferred) -> None:
        for rid in output.loaded:
            for key in self._loading.pop(rid, ()):  # nothing, if another tier loads for it
                self._index[key] -= 1

    def take_events(self) -> list[KvEvent]:
        events, self._events = self._events, []
        return events

    def tiers(self) -> tuple[TierSnapshot, ...]:
        return (TierSnapshot(NAME, len(self._index), self._capacity, 0, 0, 0, 0),)

    def reset(self) -> None:
        self._metadata = Metadata([], [], [], [])
        self._loading.clear()
        self._add_event(False, list(self._index))
        self._index.clear()

    def close(self) -> None:
        pass

    @property
    def keys(self) -> set[bytes]:
        """The keys of all blocks in the index."""
        return set(self._index)

    def _make_room(self, num: int) -> bool:
        while len(self._index) + num > self._capacity:
            victim = next((key for key, readers in self._index.items() if not readers), None)
            if victim is None:
                return False
            del self._index[victim]
            self._metadata.dropped.append(victim)
            self._add_event(False, [victim])
        return True

    def _store(self, keys: list[bytes]) -> None:
        self._index.update(dict.fromkeys(keys, 0))
        self._add_event(True, keys)

    def _add_event(self, stored: bool, keys: list[bytes]) -> None:
        if keys:
            self._events.append(KvEvent(stored, tuple(keys), NAME))
