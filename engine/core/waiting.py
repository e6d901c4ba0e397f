"""The requests that wait, in a queue for each key of the policy."""

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator
from operator import attrgetter

from .policy import Policy
from .preemption import order
from .request import Request

_place = attrgetter("place", "arrival")


class Waiting:
    """Queues of requests, each by place, then by arrival."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._queues: dict[Hashable, list[Request]] = {}  # none of them is empty
        self._num = 0
        self.num_tokens = 0  # prompts and longest outputs of all of them

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[Request]:
        return (request for queue in self._queues.values() for request in queue)

    def add(self, request: Request) -> None:
        """Inserts it at its place, so a preempted request gets its old place."""
        insort(self._queues.setdefault(request.queue_key, []), request, key=_place)
        self._num += 1
        self.num_tokens += request.max_len + len(request.encoded)

    def remove(self, request: Request) -> None:
        """Takes it out of its queue, wherever it stands."""
        queue = self._queues[request.queue_key]
        place = bisect_left(queue, _place(request), key=_place)
        assert queue[place] is request, request.rid
        del queue[place]
        if not queue:
            del self._queues[request.queue_key]
        self._num -= 1
        self.num_tokens -= request.max_len + len(request.encoded)

    def first(self) -> Request | None:
        """The request that is admitted next: that of the best rank; of equal ranks the one with the first place, then
        the oldest."""
        if not self._queues:
            return None
        return min((queue[0] for queue in self._queues.values()), key=order(self._policy))
