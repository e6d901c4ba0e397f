"""Jobs: each is done by one process, goes on in another one, and hears of its cancel anywhere."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from harness import run
from waiting import until_async

from pagewire.api.http.http_error import HttpError
from pagewire.api.state import jobs as module
from pagewire.api.state.database import Database
from pagewire.api.state.jobs import LEASE_S, Doing, Jobs

Begun = list[tuple[str, int, bool]]


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Process:
    """One of the processes that share a file. Its jobs wait for `go`."""

    def __init__(self, path: Path, clock: Clock, *, most: int = 9) -> None:
        self.jobs = Jobs(Database(str(path)), clock)
        self.begun: Begun = []
        self.cancelled: list[str] = []
        self.go = asyncio.Event()
        self.jobs.register("work", self.work, most=most)

    async def work(self, owner: bytes, id: str, doing: Doing) -> None:
        self.begun.append((id, doing.num_deaths, doing.is_cancelled))
        if doing.is_cancelled:
            return
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            if not doing.is_cancelled:
                raise
            self.cancelled.append(id)


def with_processes(tmp_path: Path, work: Callable[[Process, Process, Clock], Awaitable[None]]) -> None:
    async def begin_and_stop() -> None:
        clock = Clock()
        first, second = Process(tmp_path / "state", clock), Process(tmp_path / "state", clock)
        try:
            await work(first, second, clock)
        finally:
            await first.jobs.stop()
            await second.jobs.stop()

    run(begin_and_stop())


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.001)
    monkeypatch.setattr(module, "_POLL_S", 0.001)


def test_only_one_process_does_a_job(tmp_path: Path) -> None:
    async def work(first: Process, second: Process, clock: Clock) -> None:
        second.jobs.start()
        for i in range(20):
            await first.jobs.add("work", b"me", str(i))
        first.go.set()
        second.go.set()
        for i in range(20):
            await first.jobs.ended(b"me", str(i))
        assert sorted(id for id, *_ in first.begun + second.begun) == sorted(map(str, range(20)))

    with_processes(tmp_path, work)


def test_the_next_process_goes_on_where_one_stops(tmp_path: Path) -> None:
    async def work(first: Process, second: Process, clock: Clock) -> None:
        await first.jobs.add("work", b"", "a")
        await until_async(lambda: bool(first.begun), "it has begun")
        await first.jobs.stop()
        assert await first.jobs.is_open(b"", "a") and not first.cancelled
        second.jobs.start()
        await until_async(lambda: second.begun == [("a", 0, False)], "it goes on")
        second.go.set()
        await second.jobs.ended(b"", "a")
        assert not await first.jobs.is_open(b"", "a")

    with_processes(tmp_path, work)


def test_a_job_of_a_process_that_died_is_taken_when_its_lease_lapses(tmp_path: Path) -> None:
    async def work(dead: Process, second: Process, clock: Clock) -> None:
        await dead.jobs.add("work", b"", "a")  # renews nothing, because it was not started
        await second.jobs._look()
        assert not second.begun
        clock.now += LEASE_S
        await second.jobs._look()
        await until_async(lambda: second.begun == [("a", 1, False)], "it was taken")
        await dead.jobs._look()  # it was only slow
        await until_async(lambda: not dead.jobs._doing, "it does no more of it")
        assert not dead.cancelled and await second.jobs.is_open(b"", "a")

    with_processes(tmp_path, work)


def test_a_lease_is_renewed(tmp_path: Path) -> None:
    async def work(first: Process, second: Process, clock: Clock) -> None:
        await first.jobs.add("work", b"", "a")
        for _ in range(10):
            clock.now += LEASE_S / 2
            await first.jobs._look()
            await second.jobs._look()
        assert len(first.begun) == 1 and not second.begun

    with_processes(tmp_path, work)


def test_a_cancel_from_another_process_arrives(tmp_path: Path) -> None:
    async def work(first: Process, second: Process, clock: Clock) -> None:
        first.jobs.start()
        await first.jobs.add("work", b"", "a")
        await until_async(lambda: bool(first.begun), "it has begun")
        await second.jobs.cancel(b"", "a")
        await second.jobs.ended(b"", "a")
        assert first.cancelled == ["a"]
        await second.jobs.cancel(b"", "a")  # nothing is there any more

    with_processes(tmp_path, work)


def test_a_job_that_is_cancelled_before_it_begins_hears_of_it(tmp_path: Path) -> None:
    async def work(first: Process, second: Process, clock: Clock) -> None:
        await first.jobs.add("work", b"", "a")
        await until_async(lambda: bool(first.begun), "it has begun")
        await first.jobs.stop()
        await first.jobs.cancel(b"", "a")
        second.jobs.start()
        await second.jobs.ended(b"", "a")
        assert second.begun == [("a", 0, True)]

    with_processes(tmp_path, work)


def test_too_many_jobs_are_refused(tmp_path: Path) -> None:
    async def work(first: Process, second: Process, clock: Clock) -> None:
        for i in range(9):
            await first.jobs.check_room("work")
            await first.jobs.add("work", b"", str(i))
        with pytest.raises(HttpError) as refused:
            await second.jobs.check_room("work")
        assert refused.value.status == 429 and refused.value.code == "queue_full"

    with_processes(tmp_path, work)


def test_a_job_whose_database_fails_is_begun_again() -> None:
    async def work() -> None:
        jobs, num_begun = Jobs(Database()), 0

        async def fail_once(owner: bytes, id: str, doing: Doing) -> None:
            nonlocal num_begun
            num_begun += 1
            if num_begun == 1:
                raise HttpError(503, "The state file is locked.", code="state_unavailable")

        jobs.register("work", fail_once, most=1)
        jobs.start()
        await jobs.add("work", b"", "a")
        await jobs.ended(b"", "a")
        assert num_begun == 2
        await jobs.stop()

    run(work())


def test_a_job_that_fails_has_ended(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        jobs = Jobs(Database())

        async def fail(owner: bytes, id: str, doing: Doing) -> None:
            raise RuntimeError("a bug")

        jobs.register("work", fail, most=1)
        await jobs.add("work", b"", "a")
        await jobs.ended(b"", "a")
        assert "a failed" in caplog.text

    run(work())
