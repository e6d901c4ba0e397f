"""Responses in the background: made without a client, followed, streamed again, cancelled."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from harness import Answer, Client, FakeEngine, make_app, run
from waiting import until_async

from pagewire.api.responses import background
from pagewire.api.responses.store import ResponseStore
from pagewire.api.state import jobs
from pagewire.api.state.database import Database
from pagewire.api.state.pieces import Pieces


class Caller:
    """Calls one application; each call is a client of its own."""

    def __init__(self, engine: FakeEngine, **settings: Any) -> None:
        self.app = make_app(engine, **settings)

    async def call(self, method: str, path: str, body: Any = None) -> Answer:
        return await Client(self.app).call(method, path, b"" if body is None else json.dumps(body).encode())

    async def begin(self, **fields: Any) -> str:
        body = (await self.call("POST", "/v1/responses", {"input": "hi", "background": True, **fields})).json
        assert body["status"] == "queued" and body["background"] is True
        id: str = body["id"]
        return id

    async def status(self, id: str) -> str:
        status: str = (await self.call("GET", f"/v1/responses/{id}")).json["status"]
        return status


async def ends(caller: Caller, id: str) -> dict[str, Any]:
    """The response when it has ended."""
    body: dict[str, Any] = {}
    for _ in range(2000):
        body = (await caller.call("GET", f"/v1/responses/{id}")).json
        if body["status"] not in ("queued", "in_progress"):
            break
        await asyncio.sleep(0)
    return body


def test_a_response_is_made_without_its_client() -> None:
    async def work() -> None:
        engine = FakeEngine()
        engine.hold = True
        caller = Caller(engine)
        id = await caller.begin()
        await until_async(lambda: bool(engine.submits), "the engine has it")
        early = await caller.call("POST", "/v1/responses", {"input": "more", "previous_response_id": id})
        assert early.error["param"] == "previous_response_id"
        engine.go()
        body = await ends(caller, id)
        assert body["status"] == "completed" and body["output"][0]["content"][0]["text"] == "Hello"
        engine.submits.clear()
        after = await caller.call("POST", "/v1/responses", {"input": "more", "previous_response_id": id})
        assert after.status == 200 and len(json.loads(engine.submits[0].prompt.messages)) == 3  # type: ignore[union-attr]
        replayed = await caller.call("GET", f"/v1/responses/{id}?stream=true")
        assert replayed.error["param"] == "stream", "it was not streamed"

    run(work())


def test_a_cancelled_response_keeps_what_it_had() -> None:
    async def work() -> None:
        engine = FakeEngine()
        engine.hold = True
        caller = Caller(engine)
        id = await caller.begin()
        await until_async(lambda: bool(engine.submits), "the engine has it")
        cancelled = (await caller.call("POST", f"/v1/responses/{id}/cancel")).json
        assert cancelled["status"] == "cancelled" and engine.cancels == [0] and not engine.open
        again = (await caller.call("POST", f"/v1/responses/{id}/cancel")).json
        assert again == cancelled and await caller.status(id) == "cancelled"
        engine.go()
        plain = await caller.call("POST", "/v1/responses", {"input": "x"})
        refused = await caller.call("POST", f"/v1/responses/{plain.json['id']}/cancel")
        assert refused.status == 400
        assert (await caller.call("POST", "/v1/responses/resp_x/cancel")).status == 404

    run(work())


def test_a_stream_can_be_followed_again() -> None:
    async def work() -> None:
        engine = FakeEngine(["H", "el", "lo"])
        caller = Caller(engine)
        first = await caller.call("POST", "/v1/responses", {"input": "hi", "background": True, "stream": True})
        events = first.typed_events
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert events[0]["response"]["status"] == "queued" and events[-1]["type"] == "response.completed"
        id = events[0]["response"]["id"]
        whole = await caller.call("GET", f"/v1/responses/{id}?stream=true")
        rest = await caller.call("GET", f"/v1/responses/{id}?stream=true&starting_after=4")
        assert whole.typed_events == events and rest.typed_events == events[5:]
        wrong = await caller.call("GET", f"/v1/responses/{id}?stream=true&starting_after=x")
        assert wrong.error["param"] == "starting_after"

    run(work())


def test_a_client_that_leaves_does_not_end_the_response() -> None:
    async def work() -> None:
        engine = FakeEngine()
        engine.hold = True
        caller = Caller(engine)
        client = Client(caller.app)
        body = json.dumps({"input": "hi", "background": True, "stream": True}).encode()
        call = asyncio.ensure_future(client.call("POST", "/v1/responses", body))
        await until_async(lambda: len(client.messages) > 2, "the stream has begun")
        client.leave()
        answer = await call
        id = json.loads(answer.body.decode().split("data: ")[1].split("\n")[0])["response"]["id"]
        assert not engine.cancels
        follower = asyncio.ensure_future(caller.call("GET", f"/v1/responses/{id}?stream=true"))
        await asyncio.sleep(0)
        engine.go()
        assert (await follower).typed_events[-1]["type"] == "response.completed"
        assert (await ends(caller, id))["status"] == "completed"

    run(work())


def test_failures_are_kept() -> None:
    async def work() -> None:
        engine = FakeEngine()
        engine.refuse = ("context_length_exceeded", "This model's maximum context length is 128 tokens.")
        caller = Caller(engine)
        body = await ends(caller, await caller.begin())
        assert body["status"] == "failed" and body["error"]["message"].startswith("This model's maximum")
        engine.refuse, engine.fail_after = None, 1
        body = await ends(caller, await caller.begin())
        assert body["status"] == "failed" and body["output"][0]["content"][0]["text"] == "Hel"

    run(work())


def test_the_next_server_makes_what_one_that_stops_has_begun(tmp_path: Path) -> None:
    async def work() -> None:
        engine, state = FakeEngine(), str(tmp_path / "state")
        engine.hold = True
        caller = Caller(engine, state=state)
        conversation = (await caller.call("POST", "/v1/conversations", {})).json["id"]
        id = await caller.begin(conversation=conversation, user="me")
        await until_async(lambda: bool(engine.submits), "the engine has it")
        await caller.app.stop()
        assert engine.cancels == [0] and await caller.status(id) in ("queued", "in_progress")
        following = Caller(FakeEngine(), state=state)
        following.app.start()
        body = await ends(following, id)
        assert body["status"] == "completed" and body["user"] == "me"
        items = (await following.call("GET", f"/v1/conversations/{conversation}/items")).json["data"]
        assert [item["role"] for item in items] == ["assistant", "user"]
        await following.app.stop()

    run(work())


def test_what_clients_have_seen_of_a_stream_is_not_made_again(tmp_path: Path) -> None:
    async def work() -> None:
        engine, state = FakeEngine(), str(tmp_path / "state")
        engine.hold = True
        caller = Caller(engine, state=state)
        body = json.dumps({"input": "hi", "background": True, "stream": True}).encode()
        call = asyncio.ensure_future(Client(caller.app).call("POST", "/v1/responses", body))
        await until_async(lambda: bool(engine.submits), "the engine has it")
        await caller.app.stop()
        events = (await call).typed_events
        assert events[-1]["type"] == "response.failed" and "stopped" in events[-1]["response"]["error"]["message"]
        id = events[0]["response"]["id"]
        following = Caller(engine, state=state)
        assert (await following.call("GET", f"/v1/responses/{id}?stream=true")).typed_events == events

    run(work())


def test_a_response_is_followed_and_cancelled_in_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in ((jobs, "LOOK_S"), (jobs, "_POLL_S"), (background, "_FLUSH_S")):
        monkeypatch.setattr(module, name, 0.001)

    async def work() -> None:
        first, second = FakeEngine(["H", "el", "lo"]), FakeEngine()
        first.hold = True
        maker, other = (Caller(engine, state=str(tmp_path / "state")) for engine in (first, second))
        body = json.dumps({"input": "hi", "background": True, "stream": True}).encode()
        call = asyncio.ensure_future(Client(maker.app).call("POST", "/v1/responses", body))
        await until_async(lambda: bool(first.submits), "the engine has it")
        events = Pieces(Database(str(tmp_path / "state")), "response_events", max_bytes=1 << 20)
        listed = (await ResponseStore(Database(str(tmp_path / "state"))).list(b""))[0][0]
        while not [piece async for piece in events.read(b"", listed)]:
            await asyncio.sleep(0)
        seen = Client(other.app)
        follower = asyncio.ensure_future(seen.call("GET", f"/v1/responses/{listed}?stream=true"))
        await until_async(lambda: len(seen.messages) > 2, "it sees the beginning")
        first.go()
        assert (await follower).typed_events == (await call).typed_events
        first.hold = True
        id = await maker.begin()
        await until_async(lambda: bool(first.open), "the engine has it")
        maker.app.start()
        cancelled = (await other.call("POST", f"/v1/responses/{id}/cancel")).json
        assert cancelled["status"] == "cancelled" and not first.open and not second.submits
        await maker.app.stop()

    run(work())


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_response_of_a_process_that_died(is_streamed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made again, unless clients may have seen a part of it."""
    monkeypatch.setattr(jobs, "LEASE_S", 0.0)  # the lease has lapsed at once

    async def work() -> None:
        engine, state = FakeEngine(), str(tmp_path / "state")
        engine.hold = True
        dead = Caller(engine, state=state)
        body = json.dumps({"input": "hi", "background": True, "stream": is_streamed}).encode()
        call = asyncio.ensure_future(Client(dead.app).call("POST", "/v1/responses", body))
        await until_async(lambda: bool(engine.submits), "the engine has it")
        id = (await ResponseStore(Database(state)).list(b""))[0][0]
        following = Caller(FakeEngine(), state=state)
        monkeypatch.setattr(jobs, "LEASE_S", 99.0)
        following.app.start()
        ended = await ends(following, id)
        if is_streamed:
            assert ended["status"] == "failed" and "not made again" in ended["error"]["message"]
            events = (await following.call("GET", f"/v1/responses/{id}?stream=true")).typed_events
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
            assert events[-1]["type"] == "response.failed"
        else:
            assert ended["status"] == "completed"
        await following.app.stop()
        call.cancel()
        await asyncio.wait((call,))

    run(work())
