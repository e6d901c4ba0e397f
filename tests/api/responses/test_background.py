"""Responses in the background: made without a client, followed, streamed again, cancelled."""

import asyncio
import json
from typing import Any

from harness import Answer, Client, FakeEngine, make_app, run
from waiting import until_async


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
    for _ in range(200):
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


def test_a_stopping_server_ends_them() -> None:
    async def work() -> None:
        engine = FakeEngine()
        engine.hold = True
        caller = Caller(engine)
        id = await caller.begin()
        await until_async(lambda: bool(engine.submits), "the engine has it")
        await caller.app.stop()
        body = await ends(caller, id)
        assert body["status"] == "failed" and engine.cancels == [0]

    run(work())
