"""Which request goes first: `fcfs`, `priority`, `fair`, `shortest` or `slo`.

Requests wait in queues. A policy says which queue a request joins, named by its queue key, how the queues are ranked,
and which place a request has in its queue. Requests with equal places are served by arrival.
"""

from collections.abc import Hashable, Mapping
from typing import Literal, NamedTuple, Protocol, assert_never

from ...config.latency_classes import DEFAULT_CLASS, LatencyClass, with_default
from ...ipc.messages import Enqueue

PolicyName = Literal["fcfs", "priority", "fair", "shortest", "slo"]

FAIR_QUANTUM = 1024
"""Tokens by which a tenant must be ahead of another, at least, before the other interrupts its running requests."""

PATIENCE = 10.0
"""Under `shortest`, a request goes before newcomers once it has waited so many times the milliseconds that it takes."""

MAX_PATIENCE_MS = 600_000.0
"""And once it has waited so long, whatever it takes."""

AGEING_MS = 30_000.0
"""Under `slo`, a request that has no target or misses it goes before newcomers so much later, over its weight. So much
later again, the share of its class holds it back no longer."""

SHARE_WINDOW = 65_536
"""Under `slo`, tokens after which what a class was served counts half."""


class Ranked(Protocol):
    """What a policy sees of a request."""

    @property
    def queue_key(self) -> Hashable: ...

    @property
    def place(self) -> float: ...

    @property
    def is_streaming(self) -> bool: ...


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

    watches_time: bool
    """Whether `tell_time` must be called before each plan."""

    may_interrupt: bool
    """Whether `interrupts` can ever be true."""

    itl_targets: Mapping[Hashable, float]
    """By queue key, milliseconds: how long the next tokens of requests of this queue may take."""

    def join(self, message: Enqueue) -> Hashable:
        """The queue key of a request that arrives; called once for each."""

    def place(self, message: Enqueue, now_ms: float, expected: Expected) -> float:
        """The place in its queue of a request that arrives now: the smallest goes first."""

    def latest_start_ms(self, waiting: Ranked, expected: Expected) -> float:
        """Until when a request that has arrived must begin to get the place `late_place` otherwise."""

    def late_place(self, waiting: Ranked) -> float:
        """The place of a request that cannot meet its target any more."""

    def tell_time(self, now_ms: float) -> None:
        """The time of the plans that follow, on the clock of `place`."""

    def rank(self, request: Ranked) -> int:
        """The rank of a request: the smallest goes first. May change as tokens are served and as time passes. None has
        a smaller rank than a request that stands before it in its queue."""

    def serve(self, queue_key: Hashable, num_tokens: int) -> None:
        """A step computes so many tokens of a request of this queue."""

    def leave(self, queue_key: Hashable) -> None:
        """A request of this queue has ended; called once for each."""

    def interrupts(self, waiting: Ranked, running: Ranked, stake: Stake) -> bool:
        """Whether a waiting request may preempt a running one."""


class Fcfs:
    """One queue."""

    counts_tokens = False
    watches_time = False
    may_interrupt = False
    itl_targets: Mapping[Hashable, float] = {}

    def join(self, message: Enqueue) -> Hashable:
        return None

    def place(self, message: Enqueue, now_ms: float, expected: Expected) -> float:
        return 0.0

    def latest_start_ms(self, waiting: Ranked, expected: Expected) -> float:
        return float("inf")

    def late_place(self, waiting: Ranked) -> float:
        return waiting.place

    def tell_time(self, now_ms: float) -> None: ...

    def rank(self, request: Ranked) -> int:
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

    def rank(self, request: Ranked) -> int:
        assert isinstance(request.queue_key, int)
        return request.queue_key

    def interrupts(self, waiting: Ranked, running: Ranked, stake: Stake) -> bool:
        return self.rank(waiting) < self.rank(running)


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


