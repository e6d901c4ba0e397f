"""The tiers of a simulated engine: real core halves, and worker halves under the virtual clock.

A store is a dict. Transfers take time, and faults come from the seed: a block that cannot be read or written, or was
lost, is reported as such. A wrong block that is not reported would change the tokens.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from random import Random
from typing import NamedTuple

from fakes import FakeWorker
from msgspec import msgpack

from pagewire.engine.core.eviction import CostAware, EvictionQueue, Lfu, Lru
from pagewire.engine.core.groups import Groups
from pagewire.engine.core.kv_connector import Held, Item, TierConnector
from pagewire.engine.kv_connector.base import ConnectorFacts
from pagewire.engine.kv_connector.block_storage import Found
from pagewire.engine.kv_connector.chain import ChainCore, ChainWorker
from pagewire.engine.kv_connector.disk import DiskCore
from pagewire.engine.kv_connector.file_meta import BlockColumns, FileMeta
from pagewire.engine.kv_connector.host import HostCore, HostMeta
from pagewire.ipc.messages import Transferred, bytes_to_ids, ids_to_bytes

from .oracle import Oracle
from .tiers import FreeTier, Metadata

Address = bytes | int | str
"""Where a tier keeps a block: its key, its slot or the name of its file."""

_PAGE_BYTES = 96
MAX_PAGES = 6  # of an item


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
    """The folder of `DiskCore`, over a dict with an entry for each page of a file."""

    def __init__(self, store: dict[Address, bytes], facts: ConnectorFacts) -> None:
        self._store = store
        self.facts = facts

    def file_bytes(self, group: int = 0) -> int:
        return _PAGE_BYTES * self.facts.pages_of(group)

    def name(self, item: Item) -> str:
        parent = "" if item.parent is None else item.parent.hex()
        return f"{item.key.hex()}.{item.place}.{item.group}.{item.num}.{parent}"

    def scan(self) -> Iterator[Found]:
        """Files of which a page is missing have another size."""
        names = Counter(str(address).partition("#")[0] for address in self._store)
        for i, (name, num_pages) in enumerate(names.items()):
            key, place, group, num, parent = name.split(".")
            item = Item(bytes.fromhex(key), int(place), bytes.fromhex(parent) or None, int(group), int(num))
            is_whole = num_pages == self.facts.pages_of(item.group)
            yield Found(name, _PAGE_BYTES * num_pages, i, item if is_whole else None)


class Copy(NamedTuple):
    """An item, or a part of one."""

    pages: tuple[int, ...]  # on the device
    addresses: tuple[Address, ...]  # of each in the tier
    item: Item | None  # if known


class Tasks(NamedTuple):
    """The tasks of one tier's worker half, in one form for all kinds of tier."""

    drops: list[Address]
    saves: list[Copy]
    loads: list[tuple[int, list[Copy]]]  # with their rids
    sends: list[tuple[int, list[Copy]]]  # with the rids of ended requests


def copy_of(held: Held, address: str) -> Copy:
    """The address of a page is the item's, and its number."""
    return Copy(held.pages, tuple(f"{address}#{i}" for i in range(len(held.pages))), held.item)


def free_tasks(data: bytes, facts: ConnectorFacts) -> Tasks:
    """Decodes the metadata of `FreeTier`."""
    meta = msgpack.decode(data, type=Metadata)

    def copies(columns: BlockColumns) -> list[Copy]:
        return [copy_of(held, held.item.name.hex()) for held in columns.held(facts)]

    drops = [f"{name.hex()}#{i}" for name, num in meta.dropped for i in range(num)]
    loads, sends = ([(rid, copies(part)) for rid, part in parts] for parts in (meta.loads, meta.sends))
    return Tasks(list(drops), copies(meta.saves), loads, sends)


def host_tasks(data: bytes, facts: ConnectorFacts) -> Tasks:
    """Decodes the metadata of `HostCore`, which names pages and not items."""
    meta = msgpack.decode(data, type=HostMeta)

    def copies(slots: bytes, pages: bytes) -> list[Copy]:
        pairs = zip(bytes_to_ids(slots), bytes_to_ids(pages), strict=True)
        return [Copy((page,), (slot,), None) for slot, page in pairs]

    loads = [(load.rid, copies(load.slots, load.blocks)) for load in meta.loads]
    return Tasks([], copies(meta.save_slots, meta.save_blocks), loads, [])


def disk_tasks(data: bytes, facts: ConnectorFacts) -> Tasks:
    """Decodes the metadata of `DiskCore`."""
    meta = msgpack.decode(data, type=FileMeta)
    files = MemoryFiles({}, facts)

    def copies(columns: BlockColumns) -> list[Copy]:
        return [copy_of(held, files.name(held.item)) for held in columns.held(facts)]

    drops = [f"{name}#{i}" for name in meta.remove for i in range(MAX_PAGES)]
    return Tasks(list(drops), copies(meta.save), [(load.rid, copies(load.columns)) for load in meta.loads], [])


