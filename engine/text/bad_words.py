"""Token sequences that must not appear in an output: the last token of each is banned wherever the others have come."""

from collections import defaultdict
from collections.abc import Collection, Sequence

from ...errors import RequestError

_ID_BYTES = 4


class BadWords:
    """One output's banned sequences. The prompt does not count, as with vLLM."""

    def __init__(self, words: Sequence[bytes], vocab_size: int) -> None:
        """`words`: int32 ids each. Raises RequestError if one is empty or no token of the vocabulary."""
        self._last_after: defaultdict[tuple[int, ...], set[int]] = defaultdict(set)  # first ids → what may not follow
        for word in words:
            if not word or len(word) % _ID_BYTES:
                raise RequestError("invalid_request", "bad_words must hold sequences of token ids, and none empty.")
            ids = memoryview(word).cast("i").tolist()
            if not 0 <= min(ids) <= max(ids) < vocab_size:
                raise RequestError("invalid_request", f"bad_words must hold token ids between 0 and {vocab_size - 1}.")
            self._last_after[tuple(ids[:-1])].add(ids[-1])
        self._lengths = sorted({len(first) for first in self._last_after})
        self._tail: list[int] = []  # as much of the output as the longest sequence needs

    def accept(self, ids: Sequence[int]) -> None:
        """These came next."""
        self._tail += ids
        del self._tail[: max(len(self._tail) - self._lengths[-1], 0)]

    def banned(self) -> Collection[int]:
        """What would complete a sequence now."""
        tail = self._tail
        found = [
            self._last_after[first]
            for length in self._lengths
            if length <= len(tail) and (first := tuple(tail[len(tail) - length :])) in self._last_after
        ]
        return found[0] if len(found) == 1 else set().union(*found)
