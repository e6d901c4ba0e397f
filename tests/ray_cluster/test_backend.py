"""An engine whose ranks Ray places: nodes, the broker and the lead end under streams, and nothing keeps its room."""

import json
import shutil
import urllib.error
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from hidden_folder import can_hide, own_cache
from kv_legs import until_loaded
from open_requests import END_S, GREEDY, OpenRequest, open_stream
from ray_nodes import RayNodes, has_ray, named
from waiting import until

from pagewire.commands.metrics import read
from pagewire.engine.checkpoint.source import DEMO_MODEL
from pagewire.ipc.zmq_channel import read_keys
from pagewire.tools.servers import SERVE, Server, free_port
from pagewire.version import __version__

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.ray,
    pytest.mark.skipif(not has_ray(), reason="make test-ray installs it"),
]
TOKENS = 300
HANG_S = "10"  # less, and a busy machine is taken for a lost one
MORE_BROKERS = """len(ray.wait([
    ray.get_actor(actor['name'], namespace=actor['namespace']).run.remote(b'')
    for actor in ray.util.list_named_actors(all_namespaces=True) if actor['name'].startswith('engine-')
    for _ in range(5)
], timeout=5)[0])"""  # asks the holders as brokers do that were started one after another


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    nodes = RayNodes(RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S="300")
    yield nodes
    nodes.close()


