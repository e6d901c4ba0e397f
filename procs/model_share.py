"""Gives followers the files of the model: a thread of the lead, with a socket of its own.

Pieces of files on the control link would delay beats, and reading them in the lead's loop would, too. Whoever connects
holds the engine's key. Only files of the model are read, by their number in a list that is made once.
"""

import contextlib
import os
import threading
from hashlib import sha256
from pathlib import Path

from ..config.config import ModelFacts
from ..config.model_files import open_file
from ..engine.checkpoint.source import files_of
from ..errors import PagewireError
from ..ipc.channel import ChannelFull
from ..ipc.codec import DecodeError, Decoder, encode
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
from ..ipc.zmq_channel import Keys, PeerGone, ZmqContext

_WAIT_S = 60.0


class ModelShare:
    """It answers from the first line on, until `close`."""

    def __init__(self, host: str, keys: Keys | None, model: ModelFacts) -> None:
        """`host`: an address of this machine. Raises ConfigError."""
        self._context = ZmqContext(keys)
        self._router = self._context.router(f"tcp://{host}:0")
        self.address = self._router.address
        self._model = model
        self._paths: list[Path] = []
        self._files: tuple[ModelFile, ...] = ()  # parallel; empty until the first follower asks
        self._decoder: Decoder[ToShare] = Decoder(ToShare)
        self._is_closed = False
        self._wake_fd, self._waker = os.pipe()
        self._thread = threading.Thread(target=self._run, name="model files", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_closed = True
        os.close(self._waker)
        self._thread.join()
        os.close(self._wake_fd)

    def _run(self) -> None:
        while not self._is_closed:
            self._router.wait(_WAIT_S, self._wake_fd)
            while not self._is_closed and (frames := self._router.receive()) is not None:
                with contextlib.suppress(PeerGone, ChannelFull):  # it asks again, if it is there
                    self._router.send(frames[0], encode(self._answer(frames[-1])))
        self._router.close()
        self._context.close()

    def _answer(self, data: bytes) -> FromShare:
        try:
            message = self._decoder.decode(data)
        except DecodeError:
            return Unreadable("The lead cannot read what was asked for.")
        try:
            match message:
                case ListFiles():
                    return self._list()
                case ReadFile():
                    return self._read(message)
        except PagewireError as error:
            return Unreadable(str(error))
        except OSError as error:
            return Unreadable(f"The lead cannot read its files of the model: {error.strerror}.")

    def _list(self) -> Files:
        if not self._files:
            named = [("model", path) for path in files_of(Path(self._model.path))]
            if self._model.adapter:
                named += [("adapter", path) for path in files_of(Path(self._model.adapter))]
            roots = {"model": _root(self._model.path), "adapter": _root(self._model.adapter or "")}
            self._paths = [path for _, path in named]
            self._files = tuple(
                ModelFile(f"{part}/{path.relative_to(roots[part])}", status.st_size, status.st_mtime_ns)
                for part, path in named
                for status in (path.stat(),)
            )
        return Files(self._files)

    def _read(self, asked: ReadFile) -> FromShare:
        if asked.number >= len(self._files):
            return Unreadable(f"There is no file {asked.number}.")
        path, file = self._paths[asked.number], self._files[asked.number]
        try:
            fd = open_file(path)
        except FileNotFoundError:
            return Unreadable(f"{path} of the lead has been removed.")
        try:
            status = os.fstat(fd)
            if (status.st_size, status.st_mtime_ns) != (file.size, file.mtime_ns):
                return Unreadable(f"{path} of the lead has been changed while it was copied.")
            data = os.pread(fd, PIECE_BYTES, min(asked.offset, file.size))
        finally:
            os.close(fd)
        return Piece(asked.number, asked.offset, sha256(data).digest(), data)


def _root(path: str) -> Path:
    """The folder of a model's path, which may be that of a GGUF file."""
    return Path(path) if Path(path).is_dir() else Path(path).parent
