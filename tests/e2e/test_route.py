"""Whole engines that die during streams, behind a router."""

import asyncio
from collections.abc import Callable

import pytest
from defaults import NARROW
from waiting import until

from pagewire.bench.serve import route
from pagewire.bench.serve.route_streams import bodies, differences, read_streams, wait_until_all_ready
from pagewire.tools.servers import ROUTE, Server

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
Start = Callable[..., Server]
ENGINE = ("--no-access-log", "--kv-cache-memory", "32M")


def test_streams_continue_after_kill_9_of_a_whole_engine(on_default: str, start: Start) -> None:
    engines = [start(*ENGINE) for _ in range(2)]
    urls = ",".join(engine.url for engine in engines)
    router = start("--engines", urls, "--no-access-log", command=ROUTE)
    for process in (*engines, router):
        process.wait_ready()
    requests = bodies(16, 200)
    expected = asyncio.run(read_streams(engines[0].url, requests, [0]))
    assert not any(stream.error for stream in expected) and len({tuple(stream.texts) for stream in expected}) > 8
    wait_until_all_ready(router, 2)
    undisturbed = asyncio.run(read_streams(router.url, requests, [0]))
    told = list(undisturbed)
    for after in (600, 300, 100):  # the streams may have ended before the kill
        told += asyncio.run(route.killed_beneath(router, engines[1], requests, after=after))
        if router.metric("pagewire_router_resumes_total") > 0:
            break
        engines[1].start().wait_ready()
        wait_until_all_ready(router, 2)
    if on_default == NARROW:  # tokens may depend on the batch, which differs between engines
        errors = [stream.error for stream in told if stream.error is not None]
        assert all("another one sampled other tokens" in error for error in errors), router.log.read_text()
    else:
        wanted = expected * (len(told) // len(expected))
        assert not differences(wanted, told), router.log.read_text()
    assert router.metric("pagewire_router_resumes_total") > 0
    until(lambda: router.metric("pagewire_router_engine_ready") == 1, "one engine is left", 60)
