"""Responses that are made without their client: `background`. One task each, bounded in number.

A run keeps the events of its stream until it ends, so that clients may come, go and come again.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

from starlette.types import Message, Scope

from ...ipc.messages import Submit
from ..http.exchange import ClientGone
from ..http.http_error import HttpError, as_http_error
from ..output.service import Service
from .reply import ResponsesReply

MAX_RUNS = 256

log = logging.getLogger(__name__)
Key = tuple[bytes, str]
"""Owner and id of a response."""


class Run:
    """One response in the making."""

    def __init__(self, reply: ResponsesReply, *, keeps_events: bool) -> None:
        self._reply = reply
        self.keeps_events = keeps_events
        self._cancelled = asyncio.Event()
        self._changed = asyncio.Event()
        self.events: list[bytes] = []
        self.has_ended = False
        self.task: asyncio.Task[None] | None = None

    async def make(
        self,
        service: Service,
        submits: list[Submit],
        scope: Scope,
        on_begin: Callable[[], Awaitable[None]],
        on_end: Callable[[], Awaitable[None]],
    ) -> None:
        """Raises nothing but CancelledError. `on_begin`: the engine has taken it. `on_end` comes last in any case."""
        self._on_begin = on_begin
        try:
            await service.answer(submits, self._reply, True, {**scope, "extensions": {}}, self._receive, self._send)
        except ClientGone:
            self._reply.cancel()
        except asyncio.CancelledError:  # the server stops
            self._fail(HttpError(503, "The server stopped before the response was complete.", code="shutting_down"))
            raise
        except Exception as error:
            http_error = as_http_error(error)
            if http_error.status == 500:
                log.exception("a background response failed")
            self._fail(http_error)
        finally:
            await on_end()
            self.has_ended = True
            self._changed.set()

    def cancel(self) -> None:
        self._cancelled.set()

    async def follow(self, first: int) -> AsyncIterator[bytes]:
        """The events from this one on, as they come."""
        while True:
            while first < len(self.events):
                yield self.events[first]
                first += 1
            if self.has_ended:
                return
            self._changed.clear()
            await self._changed.wait()

    def _fail(self, error: HttpError) -> None:
        self._keep(self._reply.failure(error))

    async def _receive(self) -> Message:
        await self._cancelled.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            await self._on_begin()
        body: bytes = message.get("body", b"")
        if body and not body.startswith(b":"):
            self._keep(body)

    def _keep(self, event: bytes) -> None:
        if self.keeps_events:
            self.events.append(event)
            self._changed.set()


class BackgroundRuns:
    """The runs of one api process."""

    def __init__(self, most: int = MAX_RUNS) -> None:
        self._most = most
        self._runs: dict[Key, Run] = {}

    def start(self) -> None:
        """Nothing goes on from an earlier server."""

    def check_room(self) -> None:
        """Raises HttpError 429 if there are too many."""
        if len(self._runs) >= self._most:
            detail = f"{self._most} responses are already being made in the background."
            raise HttpError(429, detail, code="queue_full")

    def begin(
        self,
        service: Service,
        key: Key,
        run: Run,
        submits: list[Submit],
        scope: Scope,
        *,
        on_begin: Callable[[], Awaitable[None]],
        on_end: Callable[[], Awaitable[None]],
    ) -> None:
        """Begins to make a response; see `Run.make`."""
        self._runs[key] = run
        work = run.make(service, submits, scope, on_begin, on_end)
        run.task = asyncio.get_running_loop().create_task(work)
        run.task.add_done_callback(lambda _: self._runs.pop(key, None))

    def find(self, key: Key) -> Run | None:
        """The run, unless it has ended."""
        return self._runs.get(key)

    async def cancel(self, key: Key) -> None:
        """Returns when the run, if there is one, has ended."""
        run = self._runs.get(key)
        if run is not None and run.task is not None:
            run.cancel()
            await asyncio.wait((run.task,))

    async def stop(self) -> None:
        """Ends all runs; their responses have failed."""
        tasks = [run.task for run in self._runs.values() if run.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def stored_events(events: bytes, first: int) -> AsyncIterator[bytes]:
    """The events of a stream that has ended, from this one on."""
    for event in events.split(b"\n\n")[first:-1]:
        yield event + b"\n\n"
