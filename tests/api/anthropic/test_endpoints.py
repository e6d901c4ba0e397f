"""Anthropic's messages: blocks and events, what becomes of a conversation, errors in their shape."""

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


def shown(engine: FakeEngine) -> ChatPrompt:
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
    (order,) = engine.submits
    assert (order.limits.max_tokens, order.text.stop, order.sampling.temperature) == (50, ("END",), 0.5)
    assert json.loads(shown(engine).messages) == [{"role": "system", "content": "Be kind."}, QUESTION]


def test_stream() -> None:
    events = ask(FakeEngine(), stream=True).typed_events
    assert [event["type"] for event in events] == [
        *("message_start", "content_block_start", "content_block_delta", "content_block_delta"),
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    assert events[0]["message"]["usage"]["input_tokens"] == 3 and events[0]["message"]["content"] == []
    assert [event["delta"] for event in events[2:4]] == [{"type": "text_delta", "text": t} for t in ("Hel", "lo")]
    assert events[2].keys() == events[3].keys()
    assert events[5]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[5]["usage"]["output_tokens"] == 5


@pytest.mark.parametrize("pieces", [["Let me see. ", CALL, " And", CALL], [CALL], [""], ["x"], list('a "é\n' + CALL)])
@pytest.mark.parametrize("tools", [TOOLS, []])
@pytest.mark.parametrize("finish", ["stop", "length"])
def test_a_stream_gives_the_plain_answer(pieces: list[str], tools: list[Any], finish: str) -> None:
    plain = ask(FakeEngine(list(pieces), finish=finish), tools=tools).json
    blocks: list[dict[str, Any]] = []
    *events, delta, _ = ask(FakeEngine(list(pieces), finish=finish), tools=tools, stream=True).typed_events
    for event in events[1:]:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"] | {"json": ""})
        elif event["type"] == "content_block_delta" and event["delta"]["type"] == "text_delta":
            blocks[event["index"]]["text"] += event["delta"]["text"]
        elif event["type"] == "content_block_delta":
            blocks[event["index"]]["json"] += event["delta"]["partial_json"]
    for block in (*blocks, *plain["content"]):
        block.pop("id", None)
        if data := block.pop("json", None):
            block["input"] = json.loads(data)
    assert blocks == plain["content"] and delta["usage"] == plain["usage"]
    assert delta["delta"]["stop_reason"] == plain["stop_reason"]
    has_calls = any(block["type"] == "tool_use" for block in blocks)
    assert plain["stop_reason"] == ("max_tokens" if finish == "length" else "tool_use" if has_calls else "end_turn")


THOUGHTS = ["<think>I", " see", "</think>", "Well. ", CALL]


def think(stream: bool, pieces: list[str] = THOUGHTS) -> Answer:
    body = {"messages": [QUESTION], "max_tokens": 50, "tools": TOOLS, "stream": stream}
    return request(FakeEngine(pieces), "/v1/messages", body, reasoning_parser="qwen3")


def test_reasoning_is_a_block_of_its_own() -> None:
    thinking, text, call = think(False).json["content"]
    assert thinking == {"type": "thinking", "thinking": "I see", "signature": ""}
    assert text["text"] == "Well." and call["name"] == "weather"


def test_events_of_reasoning() -> None:
    events = think(True).typed_events
    assert events[1]["content_block"] == {"type": "thinking", "thinking": "", "signature": ""}
    assert [event["delta"] for event in events[2:5]] == [
        {"type": "thinking_delta", "thinking": "I"},
        {"type": "thinking_delta", "thinking": " see"},
        {"type": "signature_delta", "signature": ""},
    ]
    assert events[5]["type"] == "content_block_stop" and [event["index"] for event in events[1:6]] == [0] * 5
    assert events[6]["content_block"]["type"] == "text" and events[6]["index"] == 1
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


@pytest.mark.parametrize("pieces", [["<think>only"], list("<think>a</think>b"), ["a", "<think>b</think>"]])
def test_a_stream_of_reasoning_gives_the_plain_answer(pieces: list[str]) -> None:
    plain = [block.get("thinking", block.get("text")) for block in think(False, list(pieces)).json["content"]]
    grown: dict[int, str] = {}
    for event in think(True, list(pieces)).typed_events:
        if event["type"] == "content_block_delta":
            piece = event["delta"].get("thinking", event["delta"].get("text", ""))
            grown[event["index"]] = grown.get(event["index"], "") + piece
    assert [grown[i] for i in range(len(grown))] == plain


def test_a_stop_sequence_is_named() -> None:
    body = ask(FakeEngine(stop_reason="END"), stop_sequences=["END"]).json
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", "END")


def test_a_call_that_was_cut_has_no_input() -> None:
    engine = FakeEngine([CALL[:55]], finish="length")
    (block,) = ask(engine, tools=TOOLS).json["content"]
    assert (block["name"], block["input"]) == ("weather", {})


def test_blocks_become_messages() -> None:
    engine = FakeEngine()
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "I look.", "cache_control": {"type": "ephemeral"}},
            {"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "Köln"}},
            {"type": "tool_use", "id": "2", "name": "weather", "input": {}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "1", "content": "sun"},
            {"type": "tool_result", "tool_use_id": "2", "content": [{"type": "text", "text": "no"}], "is_error": True},
            {"type": "text", "text": "And now?"},
        ]},
    ]  # fmt: skip
    assert ask(engine, messages=messages, tools=TOOLS, metadata={"user_id": "me"}).status == 200

    def call(id: str, arguments: str) -> dict[str, Any]:
        return {"id": id, "type": "function", "function": {"name": "weather", "arguments": arguments}}

    prompt = shown(engine)
    assert json.loads(prompt.messages) == [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "I look.", "reasoning_content": "hm",
         "tool_calls": [call("1", '{"city":"Köln"}'), call("2", "{}")]},
        {"role": "tool", "tool_call_id": "1", "content": "sun"},
        {"role": "tool", "tool_call_id": "2", "content": "Error:\nno"},
        {"role": "user", "content": "And now?"},
    ]  # fmt: skip
    assert json.loads(prompt.tools)[0]["function"]["name"] == "weather" and engine.submits[0].tenant == "me"


