"""A segment: packed weights in a memfd, which several processes map.

One process writes it, once, and seals it; from then on no process can change it. A segment begins with a page that
holds its key, which says what the weights are made of, and where the index lies: the names, shapes and types of its
tensors. A segment is used only if it is sealed, has the expected key, and an index that fits its size. A memfd has no
name, so it is gone when the last process that holds it has ended, however it ended.

The tensors lie in the segment itself, or of a GPU in memory that a keeper holds. Then the segment has the index alone.
"""

import contextlib
import fcntl
import mmap
import os
import struct
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256
from math import prod

import msgspec
import torch
from msgspec import Struct
from torch import Tensor

from ...kernels.stored import Field

_ADD_SEALS, _GET_SEALS = 1033, 1034  # of fcntl(2); `fcntl` names them only on Linux
_SEALED = 0x2 | 0x4 | 0x8  # shrink, grow, write
_MAGIC = b"pagewire"
_HEAD = struct.Struct("<8s32s32sQQ")  # magic, key, SHA-256 of the index, its offset and length
_ALIGNMENT = 64
_PIECE_BYTES = 1 << 20  # so that two stay in the cache; the caller packs such a piece alone, see product.c


class Part(Struct, frozen=True, array_like=True):
    """A tensor in a segment, or in an allocation of a keeper."""

    offset: int
    shape: tuple[int, ...]
    dtype: str
    allocation: int = -1  # its number; -1: in the segment

    @property
    def end(self) -> int:
        return self.offset + prod(self.shape) * dtype_named(self.dtype).itemsize


class StoredParts(Struct, frozen=True, array_like=True):
    """A `kernels.stored.Stored` whose tensors lie in a segment."""

    kind: str
    tensors: tuple[Part | None, ...]
    fields: tuple[Field, ...]


class Kept(Struct, frozen=True, array_like=True):
    """Allocations of a keeper that hold the tensors."""

    token: bytes  # under which they are kept
    sizes: tuple[int, ...]  # bytes
    sums: tuple[int, ...]  # of the bytes as int64


class Index(Struct, frozen=True, array_like=True):
    """What a segment holds."""

    matrices: dict[str, tuple[StoredParts, ...]]  # by the module that multiplies by them
    parameters: dict[str, Part]
    kept: Kept | None = None  # None: the tensors lie in the segment

    def parts(self) -> Iterator[Part]:
        yield from self.parameters.values()
        for several in self.matrices.values():
            for stored in several:
                yield from (part for part in stored.tensors if part is not None)


class NotLockableError(Exception):
    """There is no /proc, or the descriptor is of something that cannot be written."""


@contextlib.contextmanager
def locked(fd: int) -> Iterator[None]:
    """Waits until no other process is writing the segment. The lock ends with the process that holds it. Raises
    NotLockableError."""
    # A descriptor of its own: those that processes inherit share their locks, and `lockf` would lose the lock with the
    # first mapping that is closed.
    try:
        own = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise NotLockableError from error
    try:
        fcntl.flock(own, fcntl.LOCK_EX)
        yield
    finally:
        os.close(own)


def is_open(fd: int) -> bool:
    """Whether the segment is a memfd that can still be written."""
    try:
        return not fcntl.fcntl(fd, _GET_SEALS) & (_SEALED | 0x1)
    except OSError:  # no memfd
        return False


