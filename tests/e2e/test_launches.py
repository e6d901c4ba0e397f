"""An engine in two launches: the end of a part in one of them is told to every client and ends the other one, or, where
it is an end in order, is waited with until all clients have their answers."""

import http.client
import json
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from waiting import until

from pagewire.procs.topology import ACTORS
from pagewire.tools.servers import Server, free_port

pytestmark = pytest.mark.e2e
Start = Callable[..., Server]
Launches = Callable[..., tuple[Server, Server]]
COMMAND = (sys.executable, "-m", "pagewire.procs.launch", "--threads", "1")
HANG_S = 3
END_S = (
    60.0  # within which everything has to have ended: HANG_S and a second or two, on a machine with nothing else to do
)
WORKER = ("worker",)
ENGINE = ("worker", "core", "grammar")
GREEDY = {"max_tokens": 4000, "ignore_eos": True, "temperature": 0}
CHAT = GREEDY | {"messages": [{"role": "user", "content": "hello"}]}
STREAMS: dict[str, Any] = {
    "/v1/completions": GREEDY | {"prompt": "hello"},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "hello", "max_output_tokens": 4000, "ignore_eos": True, "temperature": 0},
    "/v1/messages": CHAT,
}


class Asked:
    """A request whose answer is read by a thread of its own, to its end."""

    def __init__(self, server: Server, path: str, body: dict[str, object]) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=END_S)
        self.connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        self.status = 0
        self.headers: dict[str, str] = {}
        self._lines: list[str] = []
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        try:
            response = self.connection.getresponse()
            self.status, self.headers = response.status, {k.lower(): v for k, v in response.getheaders()}
            while line := response.readline():
                self._lines.append(line.decode())
        except (OSError, http.client.HTTPException) as failure:
            self._failure = failure

    @property
    def num_events(self) -> int:
        return sum(line.startswith("data: ") for line in list(self._lines))

    def body(self) -> str:
        """All of it, once it has ended in good form."""
        self._thread.join(END_S)
        assert not self._thread.is_alive(), "it has not ended"
        self.connection.close()
        assert self._failure is None, self._failure
        return "".join(self._lines)

    def events(self) -> list[str]:
        """The data of all events, once the stream has ended in good form."""
        return [line.removeprefix("data: ") for line in self.body().splitlines() if line.startswith("data: ")]


def opened(server: Server, path: str, **more: object) -> Asked:
    """A stream that has begun."""
    asked = Asked(server, path, STREAMS[path] | {"stream": True} | more)
    until(lambda: asked.num_events > 5, "it has begun", END_S)
    return asked


@pytest.fixture
def launches(start: Start, tmp_path: Path) -> Launches:
    def begin(first: tuple[str, ...], *flags: str) -> tuple[Server, Server]:
        """The launch of `first`, and that of all others, which has the api and is started before."""
        addresses = [f"{name}=tcp://127.0.0.1:{free_port()}" for name in ACTORS]
        common = ["--key-file", str(tmp_path / "key"), "--address", *addresses, "--hang-timeout-s", str(HANG_S), *flags]
        others = [name for name in ACTORS if name not in first]
        door = start("--actors", ",".join(others), *common, command=COMMAND)
        until(lambda: (tmp_path / "key").exists(), "the key is made", END_S)
        engine = start("--actors", ",".join(first), *common, command=COMMAND)
        door.wait_ready()
        return engine, door

    return begin


@pytest.fixture
def frozen() -> Iterator[Callable[[Server], None]]:
    """Stops all processes of a launch, as if its machine were gone without a word."""
    stopped: list[psutil.Process] = []

    def freeze(server: Server) -> None:
        stopped.extend([psutil.Process(server.process.pid), *server.children().values()])
        for process in stopped:
            process.suspend()

    yield freeze
    for process in stopped:
        if process.is_running():
            process.resume()


def ends_with(server: Server, code: int, *sentences: str) -> None:
    """With this exit code, and one line that says each of these."""
    assert server.process.wait(END_S) == code, server.log.read_text()
    lines = [line for line in server.log.read_text().splitlines() if line.startswith("pagewire: ")]
    for sentence in sentences:
        assert sum(re.search(sentence, line) is not None for line in lines) == 1, (sentence, lines)


def lost(*names: str) -> str:
    """What a launch says when it is without one of these parts, maybe among others."""
    return rf"\b({'|'.join(names)}) \(tcp://127\.0\.0\.1:\d+\).* of another launch (has|have) ended, or not answered"