def test_a_last_word_of_the_assistant_goes_on() -> None:
    engine = FakeEngine()
    ask(engine, messages=[QUESTION, {"role": "assistant", "content": "Hel"}])
    assert shown(engine).continue_final_message and not shown(engine).add_generation_prompt


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
        ({"messages": [QUESTION, {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "x"}]}]},
         "messages[1]"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "1", "name": "x"}]}]},
         "messages[0].content[0]"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "time"}}, "tool_choice"),
        ({"thinking_token_budget": 2000}, "thinking.budget_tokens"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        ({"context_management": {"edits": [{"type": "clear_thinking_20251015"}, {"type": "compact_20260112"}]}},
         "context_management.edits[1].type 'compact_20260112'"),
        ({"context_management": {"edits": [{}]}}, "context_management.edits[0]"),
        ({"output_format": {"type": "json_schema"}}, "output_config.format"),
        ({"output_format": {"type": "json_schema", "schema": {}}, "output_config": {"format": {"type": "text"}}},
         "output_format"),
        ({"tools": [{"name": "a b"}], "tool_choice": {"type": "any"}}, "tools[0].name"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        ({"n": 2}, "n is"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"return_tokens_as_token_ids": True}, "return_tokens_as_token_ids"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_named(fields: dict[str, Any], words: str) -> None:
    engine = FakeEngine()
    answer = ask(engine, **fields)
    assert answer.status == 400 and not engine.submits
    assert answer.json["type"] == "error" and answer.json["error"]["type"] == "invalid_request_error"
    assert words in answer.json["error"]["message"]


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


def test_a_stream_that_fails_ends_with_an_error() -> None:
    engine = FakeEngine()
    engine.fail_after = 1
    *_, last = ask(engine, stream=True).typed_events
    assert last == {"type": "error", "error": {"type": "api_error", "message": "A worker failed."}}


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
def test_services_that_may_be_left_out_are(path: str, fields: dict[str, Any]) -> None:
    """Claude Code asks for some of them with every request."""
    engine = FakeEngine()
    answer = request(engine, path + "?beta=true", {"messages": [QUESTION], "max_tokens": 50, **fields})
    assert answer.status == 200, answer.body
    prompt = engine.submits[0].prompt if engine.submits else engine.questions[0].prompt  # type: ignore[union-attr]
    assert isinstance(prompt, ChatPrompt) and json.loads(prompt.messages) == [QUESTION]


def test_both_switches_of_reasoning_are_set() -> None:
    engine = FakeEngine()
    for type, is_on in (("adaptive", True), ("disabled", False)):
        ask(engine, thinking={"type": type})
        assert json.loads(shown(engine).template_kwargs) == {"enable_thinking": is_on, "thinking": is_on}
    ask(engine, thinking={"type": "disabled"}, chat_template_kwargs={"thinking": True})
    assert json.loads(shown(engine).template_kwargs) == {"thinking": True}


@pytest.mark.parametrize(
    ("num_tokens", "words"),
    [
        (500, "prompt is too long: 500 tokens > 128 maximum"),
        (128, "prompt is too long: 128 tokens > 127 maximum"),  # one is to be generated
        (0, "prompt is too long: more than 128 tokens > 128 maximum"),  # nobody has counted them
    ],
)
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_a_prompt_that_is_too_long(path: str, num_tokens: int, words: str) -> None:
    engine = FakeEngine()
    engine.refuse = ("context_length_exceeded", "This model's maximum context length is …", "", num_tokens)
    for stream in (False, True):
        answer = request(engine, path, {"messages": [QUESTION], "max_tokens": 50, "stream": stream})
        assert answer.status == 400
        assert answer.json == {"type": "error", "error": {"type": "invalid_request_error", "message": words}}


def test_a_schema_that_is_refused_has_the_name_of_its_field() -> None:
    engine = FakeEngine()
    for field, own in (
        ("tools[0].function.parameters", "tools[0].input_schema"),
        ("response_format.json_schema.schema", "output_config.format.schema"),
    ):
        engine.refuse = ("invalid_request", f"The JSON schema in {field} cannot be enforced: no.", field, 0)
        message = ask(engine).json["error"]["message"]
        assert message == f"The JSON schema in {own} cannot be enforced: no."


def test_an_older_name_of_a_format() -> None:
    engine = FakeEngine(["{}"])
    assert ask(engine, output_format={"type": "json_schema", "schema": {"type": "object"}}).status == 200
    constraint = engine.submits[0].constraint
    assert constraint is not None and (constraint.kind, constraint.text) == ("json_schema", '{"type": "object"}')


def test_tokens_are_counted_without_generating() -> None:
    engine = FakeEngine()
    body = {"messages": [QUESTION], "system": "s", "tools": TOOLS}
    assert request(engine, "/v1/messages/count_tokens", body).json == {"input_tokens": 3}
    (question,) = engine.questions
    assert isinstance(question, Tokenize) and isinstance(question.prompt, ChatPrompt)
    assert len(json.loads(question.prompt.messages)) == 2 and not engine.submits
    assert request(engine, "/v1/messages/count_tokens", {"messages": []}).status == 400
