"""The core half of a KV connector that uses everything the protocol allows.

It defers its answers, keeps the blocks of ended requests until they are read, and drops what was stored longest ago.
"""

from collections.abc import Mapping, Sequence
from random import Random

from msgspec import Struct, msgpack

from pagewire.engine.core.kv_connector import Evicted, Held, Item, KvEvent, KvRequest
from pagewire.engine.kv_connector.base import ConnectorFacts
from pagewire.engine.kv_connector.file_meta import BlockColumns, columns
from pagewire.engine.kv_connector.states import StateIndex
from pagewire.ipc.messages import TierSnapshot, Transferred

NAME = "free"


class Metadata(Struct, array_like=True):
    """The worker half's tasks with a plan, in this order."""

    dropped: list[tuple[bytes, int]]  # names, and how many pages each has
    saves: BlockColumns  # to be read before the plan's pass
    loads: list[tuple[int, BlockColumns]]  # with their rids
    sends: list[tuple[int, BlockColumns]]  # of ended rids, to be read at any later time


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
        facts: ConnectorFacts,
        rng: Random,
    ) -> None:
        """`keeps_evicted`: stores what is evicted from the device's prefix cache. `saves_ended`: stores what ended
        requests held, which is read only after the plan if `delays_sends`. `defer_rate`: how likely the answer to a
        query is not known yet."""
        self._capacity = capacity  # items
        self._keeps_evicted = keeps_evicted
        self._saves_ended = saves_ended
        self._delays_sends = delays_sends
        self._defer_rate = defer_rate
        self._facts = facts
        self._rng = rng
        self._index: dict[bytes, tuple[Item, list[int]]] = {}  # name → rids that load it; in the order of eviction
        self._states = StateIndex(facts.state)
        self._loading: dict[int, list[bytes]] = {}
        self._events: list[KvEvent] = []
        self._clear()

    def _clear(self) -> None:
        self._dropped: list[tuple[bytes, int]] = []
        self._saves: list[Held] = []
        self._loads: list[tuple[int, BlockColumns]] = []
        self._sends: list[tuple[int, BlockColumns]] = []

    def available(self, request: KvRequest, items: Sequence[Item]) -> Sequence[bool] | None:
        if self._rng.random() < self._defer_rate / (4 if len(items) == 1 else 1):
            return None
        return [item.name in self._index for item in items]

    def standing(self, request: KvRequest, behind: bytes, place: int) -> Mapping[bytes, int]:
        return self._states.behind(behind)

    def load(self, request: KvRequest, held: Sequence[Held]) -> None:
        for item, _ in held:
            self._index[item.name] = entry = self._index.pop(item.name)
            entry[1].append(request.rid)
        self._loading[request.rid] = [item.name for item, _ in held]
        self._loads.append((request.rid, columns(held)))

    def build_connector_meta(self) -> bytes:
        if not (self._dropped or self._saves or self._loads or self._sends):
            return b""
        metadata = _encode(Metadata(self._dropped, columns(self._saves), self._loads, self._sends))
        self._clear()
        return metadata

    def ended(self, request: KvRequest, held: Sequence[Held]) -> bool:
        new = [one for one in held if one.item.name not in self._index]
        if not self._saves_ended or not new or not self._make_room(len(new)):
            return False
        self._store([item for item, _ in new])
        if self._delays_sends:
            self._sends.append((request.rid, columns(new)))
            return True
        self._saves += new
        return False

    def blocks_evicted(self, evicted: Sequence[Evicted]) -> None:
        for entry in evicted:
            if self._keeps_evicted and entry.item.name not in self._index and self._make_room(1):
                self._store([entry.item])
                self._saves.append(Held(entry.item, entry.pages))

    def update_connector_output(self, output: Transferred) -> None:
        for rid in output.loaded:
            for name in self._loading.pop(rid, ()):  # nothing, if another tier loads for it
                self._index[name][1].remove(rid)

    def take_events(self) -> list[KvEvent]:
        events, self._events = self._events, []
        return events

    def tiers(self) -> tuple[TierSnapshot, ...]:
        return (TierSnapshot(NAME, len(self._index), self._capacity, 0, 0, 0, 0),)

    def reset(self) -> None:
        self._clear()
        self._loading.clear()
        for item, _ in self._index.values():
            self._add_event(False, item)
        self._index.clear()
        self._states.clear()

    def close(self) -> None:
        pass

    @property
    def items(self) -> list[Item]:
        """All that is in the index."""
        return [item for item, _ in self._index.values()]

    def _make_room(self, num: int) -> bool:
        while len(self._index) + num > self._capacity:
            victim = next((name for name, (_, readers) in self._index.items() if not readers), None)
            if victim is None:
                return False
            item, _ = self._index.pop(victim)
            self._states.remove(victim)
            self._dropped.append((victim, self._facts.pages_of(item.group)))
            self._add_event(False, item)
        return True

    def _store(self, items: list[Item]) -> None:
        for item in items:
            self._index[item.name] = item, []
            self._states.add(item)
            self._add_event(True, item)

    def _add_event(self, stored: bool, item: Item) -> None:
        if not item.num or item.group == self._facts.state:
            self._events.append(KvEvent(stored, (item.key,), NAME, item.group))
