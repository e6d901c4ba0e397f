"""Small runs of `overload`, `abuse` and `leak` on one server, for the promises that do not need an idle machine."""

import argparse
import asyncio
from collections.abc import Iterator

import pytest

from pagewire.bench.report import Row
from pagewire.tests.stress import abuse, leak, overload
from pagewire.tests.stress.client import Answer, serving
from pagewire.tools.servers import MB, Server

HEAD_TIMEOUT_S = 0.5
SLACK_S = 30.0  # of a machine that is not idle


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    flags = ("--max-num-seqs", "48", "--max-queued-requests", "40", "--kv-cache-memory", "64M")
    with serving(*flags, "--head-timeout-s", str(HEAD_TIMEOUT_S), "--timeout-keep-alive", "600") as running:
        yield running


@pytest.mark.e2e
@pytest.mark.slow
def test_an_overloaded_server_answers_or_refuses_every_request(server: Server) -> None:
    assert asyncio.run(overload.best_rate(server, 32, 8, [8])) > 0
    answers, seen, rate = asyncio.run(overload.flood(server, 400, 64))
    num_served = sum(answer.status == 200 for answer in answers)
    num_refused = sum(answer.status == 429 and answer.is_refusal for answer in answers)
    assert num_served >= 40 and num_refused > 0 and num_served + num_refused == 400 and rate > 0
    assert seen.growth_mb < overload.MAX_GROWTH_MB and not seen.num_unhealthy
    server.wait_idle()


def test_a_lost_answer_or_an_unhealthy_server_is_a_complaint() -> None:
    with_retry, without_retry = b"HTTP/1.1 429 Too Many\r\nRetry-After: 3", b"HTTP/1.1 429 Too Many\r\nx: y"
    good = [Answer(200, b"", b"", 1.0), Answer(429, with_retry + b"\r\n", b"", 1.0)]
    assert overload.complaints(good, overload.Seen(), 1.0) == []
    for bad in (Answer(0, b"", b"", 60.0), Answer(429, without_retry, b"", 1.0), Answer(500, b"", b"", 1.0)):
        assert len(overload.complaints([*good, bad], overload.Seen(), 1.0)) == 1
    assert len(overload.complaints(good, overload.Seen(growth_mb=300, num_unhealthy=1), 0.8)) == 3


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "limits"),
    [
        ("vanish", {"free after s": SLACK_S, "descriptors more": 4}),
        ("stalled", {"MB held by each": abuse.MAX_STALLED_MB}),
        ("heads", {"closed after s": HEAD_TIMEOUT_S + SLACK_S, "not answered": 0}),
        ("idle", {"growth MB": 10.0}),
    ],
)
def test_misbehaving_clients_break_no_promise(server: Server, part: str, limits: dict[str, float]) -> None:
    arguments = argparse.Namespace(clients=40, stalled=2, readers=2, tokens=50, rounds=1, idle=500, requests=10)
    arguments.head_timeout_s = HEAD_TIMEOUT_S
    row = Row(part)
    asyncio.run(abuse.play(part, server, row, arguments))
    assert all(row.median(column) <= limit for column, limit in limits.items()), row.figures


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.long
def test_a_short_run_finds_no_large_leak(server: Server) -> None:
    """The slopes are per thousand requests, which are 60 of each kind. So few requests cannot show small leaks of
    memory: caches still fill, and the KV memory is touched for the first time."""
    slopes = asyncio.run(leak.watch(server, 90, 3)).slopes()
    assert {"api", "core", "worker", "tokenizer", "detokenizer", "grammar", "supervisor"} <= slopes.keys()
    for name, slope in slopes.items():
        assert slope.num_fds < 30 and slope.num_threads < 30, f"{name}: one for each request of one kind: {slope}"
        assert slope.num_bytes < 100 * MB, f"{name}: a tenth of a megabyte for each request: {slope}"
