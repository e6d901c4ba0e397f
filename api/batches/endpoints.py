"""/v1/files and /v1/batches."""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from urllib.parse import parse_qs

import msgspec
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.types import Receive, Scope, Send

from ..http.exchange import ClientGone, read_json, send_json, too_large
from ..http.http_error import HttpError, unsupported
from ..http.operation import Operation
from ..openai.translate import decode_body
from ..output.inner_call import InnerCalls
from ..output.service import Service
from ..state.pieces import PIECE_BYTES
from .format import URLS
from .runner import WINDOW_S, BatchRunner
from .store import MAX_FILE_BYTES, BatchStore
from .types import BatchBody, Binary, CreateBatch, FileBody, FileDeleted, Page, PageQuery, Upload

_MAX_LISTED = 100


class BatchEndpoints:
    def __init__(self, service: Service, calls: InnerCalls) -> None:
        """`calls`: answers the requests of batches."""
        self._store = BatchStore(service.state)
        self._runner = BatchRunner(self._store, service.jobs, calls, max_bytes=service.http.clients.max_body_size)
        self._decoder = msgspec.json.Decoder(CreateBatch)

    def routes(self) -> list[Operation]:
        return [
            Operation(
                "POST",
                "/v1/files",
                self.upload,
                "Upload a file of requests",
                takes=Upload,
                takes_as="multipart/form-data",
                gives=FileBody,
            ),
            Operation("GET", "/v1/files", self.files, "The files, latest first", query=PageQuery, gives=Page[FileBody]),
            Operation("GET", "/v1/files/{id}", self.file, "A file's description", gives=FileBody),
            Operation("DELETE", "/v1/files/{id}", self.forget, "Delete a file", gives=FileDeleted),
            Operation(
                "GET",
                "/v1/files/{id}/content",
                self.content,
                "A file",
                gives=Binary,
                gives_as="application/octet-stream",
            ),
            Operation(
                "POST", "/v1/batches", self.create, "Answer a file of requests", takes=CreateBatch, gives=BatchBody
            ),
            Operation(
                "GET",
                "/v1/batches",
                self.batches,
                "The batches, latest first",
                query=PageQuery,
                gives=Page[BatchBody],
            ),
            Operation("GET", "/v1/batches/{id}", self.batch, "A batch's state", gives=BatchBody),
            Operation("POST", "/v1/batches/{id}/cancel", self.cancel, "Cancel a batch", gives=BatchBody),
        ]

    # ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def upload(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        if not headers.get("content-type", "").startswith("multipart/form-data"):
            raise HttpError(400, "A file is sent as multipart/form-data.", code="unsupported_value")
        parser = MultiPartParser(headers, _body(receive), max_files=1, max_fields=8)
        try:
            form = await parser.parse()
        except (MultiPartException, KeyError) as error:
            raise HttpError(400, "The body is not multipart/form-data with one file.", param="file") from error
        try:
            if form.get("purpose") != "batch":
                raise unsupported("purpose", 'purpose must be "batch".')
            upload = form.get("file")
            if not isinstance(upload, UploadFile):
                raise HttpError(400, "file must be a file.", param="file")
            file = await self._store.write_file(_owner(scope), (upload.filename or "batch.jsonl")[:255], "batch")
            try:
                while piece := await asyncio.to_thread(upload.file.read, PIECE_BYTES):
                    await file.write(piece)
                body = await file.complete()
            except BaseException:
                await self._store.drop_file(_owner(scope), file.id)
                raise
        finally:
            await form.close()
        await send_json(send, body)

    async def files(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _send_page(scope, send, await self._store.files_of(_owner(scope)))

    async def file(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, await self._store.file(_owner(scope), scope["path_params"]["id"]))

    async def forget(self, scope: Scope, receive: Receive, send: Send) -> None:
        owner = _owner(scope)
        body = await self._store.file(owner, scope["path_params"]["id"])
        if await self._runner.reads(owner, body.id):
            raise HttpError(409, "A batch still reads this file.")
        await self._store.drop_file(owner, body.id)
        await send_json(send, FileDeleted(body.id))

    async def content(self, scope: Scope, receive: Receive, send: Send) -> None:
        owner = _owner(scope)
        body = await self._store.file(owner, scope["path_params"]["id"])
        headers = [(b"content-type", b"application/octet-stream"), (b"content-length", str(body.bytes).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for piece in self._store.content(owner, body.id):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    # ── batches ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def create(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = decode_body(self._decoder, await read_json(scope, receive))
        if request.output_expires_after is not None:
            name = "output_expires_after"
            raise unsupported(name)
        if request.endpoint not in URLS:
            raise unsupported("endpoint", f"endpoint must be one of {', '.join(URLS)}.")
        owner = _owner(scope)
        try:
            await self._store.file(owner, request.input_file_id)
        except HttpError as error:
            if error.status != 404:
                raise
            raise HttpError(400, str(error), param="input_file_id") from None
        now = int(time.time())
        batch = BatchBody(
            id=f"batch_{secrets.token_hex(12)}",
            endpoint=request.endpoint,
            input_file_id=request.input_file_id,
            created_at=now,
            expires_at=now + WINDOW_S,
            metadata=request.metadata,
        )
        await self._runner.begin(owner, batch)
        await send_json(send, batch)

    async def batches(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _send_page(scope, send, await self._store.batches_of(_owner(scope)))

    async def batch(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, await self._store.batch(_owner(scope), scope["path_params"]["id"]))

    async def cancel(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, await self._runner.cancel(_owner(scope), scope["path_params"]["id"]))


def _owner(scope: Scope) -> bytes:
    salt: bytes = scope["state"]["salt"]
    return salt


async def _body(receive: Receive) -> AsyncGenerator[bytes]:
    """The pieces of a body. Raises HttpError 413 if it is too large, ClientGone if the client hangs up."""
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        size += len(message.get("body", b""))
        if size > MAX_FILE_BYTES:
            raise too_large(MAX_FILE_BYTES)
        yield message.get("body", b"")
        if not message.get("more_body", False):
            return


async def _send_page(scope: Scope, send: Send, all: Sequence[FileBody] | Sequence[BatchBody]) -> None:
    """Sends a `Page`: at most `limit` items after the one with the id `after`. Raises HttpError 400."""
    query = {name: values[-1] for name, values in parse_qs(scope["query_string"].decode("latin-1")).items()}
    limit = query.get("limit", "20")
    if not (limit.isascii() and limit.isdigit() and len(limit) < 6 and 1 <= int(limit) <= 10_000):
        raise HttpError(400, "limit must be a number between 1 and 10000.", param="limit")
    ids = [item.id for item in all]
    if (after := query.get("after")) is not None and after not in ids:
        raise HttpError(400, f"after: there is no {after[:100]!r}.", param="after")
    first = ids.index(after) + 1 if after is not None else 0
    page = all[first : first + min(int(limit), _MAX_LISTED)]
    first_id, last_id = (page[0].id, page[-1].id) if page else (None, None)
    await send_json(send, Page(page, first_id, last_id, has_more=first + len(page) < len(all)))
