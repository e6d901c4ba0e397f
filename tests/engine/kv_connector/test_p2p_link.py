"""Instances over loopback TCP with CURVE keys: who is admitted, which peers requests name, what is streamed, and what
happens when connections break."""

import errno
import random
from array import array
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zmq
from kv_instance import Asked, held
from msgspec.structs import replace
from p2p_instance import BLOCK_BYTES, DEADLINE_S, FACTS, SIZE, FakeRequest, Instance, Pass, prompt, wait_for
from proxy import Proxy
from waiting import until

from pagewire.engine.attention.cache_groups import Lifetime
from pagewire.engine.attention.kv_cache import KvCache, KvShape, StateTile, Tile
from pagewire.engine.kv_connector import p2p, p2p_fetcher, p2p_link, p2p_probe, p2p_server, pause
from pagewire.engine.kv_connector.p2p import P2pConnector
from pagewire.engine.kv_connector.p2p_fetcher import Fetcher
from pagewire.engine.kv_connector.p2p_store import BlockStore
from pagewire.engine.kv_connector.p2p_worker import layer_stops
from pagewire.errors import ConfigError
from pagewire.tools.servers import free_port

Start = Callable[..., Instance]
OF_RANK = [replace(FACTS, rank=rank, rank_bytes=(BLOCK_BYTES, BLOCK_BYTES)) for rank in (0, 1)]


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, str]:
    return {"key-file": str(tmp_path / "keys")}


@pytest.fixture
def served(instance: Start, keys: dict[str, str]) -> Iterator[tuple[Instance, int]]:
    """A prefill instance, and its port."""
    port = free_port()
    yield instance(serve=f"tcp://127.0.0.1:{port}", **keys), port


def begin(prefill: Instance, request: FakeRequest) -> None:
    """The request is admitted: its blocks are announced."""
    prefill.core.get_num_new_matched_tokens(request, 0)
    prefill.step()


def compute(prefill: Instance, request: FakeRequest, blocks: list[int], first: int, last: int) -> None:
    """A chunk fills these blocks."""
    for pair in prefill.cache.pages:
        for page in pair:
            page[blocks[first:last]] = torch.randn(last - first, *page.shape[1:])
    request.num_computed = last * SIZE
    prefill.core.filled(request, held(request, blocks[:last]))
    prefill.step()


def ask_early(decode: Instance, request: FakeRequest) -> None:
    """Asks, until the peer has said that the blocks are coming."""

    def is_coming() -> bool:
        assert decode.core.get_num_new_matched_tokens(request, 0) == (None, True)
        return bool(decode.core._questions[request.rid].is_coming)

    wait_for(is_coming, bool)


def be_asked(prefill: Instance, request: FakeRequest) -> None:
    """A pass of this request that begins now is followed: the server knows who waits for its blocks."""
    until(lambda: prefill.worker._server.awaits(request.keys), "the server knows who waits", DEADLINE_S)


def test_blocks_travel_over_tcp(served: tuple[Instance, int], instance: Start, keys: dict[str, str]) -> None:
    prefill, port = served
    decode = instance(peer=f"tcp://127.0.0.1:{port}", fetch_timeout_ms="20000", **keys)
    prefill.serve(prompt(1, 201), random.Random(1).sample(range(64), 51))
    request = prompt(2, 201)
    assert decode.matched(request) == 200
    assert decode.load(request, list(range(50)), 50) == set()
    assert torch.equal(decode.content(list(range(50))), prefill.content(random.Random(1).sample(range(64), 51)[:50]))


@pytest.mark.usefixtures("patient_start")
def test_other_keys_are_one_sentence_at_the_start(served: tuple[Instance, int], tmp_path: Path) -> None:
    options = {"peer": f"tcp://127.0.0.1:{served[1]}", "key-file": str(tmp_path / "others")}
    with pytest.raises(ConfigError, match="has other keys; give both the same key-file"):
        P2pConnector.core(options, FACTS)


def test_a_key_file_that_others_may_read_is_refused(tmp_path: Path, keys: dict[str, str]) -> None:
    options = {"peer": "tcp://127.0.0.1:5", **keys}
    P2pConnector.check(options)
    (tmp_path / "keys").chmod(0o644)
    with pytest.raises(ConfigError, match="may be read by other users"):
        P2pConnector.check(options)
    with pytest.raises(ConfigError, match="cannot be used"):
        P2pConnector.check({"peer": "tcp://127.0.0.1:5", "key-file": str(tmp_path / "no" / "keys")})


