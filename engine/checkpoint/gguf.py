"""Reads what a GGUF file says of itself: its metadata, and the type, shape and place of each tensor. Reads no weights.

The format (ggml's docs/gguf.md), versions 2 and 3, little-endian: "GGUF", the version, the numbers of tensors and of
metadata entries, the entries (key, type, value), the tensors (name, dimensions, type, offset), and from the next
multiple of the alignment on the tensors' bytes. A model may be split into files of which the first has the metadata.

Nothing in a file is trusted: every length is compared with the bytes that are there before memory is allocated for it.
A CheckpointError names the file and what is wrong with it. Imports without torch.
"""

import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from msgspec import Struct

from ...config.model_files import MAX_BYTES, opened
from ...errors import CheckpointError, ConfigError

SUFFIX = ".gguf"

# The types of ggml: number → name, values in a block, bytes of a block.
TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}
"""Those that pagewire reads."""
PLAIN = ("F32", "F16", "BF16")
"""The types among them whose blocks are single numbers."""
_OTHER_TYPES = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S",
    22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0",
    35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip

_MAX_TENSORS = 2**18
_MAX_ENTRIES = 2**16
_MAX_KEY_BYTES = 2**16 - 1  # the format's own limit
_MAX_DIMS = 4
_MAX_SIZE = 2**48  # of a dimension and of a tensor, in values
_MAX_ALIGNMENT = 2**20
_MAX_PARTS = 2**10
_MAX_FLOAT32 = 3.4e38
_MAX_LISTED = 2**23  # numbers and texts in all lists of a file; a vocabulary takes some 600,000
_CHUNK_BYTES = 1 << 20

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

_Value = int | float | bool | str | list[int] | list[float] | list[bool] | list[str]


class GgufTensor(Struct, frozen=True):
    """Where a tensor lies."""

    file: Path
    type: str  # a name of `TYPES`
    shape: tuple[int, ...]  # the last dimension is that of adjacent values, as in torch
    offset: int  # from the beginning of the file
    num_bytes: int


class Gguf(Struct, frozen=True):
    """A model of one file, or of several parts."""

    path: Path  # of the first part
    parts: tuple[Path, ...]
    header_bytes: tuple[int, ...]  # of each part: what precedes the tensors' bytes
    metadata: "Metadata"
    tensors: Mapping[str, GgufTensor]  # in the order of the files


class Metadata:
    """Typed access to a file's metadata; a ConfigError names the file and the key."""

    def __init__(self, path: Path, entries: Mapping[str, _Value]) -> None:
        self.path = path
        self.entries = entries

    def __contains__(self, key: str) -> bool:
        return key in self.entries

    def text(self, key: str) -> str | None:
        value = self.entries.get(key)
        if value is not None and not isinstance(value, str):
            raise self.error(key, "a text")
        return value

    def integer(self, key: str) -> int | None:
        """A whole number; a list of equal numbers, one for each layer, counts as one number."""
        value = self.entries.get(key)
        if isinstance(value, list) and value and all(entry == value[0] for entry in value):
            value = value[0]
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, "a whole number, the same for all layers")
        return value

    def number(self, key: str) -> float | None:
        """The shortest number that float32, the usual type, does not tell from the file's: 0.7, not 0.699999988."""
        value = self.entries.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, "a number")
        for digits in range(6, 10):
            short = float(f"{value:.{digits}g}")
            if abs(short) < _MAX_FLOAT32 and struct.unpack("<f", struct.pack("<f", short))[0] == value:
                return short
        return float(value)

    def flag(self, key: str) -> bool | None:
        value = self.entries.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def texts(self, key: str) -> list[str] | None:
        value = self.entries.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise self.error(key, "a list of texts")
        return [entry for entry in value if isinstance(entry, str)]

    def numbers(self, key: str) -> list[float] | None:
        """A list of numbers; whole numbers stay whole."""
        value = self.entries.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(type(entry) in (int, float) for entry in value):
            raise self.error(key, "a list of numbers")
        return [entry for entry in value if not isinstance(entry, str)]

    def error(self, key: str, wanted: str) -> ConfigError:
        value = self.entries.get(key)
        shown = f"a list of {len(value)}" if isinstance(value, list) else repr(value)
        return ConfigError(f"{self.path} has {key} = {shown}, which should be {wanted}.")


