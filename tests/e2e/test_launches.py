"""An engine in two launches. When a process of one launch dies, every client gets an error and the other launch ends.
After a SIGTERM to one launch, both end when all clients have their answers."""

import http.client
import json
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from connections import cut, mailbox_port
from open_requests import END_S, STREAMS, OpenRequest, open_stream
from waiting import until

from pagewire.procs.topology import ACTORS
from pagewire.tools.servers import Server, free_port

pytestmark = pytest.mark.e2e
Start = Callable[..., Server]
Launches = Callable[..., tuple[Server, Server]]
COMMAND = (sys.executable, "-m", "pagewire.procs.launch", "--threads", "1")
HANG_S = 12
WORKER = ("worker",)
ENGINE = ("worker", "core", "grammar")


@pytest.fixture
def launches(start: Start, tmp_path: Path) -> Launches:
    def begin(first: tuple[str, ...], *flags: str) -> tuple[Server, Server]:
        """The launch of the actors `first`, and the launch of all others with the api, which is started before it."""
        addresses = [f"{name}=tcp://127.0.0.1:{free_port()}" for name in ACTORS]
        common = ["--key-file", str(tmp_path / "key"), "--address", *addresses, "--hang-timeout-s", str(HANG_S), *flags]
        others = [name for name in ACTORS if name not in first]
        frontend = start("--actors", ",".join(others), *common, command=COMMAND)
        until(lambda: (tmp_path / "key").exists(), "the key is made", END_S)
        engine = start("--actors", ",".join(first), *common, command=COMMAND)
        frontend.wait_ready()
        return engine, frontend

    return begin


@pytest.fixture
def freeze() -> Iterator[Callable[[Server], None]]:
    """Stops all processes of a launch, as if its machine had lost power."""
    stopped: list[psutil.Process] = []

    def freeze_launch(server: Server) -> None:
        stopped.extend([psutil.Process(server.process.pid), *server.children().values()])
        for process in stopped:
            process.suspend()

    yield freeze_launch
    for process in stopped:
        if process.is_running():
            process.resume()


def assert_ends(server: Server, code: int, *sentences: str) -> None:
    """Waits for the end with this exit code. Exactly one line of the log matches each pattern of `sentences`."""
    assert server.process.wait(END_S) == code, server.log.read_text()
    lines = [line for line in server.log.read_text().splitlines() if line.startswith("pagewire: ")]
    for sentence in sentences:
        assert sum(re.search(sentence, line) is not None for line in lines) == 1, (sentence, lines)


def lost(*names: str) -> str:
    """A pattern for the message of a launch that has lost one of these actors, perhaps among others."""
    return rf"\b({'|'.join(names)}) \(tcp://127\.0\.0\.1:\d+\).* of another launch (has|have) ended, or not answered"


def test_a_killed_worker_fails_every_request_to_the_other_launch(launches: Launches) -> None:
    engine, frontend = launches(WORKER, "--max-num-seqs", str(len(STREAMS)))
    streams = {path: open_stream(frontend, path) for path in STREAMS}
    waiting = OpenRequest(frontend, "/v1/completions", STREAMS["/v1/completions"] | {"stream": False})
    until(lambda: frontend.metric("pagewire:num_requests_waiting") == 1, "the request is queued", END_S)
    engine.children()["worker"].kill()
    for path, stream in streams.items():
        *_, last = stream.events()
        event = json.loads(last)
        match path:
            case "/v1/messages":
                error = event["error"]
                assert (event["type"], error["type"]) == ("error", "overloaded_error")
            case "/v1/responses":
                error = event["response"]["error"] if "response" in event else event
            case _:
                error = event["error"]
                assert (error["type"], error["code"]) == ("server_error", "engine_failed")
        assert error["message"] == "The engine has failed: a part of it has ended.", (path, event)
    refused = json.loads(waiting.body())["error"]
    assert (waiting.status, refused["code"]) == (503, "engine_failed") and waiting.headers["retry-after"]
    assert_ends(engine, 1, r"worker was killed by SIGKILL\. Stopping")
    assert_ends(frontend, 1, lost("worker"))


@pytest.mark.long
def test_a_connection_that_loses_messages_ends_both_launches(launches: Launches) -> None:
    engine, frontend = launches(WORKER)
    stream = open_stream(frontend, "/v1/completions")
    core, port = frontend.children()["core"], mailbox_port(engine.children()["worker"])

    def ends() -> bool:
        cut(core, port)
        return engine.process.poll() is not None

    until(ends, "a connection has lost a message", END_S)
    assert_ends(
        engine, 1, r"The connection of core to worker \(tcp://.*\) broke and has lost messages\. Stopping: what runs"
    )
    assert_ends(frontend, 1, lost("worker"))
    assert '"code":"engine_failed"' in stream.events()[-1].replace(" ", "")


