"""The worker half of `disk` and `shared`: blocks of the cache to files and back.

A block to be kept is copied out before the step goes on, and a thread writes it. Blocks to be loaded are read and
checked by a few threads, a window of them at a time, and put into the cache by the runner's thread when it asks how far
they are; so nothing but the runner's thread ever touches the cache.
"""

import logging
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import NamedTuple

import torch
from msgspec import msgpack
from torch import Tensor

from ...ipc.messages import bytes_to_ids
from ..attention.kv_cache import KvCache
from .base import ConnectorFacts
from .block_copy import BlockCopier
from .block_files import BadBlock, BlockFiles
from .block_writer import BlockWriter
from .file_meta import FileMeta
from .room import Room

_NUM_READERS = 4
_WINDOW_BYTES = 64 << 20  # blocks that are being read, or were and are not in the cache yet
_BACKLOG_BYTES = 256 << 20  # blocks that wait to be written; more are not kept
_CLOSE_S = 5.0

log = logging.getLogger("pagewire.kv")


class _Wanted(NamedTuple):
    rid: int
    block: int
    key: bytes
    place: int


class _Read(NamedTuple):
    wanted: _Wanted
    row: Tensor | None  # uint8 [block_bytes]; None: it could not be read
    problem: str


class FileWorker:
    """See `WorkerConnector`."""

    def __init__(
        self,
        *,
        name: str,
        files: BlockFiles,
        facts: ConnectorFacts,
        room: Room,
        overwrite: bool = True,
        backlog_bytes: int = _BACKLOG_BYTES,
    ) -> None:
        self._name = name
        self._files = files
        self._block_bytes = facts.block_bytes
        self._decoder = msgpack.Decoder(FileMeta)
        self._meta: FileMeta | None = None
        self._writer = BlockWriter(name=name, files=files, room=room, overwrite=overwrite, max_bytes=backlog_bytes)
        self._readers = ThreadPoolExecutor(_NUM_READERS, thread_name_prefix=f"kv-{name}-reader")
        self._window = max(_NUM_READERS, _WINDOW_BYTES // self._block_bytes)
        self._wanted: deque[_Wanted] = deque()  # not given to a reader yet
        self._num_reading = 0  # given to a reader, and not in the cache yet
        self._done: SimpleQueue[_Read] = SimpleQueue()
        self._left: dict[int, int] = {}  # rid → blocks that are not in the cache yet
        self._bad: dict[int, list[_Read]] = {}  # rid → those that failed
        self._failed_of_named: set[int] = set()
        self._num_loaded = 0
        self._load_ms = 0.0
        self._busy_since = 0.0  # seconds; while `_left` is not empty
        self._is_dropping = False  # the backlog was full last time; told once

    @property
    def num_pending(self) -> int:
        """See `WorkerConnector`."""
        return len(self._left)

    def register_kv_caches(self, cache: KvCache) -> None:
        """See `WorkerConnector`."""
        self._copier = BlockCopier(cache)
        assert self._copier.block_bytes == self._block_bytes, (self._copier.block_bytes, self._block_bytes)

    def bind_connector_metadata(self, metadata: bytes) -> None:
        """See `WorkerConnector`."""
        self._meta = self._decoder.decode(metadata)

    def start_load_kv(self) -> None:
        """See `WorkerConnector`."""
        meta, self._meta = self._meta, None
        if meta is None:
            return
        for name in meta.remove:
            self._writer.remove(name)
        self._save(meta)
        now_ns = time.time_ns()
        for key, place in meta.used.files():
            self._writer.touch(key, place, now_ns)
        for load in meta.loads:
            blocks = bytes_to_ids(load.columns.blocks)
            if not self._left:
                self._busy_since = time.perf_counter()
            self._left[load.rid] = len(blocks)
            for block, (key, place) in zip(blocks, load.columns.files(), strict=True):
                self._wanted.append(_Wanted(load.rid, block, key, place))
        self._feed_readers()

    def wait_for_layer_load(self, layer: int) -> None:
        """See `WorkerConnector`."""

    def save_kv_layer(self, layer: int) -> None:
        """See `WorkerConnector`."""

    def wait_for_save(self) -> None:
        """See `WorkerConnector`."""

    def get_finished(self) -> tuple[set[int], set[int]]:
        """See `WorkerConnector`. Puts what was read into the cache, a chunk at most, so that a step waits little."""
        blocks: list[int] = []
        rows: list[Tensor] = []
        while len(rows) < self._copier.chunk:
            try:
                read = self._done.get_nowait()
            except Empty:
                break
            self._num_reading -= 1
            self._left[read.wanted.rid] -= 1
            if read.row is None:
                self._bad.setdefault(read.wanted.rid, []).append(read)
            else:
                blocks.append(read.wanted.block)
                rows.append(read.row)
        if rows:
            self._copier.write(blocks, torch.stack(rows))
            self._num_loaded += len(rows)
        self._feed_readers()
        loaded = {rid for rid, left in self._left.items() if left == 0}
        self._failed_of_named = set()
        for rid in loaded:
            del self._left[rid]
            if bad := self._bad.pop(rid, None):
                self._failed_of_named.update(read.wanted.block for read in bad)
                log.warning(
                    "%s: %d blocks could not be read and are computed again; the first: %s",
                    self._name,
                    len(bad),
                    bad[0].problem,
                )
        if loaded and not self._left:
            self._load_ms += (time.perf_counter() - self._busy_since) * 1e3
        return set(), loaded

    def get_block_ids_with_load_errors(self) -> set[int]:
        """See `WorkerConnector`."""
        failed, self._failed_of_named = self._failed_of_named, set()
        return failed

    def take_load_cost(self) -> tuple[int, float]:
        """See `WorkerConnector`. The time is that in which any load was under way."""
        if self._left:
            now = time.perf_counter()
            self._load_ms += (now - self._busy_since) * 1e3
            self._busy_since = now
        cost = (self._num_loaded, self._load_ms)
        self._num_loaded, self._load_ms = 0, 0.0
        return cost

    def close(self) -> None:
        """See `WorkerConnector`. Blocks that wait to be written get a few seconds."""
        self._wanted.clear()
        self._readers.shutdown(cancel_futures=True)
        self._writer.close(_CLOSE_S)

    def _save(self, meta: FileMeta) -> None:
        """Copies the blocks out and gives them to the writer."""
        blocks, files = bytes_to_ids(meta.save.blocks), meta.save.files()
        fit = self._writer.room_for(self._block_bytes)
        if len(blocks) > fit:  # heads of sequences come last and are kept
            if not self._is_dropping:
                log.warning("%s: writing is slower than what there is to keep; some of it is not", self._name)
            blocks, files = blocks[len(blocks) - fit :], files[len(files) - fit :]
            self._is_dropping = True
        elif blocks:
            self._is_dropping = False
        names = iter(files)
        for rows in self._copier.read(blocks):
            for row in rows:
                key, place = next(names)
                self._writer.save(key, place, row.numpy().data)

    def _feed_readers(self) -> None:
        while self._wanted and self._num_reading < self._window:
            self._num_reading += 1
            self._readers.submit(self._read, self._wanted.popleft())

    def _read(self, wanted: _Wanted) -> None:
        """A reader's work."""
        row: Tensor | None = None
        problem = ""
        try:
            row = self._fill(wanted)
        except BadBlock as error:
            problem = str(error)
            self._discard(wanted)
        except Exception as error:  # whatever it is, the request can compute the block
            row, problem = None, f"{type(error).__name__}: {error}"
        self._done.put(_Read(wanted, row, problem))

    def _fill(self, wanted: _Wanted) -> Tensor:
        row = torch.empty(self._block_bytes, dtype=torch.uint8)
        into = row.numpy().data
        waiting = self._writer.pending(wanted.key)
        if waiting is not None:
            into[:] = waiting
        else:
            self._files.read(wanted.key, wanted.place, into)
        return row

    def _discard(self, wanted: _Wanted) -> None:
        """A file that does not hold what it should is in the way of one that does."""
        try:
            self._files.remove(self._files.name(wanted.key, wanted.place))
        except OSError as error:
            log.warning("%s: a damaged file stays: %s", self._name, error)
