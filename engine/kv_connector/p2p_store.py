"""What a p2p instance serves: blocks in host memory by key, and what is known of those that are being computed."""

import threading
from collections import Counter, deque
from collections.abc import Sequence

import torch
from torch import Tensor

from ..core.kv_connector import Item, item_name
from .base import ConnectorFacts
from .p2p_wire import MAX_KEYS, Found, Lookup, split_keys
from .states import StateIndex


class BlockStore:
    """The core half decides what it holds; any thread may call."""

    def __init__(self, facts: ConnectorFacts, memory: Tensor | None = None) -> None:
        """memory: uint8 [pages, block_bytes], where blocks are kept that peers read by themselves."""
        self._facts = facts
        self._memory = memory
        self._free = deque(range(0 if memory is None else len(memory)))  # pages of it; the last to be freed comes last
        self._blocks: dict[bytes, bytes | list[int]] = {}  # by name; a list: pages of the memory
        self._states = StateIndex(facts.state)
        self._coming: dict[int, list[bytes]] = {}  # rid → the keys of the blocks that it computes
        self._num_coming: Counter[bytes] = Counter()  # key → how many of these requests compute it
        self._lock = threading.Lock()
        self.num_changes = 0  # of the contents that answers depend on

    def keep(
        self, keys: Sequence[bytes], blocks: Sequence[bytes], states: Sequence[tuple[bytes, bytes, int]] = ()
    ) -> None:
        with self._lock:
            self.num_changes += 1
            self._blocks.update((key, self._place(block)) for key, block in zip(keys, blocks, strict=True))
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
                self._states.remove(key)

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
            self.num_changes += 1
            for rid in rids:
                for key in self._coming.pop(rid):
                    self._num_coming[key] -= 1
                    if not self._num_coming[key]:
                        del self._num_coming[key]

    def __contains__(self, name: bytes) -> bool:
        return name in self._blocks

    def get(self, name: bytes) -> bytes | None:
        """The bytes of an item."""
        with self._lock:
            block = self._blocks.get(name)
            if not isinstance(block, list):
                return block
            assert self._memory is not None, "a page of no memory"
            return self._memory[block].numpy().tobytes()

    def places(self, names: Sequence[bytes], offset: int, size: int) -> tuple[tuple[int, int], ...]:
        """Where `size` bytes of these items are, from `offset` of the first on: addresses and bytes. Empty: not all of
        them are in the memory. What is dropped may be overwritten at any time, so readers verify what they read."""
        with self._lock:
            pages: list[int] = []
            for name in names:
                block = self._blocks.get(name)
                if not isinstance(block, list):
                    return ()
                pages += block
            assert self._memory is not None, "a page of no memory"
            page_bytes, found = self._facts.block_bytes, []
            for page in pages:
                if (length := min(page_bytes - offset, size)) > 0:
                    found.append((self._memory[page].data_ptr() + offset, length))
                    size -= length
                offset = max(0, offset - page_bytes)
            return tuple(found)

    def _place(self, block: bytes) -> bytes | list[int]:
        """Copies a block into the memory, if there is room."""
        num = len(block) // self._facts.block_bytes
        if self._memory is None or len(self._free) < num:
            return block
        pages = [self._free.popleft() for _ in range(num)]
        self._memory[pages] = torch.frombuffer(bytearray(block), dtype=torch.uint8).view(num, -1)
        return pages

    def is_coming(self, name: bytes) -> bool:
        """Whether an item is announced. Only blocks of a cache with one group are: they are kept as they are filled."""
        return self._facts.num_groups == 1 and name in self._num_coming

    def look_up(self, question: Lookup) -> Found:
        """What there is, and what is announced."""
        keys = split_keys(question.keys)[:MAX_KEYS]
        with self._lock:
            return self._look_up(question, keys)

    def _look_up(self, question: Lookup, keys: list[bytes]) -> Found:
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
        return Found(question.id, run, is_coming, found, tuple(states), num_coming)
