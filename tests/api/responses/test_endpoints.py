"""Responses: plain and streamed answers, and the helpers of the tests of this folder."""

import json
from typing import Any

from harness import Answer, Client, FakeEngine, make_app, request, run

from pagewire.ipc.messages import ChatPrompt

TOOLS = [{"type": "function", "name": "weather", "parameters": {"type": "object"}}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'


def respond(engine: FakeEngine, **fields: Any) -> Answer:
    return request(engine, "/v1/responses", {"input": "hi", **fields})


def last_messages(engine: FakeEngine) -> list[dict[str, Any]]:
    """The messages of the last request."""
    prompt = engine.submits[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    messages: list[dict[str, Any]] = json.loads(prompt.messages)
    return messages


def without_ids(value: Any) -> Any:
    if isinstance(value, list):
        return [without_ids(item) for item in value]
    if isinstance(value, dict):
        return {k: without_ids(v) for k, v in value.items() if k not in ("id", "item_id", "call_id")}
    return value


def test_plain() -> None:
    engine = FakeEngine()
    body = respond(engine, model="org/demo-alias", instructions="Be kind.", temperature=0.5, metadata={"a": "b"}).json
    assert body["id"].startswith("resp_") and body["object"] == "response" and body["status"] == "completed"
    assert body["model"] == "org/demo-alias" and body["instructions"] == "Be kind." and body["metadata"] == {"a": "b"}
    assert body["temperature"] == 0.5 and body["error"] is None and body["incomplete_details"] is None
    (message,) = body["output"]
    assert message.pop("id").startswith("msg_")
    assert message == {
        "type": "message",
        "status": "completed",
        "content": [{"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}],
        "role": "assistant",
    }
    assert body["usage"] == {
        "input_tokens": 3,
        "input_tokens_details": {"cached_tokens": 1, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 8,
    }
    assert last_messages(engine) == [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hi"}]


def test_stream() -> None:
    events = respond(FakeEngine(["H", "el", "lo"]), stream=True).typed_events
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert [event["sequence_number"] for event in events] == list(range(11))
    assert events[0]["response"]["status"] == "in_progress" and events[0]["response"]["output"] == []
    assert events[7]["text"] == "Hello" and events[9]["item"] == events[10]["response"]["output"][0]
    assert len({event["item_id"] for event in events[3:9]}) == 1
    assert [event["delta"] for event in events[4:7]] == ["H", "el", "lo"]
    assert events[4].keys() == events[5].keys() == events[6].keys() and events[5]["logprobs"] == []


THOUGHTS = ["<think>I", " see", "</think>", "Well. ", CALL]
REASONS: dict[str, Any] = {"reasoning_parser": "qwen3"}


def think(stream: bool, pieces: list[str] = THOUGHTS, **fields: Any) -> Answer:
    finish = fields.pop("finish", "stop")
    body = {"input": "hi", "stream": stream, **fields}
    return request(FakeEngine(pieces, finish=finish), "/v1/responses", body, **REASONS)


_NOT_SHARED = ("max_tokens", "n", "response_format")


def conversation(*calls: tuple[str, Any, Any, str], **settings: Any) -> list[Answer]:
    """The answers to calls of one application. A path or a body may be a function of the answers so far."""

    async def work() -> list[Answer]:
        engine = FakeEngine([CALL])
        app = make_app(engine, api_keys=("first", "second"), **settings)
        answers: list[Answer] = []
        for method, path, body, key in calls:
            path, body = (part(answers) if callable(part) else part for part in (path, body))
            data = b"" if body is None else json.dumps(body).encode()
            headers = {"authorization": f"Bearer {key}"}
            answers.append(await Client(app).call(method, path, data, headers))
        answers[-1].engine = engine  # type: ignore[attr-defined]
        return answers

    return run(work())


def response_path(answers: list[Answer]) -> str:
    return f"/v1/responses/{answers[0].json['id']}"


def items_path(query: str = "") -> Any:
    return lambda answers: f"{response_path(answers)}/input_items{query}"
