"""An engine reduced to what a KV connector uses: a pool, a cache with block contents derived from keys, both halves."""

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import shake_128
from typing import Any

import torch
from torch import Tensor
from waiting import SLOW_DISK_S, until

from pagewire.engine.attention.kv_cache import KvCache, KvShape
from pagewire.engine.core.block_hash import block_key, root_key
from pagewire.engine.core.block_pool import BlockPool
from pagewire.engine.core.kv_connector import Held, Item, KvRequest, TierConnector
from pagewire.engine.kv_connector.base import ConnectorFacts, WorkerConnector
from pagewire.engine.kv_connector.block_copy import BlockCopier
from pagewire.engine.kv_connector.block_writer import BlockWriter
from pagewire.engine.kv_connector.chain import ChainWorker
from pagewire.engine.kv_connector.file_worker import FileWorker
from pagewire.engine.kv_connector.registry import core_connector, worker_connector
from pagewire.ipc.messages import Transferred, ids_to_bytes

SHAPE = KvShape.uniform(num_layers=3, kv_heads=2, head_dim=4, dtype=torch.bfloat16)
SIZE = 4  # positions of a block
BLOCK_BYTES = SHAPE.groups(SIZE).page_bytes
FILE_BYTES = BLOCK_BYTES + 80  # with its header
FACTS = ConnectorFacts(block_size=SIZE, block_bytes=BLOCK_BYTES, model_key=b"model".ljust(32))
DEADLINE_S = 60.0


def content(key: bytes) -> Tensor:
    """The expected bytes of the block with this key."""
    return torch.frombuffer(bytearray(shake_128(key).digest(BLOCK_BYTES)), dtype=torch.uint8)


