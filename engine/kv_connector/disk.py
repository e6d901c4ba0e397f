"""The disk tier: the full blocks of ended requests are kept in files, also across restarts. This is the core half.

It lists the folder once at start and from then on tracks the contents itself, because no other engine uses the folder.
It may be wrong about a file that failed to be written or was removed by hand: the load of such a block fails, the
request computes it, and the key is forgotten here.
"""

from collections.abc import Sequence

from ...ipc.messages import TierSnapshot, Transferred
from ..core.eviction import EvictionQueue
from ..core.kv_connector import CoreConnector, Evicted, KvEvent, KvRequest
from .base import ConnectorFacts, Options, WorkerConnector
from .block_files import BlockFiles, is_part, open_folder
from .file_meta import FilePlan
from .ledger import Ledger, num_matched
from .options import check_names, eviction_of, size_of


class DiskConnector:
    """`disk,path=DIR,size=20G[,eviction=lru|lfu|cost]`."""

    @staticmethod
    def check(options: Options) -> None:
        check_names("disk", options, required=["path", "size"], optional=["eviction"])
        size_of("disk", options)
        eviction_of("disk", options)

    @staticmethod
    def core(options: Options, facts: ConnectorFacts) -> CoreConnector:
        DiskConnector.check(options)
        files, size = open_folder("disk", options, facts)
        return DiskCore(files=files, size=size, block_size=facts.block_size, queue=eviction_of("disk", options))

    @staticmethod
    def worker(options: Options, facts: ConnectorFacts) -> WorkerConnector:
        from .file_worker import FileWorker  # needs torch
        from .room import FolderLock

        DiskConnector.check(options)
        files, _ = open_folder("disk", options, facts)
        return FileWorker(name="disk", files=files, facts=facts, room=FolderLock(files))


class DiskCore:
    def __init__(self, *, files: BlockFiles, size: int, block_size: int, queue: EvictionQueue) -> None:
        self._files = files
        self._size = size
        self._block_size = block_size
        self._queue = queue  # of all blocks that are stored or planned to be
        self._others: list[tuple[str, int]] = []  # (name, size) of files of other models; the last is removed first
        self._bytes = 0  # of all files
        self._plan = FilePlan()
        self._ledger = Ledger("disk", block_size)
        self._list()

    def get_num_new_matched_tokens(self, request: KvRequest, num_computed_tokens: int) -> tuple[int | None, bool]:
        num = num_matched(request, num_computed_tokens, self._block_size, lambda key, _: key in self._queue)
        return num * self._block_size, num > 0

    def update_state_after_alloc(self, request: KvRequest, block_ids: Sequence[int], num_external_tokens: int) -> None:
        """A block that was evicted since it was matched will fail to load."""
        num = num_external_tokens // self._block_size
        keys = request.block_keys(len(block_ids), self._block_size)
        self._queue.used(keys)
        self._plan.used.update(zip(keys, range(len(keys)), strict=True))
        for key in keys[-num:]:
            self._queue.pin(key)
        self._ledger.begin_load(request.rid, block_ids[-num:], keys[-num:])
        self._plan.load(request.rid, block_ids[-num:], keys[-num:], len(keys) - num)

    def build_connector_meta(self) -> bytes:
        return self._plan.take()

    def request_finished(self, request: KvRequest, block_ids: Sequence[int]) -> bool:
        """Saves the blocks that are not there."""
        keys = request.block_keys(request.num_computed // self._block_size, self._block_size)
        keys = keys[: self._size // self._files.file_bytes]
        stored = []
        for i in range(len(keys) - 1, -1, -1):  # the tail first, so that it is the oldest and is evicted first
            parent = keys[i - 1] if i else None
            if keys[i] in self._queue:
                self._queue.touched(keys[i], parent)
                self._plan.used[keys[i]] = i
                continue
            self._queue.added(keys[i], i, parent)
            self._bytes += self._files.file_bytes
            self._plan.save[keys[i]] = (block_ids[i], i)
            stored.append(keys[i])
        self._ledger.stored(stored)
        self._make_room()
        return False

    def blocks_evicted(self, evicted: Sequence[Evicted]) -> None:
        """Does nothing: the blocks of ended requests are stored already."""

    def update_connector_output(self, output: Transferred) -> None:
        over, failed = self._ledger.end_loads(output)
        for key in over:
            self._queue.unpin(key)
        self._forget(failed)

    def take_events(self) -> list[KvEvent]:
        return self._ledger.take_events()

    def tiers(self) -> tuple[TierSnapshot, ...]:
        return (self._ledger.snapshot(len(self._queue), self._size // self._files.file_bytes),)

    def reset(self) -> None:
        """Whether blocks that were planned but not written exist turns out when they are read."""
        for key in self._ledger.forget_loads():
            self._queue.unpin(key)
        self._forget(list(self._plan.save))
        remove = list(self._plan.remove)
        self._plan.clear()
        self._plan.remove = remove

    def close(self) -> None:
        pass

    def _list(self) -> None:
        """Lists what earlier engines stored. The worker removes partial files."""
        keys = []
        for found in sorted(self._files.scan(), key=lambda found: (found.used_ns, -found.place)):
            if is_part(found.name):
                continue
            self._bytes += found.size
            if found.key is None:
                self._others.append((found.name, found.size))
            elif found.key not in self._queue:
                self._queue.added(found.key, found.place)
                keys.append(found.key)
        self._others.reverse()
        self._ledger.found(keys)
        self._make_room()

    def _make_room(self) -> None:
        """Evicts until the rest fits: first the files that this model cannot use."""
        while self._bytes > self._size and self._others:
            name, size = self._others.pop()
            self._plan.remove.append(name)
            self._bytes -= size
        while self._bytes > self._size and (victim := self._queue.evict()) is not None:
            self._bytes -= self._files.file_bytes
            if self._plan.save.pop(victim.key, None) is None:
                self._plan.remove.append(self._files.name(victim.key, victim.place))
            self._ledger.evicted(victim.key)

    def _forget(self, keys: Sequence[bytes]) -> None:
        """Forgets blocks that are missing or damaged. Two loads may report the same block."""
        known = [key for key in dict.fromkeys(keys) if key in self._queue]
        for key in known:
            self._queue.removed(key)
            self._bytes -= self._files.file_bytes
        self._ledger.removed(known)
