"""The benchmark of the front end, and how its client reads streams."""

import json
from pathlib import Path

import pytest

from pagewire.bench.serve import frontend
from pagewire.bench.serve.cheap_client import read_events

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def answer(*events: str) -> bytes:
    """A stream of these events, each a chunk of the body."""
    parts = [f"data: {event}\n\n".encode() for event in events]
    return HEAD + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (*parts, b""))


def delta(text: str) -> str:
    return json.dumps({"choices": [{"delta": {"content": text}}]})


def test_the_client_counts_deltas_with_text() -> None:
    assert read_events(answer(delta(""), delta("a\n"), delta("b"), "[DONE]")) == (2, "a\nb")


@pytest.mark.parametrize(
    "wrong", [answer(delta("a")), answer(delta("a"), "[DONE]", delta("b")), b"HTTP/1.1 503 x\r\n\r\n"]
)
def test_the_client_refuses_incomplete_streams_and_errors(wrong: bytes) -> None:
    with pytest.raises(ValueError):
        read_events(wrong)


@pytest.mark.e2e
@pytest.mark.slow
def test_a_small_run_measures_all_rows(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "frontend.json"
    frontend.main(["--streams", "4", "--tokens", "9", "--repeat", "1", "--step-ms", "1", "--json", str(file)])
    rows = {row["name"]: row["figures"] for row in json.loads(file.read_text())["rows"]}
    assert next(iter(rows)) == "steps of 1 ms" and len(rows) == 5
    assert rows["steps of 1 ms"]["tokens/s"][0] > 0
    assert "api: frame, write" in capfd.readouterr().out