def test_a_process_that_is_killed_in_one_launch_is_told_to_every_client_of_the_other(launches: Launches) -> None:
    engine, door = launches(WORKER, "--max-num-seqs", str(len(STREAMS)))
    streams = {path: opened(door, path) for path in STREAMS}
    waiting = Asked(door, "/v1/completions", STREAMS["/v1/completions"] | {"stream": False})
    until(lambda: door.metric("pagewire:num_requests_waiting") == 1, "it waits", END_S)
    engine.children()["worker"].kill()
    for path, stream in streams.items():
        *_, last = stream.events()
        told = json.loads(last)
        match path:
            case "/v1/messages":
                error = told["error"]
                assert (told["type"], error["type"]) == ("error", "overloaded_error")
            case "/v1/responses":
                error = told["response"]["error"] if "response" in told else told
            case _:
                error = told["error"]
                assert (error["type"], error["code"]) == ("server_error", "engine_failed")
        assert error["message"] == "The engine has failed: a part of it has ended.", (path, told)
    refused = json.loads(waiting.body())["error"]
    assert (waiting.status, refused["code"]) == (503, "engine_failed") and waiting.headers["retry-after"]
    ends_with(engine, 1, r"worker was killed by SIGKILL\. Stopping")
    ends_with(door, 1, lost("worker"))


def test_an_end_in_order_of_one_launch_drains_the_engine(launches: Launches) -> None:
    engine, door = launches(ENGINE)
    stream = opened(door, "/v1/completions", max_tokens=1500)
    engine.process.send_signal(signal.SIGTERM)
    until(lambda: not is_ready(door), "the other launch drains", END_S)
    assert door.answers("/health"), "who drains must not be killed"
    *_, last, done = stream.events()
    assert done == "[DONE]" and json.loads(last)["choices"][0]["finish_reason"] == "length"
    ends_with(engine, 0)
    ends_with(door, 0, "the launch of worker, core, grammar ends, and with it the engine")


def is_ready(server: Server) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    finally:
        connection.close()


@pytest.mark.long
@pytest.mark.parametrize("first", [WORKER, ENGINE])
def test_a_launch_that_is_killed(launches: Launches, first: tuple[str, ...]) -> None:
    engine, door = launches(first)
    stream = opened(door, "/v1/chat/completions")
    engine.process.kill()
    assert json.loads(stream.events()[-1])["error"]["code"] == "engine_failed"
    ends_with(door, 1, lost(*first))


@pytest.mark.long
@pytest.mark.parametrize("first", [WORKER, ENGINE])
def test_a_launch_that_is_gone_without_a_word(
    launches: Launches, first: tuple[str, ...], frozen: Callable[[Server], None]
) -> None:
    engine, door = launches(first)
    stream = opened(door, "/v1/chat/completions")
    processes = [psutil.Process(engine.process.pid), *engine.children().values()]
    frozen(engine)
    assert json.loads(stream.events()[-1])["error"]["code"] == "engine_failed"
    ends_with(door, 1, lost(*first))
    for process in processes:
        process.resume()
    ends_with(engine, 1, lost(*set(ACTORS) - set(first)))


@pytest.mark.long
def test_the_launch_with_the_api_that_is_killed_or_gone(launches: Launches, frozen: Callable[[Server], None]) -> None:
    engine, door = launches(ENGINE)
    door.children()["detokenizer"].kill()
    ends_with(door, 1, "detokenizer was killed by SIGKILL")
    ends_with(engine, 1, lost("detokenizer", "tokenizer", "api"))
    engine, door = launches(ENGINE)
    frozen(door)
    ends_with(engine, 1, lost("detokenizer", "tokenizer", "api"))


@pytest.mark.long
def test_a_part_that_dies_while_the_engine_drains(launches: Launches) -> None:
    engine, door = launches(WORKER)
    stream = opened(door, "/v1/chat/completions")
    engine.process.send_signal(signal.SIGTERM)
    until(lambda: not is_ready(door), "the other launch drains", END_S)
    engine.children()["worker"].kill()
    assert json.loads(stream.events()[-1])["error"]["code"] == "engine_failed"
    ends_with(engine, 1, "worker was killed by SIGKILL")
    ends_with(door, 1, lost("worker"))


@pytest.mark.long
def test_a_second_signal_ends_a_launch_that_waits_for_another_one(launches: Launches) -> None:
    engine, door = launches(WORKER)
    stream = opened(door, "/v1/chat/completions")
    engine.process.send_signal(signal.SIGTERM)
    until(lambda: not is_ready(door), "the other launch drains", END_S)
    engine.process.send_signal(signal.SIGTERM)
    assert json.loads(stream.events()[-1])["error"]["code"] == "engine_failed"
    ends_with(engine, 130, "stopped at once")
    ends_with(door, 1, lost("worker"))


@pytest.mark.long
def test_an_end_gets_round_where_the_first_and_the_last_of_three_launches_do_not_know_each_other(
    start: Start, tmp_path: Path
) -> None:
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

    worker, core, door = chain()
    stream = opened(door, "/v1/completions", max_tokens=1500)
    worker.process.send_signal(signal.SIGTERM)
    *_, last, done = stream.events()
    assert done == "[DONE]" and json.loads(last)["choices"][0]["finish_reason"] == "length"
    for server in (door, core, worker):
        ends_with(server, 0)

    worker, core, door = chain()
    stream = opened(door, "/v1/completions")
    worker.process.kill()
    assert json.loads(stream.events()[-1])["error"]["code"] == "engine_failed"
    ends_with(core, 1, lost("worker"))
    ends_with(door, 1, lost("core"))
