"""/v1/messages/batches: many requests in one, answered in the background. Their results are stored, bounded."""

import asyncio
import contextlib
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated, Literal
from urllib.parse import parse_qsl

import msgspec
from msgspec import Meta, Raw, Struct
from msgspec.structs import replace
from starlette.types import ASGIApp, Receive, Scope, Send

from ..http.exchange import read_json, send_body, send_json
from ..http.http_error import HttpError
from ..http.operation import Operation
from ..openai.translate import decode_body, request_decoder
from ..output.inner_call import call_endpoint
from ..output.reply import new_id
from ..output.service import Service
from ..state.records import Records

MAX_REQUESTS = 10_000
MAX_OPEN = 64  # batches of one api process that have not ended
MAX_STORED_BYTES = 128 << 20
MAX_LISTED = 1000
_WINDOW = timedelta(hours=24)
_PAUSE_S = 1.0  # before a request is sent again after 429 or 503
_PATH = "/v1/messages"
_encode = msgspec.json.Encoder().encode
_Results = dict[str, dict[str, object]]


class BatchRequest(Struct, frozen=True):
    custom_id: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    params: Annotated[Raw, Meta(extra_json_schema={"type": "object"})]  # the body of a message


class CreateMessageBatch(Struct, frozen=True):
    """POST /v1/messages/batches"""

    requests: Annotated[list[BatchRequest], Meta(min_length=1, max_length=MAX_REQUESTS)]


class MessageBatchCounts(Struct, frozen=True):
    processing: int = 0
    succeeded: int = 0
    errored: int = 0
    canceled: int = 0
    expired: int = 0


class MessageBatch(Struct, frozen=True, tag="message_batch"):
    """Times are RFC 3339."""

    id: str
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: MessageBatchCounts
    created_at: str
    expires_at: str
    ended_at: str | None = None
    cancel_initiated_at: str | None = None
    archived_at: str | None = None
    results_url: str | None = None


class MessageBatchList(Struct, frozen=True):
    data: list[MessageBatch]
    has_more: bool
    first_id: str | None
    last_id: str | None


class MessageBatchDeleted(Struct, frozen=True, tag="message_batch_deleted"):
    id: str


class BatchListQuery(Struct, frozen=True):
    limit: Annotated[int, Meta(ge=1, le=MAX_LISTED)] = 20
    after_id: str | None = None
    before_id: str | None = None


class StoredBatch(Struct, frozen=True):
    body: MessageBatch
    results: bytes = b""  # JSON lines


