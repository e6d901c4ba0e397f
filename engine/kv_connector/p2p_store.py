"""What a p2p instance serves: blocks in host memory by key, and what is known of those that are being computed.

A block is kept as a whole when the core half says so. Before, a pass may fill it, from its first byte on, layer by
layer. Its last layers are sent only once it is kept, because only then is the pass known to be good.
"""

import threading
from collections import Counter, deque
from collections.abc import Sequence
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


@dataclass(eq=False)
class _Fill:
    """Blocks that a pass computes, layer by layer. As many bytes of each are there."""

    rid: int
    rows: Tensor  # uint8 [rows, block_bytes]
    is_memory: bool  # the rows are pages of the store's memory
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
        self._fills: dict[bytes, tuple[_Fill, int]] = {}  # by name, which is in no block: the fill and its row
        self._num_fills = 0
        self._states = StateIndex(facts.state)
        self._coming: dict[int, list[bytes]] = {}  # rid → the keys of the blocks that it computes
        self._num_coming: Counter[bytes] = Counter()  # key → how many of these requests compute it
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

    def fill(self, rid: int, names: Sequence[bytes], limit: int) -> None:
        """A pass begins to compute these blocks of an announced request. limit: bytes of each that are sent before they
        are kept. What an earlier pass has computed of them is forgotten."""
        with self._lock:
            for name in names:
                self._end_fill(name)
            self._num_fills += 1
            is_memory = self._memory is not None and len(self._free) >= len(names)
            if is_memory:
                assert self._memory is not None
                rows, places = self._memory, [self._free.popleft() for _ in names]
            else:
                rows = torch.empty((len(names), self._facts.block_bytes), dtype=torch.uint8)
                places = list(range(len(names)))
            fill = _Fill(rid, rows, is_memory, limit, self._num_fills)
            self._fills.update((name, (fill, row)) for name, row in zip(names, places, strict=True))

    def grow(self, names: Sequence[bytes], first: int, parts: Tensor) -> None:
        """The next bytes of blocks that one call of `fill` has named. parts: uint8 [blocks, bytes]."""
        with self._lock:
            self.num_changes += 1
            fill = self._fills[names[0]][0]
            assert fill.num == first, (fill.num, first)
            fill.rows[[self._fills[name][1] for name in names], first : first + parts.shape[1]] = parts
            fill.num += parts.shape[1]

    def is_filled(self, name: bytes) -> bool:
        """Whether a pass has computed all of this block, which is not kept yet."""
        found = self._fills.get(name)
        return found is not None and found[0].num == self._facts.block_bytes

    def expect(self, coming: Sequence[tuple[int, list[bytes]]]) -> None:
        """Announces the blocks of requests that are being computed."""
        with self._lock:
            self.num_changes += bool(coming)
            for rid, keys in coming:
                self._coming[rid] = keys
                self._num_coming.update(keys)

    def give_up(self, rids: Sequence[int]) -> None:
        """Withdraws the announcements of these requests; all of them must be announced."""
        with self._lock:
            self.num_changes += bool(rids)
            for rid in rids:
                for key in self._coming.pop(rid):
                    self._num_coming[key] -= 1
                    if not self._num_coming[key]:
                        del self._num_coming[key]
                    if (found := self._fills.get(key)) is not None and found[0].rid == rid:
                        self._end_fill(key)

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
            contents = [self._content(name, part) for name in names]
            return None if None in contents else b"".join([each for each in contents if each is not None])

    def _content(self, name: bytes, part: Part | None) -> memoryview | None:
        block, filling, origin = self._blocks.get(name), self._fills.get(name), self._origins.get(name, 0)
        if filling is not None:
            fill, row = filling
            whole, origin = fill.rows[row].numpy().data, fill.origin
        elif isinstance(block, list):
            assert self._memory is not None, "a page of no memory"
            pages = self._memory[block[0] : block[0] + 1] if len(block) == 1 else self._memory[block]
            whole = pages.view(-1).numpy().data
        elif block is not None:
            whole = memoryview(block)
        else:
            return None
        if part is None:
            return None if filling is not None else whole
        return whole[part.offset : part.offset + part.size] if origin == part.origin else None

    def places(self, names: Sequence[bytes], part: Part | None = None) -> tuple[tuple[int, int], ...]:
        """Where these items are, or this part of each: addresses and bytes. Empty: not all of them are in the memory.
        What is dropped may be overwritten at any time, so readers verify what they read."""
        with self._lock:
            page_bytes, found = self._facts.block_bytes, []
            for name in names:
                block, filling = self._blocks.get(name), self._fills.get(name)
                if filling is not None and filling[0].is_memory:
                    block = [filling[1]]
                if not isinstance(block, list):
                    return ()
                assert self._memory is not None, "a page of no memory"
                first, last = (0, len(block) * page_bytes) if part is None else (part.offset, part.offset + part.size)
                for i, page in enumerate(block):
                    begin, end = max(first - i * page_bytes, 0), min(last - i * page_bytes, page_bytes)
                    if begin < end:
                        found.append((self._memory[page].data_ptr() + begin, end - begin))
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
        fill, row = self._fills.pop(name)
        assert fill.num == self._facts.block_bytes, f"{fill.num} bytes are no block"
        self._blocks[name] = [row] if fill.is_memory else fill.rows[row].numpy().tobytes()
        self._origins[name] = fill.origin

    def _end_fill(self, name: bytes) -> None:
        """Forgets what a pass has computed of a block that was not kept."""
        if (found := self._fills.pop(name, None)) is not None and found[0].is_memory:
            self._free.append(found[1])

    def _of_fill(self, fill: _Fill) -> There:
        return There(min(fill.num, fill.limit), self._facts.block_bytes, fill.origin)

    def is_coming(self, name: bytes) -> bool:
        """Whether an item is announced. Only blocks of a cache with one group are: they are kept as they are filled."""
        return self._facts.num_groups == 1 and name in self._num_coming

    def look_up(self, question: Lookup) -> tuple[Found, int]:
        """What there is, and what is announced; and how many bytes of these blocks, in order, may be sent."""
        keys = split_keys(question.keys)[:MAX_KEYS]
        with self._lock:
            return self._look_up(question, keys)

    def _look_up(self, question: Lookup, keys: list[bytes]) -> tuple[Found, int]:
        facts, blocks = self._facts, self._blocks
        full = facts.full
        run = len(keys)
        if full is not None:
            run = next((i for i, key in enumerate(keys) if item_name(key, full) not in blocks), len(keys))
        is_coming, num_coming = False, 0
        if full is not None and run < len(keys):
            is_coming = question.is_expected or keys[run] in self._num_coming
            if facts.num_groups == 1:
                later = keys[run:]
                num_coming = next(
                    (i for i, key in enumerate(later) if key not in self._num_coming and key not in blocks), len(later)
                )
        others = [group for group in range(facts.num_groups) if group not in (full, facts.state)]
        names = [item_name(key, group) for group in others for key in keys[:run]]
        behind = [question.behind, *keys[:run]] if facts.state is not None else ()
        states = [(before, key, num) for before in behind for key, num in self._states.behind(before).items()]
        tables = [group for group in range(facts.num_groups) if group != facts.state]
        names += [item_name(key, group) for _, key, num in states if num for group in tables]
        found = b"".join([name for name in names if name in blocks])
        num_bytes = run * facts.block_bytes
        for key in keys[run : run + num_coming]:
            num_bytes += self._of_fill(self._fills[key][0]).num if key in self._fills else 0
        return Found(question.id, run, is_coming, found, tuple(states), num_coming), num_bytes
