"""The p2p connector on real sockets, caches and threads: what it transfers, and what a bad peer can do."""

import os
import random
import socket
import stat
import threading
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from kv_instance import Asked
from msgspec import structs
from p2p_instance import BLOCK_BYTES, DEADLINE_S, DIGEST, FACTS, SIZE, FakeRequest, Instance, prompt, wait_for
from waiting import until

from pagewire.engine.kv_connector import p2p, p2p_wire, pause
from pagewire.engine.kv_connector.base import ConnectorFacts
from pagewire.engine.kv_connector.block_copy import BlockCopier
from pagewire.engine.kv_connector.p2p import P2pConnector
from pagewire.engine.kv_connector.p2p_fetcher import Fetcher
from pagewire.engine.kv_connector.p2p_settings import rank_addresses, read_settings, secure
from pagewire.engine.kv_connector.p2p_wire import (
    Coming,
    Found,
    Gone,
    Hello,
    Layout,
    Lookup,
    Piece,
    Want,
    Welcome,
    checksum,
    decode_reply,
    decode_request,
    encode,
)
from pagewire.engine.kv_connector.p2p_worker import P2pWorker
from pagewire.errors import ConfigError
from pagewire.ipc.messages import GroupShape
from pagewire.ipc.zmq_channel import read_keys
from pagewire.tools.servers import free_port


def of_rank(rank: int) -> ConnectorFacts:
    """Of one of two ranks that have as much of each page."""
    return structs.replace(FACTS, rank=rank, rank_bytes=(BLOCK_BYTES, BLOCK_BYTES))


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
    assert tier.num_loaded_bytes == 5 * BLOCK_BYTES
    (tier,) = prefill.core.tiers()
    assert (tier.num_blocks, tier.num_stored, tier.num_evicted) == (7, 7, 0)


def test_the_last_position_is_never_loaded(folder, instance):
    prefill, decode = instance(serve=f"{folder}/kv"), instance(peer=f"{folder}/kv")
    prefill.serve(prompt(1, 8 * SIZE), list(range(8)))
    assert decode.matched(prompt(2, 8 * SIZE)) == 7 * SIZE
    assert decode.matched(prompt(3, SIZE)) == 0


def test_a_common_prefix_is_found(folder, instance):
    prefill, decode = instance(serve=f"{folder}/kv"), instance(peer=f"{folder}/kv")
    prefill.serve(prompt(1, 8 * SIZE), list(range(8)))
    other = prompt(2, 8 * SIZE)
    other.ids[5 * SIZE + 1] += 1
    assert decode.matched(other) == 5 * SIZE


def test_an_early_lookup_waits_for_blocks_being_computed(folder, instance):
    """The prefill instance has announced a request's blocks; the decode instance asks before the request ends."""
    prefill, decode = instance(serve=f"{folder}/kv"), instance(peer=f"{folder}/kv", wait_ms="20000")
    known = prompt(1, 10)
    prefill.serve(known, [0, 1, 2])
    computing = prompt(2, 30)
    computing.ids[:10] = known.ids
    for _ in range(3):  # as the scheduler does until the request fits
        assert prefill.core.get_num_new_matched_tokens(computing, 0) == (0, False)
    prefill.step()
    early = FakeRequest(3, computing.ids[:])
    wait_for(lambda: decode.core.get_num_new_matched_tokens(early, 0) and decode.core._questions[3].is_coming, bool)
    assert decode.core.get_num_new_matched_tokens(early, 0) == (None, True)
    assert decode.matched(prompt(4, 30, seed=9)) == 0, "blocks that the peer does not compute are not waited for"
    other = prompt(5, 30)
    other.ids[:10] = known.ids
    other.ids[10] += 1
    assert decode.matched(other) == 2 * SIZE, "nor blocks after one that the peer does not compute"
    prefill.serve(computing, list(range(10, 18)))
    assert decode.matched(early) == 7 * SIZE
    assert not prefill.worker._store._coming and not prefill.worker._store._num_coming and not prefill.core._expected


@pytest.mark.parametrize("is_sent", [False, True])
def test_an_announcement_is_withdrawn_if_its_request_ends_while_it_waits(is_sent, folder, instance):
    prefill = instance(serve=f"{folder}/kv")
    waiting, other = prompt(2, 30), prompt(3, 30, seed=3)
    for request in (waiting, other):
        prefill.core.get_num_new_matched_tokens(request, 0)
    store = prefill.worker._store
    if is_sent:
        prefill.step()
        assert set(store._coming) == {2, 3}
    prefill.core.spoiled(waiting)
    prefill.step()
    assert set(store._coming) == {3} and set(prefill.core._expected) == {3}
    prefill.serve(other, list(range(8)))
    assert not store._coming and not store._num_coming and not prefill.core._expected


