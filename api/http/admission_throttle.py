"""Admits a burst of requests a few per turn of the event loop, so that open streams and probes run in between."""

import asyncio
from collections import deque

MAX_PER_TURN = 8  # requests; they take a few milliseconds


class AdmissionThrottle:
    """The throttle of one event loop."""

    def __init__(self) -> None:
        self._num_left = MAX_PER_TURN  # that may enter in this turn
        self._is_scheduled = False  # `_turn` is
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> None:
        """Returns in order of arrival; at once if at most MAX_PER_TURN requests came in this turn."""
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._turn)
        if self._num_left and not self._waiting:
            self._num_left -= 1
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        await waiter

    def _turn(self) -> None:
        self._num_left = MAX_PER_TURN
        while self._waiting and self._num_left:
            waiter = self._waiting.popleft()
            if not waiter.done():  # its client has left
                waiter.set_result(None)
                self._num_left -= 1
        self._is_scheduled = bool(self._waiting)
        if self._is_scheduled:
            asyncio.get_running_loop().call_soon(self._turn)
