"""What happens to a stream when its client leaves, the engine fails, or the server stops."""

import asyncio
import json
import random
from collections.abc import Callable, Sequence

import pytest
from harness import Answer, Client, FakeEngine, chat, make_app, request, run

from pagewire.api.http import direct
from pagewire.api.openai.chat import ChatReply
from pagewire.api.output import sse
from pagewire.ipc.messages import Cancel, Chunk, Submit

BODY = json.dumps({"messages": [{"role": "user", "content": "hi"}], "n": 2}).encode()
STREAM = json.dumps({"messages": [{"role": "user", "content": "hi"}], "n": 2, "stream": True}).encode()


async def start(engine: FakeEngine, body: bytes, client: Client | None = None) -> tuple[Client, "asyncio.Task[Answer]"]:
    """Start a request that the engine accepts and does not answer yet."""
    engine.hold = True
    client = client or Client(make_app(engine))
    task = asyncio.create_task(client.call("POST", "/v1/chat/completions", body))
    for _ in range(10):
        await asyncio.sleep(0)
    assert engine.submits and not task.done()
    return client, task


@pytest.mark.parametrize("body", [BODY, STREAM])
def test_a_disconnect_cancels_once(body: bytes) -> None:
    async def work() -> None:
        engine = FakeEngine()
        client, task = await start(engine, body)
        client.leave()
        await task
        assert engine.cancels == [0, 1] and engine.gateway.num_open == 0

    run(work())


def test_a_disconnect_within_the_stream_cancels() -> None:
    async def work() -> None:
        engine = FakeEngine(list("abcdef"))
        client = Client(make_app(engine))

        def on_part(part: bytes) -> None:
            if b'"c"' in part:
                client.leave()

        client.on_part = on_part
        answer = await client.call("POST", "/v1/chat/completions", STREAM)
        assert not answer.is_complete and b"[DONE]" not in answer.body
        assert sorted(engine.cancels) == [0, 1] and engine.gateway.num_open == 0

    run(work())


def test_a_disconnect_before_admission_cancels() -> None:
    async def work() -> None:
        engine = FakeEngine()
        client = Client(make_app(engine))
        engine.gateway.engines[0].post = lambda message: engine.cancels.extend(
            message.rids if isinstance(message, Cancel) else ()
        )
        task = asyncio.create_task(client.call("POST", "/v1/chat/completions", STREAM))
        await asyncio.sleep(0)
        client.leave()
        await task
        assert engine.cancels == [0, 1] and not client.messages

    run(work())


def test_a_disconnect_within_the_body_submits_nothing() -> None:
    async def work() -> None:
        engine = FakeEngine()
        client = Client(make_app(engine))
        client.leave()
        await client.call("POST", "/v1/chat/completions", b"{", whole=False)
        assert not client.messages and not engine.submits

    run(work())


def test_a_finished_request_cancels_nothing() -> None:
    engine = FakeEngine()
    chat(engine, stream=True, n=3)
    chat(engine, n=3)
    assert engine.cancels == []


def test_a_failure_within_a_stream_ends_it_with_an_error_event() -> None:
    engine = FakeEngine(["a", "b", "c"])
    engine.fail_after = 2
    answer = chat(engine, stream=True, n=1)
    assert answer.status == 200 and answer.is_complete
    *events, last = answer.events
    assert last == {"error": {"message": "A worker failed.", "type": "server_error", "param": None, "code": None}}
    assert all(choice["finish_reason"] is None for event in events for choice in event["choices"])
    assert "[DONE]" not in answer.events


def test_a_failure_of_one_choice_cancels_the_others() -> None:
    engine = FakeEngine(["a", "b", "c"])
    engine.fail_after = 2
    chat(engine, stream=True, n=3)
    assert engine.cancels == [1, 2]


def test_a_failure_during_a_plain_answer_is_a_500() -> None:
    engine = FakeEngine(["a", "b", "c"])
    engine.fail_after = 2
    answer = chat(engine)
    assert answer.status == 500 and answer.error["message"] == "A worker failed."


@pytest.mark.parametrize(("has_failed", "code"), [(False, "shutting_down"), (True, "engine_failed")])
def test_close_ends_open_streams_with_an_error_event(has_failed: bool, code: str) -> None:
    async def work() -> None:
        engine = FakeEngine()
        tasks = []
        for _ in range(10):
            _, task = await start(engine, STREAM, Client(make_app(engine)))
            tasks.append(task)
        _, plain_task = await start(engine, BODY)
        engine.gateway.close("The server is shutting down.", has_failed=has_failed)
        for task in tasks:
            answer = await task
            assert answer.is_complete and answer.status == 200
            error = answer.events[-1]["error"]
            assert error["code"] == code and error["type"] == "server_error"
            assert not any(
                "finish_reason" in c and c["finish_reason"] for e in answer.events[:-1] for c in e["choices"]
            )
        answer = await plain_task
        assert answer.status == 503 and answer.error["code"] == code and answer.headers["retry-after"] == "1"
        assert sorted(engine.cancels) == list(range(22))

    run(work())


