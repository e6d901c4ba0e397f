"""A folder of KV blocks, one file each: the storage of `disk` and `shared`.

    FOLDER/<model, 16 hex digits>/<key, 2 digits>/<key, 64 digits>.<place>

where place is the block's index in its sequence. A file is a header and the block's bytes. The header's checksum covers
the rest of the header, the block's key and its bytes, so a file that is torn, damaged, of another model or under
another block's name is detected. Files appear under their names complete (written under another name, then renamed),
and equal names mean equal content, so any number of processes may write and remove them at any time.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from hashlib import blake2b
from itertools import count
from pathlib import Path
from struct import Struct as Layout
from typing import NamedTuple

from ...errors import ConfigError
from .base import ConnectorFacts, Options
from .options import num_blocks_of, size_of

_MAGIC = b"pwkvblk1"
_LENGTH = Layout("<Q")
_DIGEST_BYTES = 32
HEADER_BYTES = len(_MAGIC) + _LENGTH.size + 32 + _DIGEST_BYTES
"""Magic, length of the block in bytes, model key, BLAKE2b."""

_numbers = count()


class BadBlock(Exception):
    """A file does not hold the block that its name stands for."""


class Found(NamedTuple):
    """A file of the folder, of any model."""

    name: str  # relative to the folder
    size: int
    used_ns: int  # time of the last write or read
    key: bytes | None  # None: not a block of this model
    place: int


class BlockFiles:
    """The files of one model. Any thread may call the methods. They raise OSError as the system does."""

    def __init__(self, *, path: str, model_key: bytes, block_bytes: int) -> None:
        """Opens nothing."""
        assert len(model_key) == 32, model_key
        self.path = os.path.expanduser(path)
        self.file_bytes = HEADER_BYTES + block_bytes
        self._model_key = model_key
        self._block_bytes = block_bytes
        self._model = model_key.hex()[:16]

    def open(self, connector: str) -> None:
        """Creates the folder if necessary. Raises ConfigError if it cannot be written to."""
        try:
            os.makedirs(self.path, mode=0o700, exist_ok=True)
            probe = os.path.join(self.path, f".probe.{os.getpid()}.{next(_numbers)}")
            os.close(os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            os.unlink(probe)
        except OSError as error:
            raise ConfigError(
                f"--kv-connector {connector},path={self.path}: this folder cannot be written to ({error.strerror})."
            ) from None

    def name(self, key: bytes, place: int) -> str:
        """The name of a block's file, relative to the folder."""
        digits = key.hex()
        return f"{self._model}/{digits[:2]}/{digits}.{place}"

    def has(self, key: bytes, place: int) -> bool:
        """Whether a file of the right name and size exists."""
        try:
            return os.stat(f"{self.path}/{self.name(key, place)}").st_size == self.file_bytes
        except OSError:
            return False

    def read(self, key: bytes, place: int, into: memoryview) -> None:
        """Fills `into` with the block's bytes. Raises BadBlock; `into` then holds garbage."""
        # Follows no link and waits for no pipe, whatever is in the folder.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            file = os.open(f"{self.path}/{self.name(key, place)}", flags)
            try:
                about = os.fstat(file)
                if not stat.S_ISREG(about.st_mode) or about.st_size != self.file_bytes:
                    raise BadBlock(f"{about.st_size} bytes instead of {self.file_bytes}")
                header = bytearray(HEADER_BYTES)
                _fill(file, memoryview(header))
                _fill(file, into)
                if header != self._header(key, into):
                    raise BadBlock("header or checksum differ")
            finally:
                os.close(file)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ELOOP, errno.EISDIR, errno.ENXIO):
                raise BadBlock(str(error)) from error
            raise  # such as too many open files: the block may be good

    def write(self, key: bytes, place: int, data: memoryview) -> None:
        """Stores a block. Leaves no file behind if it fails."""
        assert len(data) == self._block_bytes, (len(data), self._block_bytes)
        name = f"{self.path}/{self.name(key, place)}"
        folder, _, base = name.rpartition("/")
        part = f"{folder}/.{base}.{os.getpid()}.{next(_numbers)}"
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
        try:
            file = os.open(part, flags, 0o600)
        except FileNotFoundError:
            os.makedirs(folder, mode=0o700, exist_ok=True)
            file = os.open(part, flags, 0o600)
        try:
            try:
                for piece in (memoryview(self._header(key, data)), data):
                    while piece:
                        piece = piece[os.write(file, piece) :]
            finally:
                os.close(file)
            os.replace(part, name)
        except BaseException:
            os.unlink(part)
            raise

    def touch(self, key: bytes, place: int, used_ns: int) -> None:
        """Sets the time of the last use, if the file still exists."""
        with suppress(FileNotFoundError):
            os.utime(f"{self.path}/{self.name(key, place)}", ns=(used_ns, used_ns))

    def remove(self, name: str) -> None:
        """Removes a file, if it still exists. name: relative to the folder."""
        with suppress(FileNotFoundError):
            os.unlink(f"{self.path}/{name}")

    def scan(self) -> Iterator[Found]:
        """Everything in the folder that this class could have written, of any model. Files may disappear meanwhile."""
        for model in _folders(self.path, 16):
            for digits in _folders(model.path, 2):
                for entry in _entries(digits.path):
                    try:
                        about = entry.stat(follow_symlinks=False)
                    except OSError:
                        continue
                    name = f"{model.name}/{digits.name}/{entry.name}"
                    key, place = _parse(entry.name)
                    if model.name != self._model or about.st_size != self.file_bytes or entry.name[:2] != digits.name:
                        key = None
                    yield Found(name, about.st_size, about.st_mtime_ns, key, place)

    def _header(self, key: bytes, data: memoryview) -> bytes:
        head = _MAGIC + _LENGTH.pack(self._block_bytes) + self._model_key
        digest = blake2b(head + key, digest_size=_DIGEST_BYTES)
        digest.update(data)
        return head + digest.digest()


def open_folder(connector: str, options: Options, facts: ConnectorFacts) -> tuple[BlockFiles, int]:
    """The files in the folder of the option `path`, and the option `size` in bytes. Raises ConfigError."""
    files = BlockFiles(path=options["path"], model_key=facts.model_key, block_bytes=facts.block_bytes)
    size = size_of(connector, options)
    num_blocks_of(connector, size, files.file_bytes)
    files.open(connector)
    return files, size


def is_part(name: str) -> bool:
    """Whether a scanned name is that of a file being written, or left partial by a killed writer."""
    return Path(name).name.startswith(".")


def _fill(file: int, into: memoryview) -> None:
    while into:
        num = os.readv(file, [into])
        if num == 0:
            raise BadBlock("the file is too short")
        into = into[num:]


def _folders(path: str, num_digits: int) -> Iterator["os.DirEntry[str]"]:
    """Only folders named like ours: other files that are kept in the same folder are not touched."""
    for entry in _entries(path):
        if len(entry.name) == num_digits and set(entry.name) <= _DIGITS and entry.is_dir(follow_symlinks=False):
            yield entry


def _entries(path: str) -> list["os.DirEntry[str]"]:
    try:
        with os.scandir(path) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError:
        return []


def _parse(name: str) -> tuple[bytes | None, int]:
    """(key, place) of a file's name; (None, 0) if it is no block's."""
    digits, _, place = name.partition(".")
    if len(digits) != 64 or not set(digits) <= _DIGITS or not place.isdecimal() or not place.isascii():
        return None, 0
    return bytes.fromhex(digits), int(place)


_DIGITS = set("0123456789abcdef")
