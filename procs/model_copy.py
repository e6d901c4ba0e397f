"""Copies the model from the lead to this machine's cache, for a follower that does not have it.

The copy is complete when its folder has its name, which contains what tells the lead's files apart: names, sizes and
times. Until then it grows in another folder, where files that are complete stay if the copying is interrupted. One
process of a machine copies; the others wait for it. At most `_WINDOW` pieces are under way.
"""

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from ..config.config import ModelFacts
from ..engine.checkpoint.gguf import is_gguf
from ..engine.checkpoint.spec import fingerprint
from ..errors import CheckpointError, PagewireError
from ..ipc.codec import DecodeError, Decoder
from ..ipc.file_messages import (
    PIECE_BYTES,
    Files,
    FromShare,
    ListFiles,
    ModelFile,
    Piece,
    ReadFile,
    ToShare,
    Unreadable,
)
from ..ipc.zmq_channel import Keys, ZmqContext

SILENCE_S = 60.0  # without a piece, until the copy is given up
_AGAIN_S = 10.0  # until what was not answered is asked for again
_POLL_S = 0.2
_WINDOW = 8  # pieces
_MAX_DAMAGED = 5  # pieces whose hash is not theirs
_MAX_NAME = 80  # characters of a folder
_PARTS = {"model", "adapter"}
_Answer = TypeVar("_Answer", Files, Piece)


class Interrupted(Exception):
    """The follower ends, or has lost its lead."""


