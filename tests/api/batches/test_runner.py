"""How a batch is worked off: busy engines, other servers, time limits."""

import asyncio
from pathlib import Path

import pytest
from harness import FakeEngine
from waiting import until_async

from pagewire.api.batches import runner

from .test_endpoints import Batches, play, request_line


def test_a_cancelled_batch_keeps_what_it_has() -> None:
    engine = FakeEngine()

    async def work(server: Batches) -> None:
        batch = await server.create(request_line("first"))
        await server.until(batch["id"], "completed")
        engine.hold = True
        batch = await server.create("".join(request_line(str(i)) for i in range(50)))
        await until_async(lambda: len(engine.open) == 8, "as many are open as run at once")
        busy = (await server.call("DELETE", f"/v1/files/{batch['input_file_id']}")).status
        assert busy == 409 and len(engine.open) == 8
        answer = await server.call("POST", f"/v1/batches/{batch['id']}/cancel")
        assert answer.json["status"] == "cancelling"
        ended = await server.until(batch["id"], "cancelled")
        assert not engine.open and ended["output_file_id"] is None
        assert (await server.call("POST", f"/v1/batches/{batch['id']}/cancel")).status == 409

    play(work, engine)


def test_a_busy_engine_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_PAUSE_S", 0.001)
    engine = FakeEngine()
    engine.refuse = ("queue_full", "The queue is full.")

    async def work(server: Batches) -> None:
        batch = await server.create(request_line("a"))
        await until_async(lambda: len(engine.submits) >= 3, "it is asked again")
        engine.refuse = None
        assert (await server.until(batch["id"], "completed"))["request_counts"]["completed"] == 1

    play(work, engine)


def test_the_next_server_goes_on(tmp_path: Path) -> None:
    ids: list[str] = []
    engine = FakeEngine()

    async def begin(server: Batches) -> None:
        batch = await server.create("".join(request_line(str(i)) for i in range(30)))
        ids.append(batch["id"])
        while (await server.call("GET", f"/v1/batches/{ids[0]}")).json["request_counts"]["completed"] < 5:
            await asyncio.sleep(0)
        engine.hold = True

    play(begin, engine, batch_folder=str(tmp_path))
    output = tmp_path / f"{ids[0]}.output"
    num_done = len(output.read_text().splitlines())
    assert 5 <= num_done < 30
    with output.open("a") as file:
        file.write('{"custom_id": "cut sho')  # as after a power cut
    again = FakeEngine()

    async def go_on(server: Batches) -> None:
        ended = await server.until(ids[0], "completed")
        assert ended["request_counts"] == {"total": 30, "completed": 30, "failed": 0}
        answers = [answer["custom_id"] for answer in await server.lines(ended["output_file_id"])]
        assert sorted(answers, key=int) == [str(i) for i in range(30)]
        assert len(again.submits) == 30 - num_done

    play(go_on, again, start=True, batch_folder=str(tmp_path))


def test_a_batch_that_takes_too_long_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagewire.api.batches.endpoints.WINDOW_S", 1)
    engine = FakeEngine()
    engine.hold = True

    async def work(server: Batches) -> None:
        batch = await server.create(request_line("a"))
        ended = await server.until(batch["id"], "expired", "failed", "completed")
        assert ended["status"] == "expired" and not engine.open

    play(work, engine)
