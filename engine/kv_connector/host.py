"""The host tier: blocks that are evicted from the device's prefix cache are kept in host memory.

This also serves as swapping: the blocks of a preempted request stay in the prefix cache, those that are reused move to
the host, and the request finds them at its next admission. This is the core half: which key is in which slot. It needs
no reports from the worker, because plans run in order: the next plan can load what this plan stores.
"""

from array import array
from collections.abc import Sequence

from msgspec import msgpack

from ...ipc.messages import TierSnapshot, Transferred, ids_to_bytes
from ..core.eviction import EvictionQueue
from ..core.kv_connector import CoreConnector, Evicted, KvEvent, KvRequest
from .base import ConnectorFacts, Options, WorkerConnector
from .host_meta import NO_SLOT, HostLoad, HostMeta
from .ledger import Ledger, num_matched
from .options import check_names, eviction_of, num_blocks_of, size_of


class HostConnector:
    """`host,size=4G[,eviction=lru|lfu|cost]`."""

    @staticmethod
    def check(options: Options) -> None:
        check_names("host", options, required=["size"], optional=["eviction"])
        size_of("host", options)
        eviction_of("host", options)

    @staticmethod
    def core(options: Options, facts: ConnectorFacts) -> CoreConnector:
        HostConnector.check(options)
        num_slots = num_blocks_of("host", size_of("host", options), facts.block_bytes)
        return HostCore(num_slots=num_slots, block_size=facts.block_size, queue=eviction_of("host", options))

    @staticmethod
    def worker(options: Options, facts: ConnectorFacts) -> WorkerConnector:
        from .host_worker import HostWorker  # needs torch

        HostConnector.check(options)
        return HostWorker(num_slots=num_blocks_of("host", size_of("host", options), facts.block_bytes), facts=facts)


class HostCore:
    def __init__(self, *, num_slots: int, block_size: int, queue: EvictionQueue) -> None:
        self._num_slots = num_slots
        self._block_size = block_size
        self._queue = queue  # of the keys in `_slots`
        self._slots: dict[bytes, int] = {}
        self._free = list(range(num_slots - 1, -1, -1))
        self._saves: dict[int, int] = {}  # slot → block, of the plan being made
        self._loads: list[HostLoad] = []  # of the plan being made
        self._ledger = Ledger("host", block_size)

    def get_num_new_matched_tokens(self, request: KvRequest, num_computed_tokens: int) -> tuple[int | None, bool]:
        num = num_matched(request, num_computed_tokens, self._block_size, lambda key, _: key in self._slots)
        return num * self._block_size, False

    def update_state_after_alloc(self, request: KvRequest, block_ids: Sequence[int], num_external_tokens: int) -> None:
        num = num_external_tokens // self._block_size
        keys = request.block_keys(len(block_ids), self._block_size)
        wanted, blocks = keys[-num:], block_ids[-num:]
        self._queue.used(keys)
        for key in wanted:
            self._queue.pin(key)
        self._ledger.begin_load(request.rid, blocks, wanted)
        slots = [self._slots.get(key, NO_SLOT) for key in wanted]
        self._loads.append(HostLoad(request.rid, ids_to_bytes(slots), array("i", blocks).tobytes()))

    def build_connector_meta(self) -> bytes:
        if not self._saves and not self._loads:
            return b""
        slots, blocks = list(self._saves), list(self._saves.values())
        meta = HostMeta(ids_to_bytes(blocks), ids_to_bytes(slots), tuple(self._loads))
        self._saves.clear()
        self._loads.clear()
        return msgpack.encode(meta)

    def request_finished(self, request: KvRequest, block_ids: Sequence[int]) -> bool:
        """Keeps nothing: the blocks stay in the prefix cache and come here when they are evicted."""
        return False

    def blocks_evicted(self, evicted: Sequence[Evicted]) -> None:
        for block, key, place, parent, _ in evicted:
            if key in self._slots:
                self._queue.touched(key)
                continue
            slot = self._take_slot()
            if slot is None:
                break  # all slots are being loaded
            self._slots[key] = slot
            self._saves[slot] = block
            self._queue.added(key, place, parent)
            self._ledger.stored([key])

    def update_connector_output(self, output: Transferred) -> None:
        over, failed = self._ledger.end_loads(output)
        for key in over:
            self._queue.unpin(key)
        for key in failed:
            self._drop(key)

    def take_events(self) -> list[KvEvent]:
        return self._ledger.take_events()

    def tiers(self) -> tuple[TierSnapshot, ...]:
        return (self._ledger.snapshot(len(self._slots), self._num_slots),)

    def reset(self) -> None:
        for key in self._ledger.forget_loads():
            self._queue.unpin(key)
        self._ledger.removed(self._slots)
        for key in self._slots:
            self._queue.removed(key)
        self._slots.clear()
        self._free = list(range(self._num_slots - 1, -1, -1))
        self._saves.clear()
        self._loads.clear()

    def close(self) -> None:
        pass

    def _take_slot(self) -> int | None:
        """A slot for a new block; None if all are pinned."""
        if self._free:
            return self._free.pop()
        victim = self._queue.evict()
        if victim is None:
            return None
        self._ledger.evicted(victim.key)
        return self._slots.pop(victim.key)

    def _drop(self, key: bytes) -> None:
        """Forgets a block whose contents are wrong. Two loads may report the same block."""
        slot = self._slots.pop(key, None)
        if slot is not None:
            self._queue.removed(key)
            self._ledger.removed([key])
            self._free.append(slot)
