"""The tiers of a simulated engine: real core halves, and worker halves under the virtual clock.

A store is a dict. Transfers take time, and faults come from the seed: a block that cannot be read or written, or was
lost, is reported as such. A wrong block that is not reported would change the tokens.
"""

from collections.abc import Callable, Iterable, Iterator
from random import Random
from typing import NamedTuple

from fakes import FakeWorker
from msgspec import msgpack

from pagewire.engine.core.eviction import CostAware, EvictionQueue, Lfu, Lru
from pagewire.engine.core.kv_connector import CoreConnector
from pagewire.engine.kv_connector.block_files import Found
from pagewire.engine.kv_connector.chain import ChainCore, ChainWorker
from pagewire.engine.kv_connector.disk import DiskCore
from pagewire.engine.kv_connector.file_meta import FileMeta
from pagewire.engine.kv_connector.host import HostCore, HostMeta
from pagewire.ipc.messages import Transferred, bytes_to_ids, ids_to_bytes

from .oracle import Oracle
from .tiers import FreeTier, Metadata

Address = bytes | int | str
"""Where a tier keeps a block: its key, its slot or the name of its file."""

_FILE_BYTES = 100


class TierOptions(NamedTuple):
    """The tiers of an engine."""

    kinds: tuple[str, ...]  # each "free", "host" or "disk"; nearest first
    capacities: tuple[int, ...]  # blocks
    keeps_evicted: bool  # for these four see `FreeTier`
    saves_ended: bool
    delays_sends: bool
    defer_rate: float
    eviction: str
    fault_rate: float  # share of transfers in which something fails
    latency_s: float  # the most that a transfer takes
    block_ms: float  # reported cost of loading a block


class MemoryFiles:
    """The folder of `DiskCore`, over a dict."""

    file_bytes = _FILE_BYTES

    def __init__(self, store: dict[Address, bytes]) -> None:
        self._store = store

    def name(self, key: bytes, place: int) -> str:
        return f"{key.hex()}.{place}"

    def scan(self) -> Iterator[Found]:
        for i, name in enumerate(self._store):
            key, place = str(name).split(".")
            yield Found(str(name), _FILE_BYTES, i, bytes.fromhex(key), int(place))


class Tasks(NamedTuple):
    """The tasks of one tier's worker half, in one form for all kinds of tier."""

    drops: list[Address]
    saves: list[tuple[int, Address, bytes | None]]  # block, target address, its key if known
    loads: list[tuple[int, list[tuple[Address, int]]]]  # rid, (source address, block) pairs
    sends: list[tuple[int, list[tuple[int, Address, bytes | None]]]]  # ended rid, as in saves


def free_tasks(data: bytes) -> Tasks:
    """Decodes the metadata of `FreeTier`."""
    meta = msgpack.decode(data, type=Metadata)
    return Tasks(
        list(meta.dropped),
        [(block, key, key) for block, key in meta.saves],
        [(load.rid, list(zip(load.keys, load.blocks, strict=True))) for load in meta.loads],
        [(rid, [(b, key, key) for b, key in zip(blocks, keys, strict=True)]) for rid, blocks, keys in meta.sends],
    )


def host_tasks(data: bytes) -> Tasks:
    """Decodes the metadata of `HostCore`."""
    meta = msgpack.decode(data, type=HostMeta)
    saves = zip(bytes_to_ids(meta.save_blocks), bytes_to_ids(meta.save_slots), strict=True)
    return Tasks(
        [],
        [(block, slot, None) for block, slot in saves],
        [(x.rid, list(zip(bytes_to_ids(x.slots), bytes_to_ids(x.blocks), strict=True))) for x in meta.loads],
        [],
    )


def disk_tasks(data: bytes) -> Tasks:
    """Decodes the metadata of `DiskCore`."""
    meta = msgpack.decode(data, type=FileMeta)
    saves = zip(bytes_to_ids(meta.save.blocks), meta.save.files(), strict=True)
    return Tasks(
        list(meta.remove),
        [(block, f"{key.hex()}.{place}", key) for block, (key, place) in saves],
        [
            (
                x.rid,
                [
                    (f"{key.hex()}.{place}", block)
                    for (key, place), block in zip(x.columns.files(), bytes_to_ids(x.columns.blocks), strict=True)
                ],
            )
            for x in meta.loads
        ],
        [],
    )


