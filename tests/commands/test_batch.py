"""`run-batch` against a server that misbehaves, and with invalid files."""

import argparse
import fcntl
import json
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from pagewire.commands import batch
from pagewire.errors import ConfigError


class Peer(BaseHTTPRequestHandler):
    """Answers by the body's `model`: busy-once, broken, hang-up, or anything else."""

    protocol_version = "HTTP/1.1"
    num_requests: Counter[str]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        model = body["model"]
        self.num_requests[model] += 1
        if model == "hang-up" and self.num_requests[model] == 1:
            self.close_connection = True
            return
        status = 503 if model == "broken" or (model == "busy-once" and self.num_requests[model] == 1) else 200
        data = json.dumps({"error": {"message": "no room."}} if status == 503 else {"echo": model}).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    Peer.num_requests = Counter()
    monkeypatch.setattr(batch, "_FIRST_PAUSE_S", 0.01)
    with ThreadingHTTPServer(("127.0.0.1", 0), Peer) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def line(custom_id: str, model: str = "m", **other: object) -> str:
    return json.dumps({"custom_id": custom_id, "url": "/v1/completions", "body": {"model": model}} | other) + "\n"


def run(folder: Path, url: str, *, concurrency: int = 3) -> int:
    return batch.main(
        argparse.Namespace(
            input=str(folder / "in"),
            output=str(folder / "out"),
            url=url,
            api_key=None,
            cacert=None,
            model=None,
            concurrency=concurrency,
        )
    )


def answered_ids(folder: Path) -> list[str]:
    return sorted(json.loads(text)["custom_id"] for text in (folder / "out").read_text().splitlines())


def test_busy_answers_and_closed_connections_are_retried(peer: str, tmp_path: Path) -> None:
    (tmp_path / "in").write_text(line("a") + line("b", "busy-once") + line("c", "hang-up") + "\n")
    assert run(tmp_path, peer) == 0
    assert answered_ids(tmp_path) == ["a", "b", "c"]
    assert Peer.num_requests == {"m": 1, "busy-once": 2, "hang-up": 2}


def test_unanswered_requests_are_left_for_the_next_run(
    peer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").write_text(line("a") + line("b", "broken"))
    assert run(tmp_path, peer) == 1
    assert (
        "1 of 2 requests got no answer; the first is 'b': the server answered 503: no room." in capsys.readouterr().err
    )
    assert answered_ids(tmp_path) == ["a"]
    (tmp_path / "in").write_text(line("a") + line("b"))
    assert run(tmp_path, peer) == 0
    assert answered_ids(tmp_path) == ["a", "b"] and Peer.num_requests["m"] == 2


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "contains no requests"),
        ("nonsense\n", "line 1: "),
        (line("a") + line("a"), "custom_id 'a' appears twice"),
        (line("a") + line("b", url="/v1/models"), "line 2: POST /v1/models cannot be a request of a batch"),
        (line("a", method="GET"), "line 1: GET /v1/completions"),
        (line("a", body={"stream": True}), "line 1: a batch has no streams"),
        (line("a", body=3), "line 1: Expected `object`, got `int`"),
    ],
)
def test_an_invalid_file_is_refused_before_any_request(peer: str, tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "in").write_text(text)
    with pytest.raises(ConfigError, match=sentence):
        run(tmp_path, peer)
    assert not Peer.num_requests


def test_an_output_file_with_other_content_is_not_changed(peer: str, tmp_path: Path) -> None:
    (tmp_path / "in").write_text(line("a"))
    (tmp_path / "out").write_text("my novel\nchapter one\nand no end")
    with pytest.raises(ConfigError, match="line 1, is not an answer of a batch"):
        run(tmp_path, peer)
    assert (tmp_path / "out").read_text().endswith("and no end")


def test_two_runs_do_not_write_one_file(peer: str, tmp_path: Path) -> None:
    (tmp_path / "in").write_text(line("a"))
    with (tmp_path / "out").open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="Another run is writing"):
            run(tmp_path, peer)
    assert run(tmp_path, peer) == 0
