"""Blocks that instances read from each other's memory by NIXL, where it is installed."""

import os
import random
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from p2p_instance import BLOCK_BYTES, FACTS, Instance, prompt, wait_for

from pagewire.engine.kv_connector import p2p_fetcher, p2p_nixl, p2p_server
from pagewire.engine.kv_connector.p2p import P2pConnector
from pagewire.engine.kv_connector.p2p_nixl import Read, Reader
from pagewire.engine.kv_connector.p2p_store import BlockStore, Part
from pagewire.engine.kv_connector.p2p_wire import Piece
from pagewire.errors import ConfigError

Start = Callable[..., Instance]
HAS_NIXL = find_spec("nixl") is not None
needs_nixl = pytest.mark.skipif(not HAS_NIXL, reason="nixl is not installed")
PATIENT = {"fetch_timeout_ms": "30000"}


@pytest.fixture
def num_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all pieces that were read from a peer's memory."""
    sizes: list[int] = []
    begin = Reader.begin

    def count(self: Reader, name: str, places: tuple[tuple[int, int], ...]) -> Read | None:
        read = begin(self, name, places)
        if read is not None:
            sizes.append(read.size)
        return read

    monkeypatch.setattr(Reader, "begin", count)
    return sizes


@needs_nixl
@pytest.mark.parametrize("piece_bytes", [3 * BLOCK_BYTES, BLOCK_BYTES // 4], ids=["blocks", "parts of blocks"])
def test_blocks_are_read_bit_by_bit(
    piece_bytes: int, num_read: list[int], folder: Path, instance: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More pieces than can be read at once."""
    monkeypatch.setattr(p2p_server, "PIECE_BYTES", piece_bytes)
    monkeypatch.setattr(p2p_nixl, "_NUM_CHUNKS", 3)
    address = f"{folder}/kv"
    prefill, decode = instance(serve=address, transport="nixl"), instance(peer=address, transport="nixl", **PATIENT)
    blocks = random.Random(1).sample(range(64), 20)
    prefill.serve(prompt(1, 81), blocks)
    for rid, ours in ((2, blocks[::-1]), (3, blocks)):
        request = prompt(rid, 81)
        assert decode.matched(request) == 80
        assert decode.load(request, ours, 20) == set()
        assert torch.equal(decode.content(ours), prefill.content(blocks))
    assert sum(num_read) == 2 * 20 * BLOCK_BYTES


@needs_nixl
@pytest.mark.parametrize("who", ["serve", "peer"])
def test_an_instance_without_nixl_gets_contents(who: str, num_read: list[int], folder: Path, instance: Start) -> None:
    address = f"{folder}/kv"
    prefill = instance(serve=address, **({"transport": "nixl"} if who == "serve" else {}))
    decode = instance(peer=address, **({"transport": "nixl"} if who == "peer" else {}), **PATIENT)
    prefill.serve(prompt(1, 41), list(range(11)))
    assert decode.matched(prompt(2, 41)) == 40
    assert decode.load(prompt(2, 41), list(range(20, 30)), 10) == set()
    assert torch.equal(decode.content(list(range(20, 30))), prefill.content(list(range(10)))) and not num_read


@needs_nixl
def test_memory_that_was_overwritten_meanwhile_is_not_taken(
    folder: Path, instance: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(p2p_server, "PIECE_BYTES", 2 * BLOCK_BYTES)
    take, num_taken = Reader.take, 0

    def late(self: Reader, read: Read) -> bytes | None:
        nonlocal num_taken
        content = take(self, read)
        num_taken += content is not None
        return content if content is None or num_taken != 3 else bytes(len(content))

    monkeypatch.setattr(Reader, "take", late)
    address = f"{folder}/kv"
    prefill, decode = instance(serve=address, transport="nixl"), instance(peer=address, transport="nixl", **PATIENT)
    prefill.serve(prompt(1, 41), list(range(11)))
    assert decode.matched(prompt(2, 41)) == 40
    assert decode.load(prompt(2, 41), list(range(20, 30)), 10) == {24, 25, 26, 27, 28, 29}
    assert torch.equal(decode.content(list(range(20, 24))), prefill.content(list(range(4))))
    assert decode.worker._fetcher._peers, "the connection is kept"


@needs_nixl
def test_the_memory_holds_what_the_store_holds(folder: Path, instance: Start) -> None:
    """Blocks come and go, and what is read is always whole."""
    address, rng = f"{folder}/kv", random.Random(3)
    prefill = instance(serve=address, transport="nixl", size=str(12 * BLOCK_BYTES))
    decode = instance(peer=address, transport="nixl", **PATIENT)
    for rid in range(30):
        length, seed = rng.randrange(9, 45), rng.randrange(4)
        blocks = rng.sample(range(64), -(-length // 4))
        prefill.serve(prompt(rid, length, seed), blocks)
        store = prefill.worker._store
        used = [page for block in store._blocks.values() if isinstance(block, list) for page in block]
        assert sorted([*used, *store._free]) == list(range(12)) and len(used) == len(store._blocks)
        request = prompt(1000 + rid, length, seed)
        if num := decode.matched(request) // 4:
            ours = list(range(num))
            assert decode.load(request, ours, num) == set()


@needs_nixl
def test_a_peer_that_dies_costs_its_blocks_only(folder: Path, instance: Start) -> None:
    address = f"{folder}/kv"
    prefill = instance(serve=address, transport="nixl")
    decode = instance(peer=address, transport="nixl", fetch_timeout_ms="500")
    prefill.serve(prompt(1, 41), list(range(11)))
    assert decode.matched(prompt(2, 41)) == 40
    prefill.worker.close()
    assert decode.load(prompt(2, 41), list(range(20, 30)), 10) == set(range(20, 30))


@needs_nixl
def test_a_peer_that_was_started_again_is_read_again(num_read: list[int], folder: Path, instance: Start) -> None:
    address = f"{folder}/kv"
    decode = instance(peer=address, transport="nixl", **PATIENT)
    for seed in (1, 2):
        prefill = instance(serve=address, transport="nixl")
        prefill.serve(prompt(1, 41, seed), list(range(11)))
        wait_for(lambda seed=seed: decode.core.get_num_new_matched_tokens(prompt(seed, 41, seed), 0)[0], bool)
        assert decode.load(prompt(seed, 41, seed), list(range(20, 30)), 10) == set()
        assert torch.equal(decode.content(list(range(20, 30))), prefill.content(list(range(10))))
        prefill.close()
    assert sum(num_read) == 2 * 10 * BLOCK_BYTES


def test_blocks_without_room_in_the_memory_are_sent() -> None:
    memory = torch.zeros(3, BLOCK_BYTES, dtype=torch.uint8)
    store = BlockStore(FACTS, memory)
    names, blocks = [bytes([i]) * 32 for i in range(4)], [os.urandom(BLOCK_BYTES) for _ in range(4)]
    store.keep(names, blocks)
    assert [store.read([name]) for name in names] == blocks
    at = memory.data_ptr()
    assert store.places(names[:3]) == tuple((at + i * BLOCK_BYTES, BLOCK_BYTES) for i in range(3))
    assert store.places(names[:2], Part(5, 7, 0)) == ((at + 5, 7), (at + BLOCK_BYTES + 5, 7))
    assert store.places(names[2:]) == ()
    store.drop(names[:1])
    store.keep(names[:1], blocks[:1])
    assert store.read(names[:1]) == blocks[0] and store.places(names[:1], Part(0, 1, 0)) == ((at, 1),)


def test_what_a_pass_fills_is_in_the_memory_as_far_as_there_is_room() -> None:
    memory = torch.zeros(3, BLOCK_BYTES, dtype=torch.uint8)
    store = BlockStore(FACTS, memory)
    names, rows = [bytes([i]) * 32 for i in range(4)], torch.arange(1, 5, dtype=torch.uint8)[:, None]
    store.fill(7, names[:2], 512)
    store.fill(8, names[2:], 512)
    for first, fill in ((0, names[:2]), (512, names[:2]), (0, names[2:])):
        store.grow(fill, first, rows[:2].expand(2, 512 if not first else BLOCK_BYTES - 512))
    at, part = memory.data_ptr(), Part(256, 256, 1)
    assert store.places(names[:2], part) == ((at + 256, 256), (at + BLOCK_BYTES + 256, 256))
    assert store.places(names[2:], Part(0, 512, 2)) == () and store.read(names[2:], Part(0, 1, 2)) == b"\1\2"
    store.keep(names[:1], [None])
    assert store.read(names[:1]) == b"\1" * BLOCK_BYTES and store.read(names[:2], part) == b"\1" * 256 + b"\2" * 256
    store.expect(7, names[:2])
    store.give_up([7])
    assert list(store._free) == [2, 1], "what was not kept gives its page back"
    store.drop(names[:1])
    assert list(store._free) == [2, 1, 0]


def test_places_that_nobody_asked_for_are_a_failed_peer() -> None:
    fetcher = p2p_fetcher.Fetcher(1.0, FACTS, None)
    peer = fetcher._connect("ipc:///nowhere")
    with pytest.raises(Exception, match="memory that is not known here"):
        fetcher._read(peer, Piece(1, 0, 1, 0, 0, ((1, 8),)))
    with pytest.raises(Exception, match="places of another size"):
        fetcher._read(peer, Piece(1, 0, 1, 0, 0, ((1, 8), (9, -8))))
    p2p_fetcher._close(peer)
    fetcher.close()


def test_options() -> None:
    with pytest.raises(ConfigError, match="transport=rdma should be one of zmq, nixl"):
        P2pConnector.check({"peer": "/x", "transport": "rdma"})
    if not HAS_NIXL:
        with pytest.raises(ConfigError, match="needs the package nixl"):
            P2pConnector.check({"peer": "/x", "transport": "nixl"})