def test_sigterm_to_one_launch_drains_the_engine(launches: Launches) -> None:
    engine, frontend = launches(ENGINE)
    stream = open_stream(frontend, "/v1/completions")
    engine.process.send_signal(signal.SIGTERM)
    until(lambda: not is_ready(frontend), "the other launch drains", END_S)
    assert frontend.answers("/health", END_S), "/health must stay 200 while the engine drains"
    *_, last, done = stream.events()
    assert done == "[DONE]" and json.loads(last)["choices"][0]["finish_reason"] == "length"
    assert_ends(engine, 0)
    assert_ends(frontend, 0, "the launch of worker, core, grammar ends, and with it the engine")


def is_ready(server: Server) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=END_S)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    finally:
        connection.close()


@pytest.mark.long
@pytest.mark.parametrize("first", [WORKER, ENGINE])
def test_a_killed_launch_ends_the_other(launches: Launches, first: tuple[str, ...]) -> None:
    engine, frontend = launches(first)
    stream = open_stream(frontend, "/v1/chat/completions")
    engine.process.kill()
    assert json.loads(stream.events()[-1])["error"]["code"] == "engine_failed"
    assert_ends(frontend, 1, lost(*first))


@pytest.mark.long
@pytest.mark.parametrize("first", [WORKER, ENGINE])
def test_a_launch_that_stops_answering_ends_the_other(
    launches: Launches, first: tuple[str, ...], freeze: Callable[[Server], None]
) -> None:
    engine, frontend = launches(first)
    stream = open_stream(frontend, "/v1/chat/completions")
    processes = [psutil.Process(engine.process.pid), *engine.children().values()]
    freeze(engine)
    assert json.loads(stream.events()[-1])["error"]["code"] == "engine_failed"
    assert_ends(frontend, 1, lost(*first))
    for process in processes:
        process.resume()
    assert_ends(engine, 1, lost(*set(ACTORS) - set(first)))


@pytest.mark.long
def test_the_loss_of_the_api_launch_ends_the_engine(launches: Launches, freeze: Callable[[Server], None]) -> None:
    engine, frontend = launches(ENGINE)
    frontend.children()["detokenizer"].kill()
    assert_ends(frontend, 1, "detokenizer was killed by SIGKILL")
    assert_ends(engine, 1, lost("detokenizer", "tokenizer", "api"))
    engine, frontend = launches(ENGINE)
    freeze(frontend)
    assert_ends(engine, 1, lost("detokenizer", "tokenizer", "api"))


@pytest.mark.long
def test_a_worker_that_dies_while_the_engine_drains_fails_open_streams(launches: Launches) -> None:
    engine, frontend = launches(WORKER)
    stream = open_stream(frontend, "/v1/chat/completions")
    engine.process.send_signal(signal.SIGTERM)
    until(lambda: not is_ready(frontend), "the other launch drains", END_S)
    engine.children()["worker"].kill()
    assert json.loads(stream.events()[-1])["error"]["code"] == "engine_failed"
    assert_ends(engine, 1, "worker was killed by SIGKILL")
    assert_ends(frontend, 1, lost("worker"))


@pytest.mark.long
def test_a_second_signal_stops_a_draining_launch_at_once(launches: Launches) -> None:
    engine, frontend = launches(WORKER)
    stream = open_stream(frontend, "/v1/chat/completions")
    engine.process.send_signal(signal.SIGTERM)
    until(lambda: not is_ready(frontend), "the other launch drains", END_S)
    engine.process.send_signal(signal.SIGTERM)
    assert json.loads(stream.events()[-1])["error"]["code"] == "engine_failed"
    assert_ends(engine, 130, "stopped at once")
    assert_ends(frontend, 1, lost("worker"))


@pytest.mark.long
def test_an_end_spreads_along_three_launches_that_know_only_their_neighbours(start: Start, tmp_path: Path) -> None:
    def chain() -> tuple[Server, Server, Server]:
        ports = {name: free_port() for name in ("worker", "core", "detokenizer", "api")}

        def begin(actors: str, *known: str) -> Server:
            addresses = [f"{name}=tcp://127.0.0.1:{ports[name]}" for name in known]
            flags = ("--key-file", str(tmp_path / "key"), "--hang-timeout-s", str(HANG_S), "--address", *addresses)
            server = start("--actors", actors, *flags, command=COMMAND)
            until(lambda: (tmp_path / "key").exists(), "the key is made", END_S)
            return server

        worker = begin("worker", "worker", "core")
        core = begin("core,grammar", "worker", "core", "detokenizer", "api")
        return worker, core, begin("tokenizer,detokenizer,api", "core", "detokenizer", "api").wait_ready()

    worker, core, frontend = chain()
    stream = open_stream(frontend, "/v1/completions")
    worker.process.send_signal(signal.SIGTERM)
    *_, last, done = stream.events()
    assert done == "[DONE]" and json.loads(last)["choices"][0]["finish_reason"] == "length"
    for server in (frontend, core, worker):
        assert_ends(server, 0)

    worker, core, frontend = chain()
    stream = open_stream(frontend, "/v1/completions")
    worker.process.kill()
    assert json.loads(stream.events()[-1])["error"]["code"] == "engine_failed"
    assert_ends(core, 1, lost("worker"))
    assert_ends(frontend, 1, lost("core"))
