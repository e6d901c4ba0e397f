"""The p2p connector on real sockets, caches and threads: what it hands over, and what a bad peer can do to it."""

import os
import random
import shutil
import tempfile
import threading
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import pytest
import torch
import zmq
from waiting import until

from pagewire.engine.attention.kv_cache import KvCache, KvShape
from pagewire.engine.core.block_hash import block_key, root_key
from pagewire.engine.kv_connector import p2p
from pagewire.engine.kv_connector.base import ConnectorFacts
from pagewire.engine.kv_connector.p2p import P2pConnector, P2pCore
from pagewire.engine.kv_connector.p2p_wire import (
    Blocks,
    Fetch,
    Found,
    Lookup,
    checksum,
    decode_request,
    encode,
)
from pagewire.ipc.messages import Transferred, ids_to_bytes

T = TypeVar("T")
SHAPE = KvShape(num_layers=3, num_kv_heads=2, head_dim=4, dtype=torch.float32)
SIZE = 4  # positions a block
BLOCK_BYTES = SHAPE.block_bytes(SIZE)
FACTS = ConnectorFacts(block_size=SIZE, block_bytes=BLOCK_BYTES, model_key=bytes(32))
DEADLINE_S = 10.0


@dataclass
class Asking:
    """See `KvRequest`."""

    rid: int
    ids: "array[int]"
    num_computed: int = 0
    keys: list[bytes] = field(default_factory=list)

    def block_keys(self, num: int, block_size: int) -> list[bytes]:
        while len(self.keys) < num:
            start = len(self.keys) * block_size
            parent = self.keys[-1] if self.keys else root_key(b"model", b"")
            self.keys.append(block_key(parent, self.ids[start : start + block_size].tobytes()))
        return self.keys[:num]


def prompt(rid: int, num: int, seed: int = 0) -> Asking:
    rng = random.Random(seed)
    return Asking(rid, array("i", [rng.randrange(100) for _ in range(num)]))


class Instance:
    """Both halves of one engine's connector, and the cache that they work on."""

    def __init__(self, facts: ConnectorFacts = FACTS, **options: str) -> None:
        self.core = P2pConnector.core(options, facts)
        self.worker = P2pConnector.worker(options, facts)
        self.cache = KvCache(shape=SHAPE, num_blocks=64, block_size=SIZE, device=torch.device("cpu"))
        self.worker.register_kv_caches(self.cache)

    def step(self) -> None:
        """A plan without rows."""
        if metadata := self.core.build_connector_meta():
            self.worker.bind_connector_metadata(metadata)
            self.worker.start_load_kv()
            self.worker.wait_for_save()

    def content(self, blocks: list[int]) -> torch.Tensor:
        return torch.stack([torch.stack([page[blocks] for page in pair]) for pair in self.cache.pages])

    def serve(self, request: Asking, blocks: list[int]) -> None:
        """The request has ended; its blocks hold random numbers."""
        for pair in self.cache.pages:
            for page in pair:
                page[blocks] = torch.randn(len(blocks), *page.shape[1:])
        request.num_computed = len(request.ids)
        assert not self.core.request_finished(request, blocks)
        self.step()

    def matched(self, request: Asking, num_computed: int = 0) -> int:
        """The answer of `get_num_new_matched_tokens`, once there is one."""
        num_tokens = wait_for(lambda: self.core.get_num_new_matched_tokens(request, num_computed)[0])
        assert num_tokens is not None
        return num_tokens

    def load(self, request: Asking, blocks: list[int], num_blocks: int) -> set[int]:
        """Loads the last `num_blocks` of these blocks; which of them failed."""
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

    def close(self) -> None:
        self.core.close()
        self.worker.close()


def wait_for(ask: Callable[[], T], wanted: Callable[[T], object] = lambda answer: answer is not None) -> T:
    """The first answer that is wanted."""
    answers = until(lambda: [answer for answer in (ask(),) if wanted(answer)], "an answer that is wanted", DEADLINE_S)
    return answers[0]


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="pw-"))  # sockets need short paths
    yield path
    shutil.rmtree(path)


@pytest.fixture
def instance() -> Iterator[Callable[..., Instance]]:
    started: list[Instance] = []

    def start(**options: str) -> Instance:
        started.append(Instance(**{"timeout_ms": "5000", **options}))
        return started[-1]

    yield start
    for one in started:
        one.close()


