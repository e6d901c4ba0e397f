"""Which rows the next plan serves, where the layers of a model are divided into stages.

Each of P stages works on one plan at a time, so P plans must be in flight, and a row can be in one of them only: its
next position needs the token that its last plan samples. So each plan takes a micro-batch, about one P-th of the rows.
Rows wait in one queue, by the plan that they were in last. A plan takes those that have waited longest, until they make
up its share of the work. A row may be in a plan again after M − 1 others, where M is the number of micro-batches, or as
soon as its token is known. Nothing needs to be balanced: when rows join or end, later plans take more or fewer.

Prompts belong to no micro-batch. Their ids are known, so consecutive plans may hold consecutive chunks of one prompt.

With one stage every plan serves every row, and nothing is kept here. None of this is needed for exactness, because the
first stage waits for ids that it lacks.
"""

from collections import OrderedDict
from collections.abc import Iterable
from itertools import compress
from typing import NamedTuple

from .cost import CostModel
from .plan_builder import PlanBuilder
from .request import Request, State

_LEAST = 1e-9  # of a share: less is a rounding error


class Turn(NamedTuple):
    """Which plan is made."""

    step: int
    applied: int  # the last step whose result was applied: tokens of steps up to it are known
    num_in_flight: int  # plans


Last = tuple[int, int]
"""The last plan that sampled a token of a row: (its step, the row's positions with those of that plan)."""


class MicroBatches:
    """The running requests of one scheduler, in the order in which plans serve them. Empty with one stage."""

    def __init__(self, num_stages: int, depth: int, cost: CostModel) -> None:
        """`depth`: plans in flight with one stage."""
        assert num_stages >= 1 and depth >= 1, (num_stages, depth)
        self.num_stages = num_stages
        self._depth = depth
        self._cost = cost
        self._queue: OrderedDict[Request, Last] = OrderedDict()  # rows that sample; who waits longest is first
        self._masked: dict[Request, Last] = {}  # constrained rows that wait for the mask of their next token
        self._prompts: dict[Request, None] = {}  # rows that have not sampled since they got their row
        self._context = 0  # positions of all rows in `_queue` and `_masked`
        self._latest = -1  # the plan may serve rows whose last token is of this step or an earlier one
        self._credit = 0.0  # shares that the last plans left; negative: took too much

    @property
    def num_rows(self) -> int:
        """Rows that sample, or wait for the mask of their next token."""
        return len(self._queue) + len(self._masked)

    # ── a plan ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def take(self, running: list[Request], turn: Turn) -> list[Request]:
        """The running requests that a plan may serve: its micro-batch, then the prompts. With one stage, all."""
        if self.num_stages == 1:
            return running
        prompts = list(self._prompts)
        num = self._num_batches(any([request.has_work for request in prompts]))
        if turn.num_in_flight >= num + self._depth - 1:
            self._latest = -1
            return prompts
        self._latest = max(turn.step - num, turn.applied)
        return self._take(num) + prompts

    def ready(self) -> list[Request]:
        """Every row that the plan of the last `take` may serve, beyond its micro-batch."""
        return [request for request, (step, _) in self._queue.items() if step <= self._latest]

    def sent(self, step: int, builder: PlanBuilder) -> None:
        """A plan was sent. The rows that sample in it go to the end of the queue, unless they were preempted for others
        after they were planned."""
        if self.num_stages == 1:
            return
        queue = self._queue
        for request in builder.decodes:
            last = queue.get(request)
            if last is None:
                self._append(request, step)
                continue
            num = request.num_planned
            self._context += num - last[1]
            queue[request] = step, num
            queue.move_to_end(request)
        for request in compress(builder.others, builder.sample):
            self._append(request, step)

    # ── a request's life ─────────────────────────────────────────────────────────────────────────────────────────────

    def join(self, request: Request) -> None:
        """It has got a row, or has to compute positions again that were planned."""
        if self.num_stages > 1:
            self.leave(request)
            self._prompts[request] = None

    def leave(self, request: Request) -> None:
        """It is no longer running."""
        last = self._queue.pop(request, None) or self._masked.pop(request, None)
        if last is not None:
            self._context -= last[1]
        else:
            self._prompts.pop(request, None)

    def allow(self, requests: Iterable[Request]) -> None:
        """The masks of these have come. They have waited longest."""
        if not self._masked:
            return
        for request in reversed([request for request in requests if request in self._masked]):
            self._queue[request] = self._masked.pop(request)
            self._queue.move_to_end(request, last=False)

    def clear(self) -> None:
        """No request has a row."""
        self._queue.clear()
        self._masked.clear()
        self._prompts.clear()
        self._context, self._credit = 0, 0.0

    # ── how micro-batches are filled ─────────────────────────────────────────────────────────────────────────────────

    def _num_batches(self, has_prompt: bool) -> int:
        """Into how many micro-batches the rows are divided. Chunks of prompts fill plans without rows."""
        return self.num_stages if has_prompt else max(1, min(self.num_stages, self.num_rows))

    def _append(self, request: Request, step: int) -> None:
        if request.state is not State.RUNNING:
            return
        self.leave(request)
        self._context += request.num_planned
        (self._masked if request.is_constrained else self._queue)[request] = step, request.num_planned

    def _take(self, num: int) -> list[Request]:
        """The rows that have waited longest, until they make up a share of all work, but at least one.

        What a plan takes more than its share, the next ones take less. A share that was not used because no row was
        left is lost."""
        of_row, of_position = self._cost.of_rows()
        total = of_row * self.num_rows + of_position * self._context
        credit, taken = min(0.0, self._credit) + 1.0, []
        for request, (step, context) in self._queue.items():
            if step > self._latest or credit <= _LEAST:
                break
            if request.num_planned < request.fast_limit or request.has_work:
                taken.append(request)
                credit -= (of_row + of_position * context) * num / total
        self._credit = max(credit, 2 * _LEAST - 1.0)
        return taken