def test_a_request_that_ends_while_it_waits_asks_no_more(folder, instance):
    instance(serve=f"{folder}/kv")
    middle = instance(serve=f"{folder}/next", peer=f"{folder}/kv")
    waiting = prompt(2, 30)
    wait_for(lambda: middle.core.get_num_new_matched_tokens(waiting, 0) and middle.core._questions, bool)
    (peer,) = middle.core._peers.values()
    assert peer.num_open == 1
    middle.core.spoiled(waiting)
    assert not middle.core._questions and not peer.num_open


@pytest.mark.parametrize("end", ["cancelled", "never"])
def test_a_request_stops_waiting_for_announced_blocks_that_never_come(end, folder, instance):
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
    assert decode.core.get_num_new_matched_tokens(prompt(4, 30, seed=3), 0) == (None, True), "the peer is asked again"


def test_on_a_gpu_a_load_waits_for_its_own_stream_only(folder, instance, monkeypatch):
    """CUDA refuses to wait for a device one of whose streams records a graph, and then refuses the recording too."""
    device = torch.device("cuda", 1)

    class Stream:
        """Its work is done when it is waited for."""

        def __init__(self, device: torch.device) -> None:
            self.device = device
            self.work: list[Callable[[], None]] = []

        def synchronize(self) -> None:
            for one in self.work:
                one()
            self.work.clear()

    chosen: dict[int, torch.device] = {}
    streams: dict[int, Stream] = {}

    class OnGpu:
        """A copier that writes in the stream of the thread."""

        def __init__(self, copier: BlockCopier) -> None:
            self.copier, self.device, self.block_bytes = copier, device, copier.block_bytes

        def write(self, *args: Any) -> None:
            assert chosen[threading.get_ident()] == device
            streams[threading.get_ident()].work.append(partial(self.copier.write, *args))

    def wait_for_all(*args: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    start = Fetcher.start
    monkeypatch.setattr(Fetcher, "start", lambda fetcher, copier: start(fetcher, OnGpu(copier)))
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: chosen.update({threading.get_ident(): device}))
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: streams.update({threading.get_ident(): stream}))
    monkeypatch.setattr(torch.cuda, "synchronize", wait_for_all)
    prefill, decode = instance(serve=f"{folder}/kv"), instance(peer=f"{folder}/kv")
    blocks = [5, 9, 3, 40, 0, 1, 2]
    prefill.serve(prompt(1, 30), blocks)
    request = prompt(2, 30)
    assert decode.matched(request) == 7 * SIZE
    assert decode.load(request, [8, 7, 20, 21, 60, 22, 33], 7) == set()
    assert torch.equal(decode.content([8, 7, 20, 21, 60, 22, 33]), prefill.content(blocks))
    assert threading.get_ident() not in streams


def test_many_pieces_make_one_load(folder, instance, monkeypatch):
    monkeypatch.setattr("pagewire.engine.kv_connector.p2p_server.PIECE_BYTES", 3 * BLOCK_BYTES)
    prefill, decode = instance(serve=f"{folder}/kv"), instance(peer=f"{folder}/kv")
    blocks = random.Random(1).sample(range(64), 20)
    prefill.serve(prompt(1, 81), blocks)
    request = prompt(2, 81)
    assert decode.matched(request) == 80
    assert decode.load(request, blocks[::-1], 20) == set()
    assert torch.equal(decode.content(blocks[::-1]), prefill.content(blocks))


