"""Token sequences that must not appear in an output: the last token of each is banned after all its others."""

from collections import defaultdict
from collections.abc import Collection, Sequence

from ...errors import RequestError

_ID_BYTES = 4


class BadWords:
    """The banned sequences of one output. As in vLLM, tokens of the prompt do not count."""

    def __init__(self, words: Sequence[bytes], vocab_size: int) -> None:
        """`words`: int32 ids each. Raises RequestError if one is empty or has an id outside the vocabulary."""
        # All ids of a sequence but the last → the last ids that are banned after them.
        self._last_after: defaultdict[tuple[int, ...], set[int]] = defaultdict(set)
        for word in words:
            if not word or len(word) % _ID_BYTES:
                raise RequestError("invalid_request", "bad_words must hold sequences of token ids, and none empty.")
            ids = memoryview(word).cast("i").tolist()
            if not 0 <= min(ids) <= max(ids) < vocab_size:
                raise RequestError("invalid_request", f"bad_words must hold token ids between 0 and {vocab_size - 1}.")
            self._last_after[tuple(ids[:-1])].add(ids[-1])
        self._lengths = sorted({len(first) for first in self._last_after})
        self._tail: list[int] = []  # of the output, as long as the longest sequence but its last id

    def accept(self, ids: Sequence[int]) -> None:
        """Appends sampled tokens to the output."""
        self._tail += ids
        del self._tail[: max(len(self._tail) - self._lengths[-1], 0)]

    def banned(self) -> Collection[int]:
        """The ids that would complete a banned sequence now."""
        tail = self._tail
        found = [
            self._last_after[first]
            for length in self._lengths
            if length <= len(tail) and (first := tuple(tail[len(tail) - length :])) in self._last_after
        ]
        return found[0] if len(found) == 1 else set().union(*found)