def test_after_close_new_requests_are_refused() -> None:
    engine = FakeEngine()
    engine.gateway.close("The server is shutting down.")
    answer = chat(engine)
    assert answer.status == 503 and answer.error["code"] == "shutting_down" and not engine.submits
    assert request(engine, "/ready").status == 503 and answer.headers["connection"] == "close"
    health = request(engine, "/health")
    assert health.status == 200 and health.json == {"status": "draining"}, "a draining server is healthy"


def test_keep_alive_comments_while_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.0)

    async def work() -> None:
        engine = FakeEngine()
        client, task = await start(engine, STREAM)
        commented = asyncio.Event()
        client.on_part = lambda part: commented.set() if part.startswith(b":") else None
        await commented.wait()
        engine.go()
        answer = await task
        assert b": keep-alive\n\n" in answer.parts and answer.events[-1] == "[DONE]"

    run(work())


def test_an_internal_error_in_a_stream_reveals_no_details(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> list[bytes]:
        raise KeyError("secret")

    monkeypatch.setattr("pagewire.api.openai.chat.ChatReply.take", broken)
    engine = FakeEngine(["x"] * 100)
    answer = chat(engine, stream=True)
    assert answer.is_complete and answer.events[-1]["error"]["type"] == "server_error"
    assert engine.cancels == [0], "the engine must not continue without a reader"
    assert b"secret" not in answer.body and "secret" in caplog.text


def test_an_internal_error_in_a_plain_answer_reveals_no_details(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pagewire.api.openai.chat.ChatReply.body", lambda self: 1 / 0)
    answer = chat(FakeEngine())
    assert answer.status == 500 and b"ZeroDivision" not in answer.body and answer.headers["x-should-retry"] == "false"


class Connection:
    """A `DirectWriter` beside ASGI's `send`: its parts are recorded among the messages sent."""

    def __init__(self, client: Client, keeps_up: Callable[[], bool] = lambda: True) -> None:
        self._client = client
        self._keeps_up = keeps_up
        self.num_writes = 0
        client.extensions[direct.DIRECT] = self

    def keeps_up(self) -> bool:
        return self._keeps_up()

    def write_parts(self, parts: Sequence[bytes]) -> None:
        self.num_writes += 1
        self._client.messages += [{"body": part, "more_body": True} for part in parts]


def contents(answer: Answer) -> list[str]:
    """The text pieces of the first choice."""
    *events, done = answer.events
    assert done == "[DONE]" and answer.is_complete
    deltas = [c["delta"] for event in events for c in event["choices"] if c["index"] == 0]
    return [text for delta in deltas if (text := delta.get("content"))]


def test_a_stream_written_as_chunks_arrive_is_the_same_stream() -> None:
    pieces = list("abcdefgh")

    async def work() -> None:
        client = Client(make_app(FakeEngine(pieces)))
        connection = Connection(client)
        answer = await client.call("POST", "/v1/chat/completions", STREAM)
        assert contents(answer) == pieces and connection.num_writes == len(pieces) - 1, "the reader sends the last one"
        assert all(part.count(b"data: ") == 1 for part in answer.parts)

    run(work())


@pytest.mark.parametrize("seed", range(20))
def test_a_client_that_falls_behind_gets_everything_in_order(seed: int) -> None:
    rng = random.Random(seed)
    pieces = [f"{i} " for i in range(50)]

    async def work() -> None:
        engine = FakeEngine(pieces)
        client = Client(make_app(engine))
        Connection(client, lambda: rng.random() < 0.5)
        answer = await client.call("POST", "/v1/chat/completions", STREAM)
        assert contents(answer) == pieces, f"seed {seed}"

    run(work())


def test_an_internal_error_in_the_consumer_ends_the_stream(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    take = ChatReply.take

    def broken(reply: ChatReply, index: int, chunk: Chunk) -> list[bytes]:
        if chunk.text == "b":
            raise KeyError("secret")
        return take(reply, index, chunk)

    monkeypatch.setattr(ChatReply, "take", broken)

    async def work() -> None:
        engine = FakeEngine(["a", "b", *"c" * 100])
        client = Client(make_app(engine))
        Connection(client)
        answer = await client.call("POST", "/v1/chat/completions", STREAM)
        assert answer.is_complete and answer.events[-1]["error"]["type"] == "server_error"
        assert engine.cancels == [0, 1] and b'"c"' not in answer.body, "no chunk follows a lost one"
        assert b"secret" not in answer.body and "secret" in caplog.text

    run(work())


def test_rids_ascend() -> None:
    engine = FakeEngine()
    for _ in range(3):
        chat(engine, n=2)
    assert [submit.rid for submit in engine.submits if isinstance(submit, Submit)] == [0, 2, 4]
