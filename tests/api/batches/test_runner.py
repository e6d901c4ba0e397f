"""The processing of a batch: cancellation, a busy engine, a new server, the time limit."""

import asyncio
import sqlite3
from pathlib import Path

import pytest
from harness import FakeEngine, run
from msgspec.structs import replace
from waiting import until_async

from pagewire.api.batches.store import FileWriter
from pagewire.api.output import inner_call
from pagewire.api.state import database, jobs
from pagewire.api.state.database import Database
from pagewire.api.state.jobs import Job
from pagewire.api.state.pieces import Pieces
from pagewire.api.state.records import Records

from .test_endpoints import Batches, request_line, run_work


def test_a_cancelled_batch_ends_its_open_requests() -> None:
    engine = FakeEngine()

    async def work(server: Batches) -> None:
        batch = await server.create(request_line("first"))
        await server.until(batch["id"], "completed")
        engine.hold = True
        batch = await server.create("".join(request_line(str(i)) for i in range(50)))
        await until_async(lambda: len(engine.open) == 8, "the maximum of concurrent requests is open")
        busy = (await server.call("DELETE", f"/v1/files/{batch['input_file_id']}")).status
        assert busy == 409 and len(engine.open) == 8
        answer = await server.call("POST", f"/v1/batches/{batch['id']}/cancel")
        assert answer.json["status"] == "cancelling"
        ended = await server.until(batch["id"], "cancelled")
        assert not engine.open and ended["output_file_id"] is None
        assert (await server.call("POST", f"/v1/batches/{batch['id']}/cancel")).status == 409

    run_work(work, engine)


def test_a_request_is_retried_while_the_engine_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inner_call, "_PAUSE_S", 0.001)
    engine = FakeEngine()
    engine.refuse = ("queue_full", "The queue is full.")

    async def work(server: Batches) -> None:
        batch = await server.create(request_line("a"))
        await until_async(lambda: len(engine.submits) >= 3, "the request is retried")
        engine.refuse = None
        assert (await server.until(batch["id"], "completed"))["request_counts"]["completed"] == 1

    run_work(work, engine)


def test_the_next_server_continues_a_batch(tmp_path: Path) -> None:
    ids: list[str] = []
    engine = FakeEngine()

    async def begin(server: Batches) -> None:
        batch = await server.create("".join(request_line(str(i)) for i in range(30)))
        ids.append(batch["id"])
        while (await server.call("GET", f"/v1/batches/{ids[0]}")).json["request_counts"]["completed"] < 5:
            await asyncio.sleep(0)
        engine.hold = True

    run_work(begin, engine, state=str(tmp_path / "state"))
    answers = Pieces(Database(str(tmp_path / "state")), "batch_answer", max_bytes=1 << 20)

    async def num_answers() -> int:
        return len([piece async for piece in answers.read(b"", ids[0])])

    num_done = run(num_answers())
    assert 5 <= num_done < 30
    second_engine = FakeEngine()

    async def continue_batch(server: Batches) -> None:
        ended = await server.until(ids[0], "completed")
        assert ended["request_counts"] == {"total": 30, "completed": 30, "failed": 0}
        answers = [answer["custom_id"] for answer in await server.lines(ended["output_file_id"])]
        assert sorted(answers, key=int) == [str(i) for i in range(30)]
        assert len(second_engine.submits) == 30 - num_done

    run_work(continue_batch, second_engine, start=True, state=str(tmp_path / "state"))


def test_one_of_several_processes_answers_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both know it; what one is told to cancel, the other one ends."""
    monkeypatch.setattr(jobs, "LOOK_S", 0.001)
    first, second = FakeEngine(), FakeEngine()
    first.hold = second.hold = True

    async def work(server: Batches) -> None:
        other = Batches(second, state=str(tmp_path / "state"))
        server.app.start()
        other.app.start()
        batch = await server.create("".join(request_line(str(i)) for i in range(4)))
        await until_async(lambda: len(first.open) + len(second.open) == 4, "it is answered")
        assert (await other.call("GET", f"/v1/batches/{batch['id']}")).json["status"] == "in_progress"
        idle = server if second.open else other
        assert not (first.open and second.open)
        assert (await idle.call("POST", f"/v1/batches/{batch['id']}/cancel")).json["status"] == "cancelling"
        await idle.until(batch["id"], "cancelled")
        assert not first.open and not second.open and len(first.submits) + len(second.submits) == 4
        await other.app.stop()

    run_work(work, first, state=str(tmp_path / "state"))


def test_files_are_made_again_where_a_process_died_while_it_made_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids: list[str] = []
    complete = FileWriter.complete

    async def die(writer: FileWriter) -> None:
        raise asyncio.CancelledError

    async def begin(server: Batches) -> None:
        batch = await server.create(request_line("a") + request_line("bad", temperature=9))
        ids.append(batch["id"])
        monkeypatch.setattr(FileWriter, "complete", die)
        await server.until(ids[0], "finalizing")

    async def go_on(server: Batches) -> None:
        ended = await server.until(ids[0], "completed")
        (good,), (bad,) = [await server.lines(ended[f"{kind}_file_id"]) for kind in ("output", "error")]
        assert good["custom_id"] == "a" and bad["custom_id"] == "bad"
        assert len((await server.call("GET", "/v1/files")).json["data"]) == 3

    run_work(begin, state=str(tmp_path / "state"))
    monkeypatch.setattr(FileWriter, "complete", complete)
    run_work(go_on, start=True, state=str(tmp_path / "state"))


def test_a_batch_that_kills_its_processes_fails(tmp_path: Path) -> None:
    ids: list[str] = []
    engine = FakeEngine()
    engine.hold = True
    state = str(tmp_path / "state")

    async def begin(server: Batches) -> None:
        ids.append((await server.create(request_line("a")))["id"])

    async def go_on(server: Batches) -> None:
        ended = await server.until(ids[0], "failed", "completed")
        assert ended["status"] == "failed" and "3 processes have died" in ended["errors"]["data"][0]["message"]

    run_work(begin, engine, state=state)
    records = Records(Database(state), "job", Job, max_bytes=1 << 20)
    run(records.change_all(lambda owner, id, job: replace(job, num_deaths=3)))
    run_work(go_on, start=True, state=state)


def test_a_batch_waits_while_the_file_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "LOOK_S", 0.001)
    monkeypatch.setattr(database, "_LOCK_WAIT_S", 0.01)
    engine = FakeEngine()
    engine.hold = True
    path = tmp_path / "state"

    async def work(server: Batches) -> None:
        batch = await server.create(request_line("a"))
        await until_async(lambda: bool(engine.open), "it is answered")
        with sqlite3.connect(path, isolation_level=None) as other:
            other.execute("BEGIN IMMEDIATE")
            engine.go()
            refused = await server.call("GET", f"/v1/batches/{batch['id']}")
            assert refused.status == 503 and refused.error["code"] == "state_unavailable"
            other.execute("ROLLBACK")
        other.close()
        ended = await server.until(batch["id"], "completed", "failed")
        assert ended["status"] == "completed" and len(await server.lines(ended["output_file_id"])) == 1

    run_work(work, engine, start=True, state=str(path))


def test_a_batch_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagewire.api.batches.endpoints.WINDOW_S", 1)
    engine = FakeEngine()
    engine.hold = True

    async def work(server: Batches) -> None:
        batch = await server.create(request_line("a"))
        ended = await server.until(batch["id"], "expired", "failed", "completed")
        assert ended["status"] == "expired" and not engine.open

    run_work(work, engine)
