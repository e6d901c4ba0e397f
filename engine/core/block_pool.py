"""The pool of cache memory: the reference counts of its blocks, the prefix index, and which block is evicted next.

It knows neither tokens nor requests. Memory is pages of equal size, and a block of group g is `groups.sizes[g]` of
them, named by the first. Any free page serves any group, so there is no fragmentation. A block is in exactly one of
three states; the pages of an empty one belong to no group:

    held    reference count ≥ 1: in that many block tables
    idle    count 0, but its content has a key: found again by `match`, evicted when blocks run out
    empty   count 0 and no key

Each group has an index of its own, in which equal beginnings have equal keys. A key names either a full block or the
beginning of one, after which its holder may still be writing. The latter can only be copied, and the key of the full
block replaces it.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import chain

from ...ipc.messages import ids_to_bytes
from .eviction import RANKINGS, EvictionName, EvictionQueue
from .groups import PLAIN, Groups
from .kv_connector import Evicted, Item

_PARTIAL = -1  # place of a block whose key names only its beginning


class BlockPool:
    """Pages `0 … num_pages - 1`."""

    def __init__(self, *, num_pages: int, groups: Groups = PLAIN, eviction: EvictionName = "lru") -> None:
        """`eviction`: which idle block is evicted first."""
        assert num_pages > 0, num_pages
        self.num_pages = num_pages
        self.groups = groups
        # Lists by block have an entry for each page, of which only a block's first is used.
        self._holders = [0] * num_pages  # block → number of block tables it is in
        self._group = [0] * num_pages
        self._rest: dict[int, list[int]] = {}  # block that is not empty → its other pages, if it has any
        self._key: list[bytes | None] = [None] * num_pages  # block → its key in its group's index, if it has one
        self._place = [0] * num_pages  # which block of its sequence a keyed block is, from 0, or _PARTIAL
        self._parent: list[bytes | None] = [None] * num_pages  # key of the block before a keyed full one
        self._beginning: dict[int, Item] = {}  # block whose key names only its beginning → what it is for a tier
        self._by_name: dict[bytes, int] = {}  # `_name` of a group's key → the block registered for it
        # A recurrent state stands behind the last full block before its position, and is found by the key of that, or
        # by the root: key → {the state's own key: how many positions after the block}. A state is of no use without
        # its block in the full group, and goes with it.
        self.standing: dict[bytes, dict[bytes, int]] = {}
        self._empty = list(range(num_pages - 1, -1, -1))  # pages; a stack, so that low ones go first
        self._idle: OrderedDict[int, None] = OrderedDict()  # the block that was released longest ago comes first
        self._num_idle_pages = 0
        self._num_blocks = [0] * len(groups.shapes)  # of each group, held or idle
        self._num_idle = [0] * len(groups.shapes)
        self._eviction: EvictionName = eviction
        self._queue = None if eviction == "lru" else EvictionQueue(RANKINGS[eviction]())  # of the idle ones' names
        self._uses = [0] * num_pages  # how often a keyed block was found; only counted for the queue
        # What `allocate` has evicted: full blocks, and if there are recurrent states also these and the beginnings of
        # blocks before them; the scheduler takes them.
        self.evicted: list[Evicted] = []
        # (group, key) of full blocks that can no longer be found; None: not recorded
        self.removed: list[tuple[int, bytes]] | None = None

    @property
    def num_free(self) -> int:
        """Pages that `allocate` could hand out: empty ones and those of idle blocks."""
        return len(self._empty) + self._num_idle_pages

    def pages_by_group(self) -> list[tuple[int, int]]:
        """(held, idle) pages of each group."""
        numbers = zip(self._num_blocks, self._num_idle, self.groups.sizes, strict=True)
        return [((num - idle) * size, idle * size) for num, idle, size in numbers]

    @property
    def num_held(self) -> int:
        """Pages of blocks in at least one block table."""
        return self.num_pages - self.num_free

    def allocate(self, num: int, group: int = 0) -> list[int]:
        """`num` blocks of a group with undefined content, each held once. There must be free pages for them."""
        size, empty = self.groups.sizes[group], self._empty
        holders, uses, groups = self._holders, self._uses, self._group
        assert num * size <= self.num_free, (num, size, self.num_free)
        blocks = []
        for _ in range(num):
            while len(empty) < size:
                self._evict()
            block = empty.pop()
            if size > 1:
                self._rest[block] = [empty.pop() for _ in range(size - 1)]
            holders[block], uses[block], groups[block] = 1, 0, group
            blocks.append(block)
        self._num_blocks[group] += num
        return blocks

    def pages(self, blocks: Sequence[int]) -> Sequence[int]:
        """The pages of these blocks, block by block."""
        return [page for block in blocks for page in (block, *self._rest.get(block, ()))] if self._rest else blocks

    def pages_of(self, blocks: Sequence[int]) -> bytes:
        """`pages` as int32."""
        return ids_to_bytes(list(self.pages(blocks)))

    def _size(self, block: int) -> int:
        return self.groups.sizes[self._group[block]]

    def _evict(self) -> None:
        """Takes an idle block out of the prefix index. Its pages are empty."""
        if self._queue is None:
            block = next(iter(self._idle))
        else:
            victim = self._queue.evict()
            assert victim is not None, "there are idle blocks, and none is pinned"
            block = self._by_name[victim.key]
        self._remove_idle(block)
        self._note_evicted(block)
        if self._group[block] == self.groups.full and self._place[block] != _PARTIAL and self.standing:
            for state in self.standing.get(self._key[block] or b"", ()):  # they go with it
                self._note_evicted(self._by_name[_name(self.groups.state or 0, state)])
        self._drop_key(block)
        self._empty_out(block)

    def _note_evicted(self, block: int) -> None:
        item = self.item(block)
        if item is not None:
            key, place, parent, group, num = item
            self.evicted.append(Evicted(block, key, place, parent, group, num, tuple(self._rest.get(block, ()))))

    def item(self, block: int) -> Item | None:
        """What a tier can keep of a block with a key; None: nothing, because only states make beginnings useful."""
        key, parent = self._key[block], self._parent[block]
        assert key is not None, block
        if self._place[block] == _PARTIAL:
            return self._beginning.get(block)
        group = self._group[block]
        num = self.standing[parent or b""][key] if group == self.groups.state else 0
        return Item(key, self._place[block], parent, group, num)

    def _empty_out(self, block: int) -> None:
        """A block without holders and key gives its pages back."""
        self._num_blocks[self._group[block]] -= 1
        self._empty.append(block)
        if self._rest:
            self._empty += self._rest.pop(block, ())

    def _remove_idle(self, block: int) -> None:
        del self._idle[block]
        self._num_idle[self._group[block]] -= 1
        self._num_idle_pages -= self._size(block)

    def match(self, keys: Iterable[bytes], group: int = 0) -> list[int]:
        """The blocks of a group for the longest leading run of known keys. They are not yet held."""
        blocks = []
        for key in keys:
            block = self._by_name.get(_name(group, key) if group else key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def find(self, key: bytes, group: int = 0) -> int | None:
        """The block of a group with this key, full or partial. It is not yet held."""
        return self._by_name.get(_name(group, key))

    def num_idle(self, blocks: Iterable[int]) -> int:
        """The pages of those of `blocks` that are idle, so `hold` would make `num_free` smaller by so many."""
        return sum([self._size(block) for block in blocks if block in self._idle])

    def num_only_held(self, blocks: Iterable[int]) -> int:
        """The pages of those of `blocks` that have one holder, so its `release` would free them."""
        return sum([self._size(block) for block in blocks if self._holders[block] == 1])

    def num_in(self, blocks: Iterable[int]) -> int:
        """The pages of these blocks."""
        return sum([self._size(block) for block in blocks])

    def hold(self, blocks: Iterable[int]) -> None:
        """Another block table has these blocks, which are held or idle."""
        for block in blocks:
            if self._holders[block] == 0:
                self._remove_idle(block)
                if self._queue is not None:
                    self._queue.removed(self._name_of(block))
            self._holders[block] += 1
            self._uses[block] += 1

    def release(self, blocks: Sequence[int], *, is_cold: bool = False) -> None:
        """A row gives blocks back. The last of them is evicted first: the head of a sequence, which more prompts share,
        stays longest. `is_cold`: they are evicted before all others."""
        for block in reversed(blocks):
            assert self._holders[block] > 0, block
            self._holders[block] -= 1
            if self._holders[block] == 0:
                if self._key[block] is None:
                    self._empty_out(block)
                    continue
                self._idle[block] = None
                if is_cold:
                    self._idle.move_to_end(block, last=False)
                self._num_idle[self._group[block]] += 1
                self._num_idle_pages += self._size(block)
                if self._queue is not None:
                    parent, group = self._parent[block], self._group[block]
                    before = None if parent is None or group == self.groups.state else _name(group, parent)
                    self._queue.added(self._name_of(block), max(0, self._place[block]), before, self._uses[block])

    def register(self, block: int, key: bytes, place: int, parent: bytes | None = None) -> bool:
        """`block`, which is held, is full, and `key` names its content: it is block `place` of a sequence, from 0, and
        comes after the block with key `parent`. False: another block has this key already, and keeps it, or this block
        has a key."""
        assert self._holders[block] > 0, block
        if self._key[block] is not None:
            if self._place[block] != _PARTIAL:
                return False
            self._drop_key(block)
        name = _name(self._group[block], key)
        if (other := self._by_name.get(name)) is not None:
            if self.groups.is_plain or self._holders[other]:
                return False
            # Computed again because another group lacked something. The older would be evicted before what follows.
            self._take_over(other)
            is_new = False
        else:
            is_new = True
        self._by_name[name] = block
        self._key[block] = key
        self._place[block] = place
        self._parent[block] = parent
        return is_new

    def _take_over(self, block: int) -> None:
        """Another block takes the key of this idle one."""
        if self._queue is not None:
            self._queue.removed(self._name_of(block))
        self._remove_idle(block)
        self._key[block] = None
        self._beginning.pop(block, None)
        self._empty_out(block)

    def register_state(self, block: int, key: bytes, place: int, behind: bytes, rest: int) -> None:
        """`block`, which is held, is a recurrent state, and `key` names the positions before it: those of `place` full
        blocks, the last of which has the key `behind`, and `rest` more. Nothing happens if that block is not in the
        full group, or the state is known. Without full blocks, `behind` is the root."""
        group, full = self.groups.state, self.groups.full
        assert group is not None and self._holders[block] == 1 and self._key[block] is None, block
        if full is not None and place and self.find(behind, full) is None:
            return
        if self.find(key, group) is None:
            self.register(block, key, place, behind)
            self.standing.setdefault(behind, {})[key] = rest

    def register_partial(
        self, block: int, key: bytes, place: int = 0, parent: bytes | None = None, num: int = 0
    ) -> None:
        """`key` names the beginning of `block`, which is held: `num` positions of block `place` of a sequence, behind
        the block with the key `parent`. It replaces the key of another beginning of it."""
        if self._key[block] is None or self._place[block] == _PARTIAL:
            self.register(block, key, _PARTIAL)
            if self.groups.state is not None and self._key[block] == key:
                self._beginning[block] = Item(key, place, parent, self._group[block], num)

    def drop(self, key: bytes, group: int) -> None:
        """Takes the block of this key, if there is one, out of the prefix index."""
        if (block := self.find(key, group)) is not None:
            if block in self._idle:
                if self._queue is not None:
                    self._queue.removed(self._name_of(block))
                self._remove_idle(block)
                self._drop_key(block)
                self._empty_out(block)
            else:
                self._drop_key(block)

    def drop_unused(self, key: bytes, group: int) -> None:
        """`drop`, if the block is idle and was never found."""
        if (block := self.find(key, group)) is not None and block in self._idle and not self._uses[block]:
            self.drop(key, group)

    def forget(self, blocks: Iterable[int]) -> None:
        """Takes these held blocks out of the prefix index."""
        for block in blocks:
            assert self._holders[block] > 0, block
            if self._key[block] is not None:
                self._drop_key(block)

    def forget_all(self) -> None:
        """Drops the prefix index; idle blocks become empty."""
        for name, block in list(self._by_name.items()):
            if self._queue is not None and block in self._idle:
                self._queue.removed(name)
            self._drop_key(block, with_states=False)
        for block in self._idle:
            self._empty_out(block)
        self._idle.clear()
        self._num_idle = [0] * len(self.groups.shapes)
        self._num_idle_pages = 0

    def _drop_key(self, block: int, *, with_states: bool = True) -> None:
        key, group = self._key[block], self._group[block]
        assert key is not None, block
        del self._by_name[_name(group, key)]
        self._key[block] = None
        self._beginning.pop(block, None)
        if group == self.groups.state:
            behind = self._parent[block]
            assert behind is not None, block
            del self.standing[behind][key]
            if not self.standing[behind]:
                del self.standing[behind]
        elif with_states and group == self.groups.full and key in self.standing:
            assert self.groups.state is not None
            for state in list(self.standing[key]):
                self.drop(state, self.groups.state)
        if self.removed is not None and self._place[block] != _PARTIAL:
            self.removed.append((group, key))

    def _name_of(self, block: int) -> bytes:
        key = self._key[block]
        assert key is not None, block
        return _name(self._group[block], key)

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Asserts that there is no flaw. For tests."""
        flaw = self.flaw(tables)
        assert flaw is None, flaw

    def flaw(self, tables: Iterable[Sequence[int]]) -> str | None:
        """The first invariant that does not hold, given all block tables; None: all hold. Linear in the pool."""
        holders = [0] * self.num_pages
        for table in tables:
            if len(set(table)) != len(table):
                return f"a block is in one table twice: {table}"
            for block in table:
                holders[block] += 1
        if holders != self._holders:
            return "reference counts differ from the tables"
        used = [block for block in range(self.num_pages) if holders[block] or block in self._idle]
        if any(len(self._rest.get(block, ())) != self._size(block) - 1 for block in used):
            return "a block has too few or too many pages"
        if sorted([*self._empty, *used, *chain.from_iterable(self._rest.values())]) != list(range(self.num_pages)):
            return "a page is lost or in two places"
        if self._num_idle_pages != self.num_in(self._idle) or any(holders[block] for block in self._idle):
            return "idle blocks are miscounted"
        return self._flaw_of_counts(used) or self._flaw_of_keys()

    def _flaw_of_counts(self, used: Sequence[int]) -> str | None:
        for g in range(len(self.groups.shapes)):
            nums = [sum(self._group[block] == g for block in blocks) for blocks in (used, self._idle)]
            if nums != [self._num_blocks[g], self._num_idle[g]]:
                return f"the blocks of group {g} are miscounted"
        return None

    def _flaw_of_keys(self) -> str | None:
        states = sorted(key for keys in self.standing.values() for key in keys)
        group, full = self.groups.state, self.groups.full
        known = [block for block in self._by_name.values() if self._group[block] == group]
        if sorted(map(self._name_of, known)) != sorted(_name(group or 0, key) for key in states):
            return "a recurrent state is not listed where it stands, or is listed without being there"
        for block in known:
            behind = self._parent[block] or b""
            if full is not None and self._place[block] > 0 and self.find(behind, full) is None:
                return "a recurrent state stands behind a block that is gone"
        if self._queue is not None and set(self._queue.keys()) != {self._name_of(block) for block in self._idle}:
            return "an idle block is not in the eviction queue"
        if not all(self._key[block] and self._name_of(block) == name for name, block in self._by_name.items()):
            return "the prefix index names a block with another key"
        if sum(key is not None for key in self._key) != len(self._by_name):
            return "a key is registered twice"
        return None

    def rebuild(self, tables: Iterable[Sequence[int]]) -> None:
        """Counts everything again from these block tables, which are all: the prefix index is empty, and so are all
        other blocks."""
        if self.removed is not None:
            full = (block for block in self._by_name.values() if self._place[block] != _PARTIAL)
            self.removed += [(self._group[block], key) for block in full if (key := self._key[block]) is not None]
        self._by_name.clear()
        self._beginning.clear()
        self.standing.clear()
        self._key = [None] * self.num_pages
        self._idle.clear()
        self._num_idle = [0] * len(self.groups.shapes)
        self._num_idle_pages = 0
        if self._queue is not None:
            self._queue = EvictionQueue(RANKINGS[self._eviction]())
        self._holders = [0] * self.num_pages
        for block in chain.from_iterable(tables):
            self._holders[block] += 1
        held = {block for block in range(self.num_pages) if self._holders[block]}
        self._rest = {block: rest for block, rest in self._rest.items() if block in held}
        self._num_blocks = [sum(self._group[block] == group for block in held) for group in range(len(self._num_idle))]
        held.update(chain.from_iterable(self._rest.values()))
        self._empty = [page for page in range(self.num_pages - 1, -1, -1) if page not in held]


def _name(group: int, key: bytes) -> bytes:
    """The name of a group's key among the keys of all groups."""
    return key + bytes((group,)) if group else key
