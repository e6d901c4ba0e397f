"""The worker half of `disk` and `shared`: copies blocks of the cache to files and back.

A block to be saved is copied before the step continues, and a thread writes it. Blocks to be loaded are read and
checked by a few threads, a window of them at a time; the runner's thread puts them into the cache when it polls the
loads. So only the runner's thread touches the cache.
"""

import logging
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from queue import Empty, SimpleQueue
from typing import NamedTuple

import torch
from msgspec import msgpack
from torch import Tensor

from ..attention.kv_cache import KvCache
from ..core.kv_connector import Held, Item
from .base import ConnectorFacts
from .block_copy import BlockCopier
from .block_files import BadBlock, BlockFiles
from .block_writer import BlockWriter
from .file_meta import FileMeta
from .room import Room

_NUM_READERS = 4
_WINDOW_BYTES = 64 << 20  # limit of blocks that are being read, or were read and are not in the cache yet
_BACKLOG_BYTES = 256 << 20  # limit of blocks that wait to be written; further ones are dropped
_CLOSE_S = 5.0

log = logging.getLogger("pagewire.kv")


class _Wanted(NamedTuple):
    rid: int
    held: Held


class _Read(NamedTuple):
    wanted: _Wanted
    rows: Tensor | None  # uint8 [pages, bytes of a page]; None: the read failed
    problem: str


class FileWorker:
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
        self._facts = facts
        self._decoder = msgpack.Decoder(FileMeta)
        self._meta: FileMeta | None = None
        self._writer = BlockWriter(name=name, files=files, room=room, overwrite=overwrite, max_bytes=backlog_bytes)
        self._readers = ThreadPoolExecutor(_NUM_READERS, thread_name_prefix=f"kv-{name}-reader")
        largest = max(map(facts.bytes_of, range(facts.num_groups)))
        self._window = max(_NUM_READERS, _WINDOW_BYTES // largest)
        self._wanted: deque[_Wanted] = deque()  # not given to a reader yet
        self._num_reading = 0  # given to a reader and not in the cache yet
        self._done: SimpleQueue[_Read] = SimpleQueue()
        self._left: dict[int, int] = {}  # rid → blocks that are not in the cache yet
        self._bad: dict[int, list[_Read]] = {}  # rid → its failed reads
        self._failed_of_named: set[int] = set()
        self._num_loaded = 0
        self._load_ms = 0.0
        self._busy_since = 0.0  # seconds; while `_left` is not empty
        self._is_dropping = False  # the backlog was full last time; logged once

    @property
    def num_pending(self) -> int:
        return len(self._left)

    def register_kv_caches(self, cache: KvCache) -> None:
        self._copier = BlockCopier(cache)
        assert self._copier.block_bytes == self._facts.block_bytes, (self._copier.block_bytes, self._facts)

    def bind_connector_metadata(self, metadata: bytes) -> None:
        self._meta = self._decoder.decode(metadata)

    def start_load_kv(self) -> None:
        meta, self._meta = self._meta, None
        if meta is None:
            return
        for name in meta.remove:
            self._writer.remove(name)
        self._save(meta)
        now_ns = time.time_ns()
        for item in meta.used.items():
            self._writer.touch(item, now_ns)
        for load in meta.loads:
            held = load.columns.held(self._facts)
            if not self._left:
                self._busy_since = time.perf_counter()
            self._left[load.rid] = len(held)
            self._wanted.extend(_Wanted(load.rid, one) for one in held)
        self._feed_readers()

    def wait_for_layer_load(self, layer: int) -> None:
        pass

    def save_kv_layer(self, layer: int) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_finished(self) -> tuple[set[int], set[int]]:
        """Puts what was read into the cache, about one chunk at most, so that a step is not held up for long."""
        pages: list[int] = []
        rows: list[Tensor] = []
        while len(pages) < self._copier.chunk:
            try:
                read = self._done.get_nowait()
            except Empty:
                break
            self._num_reading -= 1
            self._left[read.wanted.rid] -= 1
            if read.rows is None:
                self._bad.setdefault(read.wanted.rid, []).append(read)
            else:
                pages += read.wanted.held.pages
                rows.append(read.rows)
        if rows:
            self._copier.write(pages, torch.cat(rows))
            self._num_loaded += len(pages)
        self._feed_readers()
        loaded = {rid for rid, left in self._left.items() if left == 0}
        self._failed_of_named = set()
        for rid in loaded:
            del self._left[rid]
            if bad := self._bad.pop(rid, None):
                self._failed_of_named.update(read.wanted.held.pages[0] for read in bad)
                log.warning(
                    "%s: %d blocks could not be read and are computed again; the first error: %s",
                    self._name,
                    len(bad),
                    bad[0].problem,
                )
        if loaded and not self._left:
            self._load_ms += (time.perf_counter() - self._busy_since) * 1e3
        return set(), loaded

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_of_named = self._failed_of_named, set()
        return failed

    def take_load_cost(self) -> tuple[int, float]:
        """The time is that during which any load was under way."""
        if self._left:
            now = time.perf_counter()
            self._load_ms += (now - self._busy_since) * 1e3
            self._busy_since = now
        cost = (self._num_loaded, self._load_ms)
        self._num_loaded, self._load_ms = 0, 0.0
        return cost

    def close(self) -> None:
        """Gives blocks that wait to be written a few seconds."""
        self._wanted.clear()
        self._readers.shutdown(cancel_futures=True)
        self._writer.close(_CLOSE_S)

    def _save(self, meta: FileMeta) -> None:
        """Copies the blocks out and passes them to the writer."""
        held, room = meta.save.held(self._facts), self._writer.room
        fit = []
        for one in reversed(held):  # the first blocks of sequences come last and are kept
            room -= self._facts.bytes_of(one.item.group)
            if room >= 0:
                fit.append(one)
        if len(fit) < len(held) and not self._is_dropping:
            log.warning("%s: blocks come faster than they can be written; some are not kept", self._name)
        if held:
            self._is_dropping = len(fit) < len(held)
        fit.reverse()
        pages = [page for one in fit for page in one.pages]
        rows = (row for chunk in self._copier.read(pages) for row in chunk)
        for item, own in fit:
            parts = list(islice(rows, len(own)))
            self._writer.save(item, (parts[0] if len(parts) == 1 else torch.cat(parts)).numpy().data)

    def _feed_readers(self) -> None:
        while self._wanted and self._num_reading < self._window:
            self._num_reading += 1
            self._readers.submit(self._read, self._wanted.popleft())

    def _read(self, wanted: _Wanted) -> None:
        """A reader's job."""
        rows: Tensor | None = None
        problem = ""
        try:
            rows = self._fill(wanted.held.item)
        except BadBlock as error:
            problem = str(error)
            self._discard(wanted)
        except Exception as error:  # after any error the request can compute the block
            rows, problem = None, f"{type(error).__name__}: {error}"
        self._done.put(_Read(wanted, rows, problem))

    def _fill(self, item: Item) -> Tensor:
        row = torch.empty(self._facts.bytes_of(item.group), dtype=torch.uint8)
        into = row.numpy().data
        waiting = self._writer.pending(item)
        if waiting is not None:
            into[:] = waiting
        else:
            self._files.read(item, into)
        return row.view(-1, self._facts.block_bytes)

    def _discard(self, wanted: _Wanted) -> None:
        """Removes a damaged file, so that a good one can take its name."""
        try:
            self._files.remove(self._files.name(wanted.held.item))
        except OSError as error:
            log.warning("%s: a damaged file cannot be removed: %s", self._name, error)
