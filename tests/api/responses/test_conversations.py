"""Conversations, and responses that continue them; references to items; custom and allowed tools; token counts."""

import json
from typing import Any

import pytest
from harness import Answer, Client, FakeEngine, make_app, request, run

from .test_endpoints import TOOLS, last_messages, respond, without_ids

PATCH = {"type": "custom", "name": "patch", "description": "Apply a patch."}
CUSTOM_CALL = '<tool_call>\n{"name": "patch", "arguments": {"input": "a\\nb"}}\n</tool_call>'


def calls(engine: FakeEngine, *steps: tuple[str, Any, Any], keys: tuple[str, ...] = ()) -> list[Answer]:
    """The answers to (method, path, body); a path or body may be a function of the answers so far. `keys`: of each
    call, by its place."""

    async def work() -> list[Answer]:
        app = make_app(engine, api_keys=("first", "second"))
        answers: list[Answer] = []
        for i, (method, path, body) in enumerate(steps):
            path, body = (part(answers) if callable(part) else part for part in (path, body))
            data = b"" if body is None else json.dumps(body).encode()
            key = keys[i] if i < len(keys) else "first"
            answers.append(await Client(app).call(method, path, data, {"authorization": f"Bearer {key}"}))
        return answers

    return run(work())


def at(end: str = "") -> Any:
    return lambda answers: f"/v1/conversations/{answers[0].json['id']}{end}"


def in_conversation(**fields: Any) -> Any:
    return lambda answers: {"conversation": answers[0].json["id"], **fields}


def test_a_conversation_is_kept_for_its_owner() -> None:
    items = [{"role": "user", "content": "a"}, {"type": "message", "role": "assistant", "content": "b"}]
    created, got, foreign, changed, listed, added, deleted, missing = calls(
        FakeEngine(),
        ("POST", "/v1/conversations", {"items": items, "metadata": {"x": "y"}}),
        ("GET", at(), None),
        ("GET", at(), None),
        ("POST", at(), {"metadata": {"x": "z"}}),
        ("GET", at("/items?order=asc"), None),
        ("POST", at("/items"), {"items": [{"role": "user", "content": "c"}]}),
        ("DELETE", at(), None),
        ("GET", at(), None),
        keys=("first", "first", "second"),
    )
    assert created.json["id"].startswith("conv_") and got.json == created.json and foreign.status == 404
    assert changed.json["metadata"] == {"x": "z"} and created.json["metadata"] == {"x": "y"}
    assert [item["content"][0]["text"] for item in listed.json["data"]] == ["a", "b"]
    assert [item["content"][0]["text"] for item in added.json["data"]] == ["c"]
    assert deleted.json["deleted"] is True and missing.error["code"] == "not_found"


def test_a_response_continues_a_conversation() -> None:
    engine = FakeEngine()
    created, first, second, listed = calls(
        engine,
        ("POST", "/v1/conversations", {"items": [{"role": "developer", "content": "Be kind."}]}),
        ("POST", "/v1/responses", in_conversation(input="hi")),
        (
            "POST",
            "/v1/responses",
            lambda a: {"conversation": {"id": a[0].json["id"]}, "input": "more"},
        ),
        ("GET", at("/items?order=asc"), None),
    )
    assert first.json["conversation"] == second.json["conversation"] == {"id": created.json["id"]}
    texts = [message["content"] for message in last_messages(engine)]
    assert texts == ["Be kind.", "hi", "Hello", "more"]
    assert [item["role"] for item in listed.json["data"]] == ["developer", "user", "assistant", "user", "assistant"]
    assert listed.json["data"][2]["id"] == first.json["output"][0]["id"]


def test_items_of_a_conversation() -> None:
    created, listed, one, removed, rest, missing = calls(
        FakeEngine(),
        ("POST", "/v1/conversations", {"items": [{"role": "user", "content": text} for text in "ab"]}),
        ("GET", at("/items?order=asc"), None),
        ("GET", lambda a: at(f"/items/{a[1].json['first_id']}")(a), None),
        ("DELETE", lambda a: at(f"/items/{a[1].json['first_id']}")(a), None),
        ("GET", at("/items"), None),
        ("GET", lambda a: at(f"/items/{a[1].json['first_id']}")(a), None),
    )
    assert one.json == listed.json["data"][0] and removed.json["id"] == created.json["id"]
    assert rest.json["data"] == listed.json["data"][1:] and missing.status == 404


