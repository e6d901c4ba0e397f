"""When waiting requests time out."""

from collections.abc import Container, Iterator, Sized
from heapq import heapify, heappop, heappush
from typing import Protocol


class _Open(Container[int], Sized, Protocol):
    """The rids of all requests that have not ended."""


class Deadlines:
    """Times by rid; the clock is the caller's."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def next(self) -> float | None:
        """The earliest time."""
        return self._heap[0][0] if self._heap else None

    def put(self, at: float, rid: int, open: _Open) -> None:
        """`open`: the requests that have not ended; deadlines of all others are dropped now and then."""
        heappush(self._heap, (at, rid))
        if len(self._heap) > 2 * len(open) + 64:
            self._heap = [deadline for deadline in self._heap if deadline[1] in open]
            heapify(self._heap)

    def take_due(self, now: float) -> Iterator[int]:
        """The rids whose deadline has passed, each once."""
        while self._heap and self._heap[0][0] <= now:
            yield heappop(self._heap)[1]
