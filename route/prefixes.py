"""Which engine was sent which prompt prefixes, so that a prompt goes to the engine whose prefix cache has its KV.

A prompt's text is cut into blocks. A block's hash covers all text before it as well, as in the engines' prefix caches.
The table evicts the least recently used blocks. It is a hint: a stale entry costs a prefill, never a wrong answer, so
engines do not report their evictions.
"""

from collections import OrderedDict
from collections.abc import Sequence

BLOCK_BYTES = 256  # of a prompt's JSON, about 64 tokens
MAX_BLOCKS = 512  # of a prompt; the rest of a longer one is ignored
_CAPACITY = 1 << 17  # blocks


def prefix_blocks(root: bytes, text: bytes) -> list[int]:
    """The hashes of the full blocks of `text`. `root`: hashed before the text."""
    block, found = hash(root), []
    for start in range(0, min(len(text), MAX_BLOCKS * BLOCK_BYTES) - BLOCK_BYTES + 1, BLOCK_BYTES):
        block = hash((block, text[start : start + BLOCK_BYTES]))
        found.append(block)
    return found


class Prefixes:
    """Block hash → the incarnations of engines (`Engine.incarnation`) that were sent it."""

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self._capacity = capacity
        self._seen_by: OrderedDict[int, set[int]] = OrderedDict()

    def matches(self, blocks: Sequence[int]) -> dict[int, int]:
        """Incarnation → how many leading blocks it was sent; without those that were sent none."""
        found: dict[int, int] = {}
        for length, block in enumerate(blocks, start=1):
            holders = self._seen_by.get(block)
            if holders is None:
                break
            for holder in holders:
                if found.get(holder, 0) == length - 1:
                    found[holder] = length
        return found

    def add(self, blocks: Sequence[int], holder: int) -> None:
        for block in reversed(blocks):  # so that the first block of a prompt is evicted last
            self._seen_by.setdefault(block, set()).add(holder)
            self._seen_by.move_to_end(block)
        while len(self._seen_by) > self._capacity:
            self._seen_by.popitem(last=False)
