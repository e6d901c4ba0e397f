"""What a p2p instance serves: blocks in host memory by key, and what is known of those that are being computed.

An item, a block of one group or a recurrent state, is kept as a whole when the core half says so. Before, a pass may
fill a block, from its first byte on, layer by layer. Its last layers are sent only once it is kept, because only then
is the pass known to be good.
"""

import threading
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.kv_connector import Item, item_name
from .base import ConnectorFacts
from .p2p_wire import MAX_KEYS, Found, Lookup, split_keys
from .states import StateIndex


class There(NamedTuple):
    """What may be sent of an item."""

    num: int  # bytes, the first ones
    size: int  # bytes of all of it
    origin: int  # of equal origin: bytes of one computation; 0: it was kept as a whole


class Part(NamedTuple):
    """The same bytes of each of some items."""

    offset: int
    size: int
    origin: int  # of all of them


class Answer(NamedTuple):
    """What there is of what a lookup names."""

    there: Found
    promised: Found  # with what is announced
    is_coming: bool  # more is announced, or expected
    num_bytes: int  # of the promised blocks, that may be sent
    num_promised: int  # bytes of these blocks


@dataclass(eq=False)
class _Fill:
    """Blocks of one group that a pass computes, layer by layer. As many bytes of each are there."""

    rid: int
    rows: Tensor  # uint8 [rows, page bytes]
    is_memory: bool  # the rows are pages of the store's memory
    size: int  # bytes of a block
    limit: int  # bytes that may be sent before the blocks are kept
    origin: int
    num: int = 0  # bytes


