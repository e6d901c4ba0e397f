"""The tiers of a simulated engine: real core halves, and worker halves whose clock is virtual.

What is stored is a dict, transfers take their time, and faults come from the seed: a block cannot be read or written,
or was lost, and is reported like that. One that were wrong without a word would show in the tokens.
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
    """What kind of tiers an engine has."""

    kinds: tuple[str, ...]  # of free, host and disk, nearest first
    capacities: tuple[int, ...]  # blocks
    keeps_evicted: bool  # for these four see `FreeTier`
    saves_ended: bool
    delays_sends: bool
    hesitation: float
    eviction: str
    fault_rate: float  # transfers in which something fails
    latency_s: float  # of a transfer, at most
    block_ms: float  # what loading a block is said to cost


class MemoryFiles:
    """What `DiskCore` asks of its folder, over a dict."""

    file_bytes = _FILE_BYTES

    def __init__(self, store: dict[Address, bytes]) -> None:
        self._store = store

    def name(self, key: bytes, place: int) -> str:
        return f"{key.hex()}.{place}"

    def scan(self) -> Iterator[Found]:
        for i, name in enumerate(self._store):
            key, place = str(name).split(".")
            yield Found(str(name), _FILE_BYTES, i, bytes.fromhex(key), int(place))


class Orders(NamedTuple):
    """What a part of the worker half is told, whatever its core half calls it."""

    drops: list[Address]
    saves: list[tuple[int, Address, bytes | None]]  # block, where to, its key if that is known
    loads: list[tuple[int, list[tuple[Address, int]]]]  # rid, from where to which blocks
    sends: list[tuple[int, list[tuple[int, Address, bytes | None]]]]  # ended rid, as in saves


def free_orders(data: bytes) -> Orders:
    """Of `FreeTier`."""
    meta = msgpack.decode(data, type=Metadata)
    return Orders(
        list(meta.dropped),
        [(block, key, key) for block, key in meta.saves],
        [(load.rid, list(zip(load.keys, load.blocks, strict=True))) for load in meta.loads],
        [(rid, [(b, key, key) for b, key in zip(blocks, keys, strict=True)]) for rid, blocks, keys in meta.sends],
    )


def host_orders(data: bytes) -> Orders:
    """Of `HostCore`."""
    meta = msgpack.decode(data, type=HostMeta)
    saves = zip(bytes_to_ids(meta.save_blocks), bytes_to_ids(meta.save_slots), strict=True)
    return Orders(
        [],
        [(block, slot, None) for block, slot in saves],
        [(x.rid, list(zip(bytes_to_ids(x.slots), bytes_to_ids(x.blocks), strict=True))) for x in meta.loads],
        [],
    )


def disk_orders(data: bytes) -> Orders:
    """Of `DiskCore`."""
    meta = msgpack.decode(data, type=FileMeta)
    saves = zip(bytes_to_ids(meta.save.blocks), meta.save.files(), strict=True)
    return Orders(
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
    """The worker half of one tier. See `WorkerConnector`; it has no layers to wait for."""

    def __init__(
        self,
        orders: Callable[[bytes], Orders],
        *,
        store: dict[Address, bytes],
        worker: FakeWorker,
        oracle: Oracle,
        options: TierOptions,
        rng: Random,
        schedule: Callable[[float, Callable[[], None]], None],
        seen: Callable[[str, int], None],
    ) -> None:
        """`schedule(delay_s, call)`: the clock. `seen(what, how often)`: is told what happens."""
        self._orders = orders
        self._store = store
        self._worker = worker
        self._oracle = oracle
        self._options = options
        self._rng = rng
        self._schedule = schedule
        self._seen = seen
        self._bound: Orders | None = None
        self._loaded: set[int] = set()
        self._sent: set[int] = set()
        self._failed: dict[int, set[int]] = {}  # rid → blocks that could not be filled
        self._failed_of_named: set[int] = set()
        self._num_loaded = 0
        self.num_pending = 0

    def bind_connector_metadata(self, metadata: bytes) -> None:
        self._bound = self._orders(metadata)

    def start_load_kv(self) -> None:
        """See `WorkerConnector`. Blocks to be kept are read now; sends and loads take their time."""
        orders, self._bound = self._bound, None
        assert orders is not None
        for address in orders.drops:
            self._store.pop(address, None)
        self._save(orders.saves)
        for rid, pairs in orders.loads:
            self._schedule(0.0, lambda pairs=pairs: self._scribble(pairs))
            self._begin(lambda rid=rid, pairs=pairs: self._load(rid, pairs))
        for rid, saves in orders.sends:
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

    def _goes_wrong(self) -> bool:
        return self._options.fault_rate > 0 and self._rng.random() < self._options.fault_rate

    def _save(self, saves: Iterable[tuple[int, Address, bytes | None]]) -> None:
        for block, address, key in saves:
            content = self._worker.read_block(block)
            if key is not None:
                self._oracle.expect(key, content)
            self._store.pop(address, None)
            if not self._goes_wrong():
                self._store[address] = content
                self._seen("stored blocks", 1)

    def _scribble(self, pairs: list[tuple[Address, int]]) -> None:
        """While it is being loaded, a block holds anything."""
        for _, block in pairs:
            self._worker.write_block(block, self._rng.randbytes(self._worker.block_bytes))

    def _load(self, rid: int, pairs: list[tuple[Address, int]]) -> None:
        wrong = self._goes_wrong()
        for address, block in pairs:
            content = self._store.get(address)
            if content is None or (wrong and self._rng.random() < 0.5):
                self._failed.setdefault(rid, set()).add(block)
            else:
                self._worker.write_block(block, content)
                self._num_loaded += 1
        self._seen("loads", 1)
        self._seen("loads that failed", rid in self._failed)
        self._loaded.add(rid)

    def _send(self, rid: int, saves: list[tuple[int, Address, bytes | None]]) -> None:
        self._save(saves)
        self._sent.add(rid)
        self._seen("sends", 1)


def core_half(options: TierOptions, stores: list[dict[Address, bytes]], block_size: int, rng: Random) -> CoreConnector:
    """Of an engine that starts over what is stored."""
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
                    hesitation=options.hesitation,
                    block_size=block_size,
                    rng=rng,
                )
            )
    return parts[0] if len(parts) == 1 else ChainCore(parts, block_size=block_size)


def keys_of(connector: CoreConnector) -> set[tuple[str, bytes]]:
    """(tier, key) of all that it believes to have."""
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
        seen: Callable[[str, int], None],
    ) -> None:
        decoders = {"free": free_orders, "host": host_orders, "disk": disk_orders}
        parts = [
            StoreWorker(
                decoders[kind],
                store=store,
                worker=worker,
                oracle=oracle,
                options=options,
                rng=rng,
                schedule=schedule,
                seen=seen,
            )
            for kind, store in zip(options.kinds, stores, strict=True)
        ]
        self._connector = parts[0] if len(parts) == 1 else ChainWorker(parts)  # type: ignore[arg-type]

    def carry_out(self, metadata: bytes) -> None:
        """What a plan tells it, before the plan's pass."""
        self._connector.bind_connector_metadata(metadata)
        self._connector.start_load_kv()

    def take_finished(self) -> Transferred | None:
        """What has come to its end since the last call."""
        sent, loaded = self._connector.get_finished()
        failed = self._connector.get_block_ids_with_load_errors()
        if not sent and not loaded:
            return None
        num, ms = self._connector.take_load_cost()
        return Transferred(tuple(sorted(loaded)), ids_to_bytes(sorted(failed)), tuple(sorted(sent)), num, ms)
