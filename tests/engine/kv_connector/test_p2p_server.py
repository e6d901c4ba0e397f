"""What the p2p server sends, to whom and when: credits, leases, bitmaps, promises. The askers are bare sockets."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import zmq
from p2p_instance import BLOCK_BYTES, DEADLINE_S, DIGEST, FACTS, prompt
from waiting import until

from pagewire.engine.kv_connector import p2p_server
from pagewire.engine.kv_connector.p2p_server import Server
from pagewire.engine.kv_connector.p2p_store import BlockStore
from pagewire.engine.kv_connector.p2p_wire import (
    Coming,
    Credit,
    Done,
    Found,
    Gone,
    Have,
    Hello,
    Layout,
    Lookup,
    Piece,
    Request,
    Want,
    Welcome,
    bitmap,
    checksum,
    decode_reply,
    encode,
)

KEYS = prompt(1, 40).block_keys(10, 4)
BLOCKS = [bytes([i]) * BLOCK_BYTES for i in range(10)]


class Asker:
    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str) -> None:
        self.context = context
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(address)

    def tell(self, *requests: Request) -> None:
        for request in requests:
            self.socket.send(encode(request))

    def hear(self) -> Any:
        """The next answer; of a piece its head and content."""
        assert self.socket.poll(DEADLINE_S * 1000), "no answer"
        head, *content = self.socket.recv_multipart()
        reply = decode_reply(head)
        return (reply, content[0]) if isinstance(reply, Piece) else reply

    def hears_nothing(self) -> None:
        """All earlier messages were handled, and nothing was sent for them."""
        self.tell(Hello(Layout.of(FACTS)))
        assert isinstance(self.hear(), Welcome)

    def want(self, number: int = 1, *, have: bytes = b"", credit: int = 1 << 20, names: bytes = b"") -> None:
        self.tell(Want(number, DIGEST, names or b"".join(KEYS), have, credit, 60_000))


@pytest.fixture
def store() -> BlockStore:
    return BlockStore(FACTS)


@pytest.fixture
def asker(folder: Path, store: BlockStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Asker]:
    monkeypatch.setattr(p2p_server, "PIECE_BYTES", 3 * BLOCK_BYTES)
    monkeypatch.setattr(p2p_server, "_SWEEP_S", 0.0)
    server = Server(f"ipc://{folder}/kv", store, FACTS, None)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    asker = Asker(context, server.address)
    yield asker
    asker.socket.close()
    context.destroy(linger=0)
    server.close()


def test_nothing_is_sent_without_credit(store: BlockStore, asker: Asker) -> None:
    store.keep(KEYS, BLOCKS)
    asker.want(credit=0)
    assert asker.hear() == Coming(1, 10, 0)
    asker.tell(Credit(BLOCK_BYTES))
    asker.hears_nothing()  # a piece has three blocks
    asker.tell(Credit(2 * BLOCK_BYTES))
    head, content = asker.hear()
    assert (head.first, head.num, head.offset, content) == (0, 3, 0, b"".join(BLOCKS[:3]))
    assert head.checksum == checksum(b"".join(KEYS[:3]), 0, content)
    asker.hears_nothing()
    asker.tell(Credit(6 * BLOCK_BYTES))
    assert [asker.hear()[0].first for _ in range(2)] == [3, 6]
    asker.hears_nothing()
    asker.tell(Credit(BLOCK_BYTES))
    assert asker.hear()[1] == BLOCKS[9]


def test_endless_credit_is_bounded(store: BlockStore, asker: Asker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(p2p_server, "_MAX_CREDIT", 4 * BLOCK_BYTES)
    store.keep(KEYS, BLOCKS)
    asker.want(credit=1 << 40)
    assert asker.hear() == Coming(1, 10, 0)
    assert asker.hear()[0].num == 3
    asker.hears_nothing()


def test_blocks_are_sent_as_they_come(store: BlockStore, asker: Asker) -> None:
    store.keep(KEYS[:2], BLOCKS[:2])
    store.expect(7, KEYS[:9])
    asker.want()
    assert asker.hear() == Coming(1, 2, 7)
    assert asker.hear()[1] == b"".join(BLOCKS[:2])
    asker.hears_nothing()
    store.keep(KEYS[2:4], BLOCKS[2:4])
    head, content = asker.hear()
    assert (head.first, content) == (2, b"".join(BLOCKS[2:4]))
    asker.hears_nothing()
    store.give_up([7])  # its request was cancelled
    assert asker.hear() == Gone(1)


def test_what_is_there_does_not_wait_for_what_is_asked_for_before_it(store: BlockStore, asker: Asker) -> None:
    """A model with a window asks for the end of it before the blocks of full attention, which come first."""
    store.expect(7, KEYS)
    asker.want(names=b"".join([*KEYS[8:], *KEYS[:8]]))
    assert asker.hear() == Coming(1, 0, 10)
    store.keep(KEYS[:2], BLOCKS[:2])
    head, content = asker.hear()
    assert (head.first, head.num, content) == (2, 2, b"".join(BLOCKS[:2]))
    asker.hears_nothing()
    store.keep(KEYS[2:], BLOCKS[2:])
    assert [(head.first, head.num) for head, _ in (asker.hear() for _ in range(3))] == [(0, 2), (4, 3), (7, 3)]
    asker.hears_nothing()


def test_a_bitmap_leaves_out_what_the_asker_has(store: BlockStore, asker: Asker) -> None:
    store.keep(KEYS, BLOCKS)
    asker.want(have=bitmap({0, 1, 2, 5, 9}, 10))
    assert asker.hear() == Coming(1, 5, 0)
    assert [(head.first, head.num) for head, _ in (asker.hear(), asker.hear())] == [(3, 2), (6, 3)]
    asker.hears_nothing()


def test_a_block_larger_than_a_piece_comes_in_parts(
    store: BlockStore, asker: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(p2p_server, "PIECE_BYTES", BLOCK_BYTES // 3)
    store.keep(KEYS[:2], BLOCKS[:2])
    asker.want(names=b"".join(KEYS[:2]))
    asker.hear()
    pieces = [asker.hear() for _ in range(6)]
    assert [head.first for head, _ in pieces] == [0, 0, 0, 1, 1, 1]
    assert b"".join(content for _, content in pieces) == b"".join(BLOCKS[:2])
    assert [head.offset for head, _ in pieces[:3]] == [0, BLOCK_BYTES // 3, 2 * (BLOCK_BYTES // 3)]


# Blocks that a pass fills. The last of their three layers is sent once they are kept.

LAYER_BYTES = BLOCK_BYTES // 3
LIMIT = 2 * LAYER_BYTES


def grow(store: BlockStore, first: int, last: int, layer: int, byte: int | None = None) -> None:
    """A layer of these blocks was computed: a byte for each layer and block."""
    rows = [bytes([10 * i + layer if byte is None else byte]) * LAYER_BYTES for i in range(first, last)]
    parts = torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8).view(last - first, -1)
    store.grow(KEYS[first:last], layer * LAYER_BYTES, parts)


def layer_of(first: int, last: int, layer: int) -> bytes:
    return b"".join(bytes([10 * i + layer]) * LAYER_BYTES for i in range(first, last))


@pytest.fixture
def filling(store: BlockStore, asker: Asker) -> Asker:
    """A pass fills two blocks behind two that are there, and one has asked for four and has two."""
    store.keep(KEYS[:2], BLOCKS[:2])
    store.expect(7, KEYS[:4])
    asker.want(names=b"".join(KEYS[:4]))
    assert asker.hear() == Coming(1, 2, 2)
    assert asker.hear()[1] == b"".join(BLOCKS[:2])
    store.fill(7, KEYS[2:4], LIMIT)
    return asker


def test_layers_are_sent_as_they_are_computed_and_the_last_ones_when_the_pass_is_good(
    store: BlockStore, filling: Asker
) -> None:
    for layer in (0, 1):
        filling.hears_nothing()
        grow(store, 2, 4, layer)
        head, content = filling.hear()
        assert (head.first, head.num, head.offset, content) == (2, 2, layer * LAYER_BYTES, layer_of(2, 4, layer))
        assert head.checksum == checksum(b"".join(KEYS[2:4]), head.offset, content)
    grow(store, 2, 4, 2)
    filling.hears_nothing()
    assert store.is_filled(KEYS[2]) and KEYS[2] not in store
    store.keep(KEYS[2:4], [None, None])
    assert filling.hear()[1] == layer_of(2, 4, 2)
    filling.hears_nothing()
    filling.want(2, names=b"".join(KEYS[2:4]))
    assert filling.hear() == Coming(2, 2, 0)
    assert filling.hear()[1] == b"".join(layer_of(i, i + 1, layer) for i in (2, 3) for layer in range(3))


def test_layers_of_a_pass_that_was_bad_are_followed_by_nothing(store: BlockStore, filling: Asker) -> None:
    for layer in range(3):
        grow(store, 2, 4, layer)
    filling.hear()
    store.give_up([7])
    while (reply := filling.hear()) != Gone(1):
        assert reply[0].offset < LIMIT
    filling.hears_nothing()
    assert not store._fills and not store.is_filled(KEYS[2])


@pytest.mark.parametrize("again", ["followed", "not followed"])
def test_blocks_that_are_computed_again_begin_again(again: str, store: BlockStore, filling: Asker) -> None:
    """Bytes of two computations never make one block."""
    grow(store, 2, 4, 0)
    assert filling.hear()[1] == layer_of(2, 4, 0)
    if again == "followed":
        store.fill(7, KEYS[2:4], LIMIT)
        filling.hears_nothing()
        grow(store, 2, 4, 0, 99)
        head, content = filling.hear()
        assert (head.first, head.num, head.offset, content) == (2, 2, 0, bytes([99]) * 2 * LAYER_BYTES)
        grow(store, 2, 4, 1, 99)
        assert filling.hear()[0].offset == LAYER_BYTES
    else:
        store.keep(KEYS[2:4], BLOCKS[2:4])
        head, content = filling.hear()
        assert (head.first, head.num, head.offset, content) == (2, 2, 0, b"".join(BLOCKS[2:4]))
        assert not store._fills
    filling.hears_nothing()


def test_layers_wait_for_credit(store: BlockStore, asker: Asker) -> None:
    store.expect(7, KEYS[:4])
    asker.want(names=b"".join(KEYS[:4]), credit=5 * LAYER_BYTES)
    assert asker.hear() == Coming(1, 0, 4)
    store.fill(7, KEYS[:4], LIMIT)
    grow(store, 0, 4, 0)
    assert asker.hear()[1] == layer_of(0, 4, 0)
    grow(store, 0, 4, 1)
    asker.hears_nothing()
    asker.tell(Credit(3 * LAYER_BYTES))
    assert asker.hear()[1] == layer_of(0, 4, 1)
    grow(store, 0, 4, 2)
    store.keep(KEYS[:4], [None] * 4)
    asker.hears_nothing()
    asker.tell(Credit(4 * LAYER_BYTES))
    assert asker.hear()[1] == layer_of(0, 4, 2)


def test_layers_of_many_blocks_come_in_several_pieces(
    store: BlockStore, asker: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(p2p_server, "PIECE_BYTES", 3 * LAYER_BYTES)
    store.expect(7, KEYS)
    asker.want()
    asker.hear()
    store.fill(7, KEYS, LIMIT)
    grow(store, 0, 10, 0)
    pieces = [asker.hear() for _ in range(4)]
    assert [(head.first, head.num, head.offset) for head, _ in pieces] == [(0, 3, 0), (3, 3, 0), (6, 3, 0), (9, 1, 0)]
    assert b"".join(content for _, content in pieces) == layer_of(0, 10, 0)
    asker.hears_nothing()


def test_the_server_says_which_blocks_are_awaited(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = BlockStore(FACTS)
    server = Server(f"ipc://{folder}/kv", store, FACTS, None)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    asker = Asker(context, server.address)
    store.expect(7, KEYS)
    assert not server.awaits(KEYS)
    asker.tell(Lookup(3, DIGEST, b"".join(KEYS[:4]), 60_000))
    asker.hear()
    until(lambda: server.awaits(KEYS[3:]), "the lookup waits")
    assert not server.awaits(KEYS[4:])
    asker.want(names=b"".join(KEYS[5:6]))
    asker.hear()
    until(lambda: server.awaits(KEYS[5:]), "the want is open")
    assert not server.awaits(KEYS[6:])
    asker.tell(Done(1))
    until(lambda: not server.awaits(KEYS[5:]), "the want is done")
    store.keep(KEYS[:2], BLOCKS[:2])
    assert asker.hear() == Found(3, 2, num_coming=2)
    assert server.awaits(KEYS[3:]), "it is about to ask for them"
    monkeypatch.setattr(p2p_server, "time", type("Clock", (), {"monotonic": staticmethod(lambda: 1e9)}))
    until(lambda: not server.awaits(KEYS[3:]), "it did not")
    asker.socket.close()
    context.destroy(linger=0)
    server.close()


def test_a_want_ends_with_its_lease(store: BlockStore, asker: Asker, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1e9  # after the start of the server
    monkeypatch.setattr(p2p_server, "time", type("Clock", (), {"monotonic": staticmethod(lambda: now)}))
    store.expect(7, KEYS)
    asker.want()
    asker.want(2)
    assert asker.hear() == Coming(1, 0, 10) and asker.hear() == Coming(2, 0, 10)
    now += 40.0
    asker.tell(Have(2))
    asker.hears_nothing()
    now += 40.0
    asker.hears_nothing()
    asker.hears_nothing()  # leases are looked at after the answer to the first one
    store.keep(KEYS, BLOCKS)
    assert {asker.hear()[0].id for _ in range(4)} == {2}
    asker.hears_nothing()


def test_what_is_done_is_forgotten(store: BlockStore, asker: Asker) -> None:
    store.expect(7, KEYS)
    asker.want()
    asker.hear()
    asker.tell(Done(1), Done(1), Have(1), Done(99), Credit(5))
    asker.hears_nothing()
    store.keep(KEYS, BLOCKS)
    asker.hears_nothing()


def test_one_that_waits_does_not_hold_up_another(store: BlockStore, asker: Asker) -> None:
    other = prompt(2, 8, seed=9).block_keys(2, 4)
    store.expect(7, KEYS)
    store.keep(other, BLOCKS[:2])
    asker.want(1)
    asker.want(2, names=b"".join(other))
    assert asker.hear() == Coming(1, 0, 10)
    assert asker.hear() == Coming(2, 2, 0)
    assert asker.hear()[0].id == 2


def test_an_early_lookup_is_answered_when_half_exists(store: BlockStore, asker: Asker) -> None:
    store.expect(7, KEYS)
    asker.tell(Lookup(3, DIGEST, b"".join(KEYS), 60_000))
    assert asker.hear() == Found(3, 0, True)
    store.keep(KEYS[:4], BLOCKS[:4])
    asker.hears_nothing()
    store.keep(KEYS[4:5], BLOCKS[4:5])
    assert asker.hear() == Found(3, 5, num_coming=5)


def test_an_early_lookup_is_answered_in_the_middle_of_a_pass(store: BlockStore, asker: Asker) -> None:
    """A prompt of one chunk: half of its bytes are there when two of four blocks' three layers are."""
    store.expect(7, KEYS[:4])
    asker.tell(Lookup(3, DIGEST, b"".join(KEYS[:4]), 60_000))
    assert asker.hear() == Found(3, 0, True)
    store.fill(7, KEYS[:4], LIMIT)
    grow(store, 0, 4, 0)
    asker.hears_nothing()
    grow(store, 0, 4, 1)
    assert asker.hear() == Found(3, 0, num_coming=4)