class ModelCopy:
    """One attempt to copy. `run` blocks and is called once, on a thread."""

    def __init__(
        self,
        address: str,
        keys: Keys | None,
        model: ModelFacts,
        *,
        cache: Path,
        is_over: Callable[[], bool],
        on_progress: Callable[[int, int], None],
    ) -> None:
        """`address`: of the lead's `ModelShare`. `model`: as the lead has it. `cache`: the folder for copies.
        `is_over`: whether to stop. `on_progress`: called on the thread with the bytes that are there, and all."""
        self._model = model
        self._cache = cache
        self._is_over = is_over
        self._on_progress = on_progress
        self._context = ZmqContext(keys)
        self._dealer = self._context.dealer(address)
        self._decoder: Decoder[FromShare] = Decoder(FromShare)
        self._num_damaged = 0
        self._done_bytes = self._total_bytes = 0

    def run(self) -> ModelFacts:
        """The model with the paths of its copy. Raises CheckpointError, Interrupted."""
        try:
            return self._run()
        except OSError as error:
            where = error.filename or self._cache
            raise CheckpointError(f"The model cannot be copied to {where}: {error.strerror}.") from None
        finally:
            self._dealer.close()
            self._context.close()

    def _run(self) -> ModelFacts:
        files = self._list()
        self._total_bytes = sum(file.size for file in files)
        key = sha256(msgspec.msgpack.encode((self._model.fingerprint, files))).hexdigest()[:16]
        name = "".join(c if c.isalnum() or c in "-._" else "-" for c in self._model.name)[-_MAX_NAME:].lstrip(".")
        folder = self._cache / f"{name}-{key}"
        part = self._cache / f".{folder.name}.part"
        self._cache.mkdir(parents=True, exist_ok=True)
        with self._alone(self._cache / f".{folder.name}.lock", part):
            if not folder.exists():
                self._fill(part, files)
                self._check(part)
                part.rename(folder)
        self._on_progress(self._total_bytes, self._total_bytes)
        return self._placed(folder)

    def _placed(self, folder: Path) -> ModelFacts:
        model = self._model
        path = folder / "model"
        if is_gguf(Path(model.path)):
            path /= Path(model.path).name
        return replace(model, path=str(path), adapter=str(folder / "adapter") if model.adapter else model.adapter)

    def _check(self, folder: Path) -> None:
        """Raises CheckpointError if the lead's files are not those that it has described."""
        placed = self._placed(folder)
        try:
            found = fingerprint(Path(placed.path), Path(placed.adapter) if placed.adapter else None)
        except PagewireError as error:
            raise CheckpointError(f"The copy of the model is damaged: {error}") from None
        if self._model.fingerprint and found != self._model.fingerprint:
            raise CheckpointError("The lead's files have been changed since it was started; start it again.")

    # ── one process at a time ────────────────────────────────────────────────────────────────────────────────────────

    @contextlib.contextmanager
    def _alone(self, lock: Path, part: Path) -> Iterator[None]:
        """Until no other process of this machine copies into `part`. A process that ends gives the lock back."""
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    self._on_progress(min(_size_of(part), self._total_bytes - 1), self._total_bytes)
                    self._pause()
            yield
        finally:
            os.close(fd)

    def _pause(self) -> None:
        if self._is_over():
            raise Interrupted
        time.sleep(_POLL_S)

    # ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _fill(self, folder: Path, files: tuple[ModelFile, ...]) -> None:
        missing = [number for number, file in enumerate(files) if not _is_there(folder / file.name, file)]
        due_bytes = sum(files[number].size for number in missing)
        folder.mkdir(exist_ok=True)
        if due_bytes > (free := shutil.disk_usage(folder).free):
            raise CheckpointError(
                f"{self._cache} has room for {free / 1e9:.1f} GB, and the model takes {due_bytes / 1e9:.1f} GB more."
            )
        self._done_bytes = self._total_bytes - due_bytes
        for number in missing:
            self._copy(number, files[number], folder / files[number].name)

    def _copy(self, number: int, file: ModelFile, path: Path) -> None:
        """The file gets its name when it is complete."""
        path.parent.mkdir(parents=True, exist_ok=True)
        growing = path.with_name(f".{path.name}.part")
        with growing.open("wb") as out:
            for data in self._pieces(number, file.size):
                out.write(data)
                self._done_bytes += len(data)
                self._on_progress(min(self._done_bytes, self._total_bytes - 1), self._total_bytes)
            out.flush()
            os.fsync(out.fileno())
        os.utime(growing, ns=(file.mtime_ns, file.mtime_ns))
        growing.rename(path)

    def _pieces(self, number: int, size: int) -> Iterator[bytes]:
        """Of a file, in order. Raises CheckpointError."""
        early: dict[int, bytes] = {}  # those that came before the next one
        due, asked = 0, 0
        while due < size:
            while asked < min(size, due + _WINDOW * PIECE_BYTES):
                self._dealer.send(ReadFile(number, asked))
                asked += PIECE_BYTES
            again = [ReadFile(number, at) for at in range(due, asked, PIECE_BYTES) if at not in early]
            piece = self._await(Piece, again)
            is_due = piece.number == number and due <= piece.offset < asked and piece.offset % PIECE_BYTES == 0
            if not is_due or piece.offset in early:
                continue  # it was asked for twice
            length = min(PIECE_BYTES, size - piece.offset)
            if len(piece.data) != length or sha256(piece.data).digest() != piece.digest:
                self._num_damaged += 1
                if self._num_damaged > _MAX_DAMAGED:
                    raise CheckpointError("The model cannot be copied from the lead: what arrives is damaged.")
                self._dealer.send(ReadFile(number, piece.offset))
                continue
            early[piece.offset] = piece.data
            while due in early:
                yield early.pop(due)
                due += PIECE_BYTES

    def _list(self) -> tuple[ModelFile, ...]:
        self._dealer.send(ListFiles())
        files = self._await(Files, [ListFiles()]).files
        for file in files:
            parts = PurePosixPath(file.name).parts
            if len(parts) < 2 or parts[0] not in _PARTS or ".." in parts or "\0" in file.name:
                raise CheckpointError(f"The lead names a file {file.name!r}, which is no file of a model.")
        if not files:
            raise CheckpointError("The lead has no files of the model.")
        return files

    def _await(self, kind: type[_Answer], again: Sequence[ToShare]) -> _Answer:
        """The next answer of this kind. `again`: is asked again after a while. Raises CheckpointError, Interrupted."""
        if self._is_over():
            raise Interrupted
        began = asked_at = time.monotonic()
        while True:
            while (data := self._dealer.receive()) is not None:
                try:
                    message = self._decoder.decode(data)
                except DecodeError:
                    continue
                if isinstance(message, Unreadable):
                    raise CheckpointError(f"The model cannot be copied from the lead: {message.reason}")
                if isinstance(message, kind):
                    return message
            if self._is_over():
                raise Interrupted
            now = time.monotonic()
            if now > began + SILENCE_S:
                raise CheckpointError(f"The lead has sent nothing of the model for {SILENCE_S:g} s.")
            if now > asked_at + _AGAIN_S:
                asked_at = now
                for message_again in again:
                    self._dealer.send(message_again)
            self._dealer.wait(_POLL_S)


def _is_there(path: Path, file: ModelFile) -> bool:
    try:
        status = path.stat()
    except OSError:
        return False
    return (status.st_size, status.st_mtime_ns) == (file.size, file.mtime_ns)


def _size_of(folder: Path) -> int:
    """The bytes of its files; some may go meanwhile."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.stat().st_size
    return total
