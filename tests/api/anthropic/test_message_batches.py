"""Anthropic's message batches: results, cancels, lists, owners."""

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from harness import Answer, Client, FakeEngine, make_app, request, run
from waiting import until_async

from pagewire.api.anthropic import message_batches
from pagewire.api.state.database import Database
from pagewire.api.state.pieces import Pieces

PATH = "/v1/messages/batches"
PARAMS = {"max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}


def entry(id: str, **changes: Any) -> dict[str, Any]:
    return {"custom_id": id, "params": PARAMS | changes}


class Caller:
    def __init__(self, engine: FakeEngine, **settings: Any) -> None:
        self.app = make_app(engine, api_keys=("first", "second"), **settings)

    async def call(self, method: str, path: str, body: Any = None, key: str = "first") -> Answer:
        data = b"" if body is None else json.dumps(body).encode()
        return await Client(self.app).call(method, path, data, {"authorization": f"Bearer {key}"})

    async def ended(self, id: str) -> dict[str, Any]:
        """The batch when it has ended."""
        body: dict[str, Any] = {}
        for _ in range(2000):
            body = (await self.call("GET", f"{PATH}/{id}")).json
            if body["processing_status"] == "ended":
                break
            await asyncio.sleep(0)
        return body


def test_a_batch_is_answered() -> None:
    async def work() -> None:
        caller = Caller(FakeEngine())
        entries = [entry("a"), entry("b", max_tokens=0), entry("c", stream=True), *(entry(f"n{i}") for i in range(20))]
        created = (await caller.call("POST", PATH, {"requests": entries})).json
        assert created["type"] == "message_batch" and created["processing_status"] == "in_progress"
        assert created["request_counts"]["processing"] == 23 and created["results_url"] is None
        path = f"{PATH}/{created['id']}"
        assert (await caller.call("GET", f"{path}/results")).status == 404
        assert (await caller.call("DELETE", path)).status == 409
        ended = await caller.ended(created["id"])
        assert ended["request_counts"] == {"processing": 0, "succeeded": 21, "errored": 2, "canceled": 0, "expired": 0}
        answer = await caller.call("GET", f"{path}/results")
        lines = [json.loads(line) for line in answer.body.splitlines()]
        assert [line["custom_id"] for line in lines] == [one["custom_id"] for one in entries]
        assert lines[0]["result"]["message"]["content"][0]["text"] == "Hello"
        assert lines[1]["result"]["error"]["error"]["type"] == "invalid_request_error"
        assert "stream" in lines[2]["result"]["error"]["error"]["message"]
        assert (await caller.call("GET", path, key="second")).status == 404
        assert (await caller.call("POST", f"{path}/cancel")).status == 409
        deleted = await caller.call("DELETE", path)
        assert deleted.json == {"type": "message_batch_deleted", "id": created["id"]}
        assert (await caller.call("GET", path)).status == 404

    run(work())


def test_a_cancelled_batch_keeps_its_answers() -> None:
    async def work() -> None:
        engine = FakeEngine()
        caller = Caller(engine)
        first = (await caller.call("POST", PATH, {"requests": [entry("a")]})).json
        await caller.ended(first["id"])
        engine.hold = True
        created = (await caller.call("POST", PATH, {"requests": [entry("a"), entry("b")]})).json
        await until_async(lambda: len(engine.submits) == 3, "the engine has them")
        cancelled = (await caller.call("POST", f"{PATH}/{created['id']}/cancel")).json
        assert cancelled["processing_status"] == "canceling" and cancelled["cancel_initiated_at"]
        ended = await caller.ended(created["id"])
        assert ended["request_counts"]["canceled"] == 2 and not engine.open
        listed = (await caller.call("GET", f"{PATH}?limit=1")).json
        assert listed["has_more"] and [one["id"] for one in listed["data"]] == [created["id"]]
        rest = (await caller.call("GET", f"{PATH}?after_id={created['id']}")).json
        assert [one["id"] for one in rest["data"]] == [first["id"]] and not rest["has_more"]
        before = (await caller.call("GET", f"{PATH}?before_id={first['id']}")).json
        assert [one["id"] for one in before["data"]] == [created["id"]]
        assert (await caller.call("GET", f"{PATH}?limit=0")).status == 400
        assert (await caller.call("GET", f"{PATH}?after_id=x")).status == 400

    run(work())


def test_the_next_server_continues_a_batch(tmp_path: Path) -> None:
    async def work() -> None:
        engine, state = FakeEngine(), str(tmp_path / "state")
        caller = Caller(engine, state=state)
        entries = [entry(f"n{i}") for i in range(30)]
        first_key = hashlib.sha256(b"first").digest()[:16]
        created = (await caller.call("POST", PATH, {"requests": entries})).json
        await until_async(lambda: len(engine.submits) >= 12, "some are answered")
        engine.hold = True
        await caller.app.stop()
        results = Pieces(Database(state), "message_batch_result", max_bytes=1 << 20)
        num_done = len([piece async for piece in results.read(first_key, created["id"])])
        assert 0 < num_done < 30
        second = FakeEngine()
        next_caller = Caller(second, state=state)
        next_caller.app.start()
        ended = await next_caller.ended(created["id"])
        assert ended["request_counts"]["succeeded"] == 30 and len(second.submits) == 30 - num_done
        answer = await next_caller.call("GET", f"{PATH}/{created['id']}/results")
        lines = [json.loads(line) for line in answer.body.splitlines()]
        assert [line["custom_id"] for line in lines] == [one["custom_id"] for one in entries]
        await next_caller.app.stop()

    run(work())


def test_requests_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_batches, "_MAX_REQUEST_BYTES", 2000)

    async def work() -> None:
        caller = Caller(FakeEngine())
        refused = await caller.call("POST", PATH, {"requests": [entry(f"n{i}") for i in range(9)]})
        assert refused.status == 413
        created = (await caller.call("POST", PATH, {"requests": [entry("a")]})).json  # nothing of it was left
        assert (await caller.ended(created["id"]))["request_counts"]["succeeded"] == 1

    run(work())


@pytest.mark.parametrize(
    "body", [{}, {"requests": []}, {"requests": [entry("a"), entry("a")]}, {"requests": [entry("a b")]}]
)
def test_invalid_batches_are_refused(body: Any) -> None:
    answer = request(FakeEngine(), PATH, body)
    assert answer.status == 400 and answer.json["error"]["type"] == "invalid_request_error"
