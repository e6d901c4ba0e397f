"""How long a request may wait: the bounds that hold for every history.

Under every policy but `fair` the first request of the order has a position in every plan, with several stages in one of
2P − 1, or is blocked only by what is in flight. It therefore ends within `max_in_flight + 2P − 1` plans for each of its
positions and tokens, and each other request waits for those before it to do the same. Plans made during a load, a query
to a connector or the wait for a mask are not counted. A request that loses its KV with a worker starts again.
"""

from invariants import Touched

from pagewire.engine.core.policy import Fair, Stake
from pagewire.engine.core.preemption import order
from pagewire.engine.core.request import Request, State
from pagewire.engine.core.scheduler import Scheduler

from .clients import Client


class Wait:
    """The wait of one request."""

    __slots__ = ("limit", "rank", "since")

    def __init__(self, rank: tuple[int, float, int], limit: int, since: int) -> None:
        self.rank = rank  # its position in the order of all requests
        self.limit = limit  # plans
        self.since = since  # number of plans before it


class Patience:
    """Counts the plans during which each request is open."""

    def __init__(self, scheduler: Scheduler, is_ranked: bool) -> None:
        self._scheduler = scheduler
        self._is_ranked = is_ranked
        self._waits: dict[int, Wait] = {}
        self._sizes: dict[int, int] = {}
        self._num_plans = 0
        self.longest = 0.0  # the largest part of a limit that was used

    def arrive(self, client: Client) -> None:
        """The request was accepted."""
        request = self._scheduler.table.requests.get(client.rid)
        if request is None:
            return  # it was resumed and had ended
        rank = order(self._scheduler._policy)(request)
        cost = (self._scheduler.max_in_flight + 2 * self._scheduler.micro_batches.num_stages - 1) * client.size
        before = 0
        for rid, wait in self._waits.items():
            if wait.rank < rank:
                before += self._sizes[rid]
            else:
                wait.limit += cost
        self._sizes[client.rid] = cost
        self._waits[client.rid] = Wait(rank, before + cost, self._num_plans)

    def leave(self, rid: int) -> None:
        """The request has ended."""
        wait = self._waits.pop(rid, None)
        if wait is not None and self._is_ranked:
            num = self._num_plans - wait.since
            assert num <= wait.limit, f"{rid} ended {num} plans after its arrival, {wait.limit} are allowed"
            self.longest = max(self.longest, num / wait.limit)

    def plan(self) -> None:
        """A plan with rows was made."""
        scheduler = self._scheduler
        loads = scheduler._loads
        if scheduler.asks_again or (loads is not None and len(loads)):
            return
        if any(r.num_total >= r.num_allowed for r in scheduler.table.requests.values()):
            return  # a request waits for its mask
        self._num_plans += 1

    def step_back(self) -> int:
        """Requests that are late have stepped behind others, for which they wait now. Returns their number."""
        order_of, num = order(self._scheduler._policy), 0
        for rid, wait in self._waits.items():
            request = self._scheduler.table.requests.get(rid)
            if request is not None and self._is_ranked and (rank := order_of(request)) > wait.rank:
                wait.rank, num = rank, num + 1
                wait.limit += sum(self._sizes[r] for r, other in self._waits.items() if other.rank < rank)
        return num

    def change_regime(self) -> None:
        """A request has given its row back because its regime changed. It may wait until the requests that run have
        ended, whatever their rank, and others wait for it."""
        cost = sum(self._sizes[rid] for rid in self._waits)
        for wait in self._waits.values():
            wait.limit += cost

    def change(self) -> None:
        """Other settings hold: the order may be another, and more requests may run than new ones may join."""
        order_of = order(self._scheduler._policy)
        for rid, wait in self._waits.items():
            if (request := self._scheduler.table.requests.get(rid)) is not None:
                wait.rank = order_of(request)
        self.change_regime()

    def start_again(self) -> None:
        """All KV was lost, so every wait starts again."""
        for wait in self._waits.values():
            wait.since = self._num_plans


class Ageing:
    """No request is admitted before one that arrived earlier by more than the longest patience, if there is a bound."""

    def __init__(self, scheduler: Scheduler, patience_s: float) -> None:
        """`patience_s`: infinite if the policy has no bound."""
        self._scheduler = scheduler
        self._patience_s = patience_s
        self._arrived: dict[int, float] = {}  # rid → seconds
        self._waiting: set[int] = set()  # rids before a plan is made
        self._ended: set[int] = set()
        self.num_overtaken = 0  # requests that were admitted before an earlier one
        self.num_ended = 0  # requests before which a newcomer could not go any more

    def arrive(self, rid: int, now: float) -> None:
        """The request was accepted."""
        self._arrived[rid] = now

    def look(self) -> None:
        """A plan is about to be made."""
        self._waiting = {request.rid for request in self._scheduler.table.waiting}

    def check(self) -> None:
        """The plan was made."""
        table, arrived = self._scheduler.table, self._arrived
        left = {request.rid for request in table.waiting} & self._waiting
        admitted = {request.rid for request in table.running} & self._waiting
        for new in admitted:
            for old in left:
                ahead = arrived[new] - arrived[old]
                assert ahead <= self._patience_s, f"{new} is admitted before {old}, which came {ahead:.4f} s earlier"
                self.num_overtaken += ahead > 0
        if left:
            last = max(arrived.values())
            self._ended |= {rid for rid in left if last - arrived[rid] > self._patience_s}
            self.num_ended = len(self._ended)


