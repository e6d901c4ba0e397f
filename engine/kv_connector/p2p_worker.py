"""The worker half of the p2p connector: the blocks that this instance serves, and the loads from peers.

There are three threads. The runner's thread stores blocks and queues loads. The server's answers peers from the stored
blocks (`p2p_server.py`). The fetcher's asks peers and writes verified blocks into pages (`p2p_fetcher.py`).
"""

from __future__ import annotations

from itertools import islice

import msgspec

from ...ipc.messages import bytes_to_ids
from ..attention.kv_cache import KvCache
from .base import ConnectorFacts
from .block_copy import BlockCopier
from .p2p_fetcher import Fetcher
from .p2p_meta import P2pPlan
from .p2p_server import Server
from .p2p_settings import Settings, keys_of, rank_address
from .p2p_store import BlockStore
from .p2p_wire import split_keys

_decode_plan = msgspec.msgpack.Decoder(P2pPlan).decode


class P2pWorker:
    def __init__(self, settings: Settings, facts: ConnectorFacts) -> None:
        """Raises ConfigError if the address cannot be bound, or the keys cannot be read."""
        keys = keys_of(settings)
        self._store = BlockStore(facts)
        self._server: Server | None = None
        if settings.serve is not None:
            self._server = Server(rank_address(settings.serve, facts.rank), self._store, facts, keys)
        self._fetcher = Fetcher(settings.fetch_timeout_s, facts, keys) if settings.asks else None
        self._copier: BlockCopier | None = None
        self._plan: P2pPlan | None = None
        self._num_under_way = 0
        self._failed: set[int] = set()  # failed blocks of the loads that `get_finished` named last
        self._num_timed = 0
        self._load_ms = 0.0

    @property
    def num_pending(self) -> int:
        return self._num_under_way

    def register_kv_caches(self, cache: KvCache) -> None:
        self._copier = BlockCopier(cache)
        if self._fetcher is not None:
            self._fetcher.start(BlockCopier(cache))

    def bind_connector_metadata(self, metadata: bytes) -> None:
        self._plan = _decode_plan(metadata)

    def start_load_kv(self) -> None:
        plan, self._plan = self._plan, None
        assert plan is not None and self._copier is not None, "start_load_kv before metadata or cache"
        self._store.expect([(rid, split_keys(keys)) for rid, keys in plan.coming])
        self._store.drop(split_keys(plan.drop))
        if plan.keep_keys:
            names = split_keys(plan.keep_keys)
            parts = self._copier.read(bytes_to_ids(plan.keep_blocks))
            pages = iter([page.tobytes() for part in parts for page in part.numpy()])
            counts = bytes_to_ids(plan.keep_pages) if plan.keep_pages else [1] * len(names)
            self._store.keep(names, [b"".join(islice(pages, num)) for num in counts], plan.states)
        if plan.over:
            self._store.give_up(plan.over)
        for load in plan.loads:
            assert self._fetcher is not None, "a load without a peer"
            self._fetcher.may_write.clear()
            self._num_under_way += 1
            self._fetcher.fetch(load)

    def wait_for_layer_load(self, layer: int) -> None:
        pass

    def save_kv_layer(self, layer: int) -> None:
        pass

    def wait_for_save(self) -> None:
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
        if self._fetcher is not None:
            self._fetcher.close()
