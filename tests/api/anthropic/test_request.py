"""Requests for messages: their prompts, and what is refused."""

import json
from typing import Any

import pytest
from harness import FakeEngine, request

from .test_endpoints import QUESTION, TOOLS, ask, last_prompt


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

    prompt = last_prompt(engine)
    assert json.loads(prompt.messages) == [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "I look.", "reasoning_content": "hm",
         "tool_calls": [call("1", '{"city":"Köln"}'), call("2", "{}")]},
        {"role": "tool", "tool_call_id": "1", "content": "sun"},
        {"role": "tool", "tool_call_id": "2", "content": "Error:\nno"},
        {"role": "user", "content": "And now?"},
    ]  # fmt: skip
    assert json.loads(prompt.tools)[0]["function"]["name"] == "weather" and engine.submits[0].tenant == "me"


def document(text: str, **fields: Any) -> dict[str, Any]:
    return {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": text}, **fields}


def test_documents_of_text_are_read() -> None:
    engine = FakeEngine()
    parts = {"type": "content", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    read = document("", source=parts, citations={"enabled": False})
    rain = document("It rains.", title="Weather", context="of today")
    messages = [
        {"role": "user", "content": [rain, {"type": "text", "text": "?"}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "weather", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [read]}]},
    ]  # fmt: skip
    answer = ask(engine, messages=messages, tools=TOOLS)
    assert answer.status == 200, answer.json
    asked, _, result = json.loads(last_prompt(engine).messages)
    document_text = "<document>\nWeather\nof today\nIt rains.\n</document>\n"
    assert asked["content"] == [{"type": "text", "text": document_text}, {"type": "text", "text": "?"}]
    assert result["content"] == "<document>\na\nb\n</document>\n"


def test_a_final_assistant_message_is_continued() -> None:
    engine = FakeEngine()
    ask(engine, messages=[QUESTION, {"role": "assistant", "content": "Hel"}])
    assert last_prompt(engine).continue_final_message and not last_prompt(engine).add_generation_prompt


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
        ({"system": [document("x")]}, "system[0]"),
        ({"messages": [{"role": "user", "content": [document("x", source={"type": "base64", "data": "JVBER"})]}]},
         "messages[0].content[0]: a block of type 'document'"),
        ({"messages": [{"role": "user", "content": [document("x", citations={"enabled": True})]}]},
         "messages[0].content[0].citations"),
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
def test_unsupported_fields_are_named(fields: dict[str, Any], words: str) -> None:
    engine = FakeEngine()
    answer = ask(engine, **fields)
    assert answer.status == 400 and not engine.submits
    assert answer.json["type"] == "error" and answer.json["error"]["type"] == "invalid_request_error"
    assert words in answer.json["error"]["message"]


def test_thinking_sets_both_template_variables() -> None:
    engine = FakeEngine()
    for type, is_on in (("adaptive", True), ("disabled", False)):
        ask(engine, thinking={"type": type})
        assert json.loads(last_prompt(engine).template_kwargs) == {"enable_thinking": is_on, "thinking": is_on}
    ask(engine, thinking={"type": "disabled"}, chat_template_kwargs={"thinking": True})
    assert json.loads(last_prompt(engine).template_kwargs) == {"thinking": True}


@pytest.mark.parametrize(
    ("num_tokens", "words"),
    [
        (500, "prompt is too long: 500 tokens > 128 maximum"),
        (128, "prompt is too long: 128 tokens > 127 maximum"),  # one token must be generated
        (0, "prompt is too long: more than 128 tokens > 128 maximum"),  # the tokens were not counted
    ],
)
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_a_too_long_prompt_is_refused_in_anthropics_words(path: str, num_tokens: int, words: str) -> None:
    engine = FakeEngine()
    engine.refuse = ("context_length_exceeded", "This model's maximum context length is …", "", num_tokens)
    for stream in (False, True):
        answer = request(engine, path, {"messages": [QUESTION], "max_tokens": 50, "stream": stream})
        assert answer.status == 400
        assert answer.json == {"type": "error", "error": {"type": "invalid_request_error", "message": words}}


def test_a_refused_schema_is_named_as_in_this_api() -> None:
    engine = FakeEngine()
    for field, own in (
        ("tools[0].function.parameters", "tools[0].input_schema"),
        ("response_format.json_schema.schema", "output_config.format.schema"),
    ):
        engine.refuse = ("invalid_request", f"The JSON schema in {field} cannot be enforced: no.", field, 0)
        message = ask(engine).json["error"]["message"]
        assert message == f"The JSON schema in {own} cannot be enforced: no."


def test_output_format_is_accepted_as_an_older_name() -> None:
    engine = FakeEngine(["{}"])
    assert ask(engine, output_format={"type": "json_schema", "schema": {"type": "object"}}).status == 200
    constraint = engine.submits[0].constraint
    assert constraint is not None and (constraint.kind, constraint.text) == ("json_schema", '{"type": "object"}')