class SegmentWriter:
    """Writes a segment, from its beginning: what a process that died has left there is dropped; a `Memory`. It is not
    mapped for writing: that would cost a fault for each page, and a file that is mapped so cannot be sealed."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._used = mmap.PAGESIZE  # the head's page
        self._thread = ThreadPoolExecutor(1, "segment")
        self._writing: Future[None] | None = None
        self._buffers = tuple(torch.empty(0, dtype=torch.uint8) for _ in range(2))  # one is filled, one is written
        self._placed: dict[int, Part] = {}  # tensors that `filled` has made, by their addresses
        os.ftruncate(fd, 0)

    def filled(self, numel: int, dtype: torch.dtype, unit: int, fill: Callable[[Tensor, int], None]) -> Tensor:
        """A tensor in the segment, which cannot be written to. Pieces are filled in memory that stays in the cache, and
        written by another thread. `put` says where it lies."""
        if not numel:
            return torch.empty(0, dtype=dtype)
        size = dtype.itemsize
        step = max(1, _PIECE_BYTES // (unit * size)) * unit
        part = Part(-(-self._used // mmap.PAGESIZE) * mmap.PAGESIZE, (numel,), name_of(dtype))
        self._used = part.end
        os.ftruncate(self._fd, self._used)  # what lies behind the end of a file cannot be mapped
        for first in range(0, numel, step):
            num_bytes = min(step, numel - first) * size
            if len(self._buffers[0]) < num_bytes:
                self._buffers = (torch.empty(num_bytes, dtype=torch.uint8), self._buffers[1])
            piece = self._buffers[0][:num_bytes]
            fill(piece.view(dtype), first)
            self._wait()
            self._writing = self._thread.submit(_write, self._fd, piece.numpy().data, part.offset + first * size)
            self._buffers = self._buffers[::-1]
        tensor = _mapped(self._fd, numel * size, part.offset).view(dtype)
        self._placed[tensor.data_ptr()] = part
        return tensor

    def put(self, tensor: Tensor) -> Part:
        """Returns where the tensor lies, or will lie. It is copied by another thread, while the next one is packed, and
        must not change."""
        if (placed := self._placed.pop(tensor.data_ptr(), None)) is not None:
            return placed
        self._used = -(-self._used // _ALIGNMENT) * _ALIGNMENT
        part = Part(self._used, tuple(tensor.shape), name_of(tensor.dtype))
        data = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
        self._wait()
        self._writing = self._thread.submit(_write, self._fd, data, self._used)
        self._used = part.end
        return part

    def finish(self, key: bytes, index: Index) -> None:
        """Writes the index and seals the segment."""
        self._wait()
        self._thread.shutdown()
        encoded = msgspec.msgpack.encode(index)
        _write(self._fd, encoded, self._used)
        _write(self._fd, _HEAD.pack(_MAGIC, key, sha256(encoded).digest(), self._used, len(encoded)), 0)
        os.ftruncate(self._fd, self._used + len(encoded))
        fcntl.fcntl(self._fd, _ADD_SEALS, _SEALED)

    def _wait(self) -> None:
        if self._writing is not None:
            self._writing.result()


class Segment:
    """A segment that was written, mapped for reading."""

    def __init__(self, fd: int, index: Index, size: int) -> None:
        self.index = index
        self._bytes = _mapped(fd, size)

    def tensor(self, part: Part) -> Tensor:
        """The tensor; must not be written to."""
        return tensor_in(self._bytes, part)


def open_segment(fd: int, key: bytes) -> Segment | None:
    """None: it is not sealed, or holds something else."""
    try:
        if fcntl.fcntl(fd, _GET_SEALS) & _SEALED != _SEALED:
            return None
        size = os.fstat(fd).st_size
        magic, found, digest, offset, length = _HEAD.unpack(os.pread(fd, _HEAD.size, 0))
        if magic != _MAGIC or found != key or offset + length != size:
            return None
        encoded = _read(fd, length, offset)
        if sha256(encoded).digest() != digest:
            return None
        index = msgspec.msgpack.decode(encoded, type=Index)
        if not all(_is_within(part, index.kept, offset) for part in index.parts()):
            return None
        return Segment(fd, index, size)
    except (OSError, ValueError, struct.error, msgspec.MsgspecError):
        return None


def tensor_in(memory: Tensor, part: Part) -> Tensor:
    """memory: uint8 [bytes], in which the part lies."""
    return memory[part.offset : part.end].view(dtype_named(part.dtype)).view(part.shape)


def _is_within(part: Part, kept: Kept | None, end: int) -> bool:
    if kept is None:
        first, is_there = mmap.PAGESIZE, part.allocation == -1
    else:
        first, is_there = 0, 0 <= part.allocation < len(kept.sizes) == len(kept.sums)
        end = kept.sizes[part.allocation] if is_there else 0
    return is_there and min(part.shape, default=0) >= 0 and part.offset >= first and part.end <= end


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """Raises ValueError."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} is no type of a tensor")
    return dtype


def _mapped(fd: int, size: int, offset: int = 0) -> Tensor:
    """Bytes of a file, for reading. Asks for large pages, which the system gives only where its administrator allows
    them for shared memory."""
    memory = mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ, offset=offset)
    with contextlib.suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")  # writing would end the process
        return torch.frombuffer(memory, dtype=torch.uint8)


def _write(fd: int, data: bytes | memoryview, offset: int) -> None:
    while data:
        num = os.pwrite(fd, data, offset)
        data, offset = data[num:], offset + num


def _read(fd: int, length: int, offset: int) -> bytes:
    data = os.pread(fd, length, offset)
    if len(data) < length:
        raise ValueError("it is cut short")
    return data
