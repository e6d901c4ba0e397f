"""Whether rows and blocks add up while nobody is served: a leak must never cost more than itself.

The simulator proves that none leaks. If one does all the same, a server that runs for months would lose its memory
piece by piece, so the core looks now and then. It costs some milliseconds, once after each time that there was work.
"""

from ..engine.core.scheduler import Scheduler


class IdleCheck:
    """Of one core. `look` is called every half second."""

    def __init__(self) -> None:
        self._idle_since = -1  # the step that was the last when nobody was served
        self._checked = 0  # the same, when rows and blocks were looked at

    def is_due(self, scheduler: Scheduler) -> bool:
        """Whether nobody was served this time and the time before, and there was work since it was due last."""
        is_idle = not scheduler.table.requests and not scheduler.is_busy
        was_idle, self._idle_since = self._idle_since == scheduler.step, scheduler.step if is_idle else -1
        if not (is_idle and was_idle and self._checked != scheduler.step):
            return False
        self._checked = scheduler.step
        return True
