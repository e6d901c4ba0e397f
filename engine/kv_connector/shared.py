"""The shared tier: a folder of blocks that several engines of one machine read and write, for example in /dev/shm.

This is the core half, and that of every tier which several engines use. What such a storage holds is known to an
`Index`; that of a folder asks the file system, so every engine finds what any of them has stored. A block that was
found may be removed before it is read; the request then computes it.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from ...ipc.messages import TierSnapshot, Transferred
from ..core.kv_connector import Evicted, Held, Item, KvEvent, KvRequest, TierConnector
from .base import ConnectorFacts, Options, WorkerConnector
from .block_files import BlockFiles, open_folder
from .block_storage import Storage
from .disk import first_that_fit
from .file_meta import FilePlan
from .ledger import Ledger, tail_first
from .options import check_names, size_of
from .states import StateIndex

_MAX_LOOKUPS = 4096  # limit of blocks to look up for one request at a time
_TRUSTED_PLANS = 8  # plans for which a block that was found is assumed to exist still


class Index(Protocol):
    """What a storage of several engines holds, as far as this engine knows. It never blocks for long."""

    def available(self, request: KvRequest, items: Sequence[Item]) -> Sequence[bool] | None:
        """Answers as `TierConnector.available`."""

    def standing(self, behind: bytes) -> Mapping[bytes, int]:
        """The recurrent states behind a block or the root: key → positions between."""

    def claim(self, items: Sequence[Item]) -> list[bool]:
        """Which of these need not be stored. The caller stores the others."""

    def lost(self, items: Sequence[Item]) -> None:
        """These could not be loaded."""

    def planned(self) -> None:
        """A plan was made."""

    def close(self) -> None:
        """Ends threads and connections."""


class SharedConnector:
    """`shared,path=DIR,size=8G`."""

    @staticmethod
    def check(options: Options) -> None:
        check_names("shared", options, required=["path", "size"])
        size_of("shared", options)

    @staticmethod
    def core(options: Options, facts: ConnectorFacts) -> TierConnector:
        SharedConnector.check(options)
        files, size = open_folder("shared", options, facts)
        num_kept = sum(found.item is not None for found in files.scan())
        return SharedCore(
            name="shared", index=FolderIndex(files), files=files, facts=facts, size=size, num_kept=num_kept
        )

    @staticmethod
    def worker(options: Options, facts: ConnectorFacts) -> WorkerConnector:
        from .file_worker import FileWorker  # needs torch
        from .room import SharedRoom

        SharedConnector.check(options)
        files, size = open_folder("shared", options, facts)
        return FileWorker(name="shared", files=files, facts=facts, room=SharedRoom(files, size), overwrite=False)


class SharedCore:
    def __init__(
        self, *, name: str, index: Index, files: Storage, facts: ConnectorFacts, size: int, num_kept: int
    ) -> None:
        """num_kept: blocks that the storage has now."""
        self._index = index
        self._files = files
        self._size = size
        self._state_group = facts.state
        self._block_size = facts.block_size
        self._num_kept = num_kept
        self._plan = FilePlan()
        self._ledger = Ledger(name, facts)

    def available(self, request: KvRequest, items: Sequence[Item]) -> Sequence[bool] | None:
        return self._index.available(request, items)

    def standing(self, request: KvRequest, behind: bytes, place: int) -> Mapping[bytes, int]:
        return self._index.standing(behind)

    def load(self, request: KvRequest, held: Sequence[Held]) -> None:
        self._ledger.begin_load(request.rid, held)
        self._plan.load(request.rid, held)
        groups = {item.group for item, _ in held if item.group != self._state_group}
        keys = request.block_keys(max(item.place for item, _ in held), self._block_size)
        self._plan.use(Item(key, place, None, group) for group in groups for place, key in enumerate(keys))
        self._plan.use(item for item, _ in held)

    def build_connector_meta(self) -> bytes:
        self._index.planned()
        return self._plan.take()

    def ended(self, request: KvRequest, held: Sequence[Held]) -> bool:
        """Saves what is not there; the worker half checks again before it writes."""
        fit = tail_first(first_that_fit(held, self._size, self._files))
        new = []
        for one, is_there in zip(fit, self._index.claim([one.item for one in fit]), strict=True):
            if is_there:
                self._plan.use([one.item])
            elif one.item.name not in self._plan.save:
                self._plan.save[one.item.name] = one
                new.append(one.item)
        self._num_kept += len(new)
        self._ledger.stored(new)
        return False

    def blocks_evicted(self, evicted: Sequence[Evicted]) -> None:
        """Does nothing: the blocks of ended requests are stored already."""

    def update_connector_output(self, output: Transferred) -> None:
        _, failed = self._ledger.end_loads(output)
        self._index.lost(failed)
        self._num_kept -= len(failed)
        self._ledger.removed(failed)

    def take_events(self) -> list[KvEvent]:
        """Only about blocks that this engine stored or failed to find."""
        return self._ledger.take_events()

    def tiers(self) -> tuple[TierSnapshot, ...]:
        """What this engine knows: other engines add blocks, and any worker half removes some."""
        capacity = self._size // self._files.file_bytes()
        return (self._ledger.snapshot(max(0, min(self._num_kept, capacity)), capacity, is_common=True),)

    def reset(self) -> None:
        self._ledger.forget_loads()
        self._plan.clear()

    def close(self) -> None:
        self._index.close()


class FolderIndex:
    """Asks the file system."""

    def __init__(self, files: BlockFiles) -> None:
        self._files = files
        self._seen: set[bytes] = set()  # names of items that were found recently
        self._missing: set[bytes] = set()  # of items that were not found for the plan being made
        self._states: StateIndex | None = None  # those that were found for the plan being made
        self._num_plans = 0  # since `_seen` was empty

    def available(self, request: KvRequest, items: Sequence[Item]) -> Sequence[bool] | None:
        """After the first block of the full group that is missing, nothing is looked up."""
        answer = []
        lookups = iter(range(_MAX_LOOKUPS))
        for item in items:
            has = self._has(item, lookups)
            answer.append(has)
            if not has and item.group == self._files.facts.full and not item.num:
                break
        return answer

    def standing(self, behind: bytes) -> Mapping[bytes, int]:
        if self._states is None:
            self._states = StateIndex(self._files.facts.state)
            for item in self._files.states():
                self._states.add(item)
        return self._states.behind(behind)

    def claim(self, items: Sequence[Item]) -> list[bool]:
        lookups = iter(range(_MAX_LOOKUPS))
        return [self._has(item, lookups) for item in items]

    def lost(self, items: Sequence[Item]) -> None:
        for item in items:
            self._seen.discard(item.name)

    def planned(self) -> None:
        self._num_plans += 1
        if self._num_plans >= _TRUSTED_PLANS:
            self._num_plans = 0
            self._seen.clear()
        self._missing.clear()
        self._states = None

    def close(self) -> None:
        """Does nothing: nothing is open."""

    def _has(self, item: Item, lookups: Iterator[int]) -> bool:
        """Whether the file exists, as long as there are `lookups` left."""
        name = item.name
        if name in self._seen:
            return True
        if name in self._missing or next(lookups, None) is None:
            return False
        has = self._files.has(item)
        (self._seen if has else self._missing).add(name)
        return has
