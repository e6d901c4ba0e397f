"""Responses that are made without their client: `background`. Each is a job (`api/state/jobs.py`).

A response whose process has ended is made again by another one: nobody has seen anything of it. Clients of one that is
streamed may have, and another run would continue with another text, so such a response fails instead.

A run keeps the events of its stream until it ends, so that clients may come, go and come again. For clients of other
processes they are in the database as well, a few at a time.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

import msgspec
from msgspec.structs import replace
from starlette.types import Message, Scope

from ...ipc.messages import Submit
from ..http.entitlement import EVERYTHING
from ..http.http_error import HttpError, as_http_error
from ..http.rate_limit import Account
from ..output.service import Service
from ..output.turn import Turn
from ..state.database import Database
from ..state.jobs import MAX_DEATHS, Doing, Jobs
from ..state.pieces import Pieces
from .reply import ResponsesReply
from .store import ResponseStore, StoredResponse
from .types import ResponseBody

MAX_RUNS = 256
_JOB = "response"
_MAX_EVENT_BYTES = 64 << 20  # of open runs
_FLUSH_S = 0.2
_OPEN = ("queued", "in_progress")

log = logging.getLogger(__name__)
Key = tuple[bytes, str]
"""Owner and id of a response."""


class Prepared(NamedTuple):
    """What it takes to make a response."""

    submits: list[Submit]
    reply: ResponsesReply


class Run:
    """One response in the making, in this process."""

    def __init__(self, reply: ResponsesReply, *, keeps_events: bool) -> None:
        self._reply = reply
        self._keeps_events = keeps_events
        self._changed = asyncio.Event()
        self.admitted = asyncio.Event()  # by the engine
        self.events: list[bytes] = []
        self.has_ended = False

    async def make(self, service: Service, submits: list[Submit], scope: Scope, doing: Doing) -> None:
        """Raises CancelledError if another process is to make the response, and nothing else."""
        try:
            await service.answer(submits, self._reply, True, {**scope, "extensions": {}}, _never, self._send)
        except asyncio.CancelledError:
            if doing.is_cancelled:
                self._reply.cancel()
            elif self._keeps_events:
                detail = "The server stopped before the response was complete."
                self._keep(self._reply.failure(HttpError(503, detail, code="shutting_down")))
            else:
                raise
        except Exception as error:
            http_error = as_http_error(error)
            if http_error.status == 500:
                log.exception("a background response failed")
            self._keep(self._reply.failure(http_error))

    def end(self) -> None:
        """Ends what follows it."""
        self.has_ended = True
        self._changed.set()

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

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.admitted.set()
        body: bytes = message.get("body", b"")
        if body and not body.startswith(b":"):
            self._keep(body)

    def _keep(self, event: bytes) -> None:
        if self._keeps_events:
            self.events.append(event)
            self._changed.set()


Prepare = Callable[[bytes, StoredResponse], Prepared]


class BackgroundRuns:
    """Those of all models of one api process."""

    def __init__(self, state: Database, jobs: Jobs) -> None:
        self._store = ResponseStore(state)
        self._jobs = jobs
        self._makers: dict[Service, Prepare] = {}
        self._events = Pieces(state, "response_events", max_bytes=_MAX_EVENT_BYTES)
        self._runs: dict[Key, Run] = {}
        self._scopes: dict[Key, Scope] = {}  # of requests whose jobs begin
        self._jobs.register(_JOB, self._run, most=MAX_RUNS)

    def add(self, service: Service, prepare: Prepare) -> None:
        """Has responses of this model made; what was said of it before holds no more. `prepare` is given the owner,
        too, and raises HttpError for a request that this server cannot answer."""
        self._makers[service] = prepare

    async def begin(self, owner: bytes, id: str, stored: StoredResponse, scope: Scope) -> None:
        """Keeps a new response and makes it; the account in `scope` pays, unless another process makes it. Raises
        HttpError 429 if there are too many."""
        await self._jobs.check_room(_JOB)
        await self._store.put(owner, id, stored)
        self._scopes[owner, id] = scope
        try:
            await self._jobs.add(_JOB, owner, id)
        finally:
            asyncio.get_running_loop().call_soon(self._scopes.pop, (owner, id), None)  # after the job's first step

    async def follow(self, owner: bytes, id: str, first: int) -> AsyncIterator[bytes]:
        """The events of a streamed response from this one on, as they come, wherever it is made."""
        if (run := self._runs.get((owner, id))) is not None:
            async for event in run.follow(first):
                yield event
            return
        num = next_piece = 0
        while await self._jobs.is_open(owner, id):
            async for number, piece in self._events.read(owner, id, next_piece):
                next_piece = number + 1
                for event in _split(piece):
                    if num >= first:
                        yield event
                    num += 1
            await asyncio.sleep(_FLUSH_S)
        if (stored := await self._store.get(owner, id)) is not None:
            for event in _split(stored.events)[max(first, num) :]:
                yield event

    async def cancel(self, owner: bytes, id: str) -> None:
        """Returns when the response, if it is being made, has ended."""
        await self._jobs.cancel(owner, id)
        await self._jobs.ended(owner, id)

    # ── the work ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _run(self, owner: bytes, id: str, doing: Doing) -> None:
        scope = self._scopes.get((owner, id)) or _scope(owner, id)
        stored = await self._store.get(owner, id)
        if stored is not None and not stored.has_ended:
            await self._make(owner, id, stored, scope, doing)
        await self._events.delete(owner, id)

    async def _make(self, owner: bytes, id: str, stored: StoredResponse, scope: Scope, doing: Doing) -> None:
        earlier = [piece async for _, piece in self._events.read(owner, id)]
        response = msgspec.json.decode(stored.body, type=ResponseBody)
        makers = [*self._makers.items()]
        service, prepare = next(
            (one for one in makers if response.model in one[0].config.served_model_names), makers[0]
        )
        try:
            if stored.is_streamed and (earlier or doing.num_deaths):
                raise HttpError(500, "The process that made this response has ended, and a stream is not made again.")
            if doing.num_deaths >= MAX_DEATHS:
                raise HttpError(500, f"{MAX_DEATHS} processes have died while they made this response.")
            submits, reply = prepare(owner, stored)
        except HttpError as error:
            num = len(_split(b"".join(earlier)))
            reply = ResponsesReply(response, turn=Turn(None), has_logprobs=False, on_end=_nothing, first=num)
            events = b"".join([*earlier, reply.failure(error)]) if stored.is_streamed else b""
            await self._note(owner, id, replace(stored, events=events), reply)
            return
        if doing.is_cancelled:
            reply.cancel()
            await self._note(owner, id, stored, reply)
            return
        run = self._runs[owner, id] = Run(reply, keeps_events=stored.is_streamed)
        note = asyncio.create_task(self._note_progress(owner, id, stored, run, reply))
        try:
            await run.make(service, submits, scope, doing)
            note.cancel()
            await asyncio.wait((note,))
            if reply.response.status in ("failed", "cancelled"):
                await self._note(owner, id, stored, reply)
            if stored.is_streamed:
                events = b"".join(run.events)
                await self._store.change(owner, id, lambda record: replace(record, events=events))
        finally:
            note.cancel()
            run.end()
            del self._runs[owner, id]

    async def _note(self, owner: bytes, id: str, stored: StoredResponse, reply: ResponsesReply) -> None:
        body = reply.response
        record = replace(stored, body=msgspec.json.encode(body), has_ended=body.status not in _OPEN)
        if record.has_ended:
            record = replace(record, messages=b"[]", request=b"")
        await self._store.put(owner, id, record)

    async def _note_progress(
        self, owner: bytes, id: str, stored: StoredResponse, run: Run, reply: ResponsesReply
    ) -> None:
        """For clients of other processes: that the response has begun, and its events."""
        await run.admitted.wait()
        num = number = 0
        with contextlib.suppress(HttpError):  # the end is kept, if that works again
            if reply.response.status in _OPEN:  # else its end is kept already, or about to be
                await self._note(owner, id, stored, reply)
            while stored.is_streamed:
                if len(run.events) > num:
                    piece, num = b"".join(run.events[num:]), len(run.events)
                    await self._events.put(owner, id, number, piece)
                    number += 1
                await asyncio.sleep(_FLUSH_S)


def _split(events: bytes) -> list[bytes]:
    return [event + b"\n\n" for event in events.split(b"\n\n")[:-1]]


def _scope(owner: bytes, id: str) -> Scope:
    """Of a request that another process got, and was paid for."""
    # What its key may ask for was checked when it was accepted.
    state = {"salt": owner, "request_id": id, "account": Account(), "entitlement": EVERYTHING}
    return {"type": "http", "method": "POST", "path": "/v1/responses", "headers": [], "state": state}


async def _never() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


async def _nothing(response: ResponseBody) -> None:
    """The end of a response that fails is kept elsewhere."""
