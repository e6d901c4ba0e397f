"""Which engine was sent which prompt prefixes, so that a prompt goes to the engine whose prefix cache has its KV.

A prompt's text is cut into blocks. A block's hash covers all text before it as well, as in the engines' prefix caches.
The table evicts the least recently used blocks. It is a hint: a stale entry costs a prefill, never a wrong answer, so
engines do not report their evictions.
"""

import bisect
from collections import OrderedDict
from collections.abc import Sequence

BLOCK_BYTES = 256  # of a prompt's JSON, about 64 tokens
MAX_BLOCKS = 512  # of a prompt; the rest of a longer one is ignored
_CAPACITY = 1 << 17  # blocks
MAX_HOLDERS = 4  # of a block, the last ones; a block that so many were sent is likely to be everywhere


def prefix_blocks(root: bytes, text: bytes) -> list[int]:
    """The hashes of the full blocks of `text`. `root`: hashed before the text."""
    block, found = hash(root), []
    for start in range(0, min(len(text), MAX_BLOCKS * BLOCK_BYTES) - BLOCK_BYTES + 1, BLOCK_BYTES):
        block = hash((block, text[start : start + BLOCK_BYTES]))
        found.append(block)
    return found


class Prefixes:
    """Block hash → the incarnations of engines (`Member.incarnation`) that were sent it."""

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self._capacity = capacity
        self._seen_by: OrderedDict[int, tuple[int, ...]] = OrderedDict()

    def matches(self, blocks: Sequence[int]) -> dict[int, int]:
        """Incarnation → how many leading blocks it was sent, the longest first; without those that were sent none. At
        most `MAX_HOLDERS`, and those with a shorter beginning may have somewhat more of it than is told."""
        seen_by, found = self._seen_by, dict[int, int]()
        # A block stands for those before it, which are evicted after it: the known blocks are a beginning.
        depth = bisect.bisect_left(blocks, True, key=lambda block: block not in seen_by)
        step = 1
        while depth > 0:
            for holder in seen_by.get(blocks[depth - 1], ()):
                found.setdefault(holder, depth)
            if len(found) >= MAX_HOLDERS or depth == 1:
                break
            depth, step = max(1, depth - step), 2 * step
        return found

    def num_common(self, blocks: Sequence[int], num_holders: int) -> int:
        """How many leading blocks at least `num_holders` engines were sent, which is at most `MAX_HOLDERS`."""
        seen_by = self._seen_by
        return bisect.bisect_left(blocks, True, key=lambda block: len(seen_by.get(block, ())) < num_holders)

    def add(self, blocks: Sequence[int], holder: int) -> None:
        seen_by = self._seen_by
        for block in reversed(blocks):  # so that the first block of a prompt is evicted last
            holders = seen_by.get(block)
            if holders is None:
                seen_by[block] = (holder,)
                continue
            if holder not in holders:
                seen_by[block] = (*holders, holder)[-MAX_HOLDERS:]
            seen_by.move_to_end(block)
        while len(self._seen_by) > self._capacity:
            self._seen_by.popitem(last=False)
