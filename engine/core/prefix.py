"""The prefix cache: finds blocks that hold the beginning of a request, and offers the blocks that requests compute.

The groups of the cache have equal keys for equal beginnings, but each evicts its own blocks. What is found is the
longest prefix that all of them can restore: behind it a full group reads everything, a window or a chunk only the end.
If the caller names tiers behind the device, a block is there if the device or a tier has it, and what only a tier has
is `wanted`: it must be loaded. So a window's blocks are loaded only as far as they are read.
Full blocks are shared. A block of which only the beginning fits is copied (copy-on-write): so the choices of one
prompt, the beams of a search and the turns of a conversation go on from the last position of another request.
"""

from collections.abc import Collection, Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple, Protocol

from .block_pool import BlockPool
from .kv_connector import Held, Item
from .kv_events import Cleared, KvCacheEvent, Removed, Stored
from .request import Request, Table


class Tiers(Protocol):
    """What a look-up asks about blocks and states that the device lacks. Raises `Undecided`."""

    def available(self, request: Request, items: Sequence[Item]) -> Sequence[bool]:
        """Whether each of these could be loaded. Called first for blocks of the full group, perhaps none."""

    def standing(self, request: Request, behind: bytes, place: int) -> Mapping[bytes, int]:
        """The recurrent states behind a block or the root: key → positions between."""


class Undecided(Exception):
    """A tier does not know yet what it has."""


class Found(NamedTuple):
    """The longest cached prefix of a request that every group can restore; at least one position is left to compute."""

    num: int  # its positions
    # Of each group with block tables: the full blocks that positions behind it read, not yet held; -1: to be loaded.
    tables: list[Table]
    sources: list[int | None]  # for each table the block that has the rest of the prefix in its beginning, not yet held
    state: int | None  # the block of the recurrent state after the prefix, not yet held
    state_key: bytes  # its key
    junction: int  # the blocks go on to this position, but no state stands there; 0: as far as the state
    missing: tuple[bytes, ...]  # keys: if one of them is computed or loaded, the prefix gets longer
    wanted: tuple[Item, ...] = ()  # what must be loaded: of block `num // block_size` perhaps only the beginning
    limit: int | None = None  # the group that lacks what a longer prefix needs; None: there is no more of the request
    num_lost: int = 0  # positions behind `num` that the full group has
    # The blocks of what the encoder has made of the prompt, not yet held; (): it is to be computed, or there is none.
    cross: tuple[int, ...] = ()

    @property
    def hits(self) -> list[int]:
        """The full blocks of all tables that the device has, and those of the encoder's result."""
        return [*self.cross, *(block for table in self.tables for block in table.blocks if block >= 0)]

    @property
    def pinned(self) -> list[int]:
        """The blocks that are copied from, and the state."""
        return [source for source in (*self.sources, self.state) if source is not None]


