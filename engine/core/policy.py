"""Which request goes first: `fcfs`, `priority` or `fair`.

Requests wait in queues, in each by arrival. A policy says which queue a request joins, named by its queue key, and how
the queues are ranked.
"""

from collections.abc import Hashable
from typing import Literal, Protocol, assert_never

from ...ipc.messages import Enqueue

PolicyName = Literal["fcfs", "priority", "fair"]

FAIR_QUANTUM = 1024
"""Tokens by which a tenant must be ahead of another, at least, before the other interrupts its running requests."""


class Policy(Protocol):
    counts_tokens: bool
    """Whether `serve` must be called."""

    may_interrupt: bool
    """Whether `interrupts` can ever be true."""

    def join(self, message: Enqueue) -> Hashable:
        """The queue key of a request that arrives; called once for each."""

    def rank(self, queue_key: Hashable) -> int:
        """The rank of a queue: the smallest goes first. May change as tokens are served."""

    def serve(self, queue_key: Hashable, num_tokens: int) -> None:
        """A step computes so many tokens of a request of this queue."""

    def leave(self, queue_key: Hashable) -> None:
        """A request of this queue has ended; called once for each."""

    def interrupts(self, queue_key: Hashable, running: Hashable, num_tokens: int) -> bool:
        """Whether a waiting request of `queue_key` may preempt a running one of the key `running`. `num_tokens`: what
        the waiting one must compute, perhaps again, before it samples its next token."""


class Fcfs:
    """One queue."""

    counts_tokens = False
    may_interrupt = False

    def join(self, message: Enqueue) -> Hashable:
        return None

    def rank(self, queue_key: Hashable) -> int:
        return 0

    def serve(self, queue_key: Hashable, num_tokens: int) -> None: ...

    def leave(self, queue_key: Hashable) -> None: ...

    def interrupts(self, queue_key: Hashable, running: Hashable, num_tokens: int) -> bool:
        return False


class Priority(Fcfs):
    """A queue for each priority; the lower number goes first and interrupts."""

    may_interrupt = True

    def join(self, message: Enqueue) -> Hashable:
        return message.priority

    def rank(self, queue_key: Hashable) -> int:
        assert isinstance(queue_key, int)
        return queue_key

    def interrupts(self, queue_key: Hashable, running: Hashable, num_tokens: int) -> bool:
        return self.rank(queue_key) < self.rank(running)


class Fair:
    """A queue for each tenant. The tenant that was served the fewest tokens goes first: virtual token counters (Sheng
    et al. 2024).

    A tenant that comes back from idling starts level with the least served of the tenants with open requests, so idling
    saves nothing up; but not below its own count, so sending one request at a time does not reset it.
    """

    counts_tokens = True
    may_interrupt = True

    def __init__(self) -> None:
        self._served: dict[Hashable, int] = {}  # tenant with open requests → tokens, computed and sampled
        self._open: dict[Hashable, int] = {}  # tenant → its requests that have not ended
        self._left: dict[Hashable, int] = {}  # tenant without any, ahead of others → tokens; until they catch up
        self._floor = 0  # where the next tenant starts if no other has open requests

    def join(self, message: Enqueue) -> Hashable:
        tenant = message.tenant
        if tenant not in self._open:
            level = min(self._served.values(), default=self._floor)
            self._served[tenant] = max(level, self._left.pop(tenant, level))
            self._open[tenant] = 0
            self._left = {t: served for t, served in self._left.items() if served > level}
        self._open[tenant] += 1
        return tenant

    def rank(self, queue_key: Hashable) -> int:
        return self._served[queue_key]

    def serve(self, queue_key: Hashable, num_tokens: int) -> None:
        self._served[queue_key] += num_tokens

    def leave(self, queue_key: Hashable) -> None:
        self._open[queue_key] -= 1
        if self._open[queue_key] == 0:
            del self._open[queue_key]
            served = self._served.pop(queue_key)
            self._floor = max(self._floor, served)
            if served > min(self._served.values(), default=served):
                self._left[queue_key] = served

    def interrupts(self, queue_key: Hashable, running: Hashable, num_tokens: int) -> bool:
        # A turn must compute more than a restart costs, or two tenants could interrupt each other for ever.
        return self.rank(running) - self.rank(queue_key) > FAIR_QUANTUM + num_tokens


def make_policy(name: PolicyName) -> Policy:
    """The policy of that name."""
    match name:
        case "fcfs":
            return Fcfs()
        case "priority":
            return Priority()
        case "fair":
            return Fair()
        case _:
            assert_never(name)
