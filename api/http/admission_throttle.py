"""A crowd comes in a few at a time, so that streams and probes get their turns in between."""

import asyncio
from collections import deque

MAX_PER_TURN = 8  # requests of a turn of the loop: a few milliseconds


class AdmissionThrottle:
    """Of one event loop."""

    def __init__(self) -> None:
        self._room = MAX_PER_TURN
        self._is_turning = False
        self._crowd: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> None:
        """Returns in order of arrival; at once while there is no crowd."""
        if not self._is_turning:
            self._is_turning = True
            asyncio.get_running_loop().call_soon(self._turn)
        if self._room and not self._crowd:
            self._room -= 1
            return
        place = asyncio.get_running_loop().create_future()
        self._crowd.append(place)
        await place

    def _turn(self) -> None:
        self._room = MAX_PER_TURN
        while self._crowd and self._room:
            place = self._crowd.popleft()
            if not place.done():  # else it has left
                place.set_result(None)
                self._room -= 1
        self._is_turning = bool(self._crowd)
        if self._is_turning:
            asyncio.get_running_loop().call_soon(self._turn)
