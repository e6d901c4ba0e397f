"""The benchmark of a router with many engines, and the client that it uses."""

import itertools
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pagewire.bench.serve import route
from pagewire.bench.serve.cheap_client import ask_again, chat_body

HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n"


@contextmanager
def answering(*answers: bytes) -> Iterator[tuple[tuple[str, int], list[bytes]]]:
    """The address of a server that gives one connection these answers, and what it is asked."""
    asked: list[bytes] = []

    def serve() -> None:
        connection, _ = listening.accept()
        with connection:
            for answer in answers:
                asked.append(connection.recv(1 << 16))
                connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = threading.Thread(target=serve)
        server.start()
        yield listening.getsockname(), asked
        server.join(10)


def test_the_client_asks_again_on_the_same_connection_when_an_answer_is_whole() -> None:
    with answering(*[HEAD + b"abcd"] * 3) as (address, asked):
        ask_again([address], chat_body(1, stream=False), num_open=1, num_requests=3)
    assert len(asked) == 3 and all(b'"stream": false' in request for request in asked)


def test_the_client_refuses_an_error() -> None:
    refusal = b"HTTP/1.1 503 x\r\nContent-Length: 0\r\n\r\n"
    with answering(refusal) as (address, _), pytest.raises(ValueError, match="503"):
        ask_again([address], chat_body(1, stream=False), num_open=1, num_requests=1)


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.long
def test_a_small_run_measures_each_number_of_engines(tmp_path: Path) -> None:
    file = tmp_path / "route.json"
    sizes = {"--streams": 6, "--tokens": 9, "--rounds": 0, "--repeat": 0, "--step-ms": 1, "--requests": 24}
    flags = [*itertools.chain.from_iterable((name, str(value)) for name, value in sizes.items())]
    route.main([*flags, "--engines", "1,3", "--plots", str(tmp_path), "--json", str(file)])
    rows = {row["name"]: row["figures"] for row in json.loads(file.read_text())["rows"]}
    assert list(rows) == ["1 engines", "3 engines"]
    assert all(value > 0 for row in rows.values() for value in (*row["tokens/s"], *row["requests/s"]))
    assert 1 <= rows["3 engines"]["most of one engine / mean"][0] <= 3
    assert (tmp_path / "route_scale.png").stat().st_size > 1000