@pytest.mark.parametrize(
    ("body", "param"),
    [({"items": [{"role": "user"}]}, "items[0].content"), ({"items": [{"type": "x"}]}, "items[0].type"),
     ({"items": [{"role": "user", "content": "x"}] * 21}, "items"), ({"metadata": {"a": 5}}, "metadata[...]")],
)  # fmt: skip
def test_invalid_conversations_are_refused(body: Any, param: str) -> None:
    answer = request(FakeEngine(), "/v1/conversations", body)
    assert (answer.status, answer.error["param"]) == (400, param)


def test_an_item_may_be_referred_to() -> None:
    engine = FakeEngine()

    def after(answers: list[Answer]) -> Any:
        reference = {"type": "item_reference", "id": answers[0].json["output"][0]["id"]}
        return {"input": [{"role": "user", "content": "hi"}, reference, {"role": "user", "content": "more"}]}

    first, second, foreign = calls(
        engine,
        ("POST", "/v1/responses", {"input": "hi"}),
        ("POST", "/v1/responses", after),
        ("POST", "/v1/responses", after),
        keys=("first", "first", "second"),
    )
    assert first.status == second.status == 200
    assert [message["content"] for message in last_messages(engine)] == ["hi", "Hello", "more"]
    assert foreign.error["param"] == "input[1].id"


# ── tools ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_custom_tool_is_called_with_a_text() -> None:
    engine = FakeEngine([CUSTOM_CALL])
    body = respond(engine, tools=[*TOOLS, PATCH]).json
    (call,) = body["output"]
    assert call["id"].startswith("ctc_") and call["call_id"].startswith("call_")
    (plain,) = without_ids(body["output"])
    assert plain == {"type": "custom_tool_call", "name": "patch", "input": "a\nb", "status": "completed"}
    assert body["tools"][1]["type"] == "custom"


def test_a_custom_call_is_streamed_and_continued() -> None:
    engine = FakeEngine(list(CUSTOM_CALL))
    events = respond(engine, tools=[PATCH], stream=True).typed_events
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created", "in_progress", "output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done",
        "output_item.done", "completed",
    ]  # fmt: skip
    call = events[-1]["response"]["output"][0]
    result = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "done"}
    items = [{"role": "user", "content": "hi"}, call, result]
    assert respond(engine, tools=[PATCH], input=items).status == 200
    messages = last_messages(engine)
    assert messages[1]["tool_calls"][0]["function"] == {"name": "patch", "arguments": '{"input":"a\\nb"}'}
    assert messages[2]["tool_call_id"] == call["call_id"]


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_allowed_tools_are_seen(mode: str) -> None:
    engine = FakeEngine([CUSTOM_CALL])
    choice = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "custom", "name": "patch"}]}
    answer = respond(engine, tools=[*TOOLS, PATCH], tool_choice=choice)
    assert answer.status == 200 and answer.json["tool_choice"] == choice
    tools = json.loads(engine.submits[0].prompt.tools)  # type: ignore[union-attr]
    assert [tool["function"]["name"] for tool in tools] == ["patch"]
    assert (engine.submits[0].constraint is not None) == (mode == "required")
    for wrong in ({"mode": "x"}, {"tools": 5}, {"tools": [{"type": "function", "name": "y"}]}):
        assert respond(FakeEngine(), tools=TOOLS, tool_choice=choice | wrong).error["param"] == "tool_choice"


def test_input_tokens_are_counted() -> None:
    engine = FakeEngine()
    answer = request(engine, "/v1/responses/input_tokens", {"input": "hi", "instructions": "Be kind.", "tools": TOOLS})
    assert answer.json == {"object": "response.input_tokens", "input_tokens": 3} and not engine.submits
