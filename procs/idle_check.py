"""When to check that rows and blocks add up, so that a leak does not add up over months.

`tests/sim` shows that none leaks. Should one leak all the same, the core finds it while no request is open. The check
takes some milliseconds and runs once after each time that there was work.
"""

from ..engine.core.domains import AnyScheduler


class IdleCheck:
    """`is_due` is called every half second."""

    def __init__(self) -> None:
        self._idle_since = -1  # the last step when no request was open at the last call; -1: one was
        self._checked = 0  # the last step when a check was due last

    def is_due(self, scheduler: AnyScheduler) -> bool:
        """No request is open now or was at the last call, and there was a step since the last check was due."""
        is_idle = not scheduler.requests and not scheduler.is_busy
        was_idle, self._idle_since = self._idle_since == scheduler.step, scheduler.step if is_idle else -1
        if not (is_idle and was_idle and self._checked != scheduler.step):
            return False
        self._checked = scheduler.step
        return True
