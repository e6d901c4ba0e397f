"""A folder of KV blocks, one file each: the storage of `disk` and `shared`.

    FOLDER/<model, 16 hex digits>/<name, 2 digits>/<name, 64 digits>.<place>
    FOLDER/<model, 16 hex digits>/<name, 2 digits>/<name, 64 digits>.<place>.<group>.<positions>
    FOLDER/<model, 16 hex digits>/states/<name, 64 digits>.<place>.<group>.<positions>.<key of the block before>

where place is the block's index in its sequence. The second form is for groups but the first and for beginnings of
blocks, the third for recurrent states, so that a folder can be asked where states stand. A file is a header and the
bytes of the item's pages (`block_storage.py`). Files appear under their names complete (written under another name,
then renamed), and equal names mean equal content, so any number of processes may write and remove them at any time.
"""

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path

from ...errors import ConfigError
from ..core.kv_connector import Item
from .base import ConnectorFacts, Options
from .block_storage import HEADER_BYTES, BadBlock, Filled, Found, header_of, item_of, label_of
from .options import num_blocks_of, size_of

_numbers = count()


class BlockFiles:
    """The files of one model: a `Storage`. They raise OSError as the system does."""

    batch_bytes = 0

    def __init__(self, *, path: str, facts: ConnectorFacts) -> None:
        """Opens nothing."""
        assert len(facts.model_key) == 32, facts.model_key
        self.path = os.path.expanduser(path)
        if facts.num_ranks > 1:  # each rank has its own files, with names that are those of every rank
            self.path = os.path.join(self.path, f"rank-{facts.rank}-of-{facts.num_ranks}")
        self.facts = facts
        self._model = facts.model_key.hex()[:16]

    def file_bytes(self, group: int = 0) -> int:
        """The size of a file of this group."""
        return HEADER_BYTES + self.facts.bytes_of(group)

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

    def name(self, item: Item) -> str:
        """The name of an item's file, relative to the folder."""
        label = label_of(item, self.facts.state)
        is_state = item.group == self.facts.state and item.parent is not None
        return f"{self._model}/{_STATES if is_state else label[:2]}/{label}"

    def has(self, item: Item) -> bool:
        """Whether a file of the right name and size exists."""
        try:
            return os.stat(f"{self.path}/{self.name(item)}").st_size == self.file_bytes(item.group)
        except OSError:
            return False

    def read(self, item: Item, into: memoryview) -> None:
        """Fills `into` with the item's bytes. Raises BadBlock; `into` then holds garbage."""
        # Follows no link and waits for no pipe, whatever is in the folder.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            file = os.open(f"{self.path}/{self.name(item)}", flags)
            try:
                about, expected = os.fstat(file), self.file_bytes(item.group)
                if not stat.S_ISREG(about.st_mode) or about.st_size != expected:
                    raise BadBlock(f"{about.st_size} bytes instead of {expected}")
                header = bytearray(HEADER_BYTES)
                _fill(file, memoryview(header))
                _fill(file, into)
                if header != header_of(self.facts.model_key, item, into):
                    raise BadBlock("header or checksum differ")
            finally:
                os.close(file)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ELOOP, errno.EISDIR, errno.ENXIO):
                raise BadBlock(str(error)) from error
            raise  # such as too many open files: the block may be good

    def write(self, item: Item, data: memoryview) -> None:
        """Stores an item. Leaves no file behind if it fails."""
        assert len(data) == self.facts.bytes_of(item.group), (len(data), item)
        name = f"{self.path}/{self.name(item)}"
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
                for piece in (memoryview(header_of(self.facts.model_key, item, data)), data):
                    while piece:
                        piece = piece[os.write(file, piece) :]
            finally:
                os.close(file)
            os.replace(part, name)
        except BaseException:
            os.unlink(part)
            raise

    def touch(self, item: Item, used_ns: int) -> None:
        """Sets the time of the last use, if the file still exists."""
        with suppress(FileNotFoundError):
            os.utime(f"{self.path}/{self.name(item)}", ns=(used_ns, used_ns))

    def remove(self, name: str) -> None:
        """Removes a file, if it still exists. name: relative to the folder."""
        with suppress(FileNotFoundError):
            os.unlink(f"{self.path}/{name}")

    def scan(self) -> Iterator[Found]:
        """Everything in the folder that this class could have written, of any model. Files may disappear meanwhile."""
        for model in _folders(self.path, 16):
            for digits in [*_folders(model.path, 2), *_state_folder(model.path)]:
                for entry in _entries(digits.path):
                    try:
                        about = entry.stat(follow_symlinks=False)
                    except OSError:
                        continue
                    name = f"{model.name}/{digits.name}/{entry.name}"
                    yield Found(name, about.st_size, about.st_mtime_ns, self._item(name, about.st_size))

    def has_all(self, items: Sequence[Item]) -> list[bool]:
        return [self.has(item) for item in items]

    def read_all(self, wanted: Sequence[Filled]) -> list[str]:
        problems = []
        for item, into in wanted:
            try:
                self.read(item, into)
                problems.append("")
            except BadBlock as error:
                problems.append(str(error))
                self.remove(self.name(item))
        return problems

    def write_all(self, items: Sequence[Filled]) -> None:
        for item, data in items:
            self.write(item, data)

    def touch_all(self, items: Sequence[Item], used_ns: int) -> None:
        for item in items:
            self.touch(item, used_ns)

    def remove_all(self, names: Sequence[str]) -> None:
        for name in names:
            self.remove(name)

    def close(self) -> None:
        """Does nothing: no file stays open."""

    def states(self) -> list[Item]:
        """The recurrent states of this model."""
        items = []
        for entry in _entries(f"{self.path}/{self._model}/{_STATES}"):
            with suppress(OSError):
                item = self._item(f"{self._model}/{_STATES}/{entry.name}", entry.stat(follow_symlinks=False).st_size)
                if item is not None:
                    items.append(item)
        return items

    def _item(self, name: str, size: int) -> Item | None:
        """What a file of this name and size should be; None if it is not of this model."""
        item = item_of(name.rpartition("/")[2])
        is_ours = item is not None and item.group < self.facts.num_groups and self.name(item) == name
        return item if is_ours and item is not None and size == self.file_bytes(item.group) else None


def open_folder(connector: str, options: Options, facts: ConnectorFacts) -> tuple[BlockFiles, int]:
    """The files in the folder of the option `path`, and of the option `size` this rank's part in bytes. Raises
    ConfigError."""
    files = BlockFiles(path=options["path"], facts=facts)
    size = size_of(connector, options)
    num_blocks_of(connector, size, facts.of_engine(max(map(files.file_bytes, range(facts.num_groups)))))
    files.open(connector)
    return files, facts.share_of(size)


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


def _state_folder(path: str) -> Iterator["os.DirEntry[str]"]:
    return (entry for entry in _entries(path) if entry.name == _STATES and entry.is_dir(follow_symlinks=False))


_DIGITS = set("0123456789abcdef")
_STATES = "states"
