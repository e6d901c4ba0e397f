"""Files and batches on disk, each with its owner: the API key it was made with.

In the folder of `--batch-folder` they outlive the server; without one, they live in a temporary folder that is removed
at the end. A file is `file-….bin` beside `file-….json`; a batch is `batch_….json`, written anew with each change.
"""

import os
import secrets
import shutil
import tempfile
import time
from pathlib import Path
from typing import IO

import msgspec
from msgspec.structs import replace

from ...errors import ConfigError
from ..http.http_error import HttpError
from .types import BatchBody, FileBody, Purpose

MAX_FILE_BYTES = 512 << 20
MAX_STORED_BYTES = 8 << 30  # of all files


class StoredFile(msgspec.Struct, frozen=True):
    """What stands in a file's JSON."""

    owner: str  # hex
    body: FileBody


class StoredBatch(msgspec.Struct, frozen=True):
    """What stands in a batch's JSON."""

    owner: str  # hex
    body: BatchBody


class BatchStore:
    """All of one api process. Needs no lock: everything happens on its loop."""

    def __init__(self, folder: str | None) -> None:
        """Raises ConfigError if the folder cannot be used."""
        self._temporary: Path | None = None
        self._given = folder
        self._opened: Path | None = None
        self.files: dict[str, StoredFile] = {}
        self.batches: dict[str, StoredBatch] = {}
        if folder is not None:
            self._read(self.folder)

    @property
    def folder(self) -> Path:
        """Made when it is first needed."""
        if self._opened is None:
            try:
                if self._given is None:
                    self._temporary = Path(tempfile.mkdtemp(prefix="pagewire-batches-"))
                    self._opened = self._temporary
                else:
                    self._opened = Path(self._given)
                    self._opened.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"--batch-folder {self._given}: {error.strerror}.") from error
        return self._opened

    def close(self) -> None:
        """Removes a temporary folder."""
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def _read(self, folder: Path) -> None:
        for path in sorted(folder.glob("*.json")):
            try:
                if path.name.startswith("file-"):
                    self.files[path.stem] = msgspec.json.decode(path.read_bytes(), type=StoredFile)
                elif path.name.startswith("batch_"):
                    self.batches[path.stem] = msgspec.json.decode(path.read_bytes(), type=StoredBatch)
            except (OSError, msgspec.DecodeError) as error:
                raise ConfigError(f"--batch-folder: {path} is not what pagewire has written there: {error}.") from error

    # ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def content(self, id: str) -> Path:
        """Where the bytes of a file lie."""
        return self.folder / f"{id}.bin"

    def file(self, owner: str, id: str) -> FileBody:
        """Raises HttpError 404."""
        stored = self.files.get(id)
        if stored is None or stored.owner != owner:
            raise HttpError(404, f"There is no file {id[:100]!r}.", code="not_found")
        return stored.body

    def files_of(self, owner: str) -> list[FileBody]:
        """The latest first."""
        return [stored.body for stored in reversed(self.files.values()) if stored.owner == owner]

    def new_id(self) -> str:
        """Of a file whose bytes are here already."""
        return f"file-{secrets.token_hex(12)}"

    def new_file(self) -> tuple[str, IO[bytes]]:
        """An id, and the file to write before `keep` or `drop`. Raises HttpError 413 if there is no room."""
        if sum(stored.body.bytes for stored in self.files.values()) >= MAX_STORED_BYTES:
            raise HttpError(413, f"The files here have {MAX_STORED_BYTES >> 30} GiB already; delete some.")
        id = self.new_id()
        return id, self.content(id).open("xb")

    def drop(self, id: str) -> None:
        """Removes a file, whole or not."""
        self.files.pop(id, None)
        self.content(id).unlink(missing_ok=True)
        (self.folder / f"{id}.json").unlink(missing_ok=True)

    def keep(self, owner: str, id: str, filename: str, purpose: Purpose) -> FileBody:
        """The file is written."""
        size = self.content(id).stat().st_size
        body = FileBody(id=id, bytes=size, created_at=int(time.time()), filename=filename, purpose=purpose)
        self.files[id] = StoredFile(owner, body)
        self._write(id, self.files[id])
        return body

    # ── batches ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def batch(self, owner: str, id: str) -> BatchBody:
        """Raises HttpError 404."""
        stored = self.batches.get(id)
        if stored is None or stored.owner != owner:
            raise HttpError(404, f"There is no batch {id[:100]!r}.", code="not_found")
        return stored.body

    def put(self, owner: str, body: BatchBody) -> None:
        """Makes or changes a batch."""
        self.batches[body.id] = StoredBatch(owner, body)
        self._write(body.id, self.batches[body.id])

    def change(self, id: str, **fields: object) -> BatchBody:
        """Changes fields of a batch."""
        stored = self.batches[id]
        body = replace(stored.body, **fields)
        self.put(stored.owner, body)
        return body

    def batches_of(self, owner: str) -> list[BatchBody]:
        """The latest first."""
        return [stored.body for stored in reversed(self.batches.values()) if stored.owner == owner]

    def _write(self, name: str, what: StoredFile | StoredBatch) -> None:
        path = self.folder / f"{name}.json"
        partial = path.with_suffix(".partial")
        partial.write_bytes(msgspec.json.encode(what))
        os.replace(partial, path)
