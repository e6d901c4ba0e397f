"""SIGTERM: `/ready` is 503 at once, open requests finish, new ones are refused, and the exit code is 0."""

import http.client
import json
import signal
import threading
from collections.abc import Callable

import pytest
from waiting import until

from pagewire.tools.servers import Server

pytestmark = pytest.mark.e2e
Start = Callable[..., Server]
NUM_TOKENS = 3000


def ask(server: Server, answers: list[tuple[int, bytes]], *, is_stream: bool) -> None:
    """Requests a completion of `NUM_TOKENS`, reads it to its end, and appends its status and body."""
    body = {"prompt": "hello", "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": is_stream, "temperature": 0}
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=180)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    answers.append((response.status, response.read()))
    connection.close()


def status_of(connection: http.client.HTTPConnection, path: str, body: str | None = None) -> tuple[int, dict[str, str]]:
    connection.request("GET" if body is None else "POST", path, body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    response.read()
    return response.status, {name.lower(): value for name, value in response.getheaders()}


def test_open_requests_finish_after_sigterm(start: Start) -> None:
    server = start().wait_ready()  # with the default --drain-timeout
    answers: list[tuple[int, bytes]] = []
    threads = [threading.Thread(target=ask, args=(server, answers), kwargs={"is_stream": i < 3}) for i in range(6)]
    idle = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    assert status_of(idle, "/ready")[0] == 200
    for thread in threads:
        thread.start()
    until(lambda: server.metric("pagewire:num_requests_running") == 6, "six requests run", 60)
    server.process.send_signal(signal.SIGTERM)
    until(lambda: status_of(idle, "/ready")[0] == 503, "/ready is 503")
    assert status_of(idle, "/health")[0] == 200, "/health must stay 200 while the server drains"
    status, headers = status_of(idle, "/v1/completions", '{"prompt": "x", "max_tokens": 1}')
    assert status == 503 and 1 <= int(headers["retry-after"]) <= 60 and headers["connection"] == "close"
    assert not answers, "/ready must be 503 before the first open request ends"
    for thread in threads:
        thread.join(180)
    assert server.process.wait(60) == 0, server.log.read_text()
    idle.close()
    assert [status for status, _ in answers] == [200] * 6
    bodies = [body for _, body in answers]
    plain = {json.loads(body)["usage"]["completion_tokens"] for body in bodies if body.startswith(b"{")}
    streams = [body for body in bodies if body.startswith(b"data: ")]
    assert plain == {NUM_TOKENS} and len(streams) == 3
    assert all(body.endswith(b"data: [DONE]\n\n") and b'"finish_reason":"length"' in body for body in streams)