def test_a_port_that_is_taken_is_one_sentence(served: tuple[Instance, int], keys: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="cannot serve on tcp:"):
        Instance(serve=f"tcp://127.0.0.1:{served[1]}", **keys)


def test_a_peer_that_is_not_there_yet_is_found_later(instance: Start, keys: dict[str, str]) -> None:
    port = free_port()
    decode = instance(peer=f"tcp://127.0.0.1:{port}", timeout_ms="200", **keys)
    assert decode.matched(prompt(1, 30)) == 0
    instance(serve=f"tcp://127.0.0.1:{port}", **keys).serve(prompt(1, 30), list(range(8)))
    wait_for(lambda: decode.core.get_num_new_matched_tokens(prompt(2, 30), 0)[0], lambda num: num == 28)


def matched_at(decode: Instance, rid: int, address: str) -> int:
    """What the peer at this address has of a new request that names it."""
    request = prompt(rid, 30)
    request.kv_peer = address
    return decode.matched(request)


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that has failed is asked again at once."""
    monkeypatch.setattr(pause, "FIRST_PAUSE_S", 0.0)


def lines(caplog: pytest.LogCaptureFixture, *words: str) -> list[str]:
    return [one.getMessage() for one in caplog.records if all(word in one.getMessage() for word in words)]


@pytest.mark.usefixtures("no_pause")
def test_other_keys_of_a_peer_that_is_named_are_told_on_both_sides(
    served: tuple[Instance, int], instance: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    address = f"tcp://127.0.0.1:{served[1]}"
    decode = instance(**{"peer": "named", "key-file": str(tmp_path / "others"), "timeout_ms": "200"})
    rids = count(10)

    def are_told() -> bool:
        assert matched_at(decode, next(rids), address) == 0
        return bool(lines(caplog, "other keys") and lines(caplog, "was refused"))

    until(are_told, "both sides have told why", DEADLINE_S)
    for _ in range(3):
        matched_at(decode, next(rids), address)
    (ours,) = lines(caplog, "other keys")
    assert ours.startswith(f"the engine at {address} cannot serve KV to this one: it has other keys (give both the")
    assert lines(caplog, "was refused") == [f"127.0.0.1 was refused at {address}: its key-file is not the one here"]


@pytest.mark.usefixtures("no_pause")
@pytest.mark.parametrize("step_s", [0.06, 0.12])
def test_a_busy_core_which_asks_once_a_step_learns_of_other_keys_too(
    step_s: float,
    served: tuple[Instance, int],
    instance: Start,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decode = instance(**{"peer": "named", "key-file": str(tmp_path / "others"), "timeout_ms": "100"})
    request = prompt(10, 30)
    request.kv_peer = f"tcp://127.0.0.1:{served[1]}"
    num_steps = 0
    clock = SimpleNamespace(monotonic=lambda: num_steps * step_s)
    for module in (p2p, p2p_link, p2p_probe):
        monkeypatch.setattr(module, "time", clock)

    def are_told() -> list[str]:
        nonlocal num_steps
        num_steps += 1
        decode.core.get_num_new_matched_tokens(request, 0)
        return lines(caplog, "other keys")

    until(are_told, "it is told", DEADLINE_S)


@pytest.mark.usefixtures("no_pause")
def test_a_peer_that_cannot_be_reached_is_told_again_once_it_has_served(
    instance: Start, keys: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    decode = instance(peer="named", timeout_ms="200", **keys)
    rids = count(10)
    until(lambda: matched_at(decode, next(rids), address) == 0 and lines(caplog), "it is told", DEADLINE_S)
    for _ in range(3):
        assert matched_at(decode, next(rids), address) == 0
    told = [f"the engine at {address} cannot serve KV to this one: it cannot be reached"]
    assert lines(caplog) == told
    prefill = instance(serve=address, **keys)
    prefill.serve(prompt(1, 30), list(range(8)))
    until(lambda: matched_at(decode, next(rids), address) == 28, "the peer is found", DEADLINE_S)
    caplog.clear()
    prefill.close()
    until(lambda: matched_at(decode, next(rids), address) == 0 and lines(caplog, "reached"), "it is told", DEADLINE_S)
    assert lines(caplog, "reached") == told


@pytest.mark.usefixtures("no_pause")
def test_a_peer_is_found_where_another_program_has_answered_before(
    instance: Start, keys: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """One that speaks ZeroMQ's protocol, with another mechanism: ZeroMQ itself does not connect again then."""
    port = free_port()
    address = f"tcp://127.0.0.1:{port}"
    decode = instance(peer="named", timeout_ms="300", **keys)
    rids = count(10)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as other:
        other.linger = 0
        other.bind(address)
        until(
            lambda: matched_at(decode, next(rids), address) == 0 and lines(caplog, "other keys"),
            "it is told",
            DEADLINE_S,
        )
    prefill = instance(serve=address, **keys)
    prefill.serve(prompt(1, 30), list(range(8)))
    until(lambda: matched_at(decode, next(rids), address) == 28, "the peer is found", DEADLINE_S)


