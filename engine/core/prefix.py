"""The prefix cache: finds blocks that hold the beginning of a request, and offers the blocks that requests compute.

The groups of the cache have equal keys for equal beginnings, but each evicts its own blocks. What is found is the
longest prefix that all of them can restore: behind it a full group reads everything, a window or a chunk only the end.
Full blocks are shared. A block of which only the beginning fits is copied (copy-on-write): so the choices of one
prompt, the beams of a search and the turns of a conversation go on from the last position of another request.
"""

from operator import itemgetter
from typing import NamedTuple

from .block_pool import BlockPool
from .kv_events import Cleared, KvCacheEvent, Removed, Stored
from .request import Request, Table


class Found(NamedTuple):
    """The longest cached prefix of a request that every group can restore; at least one position is left to compute."""

    num: int  # its positions
    tables: list[Table]  # of each group with block tables: the full blocks that positions behind it read, not yet held
    sources: list[int | None]  # for each table the block that has the rest of the prefix in its beginning, not yet held
    state: int | None  # the block of the recurrent state after the prefix, not yet held
    state_key: bytes  # its key
    junction: int  # the blocks go on to this position, but no state stands there; 0: as far as the state
    missing: tuple[bytes, ...]  # keys: if one of them is computed or loaded, the prefix gets longer

    @property
    def hits(self) -> list[int]:
        """The full blocks of all tables."""
        return [block for table in self.tables for block in table.blocks]

    @property
    def pinned(self) -> list[int]:
        """The blocks that are copied from, and the state."""
        return [source for source in (*self.sources, self.state) if source is not None]


