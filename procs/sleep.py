"""Puts an engine to sleep and wakes it: the core's part.

While it is asleep nothing is planned, and new requests wait in the queue. An engine falls asleep when nothing is in
flight any more. Requests that ran then wait with their output as part of their prompt, because the workers have no KV
cache while they sleep.
"""

from collections.abc import Callable

from ..engine.core import trace
from ..engine.core.domains import AnyScheduler
from ..ipc.messages import Sleep, Slept, Wake


class SleepControl:
    """The sleep state of one core. `pause` is called before plans are made, and `settle` when no more can be made."""

    def __init__(
        self,
        *,
        num_workers: int,
        tell_workers: Callable[[Sleep | Wake], None],
        tell_api: Callable[[Slept], None],
        record: Callable[[trace.Event], None],
    ) -> None:
        """`tell_api` is called with the engine's state after each `Sleep` and `Wake`."""
        self._num_workers = num_workers
        self._tell_workers = tell_workers
        self._tell_api = tell_api
        self._record = record
        self._is_wanted = False  # the api wants the engine to sleep
        self._is_owed = False  # the api waits for an answer
        self._was_told = False  # the last message to the workers was `Sleep`
        self._answers: dict[int, Slept] | None = None  # by rank, until all have answered
        self._num_bytes = 0
        self._problem = ""

    def hear(self, message: Sleep | Wake | Slept) -> None:
        """From the api or a worker."""
        if not isinstance(message, Slept):
            self._is_wanted, self._is_owed, self._problem = isinstance(message, Sleep), True, ""
            return
        assert self._answers is not None, message
        self._answers[message.rank] = message
        if len(self._answers) < self._num_workers:
            return
        answers, self._answers = self._answers.values(), None
        self._num_bytes = sum(answer.num_bytes for answer in answers)
        if problem := next((answer.problem for answer in answers if answer.problem), ""):
            self._is_wanted, self._problem = True, problem  # a rank is still asleep, so the others go back to sleep

    def forget(self) -> None:
        """The workers were replaced: the new ones are awake."""
        self._was_told, self._answers = False, None

    @property
    def is_asleep(self) -> bool:
        """The workers are asleep, or will be when they read their messages: they must not be sent a plan."""
        return self._was_told

    def pause(self, scheduler: AnyScheduler) -> None:
        """Pauses the scheduler from the api's `Sleep` until every worker is awake again."""
        is_paused = self._is_wanted or self._was_told or self._answers is not None
        if scheduler.is_paused != is_paused:
            self._record(trace.Paused(is_paused))
            scheduler.is_paused = is_paused

    def settle(self, scheduler: AnyScheduler) -> None:
        """Takes the next step to what the api wants, if it can be taken now. The KV connector's last reads of the KV
        cache were planned before."""
        if self._answers is not None:
            return
        if self._is_wanted and not self._was_told:
            if scheduler.is_busy:
                return  # plans, loads and sends in flight must end first
            self._record(trace.Emptied())
            scheduler.empty()
        if self._is_wanted != self._was_told:
            self._was_told, self._answers = self._is_wanted, {}
            self._tell_workers(Sleep() if self._is_wanted else Wake())
        elif self._is_owed:
            self._is_owed = False
            self._tell_api(Slept(self._is_wanted, self._num_bytes, self._problem))