def test_blocks_arrive_bit_by_bit(folder, instance):
    prefill = instance(serve=f"{folder}/kv")
    decode = instance(peer=f"{folder}/kv")
    prefill.serve(prompt(1, 30), [5, 9, 3, 40, 0, 1, 2, 11])  # 7 full blocks
    request = prompt(2, 30)
    assert decode.matched(request) == 7 * SIZE
    assert decode.matched(request, num_computed=2 * SIZE) == 5 * SIZE
    assert decode.load(request, [8, 7, 20, 21, 60, 22, 33], 5) == set()
    assert torch.equal(decode.content([20, 21, 60, 22, 33]), prefill.content([3, 40, 0, 1, 2]))
    (tier,) = decode.core.tiers()
    assert (tier.name, tier.num_hit_tokens, tier.num_failed) == ("p2p", 5 * SIZE, 0)
    (tier,) = prefill.core.tiers()
    assert (tier.num_blocks, tier.num_stored, tier.num_evicted) == (7, 7, 0)


def test_one_position_stays_to_be_computed(folder, instance):
    prefill, decode = instance(serve=f"{folder}/kv"), instance(peer=f"{folder}/kv")
    prefill.serve(prompt(1, 8 * SIZE), list(range(8)))
    assert decode.matched(prompt(2, 8 * SIZE)) == 7 * SIZE
    assert decode.matched(prompt(3, SIZE)) == 0


def test_a_common_beginning_is_found(folder, instance):
    prefill, decode = instance(serve=f"{folder}/kv"), instance(peer=f"{folder}/kv")
    prefill.serve(prompt(1, 8 * SIZE), list(range(8)))
    other = prompt(2, 8 * SIZE)
    other.ids[5 * SIZE + 1] += 1
    assert decode.matched(other) == 5 * SIZE


def test_who_comes_early_waits_for_what_is_being_computed(folder, instance):
    """The prefill instance has admitted the request and told its worker; the decode instance asks before it ends."""
    prefill, decode = instance(serve=f"{folder}/kv"), instance(peer=f"{folder}/kv", wait_ms="20000")
    known = prompt(1, 10)
    prefill.serve(known, [0, 1, 2])
    computing = prompt(2, 30)
    computing.ids[:10] = known.ids
    for _ in range(3):  # it may be asked for a request several times before there is room for it
        assert prefill.core.get_num_new_matched_tokens(computing, 0) == (0, False)
    prefill.step()
    early = Asking(3, computing.ids[:])
    wait_for(lambda: decode.core.get_num_new_matched_tokens(early, 0) and decode.core._questions[3].is_coming, bool)
    assert decode.core.get_num_new_matched_tokens(early, 0) == (None, True)
    assert decode.matched(prompt(4, 30, seed=9)) == 0, "what nobody computes is not waited for"
    other = prompt(5, 30)
    other.ids[:10] = known.ids
    other.ids[10] += 1
    assert decode.matched(other) == 2 * SIZE, "nor what follows a part that nobody computes"
    prefill.serve(computing, list(range(10, 18)))
    assert decode.matched(early) == 7 * SIZE
    assert not prefill.worker._store._coming and not prefill.worker._store._num_coming and not prefill.core._expected


@pytest.mark.parametrize("end", ["cancelled", "never"])
def test_what_was_coming_and_does_not_come(end, folder, instance):
    prefill, decode = (
        instance(serve=f"{folder}/kv"),
        instance(peer=f"{folder}/kv", wait_ms="30" if end == "never" else "20000"),
    )
    computing = prompt(2, 30)
    prefill.core.get_num_new_matched_tokens(computing, 0)
    prefill.step()
    early = prompt(3, 30)
    wait_for(lambda: decode.core.get_num_new_matched_tokens(early, 0) and decode.core._questions[3].is_coming, bool)
    if end == "cancelled":
        computing.num_computed = 9
        prefill.core.request_finished(computing, [0, 1, 2])
        prefill.step()
        assert decode.matched(early) == 2 * SIZE
    else:
        assert decode.matched(early) == 0
    assert decode.core.get_num_new_matched_tokens(prompt(4, 30, seed=3), 0) == (None, True), (
        "the peer is no worse for it"
    )


def test_another_model_has_nothing_in_common(folder, instance):
    prefill = instance(serve=f"{folder}/kv")
    decode = instance(
        peer=f"{folder}/kv", facts=ConnectorFacts(block_size=SIZE, block_bytes=BLOCK_BYTES, model_key=b"x" * 32)
    )
    prefill.serve(prompt(1, 30), list(range(8)))
    assert decode.matched(prompt(2, 30)) == 0


