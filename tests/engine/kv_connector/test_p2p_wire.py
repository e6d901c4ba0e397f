"""What a bad peer says costs time and nothing else."""

import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from pagewire.engine.kv_connector.p2p import P2pConnector
from pagewire.engine.kv_connector.p2p_wire import (
    Found,
    Lookup,
    encode,
    read_settings,
)
from pagewire.engine.kv_connector.p2p_worker import P2pWorker
from pagewire.errors import ConfigError

from .test_p2p import BAD_ANSWERS, BLOCK_BYTES, DEADLINE_S, FACTS, BadPeer, Instance, prompt, wait_for


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


@pytest.mark.parametrize("kind", BAD_ANSWERS)
def test_bad_peers_cost_time_and_nothing_else(kind, folder, instance):
    decode = instance(peer=f"{folder}/kv", fetch_timeout_ms="60" if kind in ("silence", "too much") else "9000")
    for pair in decode.cache.pages:
        for page in pair:
            page.zero_()
    peer = BadPeer(folder / "kv", BAD_ANSWERS[kind])
    try:
        request = prompt(1, 30)
        assert decode.matched(request) == 28, "more than was asked for is not believed"
        decode.core.update_state_after_alloc(request, list(range(20, 27)), 28)
        second = prompt(2, 30, seed=1)
        decode.core.update_state_after_alloc(second, list(range(30, 37)), 28)
        decode.step()
        done: set[int] = set()
        while len(done) < 2:
            done |= wait_for(decode.worker.get_finished, wanted=lambda x: bool(x[1]))[1]
        assert decode.worker.get_block_ids_with_load_errors() == {*range(20, 27), *range(30, 37)}
        assert not any(page.any() for pair in decode.cache.pages for page in pair), "nothing unverified is written"
    finally:
        peer.close()


def test_the_server_outlives_nonsense(folder, instance):
    prefill, decode = instance(serve=f"{folder}/kv"), instance(peer=f"{folder}/kv")
    prefill.serve(prompt(1, 30), list(range(8)))
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 5000
        stranger.connect(f"ipc://{folder}/kv")
        for message in (b"", b"\xff" * 100, encode(Lookup(1, bytes(32), BLOCK_BYTES, b"seven..", 0))):
            stranger.send(message)
        stranger.send_multipart([b"a", b"b", b"c"])
        stranger.send(encode(Lookup(2, bytes(32), BLOCK_BYTES, b"", 0)))
        assert stranger.poll(DEADLINE_S * 1000)
        assert stranger.recv() == encode(Found(2, 0))
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(f"{folder}/kv")
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
    assert decode.matched(prompt(2, 30)) == 28


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, "needs serve=PATH, peer=PATH, or both"),
        ({"pear": "x"}, "has no option 'pear'"),
        ({"peer": "tcp://10.0.0.1:5"}, "should be the path of a socket"),
        ({"peer": ""}, "should be the path of a socket"),
        ({"peer": "/tmp/" + "x" * 120}, "at most 107 bytes"),
        ({"peer": "/x", "size": "1G"}, "give that as well"),
        ({"serve": "/x", "size": "much"}, "not a number or a size"),
        ({"serve": "/x", "size": "100"}, "less than one block"),
        ({"peer": "/x", "timeout_ms": "0"}, "a number of milliseconds"),
        ({"peer": "/x", "fetch_timeout_ms": "1.5"}, "a number of milliseconds"),
    ],
)
def test_options_that_make_no_sense(options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        P2pConnector.core(options, FACTS)


def test_places_where_no_socket_can_be(folder):
    (folder / "file").write_text("precious")
    for path, sentence in [(f"{folder}/file", "is no socket"), (f"{folder}/none/kv", "there is no folder")]:
        with pytest.raises(ConfigError, match=sentence):
            P2pWorker(read_settings({"serve": path}, BLOCK_BYTES), FACTS)
    assert (folder / "file").read_text() == "precious"
