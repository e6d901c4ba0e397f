"""Steps that the device had no memory for: they are taken back, and later steps are smaller for a while.

The worker has dropped the rows of such a plan, and those of every later plan that was made before the core knew,
because these went on from where it would have ended. Nothing of these plans counts. Their requests keep row and blocks,
and the worker is told of the rows again, as far as results say that they were computed. So every step that has memory
makes progress, however many have none. Requests are preempted if they found blocks which these plans were to fill, and
if they have a recurrent state: a pass moves it on in place, and nobody knows how far a dropped one came. These continue
from the last state that the prefix cache keeps, or from their beginning.
"""

from collections import deque
from collections.abc import Iterable
from itertools import chain

from ...ipc.messages import Failed
from .block_pool import BlockPool
from .loads import Loads
from .plan_builder import InFlight
from .planner import Planner
from .request import Request, State
from .request_table import RequestTable
from .stats import Counters

_MAX_TRIES = 3  # steps without memory in a row, until a request that is alone in a step fails


class OomRecovery:
    """Halves the budget of a step with each fault, and adds a position to it with each good step."""

    def __init__(
        self, planner: Planner, table: RequestTable, pool: BlockPool, loads: Loads | None, counters: Counters
    ) -> None:
        self._table = table
        self._pool = pool
        self._planner = planner
        self._loads = loads
        self._counters = counters
        self._num_tries = 0  # faults since the last good step
        self._lost_until = 0  # the last step that was in flight when a fault was reported
        self.is_untold = False  # a fault was reported, and no plan was sent since

    def passed(self, flight: InFlight) -> None:
        """A step had enough memory."""
        if (self._num_tries or self._planner.budget < self._planner.max_budget) and flight.num_positions:
            self._num_tries = 0
            self._planner.budget = min(self._planner.max_budget, self._planner.budget + 1)

    def take_back(self, flight: InFlight, later: deque[InFlight]) -> None:
        """The worker has dropped `flight`, the oldest plan in flight, and will drop the `later` ones."""
        if flight.step > self._lost_until:  # else it was lost with an earlier step
            self._lose(flight, later)
            for i, lost in enumerate(later):
                later[i] = lost.emptied()
            self._lost_until = later[-1].step if later else flight.step
            self.is_untold = True
        for request in flight.requests():
            request.discard()
            self._table.release_if_idle(request)

    def _lose(self, flight: InFlight, later: Iterable[InFlight]) -> None:
        self._num_tries += 1
        self._counters.num_out_of_memory += 1
        self._planner.budget = max(1, min(self._planner.budget, flight.num_positions) // 2)
        for lost in (flight, *later):
            for slot, key in lost.kept:
                if (group := self._pool.groups.state) is not None and self._pool.find(key, group) == slot:
                    self._pool.drop(key, group)
        self._set_back([request for lost in (flight, *later) for request in lost.requests()])
        first, *others = flight.requests()
        is_least = not others and (flight.num_positions == 1 or not self._planner.is_chunked)
        if is_least and self._num_tries >= _MAX_TRIES and first.state is not State.ENDED:
            self._num_tries = 0
            detail = "The device has no memory for this request, not even alone in a step; try again later."
            self._table.end(first, Failed(first.rid, "unavailable", detail))

    def _set_back(self, touched: list[Request]) -> None:
        """Sets these requests back to what is known to be computed."""
        size = self._planner.block_size
        bad: set[int] = set()  # blocks that were to be filled
        for request in touched:
            num = request.num_computed
            if request.asked.pooling is not None and request.wants_all:
                num = 0  # the worker has dropped the vectors of its earlier positions
            elif num == request.num_restored:
                num -= num % size  # no result of it was applied, so the copy of its last block may not have been made
            self._table.compute_again(request, num)
            request.spoil()
            bad.update(request.blocks_from(num // size))
            bad.update(request.encoded.blocks)  # the encoder may not have read the prompt, and does so again
        self._pool.forget(bad)
        loading = () if self._loads is None else self._loads.requests()
        for request in {id(r): r for r in chain(touched, self._table.running, loading)}.values():
            if not request.is_open:
                request.encoded.lose()
            if request.state is State.LOADING:  # of its blocks those that are not loaded may be bad
                if not bad.isdisjoint(request.held):
                    self._table.preempt(request)
                continue
            num_good = request.num_before(bad)
            if num_good < request.num_computed // size:
                request.set_back(num_good * size)
            elif not (request.has_dropped(self._pool.groups) or (request.slot >= 0 and request.is_spoiled)):
                continue
            if request.state in (State.RUNNING, State.LOADING):
                self._table.preempt(request)
