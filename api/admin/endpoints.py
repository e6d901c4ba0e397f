"""What only administrators may ask, with keys of their own: to put the engine to sleep and to wake it.

An engine that sleeps has given its memory to others. It takes requests, which wait in its queue, and goes on with those
that it was serving when it wakes.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Literal
from urllib.parse import parse_qsl

from msgspec import Struct
from starlette.types import Receive, Scope, Send

from ...errors import RequestError
from ...ipc.messages import Sleep, Slept, Wake
from ..http.exchange import send_json
from ..http.http_error import HttpError
from ..http.operation import Operation
from ..output.service import Service

ADMIN_PATHS = frozenset({"/sleep", "/wake_up", "/is_sleeping", "/admin/models"})


class Sleeping(Struct, frozen=True):
    is_sleeping: bool


class FellAsleep(Struct, frozen=True):
    is_sleeping: bool
    freed_bytes: int


class SleepQuery(Struct, frozen=True):
    level: Literal[1] = 1


class Sleeper:
    """Asks the core, and hears what it says."""

    def __init__(self, post: Callable[[Sleep | Wake], None]) -> None:
        self._post = post
        self._answers: list[asyncio.Future[Slept]] = []

    async def ask(self, message: Sleep | Wake) -> Slept:
        """What the engine is once it is settled."""
        answer: asyncio.Future[Slept] = asyncio.get_running_loop().create_future()
        self._answers.append(answer)
        self._post(message)
        try:
            return await answer
        finally:
            if answer in self._answers:
                self._answers.remove(answer)

    def hear(self, message: Slept) -> None:
        """From the core. Several who asked at once hear the same."""
        answers, self._answers = self._answers, []
        for answer in answers:
            if not answer.done():
                answer.set_result(message)

    def interrupt(self, reason: str) -> None:
        """A process has died, and an answer may have died with it."""
        answers, self._answers = self._answers, []
        for answer in answers:
            if not answer.done():
                answer.set_exception(RequestError("unavailable", f"{reason} Ask again."))


class AdminEndpoints:
    """Only with the flags that allow them."""

    def __init__(self, service: Service, sleeper: Sleeper) -> None:
        self._service = service
        self._sleeper = sleeper

    def routes(self) -> list[Operation]:
        """Paths, and who answers there."""
        if not self._service.http.admin.enable_sleep_mode:
            return []
        return [
            Operation("POST", "/sleep", self.sleep, "Give memory back", query=SleepQuery, gives=FellAsleep),
            Operation("POST", "/wake_up", self.wake_up, "Take it again and go on", gives=Sleeping),
            Operation("GET", "/is_sleeping", self.is_sleeping, "Whether the engine sleeps", gives=Sleeping),
        ]

    async def sleep(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST /sleep: answered when the memory is free."""
        _check_query(scope, {"level": "1"})
        answer = await self._ask(Sleep())
        await send_json(send, FellAsleep(True, answer.num_bytes))

    async def wake_up(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST /wake_up: answered when requests are served again."""
        _check_query(scope, {})
        await self._ask(Wake())
        await send_json(send, Sleeping(False))

    async def is_sleeping(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /is_sleeping"""
        core = self._service.gateway.snapshot
        await send_json(send, Sleeping(core is not None and core.is_asleep))

    async def _ask(self, message: Sleep | Wake) -> Slept:
        self._service.check_health()
        answer = await self._sleeper.ask(message)
        if answer.is_asleep != isinstance(message, Sleep):
            raise RequestError("unavailable", answer.problem or "Another administrator has asked for the opposite.")
        return answer


def _check_query(scope: Scope, only: Mapping[str, str]) -> None:
    """What others can do besides, and this server cannot, must not look done. Raises HttpError 400."""
    for name, value in parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True):
        if only.get(name) != value:
            text = f"{name[:100]} must be {only[name]}." if name in only else f"There is no {name[:100]!r} to choose."
            raise HttpError(400, text, code="unsupported_value", param=name[:100])
