"""Which request goes first: `fcfs`, `priority`, `fair` or `shortest`.

Requests wait in queues. A policy says which queue a request joins, named by its queue key, how the queues are ranked,
and which place a request has in its queue. Requests with equal places are served by arrival.
"""

from collections.abc import Hashable
from typing import Literal, NamedTuple, Protocol, assert_never

from ...ipc.messages import Enqueue

PolicyName = Literal["fcfs", "priority", "fair", "shortest"]

FAIR_QUANTUM = 1024
"""Tokens by which a tenant must be ahead of another, at least, before the other interrupts its running requests."""

PATIENCE = 10.0
"""Under `shortest`, a request goes before newcomers once it has waited so many times the milliseconds that it takes."""

MAX_PATIENCE_MS = 600_000.0
"""And once it has waited so long, whatever it takes."""


class Ranked(Protocol):
    """What a policy sees of a request."""

    @property
    def queue_key(self) -> Hashable: ...

    @property
    def place(self) -> float: ...


class Expected(NamedTuple):
    """Predicted milliseconds of a request that runs alone."""

    prompt_ms: float  # until its first token
    output_ms: float  # of its longest output


class Stake(NamedTuple):
    """What it means to interrupt a running request for a waiting one."""

    num_tokens: int  # that the waiting one must compute, perhaps again, before it samples its next token
    price_ms: float = 0.0  # to bring the KV of the running one back; 0: it keeps it, and only its chunk waits
    left_ms: float = float("inf")  # what the running one takes until its longest output ends


class Policy(Protocol):
    counts_tokens: bool
    """Whether `serve` must be called."""

    may_interrupt: bool
    """Whether `interrupts` can ever be true."""

    def join(self, message: Enqueue) -> Hashable:
        """The queue key of a request that arrives; called once for each."""

    def place(self, message: Enqueue, now_ms: float, expected: Expected) -> float:
        """The place in its queue of a request that arrives now: the smallest goes first."""

    def rank(self, queue_key: Hashable) -> int:
        """The rank of a queue: the smallest goes first. May change as tokens are served."""

    def serve(self, queue_key: Hashable, num_tokens: int) -> None:
        """A step computes so many tokens of a request of this queue."""

    def leave(self, queue_key: Hashable) -> None:
        """A request of this queue has ended; called once for each."""

    def interrupts(self, waiting: Ranked, running: Ranked, stake: Stake) -> bool:
        """Whether a waiting request may preempt a running one."""


class Fcfs:
    """One queue."""

    counts_tokens = False
    may_interrupt = False

    def join(self, message: Enqueue) -> Hashable:
        return None

    def place(self, message: Enqueue, now_ms: float, expected: Expected) -> float:
        return 0.0

    def rank(self, queue_key: Hashable) -> int:
        return 0

    def serve(self, queue_key: Hashable, num_tokens: int) -> None: ...

    def leave(self, queue_key: Hashable) -> None: ...

    def interrupts(self, waiting: Ranked, running: Ranked, stake: Stake) -> bool:
        return False


class Priority(Fcfs):
    """A queue for each priority; the lower number goes first and interrupts."""

    may_interrupt = True

    def join(self, message: Enqueue) -> Hashable:
        return message.priority

    def rank(self, queue_key: Hashable) -> int:
        assert isinstance(queue_key, int)
        return queue_key

    def interrupts(self, waiting: Ranked, running: Ranked, stake: Stake) -> bool:
        return self.rank(waiting.queue_key) < self.rank(running.queue_key)


class Shortest(Fcfs):
    """One queue. What a request is expected to take decides, and how long it has waited.

    A request is patient for a multiple of the time that it takes, `patience_ms`. Its place is the time at which its
    patience ends. So all requests age alike, their order never changes, and no request that arrives after that time
    goes before it.
    """

    may_interrupt = True

    def place(self, message: Enqueue, now_ms: float, expected: Expected) -> float:
        return 0.0 if message.attempt else now_ms + patience_ms(expected)

    def interrupts(self, waiting: Ranked, running: Ranked, stake: Stake) -> bool:
        # It must still go first if it took longer by what it makes the running one compute again. Places are constant,
        # so no two requests interrupt each other in turns.
        return stake.price_ms < stake.left_ms and waiting.place + PATIENCE * stake.price_ms < running.place


def patience_ms(expected: Expected) -> float:
    """How long a request of `shortest` lets newcomers go before it."""
    return min(PATIENCE * sum(expected), MAX_PATIENCE_MS)


class Fair(Fcfs):
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

    def interrupts(self, waiting: Ranked, running: Ranked, stake: Stake) -> bool:
        # A turn must compute more than a restart costs, or two tenants could interrupt each other for ever.
        return self.rank(running.queue_key) - self.rank(waiting.queue_key) > FAIR_QUANTUM + stake.num_tokens


def make_policy(name: PolicyName) -> Policy:
    """The policy of that name."""
    match name:
        case "fcfs":
            return Fcfs()
        case "priority":
            return Priority()
        case "fair":
            return Fair()
        case "shortest":
            return Shortest()
        case _:
            assert_never(name)
