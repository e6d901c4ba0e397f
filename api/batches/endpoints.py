"""/v1/files and /v1/batches."""

import asyncio
import secrets
import shutil
import time
from collections.abc import AsyncGenerator, Sequence
from urllib.parse import parse_qs

import msgspec
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.types import ASGIApp, Receive, Scope, Send

from ..http.exchange import ClientGone, read_json, send_json, too_large
from ..http.http_error import HttpError, unsupported
from ..http.operation import Operation
from ..openai.translate import decode_body
from ..output.service import Service
from .format import URLS
from .runner import WINDOW_S, BatchRunner
from .store import MAX_FILE_BYTES, BatchStore
from .types import BatchBody, Binary, CreateBatch, FileBody, FileDeleted, Page, PageQuery, Upload

_MAX_LISTED = 100
_PIECE_BYTES = 1 << 20


class BatchEndpoints:
    def __init__(self, service: Service, app: ASGIApp) -> None:
        """`app`: answers the requests of batches. Raises ConfigError if --batch-folder cannot be used."""
        config, http = service.config, service.http
        self._is_alone = http.service.api_processes == 1
        self._store = BatchStore(http.reports.batch_folder)
        self._runner = BatchRunner(
            self._store, app, concurrency=min(64, config.max_num_seqs), max_bytes=http.clients.max_body_size
        )
        self._decoder = msgspec.json.Decoder(CreateBatch)

    def routes(self) -> list[Operation]:
        # With several api processes the next request may reach another one, which does not know the file.
        if not self._is_alone:
            return []
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

    def start(self) -> None:
        """Continues the batches that an earlier server has left open."""
        self._runner.resume()

    async def stop(self) -> None:
        """Leaves open batches for the next server, if --batch-folder is given."""
        await self._runner.stop()
        self._store.close()

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
            id, file = self._store.new_file()
            try:
                with file:
                    await asyncio.to_thread(shutil.copyfileobj, upload.file, file, _PIECE_BYTES)
                body = self._store.keep(_owner(scope), id, (upload.filename or "batch.jsonl")[:255], "batch")
            except BaseException:
                self._store.drop(id)
                raise
        finally:
            await form.close()
        await send_json(send, body)

    async def files(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _send_page(scope, send, self._store.files_of(_owner(scope)))

    async def file(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, self._store.file(_owner(scope), scope["path_params"]["id"]))

    async def forget(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = self._store.file(_owner(scope), scope["path_params"]["id"])
        if any(s.body.input_file_id == body.id and s.body.id in self._runner for s in self._store.batches.values()):
            raise HttpError(409, "A batch still reads this file.")
        self._store.drop(body.id)
        await send_json(send, FileDeleted(body.id))

    async def content(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = self._store.file(_owner(scope), scope["path_params"]["id"])
        headers = [(b"content-type", b"application/octet-stream"), (b"content-length", str(body.bytes).encode())]
        with self._store.content(body.id).open("rb") as file:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            while piece := await asyncio.to_thread(file.read, _PIECE_BYTES):
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
            self._store.file(owner, request.input_file_id)
        except HttpError as error:
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
        self._store.put(owner, batch)
        self._runner.start(owner, batch.id)
        await send_json(send, batch)

    async def batches(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _send_page(scope, send, self._store.batches_of(_owner(scope)))

    async def batch(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, self._store.batch(_owner(scope), scope["path_params"]["id"]))

    async def cancel(self, scope: Scope, receive: Receive, send: Send) -> None:
        batch = self._store.batch(_owner(scope), scope["path_params"]["id"])
        await send_json(send, self._runner.cancel(batch.id))


def _owner(scope: Scope) -> str:
    salt: bytes = scope["state"]["salt"]
    return salt.hex()


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
