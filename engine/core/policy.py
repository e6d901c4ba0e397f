"""Who goes first: `fcfs`, `priority` or `fair`.

Requests wait in lines, in each by arrival; a policy says which line a request joins and how the lines are ranked. It
has no part in anything else, so a new policy is these few answers.
"""

from collections.abc import Hashable
from typing import Literal, Protocol, assert_never

from ...ipc.messages import Enqueue

PolicyName = Literal["fcfs", "priority", "fair"]

FAIR_QUANTUM = 1024
"""Tokens that a tenant may be ahead of another before its running requests are interrupted for the other's."""


class Policy(Protocol):
    """See the head of the file."""

    counts_tokens: bool
    """Whether `serve` must be called."""

    may_interrupt: bool
    """Whether `interrupts` can ever be true."""

    def join(self, message: Enqueue) -> Hashable:
        """The line of a request that arrives; called once for each."""

    def rank(self, queue_key: Hashable) -> int:
        """Smaller goes first. May change as tokens are served."""

    def serve(self, queue_key: Hashable, num_tokens: int) -> None:
        """So many tokens of a request of this line go into a step."""

    def leave(self, queue_key: Hashable) -> None:
        """A request of this line has ended; called once for each."""

    def interrupts(self, queue_key: Hashable, running: Hashable, num_tokens: int) -> bool:
        """Whether a waiting request of `queue_key` may preempt a running one of the key `running`. `num_tokens`:
        what the waiting one has to compute, perhaps again, before it gets on."""


class Fcfs:
    """One line."""

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
    """A line for each priority; the lower number goes first and interrupts."""

    may_interrupt = True

    def join(self, message: Enqueue) -> Hashable:
        return message.priority

    def rank(self, queue_key: Hashable) -> int:
        assert isinstance(queue_key, int)
        return queue_key

    def interrupts(self, queue_key: Hashable, running: Hashable, num_tokens: int) -> bool:
        return self.rank(queue_key) < self.rank(running)


class Fair:
    """A line for each tenant; who was served the fewest tokens goes first (virtual token counters, Sheng et al. 2024).

    A tenant that comes back from idling starts level with the least served of those present, so nobody saves up; but
    not below where it left, so nobody sheds what it was served by sending one request at a time.
    """

    counts_tokens = True
    may_interrupt = True

    def __init__(self) -> None:
        self._served: dict[Hashable, int] = {}  # tenant → tokens, computed and drawn; only of tenants with requests
        self._open: dict[Hashable, int] = {}  # tenant → its requests that have not ended
        self._left: dict[Hashable, int] = {}  # tenant that went while ahead of others → tokens; until they catch up
        self._floor = 0  # where the next tenant starts if nobody is present

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
        # Taking turns must bring everyone further than it costs to start again, or nobody would ever end.
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
