"""Which engine has seen which beginnings of prompts, so that a prompt goes where its KV still is.

A prompt's text is cut into blocks, and a block's number stands for everything before it as well, as the blocks of the
engines' own prefix caches do. The table forgets what was used longest ago. It only ever makes a choice better or worse,
never wrong, so nobody tells it what engines have dropped.
"""

from collections import OrderedDict
from collections.abc import Sequence

BLOCK_BYTES = 256  # of a prompt's JSON, some 64 tokens
MAX_BLOCKS = 512  # of a prompt; longer ones that are alike so far are alike enough
_CAPACITY = 1 << 17  # blocks


def prefix_blocks(root: bytes, text: bytes) -> list[int]:
    """The numbers of the whole blocks of `text`. `root`: what has to be the same besides."""
    number, found = hash(root), []
    for start in range(0, min(len(text), MAX_BLOCKS * BLOCK_BYTES) - BLOCK_BYTES + 1, BLOCK_BYTES):
        number = hash((number, text[start : start + BLOCK_BYTES]))
        found.append(number)
    return found


class Prefixes:
    """Blocks and the engines that have seen them, by the number of an engine's incarnation."""

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self._capacity = capacity
        self._seen_by: OrderedDict[int, set[int]] = OrderedDict()

    def matches(self, blocks: Sequence[int]) -> dict[int, int]:
        """Incarnation → how many leading blocks it has seen, of those that have seen any."""
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
        """A prompt goes to an engine."""
        for block in reversed(blocks):  # so that the first ones are the last to be forgotten
            self._seen_by.setdefault(block, set()).add(holder)
            self._seen_by.move_to_end(block)
        while len(self._seen_by) > self._capacity:
            self._seen_by.popitem(last=False)