@pytest.fixture
def start(nodes: RayNodes, tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Starts leads of two stages, which are closed after the test."""
    servers: list[Server] = []

    def start_one(*flags: str) -> Server:
        placed = ("--backend", "ray", "--join-address", "tcp://127.0.0.2:0", "--pipeline-parallel-size", "2")
        flags = (*placed, "--hang-timeout-s", HANG_S, "--outage-wait", "60", *flags)
        folder = tmp_path / f"run{len(servers)}"
        servers.append(Server(folder, *flags, command=SERVE, environment=nodes.environment))
        return servers[-1]

    yield start_one
    for server in servers:
        server.close()


def long_stream(server: Server, max_tokens: int = TOKENS) -> OpenRequest:
    return open_stream(server, "/v1/completions", max_tokens=max_tokens)


def text_of(stream: OpenRequest) -> str:
    """The text of a stream, which has ended by its length and without an error."""
    *events, done = stream.events()
    choices = [json.loads(event)["choices"][0] for event in events]
    assert done == "[DONE]" and choices[-1]["finish_reason"] == "length", choices[-1]
    return "".join(choice["text"] for choice in choices)


def health(server: Server) -> str:
    """The body of /health, whatever its status."""
    try:
        return server.get("/health")
    except urllib.error.HTTPError as error:
        with error:
            return error.read().decode()


def says(server: Server, text: str) -> None:
    until(lambda: text in server.log.read_text(), lambda: f"the log says {text}: {server.log.read_text()}", END_S)


def ends_with(server: Server) -> str:
    """The last line of a server that ends by itself, as one that the user can correct."""
    assert server.process.wait(2 * END_S) == 2, server.log.read_text()
    return server.log.read_text().splitlines()[-1]


def ranks_of(nodes: RayNodes, number: int) -> dict[str, psutil.Process]:
    """A node's ranks, by their names."""
    found = {process.name(): process for process in nodes.processes(number)}
    return {name.removeprefix("pagewire: "): one for name, one in found.items() if name.startswith("pagewire: worker")}


def broker_of(server: Server) -> psutil.Process | None:
    children = psutil.Process(server.process.pid).children()
    return next((child for child in children if "pagewire.ray.broker" in child.cmdline()), None)


def test_stages_are_placed_and_replaced(nodes: RayNodes, start: Callable[..., Server], tmp_path: Path) -> None:
    """It waits for a node, loses one under a stream, loses its broker, and a follower after that."""
    with Server(tmp_path / "alone") as alone:
        expected = text_of(long_stream(alone))
    nodes.add(3)
    server = start()
    says(server, "waiting for a node for worker, worker-1: Ray has no room for 2 times 1 CPU, each on one node")
    nodes.add(4)
    server.wait_ready()
    assert not any(name.startswith("worker") for name in server.children())
    assert all(named(nodes, number, "pagewire: worker") for number in (3, 4)), "one stage on each node"
    assert named(nodes, 2, "ray::Warden"), "what asks for room is on the lead's node"
    assert text_of(long_stream(server)) == expected

    stream = long_stream(server)
    nodes.kill(4)
    until(
        lambda: "waiting for a node for worker" in (told := health(server)) and "Ray has no room for" in told,
        lambda: f"/health says what is missing: {health(server)}",
        END_S,
    )
    nodes.add(5)
    assert text_of(stream) == expected
    says(server, "has not answered for")
    assert "pagewire: 127.0.0.4/" in server.log.read_text()
    assert named(nodes, 5, "pagewire: worker")

    stream = long_stream(server)
    before = broker_of(server)
    assert before is not None
    before.kill()
    says(server, "the process that is connected to Ray has ended; what runs goes on")
    assert text_of(stream) == expected
    until(lambda: broker_of(server), "another broker runs", END_S)

    stream = long_stream(server)
    follower = named(nodes, 5, "pagewire.ray.follower")
    assert follower is not None
    follower.kill()
    says(server, "has ended with exit code -9")
    assert text_of(stream) == expected
    assert server.stop() == 0, server.log.read_text()
    assert nodes.is_free()
    assert not any(named(nodes, number, "pagewire.ray.follower") for number in (3, 5))


def test_stages_of_two_ranks_are_placed_and_heal(nodes: RayNodes, start: Callable[..., Server], tmp_path: Path) -> None:
    with Server(tmp_path / "alone") as alone:
        expected = text_of(long_stream(alone))
    nodes.only()
    for number in (19, 20):
        nodes.add(number, num_cpus=2)
    server = start("--tensor-parallel-size", "2").wait_ready()
    stages = sorted(sorted(ranks_of(nodes, number)) for number in (19, 20))
    assert stages == [["worker", "worker-1"], ["worker-2", "worker-3"]], "the ranks of a stage are on one node"
    assert text_of(long_stream(server)) == expected
    (last,) = (ranks for number in (19, 20) if "worker-3" in (ranks := ranks_of(nodes, number)))
    stream = long_stream(server)
    last["worker-3"].kill()
    says(server, "worker-3 is replaced")
    assert text_of(stream) == expected
    assert server.stop() == 0, server.log.read_text()


def test_a_node_that_drains_is_replaced_before_it_ends(nodes: RayNodes, start: Callable[..., Server]) -> None:
    """It goes on while there is no room elsewhere, and hands over when there is: no death, and no lease that ends."""
    nodes.only()
    nodes.add(8)
    nodes.add(9)
    server = start().wait_ready()
    expected = text_of(long_stream(server, 1000))
    assert nodes.ask(MORE_BROKERS) == 0, "they wait for the ends of the followers"
    stream = long_stream(server, 1000)
    nodes.drain(9)
    until(
        lambda: "leaves: Ray has no room for 1 times 1 CPU" in json.loads(health(server)).get("waits_for", ""),
        lambda: f"/health says what is missing: {health(server)}",
        END_S,
    )
    told = json.loads(health(server))
    assert told["status"] == "ok" and told["waits_for"].startswith("waiting for a node for worker"), told
    assert ", because 127.0.0.9/" in told["waits_for"], told
    assert text_of(stream) == expected, "it goes on"
    nodes.add(10)
    while "from 127.0.0.9/" not in server.log.read_text():
        assert text_of(stream := long_stream(server, 1000)) == expected
    until(lambda: named(nodes, 10, "pagewire: worker"), "a stage is there", END_S)
    assert text_of(stream) == expected
    nodes.kill(9)
    assert text_of(long_stream(server, 1000)) == expected
    said = server.log.read_text()
    assert "has not answered" not in said and "has ended" not in said, said
    assert read(server.get("/metrics"), 0.0).values["processes_lost_total"] == 0
    until(lambda: "waits_for" not in health(server), lambda: health(server), END_S)
    assert server.stop() == 0, server.log.read_text()
    assert nodes.is_free()


def test_the_room_of_a_lead_that_is_killed_is_free_again(
    nodes: RayNodes, start: Callable[..., Server], tmp_path: Path
) -> None:
    """Nobody could give it back: the broker was killed with it. A new lead at the same address begins at once."""
    nodes.only()
    nodes.add(6)
    nodes.add(7)
    address = ("--join-address", f"tcp://127.0.0.2:{free_port()}")
    server = start(*address, "--kv-connector", f"shared,path={tmp_path},size=64M").wait_ready()
    says(server, f"shared: {tmp_path} must be the same folder on all machines")
    assert not nodes.is_free()
    server.kill()
    server = start(*address).wait_ready()
    server.kill()
    until(nodes.is_free, "the room is given back", END_S)


@pytest.mark.skipif(not can_hide(), reason="this user may not mount anything")
def test_a_node_without_the_files_copies_the_model_and_names_the_key(
    nodes: RayNodes, start: Callable[..., Server], tmp_path: Path
) -> None:
    """The model's folder and that of the key file are empty for one of two nodes."""
    there, cache = tmp_path / "there", tmp_path / "cache"
    model = shutil.copytree(DEMO_MODEL, there / "model")
    nodes.only()
    nodes.add(11)
    nodes.add(12, hidden=there, environment={"XDG_CACHE_HOME": str(own_cache(cache))})
    server = start("--model", str(model)).wait_ready()
    text_of(long_stream(server))
    (copied,) = (cache / "pagewire" / "models").glob("*/model/model.safetensors")
    assert copied.read_bytes() == (model / "model.safetensors").read_bytes()
    assert server.stop() == 0

    key = there / "key"
    server = start("--key-file", str(key))
    assert ends_with(server).endswith(f": The key file {key} does not exist there; copy the lead's to each node.")
    assert ends_with(server).startswith("pagewire: 127.0.0.12/")
    assert nodes.is_free()


def test_a_node_with_another_key_or_no_package_ends_the_start_with_a_sentence(
    nodes: RayNodes, start: Callable[..., Server], tmp_path: Path
) -> None:
    nodes.only()
    nodes.add(18)
    key = tmp_path / "key"
    read_keys(tmp_path / "other")
    server = start("--key-file", str(key), "--pipeline-parallel-size", "1")
    says(server, f"Ray's cluster at {nodes.address} has ")  # the lead has read its keys
    (tmp_path / "other").rename(key)
    assert ends_with(server).endswith(f": The key file {key} is not the lead's there; copy the lead's to each node.")

    package = tmp_path / "packages" / "pagewire"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('pagewire is not installed here')")
    nodes.only()
    nodes.add(13, environment={"PYTHONPATH": str(package.parent)})
    server = start("--pipeline-parallel-size", "1")
    assert ends_with(server).startswith(f"pagewire: 127.0.0.13 cannot run pagewire {__version__}: ")
    assert "pagewire is not installed here" in ends_with(server)
    server = start("--join-address", "tcp://127.0.0.13:0")
    assert ends_with(server).startswith("pagewire: The actor that asks Ray for room fails: ")
    assert "pagewire is not installed here" in ends_with(server)


def test_a_node_that_refuses_later_is_told_and_asked_again_after_a_while(
    nodes: RayNodes, start: Callable[..., Server], tmp_path: Path
) -> None:
    key = tmp_path / "key"
    nodes.only()
    nodes.add(14)
    server = start("--key-file", str(key), "--pipeline-parallel-size", "1").wait_ready()
    expected = text_of(long_stream(server))
    stream = long_stream(server)
    hidden = key.rename(tmp_path / "hidden")
    follower = named(nodes, 14, "pagewire.ray.follower")
    assert follower is not None
    follower.kill()
    says(server, f": The key file {key} does not exist there")
    waits = "waiting for a node for worker: one that refuses (127.0.0.14/"
    until(lambda: waits in health(server), lambda: f"/health says why: {health(server)}", END_S)
    hidden.rename(key)
    assert text_of(stream) == expected
    assert server.log.read_text().count("does not exist there") < 4, "it is not asked all the time"
    assert server.stop() == 0


@pytest.mark.skipif(not can_hide(), reason="this user may not mount anything")
def test_a_node_that_refuses_is_passed_over_for_another_one(
    nodes: RayNodes, start: Callable[..., Server], tmp_path: Path
) -> None:
    there = tmp_path / "there"
    there.mkdir()
    nodes.only()
    nodes.add(15)
    server = start("--key-file", str(there / "key"), "--pipeline-parallel-size", "1").wait_ready()
    expected = text_of(long_stream(server))
    nodes.add(16, num_cpus=2, hidden=there)  # with room for the place that is asked for instead of its own
    stream = long_stream(server)
    nodes.kill(15)
    says(server, "pagewire: 127.0.0.16/")
    nodes.add(17)
    assert text_of(stream) == expected
    assert named(nodes, 17, "pagewire: worker") and not named(nodes, 16, "pagewire: worker")
    assert server.stop() == 0
    assert nodes.is_free()


def test_a_lost_head_is_noticed_when_its_nodes_end_and_another_one_may_come(tmp_path: Path) -> None:
    """One stream ends meanwhile, and another one pauses. Ray ends its nodes after a minute by default."""
    wait_s = 2 * END_S
    nodes = RayNodes(RAY_gcs_rpc_server_reconnect_timeout_s="10")
    try:
        nodes.add(21)
        flags = ("--backend", "ray", "--join-address", "tcp://127.0.0.2:0", "--outage-wait", str(wait_s))
        with Server(tmp_path / "run", *flags, "--hang-timeout-s", HANG_S, environment=nodes.environment) as server:
            expected = text_of(long_stream(server))
            stream = long_stream(server)
            nodes.kill(2)
            assert text_of(stream) == expected
            says(server, "the machine of worker, has not answered for")
            body = GREEDY | {"max_tokens": TOKENS, "prompt": "hello", "stream": True}
            stream = OpenRequest(server, "/v1/completions", body, timeout_s=wait_s)
            nodes.kill(21)
            nodes.start_head()
            nodes.add(22)
            until(lambda: stream.has_ended, "the stream goes on", wait_s)
            assert text_of(stream) == expected
            assert named(nodes, 22, "pagewire: worker")
    finally:
        nodes.close()


def test_a_cluster_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    server = Server(tmp_path / "run", "--backend", "ray", environment={"RAY_ADDRESS": "127.0.0.2:1"})
    try:
        assert server.process.wait(2 * END_S) == 2
        assert server.log.read_text().splitlines()[-1].startswith("pagewire: Ray "), "after lines of Ray"
    finally:
        server.close()


def test_kv_is_loaded_from_where_ray_has_put_the_ranks(
    nodes: RayNodes, start: Callable[..., Server], tmp_path: Path
) -> None:
    """By an engine whose ranks are on one machine, also after a node was lost."""
    for number in nodes.numbers[1:]:
        nodes.kill(number)
    others = (11, 12, 13)
    for number in others:
        nodes.add(number)
    keys = f"key-file={tmp_path / 'kv.key'}"
    serves = f"p2p,serve=tcp://127.0.0.1:{free_port(3)},size=64M,{keys},role=prefill"
    asks = f"p2p,peer=named,{keys},role=decode,timeout_ms=20000,fetch_timeout_ms=20000"
    prefill = start("--kv-connector", serves).wait_ready()
    flags = ("--pipeline-parallel-size", "2", "--kv-connector", asks, "--kv-peers", "127.0.0.1")
    with Server(tmp_path / "decode", *flags) as decode:
        until_loaded(prefill, decode, "KV is loaded")
        (free,) = (number for number in others if not named(nodes, number, "pagewire: worker"))
        nodes.kill(next(number for number in others if named(nodes, number, "pagewire: worker-1")))
        until(lambda: named(nodes, free, "pagewire: worker-1"), "the rank is on another node", END_S)
        prefill.wait_ready()
        until_loaded(prefill, decode, "KV is loaded from where the rank is now")
    assert prefill.stop() == 0, prefill.log.read_text()
