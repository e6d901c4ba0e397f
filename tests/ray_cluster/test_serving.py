"""A Ray Serve application of engines: they come with the load and go with it, and streams outlive every one of them."""

import json
import math
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
from open_requests import END_S, GREEDY, OpenRequest, open_stream
from ray_nodes import RayNodes, has_ray, named
from waiting import until

from pagewire.procs.models import PROCESSES_BYTES
from pagewire.tools.servers import free_port

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.ray,
    pytest.mark.skipif(not has_ray(), reason="make test-ray installs it"),
]
LONG_S = 240.0  # limit for starts of engines
TOKENS = 4000
OPEN_S = 60.0  # of streams over an upgrade, about
DEFAULT_LIMIT_S = 25.0  # Serve ends a replica after 20 s
SETTINGS = {
    "threads": 1,
    "max_replicas": 2,
    "requests_per_replica": 2,
    "drain_timeout": 1,
    "upscale_delay_s": 1,
    "downscale_delay_s": 4,
    "look_back_period_s": 3,
}
SCRIPT = """
import json, sys
import ray
from ray import serve
import pagewire.ray
ray.init("auto", _node_ip_address="127.0.0.2", namespace="serve", logging_level="ERROR", log_to_driver=False)
serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
if sys.argv[2] == "delete":
    serve.delete("pagewire")
else:
    serve.run(pagewire.ray.app(json.loads(sys.argv[2])), name="pagewire", route_prefix="/")
"""


class App(NamedTuple):
    """The application, as its clients have it."""

    nodes: RayNodes
    port: int

    def deploy(self, settings: Mapping[str, object] | None) -> None:
        """None: deletes it."""
        said = "delete" if settings is None else json.dumps(settings)
        command = [sys.executable, "-P", "-c", SCRIPT, str(self.port), said]
        done = subprocess.run(
            command, capture_output=True, text=True, env=self.nodes.environment, cwd="/", check=False, timeout=LONG_S
        )
        assert done.returncode == 0, done.stderr[-3000:]

    def loaded(self) -> dict[str, list[str]]:
        """The engines that are ready and stay, with the models that each has loaded."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=30) as response:
            return {engine["url"]: engine["loaded"] for engine in json.load(response)["engines"] if engine["ready"]}

    def engines(self) -> set[str]:
        return set(self.loaded())


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    nodes = RayNodes(
        RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S="1", RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S="120"
    )
    try:
        for number in (3, 4, 5):
            nodes.add(number)
        app = App(nodes, free_port())
        app.deploy(SETTINGS)
        yield app
    finally:
        nodes.close()


def stream(app: App, max_tokens: int = TOKENS) -> OpenRequest:
    return open_stream(app, "/v1/completions", max_tokens=max_tokens)


def text_of(stream: OpenRequest) -> str:
    """The text of a stream, which has ended by its length and without an error."""
    *events, done = stream.events()
    choices = [json.loads(event)["choices"][0] for event in events]
    assert done == "[DONE]" and choices[-1]["finish_reason"] == "length", choices[-1]
    return "".join(choice["text"] for choice in choices)


def node_of(url: str) -> int:
    """The number of an engine's node."""
    return int(url.rpartition(":")[0].rpartition(".")[2])


def test_engines_come_and_go_and_streams_stay(app: App) -> None:
    until(lambda: len(app.engines()) == 1, "the first engine is ready", LONG_S)
    expected = text_of(stream(app))
    streams: list[OpenRequest] = []
    ended: list[OpenRequest] = []

    def keep(num: int) -> None:
        """There are so many open streams."""
        ended.extend(one for one in streams if one.has_ended)
        streams[:] = [one for one in streams if not one.has_ended]
        streams.extend(stream(app) for _ in range(num - len(streams)))

    def are(num: int, others_than: Set[str] = frozenset()) -> set[str]:
        """The engines, asked for once, since the next answer may lack one on a busy machine; empty: it is not so."""
        keep(8 if num == 2 else 2)
        found = app.engines()
        return found if len(found) == num and not found & others_than else set()

    before = until(lambda: are(2), "a second engine has come with the load", LONG_S)
    victim = next(node for node in map(node_of, before) if named(app.nodes, node, ":Door") is None)
    app.nodes.kill(victim)
    app.nodes.add(6)
    lost = {url for url in before if node_of(url) == victim}
    both = until(lambda: are(2, others_than=lost), "another engine takes the place of the lost one", LONG_S)
    old = until(lambda: are(1), "an engine has gone with the load", LONG_S)
    assert old < both
    keep(2)
    app.deploy({**SETTINGS, "version": "2"})
    until(lambda: are(1, others_than=old), "an engine of the new version has taken over", LONG_S)
    for one in (*ended, *streams):
        assert text_of(one) == expected
    app.deploy(None)


