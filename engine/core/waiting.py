"""The requests that wait, in the lines that the policy gave them."""

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator
from operator import attrgetter

from .policy import Policy
from .request import Request

_arrival = attrgetter("arrival")


class Waiting:
    """Lines of requests, each by arrival."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._lines: dict[Hashable, list[Request]] = {}  # only lines with somebody in them
        self._num = 0
        self.num_tokens = 0  # prompt and longest output of all of them

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[Request]:
        return (request for line in self._lines.values() for request in line)

    def add(self, request: Request) -> None:
        """Takes its place by arrival: a preempted request stands where it stood."""
        insort(self._lines.setdefault(request.queue_key, []), request, key=_arrival)
        self._num += 1
        self.num_tokens += request.max_len

    def remove(self, request: Request) -> None:
        """Leaves its line, wherever it stands."""
        line = self._lines[request.queue_key]
        place = bisect_left(line, request.arrival, key=_arrival)
        assert line[place] is request, request.rid
        del line[place]
        if not line:
            del self._lines[request.queue_key]
        self._num -= 1
        self.num_tokens -= request.max_len

    def first(self) -> Request | None:
        """Who goes first; equal lines by arrival."""
        if not self._lines:
            return None
        rank = self._policy.rank
        return min((line[0] for line in self._lines.values()), key=lambda r: (rank(r.queue_key), r.arrival))
