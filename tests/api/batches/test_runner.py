"""The processing of a batch: cancellation, a busy engine, a new server, the time limit."""

import asyncio
from pathlib import Path

import pytest
from harness import FakeEngine
from waiting import until_async

from pagewire.api.batches import runner

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
    monkeypatch.setattr(runner, "_PAUSE_S", 0.001)
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

    run_work(begin, engine, batch_folder=str(tmp_path))
    output = tmp_path / f"{ids[0]}.output"
    num_done = len(output.read_text().splitlines())
    assert 5 <= num_done < 30
    with output.open("a") as file:
        file.write('{"custom_id": "cut sho')  # as after a power cut
    second_engine = FakeEngine()

    async def continue_batch(server: Batches) -> None:
        ended = await server.until(ids[0], "completed")
        assert ended["request_counts"] == {"total": 30, "completed": 30, "failed": 0}
        answers = [answer["custom_id"] for answer in await server.lines(ended["output_file_id"])]
        assert sorted(answers, key=int) == [str(i) for i in range(30)]
        assert len(second_engine.submits) == 30 - num_done

    run_work(continue_batch, second_engine, start=True, batch_folder=str(tmp_path))


def test_a_batch_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagewire.api.batches.endpoints.WINDOW_S", 1)
    engine = FakeEngine()
    engine.hold = True

    async def work(server: Batches) -> None:
        batch = await server.create(request_line("a"))
        ended = await server.until(batch["id"], "expired", "failed", "completed")
        assert ended["status"] == "expired" and not engine.open

    run_work(work, engine)