@pytest.mark.usefixtures("patient_start")
def test_an_engine_beside_a_peer_of_another_model_does_not_start(folder, instance):
    prefill = instance(serve=f"{folder}/kv")
    prefill.serve(prompt(1, 30), list(range(8)))
    others = [
        (ConnectorFacts(block_size=SIZE, block_bytes=BLOCK_BYTES, model_key=b"x" * 32), "serves another model"),
        (ConnectorFacts(block_size=8, block_bytes=2 * BLOCK_BYTES, model_key=bytes(32)), "blocks have 4 positions"),
        (ConnectorFacts(block_size=SIZE, block_bytes=BLOCK_BYTES // 2, model_key=bytes(32)), "pages of"),
        (of_rank(0), "it has 1 ranks, this instance 2; start both with the same --tensor-parallel-size"),
    ]
    for facts, sentence in others:
        with pytest.raises(ConfigError, match=sentence):
            P2pConnector.core({"peer": f"{folder}/kv"}, facts)
        # Where it must not fail, as after the core's death, it asks in vain.
        core = Asked(P2pConnector.core({"peer": f"{folder}/kv"}, structs.replace(facts, may_refuse=False)))
        assert wait_for(lambda core=core: core.get_num_new_matched_tokens(prompt(2, 30), 0)[0]) == 0
        core.close()


@pytest.mark.usefixtures("patient_start")
def test_an_engine_beside_a_peer_of_an_older_version_does_not_start(folder, instance, monkeypatch):
    """Nor does it take blocks from one that was started later."""
    with monkeypatch.context() as older:
        older.setattr(p2p_wire, "VERSION", 3)
        prefill = instance(serve=f"{folder}/kv")
        prefill.serve(prompt(1, 30), list(range(8)))
    with pytest.raises(ConfigError, match="it speaks version 3 of the protocol, this instance version 5"):
        P2pConnector.core({"peer": f"{folder}/kv"}, FACTS)
    late = Asked(P2pConnector.core({"peer": f"{folder}/kv"}, structs.replace(FACTS, may_refuse=False)))
    assert wait_for(lambda: late.get_num_new_matched_tokens(prompt(2, 30), 0)[0]) == 0
    late.close()
    decode = instance(peer=f"{folder}/kv2")
    request = prompt(3, 30)
    request.kv_peer = f"ipc://{folder}/kv"
    assert decode.load(request, list(range(7)), 7) == set(range(7))


def test_core_and_worker_agree_on_the_stored_blocks(folder, instance):
    """Requests of three families with common prefixes end, with more blocks than the store holds."""
    rng = random.Random(3)
    prefill = instance(serve=f"{folder}/kv", size=str(12 * BLOCK_BYTES + 5))
    for rid in range(200):
        request = prompt(rid, rng.randrange(1, 60), seed=rng.randrange(3))
        request.num_computed = len(request.ids)
        blocks = rng.sample(range(64), -(-len(request.ids) // SIZE))
        prefill.core.request_finished(request, blocks)
        if rng.random() < 0.6:
            prefill.step()
            assert prefill.worker._store._blocks.keys() == prefill.core._kept.keys()
        (tier,) = prefill.core.tiers()
        assert tier.num_blocks <= tier.capacity == 12
        assert tier.num_stored - tier.num_evicted == tier.num_blocks
        head = request.block_keys(min(12, len(request.ids) // SIZE), SIZE)
        assert all(key in prefill.core._kept for key in head), "the tail of a request is evicted first"
    prefill.step()
    assert prefill.worker._store._blocks.keys() == prefill.core._kept.keys()


def test_what_a_core_that_was_replaced_has_left_is_dropped(folder, instance):
    """A worker of one rank goes on. The new core knows nothing of what the old one has kept and announced."""
    prefill = instance(serve=f"{folder}/kv", size=str(12 * BLOCK_BYTES))
    decode = instance(peer=f"{folder}/kv", wait_ms="600000", timeout_ms="600000")
    prefill.serve(prompt(1, 30), list(range(8)))
    prefill.core.get_num_new_matched_tokens(prompt(2, 30, seed=2), 0)
    prefill.step()
    store = prefill.worker._store
    assert len(store._blocks) == 7 and store._coming
    prefill.core.close()
    prefill.core = Asked(P2pConnector.core({"serve": f"{folder}/kv", "size": str(12 * BLOCK_BYTES)}, FACTS))
    prefill.serve(prompt(3, 30, seed=3), list(range(10, 18)))
    assert store._blocks.keys() == prefill.core._kept.keys() and len(store._blocks) == 7
    assert not store._coming and not store._num_coming
    assert decode.matched(prompt(4, 30, seed=2)) == 0, "nobody waits for what the old core has announced"
    prefill.serve(prompt(5, 30, seed=5), list(range(20, 28)))
    assert store._blocks.keys() == prefill.core._kept.keys() and len(store._blocks) == 12


def test_a_peer_that_does_not_answer_is_not_asked_for_a_while(folder, instance, monkeypatch):
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
    assert core.get_num_new_matched_tokens(prompt(2, 30), 0) == (0, False), "other requests do not wait for the peer"
    now += 1.0
    assert core.get_num_new_matched_tokens(request, 0) == (None, True)
    now += 0.1
    assert core.get_num_new_matched_tokens(request, 0) == (0, False)
    now += 1.9
    assert core.get_num_new_matched_tokens(request, 0) == (0, False), "the second pause is longer"
    assert not core._questions and not core._rids


def test_a_restarted_peer_is_found_again(folder, instance):
    first = Instance(serve=f"{folder}/kv")
    decode = instance(peer=f"{folder}/kv", timeout_ms="2000", fetch_timeout_ms="10000")
    first.serve(prompt(1, 30), list(range(8)))
    wait_for(lambda: decode.core.get_num_new_matched_tokens(prompt(2, 30), 0)[0], wanted=lambda num: num == 28)
    first.close()
    second = instance(serve=f"{folder}/kv")
    assert decode.matched(prompt(3, 30)) == 0
    second.serve(prompt(1, 30), list(range(8)))
    request = prompt(4, 30)
    # A question that is sent before the connection is known to be broken is lost. The peer is then left alone a while.
    wait_for(lambda: decode.core.get_num_new_matched_tokens(request, 0)[0], wanted=lambda num: num == 28)
    assert decode.load(request, list(range(8, 15)), 7) == set()
    assert torch.equal(decode.content(list(range(8, 15))), second.content(list(range(7))))


def test_blocks_evicted_before_they_are_fetched_fail_to_load(folder, instance, monkeypatch):
    monkeypatch.setattr(pause, "FIRST_PAUSE_S", 600.0)
    prefill, decode = instance(serve=f"{folder}/kv"), instance(peer=f"{folder}/kv")
    prefill.serve(prompt(1, 30), list(range(8)))
    request = prompt(2, 30)
    assert decode.matched(request) == 28
    prefill.worker._store.drop(request.block_keys(7, SIZE)[4:])
    assert decode.load(request, list(range(10, 17)), 7) == {14, 15, 16}
    assert torch.equal(decode.content([10, 11, 12, 13]), prefill.content([0, 1, 2, 3]))
    assert decode.matched(prompt(3, 30)) == 0, "the peer is not asked again for a moment"
    assert decode.core.tiers()[0].num_failed == 3


class BadPeer:
    """Finds all blocks, and answers a `Want` with the given messages of frames."""

    def __init__(self, path: Path, answer: Callable[[Want], list[list[bytes]]]) -> None:
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
                    match decode_request(message):
                        case Hello():
                            self._socket.send_multipart([sender, encode(Welcome(Layout.of(FACTS)))])
                        case Lookup(number):
                            self._socket.send_multipart([sender, b"\xff nonsense"])
                            self._socket.send_multipart([sender, encode(Found(number + 1000, 3))])
                            self._socket.send_multipart([sender, encode(Found(number, 1 << 60))])
                        case Want() as want:
                            for frames in self._answer(want):
                                self._socket.send_multipart([sender, *frames])
            except zmq.ContextTerminated:
                pass

    def close(self) -> None:
        self._context.term()
        self._thread.join()


def _piece(
    want: Want, first: int = 0, num: int = 7, *, change: Callable[[bytes], bytes] = lambda x: x, offset: int = 0
) -> list[bytes]:
    content = os.urandom(BLOCK_BYTES * max(0, num))
    names = want.names[32 * first : 32 * (first + num)]
    return [encode(Piece(want.id, first, num, offset, checksum(names, 0, content))), change(content)]


def _half(want: Want, offset: int, size: int, num: int = 1) -> list[bytes]:
    """A part of the first blocks."""
    content = os.urandom(size)
    return [encode(Piece(want.id, 0, num, offset, checksum(want.names[: 32 * num], offset, content))), content]


BAD_ANSWERS: dict[str, Callable[[Want], list[list[bytes]]]] = {
    "silence": lambda want: [],
    "only promises": lambda want: [[encode(Coming(want.id, 7, 0))]],
    "noise": lambda want: [[b"\x93\xa5garbage"]],
    "nothing": lambda want: [[b""]],
    "another type of message": lambda want: [[encode(Found(want.id, 7))]],
    "another layout": lambda want: [[encode(Welcome(Layout(2, bytes(32), SIZE, BLOCK_BYTES + 8, 1)))]],
    "a piece without content": lambda want: [_piece(want)[:1]],
    "no blocks": lambda want: [_piece(want, num=0)],
    "fewer than none": lambda want: [_piece(want, num=-3)],
    "too many blocks": lambda want: [_piece(want, num=50)],
    "blocks before the first": lambda want: [_piece(want, first=-2, num=2)],
    "blocks behind the last": lambda want: [_piece(want, first=7, num=1)],
    "a part of the blocks": lambda want: [_piece(want, change=lambda content: content[:-1])],
    "more than the blocks": lambda want: [_piece(want, change=lambda content: content + b"x")],
    "an offset": lambda want: [_piece(want, offset=8)],
    "an offset before the block": lambda want: [_piece(want, num=1, offset=-8)],
    "one flipped bit": lambda want: [_piece(want, change=lambda content: content[:-1] + bytes([content[-1] ^ 1]))],
    "blocks in another order": lambda want: [_piece(want, change=lambda c: c[BLOCK_BYTES:] + c[:BLOCK_BYTES])],
    "the second half first": lambda want: [_half(want, BLOCK_BYTES // 2, BLOCK_BYTES // 2)],
    "overlapping parts": lambda want: [_half(want, 0, BLOCK_BYTES - 8), _half(want, BLOCK_BYTES - 8, 16)],
    "an empty part": lambda want: [_half(want, 0, 0)],
    "parts of several blocks behind what came": lambda want: [_half(want, 256, 512, 2)],
    "parts of unequal size": lambda want: [_half(want, 0, 513, 2)],
    "it is gone": lambda want: [[encode(Gone(want.id))]],
    "too much": lambda want: [[bytes(64 << 20)]],
}


SILENT = ("silence", "only promises", "too much")


@pytest.mark.parametrize("kind", BAD_ANSWERS)
def test_blocks_of_an_invalid_answer_fail_to_load_and_are_not_written(kind, folder, instance):
    decode = instance(peer=f"{folder}/kv", fetch_timeout_ms="60" if kind in SILENT else "9000")
    for pair in decode.cache.pages:
        for page in pair:
            page.zero_()
    peer = BadPeer(folder / "kv", BAD_ANSWERS[kind])
    try:
        request = prompt(1, 30)
        assert decode.matched(request) == 28, "a peer cannot claim more blocks than it was asked for"
        decode.core.update_state_after_alloc(request, list(range(20, 27)), 28)
        second = prompt(2, 30, seed=1)
        decode.core.update_state_after_alloc(second, list(range(30, 37)), 28)
        decode.step()
        done: set[int] = set()
        while len(done) < 2:
            done |= wait_for(decode.worker.get_finished, wanted=lambda x: bool(x[1]))[1]
        assert decode.worker.get_block_ids_with_load_errors() == {*range(20, 27), *range(30, 37)}
        for keys, values in decode.cache.pages:
            if kind == "overlapping parts":
                keys[[20, 30]] = values[[20, 30]] = 0.0  # of either load the first of them is as it should be
            assert not keys.any() and not values.any(), "nothing unverified is written"
    finally:
        peer.close()


def test_closing_during_a_fetch_ends_all_threads(folder):
    decode = Instance(peer=f"{folder}/nobody", fetch_timeout_ms="600000")
    decode.core.update_state_after_alloc(prompt(1, 30), list(range(7)), 28)
    decode.step()
    decode.close()
    assert not any(thread.name.startswith("p2p") for thread in threading.enumerate())


def test_closing_after_a_connection_that_failed_does_not_wait(folder):
    decode = Instance(peer=f"{folder}/nobody")
    request = prompt(1, 30)
    request.kv_peer = "ipc://" + "x" * 300  # longer than a socket's name may be
    decode.core.update_state_after_alloc(request, list(range(7)), 28)
    decode.step()
    assert wait_for(decode.worker.get_finished, wanted=lambda x: bool(x[1])) == (set(), {1})
    assert decode.worker.get_block_ids_with_load_errors() == set(range(7))
    decode.close()


def test_the_server_survives_malformed_messages(folder, instance):
    prefill, decode = instance(serve=f"{folder}/kv"), instance(peer=f"{folder}/kv")
    prefill.serve(prompt(1, 30), list(range(8)))
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 5000
        stranger.connect(f"ipc://{folder}/kv")
        for message in (b"", b"\xff" * 100, encode(Lookup(1, DIGEST, b"seven..", 0))):
            stranger.send(message)
        stranger.send_multipart([b"a", b"b", b"c"])
        stranger.send(encode(Lookup(2, DIGEST, b"", 0)))
        assert stranger.poll(DEADLINE_S * 1000)
        assert stranger.recv() == encode(Found(2, 0))
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(f"{folder}/kv")
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
    assert decode.matched(prompt(2, 30)) == 28


def test_ended_requests_leave_no_state(folder, instance):
    core: Asked = instance(peer=f"{folder}/nobody", timeout_ms="600000").core
    for rid in range(3000):
        assert core.get_num_new_matched_tokens(prompt(rid, 30), 0) == (None, True)
    assert len(core._questions) == len(core._rids) == 1024
    for rid in range(3000):
        core.request_finished(prompt(rid, 30), [])
    assert not core._questions and not core._rids
    core.get_num_new_matched_tokens(prompt(1, 30), 0)
    (peer,) = core._peers.values()
    assert peer.num_open == 1
    core.reset()
    assert not core._questions and not core._rids and not peer.num_open


def test_the_socket_is_private_to_its_owner_and_to_one_instance(folder, instance):
    instance(serve=f"{folder}/kv")
    assert stat.S_IMODE((folder / "kv").stat().st_mode) == 0o600
    with pytest.raises(ConfigError, match="another instance serves on"):
        Instance(serve=f"{folder}/kv")


def test_closing_removes_the_socket(folder):
    served = Instance(serve=f"{folder}/kv")
    served.close()
    served.close()
    assert not list(folder.iterdir())


def test_the_socket_of_a_dead_instance_is_replaced(folder, instance):
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(f"{folder}/kv")
    instance(serve=f"{folder}/kv").serve(prompt(1, 30), list(range(8)))
    assert instance(peer=f"{folder}/kv").matched(prompt(2, 30)) == 28


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, "needs serve=PATH or tcp://HOST:PORT, peer=…, or both"),
        ({"pear": "x"}, "has no option 'pear'"),
        ({"peer": "tcp://10.0.0.1:5"}, "give key-file=FILE"),
        ({"serve": "tcp://*:5"}, "give key-file=FILE"),
        ({"peer": "named"}, "give key-file=FILE as well"),
        ({"peer": "tcp://10.0.0.1", "key-file": "k"}, "should be tcp://HOST:PORT"),
        ({"peer": "tcp://10.0.0.1:70000", "key-file": "k"}, "should be tcp://HOST:PORT"),
        ({"peer": "tcp://a;b:5", "key-file": "k"}, "should be tcp://HOST:PORT"),
        ({"peer": "tcp://*:5", "key-file": "k"}, "should be tcp://HOST:PORT"),
        ({"peer": "udp://a:5"}, "should be the path of a socket"),
        ({"peer": "/x", "key-file": ""}, "should be the path of a file"),
        ({"peer": "/x", "role": "cook"}, "role=cook should be one of"),
        ({"peer": "/x", "role": "prefill"}, "role=prefill needs serve"),
        ({"serve": "/x", "role": "decode"}, "role=decode needs peer"),
        ({"peer": ""}, "should be the path of a socket"),
        ({"peer": "/tmp/" + "x" * 120}, "at most 107 bytes"),
        ({"peer": "/x", "size": "1G"}, "give serve as well"),
        ({"serve": "/x", "size": "much"}, "not a number or a size"),
        ({"serve": "/x", "size": "100"}, "too small: one block"),
        ({"peer": "/x", "timeout_ms": "0"}, "a number of milliseconds"),
        ({"serve": "tcp://*:65535", "key-file": "k"}, "no room for the ranks, which use 2 ports .* a port up to 65534"),
        ({"peer": "/x", "fetch_timeout_ms": "1.5"}, "a number of milliseconds"),
    ],
)
def test_invalid_options_are_refused(options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        P2pConnector.core(options, of_rank(0) if "ranks" in sentence else FACTS)


def test_paths_where_no_socket_can_be_bound_are_refused(folder):
    (folder / "file").write_text("precious")
    for path, sentence in [(f"{folder}/file", "is not a socket"), (f"{folder}/none/kv", "is not a folder in which")]:
        with pytest.raises(ConfigError, match=sentence):
            P2pWorker(read_settings({"serve": path}, FACTS), FACTS)
    assert (folder / "file").read_text() == "precious"


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_each_rank_loads_its_part_from_the_same_rank(transport, folder, instance):
    if transport == "ipc":
        address, keys = f"{folder}/kv", {}
    else:
        address, keys = f"tcp://127.0.0.1:{free_port(2)}", {"key-file": f"{folder}/keys"}
    prefill = [instance(of_rank(rank), serve=address, size=str(16 * BLOCK_BYTES), **keys) for rank in (0, 1)]
    decode = [instance(of_rank(rank), peer=address, fetch_timeout_ms="20000", **keys) for rank in (0, 1)]
    for one in prefill:
        one.serve(prompt(1, 41), list(range(11)))
    (tier,) = prefill[0].core.tiers()
    assert (tier.num_blocks, tier.capacity) == (8, 8), "the ranks share the memory"
    request = prompt(2, 41)
    request.ids = request.ids[: 8 * SIZE + 1]
    assert decode[0].matched(request) == 8 * SIZE
    for one in decode:
        assert one.load(request, list(range(20, 28)), 8) == set()
    for ours, theirs in zip(decode, prefill, strict=True):
        assert torch.equal(ours.content(list(range(20, 28))), theirs.content(list(range(8))))
    assert not torch.equal(decode[0].content([20]), decode[1].content([20]))


def test_what_counts_is_what_all_ranks_have(folder, instance):
    """The second rank has not run the last plan yet, or does not answer at all."""
    prefill = [instance(of_rank(rank), serve=f"{folder}/kv") for rank in (0, 1)]
    decode = instance(of_rank(0), peer=f"{folder}/kv", wait_ms="20000")
    for rank, one in enumerate(prefill):
        one.serve(prompt(1, 41), list(range(11)))
        if not rank:
            one.serve(prompt(2, 41, seed=2), list(range(20, 31)))
    assert decode.matched(prompt(3, 41)) == 40
    assert decode.matched(prompt(4, 41, seed=2)) == 0
    prefill[1].close()
    hasty = instance(of_rank(0), peer=f"{folder}/kv", timeout_ms="100")
    assert hasty.matched(prompt(5, 41)) == 0
    assert not hasty.core._questions and not hasty.core._rids


@pytest.mark.usefixtures("patient_start")
def test_a_rank_never_loads_the_part_of_another_one(folder, instance):
    instance(of_rank(0), serve=f"{folder}/kv")
    instance(of_rank(0), serve=f"{folder}/kv.1").serve(prompt(1, 30), list(range(8)))
    with pytest.raises(ConfigError, match="its rank 0 answers where rank 1 should"):
        P2pConnector.core({"peer": f"{folder}/kv"}, of_rank(0))
    decode = instance(structs.replace(of_rank(1), may_refuse=False), peer=f"{folder}/kv")
    assert decode.load(prompt(2, 30), list(range(7)), 7) == set(range(7))


def start_ranks(
    instance: Callable[..., Instance], hosts: tuple[str, ...], port: int, **options: str
) -> list[tuple[Instance, ConnectorFacts]]:
    """An engine whose ranks are on these hosts, and what each of them knows."""
    found = []
    for rank in (0, 1):
        facts = structs.replace(of_rank(rank), hosts=hosts)
        found.append((instance(facts, serve=f"tcp://127.0.0.1:{port}", **options), facts))
    return found


def loads_from(ranks: list[tuple[Instance, ConnectorFacts]], decode: list[Instance], seed: int) -> None:
    """Each rank loads its part from the same rank of the other engine."""
    for one, _ in ranks:
        one.serve(prompt(1, 41, seed), list(range(11)))
    request = prompt(10 + seed, 41, seed)
    wait_for(lambda: decode[0].core.get_num_new_matched_tokens(request, 0)[0], lambda num: num == 40)
    blocks = list(range(20, 30))
    decode[0].core.update_state_after_alloc(request, blocks, 40)
    metadata = decode[0].core.build_connector_meta()
    for one in decode:
        one.worker.bind_connector_metadata(metadata)
        one.worker.start_load_kv()
        one.worker.wait_for_save()
        assert wait_for(one.worker.get_finished, wanted=lambda x: bool(x[1])) == (set(), {request.rid})
        assert one.worker.get_block_ids_with_load_errors() == set()
    for ours, (theirs, _) in zip(decode, ranks, strict=True):
        assert torch.equal(ours.content(blocks), theirs.content(list(range(10))))
    assert not torch.equal(decode[0].content([20]), decode[1].content([20]))


@pytest.mark.parametrize(
    ("first", "second", "transport"),
    [
        (("", "127.0.0.2"), ("127.0.0.2", "127.0.0.3"), "zmq"),
        (("", "127.0.0.2"), (), "zmq"),
        ((), ("", "127.0.0.2"), "zmq"),
        pytest.param(
            ("", "127.0.0.2"), ("127.0.0.2", "127.0.0.3"), "nixl",
            marks=pytest.mark.skipif(find_spec("nixl") is None, reason="no nixl"),
        ),
    ],
)  # fmt: skip
def test_ranks_on_several_machines_are_found_and_found_again(first, second, transport, folder, instance):
    """All ranks move to other machines, or all to that of the core, where the first one answers for itself, or some
    from there."""
    port, keys = free_port(3), {"key-file": f"{folder}/keys", "transport": transport}
    served = {**keys, "size": str(64 * BLOCK_BYTES)}
    before = start_ranks(instance, first, port, **served)
    decode = [
        instance(of_rank(rank), peer=f"tcp://127.0.0.1:{port}", fetch_timeout_ms="20000", **keys) for rank in (0, 1)
    ]
    (peer,) = decode[0].core._peers.values()
    loads_from(before, decode, 1)
    if first:
        assert peer.addresses == (f"tcp://127.0.0.1:{port + 1}", f"tcp://127.0.0.2:{port + 2}")
    for one, _ in before:
        one.close()
    for link in {peer._door, *peer._links}:  # a question that is sent before is lost
        until(lambda link=link: not link._socket.poll(0, zmq.POLLOUT), "it is known that nobody is there", DEADLINE_S)
    after = start_ranks(instance, second, port, **served)
    loads_from(after, decode, 2)
    assert not peer.pause.until, "no question has waited for its deadline"


def test_hosts_are_not_asked_for_where_all_ranks_are_on_one_machine(folder, instance):
    keys = {"key-file": f"{folder}/keys"}
    port = free_port(2)
    ranks = [(instance(of_rank(rank), serve=f"tcp://*:{port}", **keys), of_rank(rank)) for rank in (0, 1)]
    decode = [instance(of_rank(rank), peer=f"tcp://127.0.0.2:{port}", **keys) for rank in (0, 1)]
    loads_from(ranks, decode, 1)


BAD_RANKS = {
    "too few": ("127.0.0.1:5",),
    "no port": ("127.0.0.1:5", "127.0.0.1"),
    "port 0": ("127.0.0.1:5", "127.0.0.1:0"),
    "a port that is none": ("127.0.0.1:5", "127.0.0.1:99999"),
    "an interface": ("127.0.0.1:5", "eth0;127.0.0.1:5"),
}


@pytest.mark.parametrize("kind", BAD_RANKS)
def test_addresses_that_make_no_sense_are_not_connected(kind, folder, caplog):
    """By a peer that has the keys, or a socket on this machine, which cannot have ranks on others."""
    with pytest.raises(ValueError, match="addresses"):
        rank_addresses("tcp://10.0.0.1:5", 2, BAD_RANKS[kind])
    with pytest.raises(ValueError, match="addresses of other kinds"):
        rank_addresses("ipc:///x", 1, ("127.0.0.1:5",))
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        router.bind(f"ipc://{folder}/kv")
        core = P2pConnector.core(
            {"peer": f"{folder}/kv", "timeout_ms": "600000"}, structs.replace(of_rank(0), may_refuse=False)
        )
        asked = Asked(core)
        try:
            assert asked.get_num_new_matched_tokens(prompt(1, 30), 0) == (None, True)
            wait_for(lambda: asked.get_num_new_matched_tokens(prompt(1, 30), 0)[0] or router.poll(0), bool)
            sender, _ = router.recv_multipart()
            router.send_multipart([sender, encode(Welcome(Layout.of(of_rank(0)), BAD_RANKS[kind]))])
            wait_for(lambda: asked.get_num_new_matched_tokens(prompt(1, 30), 0)[0] or caplog.text, bool)
            assert "its ranks cannot be found" in caplog.text
            assert not core._peers[f"ipc://{folder}/kv"].links
        finally:
            core.close()


STATE = (b"p" * 32, b"k" * 32, SIZE - 1)
BAD_STATES = {
    "no key": (STATE[0], b"", 0),
    "half a key": (STATE[0], b"k" * 16, 0),
    "no block before": (b"", STATE[1], 0),
    "a block before with a longer key": (b"p" * 33, STATE[1], 0),
    "fewer positions than none": (STATE[0], b"x" * 32, -100),
    "as many positions as a block has": (STATE[0], b"x" * 32, SIZE),
}


@pytest.mark.parametrize("kind", BAD_STATES)
def test_states_that_make_no_sense_are_not_found(kind, folder):
    """Of a peer that has the keys, or a socket on this machine. Others in the same answer are."""
    facts = structs.replace(FACTS, groups=(GroupShape("full", 0, 1), GroupShape("state", 0, 3)), may_refuse=False)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        router.bind(f"ipc://{folder}/kv")
        core = P2pConnector.core({"peer": f"{folder}/kv", "timeout_ms": "600000"}, facts)
        request = prompt(1, 30)
        try:

            def answered() -> bool:
                while router.poll(0):
                    sender, message = router.recv_multipart()
                    match decode_request(message):
                        case Hello():
                            router.send_multipart([sender, encode(Welcome(Layout.of(facts)))])
                        case Lookup(number):
                            found = Found(number, 3, states=(STATE, BAD_STATES[kind]))
                            router.send_multipart([sender, encode(found)])
                return Asked(core).get_num_new_matched_tokens(request, 0)[0] is not None

            wait_for(answered, bool)
            assert core.standing(request, STATE[0], 0) == {STATE[1]: STATE[2]}
            assert not core.standing(request, BAD_STATES[kind][0], 0).keys() - {STATE[1]}
        finally:
            core.close()


def test_ranks_on_several_machines_need_ports_of_their_own(folder):
    options = {"serve": "tcp://127.0.0.1:65534", "key-file": f"{folder}/keys"}
    facts = structs.replace(of_rank(0), hosts=("", "127.0.0.2"))
    read_settings(options, of_rank(0))
    with pytest.raises(ConfigError, match=r"which use 3 ports .* choose a port up to 65533"):
        read_settings(options, facts)


def test_a_directory_answers_nothing_but_who_is_there(folder):
    options = {"serve": f"tcp://127.0.0.1:{free_port(3)}", "key-file": f"{folder}/keys"}
    facts = structs.replace(of_rank(0), hosts=("127.0.0.2", ""))
    core = P2pConnector.core(options, facts)
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        secure(stranger, options["serve"], read_keys(folder / "keys"), is_server=False)
        stranger.connect(options["serve"])
        for message in (b"", b"\xff" * 100, encode(Lookup(1, Layout.of(facts).digest, bytes(32), 0))):
            stranger.send(message)
        stranger.send_multipart([encode(Hello(Layout.of(facts)))] * 2)
        stranger.send(encode(Hello(Layout.of(FACTS))))
        assert stranger.poll(DEADLINE_S * 1000)
        port = int(options["serve"].rpartition(":")[2])
        ranks = (f"127.0.0.2:{port + 1}", f":{port + 2}")
        assert decode_reply(stranger.recv()) == Welcome(Layout.of(facts), ranks)
    core.close()
    assert not any(thread.name.startswith("p2p") for thread in threading.enumerate())


def test_a_port_of_the_directory_that_is_taken_is_one_sentence(folder):
    port = free_port(3)
    options = {"serve": f"tcp://127.0.0.1:{port}", "key-file": f"{folder}/keys"}
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        with pytest.raises(ConfigError, match="cannot serve on tcp:"):
            P2pConnector.core(options, structs.replace(of_rank(0), hosts=("", "127.0.0.2")))