class MessageBatches:
    """The endpoints of the batches of one api process, and their work."""

    def __init__(self, service: Service, app: ASGIApp) -> None:
        """`app`: has the endpoint that answers the requests."""
        self._app = app
        self._store = Records(service.state, "message_batch", StoredBatch, max_bytes=MAX_STORED_BYTES)
        self._slots = asyncio.Semaphore(min(64, service.config.max_num_seqs))
        self._concurrency = min(64, service.config.max_num_seqs)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._decoder = request_decoder(CreateMessageBatch)

    def start(self) -> None:
        """Nothing goes on from an earlier server."""

    async def stop(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def routes(self) -> list[Operation]:
        base = f"{_PATH}/batches"
        return [
            Operation(
                "POST", base, self.create, "Answer many conversations", takes=CreateMessageBatch, gives=MessageBatch
            ),
            Operation("GET", base, self.batches, "The batches", query=BatchListQuery, gives=MessageBatchList),
            Operation("GET", f"{base}/{{id}}", self.batch, "A batch's state", gives=MessageBatch),
            Operation("POST", f"{base}/{{id}}/cancel", self.cancel, "Cancel a batch", gives=MessageBatch),
            Operation("DELETE", f"{base}/{{id}}", self.forget, "Forget a batch", gives=MessageBatchDeleted),
            Operation(
                "GET",
                f"{base}/{{id}}/results",
                self.results,
                "A batch's answers",
                gives=str,
                gives_as="application/x-jsonl",
            ),
        ]

    async def create(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = decode_body(self._decoder, await read_json(scope, receive))
        ids = [one.custom_id for one in request.requests]
        if len(set(ids)) < len(ids):
            twice = next(id for id in ids if ids.count(id) > 1)
            raise HttpError(400, f"custom_id {twice!r} appears twice.", param="requests")
        if len(self._tasks) >= MAX_OPEN:
            raise HttpError(429, f"{MAX_OPEN} batches are already being answered.", code="queue_full")
        now, owner = datetime.now(UTC), scope["state"]["salt"]
        body = MessageBatch(
            new_id("msgbatch_"), "in_progress", MessageBatchCounts(len(ids)), _time(now), _time(now + _WINDOW)
        )
        await self._store.put(owner, body.id, StoredBatch(body))
        task = asyncio.get_running_loop().create_task(self._answer_all(owner, body, request.requests))
        self._tasks[body.id] = task
        task.add_done_callback(lambda _: self._tasks.pop(body.id, None))
        await send_json(send, body)

    async def batches(self, scope: Scope, receive: Receive, send: Send) -> None:
        query = dict(parse_qsl(scope["query_string"].decode("latin-1")))
        limit, after, before = query.get("limit", "20"), query.get("after_id"), query.get("before_id")
        if not (limit.isascii() and limit.isdigit() and len(limit) < 5 and 1 <= int(limit) <= MAX_LISTED):
            raise HttpError(400, f"limit must be a number from 1 to {MAX_LISTED}.", param="limit")
        listed = await self._store.list(scope["state"]["salt"])
        found = sorted((stored.body for _, stored in listed), key=_age, reverse=True)
        ids = [body.id for body in found]
        for id, name in ((after, "after_id"), (before, "before_id")):
            if id is not None and id not in ids:
                raise HttpError(400, f"{name}: there is no batch {id[:100]!r}.", param=name)
        if before is not None:
            found = found[: ids.index(before)][-int(limit) :]
            more = False
        else:
            found = found[ids.index(after) + 1 if after is not None else 0 :]
            more, found = len(found) > int(limit), found[: int(limit)]
        first, last = (found[0].id, found[-1].id) if found else (None, None)
        await send_json(send, MessageBatchList(found, more, first, last))

    async def batch(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, (await self._found(scope)).body)

    async def cancel(self, scope: Scope, receive: Receive, send: Send) -> None:
        owner, stored = scope["state"]["salt"], await self._found(scope)
        body = stored.body
        if body.processing_status == "ended":
            raise HttpError(409, "The batch has ended and cannot be cancelled.")
        if body.processing_status != "canceling":
            body = replace(body, processing_status="canceling", cancel_initiated_at=_time(datetime.now(UTC)))
            await self._store.put(owner, body.id, replace(stored, body=body))
            self._tasks[body.id].cancel()
        await send_json(send, body)

    async def forget(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = (await self._found(scope)).body
        if body.processing_status != "ended":
            raise HttpError(409, "The batch has not ended; cancel it first.")
        await self._store.delete(scope["state"]["salt"], body.id)
        await send_json(send, MessageBatchDeleted(body.id))

    async def results(self, scope: Scope, receive: Receive, send: Send) -> None:
        stored = await self._found(scope)
        if stored.body.processing_status != "ended":
            raise HttpError(404, "The batch has not ended, so it has no results.", code="not_found")
        await send_body(send, 200, stored.results, content_type=b"application/x-jsonl")

    async def _found(self, scope: Scope) -> StoredBatch:
        id = scope["path_params"]["id"]
        stored = await self._store.get(scope["state"]["salt"], id)
        if stored is None:
            raise HttpError(404, f"There is no batch {id[:100]!r}.", code="not_found")
        return stored

    # ── the work ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _answer_all(self, owner: bytes, body: MessageBatch, requests: Sequence[BatchRequest]) -> None:
        results: _Results = {}
        left = "canceled"
        try:
            async with asyncio.timeout(_WINDOW.total_seconds()), asyncio.TaskGroup() as group:
                ahead = asyncio.Semaphore(self._concurrency)  # a task is created when another ends
                for request in requests:
                    await ahead.acquire()
                    task = group.create_task(self._answer(owner, request, results))
                    task.add_done_callback(lambda _: ahead.release())
        except TimeoutError:
            left = "expired"
        finally:
            await self._end(owner, body.id, [request.custom_id for request in requests], results, left)

    async def _answer(self, owner: bytes, request: BatchRequest, results: _Results) -> None:
        async with self._slots:
            while True:
                status, answer = await self._ask(owner, request)
                if status not in (429, 503):
                    break
                await asyncio.sleep(_PAUSE_S)
        if status == 200:
            results[request.custom_id] = {"type": "succeeded", "message": Raw(answer)}
        else:
            results[request.custom_id] = {"type": "errored", "error": Raw(answer)}

    async def _ask(self, owner: bytes, request: BatchRequest) -> tuple[int, bytes]:
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
            if msgspec.json.decode(request.params, type=_Streams).stream:
                error = {"type": "invalid_request_error", "message": "stream: a batch has no streams."}
                return 400, _encode({"type": "error", "error": error})
        request_id = f"req_{secrets.token_hex(12)}"
        return await call_endpoint(self._app, _PATH, bytes(request.params), owner=owner, request_id=request_id)

    async def _end(
        self, owner: bytes, id: str, ids: Sequence[str], results: dict[str, dict[str, object]], left: str
    ) -> None:
        """Keeps the results. `left`: the type of those that there are none of."""
        stored = await self._store.get(owner, id)
        if stored is None:  # others needed the room
            return
        found = {one: results.get(one, {"type": left}) for one in ids}
        types = [result["type"] for result in found.values()]
        counts = MessageBatchCounts(0, *(types.count(name) for name in MessageBatchCounts.__struct_fields__[1:]))
        lines = [_encode({"custom_id": one, "result": result}) + b"\n" for one, result in found.items()]
        body = replace(
            stored.body,
            processing_status="ended",
            request_counts=counts,
            ended_at=_time(datetime.now(UTC)),
            results_url=f"{_PATH}/batches/{id}/results",
        )
        await self._store.put(owner, id, StoredBatch(body, b"".join(lines)))


class _Streams(Struct, frozen=True):
    stream: bool | None = None


def _age(body: MessageBatch) -> str:
    return body.created_at


def _time(when: datetime) -> str:
    return when.isoformat().replace("+00:00", "Z")
