"""The shared tier: a folder of blocks that several engines of one machine read and write, for example in /dev/shm.

This is the core half. It asks the file system which blocks exist, so every engine finds what any of them has stored.
A block that was found may be removed before it is read; the request then computes it.
"""

from collections.abc import Iterator, Mapping, Sequence

from ...ipc.messages import TierSnapshot, Transferred
from ..core.kv_connector import Evicted, Held, Item, KvEvent, KvRequest, TierConnector
from .base import ConnectorFacts, Options, WorkerConnector
from .block_files import BlockFiles, open_folder
from .disk import first_that_fit
from .file_meta import FilePlan
from .ledger import Ledger, tail_first
from .options import check_names, size_of
from .states import StateIndex

_MAX_LOOKUPS = 4096  # limit of blocks to look up for one request at a time
_TRUSTED_PLANS = 8  # plans for which a block that was found is assumed to exist still


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
        return SharedCore(files=files, size=size)

    @staticmethod
    def worker(options: Options, facts: ConnectorFacts) -> WorkerConnector:
        from .file_worker import FileWorker  # needs torch
        from .room import SharedRoom

        SharedConnector.check(options)
        files, size = open_folder("shared", options, facts)
        return FileWorker(name="shared", files=files, facts=facts, room=SharedRoom(files, size), overwrite=False)


class SharedCore:
    def __init__(self, *, files: BlockFiles, size: int) -> None:
        self._files = files
        self._size = size
        self._block_size = files.facts.block_size
        self._seen: set[bytes] = set()  # names of items that were found recently
        self._missing: set[bytes] = set()  # of items that were not found for the plan being made
        self._states: StateIndex | None = None  # those that were found for the plan being made
        self._num_plans = 0  # since `_seen` was empty
        self._num_kept = sum(found.item is not None for found in files.scan())
        self._plan = FilePlan()
        self._ledger = Ledger("shared", files.facts)

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

    def standing(self, request: KvRequest, behind: bytes, place: int) -> Mapping[bytes, int]:
        if self._states is None:
            self._states = StateIndex(self._files.facts.state)
            for item in self._files.states():
                self._states.add(item)
        return self._states.behind(behind)

    def load(self, request: KvRequest, held: Sequence[Held]) -> None:
        self._ledger.begin_load(request.rid, held)
        self._plan.load(request.rid, held)
        groups = {item.group for item, _ in held if item.group != self._files.facts.state}
        keys = request.block_keys(max(item.place for item, _ in held), self._block_size)
        self._plan.use(Item(key, place, None, group) for group in groups for place, key in enumerate(keys))
        self._plan.use(item for item, _ in held)

    def build_connector_meta(self) -> bytes:
        self._num_plans += 1
        if self._num_plans >= _TRUSTED_PLANS:
            self._num_plans = 0
            self._seen.clear()
        self._missing.clear()
        self._states = None
        return self._plan.take()

    def ended(self, request: KvRequest, held: Sequence[Held]) -> bool:
        """Saves what is not there; the worker half checks again before it writes."""
        lookups = iter(range(_MAX_LOOKUPS))
        new = []
        for one in tail_first(first_that_fit(held, self._size, self._files)):
            if self._has(one.item, lookups):
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
        for item in failed:
            self._seen.discard(item.name)
        self._num_kept -= len(failed)
        self._ledger.removed(failed)

    def take_events(self) -> list[KvEvent]:
        """Only about blocks that this engine stored or failed to find."""
        return self._ledger.take_events()

    def tiers(self) -> tuple[TierSnapshot, ...]:
        """As far as this engine knows: other engines add blocks, and any worker half removes some."""
        capacity = self._size // self._files.file_bytes()
        return (self._ledger.snapshot(max(0, min(self._num_kept, capacity)), capacity),)

    def reset(self) -> None:
        self._ledger.forget_loads()
        self._plan.clear()

    def close(self) -> None:
        pass

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