class BlockStore:
    """The core half decides what it holds; any thread may call."""

    def __init__(self, facts: ConnectorFacts, memory: Tensor | None = None) -> None:
        """memory: uint8 [pages, block_bytes], where blocks are kept that peers read by themselves."""
        self._facts = facts
        self._memory = memory
        self._free = deque(range(0 if memory is None else len(memory)))  # pages of it; the last to be freed comes last
        self._blocks: dict[bytes, bytes | list[int]] = {}  # by name; a list: pages of the memory
        self._origins: dict[bytes, int] = {}  # of blocks that were kept from a fill
        self._fills: dict[bytes, tuple[_Fill, list[int]]] = {}  # by name, which is in no block: the fill and its rows
        self._num_fills = 0
        self._states, self._coming_states = StateIndex(facts.state), StateIndex(facts.state)
        self._coming: dict[int, Sequence[bytes]] = {}  # rid → the names of the items that it computes
        self._num_coming: Counter[bytes] = Counter()  # name → how many of these requests compute it
        self._lock = threading.Lock()
        self.num_changes = 0  # of the contents that answers depend on

    def keep(
        self,
        keys: Sequence[bytes],
        blocks: Sequence[bytes | None],
        states: Sequence[tuple[bytes, bytes, int]] = (),
    ) -> None:
        """None: the block is filled."""
        with self._lock:
            self.num_changes += 1
            for key, block in zip(keys, blocks, strict=True):
                if block is None:
                    self._keep_filled(key)
                else:
                    self._end_fill(key)
                    self._blocks[key] = self._place(block)
            for behind, key, num in states:
                self._states.add(Item(key, 0, behind, self._facts.state or 0, num))

    def clear(self) -> None:
        """Drops all that it has, and all that is announced."""
        with self._lock:
            self.num_changes += 1
            for block in self._blocks.values():
                if isinstance(block, list):
                    self._free.extend(block)
            for name in list(self._fills):
                self._end_fill(name)
            for mapping in (self._blocks, self._origins, self._coming, self._num_coming):
                mapping.clear()
            for index in (self._states, self._coming_states):
                index.clear()

    def drop(self, keys: Sequence[bytes]) -> None:
        """Removes blocks; all of them must be present."""
        with self._lock:
            self.num_changes += bool(keys)
            for key in keys:
                block = self._blocks.pop(key)
                if isinstance(block, list):
                    self._free.extend(block)
                self._origins.pop(key, None)
                self._states.remove(key)

    def fill(self, rid: int, names: Sequence[bytes], limit: int, num_pages: int = 1) -> None:
        """A pass begins to compute these blocks of one group of an announced request. limit: bytes of each that are
        sent before they are kept. num_pages: of each. What an earlier pass has computed of them is forgotten."""
        with self._lock:
            for name in names:
                self._end_fill(name)
            self._num_fills += 1
            page_bytes, num = self._facts.block_bytes, len(names) * num_pages
            is_memory = self._memory is not None and len(self._free) >= num
            if is_memory:
                assert self._memory is not None
                rows, places = self._memory, [self._free.popleft() for _ in range(num)]
            else:
                rows, places = torch.empty((num, page_bytes), dtype=torch.uint8), list(range(num))
            fill = _Fill(rid, rows, is_memory, num_pages * page_bytes, limit, self._num_fills)
            for i, name in enumerate(names):
                self._fills[name] = fill, places[i * num_pages : (i + 1) * num_pages]

    def grow(self, names: Sequence[bytes], first: int, parts: Tensor) -> None:
        """The next bytes of blocks that one call of `fill` has named. parts: uint8 [blocks, bytes]."""
        with self._lock:
            self.num_changes += 1
            fill, last = self._fills[names[0]][0], first + parts.shape[1]
            assert fill.num == first, (fill.num, first)
            for i, begin, end in pages_between(first, last, self._facts.block_bytes):
                at = i * self._facts.block_bytes - first  # where page i begins in the parts
                fill.rows[[self._fills[name][1][i] for name in names], begin:end] = parts[:, at + begin : at + end]
            fill.num = last

    def is_filled(self, name: bytes) -> bool:
        """Whether a pass has computed all of this block, which is not kept yet."""
        found = self._fills.get(name)
        return found is not None and found[0].num == found[0].size

    def expect(self, rid: int, names: Sequence[bytes], states: Sequence[tuple[bytes, bytes, int]] = ()) -> None:
        """Announces the items of a request that is being computed. states: of these, as `keep` has them."""
        with self._lock:
            self.num_changes += 1
            self._coming[rid] = names
            self._num_coming.update(names)
            for behind, key, num in states:
                self._coming_states.add(Item(key, 0, behind, self._facts.state or 0, num))

    def give_up(self, rids: Sequence[int]) -> None:
        """Withdraws the announcements of these requests; all of them must be announced."""
        with self._lock:
            self.num_changes += bool(rids)
            for rid in rids:
                for name in self._coming.pop(rid):
                    self._num_coming[name] -= 1
                    if not self._num_coming[name]:
                        del self._num_coming[name]
                        self._coming_states.remove(name)
                    if (found := self._fills.get(name)) is not None and found[0].rid == rid:
                        self._end_fill(name)

    def __contains__(self, name: bytes) -> bool:
        return name in self._blocks

    def there(self, name: bytes) -> There | None:
        """What may be sent of an item; None: nothing is there."""
        with self._lock:
            block = self._blocks.get(name)
            if block is not None:
                size = len(block) * self._facts.block_bytes if isinstance(block, list) else len(block)
                return There(size, size, self._origins.get(name, 0))
            return None if (found := self._fills.get(name)) is None else self._of_fill(found[0])

    def read(self, names: Sequence[bytes], part: Part | None = None) -> bytes | None:
        """The bytes of these items, one after the other: all, or this part of each. None: one of them is not there any
        more, or is another computation's."""
        with self._lock:
            contents: list[memoryview] = []
            for name in names:
                found = self._contents(name, part)
                if found is None:
                    return None
                contents += found
            return b"".join(contents)

    def _contents(self, name: bytes, part: Part | None) -> list[memoryview] | None:
        filling, block = self._fills.get(name), self._blocks.get(name)
        origin = self._origins.get(name, 0) if filling is None else filling[0].origin
        if (part is None and filling is not None) or (part is not None and part.origin != origin):
            return None
        if isinstance(block, bytes):
            return [memoryview(block) if part is None else memoryview(block)[part.offset : part.offset + part.size]]
        if filling is not None:
            rows, places = filling[0].rows, filling[1]
        elif block is not None:
            assert self._memory is not None, "a page of no memory"
            rows, places = self._memory, block
        else:
            return None
        return [rows[places[i], begin:end].numpy().data for i, begin, end in self._pages_of(places, part)]

    def _pages_of(self, places: Sequence[int], part: Part | None) -> Iterator[tuple[int, int, int]]:
        """Of an item with these pages, or a part of it: as `pages_between`."""
        first, size = (0, len(places) * self._facts.block_bytes) if part is None else (part.offset, part.size)
        return pages_between(first, first + size, self._facts.block_bytes)

    def places(self, names: Sequence[bytes], part: Part | None = None) -> tuple[tuple[int, int], ...]:
        """Where these items are, or this part of each: addresses and bytes. Empty: not all of them are in the memory.
        What is dropped may be overwritten at any time, so readers verify what they read."""
        with self._lock:
            found = []
            for name in names:
                block, filling = self._blocks.get(name), self._fills.get(name)
                if filling is not None and filling[0].is_memory:
                    block = filling[1]
                if not isinstance(block, list):
                    return ()
                assert self._memory is not None, "a page of no memory"
                for i, begin, end in self._pages_of(block, part):
                    found.append((self._memory[block[i]].data_ptr() + begin, end - begin))
            return tuple(found)

    def _place(self, block: bytes) -> bytes | list[int]:
        """Copies a block into the memory, if there is room."""
        num = len(block) // self._facts.block_bytes
        if self._memory is None or len(self._free) < num:
            return block
        pages = [self._free.popleft() for _ in range(num)]
        self._memory[pages] = torch.frombuffer(bytearray(block), dtype=torch.uint8).view(num, -1)
        return pages

    def _keep_filled(self, name: bytes) -> None:
        fill, places = self._fills.pop(name)
        assert fill.num == fill.size, f"{fill.num} bytes are no block"
        self._blocks[name] = places if fill.is_memory else fill.rows[places].numpy().tobytes()
        self._origins[name] = fill.origin

    def _end_fill(self, name: bytes) -> None:
        """Forgets what a pass has computed of a block that was not kept."""
        if (found := self._fills.pop(name, None)) is not None and found[0].is_memory:
            self._free.extend(found[1])

    def _of_fill(self, fill: _Fill) -> There:
        return There(min(fill.num, fill.limit), fill.size, fill.origin)

    def is_coming(self, name: bytes) -> bool:
        """Whether an item is announced."""
        return name in self._num_coming

    def look_up(self, question: Lookup) -> Answer:
        keys = split_keys(question.keys)[:MAX_KEYS]
        with self._lock:
            return self._look_up(question, keys)

    def _look_up(self, question: Lookup, keys: list[bytes]) -> Answer:
        facts, blocks, coming = self._facts, self._blocks, self._num_coming
        run = reach = len(keys)
        if facts.full is not None:
            names = [item_name(key, facts.full) for key in keys]
            run = next((i for i, name in enumerate(names) if name not in blocks), len(keys))
            reach = next((i for i, name in enumerate(names) if name not in blocks and name not in coming), len(keys))
        there = self._found(question, keys[:run], run, with_coming=False)
        promised = self._found(question, keys[:reach], run, with_coming=True)
        num_bytes = num_promised = 0
        for group in facts.tables:
            size = facts.bytes_of(group)
            for name in [item_name(key, group) for key in keys[:reach]]:
                if name in blocks:
                    num_bytes += size
                    num_promised += size
                elif name in coming:
                    num_bytes += self._of_fill(self._fills[name][0]).num if name in self._fills else 0
                    num_promised += size
        is_coming = promised != there or (question.is_expected and not self._has_end(question, keys, run))
        return Answer(there, promised, is_coming, num_bytes, num_promised)

    def _found(self, question: Lookup, keys: list[bytes], num: int, *, with_coming: bool) -> Found:
        """What there is of all groups for these blocks, the first `num` of which the full group has."""
        facts = self._facts
        names = [item_name(key, group) for group in facts.tables if group != facts.full for key in keys]
        states: dict[tuple[bytes, bytes, int], None] = {}
        for index in (self._states, self._coming_states) if with_coming else (self._states,):
            for behind in (question.behind, *keys) if facts.state is not None else ():
                states.update(((behind, key, rest), None) for key, rest in index.behind(behind).items())
        names += [item_name(key, group) for _, key, rest in states if rest for group in facts.tables]
        has = [name for name in names if name in self._blocks or (with_coming and name in self._num_coming)]
        return Found(question.id, num, False, b"".join(has), tuple(states), len(keys) - num)

    def _has_end(self, question: Lookup, keys: list[bytes], run: int) -> bool:
        """Whether each group has something at the end of these blocks, from where another instance could go on."""
        facts, end = self._facts, keys[-1] if keys else question.behind
        has_blocks = run == len(keys) and all(item_name(end, group) in self._blocks for group in facts.tables if keys)
        return has_blocks and (facts.state is None or bool(self._states.behind(end)))


def pages_between(first: int, last: int, page_bytes: int) -> Iterator[tuple[int, int, int]]:
    """The bytes [first, last) of an item of several pages: in each of the pages that have some, its number and the
    first and last of its bytes."""
    for i in range(first // page_bytes, -(-last // page_bytes)):
        yield i, max(first - i * page_bytes, 0), min(last - i * page_bytes, page_bytes)
