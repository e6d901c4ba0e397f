"""Rates that several processes share: what one has taken, the others have not."""

import random
from pathlib import Path

import pytest
from harness import Client, FakeEngine, make_app, run

from pagewire.api.http.http_error import HttpError
from pagewire.api.http.rate_limit import Bucket
from pagewire.api.state.database import Database
from pagewire.api.state.rates import SharedRates
from pagewire.config.access import ApiKey


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def process(path: Path, clock: Clock, per_minute: int = 60) -> tuple[SharedRates, Bucket]:
    bucket = Bucket(per_minute, clock)
    return SharedRates(Database(str(path)), {"key": bucket}, clock), bucket


def test_what_one_process_has_taken_is_taken_for_all(tmp_path: Path) -> None:
    async def work() -> None:
        clock = Clock()
        (first, here), (second, there) = (process(tmp_path / "state", clock) for _ in range(2))
        here.take(40)
        there.take(50)
        await first.share()
        await second.share()
        await first.share()
        assert here.level == there.level == -30, "both bursts are paid for"
        clock.now += 45
        await second.share()
        await first.share()
        assert here.level == there.level == 15
        next_server, bucket = process(tmp_path / "state", clock)
        await next_server.share()
        assert bucket.level == 15
        clock.now += 3600
        for one in (first, second, next_server):
            await one.share()
        assert here.level == there.level == bucket.level == 60

    run(work())


def test_no_key_gets_more_than_its_rate_over_time(tmp_path: Path) -> None:
    """Random histories of three processes, in which requests are only taken from what is there."""

    async def work(seed: int) -> None:
        draw, clock, total = random.Random(seed), Clock(), 0.0
        processes = [process(tmp_path / str(seed), clock) for _ in range(3)]
        for _ in range(300):
            clock.now += draw.random()
            rates, bucket = draw.choice(processes)
            if bucket.level >= 5:
                bucket.take(5)
                total += 5
            if draw.random() < 0.5:
                await rates.share()
        assert total <= 3 * 60 + (clock.now - 1000), seed
        for rates, _ in processes * 2:
            await rates.share()
        levels = {bucket.level for _, bucket in processes}
        assert len(levels) == 1 and max(levels) <= 60, seed

    for seed in range(3):
        run(work(seed))


def test_without_the_database_a_process_has_rates_of_its_own(tmp_path: Path) -> None:
    async def work() -> None:
        (tmp_path / "state").write_text("not a database\n" * 100)
        clock = Clock()
        rates, bucket = process(tmp_path / "state", clock)
        bucket.take(10)
        with pytest.raises(HttpError):
            await rates.share()
        assert bucket.level == 50
        (tmp_path / "state").unlink()
        bucket.take(5)
        await rates.share()
        other, there = process(tmp_path / "state", clock)
        await other.share()
        assert bucket.level == there.level == 45

    run(work())


def test_the_next_server_refuses_a_key_that_has_used_its_rate(tmp_path: Path) -> None:
    async def work() -> None:
        statuses = []
        for _ in range(2):
            keys = tuple(ApiKey(name, requests_per_minute=2) for name in "ab")
            app = make_app(FakeEngine(), state=str(tmp_path / "state"), api_keys=keys)
            app.start()
            await app._rates.share()
            for key in "aab":
                headers = {"authorization": f"Bearer {key}"}
                answer = await Client(app).call("POST", "/v1/completions", b'{"prompt": "x"}', headers)
                statuses.append(answer.status)
            await app.stop()
        assert statuses == [200, 200, 200, 429, 429, 200]

    run(work())
