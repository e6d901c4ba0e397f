"""What a worker was asked for and has not done yet, and how long it has waited for it.

A worker does everything in the order of its mailbox. Only a plan may have to wait: in the first stage of a pipeline for
the ids that the last stage samples, in the others for the result of the stage before. No torch.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from ...ipc.messages import Hidden, PlaceExperts, ReadExperts, Sleep, StageSeconds, StepPlan, Wake

Task = StepPlan | Sleep | Wake | ReadExperts | PlaceExperts


class Due(NamedTuple):
    task: Task
    hidden: Hidden | None  # of a plan, what the stage before has sent


class StageTimes:
    """The seconds of one stage since they were taken last."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._busy = self._input = self._ids = 0.0
        self._since: float | None = None  # when the oldest plan began to wait
        self._began = 0.0

    def waits(self) -> None:
        """The oldest plan cannot run yet."""
        if self._since is None:
            self._since = self._clock()

    def begins(self, *, is_first: bool) -> None:
        """A plan runs, until `ends`. is_first: it has waited for ids, if it has waited."""
        self._began = self._clock()
        waited = 0.0 if self._since is None else self._began - self._since
        self._since = None
        if is_first:
            self._ids += waited
        else:
            self._input += waited

    def ends(self) -> None:
        self._busy += self._clock() - self._began

    def take(self) -> StageSeconds:
        found = StageSeconds(self._busy, self._input, self._ids)
        self._busy = self._input = self._ids = 0.0
        return found


class StageQueue:
    """The tasks of one worker, in their order."""

    def __init__(self, *, is_first: bool, knows_ids: Callable[[StepPlan], bool]) -> None:
        """knows_ids: whether the first stage can run a plan."""
        self._is_first, self._knows_ids = is_first, knows_ids
        self._tasks: deque[Task] = deque()
        self._hidden: dict[int, Hidden] = {}  # by step; not more than plans are in flight

    def put(self, message: Task | Hidden) -> None:
        if isinstance(message, Hidden):
            self._hidden[message.step] = message
        else:
            self._tasks.append(message)

    def clear(self) -> None:
        self._tasks.clear()
        self._hidden.clear()

    @property
    def is_waiting(self) -> bool:
        """A plan is there."""
        return bool(self._tasks)

    @property
    def num_plans(self) -> int:
        return sum(isinstance(task, StepPlan) for task in self._tasks)

    def next(self) -> Due | None:
        """Takes the oldest task; None: there is none, or it has to wait."""
        if not self._tasks:
            return None
        task, hidden = self._tasks[0], None
        if isinstance(task, StepPlan):
            if not self._is_first:
                hidden = self._hidden.pop(task.step, None)
            if hidden is None and not (self._is_first and self._knows_ids(task)):
                return None
        self._tasks.popleft()
        return Due(task, hidden)