def test_promises_without_progress_do_not_count(store: BlockStore, asker: Asker) -> None:
    store.keep(KEYS[:6], BLOCKS[:6])
    store.expect(7, KEYS)
    asker.tell(Lookup(3, DIGEST, b"".join(KEYS), 1))
    assert asker.hear() == Found(3, 6, True)
    assert asker.hear() == Found(3, 6)


def test_another_layout_is_told_who_answers(asker: Asker) -> None:
    for request in (Want(1, b"other", b"".join(KEYS), b"", 1 << 20, 1000), Lookup(1, b"other", KEYS[0], 1)):
        asker.tell(request)
        assert asker.hear() == Welcome(Layout.of(FACTS))


def test_hostile_messages_change_nothing(store: BlockStore, asker: Asker) -> None:
    store.keep(KEYS, BLOCKS)
    for number, value in [(2, "x"), (3, b"seven.."), (5, -1), (5, 1 << 50), (6, 0), (6, "soon"), (0, "Nobody")]:
        bad: list[object] = ["Want", 1, DIGEST, KEYS[0], b"", 5, 1000]
        bad[number] = value
        asker.socket.send(msgspec.msgpack.encode(bad))
    asker.socket.send(b"\x91" * 5000)
    asker.socket.send_multipart([encode(Have(1)), b"more"])
    asker.hears_nothing()
    asker.tell(Want(5, DIGEST, b"", b"\xff" * 40_000, 1 << 40, 1000))
    assert asker.hear() == Coming(5, 0, 0)


def test_wants_of_one_asker_are_bounded(store: BlockStore, asker: Asker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(p2p_server, "_MAX_WANTS", 3)
    store.expect(7, KEYS)
    for number in range(4):
        asker.want(number)
    assert [asker.hear() for _ in range(4)] == [*(Coming(i, 0, 10) for i in range(3)), Gone(3)]


def test_an_asker_that_leaves_is_forgotten(store: BlockStore, asker: Asker, folder: Path) -> None:
    store.expect(7, KEYS)
    asker.want()
    asker.hear()
    asker.socket.close()
    again = Asker(asker.context, f"ipc://{folder}/kv")
    store.keep(KEYS, BLOCKS)
    again.want()
    assert again.hear() == Coming(1, 10, 0)
    assert again.hear()[0].num == 3
    again.socket.close()
