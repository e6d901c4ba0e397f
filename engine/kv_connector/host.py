"""The host tier: blocks that are evicted from the device's prefix cache are kept in host memory.

This also serves as swapping: the blocks of a preempted request stay in the prefix cache, those that are reused move to
the host, and the request finds them at its next admission. This is the core half: which item is in which slots. It
needs no reports from the worker, because plans run in order: the next plan can load what this plan stores.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from msgspec import msgpack

from ...ipc.messages import TierSnapshot, Transferred, ids_to_bytes
from ..core.eviction import EvictionQueue
from ..core.kv_connector import Evicted, Held, Item, KvEvent, KvRequest, TierConnector
from .base import ConnectorFacts, Options, WorkerConnector
from .host_meta import NO_SLOT, HostLoad, HostMeta
from .ledger import Ledger, names_of, num_leading, parent_name
from .options import check_names, eviction_of, num_blocks_of, size_of
from .states import StateIndex


class HostConnector:
    """`host,size=4G[,eviction=lru|lfu|cost]`."""

    @staticmethod
    def check(options: Options) -> None:
        check_names("host", options, required=["size"], optional=["eviction"])
        size_of("host", options)
        eviction_of("host", options)

    @staticmethod
    def core(options: Options, facts: ConnectorFacts) -> TierConnector:
        HostConnector.check(options)
        return HostCore(num_slots=_num_slots(options, facts), facts=facts, queue=eviction_of("host", options))

    @staticmethod
    def worker(options: Options, facts: ConnectorFacts) -> WorkerConnector:
        from .host_worker import HostWorker  # needs torch

        HostConnector.check(options)
        return HostWorker(num_slots=_num_slots(options, facts), facts=facts)


def _num_slots(options: Options, facts: ConnectorFacts) -> int:
    """The same on every rank."""
    return num_blocks_of("host", size_of("host", options), facts.of_engine(facts.block_bytes))


_AT_ONCE = 256  # slots that are given up with a plan, so that no step is late


class _Kept(NamedTuple):
    item: Item
    slots: list[int]  # one for each of its pages


class HostCore:
    """A slot is as large as a page of the cache."""

    def __init__(self, *, num_slots: int, facts: ConnectorFacts, queue: EvictionQueue) -> None:
        self._most = num_slots  # of which the worker half has the memory
        self._num_slots = num_slots  # that are used, as soon as what is in the others may go
        self._target = num_slots  # which `_num_slots` approaches plan by plan
        self._slot_bytes = facts.of_engine(facts.block_bytes)
        self._block_size = facts.block_size
        self._state_group = facts.state
        self._queue = queue  # of the names in `_kept`
        self._kept: dict[bytes, _Kept] = {}
        self._states = StateIndex(facts.state)
        self._free = list(range(num_slots - 1, -1, -1))
        self._unused: list[int] = []  # slots beyond `_num_slots`, which hold nothing
        self._returned: list[int] = []  # of them, those of whose memory the worker half is told with the next plan
        self._saves: dict[int, int] = {}  # slot → page, of the plan being made
        self._loads: list[HostLoad] = []  # of the plan being made
        self._ledger = Ledger("host", facts)

    def available(self, request: KvRequest, items: Sequence[Item]) -> Sequence[bool] | None:
        return [item.name in self._kept for item in items]

    def standing(self, request: KvRequest, behind: bytes, place: int) -> Mapping[bytes, int]:
        return self._states.behind(behind)

    def num_kept(self, names: Sequence[bytes]) -> int:
        return num_leading(names, self._kept)

    def load(self, request: KvRequest, held: Sequence[Held]) -> None:
        self._queue.used(names_of(request, held, self._block_size))
        slots: list[int] = []
        for item, pages in held:
            self._queue.pin(item.name)
            kept = self._kept.get(item.name)
            slots += [NO_SLOT] * len(pages) if kept is None else kept.slots
        self._ledger.begin_load(request.rid, held)
        blocks = [page for one in held for page in one.pages]
        self._loads.append(HostLoad(request.rid, ids_to_bytes(slots), ids_to_bytes(blocks)))

    def build_connector_meta(self) -> bytes:
        if self._target < self._num_slots:
            self._num_slots = max(self._target, self._num_slots - _AT_ONCE)
            self._shrink()
        if not self._saves and not self._loads and not self._returned:
            return b""
        slots, blocks = list(self._saves), list(self._saves.values())
        meta = HostMeta(ids_to_bytes(blocks), ids_to_bytes(slots), tuple(self._loads), ids_to_bytes(self._returned))
        self._returned.clear()
        self._saves.clear()
        self._loads.clear()
        return msgpack.encode(meta)

    def ended(self, request: KvRequest, held: Sequence[Held]) -> bool:
        """Keeps nothing: what it holds stays in the prefix cache and comes here when it is evicted."""
        return False

    def blocks_evicted(self, evicted: Sequence[Evicted]) -> None:
        for one in evicted:
            item = one.item
            if item.name in self._kept:
                self._queue.touched(item.name)
                continue
            slots = self._take_slots(len(one.pages))
            if slots is None:
                break  # all slots are being loaded
            self._kept[item.name] = _Kept(item, slots)
            self._states.add(item)
            self._saves.update(zip(slots, one.pages, strict=True))
            self._queue.added(item.name, item.place, parent_name(item, self._state_group))
            self._ledger.stored([item])

    def update_connector_output(self, output: Transferred) -> None:
        over, failed = self._ledger.end_loads(output)
        for item in over:
            self._queue.unpin(item.name)
        for item in failed:
            self._drop(item.name)
        self._shrink()

    def take_events(self) -> list[KvEvent]:
        return self._ledger.take_events()

    def tiers(self) -> tuple[TierSnapshot, ...]:
        num_used = self._most - len(self._free) - len(self._unused)
        return (self._ledger.snapshot(num_used, self._num_slots),)

    def reset(self) -> None:
        for item in self._ledger.forget_loads():
            self._queue.unpin(item.name)
        self._ledger.removed(kept.item for kept in self._kept.values())
        for name in self._kept:
            self._queue.removed(name)
        self._kept.clear()
        self._states.clear()
        self._num_slots = self._target
        self._free = list(range(self._num_slots - 1, -1, -1))
        self._unused = list(range(self._num_slots, self._most))
        self._returned.clear()  # the next worker half has not touched them
        self._saves.clear()
        self._loads.clear()

    def resize(self, size: int) -> None:
        """What is too much is evicted plan by plan, and what is being loaded when its load is over."""
        self._target = min(self._most, max(1, size // self._slot_bytes))
        self._num_slots = max(self._num_slots, self._target)
        while self._most - len(self._unused) < self._num_slots:
            self._free.append(self._unused.pop())
        unused = set(self._unused)
        self._returned = [slot for slot in self._returned if slot in unused]

    def _shrink(self) -> None:
        """Evicts what is in more slots than may be used, as far as nothing of it is being loaded."""
        while (num := self._most - len(self._unused) - self._num_slots) > 0:
            slots = [self._free.pop() for _ in range(min(num, len(self._free)))]
            self._unused += slots
            self._returned += slots
            if len(slots) < num and not self._evict():
                return

    def close(self) -> None:
        pass

    def _take_slots(self, num: int) -> list[int] | None:
        """Slots for a new item; None if too many are pinned."""
        while len(self._free) < num:
            if not self._evict():
                return None
        return [self._free.pop() for _ in range(num)]

    def _evict(self) -> bool:
        """Evicts an item. False: all are pinned."""
        victim = self._queue.evict()
        if victim is not None:
            self._ledger.evicted(self._kept[victim.key].item)
            self._release(victim.key)
        return victim is not None

    def _release(self, name: bytes) -> None:
        slots = self._kept.pop(name).slots
        for slot in slots:
            self._saves.pop(slot, None)  # what is not written yet need not be
        self._free += reversed(slots)
        self._states.remove(name)

    def _drop(self, name: bytes) -> None:
        """Forgets an item whose contents are wrong. Two loads may report the same one."""
        if (kept := self._kept.get(name)) is not None:
            self._queue.removed(name)
            self._ledger.removed([kept.item])
            self._release(name)