class StoreWorker:
    """A `WorkerConnector` of one tier, which has no layers to wait for."""

    def __init__(
        self,
        decode: Callable[[bytes], Tasks],
        *,
        store: dict[Address, bytes],
        worker: FakeWorker,
        oracle: Oracle,
        options: TierOptions,
        rng: Random,
        schedule: Callable[[float, Callable[[], None]], None],
        count: Callable[[str, int], None],
    ) -> None:
        """`schedule(delay_s, call)`: the clock. `count(event, number)`: counts events."""
        self._decode = decode
        self._store = store
        self._worker = worker
        self._oracle = oracle
        self._options = options
        self._rng = rng
        self._schedule = schedule
        self._count = count
        self._metadata: Tasks | None = None
        self._loaded: set[int] = set()
        self._sent: set[int] = set()
        self._failed: dict[int, set[int]] = {}  # rid → blocks that could not be filled
        self._failed_of_named: set[int] = set()
        self._num_loaded = 0
        self.num_pending = 0

    def bind_connector_metadata(self, metadata: bytes) -> None:
        self._metadata = self._decode(metadata)

    def start_load_kv(self) -> None:
        """Blocks to save are read now. Sends and loads happen later."""
        tasks, self._metadata = self._metadata, None
        assert tasks is not None
        for address in tasks.drops:
            self._store.pop(address, None)
        self._save(tasks.saves)
        for rid, pairs in tasks.loads:
            self._schedule(0.0, lambda pairs=pairs: self._overwrite(pairs))
            self._begin(lambda rid=rid, pairs=pairs: self._load(rid, pairs))
        for rid, saves in tasks.sends:
            self._begin(lambda rid=rid, saves=saves: self._send(rid, saves))

    def get_finished(self) -> tuple[set[int], set[int]]:
        sent, loaded = self._sent, self._loaded
        self._failed_of_named = set().union(*(self._failed.pop(rid, ()) for rid in loaded))
        self._sent, self._loaded = set(), set()
        self.num_pending -= len(sent) + len(loaded)
        return sent, loaded

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._failed_of_named

    def take_load_cost(self) -> tuple[int, float]:
        num, self._num_loaded = self._num_loaded, 0
        return num, num * self._options.block_ms

    def _begin(self, call: Callable[[], None]) -> None:
        self.num_pending += 1
        self._schedule(self._rng.random() * self._options.latency_s, call)

    def _fails(self) -> bool:
        return self._options.fault_rate > 0 and self._rng.random() < self._options.fault_rate

    def _save(self, saves: Iterable[tuple[int, Address, bytes | None]]) -> None:
        for block, address, key in saves:
            content = self._worker.read_block(block)
            if key is not None:
                self._oracle.expect(key, content)
            self._store.pop(address, None)
            if not self._fails():
                self._store[address] = content
                self._count("stored blocks", 1)

    def _overwrite(self, pairs: list[tuple[Address, int]]) -> None:
        """During a load, a block may hold any bytes."""
        for _, block in pairs:
            self._worker.write_block(block, self._rng.randbytes(self._worker.block_bytes))

    def _load(self, rid: int, pairs: list[tuple[Address, int]]) -> None:
        fails = self._fails()
        for address, block in pairs:
            content = self._store.get(address)
            if content is None or (fails and self._rng.random() < 0.5):
                self._failed.setdefault(rid, set()).add(block)
            else:
                self._worker.write_block(block, content)
                self._num_loaded += 1
        self._count("loads", 1)
        self._count("failed loads", rid in self._failed)
        self._loaded.add(rid)

    def _send(self, rid: int, saves: list[tuple[int, Address, bytes | None]]) -> None:
        self._save(saves)
        self._sent.add(rid)
        self._count("sends", 1)


def core_half(options: TierOptions, stores: list[dict[Address, bytes]], block_size: int, rng: Random) -> CoreConnector:
    """The core half of a new engine over these stores."""
    parts: list[CoreConnector] = []
    for kind, capacity, store in zip(options.kinds, options.capacities, stores, strict=True):
        ranking = {"lru": Lru, "lfu": Lfu, "cost": CostAware}[options.eviction]()
        if kind == "host":
            parts.append(HostCore(num_slots=capacity, block_size=block_size, queue=EvictionQueue(ranking)))
        elif kind == "disk":
            files = MemoryFiles(store)
            size = capacity * _FILE_BYTES
            parts.append(DiskCore(files=files, size=size, block_size=block_size, queue=EvictionQueue(ranking)))  # type: ignore[arg-type]
        else:
            parts.append(
                FreeTier(
                    capacity=capacity,
                    keeps_evicted=options.keeps_evicted,
                    saves_ended=options.saves_ended,
                    delays_sends=options.delays_sends,
                    defer_rate=options.defer_rate,
                    block_size=block_size,
                    rng=rng,
                )
            )
    return parts[0] if len(parts) == 1 else ChainCore(parts, block_size=block_size)


def keys_of(connector: CoreConnector) -> set[tuple[str, bytes]]:
    """(tier, key) of all blocks in the connector's index."""
    if isinstance(connector, ChainCore):
        return set().union(*map(keys_of, connector._parts))
    if isinstance(connector, HostCore):
        return {("host", key) for key in connector._slots}
    if isinstance(connector, DiskCore):
        return {("disk", key) for key in sorted(connector._queue.keys())}
    assert isinstance(connector, FreeTier)
    return {("free", key) for key in connector.keys}


class WorkerHalf:
    """All tiers of one worker, as the worker's process drives them."""

    def __init__(
        self,
        options: TierOptions,
        stores: list[dict[Address, bytes]],
        *,
        worker: FakeWorker,
        oracle: Oracle,
        rng: Random,
        schedule: Callable[[float, Callable[[], None]], None],
        count: Callable[[str, int], None],
    ) -> None:
        decoders = {"free": free_tasks, "host": host_tasks, "disk": disk_tasks}
        parts = [
            StoreWorker(
                decoders[kind],
                store=store,
                worker=worker,
                oracle=oracle,
                options=options,
                rng=rng,
                schedule=schedule,
                count=count,
            )
            for kind, store in zip(options.kinds, stores, strict=True)
        ]
        self._connector = parts[0] if len(parts) == 1 else ChainWorker(parts)  # type: ignore[arg-type]

    def carry_out(self, metadata: bytes) -> None:
        """Runs the metadata of a plan, before the plan's pass."""
        self._connector.bind_connector_metadata(metadata)
        self._connector.start_load_kv()

    def take_finished(self) -> Transferred | None:
        """The transfers that have finished since the last call."""
        sent, loaded = self._connector.get_finished()
        failed = self._connector.get_block_ids_with_load_errors()
        if not sent and not loaded:
            return None
        num, ms = self._connector.take_load_cost()
        return Transferred(tuple(sorted(loaded)), ids_to_bytes(sorted(failed)), tuple(sorted(sent)), num, ms)
