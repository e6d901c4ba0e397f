"""`chat` and `complete` with reasoning, errors and broken streams, from a server of the test."""

import io
import json
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from pagewire import cli


def delta(**fields: object) -> str:
    return f"data: {json.dumps({'choices': [{'index': 0, 'delta': fields}]})}\n\n"


DONE = "data: [DONE]\n\n"
Answer = Callable[[str], tuple[int, str]]


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def peer() -> Iterator[Callable[[Answer], str]]:
    """A function that starts a server, which answers every POST with `answer`, and returns its address."""
    servers = []

    def start(answer: Answer) -> str:
        class Peer(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._send(200, '{"data": [{"id": "m"}]}')

            def do_POST(self) -> None:
                self._send(*answer(self.rfile.read(int(self.headers["content-length"])).decode()))

            def _send(self, status: int, text: str) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, format: str, *args: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Peer)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        servers.append((server, thread))
        return f"http://127.0.0.1:{server.server_address[1]}/v1"

    yield start
    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()


def chat(monkeypatch: pytest.MonkeyPatch, url: str, typed: str, *, out: io.StringIO | None = None) -> str:
    """Chat with the server at `url`, with `typed` as the input, and return what is printed."""
    out = out or io.StringIO()
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    monkeypatch.setattr(sys, "stdout", out)
    assert cli.main(["chat", "--url", url]) == 0
    return out.getvalue()


REASONED = (
    delta(role="assistant", content="") + delta(reasoning="Hm. ", reasoning_content="Hm. ") + delta(content="Yes.")
)


def test_reasoning_is_dimmed_and_not_part_of_the_history(
    peer: Callable[[Answer], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies = []

    def answer(body: str) -> tuple[int, str]:
        bodies.append(json.loads(body))
        return 200, REASONED + DONE

    url = peer(answer)
    assert chat(monkeypatch, url, "Really?\nSo?\n", out=Tty()) == 2 * "\033[2mHm. \033[0m\nYes.\n"
    assert [m["content"] for m in bodies[1]["messages"]] == ["Really?", "Yes.", "So?"]
    assert chat(monkeypatch, url, "Really?\n") == "Yes.\n"


@pytest.mark.parametrize(
    ("status", "text", "sentence"),
    [
        (200, delta(content="Y") + 'data: {"error": {"message": "Out of luck."}}\n\n', "Out of luck."),
        (200, delta(content="Y"), "ended the answer before it was complete"),
        (401, '{"error": {"message": "The API key is wrong."}}', "The API key is wrong."),
        (500, "<html>oh</html>", "The server answered 500."),
    ],
)
def test_a_failed_answer_is_reported_and_not_part_of_the_history(
    peer: Callable[[Answer], str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    status: int,
    text: str,
    sentence: str,
) -> None:
    bodies: list[str] = []

    def answer(body: str) -> tuple[int, str]:
        bodies.append(body)
        return (status, text) if len(bodies) == 1 else (200, REASONED + DONE)

    chat(monkeypatch, peer(answer), "one\ntwo\n")
    assert sentence in capsys.readouterr().err
    assert [m["content"] for m in json.loads(bodies[1])["messages"]] == ["two"]


def test_an_unusable_address_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for url, sentence in (("localhost:8000", "is not a server's address"), ("http://127.0.0.1:9", "No server answers")):
        assert cli.main(["complete", "x", "--url", url]) == 1
        assert sentence in capsys.readouterr().err
