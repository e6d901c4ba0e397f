"""Administrators' requests, which need keys of their own: put the engines to sleep and wake them.

A sleeping engine has freed its memory. It accepts requests, which wait in its queue, and continues those that were
running when it wakes.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Literal
from urllib.parse import parse_qsl

from msgspec import Struct
from msgspec.structs import replace
from starlette.types import Receive, Scope, Send

from ...errors import RequestError
from ...ipc.messages import Sleep, Slept, Snapshot, Wake
from ..http.exchange import send_json
from ..http.http_error import unsupported
from ..http.operation import Operation
from ..output.service import Service

ADMIN_PATHS = frozenset({"/sleep", "/wake_up", "/admin/models", "/admin/settings"})
EITHER_PATHS = frozenset({"/is_sleeping", "/api/pull"})  # routers in front, and Ollama's clients, have the users' key


class Sleeping(Struct, frozen=True):
    is_sleeping: bool


class FellAsleep(Struct, frozen=True):
    is_sleeping: bool
    freed_bytes: int


class SleepQuery(Struct, frozen=True):
    level: Literal[1] = 1


class Sleeper:
    """Sends sleep and wake messages to the core of each engine, and waits for the answers."""

    def __init__(self, *posts: Callable[[Sleep | Wake], None]) -> None:
        """`posts`: for each engine what sends to its core."""
        self._posts = posts
        self._asked: list[_Asked] = []

    async def ask(self, message: Sleep | Wake, engines: Sequence[int]) -> Slept:
        """Sends a message to these engines and returns the cores' answers as one: the first problem, or the sum of the
        bytes. Raises RequestError if a process dies meanwhile."""
        asked = _Asked(set(engines))
        self._asked.append(asked)
        for engine in engines:
            self._posts[engine](message)
        try:
            return await asked.answer
        finally:
            self._asked.remove(asked)

    def hear(self, message: Slept) -> None:
        """Takes an answer of a core. It answers all callers that wait for that core."""
        for asked in self._asked:
            asked.take(message)

    def interrupt(self, reason: str) -> None:
        """Fails all callers that wait, because a process has died and an answer may be lost."""
        for asked in self._asked:
            if not asked.answer.done():
                asked.answer.set_exception(RequestError("unavailable", f"{reason} Ask again."))


class _Asked:
    """One caller."""

    def __init__(self, engines: set[int]) -> None:
        self._silent = engines  # those that have not answered
        self._answers: list[Slept] = []
        self.answer: asyncio.Future[Slept] = asyncio.get_running_loop().create_future()

    def take(self, message: Slept) -> None:
        if message.engine not in self._silent or self.answer.done():
            return
        self._silent.remove(message.engine)
        self._answers.append(message)
        if not self._silent:
            worst = next((slept for slept in self._answers if slept.problem), message)
            self.answer.set_result(replace(worst, num_bytes=sum(slept.num_bytes for slept in self._answers)))


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
        await send_json(send, Sleeping(are_asleep(self._service.gateway.snapshots)))

    async def _ask(self, message: Sleep | Wake) -> Slept:
        self._service.check_health()
        engines = self._service.gateway.engines
        able = [engine.number for engine in engines if engine.outage is None]
        for engine in engines:
            # It may never answer. No engine sleeps alone, but those that can wake do so: one that comes back is awake.
            if engine.outage is not None and (isinstance(message, Sleep) or not able):
                which = f"Engine {engine.number} is not ready. " if len(engines) > 1 else ""
                raise RequestError("unavailable", f"{which}{engine.outage.reason} Ask again when it is ready.")
        answer = await self._sleeper.ask(message, able)
        if answer.is_asleep != isinstance(message, Sleep):
            raise RequestError("unavailable", answer.problem or "Another administrator has asked for the opposite.")
        return answer


def are_asleep(cores: Sequence[Snapshot]) -> bool:
    """Whether all engines sleep, by their last reports."""
    return bool(cores) and all(core.is_asleep for core in cores)


def _check_query(scope: Scope, only: Mapping[str, str]) -> None:
    """Refuses query parameters that this server does not support, such as other sleep levels. Raises HttpError 400."""
    for name, value in parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True):
        if only.get(name) != value:
            text = f"{name[:100]} must be {only[name]}." if name in only else f"There is no parameter {name[:100]!r}."
            raise unsupported(name[:100], text)