class StoreWorker:
    """A `WorkerConnector` of one tier, which has no layers to wait for."""

    def __init__(
        self,
        decode: Callable[[bytes, ConnectorFacts], Tasks],
        *,
        facts: ConnectorFacts,
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
        self._facts = facts
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
        self._metadata = self._decode(metadata, self._facts)

    def start_load_kv(self) -> None:
        """Blocks to save are read now. Sends and loads happen later."""
        tasks, self._metadata = self._metadata, None
        assert tasks is not None
        for address in tasks.drops:
            self._store.pop(address, None)
        self._save(tasks.saves)
        for rid, copies in tasks.loads:
            self._schedule(0.0, lambda copies=copies: self._overwrite(copies))
            self._begin(lambda rid=rid, copies=copies: self._load(rid, copies))
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

    def _save(self, saves: Iterable[Copy]) -> None:
        for pages, addresses, item in saves:
            content = [self._worker.read_block(page) for page in pages]
            if item is not None:
                self._oracle.expect(item.key, *content, group=item.group)
                self._count("stored states", item.group == self._facts.state)
                self._count("stored beginnings", item.num > 0 and item.group != self._facts.state)
            for address in addresses:
                self._store.pop(address, None)
            if not self._fails():
                self._store.update(zip(addresses, content, strict=True))
                self._count("stored blocks", 1)

    def _overwrite(self, copies: list[Copy]) -> None:
        """During a load, a block may hold any bytes."""
        for copy in copies:
            for page in copy.pages:
                self._worker.write_block(page, self._rng.randbytes(self._worker.block_bytes))

    def _load(self, rid: int, copies: list[Copy]) -> None:
        fails = self._fails()
        for pages, addresses, item in copies:
            content = [self._store.get(address) for address in addresses]
            if None in content or (fails and self._rng.random() < 0.5):
                self._failed.setdefault(rid, set()).add(self._rng.choice(pages))
                continue
            for page, part in zip(pages, content, strict=True):
                assert part is not None
                self._worker.write_block(page, part)
            self._num_loaded += len(pages)
            self._count("loaded states", item is not None and item.group == self._facts.state)
        self._count("loads", 1)
        self._count("loads of several groups", len(self._facts.groups) > 1)
        self._count("failed loads", rid in self._failed)
        self._loaded.add(rid)

    def _send(self, rid: int, saves: list[Copy]) -> None:
        self._save(saves)
        self._sent.add(rid)
        self._count("sends", 1)


def facts_of(groups: Groups, block_size: int) -> ConnectorFacts:
    shapes = () if groups.is_plain else groups.shapes
    return ConnectorFacts(block_size=block_size, block_bytes=_PAGE_BYTES, model_key=bytes(32), groups=shapes)


def core_half(
    options: TierOptions, stores: list[dict[Address, bytes]], facts: ConnectorFacts, rng: Random
) -> TierConnector:
    """The core half of a new engine over these stores."""
    parts: list[TierConnector] = []
    for kind, capacity, store in zip(options.kinds, options.capacities, stores, strict=True):
        ranking = {"lru": Lru, "lfu": Lfu, "cost": CostAware}[options.eviction]()
        if kind == "host":
            parts.append(HostCore(num_slots=capacity, facts=facts, queue=EvictionQueue(ranking)))
        elif kind == "disk":
            files = MemoryFiles(store, facts)
            size = capacity * _PAGE_BYTES
            parts.append(DiskCore(files=files, size=size, facts=facts, queue=EvictionQueue(ranking)))  # type: ignore[arg-type]
        else:
            parts.append(
                FreeTier(
                    capacity=capacity,
                    keeps_evicted=options.keeps_evicted,
                    saves_ended=options.saves_ended,
                    delays_sends=options.delays_sends,
                    defer_rate=options.defer_rate,
                    facts=facts,
                    rng=rng,
                )
            )
    return parts[0] if len(parts) == 1 else ChainCore(parts)


def resize_tiers(connector: TierConnector, options: TierOptions, rng: Random) -> None:
    """Gives each tier that may change another size, at most that of the start."""
    for part, capacity in zip(getattr(connector, "parts", [connector]), options.capacities, strict=True):
        if isinstance(part, HostCore | DiskCore):
            part.resize(rng.randint(1, capacity) * _PAGE_BYTES)


def keys_of(connector: TierConnector, facts: ConnectorFacts) -> set[tuple[str, int, bytes]]:
    """(tier, group, key) of all full blocks and states in the connector's index."""
    if isinstance(connector, ChainCore):
        return set().union(*(keys_of(part, facts) for part in connector._parts))
    if isinstance(connector, HostCore):
        tier, items = "host", [kept.item for kept in connector._kept.values()]
    elif isinstance(connector, DiskCore):
        assert set(connector._queue.keys()) == connector._kept.keys()
        tier, items = "disk", list(connector._kept.values())
    else:
        assert isinstance(connector, FreeTier)
        tier, items = "free", connector.items
    return {(tier, item.group, item.key) for item in items if not item.num or item.group == facts.state}


class WorkerHalf:
    """All tiers of one worker, as the worker's process drives them."""

    def __init__(
        self,
        options: TierOptions,
        stores: list[dict[Address, bytes]],
        *,
        facts: ConnectorFacts,
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
                facts=facts,
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
