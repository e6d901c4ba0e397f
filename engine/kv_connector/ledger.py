"""The bookkeeping of a tier's core half, whatever the tier stores in: loads under way, counts and events."""

from collections import Counter
from collections.abc import Container, Iterable, Sequence

from ...ipc.messages import TierSnapshot, Transferred, bytes_to_ids
from ..core.kv_connector import Held, Item, KvEvent, KvRequest, item_name
from .base import ConnectorFacts

_KEYS_PER_EVENT = 256


def names_of(request: KvRequest, held: Sequence[Held], block_size: int) -> list[bytes]:
    """The names of these items, behind those of the blocks before them in their groups."""
    last: dict[int, int] = {}
    for item, _ in held:
        last[item.group] = max(last.get(item.group, 0), item.place)
    before = [item_name(key, group) for group, num in last.items() for key in request.block_keys(num, block_size)]
    return list(dict.fromkeys([*before, *(item.name for item, _ in held)]))


def num_leading(names: Sequence[bytes], kept: Container[bytes]) -> int:
    """How many of the names are kept before the first that is not."""
    return next((num for num, name in enumerate(names) if name not in kept), len(names))


def parent_name(item: Item, state_group: int | None) -> bytes | None:
    """The name of the block before an item in its group, which is evicted after it; None: there is none."""
    if item.parent is None or item.group == state_group:
        return None
    return item_name(item.parent, item.group)


def tail_first(held: Sequence[Held]) -> list[Held]:
    """In an order in which the last block of each group is the oldest, so that it is evicted first. States come last:
    each is of use without those after it."""
    return sorted(held, key=lambda one: (one.item.group, -one.item.place, -one.item.num))


class Ledger:
    """The bookkeeping of one tier."""

    def __init__(self, name: str, facts: ConnectorFacts) -> None:
        self.name = name
        self._state_group = facts.state
        self._block_size = facts.block_size
        self._page_bytes = facts.of_engine(facts.block_bytes)
        self._loading: dict[int, Sequence[Held]] = {}  # rid → what is to be filled
        self._events: list[KvEvent] = []
        self._open: list[bytes] = []  # keys of the event being built
        self._open_group = 0
        self._open_stored = True
        self._num_hit_tokens = 0
        self._num_stored = 0
        self._num_evicted = 0
        self._num_failed = 0
        self._num_bytes = 0  # loaded

    def begin_load(self, rid: int, held: Sequence[Held]) -> None:
        """Records that these items are to be loaded for a request. It has no other load of this tier under way."""
        assert rid not in self._loading, rid
        self._loading[rid] = held

    def end_loads(self, output: Transferred) -> tuple[list[Item], list[Item]]:
        """(items whose loads ended, those of them that could not be loaded). As tokens count the blocks of the group of
        which most were loaded."""
        failed = set(bytes_to_ids(output.failed_blocks))
        over: list[Item] = []
        bad: list[Item] = []
        for rid in output.loaded:
            held = self._loading.pop(rid, ())
            over += [item for item, _ in held]
            bad += [item for item, pages in held if not failed.isdisjoint(pages)]
            loaded = [one for one in held if failed.isdisjoint(one.pages)]
            good = Counter(item.group for item, _ in loaded if not item.num)
            self._num_hit_tokens += max(good.values(), default=0) * self._block_size
            self._num_bytes += sum(len(pages) for _, pages in loaded) * self._page_bytes
        self._num_failed += len(bad)
        return over, bad

    def forget_loads(self) -> list[Item]:
        """Drops the loads under way, whose ends will not be reported. Returns their items."""
        items = [item for held in self._loading.values() for item, _ in held]
        self._loading.clear()
        return items

    def stored(self, items: Sequence[Item]) -> None:
        """Records that the tier has added these."""
        self._num_stored += len(items)
        self.found(items)

    def found(self, items: Sequence[Item]) -> None:
        """Records that the tier had these when the engine started."""
        for item in items:
            self._note(True, item)

    def evicted(self, item: Item) -> None:
        """Records that the tier removed this to make room."""
        self._num_evicted += 1
        self.removed([item])

    def removed(self, items: Iterable[Item]) -> None:
        """Records that the tier no longer has these."""
        for item in items:
            self._note(False, item)

    def take_events(self) -> list[KvEvent]:
        """The events since the last call."""
        self._flush()
        events, self._events = self._events, []
        return events

    def snapshot(self, num_blocks: int, capacity: int, *, is_common: bool = False) -> TierSnapshot:
        return TierSnapshot(
            self.name,
            num_blocks,
            capacity,
            self._num_hit_tokens,
            self._num_stored,
            self._num_evicted,
            self._num_failed,
            self._num_bytes,
            is_common,
        )

    def _note(self, stored: bool, item: Item) -> None:
        """Adds to the open event. Events keep their order: the tier may remove at once what it has just stored. The
        beginnings of blocks are of no interest to routers."""
        if item.num and item.group != self._state_group:
            return
        if (stored, item.group) != (self._open_stored, self._open_group):
            self._flush()
            self._open_stored, self._open_group = stored, item.group
        self._open.append(item.key)
        if len(self._open) >= _KEYS_PER_EVENT:
            self._flush()

    def _flush(self) -> None:
        if self._open:
            self._events.append(KvEvent(self._open_stored, tuple(self._open), self.name, self._open_group))
            self._open = []
