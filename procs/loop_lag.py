"""How late an event loop comes to what is due: a timer ten times a second that looks at the clock."""

import asyncio

from ..ipc.reports import SECONDS, Histogram

_INTERVAL_S = 0.1


class LoopLag:
    """Looks until `stop`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.seconds = Histogram(SECONDS)
        self._loop = loop
        self._wait()

    def stop(self) -> None:
        """No more looks."""
        self._timer.cancel()

    def _wait(self) -> None:
        self._due = self._loop.time() + _INTERVAL_S
        self._timer = self._loop.call_at(self._due, self._look)

    def _look(self) -> None:
        self.seconds.observe(max(0.0, self._loop.time() - self._due))
        self._wait()
