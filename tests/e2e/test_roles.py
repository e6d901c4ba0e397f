"""A prefill engine, a decode engine and a router: the tokens are those of one engine, whatever happens to the first."""

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import until

from pagewire.bench.serve.route_streams import Body, Told, differences, read_streams, wait_until_all_ready
from pagewire.tools.servers import ROUTE, Server

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long]
ENGINE = ("--no-access-log", "--kv-cache-memory", "64M", "--max-model-len", "2048", "--max-num-batched-tokens", "256")
PATIENT = "timeout_ms=20000,wait_ms=20000,fetch_timeout_ms=20000"


def long_prompts(num: int, num_tokens: int = 30) -> list[tuple[str, Body]]:
    asked = []
    for i in range(num):
        text = f"Item {i}. " + "Count from 1 to 9, then say the alphabet. " * 25
        body: Body = {"stream": True, "ignore_eos": True, "temperature": 0, "max_tokens": num_tokens}
        asked.append(("/v1/chat/completions", {**body, "messages": [{"role": "user", "content": text}]}))
    return asked


def short_prompts(num: int, num_tokens: int) -> list[tuple[str, Body]]:
    body: Body = {"stream": True, "ignore_eos": True, "temperature": 0, "max_tokens": num_tokens}
    return [("/v1/completions", {**body, "prompt": f"Count from {i} to 300"}) for i in range(num)]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server, Server]]:
    """Prefill, decode, router."""
    folder: Path = tmp_path_factory.mktemp("roles")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    key_file = f"key-file={folder / 'keys'}"
    serves = f"p2p,serve=tcp://127.0.0.1:{port},size=128M,{key_file},role=prefill"
    asks = f"p2p,peer=named,{key_file},role=decode,{PATIENT}"
    prefill = Server(folder / "p", *ENGINE, "--kv-connector", serves)
    decode = Server(folder / "d", *ENGINE, "--kv-connector", asks, "--kv-peers", "127.*")
    urls = f"{prefill.url},{decode.url}"
    router = Server(folder / "r", "--engines", urls, "--no-access-log", command=ROUTE)
    try:
        for server in (prefill, decode, router):
            server.wait_ready()
        wait_until_all_ready(router, 2)
        yield prefill, decode, router
    finally:
        for server in (router, decode, prefill):
            server.close()


def expected(server: Server, asked: list[tuple[str, Body]]) -> list[Told]:
    """What one engine says, with KV of its own."""
    salted = [(path, {**body, "cache_salt": "alone"}) for path, body in asked]
    told = asyncio.run(read_streams(server.url, salted, [0]))
    assert not any(one.error for one in told)
    return told


def test_prompts_are_computed_by_one_engine_and_continued_by_the_other(fleet: tuple[Server, Server, Server]) -> None:
    prefill, decode, router = fleet
    asked = [*short_prompts(4, 300), *long_prompts(6)]
    wanted = expected(decode, asked)
    before = prefill.metric("pagewire:prompt_tokens_total")
    told = asyncio.run(read_streams(router.url, asked, [0]))
    assert not differences(wanted, told), router.log.read_text()
    legs = router.metrics()["pagewire_router_prefill_legs_total"]
    assert legs > 0 and router.metrics()["pagewire_router_prefill_legs_failed_total"] == 0
    until(lambda: prefill.metric("pagewire:prompt_tokens_total") > before, "prompts were computed there")
    until(lambda: decode.metric("pagewire:external_prefix_cache_hits_total") > 0, "their KV was loaded")


def test_streams_go_on_when_the_prefill_engine_is_killed(fleet: tuple[Server, Server, Server]) -> None:
    prefill, decode, router = fleet
    asked = [*short_prompts(4, 300), *[(path, {**body, "cache_salt": "second"}) for path, body in long_prompts(8)]]
    wanted = expected(decode, asked)
    legs = router.metrics()["pagewire_router_prefill_legs_total"]

    async def killed() -> list[Told]:
        streams = asyncio.create_task(read_streams(router.url, asked, [0]))
        while router.metrics()["pagewire_router_prefill_legs_total"] == legs:
            await asyncio.sleep(0)
        prefill.kill()
        return await streams

    told = asyncio.run(killed())
    assert not differences(wanted, told), router.log.read_text()
    again = asyncio.run(read_streams(router.url, asked, [0]))
    assert not differences(wanted, again), "one engine does both"
