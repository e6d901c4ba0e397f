"""/v1/messages/batches: many requests in one, answered in the background.

A batch is a job (`api/state/jobs.py`). Its requests and results are kept one by one while it is answered, so that
whoever goes on with it answers only what is left. Then they become one value, which may leave for newer ones.
"""

import contextlib
import logging
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Annotated, Literal
from urllib.parse import parse_qsl

import msgspec
from msgspec import Meta, Raw, Struct
from msgspec.structs import replace
from starlette.types import Receive, Scope, Send

from ..http.exchange import read_json, send_body, send_json
from ..http.http_error import HttpError, anthropic_error_body
from ..http.operation import Operation
from ..openai.translate import decode_body, request_decoder
from ..output.inner_call import InnerCalls
from ..output.reply import new_id
from ..output.service import Service
from ..state.jobs import Doing, Ended, end_of
from ..state.pieces import Pieces
from ..state.records import Records

MAX_REQUESTS = 10_000
MAX_OPEN = 64  # batches that have not ended
MAX_STORED_BYTES = 128 << 20  # of results
_MAX_REQUEST_BYTES = 256 << 20  # of all open batches
MAX_LISTED = 1000
_WINDOW = timedelta(hours=24)
_PATH = "/v1/messages"
_JOB = "message batch"
_encode = msgspec.json.Encoder().encode

log = logging.getLogger(__name__)


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
    """The endpoints, and the work."""

    def __init__(self, service: Service, calls: InnerCalls) -> None:
        """`calls`: answers the requests."""
        state = service.state
        self._store = Records(state, "message_batch", StoredBatch, max_bytes=MAX_STORED_BYTES)
        self._requests = Pieces(state, "message_batch_request", max_bytes=_MAX_REQUEST_BYTES)
        self._results = Pieces(state, "message_batch_result", max_bytes=MAX_STORED_BYTES)
        self._calls = calls
        self._jobs = service.jobs
        self._decoder = request_decoder(CreateMessageBatch)
        self._jobs.register(_JOB, self._run, most=MAX_OPEN)

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
        await self._jobs.check_room(_JOB)
        now, owner = datetime.now(UTC), scope["state"]["salt"]
        body = MessageBatch(
            new_id("msgbatch_"), "in_progress", MessageBatchCounts(len(ids)), _time(now), _time(now + _WINDOW)
        )
        try:
            for number, one in enumerate(request.requests):
                await self._requests.put(owner, body.id, number, _encode(one))
            await self._store.put(owner, body.id, StoredBatch(body))
        except BaseException:
            await self._drop_pieces(owner, body.id)
            raise
        await self._jobs.add(_JOB, owner, body.id)
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
        owner, id = scope["state"]["salt"], (await self._found(scope)).body.id
        now = _time(datetime.now(UTC))

        def cancelled(stored: StoredBatch) -> StoredBatch:
            body = stored.body
            if body.processing_status == "in_progress":
                body = replace(body, processing_status="canceling", cancel_initiated_at=now)
            return replace(stored, body=body)

        stored = await self._store.change(owner, id, cancelled)
        if stored is None or stored.body.processing_status == "ended":
            raise HttpError(409, "The batch has ended and cannot be cancelled.")
        await self._jobs.cancel(owner, id)
        await send_json(send, stored.body)

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

    async def _run(self, owner: bytes, id: str, doing: Doing) -> None:
        stored = await self._store.get(owner, id)
        if (
            stored is None or stored.body.processing_status == "ended"
        ):  # others needed the room, or it was just not noted
            await self._drop_pieces(owner, id)
            return
        until = datetime.fromisoformat(stored.body.expires_at).timestamp()
        work = partial(self._answer_all, owner, id, stored.body)
        left: dict[str, object] = {"type": "canceled"}
        match await end_of(work, doing, until=until, name="batch"):
            case HttpError() as error:
                left = {"type": "errored", "error": Raw(anthropic_error_body(error))}
            case Ended.EXPIRED:
                left = {"type": "expired"}
            case Ended.DONE | Ended.CANCELLED:
                pass
        await self._end(owner, id, left)

    async def _answer_all(self, owner: bytes, id: str, body: MessageBatch) -> None:
        if body.processing_status != "in_progress":
            return
        done = {number async for number, _ in self._results.read(owner, id)}

        async def waiting() -> AsyncIterator[tuple[int, BatchRequest]]:
            async for number, request in self._requests.read(owner, id):
                if number not in done:
                    yield number, _request_decoder.decode(request)

        async def answer(numbered: tuple[int, BatchRequest]) -> None:
            number, request = numbered
            result = await self._result(owner, request)
            await self._results.put(owner, id, number, _encode({"custom_id": request.custom_id, "result": result}))

        await self._calls.for_each(waiting(), answer)

    async def _result(self, owner: bytes, request: BatchRequest) -> dict[str, object]:
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
            if msgspec.json.decode(request.params, type=_Streams).stream:
                error = {"type": "invalid_request_error", "message": "stream: a batch has no streams."}
                return {"type": "errored", "error": {"type": "error", "error": error}}
        status, _, body = await self._calls.post(_PATH, bytes(request.params), owner=owner)
        if status == 200:
            return {"type": "succeeded", "message": Raw(body)}
        return {"type": "errored", "error": Raw(body)}

    async def _end(self, owner: bytes, id: str, left: dict[str, object]) -> None:
        """Keeps the results. `left`: the result of requests that have none. May be done again."""
        results = {number: line async for number, line in self._results.read(owner, id)}
        lines, types = list[bytes](), list[str]()
        async for number, request in self._requests.read(owner, id):
            if (line := results.get(number)) is None:
                line = _encode({"custom_id": _request_decoder.decode(request).custom_id, "result": left})
            lines += [line, b"\n"]
            types.append(_result_decoder.decode(line).result.type)
        counts = MessageBatchCounts(0, *(types.count(name) for name in MessageBatchCounts.__struct_fields__[1:]))

        def ended(stored: StoredBatch) -> StoredBatch:
            body = replace(
                stored.body,
                processing_status="ended",
                request_counts=counts,
                ended_at=_time(datetime.now(UTC)),
                results_url=f"{_PATH}/batches/{id}/results",
            )
            return StoredBatch(body, b"".join(lines))

        await self._store.change(owner, id, ended)
        await self._drop_pieces(owner, id)

    async def _drop_pieces(self, owner: bytes, id: str) -> None:
        await self._requests.delete(owner, id)
        await self._results.delete(owner, id)


class _ResultType(Struct, frozen=True):
    type: str


class _ResultLine(Struct, frozen=True):
    result: _ResultType


_request_decoder = msgspec.json.Decoder(BatchRequest)
_result_decoder = msgspec.json.Decoder(_ResultLine)


class _Streams(Struct, frozen=True):
    stream: bool | None = None


def _age(body: MessageBatch) -> str:
    return body.created_at


def _time(when: datetime) -> str:
    return when.isoformat().replace("+00:00", "Z")