class Fairness:
    """The bound of `fair`: a tenant that is ahead of a waiting tenant by more than the quantum may finish its running
    requests, and no new request of it is admitted."""

    def __init__(self, scheduler: Scheduler, quantum: int) -> None:
        self._scheduler = scheduler
        self._quantum = quantum
        self._left: dict[tuple[str, str], int] = {}  # (waiting, ahead) → positions that the latter may still compute
        self.num_ahead = 0  # how often a tenant was ahead by more than the quantum

    def plan(self) -> None:
        """A plan with rows was made."""
        scheduler = self._scheduler
        if any(r.num_total >= r.num_allowed for r in scheduler.table.waiting):
            self._left.clear()  # the first request may wait for its mask, and the others for that request
            return
        flight = scheduler._in_flight[-1]
        served: dict[str, int] = {}
        for request, count in [*((r, 1) for r in flight.decodes), *zip(flight.others, flight.counts, strict=True)]:
            served[request.queue_key] = served.get(request.queue_key, 0) + count
        running: dict[str, list[Request]] = {}
        for request in scheduler.table.running:
            running.setdefault(request.queue_key, []).append(request)
        waiting = {request.queue_key for request in scheduler.table.waiting} - running.keys()
        pairs = {(a, b) for a in waiting for b in running}
        for pair in self._left.keys() - pairs:
            del self._left[pair]
        policy = scheduler._policy
        assert isinstance(policy, Fair)
        rank = policy._served.__getitem__
        for a, b in pairs:
            if (a, b) in self._left and rank(b) - served.get(b, 0) - rank(a) <= self._quantum:
                del self._left[a, b]  # the tenant had no requests for a while
            elif (a, b) in self._left:
                self._left[a, b] -= served.get(b, 0)
                assert self._left[a, b] >= 0, f"{b} is served although {a} waits and is behind by more than the quantum"
            elif rank(b) - rank(a) > self._quantum:
                self.num_ahead += 1
                draft_tokens = Touched(scheduler).num_draft_tokens  # they may be rejected
                self._left[a, b] = sum(
                    max(0, r.num_needed - r.num_planned + draft_tokens.get(id(r), 0)) for r in running[b]
                )

    def start_again(self) -> None:
        """All running requests have to be computed again."""
        self._left.clear()


class FirstInQueue:
    """The first running request in the order of the policy, before a plan is made."""

    def __init__(self, scheduler: Scheduler, passed: dict[Request, int]) -> None:
        """`passed`: by how many plans requests with something to compute were passed over for others; with one stage,
        none is."""
        running = sorted((r for r in scheduler.table.running if r.state is State.RUNNING), key=order(scheduler._policy))
        self._scheduler = scheduler
        self._passed = passed
        self._first = running[0] if running else None
        self._known = set(map(id, scheduler.table.running))
        works = [r for r in running if r.num_planned < min(r.num_total, r.num_due)]
        if scheduler.lateness == "never" or scheduler.micro_batches.num_stages > 1:
            works = [r for r in works if not _waits_for_mask(r)]
        self._working = works[0] if works and not _waits_for_mask(works[0]) else None
        interrupts = scheduler._policy.interrupts
        self._may_wait = any(
            interrupts(r, self._working, Stake(len(r.ids))) for r in scheduler.table.waiting if self._working
        )
        self._may_be_preempted = any(
            interrupts(r, self._first, Stake(len(r.ids))) for r in scheduler.table.waiting if self._first
        )

    def check(self, was_planned: bool) -> None:
        """Asserts that the first request was not preempted for others, and that the first one with something to compute
        is in the plan, unless it waits for blocks in flight or, with several stages, for its turn. `was_planned`: there
        is a plan."""
        scheduler, table = self._scheduler, self._scheduler.table
        first, working = self._first, self._working
        if first is not None and first.state in (State.LEAVING, State.WAITING):
            others = [r for r in table.running if r.state is State.RUNNING]
            assert self._may_be_preempted or not others, f"{first.rid} was preempted although it was the first"
        if working is None or working.state is not State.RUNNING:
            return
        flights = scheduler._in_flight
        if was_planned and working in flights[-1].decodes + flights[-1].others:
            self._passed.pop(working, None)
            return
        if self._may_wait and was_planned and any(id(r) not in self._known for r in flights[-1].others):
            return  # a request that may interrupt it was admitted first
        coming = [r for r in table.running if r.tables and (r.state is not State.RUNNING or not r.has_work)]
        loads = () if scheduler._loads is None else scheduler._loads._requests.values()
        ended = [r for flight in flights for r in flight.decodes + flight.others if r.state is State.ENDED]
        ended += [r for r, _ in loads if r.state is State.ENDED]
        behind = working.num_in_flight > 0 and scheduler.pool.groups.moving  # blocks behind its windows return
        if coming or ended or table.held or behind:
            return
        num_stages, num = scheduler.micro_batches.num_stages, self._passed.get(working, 0) + was_planned
        assert num_stages > 1 and flights and num < 2 * num_stages - 1, (
            f"{working.rid} is the first and not in the plan"
        )
        self._passed[working] = num


def _waits_for_mask(request: Request) -> bool:
    """Whether a plan that computes something of it would be late with it."""
    return not request.is_masked and request.num_planned == request.num_total - 1
