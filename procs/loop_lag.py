"""Measures the lag of an event loop: how late a timer fires that is due every 0.1 s."""

import asyncio

from ..ipc.reports import SECONDS, Histogram

_INTERVAL_S = 0.1


class LoopLag:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.seconds = Histogram(SECONDS)
        self._loop = loop
        self._wait()

    def stop(self) -> None:
        self._timer.cancel()

    def _wait(self) -> None:
        self._due = self._loop.time() + _INTERVAL_S
        self._timer = self._loop.call_at(self._due, self._observe)

    def _observe(self) -> None:
        self.seconds.observe(max(0.0, self._loop.time() - self._due))
        self._wait()