def test_a_peer_that_is_not_there_is_left_alone(folder, instance, monkeypatch):
    now = 100.0
    monkeypatch.setattr(p2p, "time", type("Clock", (), {"monotonic": staticmethod(lambda: now)}))
    core = instance(peer=f"{folder}/nobody", timeout_ms="100").core
    request = prompt(1, 30)
    assert core.get_num_new_matched_tokens(request, 0) == (None, True)
    now += 0.099
    assert core.get_num_new_matched_tokens(request, 0) == (None, True)
    assert core.get_num_new_matched_tokens(request, 30 - 2) == (0, False), "nothing is left to ask for"
    now += 0.001
    assert core.get_num_new_matched_tokens(request, 0) == (0, False)
    assert core.get_num_new_matched_tokens(prompt(2, 30), 0) == (0, False), "others do not wait for it"
    now += 1.0
    assert core.get_num_new_matched_tokens(request, 0) == (None, True)
    now += 0.1
    assert core.get_num_new_matched_tokens(request, 0) == (0, False)
    now += 1.9
    assert core.get_num_new_matched_tokens(request, 0) == (0, False), "the second pause is longer"
    assert not core._questions and not core._rids


class BadPeer:
    """Finds everything, and answers a `Fetch` as it is told: bytes, or None for silence."""

    def __init__(self, path: Path, answer: Callable[[Fetch], bytes | None]) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.bind(f"ipc://{path}")
        self._answer = answer
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with self._socket:
            try:
                while True:
                    sender, message = self._socket.recv_multipart()
                    request = decode_request(message)
                    if isinstance(request, Lookup):
                        self._socket.send_multipart([sender, b"\xff nonsense"])
                        self._socket.send_multipart([sender, encode(Found(request.id + 1000, 3))])
                        reply: bytes | None = encode(Found(request.id, 1 << 60))
                    else:
                        reply = self._answer(request)
                    if reply is not None:
                        self._socket.send_multipart([sender, reply])
            except zmq.ContextTerminated:
                pass

    def close(self) -> None:
        self._context.term()
        self._thread.join()


def _blocks(request: Fetch, change: Callable[[bytes], bytes] = lambda x: x, *, num: int | None = None) -> bytes:
    keys = [request.keys[i : i + 32] for i in range(0, len(request.keys), 32)]
    content = os.urandom(BLOCK_BYTES * (len(keys) if num is None else num))
    parts = [content[i : i + BLOCK_BYTES] for i in range(0, len(content), BLOCK_BYTES)]
    sums = b"".join(checksum(key, part) for key, part in zip(keys, parts, strict=False))
    return encode(Blocks(request.id, sums, change(content)))


BAD_ANSWERS: dict[str, Callable[[Fetch], bytes | None]] = {
    "silence": lambda request: None,
    "noise": lambda request: b"\x93\xa5garbage",
    "nothing": lambda request: b"",
    "another kind": lambda request: encode(Found(request.id, 7)),
    "another question's": lambda request: encode(Blocks(request.id + 1, b"", b"")),
    "no blocks": lambda request: _blocks(request, num=0),
    "too many blocks": lambda request: _blocks(request, num=50),
    "a part of a block": lambda request: _blocks(request, lambda content: content[:-1]),
    "no checksums": lambda request: encode(Blocks(request.id, b"", bytes(7 * BLOCK_BYTES))),
    "one bit": lambda request: _blocks(request, lambda content: content[:-1] + bytes([content[-1] ^ 1])),
    "blocks in another order": lambda request: _blocks(request, lambda c: c[BLOCK_BYTES:] + c[:BLOCK_BYTES]),
    "too much": lambda request: bytes(64 << 20),
}


def test_nothing_is_remembered_of_requests_that_end(folder, instance):
    core: P2pCore = instance(peer=f"{folder}/nobody", timeout_ms="600000").core
    for rid in range(3000):
        assert core.get_num_new_matched_tokens(prompt(rid, 30), 0) == (None, True)
    assert len(core._questions) == len(core._rids) == 1024
    for rid in range(3000):
        core.request_finished(prompt(rid, 30), [])
    assert not core._questions and not core._rids
    core.get_num_new_matched_tokens(prompt(1, 30), 0)
    core.reset()
    assert not core._questions and not core._rids
