"""Reads a model folder's text files: JSON, templates, lists. (Weights are read by `engine/weights`.)

A folder may come from anyone, so only regular files of a bounded size are read, and each error is one sentence that
names the file. Links are followed: a Hub cache is made of them.
"""

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from ..errors import CheckpointError, ConfigError

T = TypeVar("T")

MAX_BYTES = 256 << 20  # ten times the largest vocabularies


def open_file(path: Path) -> int:
    """A descriptor of a regular file, to be closed by the caller. Raises FileNotFoundError, ConfigError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # NONBLOCK: a pipe would wait for its writer
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {getattr(error, 'strerror', error)}.") from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ConfigError(f"{path} cannot be read: it is not a regular file.")
    return fd


@contextlib.contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """A file of weights, for reading. Raises FileNotFoundError, and CheckpointError for whatever else fails while it is
    open."""
    try:
        with open(open_file(path), "rb") as file:
            yield file
    except ConfigError as error:
        raise CheckpointError(str(error)) from None
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None


def read_file(path: Path) -> bytes:
    """Raises FileNotFoundError, ConfigError."""
    with open(open_file(path), "rb") as file:
        try:
            size = os.fstat(file.fileno()).st_size
            data = file.read(MAX_BYTES + 1)
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    if size > MAX_BYTES or len(data) > MAX_BYTES:
        raise ConfigError(f"{path} is larger than {MAX_BYTES >> 20} MB, the most that such a file may have.")
    return data


def read_text(path: Path) -> str:
    """Reads a UTF-8 text. Raises FileNotFoundError, ConfigError."""
    try:
        return read_file(path).decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error.reason} at byte {error.start}.") from None


def read_json(path: Path, kind: type[T]) -> T:
    """Reads a JSON file. Raises FileNotFoundError, ConfigError."""
    data = read_file(path)
    try:
        return msgspec.json.decode(data, type=kind)
    except RecursionError:
        raise ConfigError(f"{path} is damaged: it is nested too deeply.") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is damaged: {error}.") from None


def read_object(path: Path) -> dict[str, object] | None:
    """A file's JSON object; None if there is no such file. Raises ConfigError."""
    try:
        return read_json(path, dict[str, object])
    except FileNotFoundError:
        return None
