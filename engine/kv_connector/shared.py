"""The shared tier: a folder of blocks that several engines of one machine read and write, for example in /dev/shm.

This is the core half. It asks the file system which blocks exist, so every engine finds what any of them has stored.
A block that was found may be removed before it is read; the request then computes it.
"""

from collections.abc import Sequence

from ...ipc.messages import TierSnapshot, Transferred
from ..core.kv_connector import CoreConnector, Evicted, KvEvent, KvRequest
from .base import ConnectorFacts, Options, WorkerConnector
from .block_files import BlockFiles, open_folder
from .file_meta import FilePlan
from .ledger import Ledger, num_matched
from .options import check_names, size_of

_MAX_LOOKUPS = 4096  # limit of blocks to look up for one request at a time
_TRUSTED_PLANS = 8  # plans for which a block that was found is assumed to exist still


class SharedConnector:
    """`shared,path=DIR,size=8G`."""

    @staticmethod
    def check(options: Options) -> None:
        check_names("shared", options, required=["path", "size"])
        size_of("shared", options)

    @staticmethod
    def core(options: Options, facts: ConnectorFacts) -> CoreConnector:
        SharedConnector.check(options)
        files, size = open_folder("shared", options, facts)
        return SharedCore(files=files, size=size, block_size=facts.block_size)

    @staticmethod
    def worker(options: Options, facts: ConnectorFacts) -> WorkerConnector:
        from .file_worker import FileWorker  # needs torch
        from .room import SharedRoom

        SharedConnector.check(options)
        files, size = open_folder("shared", options, facts)
        return FileWorker(name="shared", files=files, facts=facts, room=SharedRoom(files, size), overwrite=False)


class SharedCore:
    def __init__(self, *, files: BlockFiles, size: int, block_size: int) -> None:
        self._files = files
        self._capacity = size // files.file_bytes
        self._block_size = block_size
        self._seen: set[bytes] = set()  # blocks that were found recently
        self._num_plans = 0  # since `_seen` was empty
        self._num_kept = sum(found.key is not None for found in files.scan())
        self._plan = FilePlan()
        self._ledger = Ledger("shared", block_size)

    def get_num_new_matched_tokens(self, request: KvRequest, num_computed_tokens: int) -> tuple[int | None, bool]:
        lookups = iter(range(_MAX_LOOKUPS))

        def has(key: bytes, place: int) -> bool:
            return key in self._seen or (next(lookups, None) is not None and self._has(key, place))

        num = num_matched(request, num_computed_tokens, self._block_size, has)
        return num * self._block_size, num > 0

    def update_state_after_alloc(self, request: KvRequest, block_ids: Sequence[int], num_external_tokens: int) -> None:
        num = num_external_tokens // self._block_size
        keys = request.block_keys(len(block_ids), self._block_size)
        self._ledger.begin_load(request.rid, block_ids[-num:], keys[-num:])
        self._plan.load(request.rid, block_ids[-num:], keys[-num:], len(keys) - num)
        self._plan.used.update(zip(keys, range(len(keys)), strict=True))

    def build_connector_meta(self) -> bytes:
        self._num_plans += 1
        if self._num_plans >= _TRUSTED_PLANS:
            self._num_plans = 0
            self._seen.clear()
        return self._plan.take()

    def request_finished(self, request: KvRequest, block_ids: Sequence[int]) -> bool:
        """Saves the blocks that are not there; the worker half checks again before it writes."""
        keys = request.block_keys(request.num_computed // self._block_size, self._block_size)[: self._capacity]
        there = 0
        while there < min(len(keys), _MAX_LOOKUPS) and (keys[there] in self._seen or self._has(keys[there], there)):
            self._plan.used[keys[there]] = there
            there += 1
        new = [i for i in range(len(keys) - 1, there - 1, -1) if keys[i] not in self._plan.save]
        for i in new:  # the tail first, so that it is the oldest and is evicted first
            self._plan.save[keys[i]] = (block_ids[i], i)
        self._num_kept += len(new)
        self._ledger.stored([keys[i] for i in new])
        return False

    def blocks_evicted(self, evicted: Sequence[Evicted]) -> None:
        """Does nothing: the blocks of ended requests are stored already."""

    def update_connector_output(self, output: Transferred) -> None:
        _, failed = self._ledger.end_loads(output)
        self._seen.difference_update(failed)
        self._num_kept -= len(failed)
        self._ledger.removed(failed)

    def take_events(self) -> list[KvEvent]:
        """Only about blocks that this engine stored or failed to find."""
        return self._ledger.take_events()

    def tiers(self) -> tuple[TierSnapshot, ...]:
        """As far as this engine knows: other engines add blocks, and any worker half removes some."""
        return (self._ledger.snapshot(max(0, min(self._num_kept, self._capacity)), self._capacity),)

    def reset(self) -> None:
        self._ledger.forget_loads()
        self._plan.clear()

    def close(self) -> None:
        pass

    def _has(self, key: bytes, place: int) -> bool:
        if not self._files.has(key, place):
            return False
        self._seen.add(key)
        return True