def read_vector(tensor: GgufTensor) -> list[float]:
    """The numbers of a small F32 vector. Raises CheckpointError."""
    if tensor.type != "F32" or len(tensor.shape) != 1 or tensor.num_bytes > _CHUNK_BYTES:
        raise CheckpointError(
            f"{tensor.file} has a vector of {tensor.type} {list(tensor.shape)} where pagewire reads a small one of F32."
        )
    try:
        with opened(tensor.file) as file:
            data = os.pread(file.fileno(), tensor.num_bytes, tensor.offset)
    except FileNotFoundError:
        raise CheckpointError(f"There is no file {tensor.file}.") from None
    if len(data) < tensor.num_bytes:
        raise CheckpointError(f"{tensor.file} was cut short while it was read.")
    return list(struct.unpack(f"<{tensor.shape[0]}f", data))


def is_gguf(path: Path) -> bool:
    """Whether a model's path names a GGUF file and not a folder."""
    return path.suffix == SUFFIX and not path.is_dir()


def parts_of(path: Path) -> tuple[Path, ...]:
    """The files of the model that `path` belongs to, in order: `x-00001-of-00003.gguf` has two more. They need not
    exist. Raises CheckpointError."""
    stem, end = split_stem(path)
    if not end:
        return (path,)
    number, count = int(end[1:6]), int(end[-5:])
    if not 1 <= number <= count <= _MAX_PARTS:
        raise CheckpointError(f"{path} names itself part {number} of {count}; a model may have {_MAX_PARTS} parts.")
    return tuple(path.with_name(f"{stem}-{i:05}-of-{count:05}{SUFFIX}") for i in range(1, count + 1))


def split_stem(path: Path) -> tuple[str, str]:
    """A file's name without its suffix, divided before `-00001-of-00003`, which is empty if there is none."""
    stem = path.name.removesuffix(SUFFIX)
    head, dash, tail = stem[:-15], stem[-15:-14], stem[-14:]
    number, of, count = tail[:5], tail[5:9], tail[9:]
    if (dash, of) == ("-", "-of-") and f"{number}{count}".isascii() and f"{number}{count}".isdecimal():
        return head, stem[-15:]
    return stem, ""


def read_gguf(path: Path, *, has_vocabulary: bool = True) -> Gguf:
    """The header of a model's file, or the headers of all parts. has_vocabulary: False leaves out lists of texts, which
    are most of a header. Raises CheckpointError."""
    parts = parts_of(path)
    tensors: dict[str, GgufTensor] = {}
    header_bytes = []
    first: Metadata | None = None
    for number, part in enumerate(parts):
        entries, own, size = _read_part(part, is_split=len(parts) > 1, has_vocabulary=has_vocabulary)
        metadata = Metadata(part, entries)
        first = first or metadata
        try:
            split = (metadata.integer("split.no") or 0, metadata.integer("split.count") or 1)
        except ConfigError as error:
            raise CheckpointError(str(error)) from None
        if split != (number, len(parts)) and split[1] > 1:
            raise CheckpointError(
                f"{part} says that it is part {split[0] + 1} of {split[1]}, but its name makes it part {number + 1} of "
                f"{len(parts)}; give the files the names that they were made with."
            )
        for name, tensor in own.items():
            if name in tensors:
                raise CheckpointError(f"{part} is damaged: it holds {name}, which {tensors[name].file} holds already.")
            tensors[name] = tensor
        header_bytes.append(size)
    assert first is not None
    wanted = first.entries.get("split.tensors.count")
    if len(parts) > 1 and wanted is not None and wanted != len(tensors):
        raise CheckpointError(
            f"{first.path} is the first of files with {wanted} tensors, but they hold {len(tensors)}."
        )
    return Gguf(first.path, parts, tuple(header_bytes), first, tensors)


