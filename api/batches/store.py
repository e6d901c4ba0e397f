"""Files and batches on disk, each with its owner, the API key it was made with.

In the folder of `--batch-folder` they survive the server; without one, they are in a temporary folder that is removed
at the end. A file is `file-….bin` beside `file-….json`; a batch is `batch_….json`, which is rewritten with each change.
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
    """The JSON of a file."""

    owner: str  # hex
    body: FileBody


class StoredBatch(msgspec.Struct, frozen=True):
    """The JSON of a batch."""

    owner: str  # hex
    body: BatchBody


class BatchStore:
    """The files and batches of one api process. Needs no lock: all calls come from its event loop."""

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
        """The folder, which is created at the first use. Raises ConfigError if that fails."""
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
                raise ConfigError(f"--batch-folder: {path} was not written by pagewire: {error}.") from error

    # ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def content(self, id: str) -> Path:
        """The path of a file's bytes."""
        return self.folder / f"{id}.bin"

    def file(self, owner: str, id: str) -> FileBody:
        """Raises HttpError 404 if the owner has none with this id."""
        stored = self.files.get(id)
        if stored is None or stored.owner != owner:
            raise HttpError(404, f"There is no file {id[:100]!r}.", code="not_found")
        return stored.body

    def files_of(self, owner: str) -> list[FileBody]:
        """Latest first."""
        return [stored.body for stored in reversed(self.files.values()) if stored.owner == owner]

    def new_id(self) -> str:
        """An id for a file whose bytes are in the folder already."""
        return f"file-{secrets.token_hex(12)}"

    def new_file(self) -> tuple[str, IO[bytes]]:
        """A new id and its open file, to be written before `keep` or `drop`. Raises HttpError 413 if all is full."""
        if sum(stored.body.bytes for stored in self.files.values()) >= MAX_STORED_BYTES:
            raise HttpError(413, f"The stored files already have {MAX_STORED_BYTES >> 30} GiB; delete some.")
        id = self.new_id()
        return id, self.content(id).open("xb")

    def drop(self, id: str) -> None:
        """Removes a file, complete or not."""
        self.files.pop(id, None)
        self.content(id).unlink(missing_ok=True)
        (self.folder / f"{id}.json").unlink(missing_ok=True)

    def keep(self, owner: str, id: str, filename: str, purpose: Purpose) -> FileBody:
        """Records a file that is completely written."""
        size = self.content(id).stat().st_size
        body = FileBody(id=id, bytes=size, created_at=int(time.time()), filename=filename, purpose=purpose)
        self.files[id] = StoredFile(owner, body)
        self._write(id, self.files[id])
        return body

    # ── batches ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def batch(self, owner: str, id: str) -> BatchBody:
        """Raises HttpError 404 if the owner has none with this id."""
        stored = self.batches.get(id)
        if stored is None or stored.owner != owner:
            raise HttpError(404, f"There is no batch {id[:100]!r}.", code="not_found")
        return stored.body

    def put(self, owner: str, body: BatchBody) -> None:
        """Creates or replaces a batch."""
        self.batches[body.id] = StoredBatch(owner, body)
        self._write(body.id, self.batches[body.id])

    def change(self, id: str, **fields: object) -> BatchBody:
        """Changes fields of a batch."""
        stored = self.batches[id]
        body = replace(stored.body, **fields)
        self.put(stored.owner, body)
        return body

    def batches_of(self, owner: str) -> list[BatchBody]:
        """Latest first."""
        return [stored.body for stored in reversed(self.batches.values()) if stored.owner == owner]

    def _write(self, name: str, what: StoredFile | StoredBatch) -> None:
        path = self.folder / f"{name}.json"
        partial = path.with_suffix(".partial")
        partial.write_bytes(msgspec.json.encode(what))
        os.replace(partial, path)
