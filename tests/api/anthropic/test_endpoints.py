"""Anthropic's messages: plain and streamed answers, errors in their shape, ignored services, token counts."""

import json
from typing import Any

import pytest
from harness import Answer, FakeEngine, request

from pagewire.ipc.messages import ChatPrompt, Tokenize

TOOLS = [{"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
QUESTION = {"role": "user", "content": "hi"}


def ask(engine: FakeEngine, **fields: Any) -> Answer:
    return request(engine, "/v1/messages", {"messages": [QUESTION], "max_tokens": 50, **fields})


def last_prompt(engine: FakeEngine) -> ChatPrompt:
    prompt = engine.submits[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


def test_plain() -> None:
    engine = FakeEngine()
    answer = ask(engine, model="demo", system="Be kind.", temperature=0.5, stop_sequences=["END"])
    body = answer.json
    assert body.pop("id").startswith("msg_") and answer.headers["request-id"] == answer.headers["x-request-id"]
    assert body == {
        "type": "message",
        "role": "assistant",
        "model": "demo",
        "content": [{"type": "text", "text": "Hello", "citations": None}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 2,
            "output_tokens": 5,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 1,
        },
    }
    (submit,) = engine.submits
    assert (submit.limits.max_tokens, submit.text.stop, submit.sampling.temperature) == (50, ("END",), 0.5)
    assert json.loads(last_prompt(engine).messages) == [{"role": "system", "content": "Be kind."}, QUESTION]


def test_stream() -> None:
    events = ask(FakeEngine(), stream=True).typed_events
    assert [event["type"] for event in events] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[0]["message"]["usage"]["input_tokens"] == 3 and events[0]["message"]["content"] == []
    assert [event["delta"] for event in events[2:4]] == [{"type": "text_delta", "text": t} for t in ("Hel", "lo")]
    assert events[2].keys() == events[3].keys()
    assert events[5]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[5]["usage"]["output_tokens"] == 5


THOUGHTS = ["<think>I", " see", "</think>", "Well. ", CALL]


def think(stream: bool, pieces: list[str] = THOUGHTS) -> Answer:
    body = {"messages": [QUESTION], "max_tokens": 50, "tools": TOOLS, "stream": stream}
    return request(FakeEngine(pieces), "/v1/messages", body, reasoning_parser="qwen3")


@pytest.mark.parametrize(
    ("kind", "status", "type"),
    [
        ("queue_full", 429, "rate_limit_error"),
        ("unavailable", 503, "overloaded_error"),
        ("internal", 500, "api_error"),
    ],
)
def test_errors(kind: str, status: int, type: str) -> None:
    engine = FakeEngine()
    engine.refuse = (kind, "Because.")  # type: ignore[assignment]
    for stream in (False, True):
        answer = ask(engine, stream=stream)
        assert answer.status == status
        assert answer.json == {"type": "error", "error": {"type": type, "message": "Because."}}
    assert ask(FakeEngine(), model="claude").json["error"]["type"] == "not_found_error"
    assert request(FakeEngine(), "/v1/messages").json["error"]["type"] == "invalid_request_error"  # GET


CLEARING = {
    "edits": [
        {"type": "clear_thinking_20251015", "keep": "all"},
        {"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": 3000}},
    ]
}


@pytest.mark.parametrize(
    "fields",
    [
        {"context_management": CLEARING},
        {"context_management": {}},
        {"container": None, "mcp_servers": [], "thread": None},
        {"cache_control": {"type": "ephemeral"}, "service_tier": "auto", "speed": "fast", "inference_geo": "eu"},
        {"thinking": {"type": "adaptive", "display": "summarized"}, "output_config": {"effort": "high"}},
        {"thinking": {"type": "between_tools"}},
    ],
)
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_optional_services_are_ignored(path: str, fields: dict[str, Any]) -> None:
    """Claude Code asks for some of them with every request."""
    engine = FakeEngine()
    answer = request(engine, path + "?beta=true", {"messages": [QUESTION], "max_tokens": 50, **fields})
    assert answer.status == 200, answer.body
    prompt = engine.submits[0].prompt if engine.submits else engine.questions[0].prompt  # type: ignore[union-attr]
    assert isinstance(prompt, ChatPrompt) and json.loads(prompt.messages) == [QUESTION]


def test_tokens_are_counted_without_generating() -> None:
    engine = FakeEngine()
    body = {"messages": [QUESTION], "system": "s", "tools": TOOLS}
    assert request(engine, "/v1/messages/count_tokens", body).json == {"input_tokens": 3}
    (question,) = engine.questions
    assert isinstance(question, Tokenize) and isinstance(question.prompt, ChatPrompt)
    assert len(json.loads(question.prompt.messages)) == 2 and not engine.submits
    assert request(engine, "/v1/messages/count_tokens", {"messages": []}).status == 400
