"""A thread that writes blocks to a storage, so that neither steps nor loads wait for a slow one.

Jobs run in the order in which they came: a block that is removed and saved again exists afterwards. Jobs of one kind
that follow each other go to the storage together, as many as it likes to take. A block that could not be written is
missing when it is read; only the operator is told.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from ..core.kv_connector import Item
from .block_storage import Storage
from .room import Room

_MAX_JOBS = 100_000  # with more waiting, times of use are not recorded

log = logging.getLogger("pagewire.kv")


class _Save(NamedTuple):
    item: Item
    data: memoryview

    @property
    def num_bytes(self) -> int:
        """What it counts for in a batch."""
        return len(self.data)


class _Remove(NamedTuple):
    name: str
    num_bytes: int = 256


class _Touch(NamedTuple):
    item: Item
    used_ns: int
    num_bytes: int = 256


_Job = _Save | _Remove | _Touch


class BlockWriter:
    """The runner's thread calls the methods; any thread may call `pending`."""

    def __init__(self, *, name: str, files: Storage, room: Room, overwrite: bool, max_bytes: int) -> None:
        """overwrite: also write a block whose file exists. max_bytes: limit of the blocks that wait to be written."""
        self._name = name
        self._files = files
        self._room = room
        self._overwrite = overwrite
        self._max_bytes = max_bytes
        self._jobs: deque[_Job] = deque()
        self._pending: dict[bytes, memoryview] = {}  # name → the item's bytes, until its file is there
        self._num_bytes = 0  # of all blocks in `_jobs` and the one being written
        self._is_closing = False
        self._is_failing = False  # the last write failed; logged once
        self._condition = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=f"kv-{name}-writer", daemon=True)
        self._thread.start()

    @property
    def room(self) -> int:
        """How many bytes `save` accepts now."""
        return max(0, self._max_bytes - self._num_bytes)

    def pending(self, item: Item) -> memoryview | None:
        """Its bytes, if it waits to be written."""
        with self._condition:
            return self._pending.get(item.name)

    def save(self, item: Item, data: memoryview) -> None:
        """Writes an item. The caller has checked `room` and no longer changes `data`."""
        with self._condition:
            self._pending[item.name] = data
            self._num_bytes += len(data)
        self._add(_Save(item, data))

    def remove(self, name: str) -> None:
        self._add(_Remove(name))

    def touch(self, item: Item, used_ns: int) -> None:
        """Records when an item was used. Dropped if too many jobs wait."""
        if len(self._jobs) < _MAX_JOBS:
            self._add(_Touch(item, used_ns))

    def close(self, grace_s: float) -> None:
        """Writes what waits, for at most `grace_s`."""
        with self._condition:
            self._is_closing = True
            self._condition.notify()
        self._thread.join(grace_s)
        if self._thread.is_alive():
            log.warning("%s: %d blocks were not written in time", self._name, len(self._pending))
        else:
            self._room.close()

    def _add(self, job: _Job) -> None:
        with self._condition:
            self._jobs.append(job)
            self._condition.notify()

    def _run(self) -> None:
        self._do(self._room.tidy)
        while True:
            with self._condition:
                while not self._jobs:
                    if self._is_closing:
                        return
                    self._condition.wait()
                batch = self._take_batch()
            self._do(partial(self._carry_out, batch))

    def _take_batch(self) -> list[_Job]:
        """The first job, and those of its kind that follow it and fit into a batch."""
        batch = [self._jobs.popleft()]
        num_bytes = batch[0].num_bytes
        while self._jobs and type(self._jobs[0]) is type(batch[0]):
            num_bytes += self._jobs[0].num_bytes
            if num_bytes > self._files.batch_bytes:
                break
            batch.append(self._jobs.popleft())
        return batch

    def _carry_out(self, batch: list[_Job]) -> None:
        saves = [job for job in batch if isinstance(job, _Save)]
        touches = [job for job in batch if isinstance(job, _Touch)]
        if saves:
            self._write(saves)
        elif touches:
            self._files.touch_all([job.item for job in touches], max(job.used_ns for job in touches))
        else:
            self._files.remove_all([job.name for job in batch if isinstance(job, _Remove)])

    def _do(self, job: Callable[[], None]) -> None:
        try:
            job()
        except OSError as error:
            if not self._is_failing:
                log.warning("%s: blocks cannot be written: %s", self._name, error)
            self._is_failing = True

    def _write(self, saves: list[_Save]) -> None:
        try:
            if not self._overwrite:
                has = self._files.has_all([item for item, _ in saves])
                new = [save for save, is_there in zip(saves, has, strict=True) if not is_there]
            else:
                new = saves
            if new:
                self._room.before_write(sum(self._files.file_bytes(item.group) for item, _ in new))
                self._files.write_all([(item, data) for item, data in new])
            self._is_failing = False
        finally:
            with self._condition:
                for item, data in saves:
                    self._num_bytes -= len(data)
                    if self._pending.get(item.name) is data:
                        del self._pending[item.name]
