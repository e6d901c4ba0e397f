"""The disk tier: what ended requests held is kept in files, also across restarts. This is the core half.

It lists the folder once at start and from then on tracks the contents itself, because no other engine uses the folder.
It may be wrong about a file that failed to be written or was removed by hand: the load of such a block fails, the
request computes it, and the key is forgotten here.
"""

from collections.abc import Mapping, Sequence

from ...ipc.messages import TierSnapshot, Transferred
from ..core.eviction import EvictionQueue
from ..core.kv_connector import Evicted, Held, Item, KvEvent, KvRequest, TierConnector
from .base import ConnectorFacts, Options, WorkerConnector
from .block_files import BlockFiles, is_part, open_folder
from .block_storage import Storage
from .file_meta import FilePlan
from .ledger import Ledger, names_of, num_leading, parent_name, tail_first
from .options import check_names, eviction_of, size_of
from .states import StateIndex

_AT_ONCE = 256  # files that are given up with a plan, about, so that no step is late


class DiskConnector:
    """`disk,path=DIR,size=20G[,eviction=lru|lfu|cost]`."""

    @staticmethod
    def check(options: Options) -> None:
        check_names("disk", options, required=["path", "size"], optional=["eviction"])
        size_of("disk", options)
        eviction_of("disk", options)

    @staticmethod
    def core(options: Options, facts: ConnectorFacts) -> TierConnector:
        DiskConnector.check(options)
        files, size = open_folder("disk", options, facts)
        return DiskCore(files=files, size=size, facts=facts, queue=eviction_of("disk", options))

    @staticmethod
    def worker(options: Options, facts: ConnectorFacts) -> WorkerConnector:
        from .file_worker import FileWorker  # needs torch
        from .room import FolderLock

        DiskConnector.check(options)
        files, _ = open_folder("disk", options, facts)
        return FileWorker(name="disk", files=files, facts=facts, room=FolderLock(files))


class DiskCore:
    def __init__(self, *, files: BlockFiles, size: int, facts: ConnectorFacts, queue: EvictionQueue) -> None:
        self._files = files
        self._size = self._target = size  # `_size` approaches `_target` plan by plan
        self._facts = facts
        self._block_size = facts.block_size
        self._state_group = facts.state
        self._queue = queue  # of the names in `_kept`
        self._kept: dict[bytes, Item] = {}  # all that is stored or planned to be
        self._states = StateIndex(facts.state)
        self._others: list[tuple[str, int]] = []  # (name, size) of files of other models; the last is removed first
        self._bytes = 0  # of all files
        self._plan = FilePlan()
        self._ledger = Ledger("disk", facts)
        self._list()

    def available(self, request: KvRequest, items: Sequence[Item]) -> Sequence[bool] | None:
        return [item.name in self._kept for item in items]

    def standing(self, request: KvRequest, behind: bytes, place: int) -> Mapping[bytes, int]:
        return self._states.behind(behind)

    def num_kept(self, names: Sequence[bytes]) -> int:
        return num_leading(names, self._kept)

    def load(self, request: KvRequest, held: Sequence[Held]) -> None:
        """What was evicted since it was matched will fail to load."""
        names = names_of(request, held, self._block_size)
        self._queue.used(names)
        self._plan.use(self._kept[name] for name in names if name in self._kept)
        for item, _ in held:
            self._queue.pin(item.name)
        self._ledger.begin_load(request.rid, held)
        self._plan.load(request.rid, held)

    def build_connector_meta(self) -> bytes:
        if self._target < self._size:
            num_bytes = min(self._bytes, self._size) - _AT_ONCE * self._files.file_bytes()
            self._size = max(self._target, num_bytes)
            self._make_room()
        return self._plan.take()

    def ended(self, request: KvRequest, held: Sequence[Held]) -> bool:
        """Saves what is not there."""
        stored = []
        for one in tail_first(first_that_fit(held, self._size, self._files)):
            item = one.item
            parent = parent_name(item, self._state_group)
            if item.name in self._kept:
                self._queue.touched(item.name, parent)
                self._plan.use([item])
                continue
            self._queue.added(item.name, item.place, parent)
            self._kept[item.name] = item
            self._states.add(item)
            self._bytes += self._files.file_bytes(item.group)
            self._plan.save[item.name] = one
            stored.append(item)
        self._ledger.stored(stored)
        self._make_room()
        return False

    def blocks_evicted(self, evicted: Sequence[Evicted]) -> None:
        """Does nothing: the blocks of ended requests are stored already."""

    def update_connector_output(self, output: Transferred) -> None:
        over, failed = self._ledger.end_loads(output)
        for item in over:
            self._queue.unpin(item.name)
        self._forget(failed)

    def take_events(self) -> list[KvEvent]:
        return self._ledger.take_events()

    def tiers(self) -> tuple[TierSnapshot, ...]:
        return (self._ledger.snapshot(len(self._queue), self._size // self._files.file_bytes()),)

    def reset(self) -> None:
        """Whether blocks that were planned but not written exist turns out when they are read."""
        for item in self._ledger.forget_loads():
            self._queue.unpin(item.name)
        self._forget([item for item, _ in self._plan.save.values()])
        remove = list(self._plan.remove)
        self._plan.clear()
        self._plan.remove = remove

    def resize(self, size: int) -> None:
        """What is too much is evicted plan by plan."""
        self._target = self._facts.share_of(size)
        self._size = max(self._target, self._size)

    def close(self) -> None:
        pass

    def _list(self) -> None:
        """Lists what earlier engines stored. The worker removes partial files."""
        items = []
        for found in sorted(self._files.scan(), key=lambda found: (found.used_ns, -found.place)):
            if is_part(found.name):
                continue
            self._bytes += found.size
            if found.item is None:
                self._others.append((found.name, found.size))
            elif found.item.name not in self._kept:
                self._queue.added(found.item.name, found.item.place)
                self._kept[found.item.name] = found.item
                self._states.add(found.item)
                items.append(found.item)
        self._others.reverse()
        self._ledger.found(items)
        self._make_room()

    def _make_room(self) -> None:
        """Evicts until the rest fits: first the files that this model cannot use."""
        while self._bytes > self._size and self._others:
            name, size = self._others.pop()
            self._plan.remove.append(name)
            self._bytes -= size
        while self._bytes > self._size and (victim := self._queue.evict()) is not None:
            item = self._remove(victim.key)
            if self._plan.save.pop(item.name, None) is None:
                self._plan.remove.append(self._files.name(item))
            self._ledger.evicted(item)

    def _forget(self, items: Sequence[Item]) -> None:
        """Forgets what is missing or damaged. Two loads may report the same item."""
        known = [item for item in dict.fromkeys(items) if item.name in self._kept]
        for item in known:
            self._queue.removed(item.name)
            self._remove(item.name)
        self._ledger.removed(known)

    def _remove(self, name: bytes) -> Item:
        item = self._kept.pop(name)
        self._states.remove(name)
        self._bytes -= self._files.file_bytes(item.group)
        return item


def first_that_fit(held: Sequence[Held], size: int, files: Storage) -> list[Held]:
    """The first of these items, as many as fit into so many bytes."""
    fit = []
    for one in held:
        size -= files.file_bytes(one.item.group)
        if size < 0:
            break
        fit.append(one)
    return fit
