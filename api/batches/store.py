"""Files and batches in the database, each with its owner, the API key it was made with.

A file is a record and the pieces of its content. While a batch is under way, its answers are pieces of their own, one
for each line of its input; then they become its files.
"""

import secrets
import time
from collections.abc import AsyncIterator
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from ..http.http_error import HttpError
from ..state.database import Database
from ..state.pieces import PIECE_BYTES, Pieces
from ..state.records import Records
from .types import BatchBody, FileBody, Purpose

MAX_FILE_BYTES = 512 << 20
MAX_STORED_BYTES = 8 << 30  # of all files, when an upload begins
_MAX_BYTES = 2 * MAX_STORED_BYTES  # so that what is answered already can be kept
_MAX_RECORD_BYTES = 64 << 20
_UPLOAD_S = 3600  # after which a file whose writer has not ended is removed


class StoredFile(Struct, frozen=True):
    body: FileBody
    is_complete: bool = False


class BatchStore:
    """What all api processes know of files and batches. Methods raise HttpError 503 if the database cannot be used."""

    def __init__(self, database: Database) -> None:
        self._files = Records(database, "file", StoredFile, max_bytes=_MAX_RECORD_BYTES, drops_oldest=False)
        self._contents = Pieces(database, "file_content", max_bytes=_MAX_BYTES)
        self._batches = Records(database, "batch", BatchBody, max_bytes=_MAX_RECORD_BYTES)
        self._answers = Pieces(database, "batch_answer", max_bytes=_MAX_BYTES)

    # ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def file(self, owner: bytes, id: str) -> FileBody:
        """Raises HttpError 404 if the owner has none with this id."""
        stored = await self._files.get(owner, id)
        if stored is None or not stored.is_complete:
            raise HttpError(404, f"There is no file {id[:100]!r}.", code="not_found")
        return stored.body

    async def files_of(self, owner: bytes) -> list[FileBody]:
        """Latest first."""
        return [stored.body for _, stored in await self._files.list(owner) if stored.is_complete]

    async def write_file(self, owner: bytes, filename: str, purpose: Purpose, id: str | None = None) -> "FileWriter":
        """Begins a file, which nobody sees before it is complete. `id`: of one that is written again from its
        beginning. Raises HttpError 413 for an upload if all is full."""
        await self._drop_unfinished()
        if purpose == "batch" and await self._contents.num_bytes() >= MAX_STORED_BYTES:
            raise HttpError(413, f"The stored files already have {MAX_STORED_BYTES >> 30} GiB; delete some.")
        id = id or f"file-{secrets.token_hex(12)}"
        body = FileBody(id=id, bytes=0, created_at=int(time.time()), filename=filename, purpose=purpose)
        await self._files.put(owner, id, StoredFile(body))
        return FileWriter(self._files, self._contents, owner, body)

    async def content(self, owner: bytes, id: str) -> AsyncIterator[bytes]:
        """The file's bytes, piece by piece."""
        async for _, piece in self._contents.read(owner, id):
            yield piece

    async def lines(self, owner: bytes, id: str) -> AsyncIterator[tuple[int, bytes]]:
        """(number from 1 on, line) of the lines that are not blank."""
        number, parts = 0, list[bytes]()
        async for piece in self.content(owner, id):
            first, *others = piece.split(b"\n")
            parts.append(first)
            for part in others:
                number += 1
                if line := b"".join(parts).strip():
                    yield number, line
                parts = [part]
        if line := b"".join(parts).strip():
            yield number + 1, line

    async def drop_file(self, owner: bytes, id: str) -> None:
        """Removes a file, complete or not."""
        await self._contents.delete(owner, id)
        await self._files.delete(owner, id)

    async def _drop_unfinished(self) -> None:
        """Removes what processes that have died left of files."""
        for owner, id, stored in await self._files.all():
            if not stored.is_complete and stored.body.created_at < time.time() - _UPLOAD_S:
                await self.drop_file(owner, id)

    # ── batches ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def batch(self, owner: bytes, id: str) -> BatchBody:
        """Raises HttpError 404 if the owner has none with this id."""
        batch = await self._batches.get(owner, id)
        if batch is None:
            raise HttpError(404, f"There is no batch {id[:100]!r}.", code="not_found")
        return batch

    async def put(self, owner: bytes, batch: BatchBody) -> None:
        """Creates a batch."""
        await self._batches.put(owner, batch.id, batch)

    async def change(self, owner: bytes, id: str, *, of: tuple[str, ...], **fields: object) -> BatchBody:
        """Changes fields of a batch if its status is one of `of`. Raises HttpError 404."""

        def changed(batch: BatchBody) -> BatchBody:
            return replace(batch, **fields) if batch.status in of else batch

        batch = await self._batches.change(owner, id, changed)
        if batch is None:
            raise HttpError(404, f"There is no batch {id[:100]!r}.", code="not_found")
        return batch

    async def batches_of(self, owner: bytes) -> list[BatchBody]:
        """Latest first."""
        return [batch for _, batch in await self._batches.list(owner)]

    async def put_answer(self, owner: bytes, id: str, number: int, kind: "AnswerKind", line: bytes) -> None:
        """Keeps the answer to a line of a batch's input; there is one, however often it is answered."""
        await self._answers.put(owner, id, number, kind.encode() + b" " + line)

    async def answers(self, owner: bytes, id: str) -> AsyncIterator[tuple[int, str, bytes]]:
        """(number, kind, line) of a batch's answers so far, in the order of its input."""
        async for number, answer in self._answers.read(owner, id):
            kind, _, line = answer.partition(b" ")
            yield number, kind.decode(), line

    async def drop_answers(self, owner: bytes, id: str) -> None:
        """Removes what `answers` gives."""
        await self._answers.delete(owner, id)


AnswerKind = Literal["output", "error"]
"""Of which file of the batch the answer will be a line."""


class FileWriter:
    """A file that is being written. What is not completed is removed later."""

    def __init__(self, files: Records[StoredFile], contents: Pieces, owner: bytes, body: FileBody) -> None:
        self._files = files
        self._contents = contents
        self._owner = owner
        self._body = body
        self.id = body.id
        self._parts: list[bytes] = []  # not in the database yet
        self._num_waiting = 0  # bytes of them
        self._num_bytes = 0
        self._number = 0

    async def write(self, data: bytes) -> None:
        """Raises HttpError 413 if all is full."""
        self._parts.append(data)
        self._num_waiting += len(data)
        if self._num_waiting >= PIECE_BYTES:
            await self._flush()

    async def complete(self) -> FileBody:
        """Makes it visible."""
        await self._flush()
        body = replace(self._body, bytes=self._num_bytes)
        await self._files.put(self._owner, body.id, StoredFile(body, is_complete=True))
        return body

    async def _flush(self) -> None:
        if self._parts:
            await self._contents.put(self._owner, self.id, self._number, b"".join(self._parts))
            self._number += 1
            self._num_bytes += self._num_waiting
            self._parts, self._num_waiting = [], 0
