"""A small run of `hostile`, the complaints that it makes, and the log lines of such requests."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from pagewire.tests.stress import hostile
from pagewire.tools.servers import Server


def serve_log_lines(log: str) -> list[str]:
    """The lines of the processes, without the start that the launcher announces."""
    return [line for line in log.splitlines() if re.match(r"[0-9:]{8} [a-z0-9-]+: ", line)]


@pytest.mark.e2e
def test_invalid_requests_get_proper_errors_and_forge_no_log_lines(tmp_path: Path) -> None:
    with Server(tmp_path, *hostile.FLAGS[:-1], "--enable-log-requests") as server:
        arguments = hostile.parse(["--count", "300", "--seed", "7", "--limit-s", "60"])
        report = hostile.run(server.url, server.process.pid, arguments)
        assert not report.wrong, "\n".join(report.wrong)
        outcomes = [tally.outcomes for tally in report.tallies.values()]
        assert sum(counts.total() for counts in outcomes) == 300
        assert sum(counts["2xx"] for counts in outcomes) > 30 and sum(counts["4xx"] for counts in outcomes) > 100

        marked = [
            ("/v1/completions", {"prompt": "SECRET-1\r\n00:00:00 api: forged\x1b[31m", "max_tokens": 1}),
            ("/v1/completions", {"prompt": "x", "model": "SECRET-2\r\n00:00:00 api: forged"}),
            (
                "/v1/chat/completions",
                {"messages": [{"role": "user", "content": "SECRET-3\u2028\x9b31m"}], "max_tokens": 1},
            ),
            ("/v1/SECRET-4%0d%0a00:00:00%20api:%20forged", {}),
        ]
        for path, body in marked:
            data = json.dumps(body).encode()
            head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"
            forged = "x-request-id: a\x9b31m b\r\nauthorization: Bearer SECRET-5\r\nuser-agent: SECRET-6\x9b\r\n"
            hostile.ask(server.url, f"{head}{forged}content-length: {len(data)}\r\n\r\n".encode("latin-1") + data)
    log = server.log.read_bytes().decode()
    assert log.replace("\n", "").isprintable(), "a control character has reached the log"
    assert "SECRET-4" in log and not re.search("SECRET-[12356]", log), "only the path is logged"
    assert not [line for line in log.splitlines() if line.startswith("00:00:00 api: forged")]
    assert len(serve_log_lines(log)) > 300


REQUEST = hostile.Request("x", b"", "/v1/completions")
FINE = b'HTTP/1.1 400 Bad Request\r\n\r\n{"error":{"message":"m","type":"t","param":null,"code":null}}'


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda fine: fine, None),
        (lambda fine: b"", None),
        (lambda fine: fine.replace(b"400", b"500"), "answered 500"),
        (lambda fine: fine.replace(b'"code"', b'"kode"'), "format"),
        (lambda fine: fine.partition(b"{")[0], "format"),
        (lambda fine: fine.replace(b'"m"', b'"<X object at 0x7f>"'), "internals"),
        (lambda fine: fine.partition(b"{")[0] + b'{"type":"error","error":{"type":"t","message":"m"}}', "format"),
        (lambda fine: b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: [DONE]\n\n", None),
        (lambda fine: b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: {}\n\n", "no end"),
        (lambda fine: b'HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"server_error"', "failed"),
        (lambda fine: fine + fine.replace(b"400", b"503"), "answered 503"),
    ],
)
def test_an_improper_answer_is_a_complaint(change: Callable[[bytes], bytes], complaint: str | None) -> None:
    found = list(hostile.complaints(REQUEST, change(FINE)))
    assert (complaint in found[0]) if complaint else not found, found


def test_a_request_depends_only_on_seed_and_number() -> None:
    requests = [hostile.make_request(1, number) for number in range(50)]
    assert requests == [hostile.make_request(1, number) for number in range(50)]
    assert len({request.data for request in requests}) > 40
    assert requests != [hostile.make_request(2, number) for number in range(50)]