class _Lookup:
    """What each group has of the beginning of one request."""

    def __init__(self, request: Request, pool: BlockPool, size: int) -> None:
        self._request, self._pool, self._size = request, pool, size
        self._groups = groups = pool.groups
        self.num_known = len(request.ids) - 1
        self.keys = request.block_keys(self.num_known // size, size)
        self._matched = [] if groups.full is None else pool.match(self.keys, groups.full)
        self.run = len(self.keys) if groups.full is None else len(self._matched)
        # Other group → for each number of leading blocks, how many of the last of them it has without a gap.
        self._present = {group: self._count(group) for group in range(groups.num_tables) if group != groups.full}
        self._beginnings: dict[int, list[bytes]] = {}
        self._sources: dict[tuple[int, int], tuple[int, int | None]] = {}

    def _count(self, group: int) -> list[int]:
        counts = [0]
        for key in self.keys[: self.run]:
            counts.append(counts[-1] + 1 if self._pool.find(key, group) is not None else 0)
        return counts

    def beginnings(self, place: int) -> list[bytes]:
        """The keys of the first 1, 2 … positions of block `place`, as far as its ids are known; fewer than a block."""
        if place not in self._beginnings:
            num = min(self._size - 1, self.num_known - place * self._size)
            self._beginnings[place] = self._request.partial_keys(place, num, self._size)
        return self._beginnings[place]

    def whole(self, place: int) -> list[bytes]:
        """The key of block `place`, if all its ids are known."""
        is_last = place == len(self.keys) and len(self._request.ids) == (place + 1) * self._size
        return self._request.block_keys(place + 1, self._size)[place:] if is_last else self.keys[place : place + 1]

    def source(self, group: int, place: int) -> tuple[int, int | None]:
        """How many positions of block `place` the group has, and the block that has them."""
        if (group, place) not in self._sources:
            self._sources[group, place] = self._find_source(group, place)
        return self._sources[group, place]

    def _find_source(self, group: int, place: int) -> tuple[int, int | None]:
        find, whole, beginnings = self._pool.find, self.whole(place), self.beginnings(place)
        if place < len(self.keys) and (block := find(self.keys[place], group)) is not None:
            return self._size, block
        for num in range(len(beginnings), 0, -1):
            block = find(beginnings[num - 1], group)
            if block is None and num == self._size - 1 and whole:
                block = find(whole[0], group)
            if block is not None:
                return num, block
        return 0, None

    def restores(self, num: int) -> bool:
        """Whether each group has what the positions from `num` on read of those before."""
        place, rest = divmod(num, self._size)
        for group in range(self._groups.num_tables):
            first = self._groups.need_from(group, num) // self._size
            if group in self._present and place - first > self._present[group][place]:
                return False
            if rest and self.source(group, place)[0] < rest:
                return False  # even if nothing of the block is read: all of it gets a key once it is full
        return True

    def longest(self, copies: bool) -> int:
        """The most positions that can be restored. `copies`: they may end within a block."""
        size, full = self._size, self._groups.full
        for place in range(self.run, -1, -1):
            if place < self.run and not self.restores(place * size):
                continue
            most = min(size - 1, self.num_known - place * size) if copies else 0
            if most and full is not None:
                most = min(most, self.source(full, place)[0])
            for rest in range(most, -1, -1):
                if self.restores(place * size + rest):
                    return place * size + rest
        return 0

    def longest_state(self) -> tuple[int, bytes]:
        """The most positions that can be restored and behind which a recurrent state stands, and its key."""
        for place in range(self.run, -1, -1):
            behind = self.keys[place - 1] if place else self._request.root
            standing = self._pool.standing.get(behind, {})
            for key, rest in sorted(standing.items(), key=itemgetter(1), reverse=True):
                num = place * self._size + rest
                if num <= self.num_known and key == self._key_behind(behind, place, rest) and self.restores(num):
                    return num, key
        return 0, b""

    def _key_behind(self, behind: bytes, place: int, rest: int) -> bytes:
        return self.beginnings(place)[rest - 1] if rest else behind

    def found(self, num: int, state_key: bytes = b"") -> Found:
        """The prefix of `num` positions, which can be restored."""
        place, rest = divmod(num, self._size)
        tables: list[Table] = []
        sources: list[int | None] = []
        for group in range(self._groups.num_tables):
            first = self._groups.need_from(group, num) // self._size
            blocks = self._matched[:place] if group == self._groups.full else []
            if group != self._groups.full:
                blocks = self._pool.match(self.keys[first:place], group)
            tables.append(Table(blocks, first))
            sources.append(self.source(group, place)[1] if rest else None)
        missing = (*self.whole(self.run), *self.beginnings(self.run)[-1:])
        if self._groups.state is None:
            return Found(num, tables, sources, None, b"", 0, missing)
        junction = self.run * self._size if self._groups.full is not None else 0
        if junction > num:
            missing += (state_name(self.keys[self.run - 1]),)
        if self.num_known:
            missing += (state_name(key_at(self._request, self.num_known)),)
        state = self._pool.find(state_key, self._groups.state) if state_key else None
        return Found(num, tables, sources, state, state_key, junction if junction > num else 0, missing)


def key_at(request: Request, num: int) -> bytes:
    """The key of the state after `num` positions, whose ids are known: that of the block or beginning that ends
    there."""
    place, rest = divmod(num, request.block_size)
    if rest:
        return request.partial_keys(place, rest, request.block_size)[-1]
    return request.block_keys(place, request.block_size)[-1]


def state_name(key: bytes) -> bytes:
    """The name of a state among the keys of blocks that a plan computes."""
    return b"state" + key


class PrefixCache:
    """The prefix cache of one pool."""

    def __init__(self, pool: BlockPool, *, block_size: int, enabled: bool, kv_events: bool) -> None:
        """`kv_events`: whether `take_events` is going to be called."""
        self._pool = pool
        self._block_size = block_size
        self.enabled = enabled
        self._events: list[KvCacheEvent] | None = [Cleared()] if kv_events else None
        if kv_events:
            pool.removed = []

    def find(self, request: Request, *, copies: bool = True) -> Found:
        """The cached prefix of a request that is to be admitted. `copies`: it may have `pinned` blocks, so that it ends
        within a block or behind a recurrent state."""
        if not self.enabled or request.wants_all:
            num = self._pool.groups.num_tables
            return Found(0, [Table([]) for _ in range(num)], [None] * num, None, b"", 0, ())
        lookup = _Lookup(request, self._pool, self._block_size)
        if self._pool.groups.state is None:
            return lookup.found(lookup.longest(copies))
        return lookup.found(*lookup.longest_state()) if copies else lookup.found(0)

    def upcoming(self, request: Request) -> list[bytes]:
        """Keys of the blocks that the plan under construction computes of a request: full ones, and the beginning that
        ends before the last id."""
        if not self.enabled:
            return []
        size, num_ids = self._block_size, len(request.ids)
        keys = request.block_keys(min(request.num_planned, num_ids) // size, size)[request.num_committed :]
        if request.num_planned >= num_ids and (num_ids - 1) % size:
            keys += request.partial_keys((num_ids - 1) // size, (num_ids - 1) % size, size)[-1:]
        return keys

    def commit(self, request: Request) -> None:
        """Offers its full blocks.

        Those of the plan under construction count as well: plans run in order, so a request that finds them is computed
        after them.
        """
        if not self.enabled:
            return
        size, ids = self._block_size, request.ids
        first, full = request.num_committed, min(request.num_planned, len(ids)) // size
        if full <= first:
            return
        keys, register = request.keys, self._pool.register
        if len(keys) < full:
            request.block_keys(full, size)
        request.commit(full)
        for group, table in enumerate(request.tables):
            reports = self._events is not None and group == self._pool.groups.full
            for i in range(max(first, table.first), full):
                parent = keys[i - 1] if i else None
                if register(table.blocks[i - table.first], keys[i], i, parent) and reports:
                    assert self._events is not None
                    self._note_removed()
                    self._events.append(Stored((keys[i],), parent, ids[i * size : (i + 1) * size].tobytes(), size))

    def commit_beginning(self, request: Request, num: int) -> None:
        """Offers the blocks that hold position `num`, up to that position."""
        size = self._block_size
        if self.enabled and num % size and num <= len(request.ids):
            key = request.partial_keys(num // size, num % size, size)[-1]
            for table in request.tables:
                if table.first <= num // size:
                    self._pool.register_partial(table.blocks[num // size - table.first], key)

    def commit_state(self, request: Request, slot: int, num: int) -> None:
        """Offers a recurrent state of a request, the one after `num` positions, with the blocks up to there."""
        if not self.enabled or not 0 < num <= len(request.ids):
            return
        self.commit(request)
        self.commit_beginning(request, num)
        place, rest = divmod(num, self._block_size)
        behind = request.block_keys(place, self._block_size)[-1] if place else request.root
        self._pool.register_state(slot, key_at(request, num), place, behind, rest)

    def take_events(self) -> list[KvCacheEvent]:
        """Blocks that can be found or no longer be found, since the last call, in order."""
        assert self._events is not None, "made without kv_events"
        self._note_removed()
        events, self._events = self._events, []
        return events

    def _note_removed(self) -> None:
        """A key may be removed and stored again between two calls of `take_events`."""
        assert self._events is not None and self._pool.removed is not None
        if self._pool.removed:
            keys = tuple([key for group, key in self._pool.removed if group == self._pool.groups.full])
            if keys:
                self._events.append(Removed(keys))
            self._pool.removed = []