@pytest.mark.usefixtures("no_pause")
def test_a_peer_that_says_nothing_is_told(folder: Path, instance: Start, caplog: pytest.LogCaptureFixture) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        router.bind(f"ipc://{folder}/kv")
        decode = instance(replace(FACTS, may_refuse=False), peer=f"{folder}/kv", timeout_ms="300")
        rids = count(10)
        until(
            lambda: decode.matched(prompt(next(rids), 30)) == 0 and lines(caplog, "in time"), "it is told", DEADLINE_S
        )
        for _ in range(3):
            decode.matched(prompt(next(rids), 30))
        assert len(lines(caplog, "in time")) == 1


@pytest.mark.usefixtures("no_pause")
def test_the_rank_that_does_not_answer_is_told(instance: Start, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    prefill = [instance(facts, serve=f"{folder}/kv") for facts in OF_RANK]
    prefill[1].close()
    decode = instance(OF_RANK[0], peer=f"{folder}/kv", timeout_ms="300")
    rids = count(10)

    def is_told() -> bool:
        assert decode.matched(prompt(next(rids), 30)) == 0
        return bool(lines(caplog, f"ipc://{folder}/kv.1 ", "cannot be reached"))

    until(is_told, "it is told", DEADLINE_S)


def start_two_ranks(instance: Start, port: int, hosts: tuple[str, ...], keys: dict[str, str]) -> None:
    """They serve a prompt of 7 full blocks."""
    for facts in OF_RANK:
        one = instance(replace(facts, hosts=hosts), serve=f"tcp://127.0.0.1:{port}", **keys)
        one.serve(prompt(1, 30), list(range(8)))


@pytest.mark.parametrize("hosts", [(), ("", "127.0.0.2")], ids=["one machine", "two machines"])
def test_no_connection_that_lasts_has_a_monitor(hosts: tuple[str, ...], instance: Start, keys: dict[str, str]) -> None:
    """Nobody would read its events, and ZeroMQ waits for that: in the end the core does nothing any more."""
    port = free_port(3)
    decode = instance(replace(OF_RANK[0], may_refuse=False), peer=f"tcp://127.0.0.1:{port}", timeout_ms="200", **keys)
    assert decode.matched(prompt(1, 30)) == 0, "it is not there yet"
    start_two_ranks(instance, port, hosts, keys)
    wait_for(lambda: decode.core.get_num_new_matched_tokens(prompt(2, 30), 0)[0], lambda num: num == 28)
    (peer,) = decode.core._peers.values()
    assert len(peer.links) == 2
    for link in {*peer.links, peer._door}:
        assert link._socket._monitor_socket is None and link._probe is None


def test_a_peer_that_was_started_again_has_credit(instance: Start, keys: dict[str, str]) -> None:
    """It knows nothing of what the one before was given."""
    port = free_port()
    decode = instance(peer=f"tcp://127.0.0.1:{port}", fetch_timeout_ms="30000", **keys)
    for seed in (1, 2):
        prefill = instance(serve=f"tcp://127.0.0.1:{port}", **keys)
        prefill.serve(prompt(1, 41, seed), list(range(11)))
        request = prompt(seed, 41, seed)
        wait_for(lambda request=request: decode.core.get_num_new_matched_tokens(request, 0)[0], bool)
        assert decode.load(request, list(range(20, 30)), 10) == set()
        assert torch.equal(decode.content(list(range(20, 30))), prefill.content(list(range(10))))
        prefill.close()


def test_requests_name_their_peers(instance: Start, keys: dict[str, str]) -> None:
    ports = [free_port(), free_port()]
    prefills = [instance(serve=f"tcp://127.0.0.1:{port}", **keys) for port in ports]
    decode = instance(peer="named", fetch_timeout_ms="20000", **keys)
    assert decode.core.get_num_new_matched_tokens(prompt(1, 30), 0) == (0, False), "it names none"
    for seed, (prefill, port) in enumerate(zip(prefills, ports, strict=True)):
        prefill.serve(prompt(1, 30, seed), list(range(8)))
        request = prompt(10 + seed, 30, seed)
        request.kv_peer = f"tcp://127.0.0.1:{port}"
        assert decode.matched(request) == 28
        assert decode.load(request, list(range(20, 27)), 7) == set()
        assert torch.equal(decode.content(list(range(20, 27))), prefill.content(list(range(7))))
        other = prompt(20 + seed, 30, 7)
        other.kv_peer = request.kv_peer
        assert decode.matched(other) == 0
    nowhere = prompt(30, 30)
    nowhere.kv_peer = "tcp://:"
    assert decode.core.get_num_new_matched_tokens(nowhere, 0) == (0, False)


def test_a_dead_peer_does_not_stop_the_others(
    served: tuple[Instance, int], instance: Start, keys: dict[str, str]
) -> None:
    prefill, port = served
    prefill.serve(prompt(1, 30), list(range(8)))
    decode = instance(peer="named", fetch_timeout_ms="600000", **keys)
    dead = prompt(2, 30)
    dead.kv_peer = f"tcp://127.0.0.1:{free_port()}"
    decode.core.update_state_after_alloc(dead, list(range(30, 37)), 28)
    decode.step()
    request = prompt(3, 30)
    request.kv_peer = f"tcp://127.0.0.1:{port}"
    assert decode.matched(request) == 28
    decode.core.update_state_after_alloc(request, list(range(20, 27)), 28)
    decode.step()
    assert wait_for(decode.worker.get_finished, wanted=lambda x: bool(x[1])) == (set(), {3}), "not after the dead one"
    decode.expire()
    assert wait_for(decode.worker.get_finished, wanted=lambda x: bool(x[1])) == (set(), {2})
    assert decode.worker.get_block_ids_with_load_errors() == set(range(30, 37))


def test_a_prompt_is_streamed_while_it_is_computed(
    served: tuple[Instance, int], instance: Start, keys: dict[str, str]
) -> None:
    prefill, port = served
    decode = instance(peer=f"tcp://127.0.0.1:{port}", wait_ms="20000", fetch_timeout_ms="20000", **keys)
    computing, blocks = prompt(1, 41), random.Random(2).sample(range(64), 11)
    request = FakeRequest(2, array("i", computing.ids))
    begin(prefill, computing)
    ask_early(decode, request)
    compute(prefill, computing, blocks, 0, 6)
    assert decode.matched(request) == 40, "half of it exists"
    decode.core.update_state_after_alloc(request, list(range(10)), 40)
    decode.step()
    wait_for(lambda: torch.equal(decode.content(list(range(6))), prefill.content(blocks[:6])), bool)
    assert decode.worker.get_finished() == (set(), set()), "the rest is not there yet"
    compute(prefill, computing, blocks, 6, 9)
    wait_for(lambda: torch.equal(decode.content(list(range(9))), prefill.content(blocks[:9])), bool)
    compute(prefill, computing, blocks, 9, 10)
    assert wait_for(decode.worker.get_finished, wanted=lambda x: bool(x[1])) == (set(), {2})
    assert decode.worker.get_block_ids_with_load_errors() == set()
    assert torch.equal(decode.content(list(range(10))), prefill.content(blocks[:10]))
    num_timed, _ = decode.worker.take_load_cost()
    assert num_timed <= 6, "waiting for the prompt is no cost of loading"
    computing.num_computed = 40
    prefill.core.request_finished(computing, blocks)
    prefill.step()
    assert not prefill.worker._store._coming and not prefill.core._expected


def test_a_prompt_that_is_cancelled_is_computed_from_there(
    served: tuple[Instance, int], instance: Start, keys: dict[str, str]
) -> None:
    prefill, port = served
    decode = instance(peer=f"tcp://127.0.0.1:{port}", wait_ms="20000", fetch_timeout_ms="20000", **keys)
    computing, blocks = prompt(1, 41), list(range(30, 41))
    request = FakeRequest(2, array("i", computing.ids))
    begin(prefill, computing)
    ask_early(decode, request)
    compute(prefill, computing, blocks, 0, 6)
    assert decode.matched(request) == 40
    decode.core.update_state_after_alloc(request, list(range(10)), 40)
    decode.step()
    prefill.core.request_finished(computing, blocks[:6])
    prefill.step()
    assert wait_for(decode.worker.get_finished, wanted=lambda x: bool(x[1])) == (set(), {2})
    assert decode.worker.get_block_ids_with_load_errors() == {6, 7, 8, 9}
    assert torch.equal(decode.content(list(range(6))), prefill.content(blocks[:6]))


@pytest.fixture
def proxy(served: tuple[Instance, int]) -> Iterator[Proxy]:
    with Proxy(served[1]) as proxy:
        yield proxy


@pytest.mark.parametrize("trouble", ["cut for a moment", "cut for ever", "silent"])
def test_a_connection_that_breaks_in_the_middle(
    trouble: str, served: tuple[Instance, int], proxy: Proxy, instance: Start, keys: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(p2p_server, "PIECE_BYTES", 2 * BLOCK_BYTES)
    prefill, _ = served
    decode = instance(peer=f"tcp://127.0.0.1:{proxy.port}", wait_ms="20000", fetch_timeout_ms="600000", **keys)
    computing, blocks = prompt(1, 41), list(range(30, 41))
    request = FakeRequest(2, array("i", computing.ids))
    begin(prefill, computing)
    ask_early(decode, request)
    compute(prefill, computing, blocks, 0, 6)
    assert decode.matched(request) == 40
    decode.core.update_state_after_alloc(request, list(range(10)), 40)
    decode.step()
    wait_for(lambda: torch.equal(decode.content(list(range(6))), prefill.content(blocks[:6])), bool)
    if trouble == "silent":
        proxy.partition()
    else:
        proxy.cut()
        until(lambda: proxy.num_refused > 5, "the connection is tried again", DEADLINE_S)
    compute(prefill, computing, blocks, 6, 10)
    if trouble == "cut for a moment":
        proxy.heal()
    else:
        decode.expire()
    assert wait_for(decode.worker.get_finished, wanted=lambda x: bool(x[1])) == (set(), {2})
    failed = decode.worker.get_block_ids_with_load_errors()
    assert failed == (set() if trouble == "cut for a moment" else {6, 7, 8, 9})
    good = [i for i in range(10) if i not in failed]
    assert torch.equal(decode.content(good), prefill.content([blocks[i] for i in good]))


def test_a_connection_that_cannot_be_made_again(
    served: tuple[Instance, int], proxy: Proxy, instance: Start, keys: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process has no descriptor left for a new socket: this load fails, and later ones succeed."""
    prefill, _ = served
    decode = instance(peer=f"tcp://127.0.0.1:{proxy.port}", wait_ms="20000", fetch_timeout_ms="30000", **keys)
    computing, blocks = prompt(1, 41), list(range(30, 41))
    begin(prefill, computing)
    ask_early(decode, FakeRequest(2, array("i", computing.ids)))
    compute(prefill, computing, blocks, 0, 6)
    request = FakeRequest(2, array("i", computing.ids))
    assert decode.matched(request) == 40
    decode.core.update_state_after_alloc(request, list(range(10)), 40)
    decode.step()
    wait_for(lambda: torch.equal(decode.content(list(range(6))), prefill.content(blocks[:6])), bool)
    connect, num_failed = Fetcher._connect, 0

    def failing(self: Fetcher, address: str) -> Any:
        nonlocal num_failed
        num_failed += 1
        if num_failed == 1:
            raise zmq.ZMQError(errno.EMFILE)
        return connect(self, address)

    monkeypatch.setattr(Fetcher, "_connect", failing)
    proxy.cut()
    assert wait_for(decode.worker.get_finished, wanted=lambda x: bool(x[1])) == (set(), {2})
    assert decode.worker.get_block_ids_with_load_errors() == {6, 7, 8, 9}
    proxy.heal()
    compute(prefill, computing, blocks, 6, 10)
    decode.core.update_state_after_alloc(prompt(3, 41), list(range(20, 30)), 40)
    decode.step()
    assert wait_for(decode.worker.get_finished, wanted=lambda x: bool(x[1])) == (set(), {3})
    assert decode.worker.get_block_ids_with_load_errors() == set()
    assert torch.equal(decode.content(list(range(20, 30))), prefill.content(blocks[:10]))


# Within a pass: the layers that it has computed leave while it computes the others.

BLOCKS, OURS = [9, 3, 30, 4, 41, 5, 60, 7, 8, 1, 2], list(range(20, 30))
PATIENT = {"wait_ms": "30000", "fetch_timeout_ms": "30000"}


def layers(instance: Instance, blocks: list[int], *which: int) -> torch.Tensor:
    return instance.content(blocks)[list(which)]


def load_early(prefill: Instance, decode: Instance) -> tuple[FakeRequest, Pass]:
    """A prompt of ten blocks and one chunk, of which two layers were computed and have come to the decode instance."""
    computing = prompt(1, 41)
    request = FakeRequest(2, array("i", computing.ids))
    begin(prefill, computing)
    ask_early(decode, request)
    be_asked(prefill, computing)
    running = Pass(prefill, computing, BLOCKS, 0, 10)
    assert running.stops == (0, 1), "all layers but the last are told of during the pass"
    running.compute([0, 1])
    assert decode.matched(request) == 40, "two thirds of it exist"
    decode.core.update_state_after_alloc(request, OURS, 40)
    decode.step()
    wait_for(lambda: torch.equal(layers(decode, OURS, 0, 1), layers(prefill, BLOCKS[:10], 0, 1)), bool)
    return computing, running


def took(decode: Instance) -> set[int]:
    """The blocks that failed, once the load is over. No other block may lack a layer."""
    assert wait_for(decode.worker.get_finished, wanted=lambda x: bool(x[1])) == (set(), {2})
    return decode.worker.get_block_ids_with_load_errors()


TRANSPORTS = ["zmq", pytest.param("nixl", marks=pytest.mark.skipif(find_spec("nixl") is None, reason="no nixl"))]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_layers_leave_while_the_pass_computes_the_others(transport: str, instance: Start, folder: Path) -> None:
    prefill = instance(serve=f"{folder}/kv", transport=transport)
    decode = instance(peer=f"{folder}/kv", transport=transport, **PATIENT)
    computing, running = load_early(prefill, decode)
    running.compute([2])
    assert decode.worker.get_finished() == (set(), set()), "the pass may still be bad"
    running.end()
    assert took(decode) == set()
    assert torch.equal(decode.content(OURS), prefill.content(BLOCKS[:10]))
    computing.num_computed = 40
    prefill.core.request_finished(computing, BLOCKS)
    prefill.step()
    store = prefill.worker._store
    assert not store._fills and not store._coming and store._blocks.keys() == prefill.core._kept.keys()


FULL, WINDOW, STATE = Tile(2, 4, 4), Tile(1, 4, 4, Lifetime("window", 8)), StateTile((3, 100))
WHOLE = KvShape(layers=(*[WINDOW] * 5, FULL) * 3, dtype=torch.float32, states=(STATE,) * 2)
SHAPES = {
    "one group": KvShape(layers=(FULL,) * 11, dtype=torch.float32),
    "a window in several pages": KvShape(layers=(*[WINDOW] * 5, FULL) * 3, dtype=torch.float32),
    "tiles of several sizes": KvShape(layers=(FULL, Tile(2, 8, 0), Tile(5, 4, 4), FULL) * 2, dtype=torch.float32),
    "states": WHOLE,
    "a stage without full attention": KvShape(layers=(WINDOW,) * 4, dtype=torch.float32, whole=WHOLE),
}


@pytest.mark.parametrize("name", SHAPES)
def test_what_leaves_at_a_stop_is_written_and_never_all_of_a_block(name: str) -> None:
    cache = KvCache(shape=SHAPES[name], num_pages=1, block_size=SIZE, device=torch.device("cpu"))
    groups, num = cache.groups, len(cache.shape.layers)
    sizes = [group.pages * groups.page_bytes for group in groups.groups if group.lifetime.kind != "state"]
    stops = layer_stops(cache)
    *before, last = stops
    assert len(stops) == min(num, 8) and last == num - 1 and stops[last] == tuple(sizes)
    for layer in before:
        assert all(end < size for end, size in zip(stops[layer], sizes, strict=True))
        for tile, place in enumerate(groups.places[:num]):
            begin = place.shelf * groups.page_bytes + place.offset
            assert tile <= layer or stops[layer][place.group] <= begin, "the pass has yet to write it"
    for earlier, later in pairwise(stops.values()):
        assert all(a <= b for a, b in zip(earlier, later, strict=True))


def test_layers_come_with_little_credit(instance: Start, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces of two blocks' layers, of which two may be under way."""
    monkeypatch.setattr(p2p_server, "PIECE_BYTES", 2 * BLOCK_BYTES // 3)
    monkeypatch.setattr(p2p_fetcher, "CREDIT_BYTES", 4 * BLOCK_BYTES // 3)
    monkeypatch.setattr(p2p_fetcher, "_CREDIT_STEP", BLOCK_BYTES)
    prefill, decode = instance(serve=f"{folder}/kv"), instance(peer=f"{folder}/kv", **PATIENT)
    _, running = load_early(prefill, decode)
    running.compute([2])
    running.end()
    assert took(decode) == set()
    assert torch.equal(decode.content(OURS), prefill.content(BLOCKS[:10]))


def lose(prefill: Instance, decode: Instance) -> None:
    """The server dies in the middle of the pass: no block has all of its layers."""
    _, running = load_early(prefill, decode)
    running.compute([2])
    prefill.worker.close()
    decode.expire()
    assert took(decode) == set(OURS)


def spoil(prefill: Instance, decode: Instance) -> None:
    """All layers were computed, but the numbers were not finite."""
    computing, running = load_early(prefill, decode)
    running.compute([2])
    for rid in (8, 9):
        assert decode.matched(prompt(rid, 41, seed=rid)) == 0, "the server has sent all that it could"
    running.end(is_good=False)
    prefill.core.spoiled(computing)
    prefill.step()
    assert took(decode) == set(OURS)
    store = prefill.worker._store
    assert not store._fills and not store._coming and not prefill.core._expected


@pytest.mark.parametrize("end", [lose, spoil])
def test_a_block_whose_last_layer_did_not_come_is_computed(
    end: Callable[[Instance, Instance], None], instance: Start, folder: Path
) -> None:
    end(instance(serve=f"{folder}/kv"), instance(peer=f"{folder}/kv", **PATIENT))


def test_a_block_that_counts_before_its_last_layer_is_caught(
    instance: Start, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = Fetcher._finish

    def mutant(self: Fetcher, load: Any) -> None:
        load.have.update(load.parts)
        finish(self, load)

    monkeypatch.setattr(Fetcher, "_finish", mutant)
    with pytest.raises(AssertionError):
        spoil(instance(serve=f"{folder}/kv"), instance(peer=f"{folder}/kv", **PATIENT))


def test_a_last_layer_that_leaves_before_the_pass_is_known_to_be_good_is_caught(
    instance: Start, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill = BlockStore.fill
    monkeypatch.setattr(BlockStore, "fill", lambda self, rid, names, limit, num: fill(self, rid, names, BLOCK_BYTES))
    with pytest.raises(AssertionError):
        spoil(instance(serve=f"{folder}/kv"), instance(peer=f"{folder}/kv", **PATIENT))


def test_a_connection_that_breaks_in_the_middle_of_a_pass(
    served: tuple[Instance, int], proxy: Proxy, instance: Start, keys: dict[str, str]
) -> None:
    """Blocks that were whole stay, the others begin again."""
    prefill, _ = served
    decode = instance(peer=f"tcp://127.0.0.1:{proxy.port}", **PATIENT, **keys)
    computing = prompt(1, 41)
    request = FakeRequest(2, array("i", computing.ids))
    begin(prefill, computing)
    ask_early(decode, request)
    compute(prefill, computing, BLOCKS, 0, 6)
    assert decode.matched(request) == 40
    decode.core.update_state_after_alloc(request, OURS, 40)
    decode.step()
    wait_for(lambda: torch.equal(decode.content(OURS[:6]), prefill.content(BLOCKS[:6])), bool)
    be_asked(prefill, computing)
    running = Pass(prefill, computing, BLOCKS, 6, 10)
    assert running.stops == (0, 1)
    running.compute([0])
    wait_for(lambda: torch.equal(layers(decode, OURS[6:], 0), layers(prefill, BLOCKS[6:10], 0)), bool)
    proxy.cut()
    until(lambda: proxy.num_refused > 5, "the connection is tried again", DEADLINE_S)
    running.compute([1])
    proxy.heal()
    wait_for(lambda: torch.equal(layers(decode, OURS[6:], 0, 1), layers(prefill, BLOCKS[6:10], 0, 1)), bool)
    running.compute([2])
    running.end()
    assert took(decode) == set()
    assert torch.equal(decode.content(OURS), prefill.content(BLOCKS[:10]))


def test_each_rank_streams_the_layers_of_its_part(instance: Start, folder: Path) -> None:
    """Of a prompt of one chunk, too: each rank is asked, so it knows who waits before the pass."""
    prefill = [instance(facts, serve=f"{folder}/kv") for facts in OF_RANK]
    decode = [instance(facts, peer=f"{folder}/kv", **PATIENT) for facts in OF_RANK]
    computing = prompt(1, 41)
    request = FakeRequest(2, array("i", computing.ids))
    for one in prefill:
        begin(one, computing)
    ask_early(decode[0], request)
    for one in prefill:
        be_asked(one, computing)
    passes = [Pass(one, computing, BLOCKS, 0, 10) for one in prefill]
    passes[0].compute([0, 1])
    until(lambda: 0 in answered(decode[0]), "the first rank has answered", DEADLINE_S)
    assert decode[0].core.get_num_new_matched_tokens(request, 0) == (None, True), "the second one has not"
    passes[1].compute([0, 1])
    assert decode[0].matched(request) == 40
    for one in decode:
        one.core.update_state_after_alloc(request, OURS, 40)
        one.step()
    for ours, theirs, running in zip(decode, prefill, passes, strict=True):
        wait_for(lambda a=ours, b=theirs: torch.equal(layers(a, OURS, 0, 1), layers(b, BLOCKS[:10], 0, 1)), bool)
        running.compute([2])
        running.end()
        assert took(ours) == set()
        assert torch.equal(ours.content(OURS), theirs.content(BLOCKS[:10]))


def answered(decode: Instance) -> set[int]:
    """The ranks that have said what they have, or are about to."""
    decode.core.get_num_new_matched_tokens(FakeRequest(2, prompt(1, 41).ids), 0)
    return set(decode.core._questions[2].replies)


def test_a_pass_that_nobody_waits_for_is_not_followed(instance: Start, folder: Path) -> None:
    prefill = instance(serve=f"{folder}/kv")
    computing = prompt(1, 41)
    begin(prefill, computing)
    running = Pass(prefill, computing, BLOCKS, 0, 10)
    assert running.stops == ()
    running.compute([0, 1, 2])
    assert not prefill.worker._store._fills
    running.end()
    decode = instance(peer=f"{folder}/kv", **PATIENT)
    assert decode.matched(prompt(2, 41)) == 40
    assert decode.load(prompt(2, 41), OURS, 10) == set()
    assert torch.equal(decode.content(OURS), prefill.content(BLOCKS[:10]))


def test_two_rows_of_a_pass_that_compute_the_same_blocks(instance: Start, folder: Path) -> None:
    """The first is followed. It turns out to be bad, and what the other one has computed is sent from its beginning."""
    prefill, decode = instance(serve=f"{folder}/kv"), instance(peer=f"{folder}/kv", **PATIENT)
    rows, others = [prompt(rid, 41) for rid in (1, 5)], list(range(40, 51))
    request = FakeRequest(2, array("i", rows[0].ids))
    for row in rows:
        begin(prefill, row)
    ask_early(decode, request)
    be_asked(prefill, rows[0])
    for row, blocks in zip(rows, (BLOCKS, others), strict=True):
        prefill.core.filling(row, held(row, blocks[:10]))
    running = Pass(prefill, FakeRequest(9, rows[0].ids), BLOCKS, 0, 10)
    assert running.stops == (0, 1)
    running.compute([0, 1])
    assert decode.matched(request) == 40
    decode.core.update_state_after_alloc(request, OURS, 40)
    decode.step()
    wait_for(lambda: torch.equal(layers(decode, OURS, 0, 1), layers(prefill, BLOCKS[:10], 0, 1)), bool)
    running.compute([2])
    running.end(is_good=False)
    prefill.core.spoiled(rows[0])
    compute(prefill, rows[1], others, 0, 10)
    assert took(decode) == set()
    assert torch.equal(decode.content(OURS), prefill.content(others[:10]))


def test_streamed_blocks_beyond_the_store_are_evicted(instance: Start, folder: Path) -> None:
    prefill = instance(serve=f"{folder}/kv", size=str(4 * BLOCK_BYTES))
    computing, blocks = prompt(1, 41), list(range(11))
    begin(prefill, computing)
    for first in range(0, 10, 2):
        compute(prefill, computing, blocks, first, first + 2)
        assert len(prefill.worker._store._blocks) <= 4
        assert prefill.worker._store._blocks.keys() == prefill.core._kept.keys()
    assert isinstance(prefill.core, Asked)
