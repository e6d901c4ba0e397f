"""One engine reduced to what the p2p connector uses: both halves, a cache, requests that the tests make up."""

import os
import random
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from kv_instance import Asked, held
from msgspec.structs import replace
from waiting import until

from pagewire.engine.attention.kv_cache import KvCache, KvShape
from pagewire.engine.core.block_hash import block_key, root_key
from pagewire.engine.kv_connector.base import ConnectorFacts
from pagewire.engine.kv_connector.p2p import P2pConnector
from pagewire.engine.kv_connector.p2p_wire import Layout
from pagewire.ipc.messages import Transferred, ids_to_bytes

SHAPE = KvShape.uniform(num_layers=3, kv_heads=2, head_dim=4, dtype=torch.float32)
SIZE = 4  # positions a block
BLOCK_BYTES = SHAPE.groups(SIZE).page_bytes
FACTS = ConnectorFacts(block_size=SIZE, block_bytes=BLOCK_BYTES, model_key=bytes(32))
DIGEST = Layout.of(FACTS).digest
DEADLINE_S = 60.0


@dataclass
class FakeRequest:
    """A `KvRequest`."""

    rid: int
    ids: "array[int]"
    num_computed: int = 0
    keys: list[bytes] = field(default_factory=list)
    root: bytes = root_key(b"model", b"")
    awaits_kv: bool = False
    kv_peer: str = ""
    keeps_before_last: bool = False
    blocks: list[int] = field(default_factory=list)

    @property
    def num_prompt(self) -> int:
        return len(self.ids)

    def block_keys(self, num: int, block_size: int) -> list[bytes]:
        while len(self.keys) < num:
            start = len(self.keys) * block_size
            parent = self.keys[-1] if self.keys else root_key(b"model", b"")
            self.keys.append(block_key(parent, self.ids[start : start + block_size].tobytes()))
        return self.keys[:num]

    def partial_keys(self, num_full: int, num: int, block_size: int) -> list[bytes]:
        parent = self.block_keys(num_full, block_size)[-1] if num_full else self.root
        start = num_full * block_size
        return [block_key(parent, self.ids[start : start + i].tobytes()) for i in range(1, num + 1)]


def prompt(rid: int, num: int, seed: int = 0) -> FakeRequest:
    rng = random.Random(seed)
    return FakeRequest(rid, array("i", [rng.randrange(100) for _ in range(num)]))


class Instance:
    """Both halves of one engine's connector, and the cache that they work on."""

    def __init__(self, facts: ConnectorFacts = FACTS, **options: str) -> None:
        hosts = () if facts.rank else facts.hosts  # one core of an engine says where its ranks are
        self.core = Asked(P2pConnector.core(options, replace(facts, rank=0, hosts=hosts)))
        self.worker = P2pConnector.worker(options, facts)
        self.cache = KvCache(shape=SHAPE, num_pages=64, block_size=SIZE, device=torch.device("cpu"))
        self.worker.register_kv_caches(self.cache)

    def step(self) -> None:
        """Runs a plan without rows."""
        if metadata := self.core.build_connector_meta():
            self.worker.bind_connector_metadata(metadata)
            self.worker.start_load_kv()
            self.worker.wait_for_save()

    def content(self, blocks: list[int]) -> torch.Tensor:
        return torch.stack([torch.stack([page[blocks] for page in pair]) for pair in self.cache.pages])

    def serve(self, request: FakeRequest, blocks: list[int]) -> None:
        """Ends the request, with random numbers in its blocks."""
        for pair in self.cache.pages:
            for page in pair:
                page[blocks] = torch.randn(len(blocks), *page.shape[1:])
        request.num_computed = len(request.ids)
        assert not self.core.request_finished(request, blocks)
        self.step()

    def matched(self, request: FakeRequest, num_computed: int = 0) -> int:
        """The answer of `get_num_new_matched_tokens`, once there is one."""
        return int(wait_for(lambda: self.core.get_num_new_matched_tokens(request, num_computed)[0]))

    def load(self, request: FakeRequest, blocks: list[int], num_blocks: int) -> set[int]:
        """Loads the last `num_blocks` of these blocks. Returns those that failed."""
        self.core.update_state_after_alloc(request, blocks, num_blocks * SIZE)
        self.step()
        assert self.worker.num_pending == 1
        assert wait_for(self.worker.get_finished, wanted=lambda x: bool(x[1])) == (set(), {request.rid})
        assert self.worker.num_pending == 0 and self.worker.get_finished() == (set(), set())
        failed = self.worker.get_block_ids_with_load_errors()
        num_loaded, ms = self.worker.take_load_cost()
        assert num_loaded == num_blocks - len(failed) and ms >= 0 and self.worker.take_load_cost() == (0, 0.0)
        self.core.update_connector_output(Transferred((request.rid,), ids_to_bytes(sorted(failed)), ()))
        return failed

    def expire(self) -> None:
        """No peer has said anything for too long, of any load that is under way."""
        fetcher = self.worker._fetcher
        assert fetcher is not None
        for peer in list(fetcher._peers.values()):
            for load in list(peer.loads.values()):
                load.deadline = 0.0
        os.write(fetcher._wake, b"x")

    def close(self) -> None:
        self.core.close()
        self.worker.close()


class Pass:
    """A plan of an instance, whose pass fills the blocks [first, last) of a request layer by layer."""

    def __init__(self, instance: Instance, request: FakeRequest, blocks: list[int], first: int, last: int) -> None:
        self._worker, self._cache = instance.worker, instance.cache
        self._core, self._request, self._blocks, self._range = instance.core, request, blocks, (first, last)
        self._core.filling(request, held(request, blocks[:last])[first:])
        self._worker.bind_connector_metadata(self._core.build_connector_meta())
        self._worker.start_load_kv()
        self.stops = tuple(self._worker.layer_stops)

    def compute(self, layers: Iterable[int]) -> None:
        """The next layers, of which the worker half is told at once."""
        first, last = self._range
        for layer in layers:
            for page in self._cache.pages[layer]:
                page[self._blocks[first:last]] = torch.randn(last - first, *page.shape[1:])
            self._worker.save_kv_layer(layer)

    def end(self, *, is_good: bool = True) -> None:
        """The pass is over. If it was good, its result has come to the core half, whose next plan has run."""
        self._worker.wait_for_save()
        if is_good:
            self._request.num_computed = self._range[1] * SIZE
            self._core.filled(self._request, held(self._request, self._blocks[: self._range[1]]))
            metadata = self._core.build_connector_meta()
            self._worker.bind_connector_metadata(metadata)
            self._worker.start_load_kv()
            self._worker.wait_for_save()


def wait_for(ask: Callable[[], Any], wanted: Callable[[Any], object] = lambda x: x is not None) -> Any:
    def answer() -> tuple[Any] | None:
        found = ask()
        return (found,) if wanted(found) else None

    answered = until(answer, "the wanted answer is given", DEADLINE_S)
    assert answered is not None
    return answered[0]
