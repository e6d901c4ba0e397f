"""The half that moves blocks: replies, restarts, and sockets."""

import random
import shutil
import socket
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from pagewire.errors import ConfigError

from .test_p2p import BLOCK_BYTES, SIZE, Instance, prompt


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


def test_many_replies_make_one_load(folder, instance, monkeypatch):
    monkeypatch.setattr("pagewire.engine.kv_connector.p2p_worker.MAX_REPLY_BYTES", 3 * BLOCK_BYTES)
    prefill, decode = instance(serve=f"{folder}/kv"), instance(peer=f"{folder}/kv")
    blocks = random.Random(1).sample(range(64), 20)
    prefill.serve(prompt(1, 81), blocks)
    request = prompt(2, 81)
    assert decode.matched(request) == 80
    assert decode.load(request, blocks[::-1], 20) == set()
    assert torch.equal(decode.content(blocks[::-1]), prefill.content(blocks))


def test_the_worker_keeps_what_the_core_thinks(folder, instance):
    """Random requests that end, of three families with common beginnings, and more blocks than there is room for."""
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
        assert all(key in prefill.core._kept for key in head), "of one request the tail goes first"
    prefill.step()
    assert prefill.worker._store._blocks.keys() == prefill.core._kept.keys()


def test_a_restarted_peer_is_found_again(folder, instance):
    first, decode = Instance(serve=f"{folder}/kv"), instance(peer=f"{folder}/kv", fetch_timeout_ms="10000")
    first.serve(prompt(1, 30), list(range(8)))
    assert decode.matched(prompt(2, 30)) == 28
    first.close()
    second = instance(serve=f"{folder}/kv")
    assert decode.matched(prompt(3, 30)) == 0
    second.serve(prompt(1, 30), list(range(8)))
    request = prompt(4, 30)
    assert decode.matched(request) == 28
    assert decode.load(request, list(range(8, 15)), 7) == set()
    assert torch.equal(decode.content(list(range(8, 15))), second.content(list(range(7))))


def test_blocks_that_are_gone_when_they_are_fetched(folder, instance):
    prefill, decode = instance(serve=f"{folder}/kv"), instance(peer=f"{folder}/kv")
    prefill.serve(prompt(1, 30), list(range(8)))
    request = prompt(2, 30)
    assert decode.matched(request) == 28
    prefill.worker._store.drop(request.block_keys(7, SIZE)[4:])
    assert decode.load(request, list(range(10, 17)), 7) == {14, 15, 16}
    assert torch.equal(decode.content([10, 11, 12, 13]), prefill.content([0, 1, 2, 3]))
    assert decode.matched(prompt(3, 30)) == 0, "it is left alone for a moment"
    assert decode.core.tiers()[0].num_failed == 3


def test_closing_in_the_middle_of_a_fetch(folder):
    decode = Instance(peer=f"{folder}/nobody", fetch_timeout_ms="600000")
    decode.core.update_state_after_alloc(prompt(1, 30), list(range(7)), 28)
    decode.step()
    decode.close()
    assert not any(thread.name.startswith("p2p") for thread in threading.enumerate())


def test_the_socket_is_the_owners_alone(folder, instance):
    instance(serve=f"{folder}/kv")
    assert stat.S_IMODE((folder / "kv").stat().st_mode) == 0o600
    with pytest.raises(ConfigError, match="another instance serves on"):
        Instance(serve=f"{folder}/kv")


def test_closing_removes_the_socket(folder):
    served = Instance(serve=f"{folder}/kv")
    served.close()
    served.close()
    assert not list(folder.iterdir())


def test_what_a_dead_instance_left_is_no_obstacle(folder, instance):
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(f"{folder}/kv")
    instance(serve=f"{folder}/kv").serve(prompt(1, 30), list(range(8)))
    assert instance(peer=f"{folder}/kv").matched(prompt(2, 30)) == 28
