"""With which keys /load is read, and how often with those that are refused, from a real server under a clock."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable

import aiohttp
import msgspec
import pytest
from harness import CONFIG, FakeEngine, http_config
from served import Served

from pagewire.config.access import ApiKey
from pagewire.route.load_report import LAST_RETRY_S, MAX_KEYS, LoadReader, LoadReport


class Watched:
    """A reader, its clock, and how many requests it has sent."""

    def __init__(self, url: str, keys: list[str]) -> None:
        self.now = 1000.0
        self.num_asked = 0
        trace = aiohttp.TraceConfig()
        trace.on_request_start.append(self._count)
        self.session = aiohttp.ClientSession(trace_configs=[trace])
        self.reader = LoadReader(self.session, url, keys, clock=lambda: self.now)

    async def _count(self, *_: object) -> None:
        self.num_asked += 1


def run(path: str, keys: list[str], server_keys: tuple[str, ...], test: Callable[[Watched], Awaitable[None]]) -> None:
    async def work(url: str) -> None:
        watched = Watched(url, keys)
        async with watched.session:
            await test(watched)

    with Served(engine=FakeEngine(), api_keys=server_keys) as served:
        asyncio.run(work(f"http://127.0.0.1:{served.port}{path}"))


def test_an_engine_without_keys_is_asked_once_a_time() -> None:
    async def work(watched: Watched) -> None:
        for _ in range(3):
            report = await watched.reader.read()
            assert report is not None and list(report.models) == ["demo", "org/demo-alias"] and report.version
        assert watched.num_asked == 3 and watched.reader.refusal is watched.reader.concern is None

    run("/load", [], (), work)


@pytest.mark.parametrize("keys", [["x"], ["x", "y"]])
def test_refused_keys_are_tried_less_and_less_often(keys: list[str]) -> None:
    async def work(watched: Watched) -> None:
        times = []
        for _ in range(1200):  # ten minutes of checks
            before = watched.num_asked
            assert await watched.reader.read() is None
            if watched.num_asked > before:
                assert watched.num_asked == before + len(keys)
                times.append(watched.now)
            watched.now += 0.5
        gaps = [later - sooner for sooner, later in itertools.pairwise(times)]
        assert gaps[:7] == [1, 2, 4, 8, 16, 32, LAST_RETRY_S] and {*gaps[7:]} == {LAST_RETRY_S}
        assert watched.reader.refusal is not None and "status 401" in watched.reader.refusal
        watched.reader.restarted()
        before = watched.num_asked
        await watched.reader.read()
        assert watched.num_asked == before + len(keys), "an engine that has restarted is asked at once"

    run("/load", keys, ("right",), work)


def test_the_first_key_that_the_engine_takes_is_used_and_the_others_are_tried_again() -> None:
    async def work(watched: Watched) -> None:
        reader = watched.reader
        for num_asked in (3, 4, 5):
            assert await reader.read() is not None
            assert (reader.key, watched.num_asked, reader.refusal) == ("b", num_asked, None)
            assert reader.concern == "It refuses 1 of this router's 3 API keys; give both the same keys."
        watched.now += 1.0
        await reader.read()
        assert watched.num_asked == 8

    run("/load", ["a", "b", "c"], ("b", "c"), work)


def test_a_key_that_the_engine_drops_while_it_runs_is_refused() -> None:
    with Served(engine=FakeEngine(), api_keys=("old",)) as served:

        async def work() -> None:
            watched = Watched(f"http://127.0.0.1:{served.port}/load", ["old"])
            async with watched.session:
                assert await watched.reader.read() is not None
                served.edge.change(CONFIG, http_config(api_keys=(ApiKey("new"),)), ())
                assert await watched.reader.read() is None and watched.reader.refusal is not None
                served.edge.change(CONFIG, http_config(api_keys=(ApiKey("old"),)), ())
                assert await watched.reader.read() is None, "it is not asked so soon"
                watched.now += 1.0
                assert await watched.reader.read() is not None and watched.reader.refusal is None

        asyncio.run(work())


def test_very_many_keys_are_not_all_tried() -> None:
    async def work(watched: Watched) -> None:
        assert await watched.reader.read() is None
        assert watched.num_asked == MAX_KEYS and watched.reader.refusal is None
        assert watched.reader.concern == (
            "It refuses the first 8 of this router's 100 API keys, so its load and its models are unknown; "
            "give both the same keys."
        )

    run("/load", [f"{i}" for i in range(100)], ("99",), work)


def test_of_very_many_keys_one_of_the_first_may_be_taken() -> None:
    async def work(watched: Watched) -> None:
        assert await watched.reader.read() is not None
        assert watched.reader.concern == (
            "It refuses 7 of the first 8 of this router's 100 API keys; give both the same keys."
        )

    run("/load", [f"{i}" for i in range(100)], ("7",), work)


def test_a_page_that_is_no_load_is_a_concern_and_no_refusal() -> None:
    async def work(watched: Watched) -> None:
        assert await watched.reader.read() is None
        assert watched.reader.refusal is None
        assert watched.reader.concern == (
            "Its /load cannot be read (status 200), so its load and its models are unknown."
        )

    run("/version", [], (), work)


def test_an_answer_with_only_the_load_is_enough() -> None:
    report = msgspec.json.decode(b'{"server_load": 3, "more": []}', type=LoadReport)
    assert report.server_load == 3 and report.models == {} and report.role == "both"