def _read_part(
    path: Path, *, is_split: bool, has_vocabulary: bool
) -> tuple[dict[str, _Value], dict[str, GgufTensor], int]:
    """Metadata, tensors, and the bytes before the tensors' bytes."""
    try:
        with opened(path) as file:
            return _Header(path, file, os.fstat(file.fileno()).st_size, has_vocabulary).read()
    except FileNotFoundError:
        if is_split:
            raise CheckpointError(f"{path} is missing; all parts of a model must be in one folder.") from None
        raise CheckpointError(f"There is no file {path}.") from None


class _Header:
    """Reads a file's header from its start, a chunk at a time."""

    def __init__(self, path: Path, file: BinaryIO, file_size: int, has_vocabulary: bool) -> None:
        self._path = path
        self._has_vocabulary = has_vocabulary
        self._file = file
        self._file_size = file_size
        self._data = bytearray()
        self._position = 0
        self._num_listed = 0

    def read(self) -> tuple[dict[str, _Value], dict[str, GgufTensor], int]:
        if self._file_size < 24 or self._take(4) != b"GGUF":
            raise CheckpointError(f"{self._path} is not a GGUF file: it does not begin as one.")
        version = self._integer("I")
        if version not in (2, 3):
            what = "big-endian" if version in (2 << 24, 3 << 24) else f"of version {version}"
            raise CheckpointError(
                f"{self._path} is a GGUF file {what}; pagewire reads versions 2 and 3, little-endian."
            )
        num_tensors, num_entries = self._integer("Q"), self._integer("Q")
        self._limit("tensors", num_tensors, _MAX_TENSORS)
        self._limit("metadata entries", num_entries, _MAX_ENTRIES)
        entries: dict[str, _Value] = {}
        for _ in range(num_entries):
            key = self._text("a metadata key", _MAX_KEY_BYTES)
            if key in entries:
                raise self._damaged(f"its metadata has {key} twice")
            value = self._value(key)
            if value != []:
                entries[key] = value
        described = [self._tensor() for _ in range(num_tensors)]
        alignment = entries.get("general.alignment", 32)
        if type(alignment) is not int or not 8 <= alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
            raise self._damaged(f"general.alignment is {alignment!r}, not a power of two from 8 to {_MAX_ALIGNMENT}")
        start = -(-self._position // alignment) * alignment
        return entries, self._place(described, start, alignment), min(start, self._file_size)

    def _place(
        self, described: list[tuple[str, str, tuple[int, ...], int, int]], start: int, alignment: int
    ) -> dict[str, GgufTensor]:
        """Checks where the tensors lie. start: of the first tensor's bytes."""
        tensors: dict[str, GgufTensor] = {}
        for name, kind, shape, offset, num_bytes in described:
            if name in tensors:
                raise self._damaged(f"it names {name} twice")
            if offset % alignment:
                raise self._damaged(f"{name} begins at {offset:,}, no multiple of the alignment, {alignment}")
            if start + offset + num_bytes > self._file_size:
                raise CheckpointError(
                    f"{self._path} is damaged or cut short: {name} ends at byte {start + offset + num_bytes:,}, and "
                    f"the file has {self._file_size:,} bytes."
                )
            tensors[name] = GgufTensor(self._path, kind, shape, start + offset, num_bytes)
        end = 0
        for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
            if tensor.offset < end:
                raise self._damaged(f"the bytes of {name} overlap those of another tensor")
            end = tensor.offset + tensor.num_bytes
        return tensors

    def _tensor(self) -> tuple[str, str, tuple[int, ...], int, int]:
        """Name, type, shape, offset and bytes."""
        name = self._text("a tensor's name", _MAX_KEY_BYTES)
        num_dims = self._integer("I")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise self._damaged(f"{name} has {num_dims} dimensions; 1 to {_MAX_DIMS} are possible")
        shape = tuple(self._integer("Q") for _ in range(num_dims))[::-1]
        number, offset = self._integer("I"), self._integer("Q")
        size = math.prod(shape)
        if not 1 <= size <= _MAX_SIZE or max(shape) > _MAX_SIZE:
            raise self._damaged(f"{name} has the shape {list(shape)}")
        if number not in TYPES:
            kind = _OTHER_TYPES.get(number, f"the unknown type {number}")
            known = ", ".join(name for name, _, _ in TYPES.values())
            raise CheckpointError(f"{self._path} has {name} in {kind}; pagewire reads {known}.")
        kind, values, num_bytes = TYPES[number]
        if shape[-1] % values:
            raise self._damaged(f"{name} is {kind} {list(shape)}, whose rows are no multiple of {values} values")
        return name, kind, shape, offset, size // values * num_bytes

    def _value(self, key: str) -> _Value:
        kind = self._integer("I")
        if kind == _STRING:
            return self._text(key, MAX_BYTES)
        if kind in _SCALARS:
            return self._scalars(kind, 1, key)[0]
        if kind != _ARRAY:
            raise self._damaged(f"{key} has the unknown type {kind}")
        kind, count = self._integer("I"), self._integer("Q")
        self._num_listed += count
        self._limit("numbers and texts in lists", self._num_listed, _MAX_LISTED)
        if kind in _SCALARS:
            return self._scalars(kind, count, key)
        if kind != _STRING:
            raise self._damaged(f"{key} is a list of the type {kind}, which pagewire does not read")
        self._check_left(8 * count, key)
        return self._texts(count, key)

    def _texts(self, count: int, key: str) -> list[str]:
        """A vocabulary has hundreds of thousands, so this does in one loop what `_text` does."""
        data, position, length_at = self._data, self._position, struct.Struct("<Q").unpack_from
        is_kept = self._has_vocabulary
        texts = []
        try:
            for _ in range(count):
                begin = position + 8
                if begin > len(data):
                    self._read_until(begin)
                (length,) = length_at(data, position)
                position = begin + length
                if position > len(data):
                    self._position = begin
                    self._check_left(length, key)
                    self._read_until(position)
                if is_kept:
                    texts.append(data[begin:position].decode())
        except UnicodeDecodeError as error:
            raise self._damaged(f"{key} has a text that is not UTF-8 at byte {error.start}") from None
        self._position = position
        return texts

    def _scalars(self, kind: int, count: int, key: str) -> list[int] | list[float] | list[bool]:
        form = _SCALARS[kind]
        size = struct.calcsize(f"<{form}")
        self._check_left(size * count, key)
        if form == "?":
            data = self._take(count)
            if data.strip(b"\0\1"):
                raise self._damaged(f"{key} has a truth value that is neither 0 nor 1")
            return [bool(byte) for byte in data]
        return list(struct.unpack(f"<{count}{form}", self._take(size * count)))

    def _text(self, what: str, most: int) -> str:
        length = self._integer("Q")
        if length > most:
            raise self._damaged(f"{what} has {length:,} bytes; {most:,} are allowed")
        self._check_left(length, what)
        try:
            return self._take(length).decode()
        except UnicodeDecodeError as error:
            raise self._damaged(f"{what} is not UTF-8 at byte {error.start}") from None

    def _integer(self, form: str) -> int:
        value: int = struct.unpack(f"<{form}", self._take(struct.calcsize(f"<{form}")))[0]
        return value

    def _limit(self, what: str, count: int, most: int) -> None:
        if count > most:
            raise self._damaged(f"it has {count:,} {what}; {most:,} are allowed")

    def _check_left(self, num_bytes: int, what: str) -> None:
        if (left := self._file_size - self._position) < num_bytes:
            raise CheckpointError(
                f"{self._path} is damaged or cut short: {what} should have {num_bytes:,} bytes, and {left:,} are left."
            )

    def _take(self, num_bytes: int) -> bytes:
        end = self._position + num_bytes
        if end > len(self._data):
            self._read_until(end)
        data = bytes(self._data[self._position : end])
        self._position = end
        return data

    def _read_until(self, end: int) -> None:
        if end > MAX_BYTES:
            raise self._damaged(f"its header has more than {MAX_BYTES >> 20} MB")
        self._data += self._file.read(max(_CHUNK_BYTES, end - len(self._data)))
        if end > len(self._data):
            raise CheckpointError(
                f"{self._path} is damaged or cut short: its {self._file_size:,} bytes do not hold its header."
            )

    def _damaged(self, how: str) -> CheckpointError:
        return CheckpointError(f"{self._path} is damaged: {how}.")
