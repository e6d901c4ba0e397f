"""Administrators' requests, which need keys of their own: put the engine to sleep and wake it.

A sleeping engine has freed its memory. It accepts requests, which wait in its queue, and continues those that were
running when it wakes.
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
from ..http.http_error import unsupported
from ..http.operation import Operation
from ..output.service import Service

ADMIN_PATHS = frozenset({"/sleep", "/wake_up", "/admin/models"})
EITHER_PATHS = frozenset({"/is_sleeping"})  # routers in front ask with the users' key


class Sleeping(Struct, frozen=True):
    is_sleeping: bool


class FellAsleep(Struct, frozen=True):
    is_sleeping: bool
    freed_bytes: int


class SleepQuery(Struct, frozen=True):
    level: Literal[1] = 1


class Sleeper:
    """Sends sleep and wake messages to the core, and waits for the answers."""

    def __init__(self, post: Callable[[Sleep | Wake], None]) -> None:
        self._post = post
        self._answers: list[asyncio.Future[Slept]] = []

    async def ask(self, message: Sleep | Wake) -> Slept:
        """Sends a message and returns the core's answer. Raises RequestError if a process dies meanwhile."""
        answer: asyncio.Future[Slept] = asyncio.get_running_loop().create_future()
        self._answers.append(answer)
        self._post(message)
        try:
            return await answer
        finally:
            if answer in self._answers:
                self._answers.remove(answer)

    def hear(self, message: Slept) -> None:
        """Takes an answer of the core. It answers all callers that wait."""
        answers, self._answers = self._answers, []
        for answer in answers:
            if not answer.done():
                answer.set_result(message)

    def interrupt(self, reason: str) -> None:
        """Fails all callers that wait, because a process has died and an answer may be lost."""
        answers, self._answers = self._answers, []
        for answer in answers:
            if not answer.done():
                answer.set_exception(RequestError("unavailable", f"{reason} Ask again."))


class AdminEndpoints:
    def __init__(self, service: Service, sleeper: Sleeper) -> None:
        self._service = service
        self._sleeper = sleeper

    def routes(self) -> list[Operation]:
        if not self._service.http.admin.enable_sleep_mode:
            return []
        return [
            Operation("POST", "/sleep", self.sleep, "Free the engine's memory", query=SleepQuery, gives=FellAsleep),
            Operation("POST", "/wake_up", self.wake_up, "Allocate the memory again and continue", gives=Sleeping),
            Operation("GET", "/is_sleeping", self.is_sleeping, "Whether the engine sleeps", gives=Sleeping),
        ]

    async def sleep(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers when the memory is free."""
        _check_query(scope, {"level": "1"})
        answer = await self._ask(Sleep())
        await send_json(send, FellAsleep(True, answer.num_bytes))

    async def wake_up(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers when requests are served again."""
        _check_query(scope, {})
        await self._ask(Wake())
        await send_json(send, Sleeping(False))

    async def is_sleeping(self, scope: Scope, receive: Receive, send: Send) -> None:
        core = self._service.gateway.snapshot
        await send_json(send, Sleeping(core is not None and core.is_asleep))

    async def _ask(self, message: Sleep | Wake) -> Slept:
        self._service.check_health()
        answer = await self._sleeper.ask(message)
        if answer.is_asleep != isinstance(message, Sleep):
            raise RequestError("unavailable", answer.problem or "Another administrator has asked for the opposite.")
        return answer


def _check_query(scope: Scope, only: Mapping[str, str]) -> None:
    """Refuses query parameters that this server does not support, such as other sleep levels. Raises HttpError 400."""
    for name, value in parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True):
        if only.get(name) != value:
            text = f"{name[:100]} must be {only[name]}." if name in only else f"There is no parameter {name[:100]!r}."
            raise unsupported(name[:100], text)