def test_streams_outlive_their_door_and_there_always_is_one(app: App) -> None:
    """The streams of an engine that computes one at a time are open for much longer than Serve waits by default."""
    settings = {**SETTINGS, "max_replicas": 1, "max_num_seqs": 1}
    app.deploy({**settings, "version": "long"})
    until(lambda: len(app.engines()) == 1, "the engine is ready", LONG_S)
    began = time.monotonic()
    expected = text_of(stream(app))
    num = math.ceil(OPEN_S / (time.monotonic() - began))
    bodies = {**GREEDY, "max_tokens": TOKENS, "prompt": "hello", "stream": True}
    streams = [OpenRequest(app, "/v1/completions", bodies, timeout_s=LONG_S) for _ in range(num)]
    until(lambda: any(one.num_events > 5 for one in streams), "a stream has begun", LONG_S)
    began = time.monotonic()
    with ThreadPoolExecutor() as threads:
        deployed = threads.submit(app.deploy, {**settings, "version": "longer"})
        until(lambda: app.engines() and deployed.done(), "doors answer until the old one has ended", LONG_S)
    deployed.result()
    until(lambda: all(one.has_ended for one in streams), "all streams have ended", LONG_S)
    assert time.monotonic() - began > DEFAULT_LIMIT_S
    assert {text_of(one) for one in streams} == {expected}


def test_engines_end_with_the_application(app: App) -> None:
    """Nothing is open, so they need none of the time to drain. There is no registry any more."""
    app.deploy({**SETTINGS, "max_replicas": 1, "drain_timeout": 1000})
    until(lambda: len(app.engines()) == 1, "the engine is ready", LONG_S)
    with ThreadPoolExecutor() as threads:
        deleted = threads.submit(app.deploy, None)
        until(
            lambda: not any(named(app.nodes, number, "pagewire.ray.engine") for number in app.nodes.numbers),
            "the engine has ended with the application",
            END_S,
        )
    deleted.result()


def test_several_models_are_loaded_where_there_is_room_and_a_stream_takes_its_model_along(app: App) -> None:
    """Two engines with memory for one of two models each."""
    names = ("pagewire-demo", "pagewire-demo-hybrid")
    memory = {"models_memory": PROCESSES_BYTES + (300 << 20), "kv_cache_memory": 32 << 20}
    app.deploy({**SETTINGS, **memory, "models": ["demo", "demo-hybrid"], "min_replicas": 2, "version": "several"})
    until(lambda: [*app.loaded().values()] == [[], []], lambda: f"nothing is loaded yet: {app.loaded()}", LONG_S)

    def begun(name: str) -> OpenRequest:
        request = OpenRequest(
            app, "/v1/completions", {**GREEDY, "max_tokens": 1500, "prompt": "hello", "stream": True, "model": name}
        )
        until(lambda: request.num_events > 5, "the stream has begun", LONG_S)
        return request

    expected = {name: text_of(begun(name)) for name in names}
    where = app.loaded()
    assert sorted(where.values()) == [[name] for name in names], "each engine has one"
    for _ in range(3):
        for name in names:
            assert text_of(begun(name)) == expected[name]
    assert app.loaded() == where, "and nothing was unloaded"

    url = next(url for url in where if named(app.nodes, node_of(url), ":Door") is None)
    ((kept,),) = (loaded for other, loaded in where.items() if other != url)
    ((moved,),) = (loaded for other, loaded in where.items() if other == url)
    stream = begun(moved)
    app.nodes.kill(node_of(url))
    until(lambda: stream.has_ended, "the stream has ended", LONG_S)
    assert text_of(stream) == expected[moved]
    assert text_of(begun(kept)) == expected[kept]
    app.deploy(None)


def test_engines_over_several_nodes_come_and_go(app: App) -> None:
    """Ray places the two stages of each engine, besides the replica with its api."""
    for number in (8, 9):
        app.nodes.add(number)
    stages = {"backend": "ray", "pipeline_parallel_size": 2, "num_cpus": 0, "hang_timeout_s": 10}
    app.deploy({**SETTINGS, **stages, "version": "stages"})

    def num_with(part: str) -> int:
        return sum(named(app.nodes, number, part) is not None for number in app.nodes.numbers)

    until(lambda: len(app.engines()) == 1, "the first engine is ready", LONG_S)
    assert num_with("pagewire: worker") == 2
    expected = text_of(stream(app, 1000))
    streams: list[OpenRequest] = []

    def are_two() -> bool:
        if sum(not one.has_ended for one in streams) < 4:
            streams.append(stream(app, 1000))
        return len(app.engines()) == 2

    until(are_two, "a second engine has come with the load", LONG_S)
    assert num_with("pagewire: worker") == 4
    until(lambda: len(app.engines()) == 1, "it has gone with the load", LONG_S)
    until(lambda: num_with("pagewire: worker") == 2, "and so have its ranks", LONG_S)
    for one in streams:
        assert text_of(one) == expected
    app.deploy(None)
    until(app.nodes.is_free, "the room of the other one is free as well", LONG_S)


def test_an_engine_leaves_a_node_that_drains(app: App) -> None:
    """Serve starts another one, and ends that of the node, whose stream goes on elsewhere."""
    app.nodes.add(7)
    app.deploy({**SETTINGS, "min_replicas": 2, "version": "drains"})
    until(lambda: len(app.engines()) == 2, "both engines are ready", LONG_S)
    expected = text_of(stream(app))
    before = app.engines()
    url = next(url for url in before if named(app.nodes, node_of(url), ":Door") is None)
    streams = [stream(app) for _ in range(2)]
    app.nodes.drain(node_of(url))
    until(
        lambda: len(now := app.engines()) == 2 and url not in now,
        lambda: f"another engine has taken over: {app.engines()}, before: {before}",
        LONG_S,
    )
    for one in streams:
        assert text_of(one) == expected
    app.deploy(None)
