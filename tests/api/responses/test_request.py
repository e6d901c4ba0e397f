"""Requests for responses: what is refused by name, and what is submitted."""

import json
from typing import Any

import pytest
from harness import FakeEngine

from ..test_bad_input import COMMON
from .test_endpoints import _NOT_SHARED, TOOLS, respond


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True, "store": False}, "store"),
        ({"background": True, "return_token_ids": True, "stream": True}, "return_token_ids"),
        ({"conversation": "x", "previous_response_id": "y"}, "previous_response_id"),
        ({"conversation": "conv_x"}, "conversation"),
        ({"enable_response_messages": True}, "enable_response_messages"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"truncation": "middle"}, "truncation"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"n": 2}, "n"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"return_tokens_as_token_ids": True}, "return_tokens_as_token_ids"),
        ({"min_tokens": 9, "max_output_tokens": 5}, "min_tokens"),
        ({"guided_json": {}, "guided_regex": "x"}, "guided_regex"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "time"}, "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].id"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "function_call", "call_id": "1"}]}, "input[0].name"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "king", "content": "x"}]}, "input[0].role"),
        ({"previous_response_id": "resp_x"}, "previous_response_id"),
        ({"temperature": 9}, "temperature"),
    ],
)
def test_unsupported_fields_are_named(fields: dict[str, Any], param: str) -> None:
    engine = FakeEngine()
    answer = respond(engine, **fields)
    assert (answer.status, answer.error["param"]) == (400, param) and not engine.submits


@pytest.mark.parametrize(("name", "values"), [pair for pair in COMMON if pair[0] not in _NOT_SHARED])
def test_fields_shared_with_chat_are_checked_alike(name: str, values: list[Any]) -> None:
    for value in values:
        engine = FakeEngine()
        answer = respond(engine, **{name: value})
        assert answer.status == 400 and answer.error["param"].startswith(name) and not engine.submits, value


@pytest.mark.parametrize("truncation", [None, "auto", "disabled"])
def test_truncation_is_echoed_and_drops_nothing(truncation: str | None) -> None:
    engine = FakeEngine()
    assert respond(engine, truncation=truncation).json["truncation"] == (truncation or "disabled")
    assert engine.submits[0].truncate is None
    engine.refuse = ("context_length_exceeded", "This model's maximum context length is 128 tokens. However, it …")
    answer = respond(engine, truncation=truncation)
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
    assert answer.error["message"].startswith("This model's maximum context length is")


def test_effort_none_disables_reasoning() -> None:
    engine = FakeEngine()
    assert respond(engine, reasoning={"effort": "none"}).status == 200
    variables = json.loads(engine.submits[0].prompt.template_kwargs)  # type: ignore[union-attr]
    assert variables == {"reasoning_effort": "none", "enable_thinking": False, "thinking": False}


def test_a_refused_schema_is_named_as_in_this_api() -> None:
    """Tools that are not functions are dropped, but count in the index of a tool that an error names."""
    engine = FakeEngine()
    fields: dict[str, Any] = {"tools": [{"type": "web_search"}, *TOOLS], "tool_choice": "required"}
    field = "tools[0].function.parameters"
    engine.refuse = ("invalid_request", f"The JSON schema in {field} (of 'x') cannot be enforced: no.", field, 0)
    answer = respond(engine, **fields)
    assert (answer.status, answer.error["param"]) == (400, "tools[1].parameters")
    assert answer.error["message"] == "The JSON schema in tools[1].parameters (of 'x') cannot be enforced: no."
    field = "response_format.json_schema.schema"
    engine.refuse = ("invalid_request", f"The JSON schema in {field} cannot be enforced: no.", field, 0)
    format = {"type": "json_schema", "name": "n", "schema": {"not": {}}}
    assert respond(engine, text={"format": format}).error["param"] == "text.format.schema"
    fields["tools"][1] = {**TOOLS[0], "name": "a b"}
    assert respond(FakeEngine(), **fields).error["param"] == "tools[1].name"
