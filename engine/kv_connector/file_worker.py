"""The worker half of `disk`, `shared` and `redis`: copies blocks of the cache to a storage and back.

A block to be saved is copied before the step continues, and a thread writes it. Blocks to be loaded are read and
checked by a few threads, a window of them at a time; the runner's thread puts them into the cache when it polls the
loads. So only the runner's thread touches the cache, and a load that is given up harms nothing, whatever comes late.
"""

import logging
import math
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
from ..core.kv_connector import Held
from .base import ConnectorFacts
from .block_copy import BlockCopier
from .block_storage import Storage
from .block_writer import BlockWriter
from .file_meta import FileMeta
from .room import Room

_NUM_READERS = 4
_WINDOW_BYTES = 64 << 20  # limit of blocks that are being read, or were read and are not in the cache yet
_BACKLOG_BYTES = 256 << 20  # limit of blocks that wait to be written; further ones are dropped
_CLOSE_S = 5.0
_MAX_STALLS = 30  # the longest load, in times of `stall_s`

log = logging.getLogger("pagewire.kv")


class _Load:
    """One request's load. A request that loads again has another one."""

    def __init__(self, rid: int, held: list[Held], last: float) -> None:
        self.rid = rid
        self.open = {one.pages[0]: one for one in held}  # what is not in the cache yet, by its first page
        self.failed: list[int] = []  # first pages
        self.problem = ""  # the first one
        self.last = last  # monotonic s: when it is given up at the latest
        self.is_over = False

    def fail(self, page: int, problem: str) -> None:
        self.open.pop(page, None)
        self.problem = self.problem or problem
        self.failed.append(page)


class _Wanted(NamedTuple):
    load: _Load
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
        files: Storage,
        facts: ConnectorFacts,
        room: Room,
        overwrite: bool = True,
        backlog_bytes: int = _BACKLOG_BYTES,
        stall_s: float = math.inf,
    ) -> None:
        """stall_s: loads are given up if nothing was read for so long, and at the latest after 30 times as long."""
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
        self._loads: dict[int, _Load] = {}  # by rid
        self._stall_s = stall_s
        self._heard_at = 0.0  # monotonic s: when something was read last, or the first of the loads began
        self._failed_of_named: set[int] = set()
        self._num_loaded = 0
        self._load_ms = 0.0
        self._busy_since = 0.0  # seconds; while `_loads` is not empty
        self._is_dropping = False  # the backlog was full last time; logged once

    @property
    def num_pending(self) -> int:
        return len(self._loads)

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
            held, now = load.columns.held(self._facts), time.monotonic()
            if not self._loads:
                self._busy_since = time.perf_counter()
                self._heard_at = now
            begun = self._loads[load.rid] = _Load(load.rid, held, now + _MAX_STALLS * self._stall_s)
            self._wanted.extend(_Wanted(begun, one) for one in held)
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
        now = time.monotonic()
        while len(pages) < self._copier.chunk:
            try:
                read = self._done.get_nowait()
            except Empty:
                break
            self._num_reading -= 1
            self._heard_at = now
            load, held = read.wanted
            if load.is_over:
                continue
            if read.rows is None:
                load.fail(held.pages[0], read.problem)
            else:
                del load.open[held.pages[0]]
                pages += held.pages
                rows.append(read.rows)
        if rows:
            self._copier.write(pages, torch.cat(rows))
            self._num_loaded += len(pages)
        self._give_up(now)
        self._feed_readers()
        over = [load for load in self._loads.values() if not load.open]
        self._failed_of_named = set()
        for load in over:
            load.is_over = True
            del self._loads[load.rid]
            if load.failed:
                self._failed_of_named.update(load.failed)
                log.warning(
                    "%s: %d blocks could not be read and are computed again; the first error: %s",
                    self._name,
                    len(load.failed),
                    load.problem,
                )
        if over and not self._loads:
            self._load_ms += (time.perf_counter() - self._busy_since) * 1e3
        return set(), {load.rid for load in over}

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_of_named = self._failed_of_named, set()
        return failed

    def take_load_cost(self) -> tuple[int, float]:
        """The time is that during which any load was under way."""
        if self._loads:
            now = time.perf_counter()
            self._load_ms += (now - self._busy_since) * 1e3
            self._busy_since = now
        cost = (self._num_loaded, self._load_ms)
        self._num_loaded, self._load_ms = 0, 0.0
        return cost

    def close(self) -> None:
        """Gives blocks that wait to be written a few seconds."""
        self._wanted.clear()
        self._writer.close(_CLOSE_S)
        self._files.close()
        self._readers.shutdown(cancel_futures=True)

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

    def _give_up(self, now: float) -> None:
        """Ends the loads for which the storage takes too long."""
        is_stalled = now - self._heard_at > self._stall_s
        for load in self._loads.values():
            if is_stalled or now > load.last:
                for page in list(load.open):
                    load.fail(page, "it took too long")
        while self._wanted and not self._wanted[0].load.open:
            self._wanted.popleft()

    def _feed_readers(self) -> None:
        """Gives each reader as much as the storage likes to be asked for at once."""
        while self._wanted and self._num_reading < self._window:
            batch = [self._wanted.popleft()]
            num_bytes = self._facts.bytes_of(batch[0].held.item.group)
            while self._wanted and self._num_reading + len(batch) < self._window:
                num_bytes += self._facts.bytes_of(self._wanted[0].held.item.group)
                if num_bytes > self._files.batch_bytes:
                    break
                batch.append(self._wanted.popleft())
            self._num_reading += len(batch)
            self._readers.submit(self._read, batch)

    def _read(self, batch: list[_Wanted]) -> None:
        """A reader's job."""
        reads = [_Read(wanted, None, "") for wanted in batch]
        try:
            reads = self._fill(batch)
        except Exception as error:  # after any error the requests can compute the blocks
            reads = [read._replace(problem=f"{type(error).__name__}: {error}") for read in reads]
        for read in reads:
            self._done.put(read)

    def _fill(self, batch: list[_Wanted]) -> list[_Read]:
        items = [wanted.held.item for wanted in batch]
        rows = [torch.empty(self._facts.bytes_of(item.group), dtype=torch.uint8) for item in items]
        asked, problems = [], [""] * len(items)
        for i, (item, row) in enumerate(zip(items, rows, strict=True)):
            waiting = self._writer.pending(item)
            if waiting is not None:
                row.numpy().data[:] = waiting
            else:
                asked.append(i)
        answers = self._files.read_all([(items[i], rows[i].numpy().data) for i in asked])
        for i, problem in zip(asked, answers, strict=True):
            problems[i] = problem
        return [
            _Read(wanted, None if problem else row.view(-1, self._facts.block_bytes), problem)
            for wanted, row, problem in zip(batch, rows, problems, strict=True)
        ]