class Slo(Fcfs):
    """A queue for each latency class, in it the earliest deadline first.

    The place of a request is its deadline: arrival and the target of its class. A request that has not begun when only
    the time that its prompt takes is left steps behind: its place is later by `AGEING_MS` over the weight of its class,
    and so is that of one without a target. A place changes this once at most, so no newcomer goes before a request once
    the target and that time have passed.

    A class that had more than its share of the tokens lets the others go first, but none of its requests for ever: once
    `AGEING_MS` over the weight have passed after its place, a request stands where it would without shares. The time is
    the same for all requests of a class, so those before it in its queue stand there already. A newcomer has a later
    place, so it goes behind it whatever its class.
    """

    may_interrupt = True

    def __init__(self, classes: Mapping[str, LatencyClass]) -> None:
        self._classes: dict[Hashable, LatencyClass] = dict(with_default(classes).items())
        self.counts_tokens = self.watches_time = any(one.share < 1 for one in self._classes.values())
        self.itl_targets = {name: one.itl_ms for name, one in self._classes.items() if one.itl_ms is not None}
        self._served = dict.fromkeys(self._classes, 0.0)  # class → tokens, computed and sampled; older ones count less
        self._all_served = 0.0
        self._now_ms = 0.0

    def join(self, message: Enqueue) -> Hashable:
        return message.latency_class if message.latency_class in self._classes else DEFAULT_CLASS

    def place(self, message: Enqueue, now_ms: float, expected: Expected) -> float:
        one = self._classes[self.join(message)]
        taken_ms = 1e3 * message.times.taken
        since = taken_ms if 0 < taken_ms < now_ms else now_ms  # the tokenizer may be on another machine's clock
        if message.attempt:
            return 0.0
        return since + (AGEING_MS / one.weight if one.ttft_ms is None else one.ttft_ms)

    def latest_start_ms(self, waiting: Ranked, expected: Expected) -> float:
        has_target = self._classes[waiting.queue_key].ttft_ms is not None and waiting.place > 0
        return waiting.place - expected.prompt_ms if has_target else float("inf")

    def late_place(self, waiting: Ranked) -> float:
        return waiting.place + AGEING_MS / self._classes[waiting.queue_key].weight

    def tell_time(self, now_ms: float) -> None:
        self._now_ms = now_ms

    def rank(self, request: Ranked) -> int:
        one = self._classes[request.queue_key]
        has_more = one.share < 1 and self._served[request.queue_key] > one.share * self._all_served
        return int(has_more and self._now_ms < held_until_ms(request.place, one))

    def serve(self, queue_key: Hashable, num_tokens: int) -> None:
        self._served[queue_key] += num_tokens
        self._all_served += num_tokens
        if self._all_served > 2 * SHARE_WINDOW:
            self._served = {name: num / 2 for name, num in self._served.items()}
            self._all_served /= 2

    def interrupts(self, waiting: Ranked, running: Ranked, stake: Stake) -> bool:
        # A pause would break the promise to a stream. Deadlines hardly change, so no two requests interrupt each other
        # in turns.
        if running.is_streaming and running.queue_key in self.itl_targets:
            return False
        return stake.price_ms < stake.left_ms and waiting.place + stake.price_ms < running.place


def held_until_ms(place: float, one: LatencyClass) -> float:
    """Until when the share of its class may hold back a request of `slo` with this place."""
    return place + AGEING_MS / one.weight


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

    def rank(self, request: Ranked) -> int:
        return self._served[request.queue_key]

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
        return self.rank(running) - self.rank(waiting) > FAIR_QUANTUM + stake.num_tokens


def make_policy(name: PolicyName, classes: Mapping[str, LatencyClass]) -> Policy:
    """The policy of that name; `classes` are for `slo`."""
    match name:
        case "fcfs":
            return Fcfs()
        case "priority":
            return Priority()
        case "fair":
            return Fair()
        case "shortest":
            return Shortest()
        case "slo":
            return Slo(classes)
        case _:
            assert_never(name)
