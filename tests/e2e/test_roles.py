"""A prefill engine, a decode engine and a router: the tokens are those of one engine, whatever happens to the first."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

import psutil
import pytest
from replaced import until_replaced
from waiting import until, until_async

from pagewire.bench.serve.route_streams import Body, Told, differences, read_streams, wait_until_all_ready
from pagewire.tools.servers import ROUTE, Server, free_port

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


@contextmanager
def start_engines(folder: Path, port: int, *flags: str, transport: str = "zmq") -> Iterator[tuple[Server, Server]]:
    """Prefill and decode. port: where the first one's first rank serves its KV."""
    key_file = f"key-file={folder / 'keys'},transport={transport}"
    serves = f"p2p,serve=tcp://127.0.0.1:{port},size=128M,{key_file},role=prefill"
    asks = f"p2p,peer=named,{key_file},role=decode,{PATIENT}"
    with (
        closing(Server(folder / "p", *ENGINE, *flags, "--kv-connector", serves)) as prefill,
        closing(Server(folder / "d", *ENGINE, *flags, "--kv-connector", asks, "--kv-peers", "127.*")) as decode,
    ):
        yield prefill.wait_ready(), decode.wait_ready()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server, Server]]:
    """Prefill, decode, router."""
    folder = tmp_path_factory.mktemp("roles")
    with start_engines(folder, free_port()) as (prefill, decode):
        urls = f"{prefill.url},{decode.url}"
        with closing(Server(folder / "r", "--engines", urls, "--no-access-log", command=ROUTE)) as router:
            wait_until_all_ready(router.wait_ready(), 2)
            yield prefill, decode, router


def expected(server: Server, asked: list[tuple[str, Body]]) -> list[Told]:
    """What one engine says, with KV of its own."""
    salted = [(path, {**body, "cache_salt": "alone"}) for path, body in asked]
    told = asyncio.run(read_streams(server.url, salted, [0]))
    assert not any(one.error for one in told)
    return told


def kv_digests(server: Server) -> set[str]:
    return {model["kv_digest"] for model in json.loads(server.get("/load"))["models"].values()}


def test_prompts_are_computed_by_one_engine_and_continued_by_the_other(fleet: tuple[Server, Server, Server]) -> None:
    prefill, decode, router = fleet
    until(lambda: kv_digests(prefill) == kv_digests(decode) != {""}, "before any request they say that KV travels", 60)
    asked = [*short_prompts(4, 300), *long_prompts(6)]
    wanted = expected(decode, asked)
    before = prefill.metric("pagewire:prompt_tokens_total")
    told = asyncio.run(read_streams(router.url, asked, [0]))
    assert not differences(wanted, told), router.log.read_text()
    legs = router.metrics()["pagewire_router_prefill_legs_total"]
    assert legs > 0 and router.metrics()["pagewire_router_prefill_legs_failed_total"] == 0
    until(lambda: prefill.metric("pagewire:prompt_tokens_total") > before, "prompts were computed there", 60)
    until(lambda: decode.metric("pagewire:external_prefix_cache_hits_total") > 0, "their KV was loaded", 60)


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


@pytest.mark.parametrize(
    "transport", ["zmq", pytest.param("nixl", marks=pytest.mark.skipif(find_spec("nixl") is None, reason="no nixl"))]
)
def test_a_rank_that_dies_during_a_transfer_loses_no_request(transport: str, tmp_path: Path) -> None:
    """Each engine has two ranks; each loads from the same rank of the other engine. A proxy sends both legs at once."""
    port = free_port(2)
    remote = {"kv_request_id": "1", "remote_host": "127.0.0.1", "remote_port": port}
    legs = ({"remote_decoder": {"kv_request_id": "1"}}, {"remote_prefiller": remote})
    texts = iter(long_prompts(1000, 20))
    sizes = ("--tensor-parallel-size", "2")
    with start_engines(tmp_path, port, *sizes, transport=transport) as (prefill, decode):

        def loaded() -> float:
            return decode.metric("pagewire:external_prefix_cache_hits_total")

        def ask(num_prompts: int, victim: psutil.Process | None = None) -> None:
            """Sends new prompts; the victim is killed when the KV of one of them was loaded, by all ranks."""
            asked = list(islice(texts, num_prompts))
            wanted, hits = expected(decode, asked), loaded()
            first, second = (
                [(path, {**body, "kv_transfer_params": params, **more}) for path, body in asked]
                for params, more in zip(legs, ({"max_tokens": 1}, {}), strict=True)
            )

            async def read() -> list[Told]:
                prompts = asyncio.create_task(read_streams(prefill.url, first, [0]))
                streams = asyncio.create_task(read_streams(decode.url, second, [0]))
                if victim is not None:
                    await until_async(lambda: loaded() > hits, "the first KV was loaded", 60.0)
                    victim.kill()
                await prompts
                return await streams

            assert not differences(wanted, asyncio.run(read())), decode.log.read_text()

        ranks = {"worker", "worker-1"}
        for engine in (prefill, decode):
            before = engine.children()
            ask(4, before["worker-1"])
            after = until_replaced(engine, before, ranks)
            assert {name for name in before if after[name].pid != before[name].pid} == ranks
            engine.wait_ready()
            if engine is prefill:
                decode.kill()
                decode.start().wait_ready()  # it has learnt what loading costs beside an engine that heals
        ask(1)
