"""The worker half of the p2p connector: the blocks that this instance serves, and the loads from peers.

There are three threads. The runner's thread stores blocks and queues loads. The server's answers peers from the stored
blocks (`p2p_server.py`). The fetcher's asks peers and writes verified blocks into pages (`p2p_fetcher.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import msgspec
import torch
from torch import Tensor

from ...ipc.messages import bytes_to_ids
from ..attention.kv_cache import KvCache
from .base import ConnectorFacts
from .block_copy import BlockCopier
from .p2p_fetcher import Fetcher
from .p2p_meta import P2pPlan
from .p2p_nixl import Agent, Reader
from .p2p_server import Server
from .p2p_settings import Settings, keys_of, serving_address
from .p2p_store import BlockStore, pages_between
from .p2p_wire import split_keys

_NUM_STOPS = 8  # at most, the end of the pass included: each costs a call of the program

_decode_plan = msgspec.msgpack.Decoder(P2pPlan).decode


@dataclass
class _Filling:
    """Blocks of one group that the pass fills and peers wait for."""

    names: list[bytes]
    pages: Sequence[int]  # of each in turn
    group: int
    num: int = 0  # bytes of each that the store has


class P2pWorker:
    def __init__(self, settings: Settings, facts: ConnectorFacts) -> None:
        """Raises ConfigError if the address cannot be bound, the keys cannot be read, or NIXL does not work."""
        keys = keys_of(settings)
        self._agent, memory = None, None
        if settings.uses_nixl and settings.serve is not None:
            memory = torch.empty((settings.capacity, facts.block_bytes), dtype=torch.uint8)
            self._agent = Agent(memory)
        self._store = BlockStore(facts, memory)
        self._server: Server | None = None
        if (address := serving_address(settings, facts)) is not None:
            agent = b"" if self._agent is None else self._agent.metadata
            self._server = Server(address, self._store, facts, keys, agent)
        reader = Reader() if settings.uses_nixl and settings.asks else None
        self._fetcher = Fetcher(settings.fetch_timeout_s, facts, keys, reader) if settings.asks else None
        self._copier: BlockCopier | None = None
        self._plan: P2pPlan | None = None
        self._facts = facts
        self._stops: dict[int, tuple[int, ...]] = {}  # as `layer_stops` has them
        self._fills: list[_Filling] = []
        self._num_under_way = 0
        self._failed: set[int] = set()  # failed blocks of the loads that `get_finished` named last
        self._num_timed = 0
        self._load_ms = 0.0

    @property
    def num_pending(self) -> int:
        return self._num_under_way

    def register_kv_caches(self, cache: KvCache) -> None:
        self._copier = BlockCopier(cache)
        self._stops = layer_stops(cache)
        if self._fetcher is not None:
            self._fetcher.start(BlockCopier(cache))

    def bind_connector_metadata(self, metadata: bytes) -> None:
        self._plan = _decode_plan(metadata)

    def start_load_kv(self) -> None:
        plan, self._plan = self._plan, None
        assert plan is not None and self._copier is not None, "start_load_kv before metadata or cache"
        if plan.is_first:
            self._store.clear()
            self._fills = []
        self._store.give_up(plan.spoiled)
        for one in plan.coming:
            self._store.expect(one.rid, split_keys(one.names), one.states)
        self._store.drop(split_keys(plan.drop))
        self._keep(plan)
        self._store.give_up(plan.over)
        for load in plan.loads:
            assert self._fetcher is not None, "a load without a peer"
            self._fetcher.may_write.clear()
            self._num_under_way += 1
            self._fetcher.fetch(load)
        self._begin_fills(plan)

    def _keep(self, plan: P2pPlan) -> None:
        """Reads what is to be kept from the cache, unless the pass that has filled it was followed."""
        assert self._copier is not None
        names, pages = split_keys(plan.keep_keys), iter(bytes_to_ids(plan.keep_blocks))
        nums = bytes_to_ids(plan.keep_pages) if plan.keep_pages else [1] * len(names)
        of_names = [(name, list(islice(pages, num))) for name, num in zip(names, nums, strict=True)]
        left = [own for name, own in of_names if not self._store.is_filled(name)]
        read = self._copier.read([page for own in left for page in own])
        rows = iter([page.tobytes() for part in read for page in part.numpy()])
        contents = [None if self._store.is_filled(name) else b"".join(islice(rows, len(own))) for name, own in of_names]
        if names:
            self._store.keep(names, contents, plan.states)

    def _begin_fills(self, plan: P2pPlan) -> None:
        """What peers wait for of the blocks that the pass fills is read at each stop."""
        if not self._stops or self._server is None:
            return
        *_, limits, _ = self._stops.values()
        seen: set[bytes] = set()
        for one in plan.fills:
            names, pages = split_keys(one.names), bytes_to_ids(one.blocks)
            if not self._server.awaits(names):
                continue
            num = self._facts.pages_of(one.group)
            new = [i for i, name in enumerate(names) if name not in seen]
            seen.update(names)  # another row of the pass may compute the same
            if new:
                own = [names[i] for i in new]
                self._store.fill(one.rid, own, limits[one.group], num)
                of_new = [page for i in new for page in pages[i * num : (i + 1) * num]]
                self._fills.append(_Filling(own, of_new, one.group))

    def wait_for_layer_load(self, layer: int) -> None:
        pass

    @property
    def layer_stops(self) -> Sequence[int]:
        """None if nobody waits for what the plan computes."""
        return list(self._stops)[:-1] if self._fills else ()

    def save_kv_layer(self, layer: int) -> None:
        ends = self._stops.get(layer, ())
        for fill in self._fills if ends else ():
            if (last := ends[fill.group]) > fill.num:
                self._store.grow(fill.names, fill.num, self._read_part(fill, last))
                fill.num = last

    def _read_part(self, fill: _Filling, last: int) -> Tensor:
        """The bytes of each block from those that the store has to before `last`: uint8 [blocks, bytes]."""
        assert self._copier is not None, "a pass without a cache"
        num = self._facts.pages_of(fill.group)
        between = pages_between(fill.num, last, self._facts.block_bytes)
        return torch.cat([self._copier.read_part(fill.pages[i::num], begin, end) for i, begin, end in between], dim=1)

    def wait_for_save(self) -> None:
        self._fills = []
        if self._fetcher is not None:
            self._fetcher.may_write.set()

    def get_finished(self) -> tuple[set[int], set[int]]:
        done = set()
        for load in [] if self._fetcher is None else self._fetcher.take_done():
            done.add(load.rid)
            self._failed.update(load.failed_pages)
            self._num_timed += load.num_pages
            self._load_ms += load.ms
        self._num_under_way -= len(done)
        return set(), done

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed

    def take_load_cost(self) -> tuple[int, float]:
        """Of loads that waited for the peer's computing, only what was there from the beginning."""
        cost = self._num_timed, self._load_ms
        self._num_timed, self._load_ms = 0, 0.0
        return cost

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._agent is not None:
            self._agent.close()
        if self._fetcher is not None:
            self._fetcher.close()


def layer_stops(cache: KvCache) -> dict[int, tuple[int, ...]]:
    """After which layers blocks leave during a pass: layer → for each group with blocks how many bytes of a block, from
    its first one on, are written then. Before the last layer something is left of each. Empty: there is one layer."""
    groups, num = cache.groups, len(cache.shape.layers)
    if num < 2:
        return {}
    tiles = [(place.group, place.shelf * groups.page_bytes + place.offset) for place in groups.places[:num]]
    numbers = [g for g, group in enumerate(groups.groups) if group.lifetime.kind != "state"]
    last = [max((first for group, first in tiles if group == g), default=0) for g in numbers]
    stops: dict[int, tuple[int, ...]] = {}
    for i in range(min(num, _NUM_STOPS)):
        layer = num * (i + 1) // min(num, _NUM_STOPS) - 1
        left = tiles[layer + 1 :]
        stops[layer] = tuple(min([first for group, first in left if group == g] + [last[g]]) for g in numbers)
    stops[num - 1] = tuple(groups.groups[g].pages * groups.page_bytes for g in numbers)
    return stops