class Asked:
    """A core half of a one-group model, called with the names and meanings of `CoreConnector`."""

    def __init__(self, core: TierConnector) -> None:
        self.core = core

    def __getattr__(self, name: str) -> Any:
        return getattr(self.core, name)

    def get_num_new_matched_tokens(self, request: KvRequest, num_computed_tokens: int) -> tuple[int | None, bool]:
        first = num_computed_tokens // SIZE
        keys = request.block_keys((len(request.ids) - 1) // SIZE, SIZE)
        items = [Item(key, i, keys[i - 1] if i else None) for i, key in enumerate(keys)][first:]
        answer = self.core.available(request, items)
        if answer is None:
            return None, True
        num = next((i for i, has in enumerate(answer) if not has), len(answer)) * SIZE
        return num, num > 0

    def update_state_after_alloc(self, request: KvRequest, block_ids: Sequence[int], num_external_tokens: int) -> None:
        first = len(block_ids) - num_external_tokens // SIZE
        self.core.load(request, held(request, block_ids)[first:])

    def request_finished(self, request: KvRequest, block_ids: Sequence[int]) -> bool:
        return self.core.ended(request, held(request, block_ids[: min(request.num_computed, len(request.ids)) // SIZE]))


def held(request: KvRequest, block_ids: Sequence[int]) -> list[Held]:
    """A request's first blocks, all of them full."""
    keys = request.block_keys(len(block_ids), SIZE)
    return [
        Held(Item(key, i, keys[i - 1] if i else None), (block,))
        for i, (key, block) in enumerate(zip(keys, block_ids, strict=True))
    ]


@dataclass(eq=False)
class Running:
    rid: int
    ids: "array[int]"
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    root: bytes = root_key(b"model", b"")
    awaits_kv: bool = False
    kv_peer: str = ""
    keeps_before_last: bool = False

    @property
    def num_prompt(self) -> int:
        return len(self.ids)

    def block_keys(self, num: int, block_size: int) -> list[bytes]:
        assert num * block_size <= len(self.ids), "keys of full blocks only"
        while len(self.keys) < num:
            start = len(self.keys) * block_size
            parent = self.keys[-1] if self.keys else root_key(b"model", b"")
            self.keys.append(block_key(parent, self.ids[start : start + block_size].tobytes()))
        return self.keys[:num]

    def partial_keys(self, num_full: int, num: int, block_size: int) -> list[bytes]:
        parent = self.block_keys(num_full, block_size)[-1] if num_full else self.root
        start = num_full * block_size
        return [block_key(parent, self.ids[start : start + i].tobytes()) for i in range(1, num + 1)]


def sequence(rid: int, *parts: tuple[int, int]) -> Running:
    """parts: (seed, number of ids). Equal leading parts are equal prefixes."""
    ids = array("i")
    for seed, num in parts:
        rng = random.Random(seed)
        ids.extend(rng.randrange(1000) for _ in range(num))
    return Running(rid, ids)


def wait_until_written(worker: WorkerConnector) -> None:
    """Waits until the threads that write have done all their jobs."""
    parts = worker._parts if isinstance(worker, ChainWorker) else (worker,)
    writers = [part._writer for part in parts if isinstance(part, FileWorker)]

    def is_idle(writer: BlockWriter) -> bool:
        """A job that is under way is not in `_jobs`, and only those that write are in `_num_bytes`."""
        return not writer._jobs and bool(writer._condition._waiters)  # type: ignore[attr-defined]  # of the stdlib

    until(lambda: all(map(is_idle, writers)), "every block is written", SLOW_DISK_S)


class Instance:
    """Makes the same calls as the scheduler and the runner, in the same order."""

    def __init__(self, *specs: str, num_blocks: int = 24, facts: ConnectorFacts = FACTS) -> None:
        core, worker = core_connector(specs, facts), worker_connector(specs, facts)
        assert core is not None and worker is not None
        self.core = Asked(core)
        self.worker: WorkerConnector = worker
        self.cache = KvCache(shape=SHAPE, num_pages=num_blocks, block_size=SIZE, device=torch.device("cpu"))
        for keys, values in self.cache.pages:
            keys.fill_(-1.0)
            values.fill_(-1.0)
        self.worker.register_kv_caches(self.cache)
        self.pool = BlockPool(num_pages=num_blocks)
        self.copier = BlockCopier(self.cache)
        self.loading: dict[int, tuple[Running, int]] = {}  # rid → request, its first block that is being loaded
        self.to_compute: list[Running] = []  # with the next plan
        self.num_loaded = 0  # blocks
        self.failed: list[bytes] = []  # keys of blocks that were not loaded

    def bytes_of(self, blocks: Sequence[int]) -> Tensor:
        """uint8 [len(blocks), BLOCK_BYTES]."""
        return torch.cat([torch.empty((0, BLOCK_BYTES), dtype=torch.uint8), *self.copier.read(blocks)])

    def admit(self, request: Running) -> bool:
        """Allocates blocks, and starts a load or lets the next plan compute the request. False: too few free blocks."""
        full = (len(request.ids) - 1) // SIZE
        keys = request.block_keys(full, SIZE)
        hits = self.pool.match(keys)
        num = self.num_matched(request, len(hits) * SIZE)
        assert num % SIZE == 0 and len(hits) * SIZE + num < len(request.ids)
        total = -(-len(request.ids) // SIZE)
        if total - len(hits) + self.pool.num_idle(hits) > self.pool.num_free:
            return False
        self.pool.hold(hits)
        request.blocks = [*hits, *self.pool.allocate(num // SIZE)]
        request.num_computed = len(hits) * SIZE
        if num:
            self.loading[request.rid] = (request, len(hits))
            self.core.update_state_after_alloc(request, request.blocks, num)
        else:
            self.to_compute.append(request)
        return True

    def num_matched(self, request: Running, num_computed: int = 0) -> int:
        """What the core half could load, once it knows."""

        def ask() -> list[int]:
            num, _ = self.core.get_num_new_matched_tokens(request, num_computed)
            return [] if num is None else [num]

        return until(ask, "the core half knows what it has", DEADLINE_S)[0]

    def end(self, request: Running) -> None:
        """Ends the request and frees its blocks."""
        assert not self.core.request_finished(request, request.blocks)
        self.pool.release(request.blocks)

    def preempt(self, request: Running) -> None:
        """Frees the blocks without a call to the connector."""
        self.pool.release(request.blocks)

    def step(self) -> list[Running]:
        """Makes a plan and runs it. Returns the requests that it computed."""
        computed, self.to_compute = self.to_compute, []
        for request in computed:
            request.blocks += self.pool.allocate(-(-len(request.ids) // SIZE) - len(request.blocks))
        evicted, self.pool.evicted = self.pool.evicted, []
        if evicted:
            self.core.blocks_evicted(evicted)
        metadata = self.core.build_connector_meta()
        if metadata:
            self.worker.bind_connector_metadata(metadata)
            self.worker.start_load_kv()
        for request in computed:
            self._compute(request)
        if metadata:
            self.worker.wait_for_save()
        self.take()
        return computed

    def take(self) -> None:
        """Handles the reports of the worker half."""
        sent, loaded = self.worker.get_finished()
        assert not sent
        failed = self.worker.get_block_ids_with_load_errors()
        for rid in loaded:
            request, first = self.loading.pop(rid)
            blocks = request.blocks[first:]
            keys = request.block_keys(first + len(blocks), SIZE)[first:]
            good = [(block, key) for block, key in zip(blocks, keys, strict=True) if block not in failed]
            for (block, key), row in zip(good, self.bytes_of([block for block, _ in good]), strict=True):
                assert torch.equal(row, content(key)), f"rid {rid}: block {block} holds something else"
            self.num_loaded += len(good)
            self.failed += [key for block, key in zip(blocks, keys, strict=True) if block in failed]
            num_good = next((i for i, block in enumerate(blocks) if block in failed), len(blocks))
            request.num_computed = (first + num_good) * SIZE
            self.to_compute.append(request)
        if loaded:
            num, ms = self.worker.take_load_cost()
            self.core.update_connector_output(Transferred(tuple(loaded), ids_to_bytes(sorted(failed)), (), num, ms))

    def settle(self) -> None:
        """Waits for every load."""

        def is_settled() -> bool:
            self.take()
            return not self.worker.num_pending

        if self.worker.num_pending:
            until(is_settled, "every load ends", DEADLINE_S)

    def wait_until_written(self) -> None:
        """Waits until the threads that write have done all their jobs."""
        wait_until_written(self.worker)

    def run(self, request: Running) -> Running:
        """Admits and computes a request."""
        assert self.admit(request)
        self.step()
        self.settle()
        self.step()
        assert request.num_computed == len(request.ids)
        return request

    def serve(self, request: Running) -> int:
        """Runs and ends a request, and makes one more plan. Returns how many blocks were loaded."""
        before = self.num_loaded
        self.end(self.run(request))
        self.step()
        return self.num_loaded - before

    def fill_device(self, rid: int) -> None:
        """Evicts all idle blocks of the device."""
        self.serve(self._filler(rid))

    def clear_device(self, rid: int) -> None:
        """Evicts all idle blocks of the device. The request that takes them is preempted, so no file keeps its own."""
        self.preempt(self.run(self._filler(rid)))
        self.step()

    def close(self) -> None:
        self.core.close()
        self.worker.close()

    def _filler(self, rid: int) -> Running:
        return sequence(rid, (rid, self.pool.num_pages * SIZE))

    def _compute(self, request: Running) -> None:
        full = len(request.ids) // SIZE
        keys = request.block_keys(full, SIZE)
        for place in range(request.num_computed // SIZE, full):
            self.copier.write([request.blocks[place]], content(keys[place])[None])
        request.num_computed = len(request.ids)
        for place, key in enumerate(keys):
            self.pool.register(request.blocks[place], key, place)