class _Lookup:
    """What each group has of the beginning of one request."""

    def __init__(self, request: Request, pool: BlockPool, size: int, tiers: Tiers | None = None) -> None:
        self._request, self._pool, self._size, self._tiers = request, pool, size, tiers
        self._groups = groups = pool.groups
        self.num_known = len(request.ids) - 1
        self.keys = request.block_keys(self.num_known // size, size)
        self._matched = [] if groups.full is None else pool.match(self.keys, groups.full)
        self.run = len(self.keys) if groups.full is None else len(self._matched)
        # Other group → the blocks from … to which it has. Prefixes are tried from the longest on.
        self._present: dict[int, tuple[int, int]] = {}
        self._elsewhere: dict[tuple[int, bytes], bool] = {}  # whether a tier has this, which the device lacks
        self._beginnings: dict[int, list[bytes]] = {}
        self._sources: dict[tuple[int, int], tuple[int, int | None]] = {}
        self.limit: int | None = groups.full if self.run < len(self.keys) else None
        if tiers is not None:
            self._go_on(tiers)

    def _go_on(self, tiers: Tiers) -> None:
        """Continues the run with blocks of the full group that tiers have."""
        full, find = self._groups.full, self._pool.find
        if full is None:
            tiers.available(self._request, ())
            return
        places = [i for i in range(self.run, len(self.keys)) if find(self.keys[i], full) is None]
        answers = tiers.available(self._request, [self._item(full, i) for i in places])
        first = self.run
        self.run = next((i for i, has in zip(places, answers, strict=True) if not has), len(self.keys))
        for key in self.keys[first : self.run]:
            block = find(key, full)
            self._matched.append(-1 if block is None else block)
        self.limit = full if self.run < len(self.keys) else None

    def _item(self, group: int, place: int) -> Item:
        return Item(self.keys[place], place, self._key_before(place), group)

    def _key_before(self, place: int) -> bytes | None:
        return self.keys[place - 1] if place else None

    def _is_elsewhere(self, item: Item) -> bool:
        """Whether a tier has it."""
        if self._tiers is None:
            return False
        name = item.group, item.key
        if name not in self._elsewhere:
            self._elsewhere[name] = self._tiers.available(self._request, [item])[0]
        return self._elsewhere[name]

    def _lacks(self, group: int, first: int, place: int) -> bool:
        """Whether a group lacks one of the blocks from `first` to before `place`."""
        low, high = self._present.get(group, (place, place))
        if not low <= place <= high:
            low = high = place
        while low > first:
            key = self.keys[low - 1]
            if self._pool.find(key, group) is None and not self._is_elsewhere(self._item(group, low - 1)):
                break
            low -= 1
        self._present[group] = low, high
        return low > first

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
            if group != self._groups.full and self._lacks(group, first, place):
                self._limited_by(group)
                return False
            # Even if nothing of the last block is read: all of it gets a key once it is full.
            if rest and self.source(group, place)[0] < rest and self._rest_elsewhere(group, place, rest) is None:
                return False
        return True

    def _limited_by(self, group: int | None) -> None:
        """A prefix that the full group has cannot be restored, because this group lacks something."""
        if self.limit is None or self.limit == self._groups.full:
            self.limit = group

    def _rest_elsewhere(self, group: int, place: int, rest: int) -> Item | None:
        """What a tier has that holds the first `rest` positions of a block. Only recurrent states make it worthwhile to
        load so few."""
        if self._tiers is None or self._groups.state is None:
            return None
        parent = self._key_before(place)
        items = [Item(key, place, parent, group) for key in self.whole(place)]
        items.append(Item(self.beginnings(place)[rest - 1], place, parent, group, rest))
        return next((item for item in items if self._is_elsewhere(item)), None)

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
            if self._tiers is not None:
                standing = {**self._tiers.standing(self._request, behind, place), **standing}
            for key, rest in sorted(standing.items(), key=itemgetter(1), reverse=True):
                num = place * self._size + rest
                if num <= self.num_known and key == self._key_behind(behind, place, rest) and self.restores(num):
                    if num // self._size < self.run:
                        self._limited_by(self._groups.state)
                    return num, key
        self._limited_by(self._groups.state if self.run else None)
        return 0, b""

    def _key_behind(self, behind: bytes, place: int, rest: int) -> bytes:
        return self.beginnings(place)[rest - 1] if rest else behind

    def found(self, num: int, state_key: bytes = b"") -> Found:
        """The prefix of `num` positions, which can be restored."""
        place, rest = divmod(num, self._size)
        tables: list[Table] = []
        sources: list[int | None] = []
        wanted: list[Item] = []
        for group in range(self._groups.num_tables):
            first = self._groups.need_from(group, num) // self._size
            if group == self._groups.full:
                blocks = self._matched[:place]
            else:
                found = [self._pool.find(key, group) for key in self.keys[first:place]]
                blocks = [-1 if block is None else block for block in found]
            wanted += [self._item(group, i) for i, block in enumerate(blocks, start=first) if block < 0]
            tables.append(Table(blocks, first))
            num_there, source = self.source(group, place) if rest else (0, None)
            if rest and num_there < rest:
                item = self._rest_elsewhere(group, place, rest)
                assert item is not None, (group, num)
                wanted.append(item)
                source = None
            sources.append(source)
        missing = (*self.whole(self.run), *self.beginnings(self.run)[-1:])
        reach = self.run * self._size if self._groups.full is not None else 0
        num_lost = max(0, reach - num)
        if self._groups.state is None:
            return Found(num, tables, sources, None, b"", 0, missing, tuple(wanted), self.limit, num_lost)
        junction = reach if reach > num else 0
        if junction:
            missing += (state_name(self.keys[self.run - 1]),)
        if self.num_known:
            missing += (state_name(key_at(self._request, self.num_known)),)
        state = self._pool.find(state_key, self._groups.state) if state_key else None
        if state_key and state is None:
            behind = self.keys[place - 1] if place else self._request.root
            wanted.append(Item(state_key, place, behind, self._groups.state, rest))
        return Found(num, tables, sources, state, state_key, junction, missing, tuple(wanted), self.limit, num_lost)


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

    def num_found(self, keys: Sequence[bytes]) -> int:
        """Positions of the longest run of leading blocks with these keys, in the full group or else the first one; a
        request may find fewer."""
        if not self.enabled or not self._pool.groups.num_tables:
            return 0
        return len(self._pool.match(keys, self._pool.groups.full or 0)) * self._block_size

    def find(self, request: Request, *, copies: bool = True, tiers: Tiers | None = None) -> Found:
        """The cached prefix of a request that is to be admitted. `copies`: it may have `pinned` blocks, so that it ends
        within a block or behind a recurrent state. `tiers`: it may have parts that these have. Raises what they do."""
        if not self.enabled or request.wants_all:
            num = self._pool.groups.num_tables
            return Found(0, [Table([]) for _ in range(num)], [None] * num, None, b"", 0, ())
        lookup = _Lookup(request, self._pool, self._block_size, tiers)
        if self._pool.groups.cross is not None:
            return lookup.found(lookup.longest(copies))._replace(cross=self._find_cross(request))
        if self._pool.groups.state is None:
            return lookup.found(lookup.longest(copies))
        return lookup.found(*lookup.longest_state()) if copies else lookup.found(0)

    def _find_cross(self, request: Request) -> tuple[int, ...]:
        """The blocks of the encoder's result, of use only together."""
        assert self._pool.groups.cross is not None
        keys = request.encoded.keys(request.root, self._block_size)
        found = self._pool.match(keys, self._pool.groups.cross)
        return tuple(found) if len(found) == len(keys) else ()

    def commit_cross(self, request: Request) -> None:
        """Offers the blocks of what the encoder makes of its prompt in the plan under construction."""
        if self.enabled:
            parent, keys = None, request.encoded.keys(request.root, self._block_size)
            for place, (block, key) in enumerate(zip(request.encoded.blocks, keys, strict=True)):
                if self._pool.register(block, key, place, parent) and self._events is not None:
                    self._note_stored(key, parent, b"", self._pool.groups.cross or 0)
                parent = key

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
            for i in range(max(first, table.first), full):
                parent = keys[i - 1] if i else None
                if register(table.blocks[i - table.first], keys[i], i, parent) and self._events is not None:
                    salt = "" if i else request.salt_name
                    self._note_stored(keys[i], parent, ids[i * size : (i + 1) * size].tobytes(), group, salt)

    def commit_beginning(self, request: Request, num: int) -> None:
        """Offers the blocks that hold position `num`, up to that position."""
        size = self._block_size
        if self.enabled and num % size and num <= len(request.ids):
            place, rest = divmod(num, size)
            key = request.partial_keys(place, rest, size)[-1]
            parent = request.block_keys(place, size)[-1] if place else None
            for table in request.tables:
                if table.first <= place:
                    self._pool.register_partial(table.blocks[place - table.first], key, place, parent, rest)

    def commit_state(self, request: Request, slot: int, num: int) -> None:
        """Offers a recurrent state of a request, the one after `num` positions, with the blocks up to there."""
        if not self.enabled or not 0 < num <= len(request.ids):
            return
        self.commit(request)
        self.commit_beginning(request, num)
        place, rest = divmod(num, self._block_size)
        behind = request.block_keys(place, self._block_size)[-1] if place else request.root
        self._register_state(slot, Item(key_at(request, num), place, behind, self._pool.groups.state or 0, rest))

    def _register_state(self, slot: int, item: Item) -> None:
        assert item.parent is not None, item
        self._pool.register_state(slot, item.key, item.place, item.parent, item.num)
        if self._events is not None and self._pool.find(item.key, item.group) == slot:
            self._note_stored(item.key, item.parent, b"", item.group)

    def held_by(self, request: Request) -> list[Held]:
        """What a request holds that tiers can keep, in the order of positions: full blocks, and if there are recurrent
        states also the beginning of its last block, its state, and those that it has found and kept."""
        pool, size, num = self._pool, self._block_size, min(request.num_computed, len(request.ids))
        place, rest = divmod(num, size)
        keys, held = request.block_keys(place, size), self.blocks_of(request, 0, place)
        state_group = pool.groups.state
        if state_group is None or request.is_spoiled or not num:
            return held
        for i, table in enumerate(request.tables if rest else ()):
            item = Item(key_at(request, num), place, keys[-1] if keys else None, i, rest)
            held.append(Held(item, tuple(pool.pages([table.blocks[place - table.first]]))))
        for block in dict.fromkeys(pool.find(key, state_group) for key in request.snapshots):
            if block is not None and (kept := pool.item(block)) is not None and kept.key != key_at(request, num):
                for i, table in enumerate(request.tables if kept.num else ()):
                    if table.first <= kept.place:
                        own = table.blocks[kept.place - table.first]
                        held.append(Held(kept._replace(group=i), tuple(pool.pages([own]))))
                held.append(Held(kept, tuple(pool.pages([block]))))
        state = Item(key_at(request, num), place, keys[-1] if keys else request.root, state_group, rest)
        return [*held, Held(state, tuple(pool.pages([request.slot])))]

    def blocks_of(self, request: Request, first: int, last: int) -> list[Held]:
        """Those of its blocks from `first` to before `last`, whose ids are known, that it holds."""
        keys, held = request.block_keys(last, self._block_size), []
        for i in range(first, last):
            for group, table in enumerate(request.tables):
                if i >= table.first:
                    item = Item(keys[i], i, keys[i - 1] if i else None, group)
                    held.append(Held(item, tuple(self._pool.pages([table.blocks[i - table.first]]))))
        return held

    def restorable(self, request: Request, failed: Collection[Item]) -> int | None:
        """How many positions a request with these failed loads can go on from. None: it must be looked up again."""
        if not failed:
            return request.num_wanted
        groups, size = self._pool.groups, self._block_size
        num = min(item.place for item in failed) * size
        is_whole = all(table.first <= groups.need_from(g, num) // size for g, table in enumerate(request.tables))
        return num if is_whole and groups.state is None else None

    def commit_loaded(self, loaded: Sequence[Held]) -> None:
        """Offers what was loaded for a request that cannot use it now."""
        for item, pages in loaded:
            if item.group == self._pool.groups.state:
                self._register_state(pages[0], item)
            elif item.num:
                self._pool.register_partial(pages[0], item.key, item.place, item.parent, item.num)
            elif self._pool.register(pages[0], item.key, item.place, item.parent) and self._events is not None:
                self._note_stored(item.key, item.parent, b"", item.group)

    def take_events(self) -> list[KvCacheEvent]:
        """Blocks that can be found or no longer be found, since the last call, in order."""
        assert self._events is not None, "made without kv_events"
        self._note_removed()
        events, self._events = self._events, []
        return events

    def _note_stored(self, key: bytes, parent: bytes | None, ids: bytes, group: int, salt: str = "") -> None:
        assert self._events is not None
        self._note_removed()
        groups = self._pool.groups
        told, shape = groups.told(group), groups.shape_told(group)
        self._events.append(Stored((key,), parent, ids, self._block_size, group=told, shape=shape, salt=salt))

    def _note_removed(self) -> None:
        """A key may be removed and stored again between two calls of `take_events`."""
        assert self._events is not None and self._pool.removed is not None
        if self._pool.removed:
            for group in dict.fromkeys(group for group, _ in self._pool.removed):
                keys = tuple([key for of, key in self._pool.removed if of == group])
                self._events.append(Removed(keys, group=self._pool.groups.told(group)))
            self._pool.removed = []
