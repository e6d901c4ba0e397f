"""Tools in other shapes than functions: `functions`, custom tools, allowed tools."""

import json
from typing import Any

import pytest
from harness import FakeEngine, chat

from pagewire.api.output.turn import custom_input
from pagewire.ipc.messages import ChatPrompt

FUNCTIONS = [{"name": "weather", "parameters": {"type": "object"}}, {"name": "clock"}]
TOOLS = [{"type": "function", "function": function} for function in FUNCTIONS]
PATCH: dict[str, Any] = {"type": "custom", "custom": {"name": "patch", "description": "Apply a patch."}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
CUSTOM_CALL = '<tool_call>\n{"name": "patch", "arguments": {"input": "*** a\\n+\\"b\\""}}\n</tool_call>'
INPUT = '*** a\n+"b"'


def prompt_of(engine: FakeEngine) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(messages, tools) of the last request."""
    prompt = engine.submits[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    return json.loads(prompt.messages), json.loads(prompt.tools or b"[]")


def test_functions_are_answered_by_a_function_call() -> None:
    engine = FakeEngine([CALL])
    (choice,) = chat(engine, functions=FUNCTIONS).json["choices"]
    assert choice["finish_reason"] == "function_call" and "tool_calls" not in choice["message"]
    assert choice["message"]["function_call"] == {"name": "weather", "arguments": '{"city": "Köln"}'}
    assert prompt_of(engine)[1] == TOOLS


def test_a_function_call_is_streamed() -> None:
    *events, _ = chat(FakeEngine(list(CALL)), functions=FUNCTIONS, stream=True).events
    calls = [c["delta"]["function_call"] for e in events for c in e["choices"] if "function_call" in c["delta"]]
    assert calls[0] == {"name": "weather", "arguments": ""} and all("name" not in call for call in calls[1:])
    assert "".join(call["arguments"] for call in calls) == '{"city": "Köln"}'
    assert events[-1]["choices"][0]["finish_reason"] == "function_call"


def test_earlier_function_calls_become_calls_of_tools() -> None:
    engine = FakeEngine()
    call = {"name": "weather", "arguments": "{}"}
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "weather", "content": "sun"},
    ]
    assert chat(engine, functions=FUNCTIONS, messages=messages).status == 200
    sent, _ = prompt_of(engine)
    assert sent[1]["tool_calls"] == [{"id": "call_1", "type": "function", "function": call}]
    assert (sent[2]["role"], sent[2]["tool_call_id"]) == ("tool", "call_1")


@pytest.mark.parametrize(("choice", "rule"), [({"name": "clock"}, "clock"), ("auto", None), ("none", None)])
def test_function_call_chooses(choice: Any, rule: str | None) -> None:
    engine = FakeEngine([CALL])
    answer = chat(engine, functions=FUNCTIONS, function_call=choice)
    constraint = engine.submits[0].constraint
    assert answer.status == 200 and (constraint is None) == (rule is None)
    assert constraint is None or ("clock" in constraint.text and "weather" not in constraint.text)
    assert (prompt_of(engine)[1] == []) == (choice == "none")


def test_functions_and_tools_exclude_each_other() -> None:
    assert chat(FakeEngine(), functions=FUNCTIONS, tools=TOOLS).error["param"] == "functions"
    assert chat(FakeEngine(), functions=FUNCTIONS, tool_choice="auto").error["param"] == "tool_choice"


# ── custom tools ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_custom_tool_is_called_with_a_text() -> None:
    engine = FakeEngine([CUSTOM_CALL])
    (choice,) = chat(engine, tools=[*TOOLS, PATCH]).json["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call.pop("id").startswith("call_")
    assert call == {"type": "custom", "custom": {"name": "patch", "input": INPUT}}
    function = prompt_of(engine)[1][2]["function"]
    assert (function["name"], function["description"]) == ("patch", "Apply a patch.")
    assert function["parameters"]["required"] == ["input"]


@pytest.mark.parametrize("after", ["", CALL])
def test_a_custom_call_is_streamed(after: str) -> None:
    *events, _ = chat(FakeEngine(list(CUSTOM_CALL + after)), tools=[*TOOLS, PATCH], stream=True).events
    calls = [call for e in events for c in e["choices"] for call in c["delta"].get("tool_calls", ())]
    custom = [call for call in calls if call["index"] == 0]
    assert custom[0]["type"] == "custom" and custom[0]["custom"] == {"name": "patch", "input": ""}
    assert "".join(call["custom"]["input"] for call in custom) == INPUT
    assert "".join(c["function"]["arguments"] for c in calls if c["index"] == 1) == (
        '{"city": "Köln"}' if after else ""
    )


def test_an_earlier_custom_call_is_shown_to_the_template_as_a_function() -> None:
    engine = FakeEngine()
    call = {"id": "c1", "type": "custom", "custom": {"name": "patch", "input": "x"}}
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
    ]
    assert chat(engine, tools=[PATCH], messages=messages).status == 200
    (sent,) = prompt_of(engine)[0][1]["tool_calls"]
    assert sent == {"id": "c1", "type": "function", "function": {"name": "patch", "arguments": '{"input":"x"}'}}


def test_the_format_of_a_custom_tool_is_forced_or_shown() -> None:
    engine = FakeEngine([CUSTOM_CALL])
    format = {"type": "grammar", "syntax": "regex", "definition": "[a-z]+"}
    tool = {"type": "custom", "custom": {**PATCH["custom"], "format": format}}
    assert chat(engine, tools=[tool], tool_choice={"type": "custom", "custom": {"name": "patch"}}).status == 200
    constraint = engine.submits[0].constraint
    assert constraint is not None and "^(?:[a-z]+)$" in constraint.text
    tool["custom"] = {**PATCH["custom"], "format": {"type": "grammar", "syntax": "lark", "definition": "start: A"}}
    assert chat(engine, tools=[tool]).status == 200
    assert "start: A" in prompt_of(engine)[1][0]["function"]["description"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [('{"input": "a"}', "a"), ('{"input": "a', "a"), ('{"input": "a"', "a"), ('{"x": 1}', '{"x": 1}'), ("[", "[")],
)
def test_the_input_is_found_in_any_arguments(arguments: str, text: str) -> None:
    assert custom_input(arguments) == text


# ── allowed tools ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_allowed_tools_are_seen(mode: str) -> None:
    engine = FakeEngine([CALL])
    allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": "clock"}}]}
    answer = chat(engine, tools=TOOLS, tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert answer.status == 200 and prompt_of(engine)[1] == TOOLS[1:]
    assert (engine.submits[0].constraint is not None) == (mode == "required")


def test_allowed_tools_must_be_among_the_tools() -> None:
    for mode, name in (("auto", "other"), ("maybe", "clock")):
        allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": name}}]}
        answer = chat(FakeEngine(), tools=TOOLS, tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
        assert answer.status == 400 and answer.error["param"] == "tool_choice"


# ── a call that a length limit cuts off ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_that_is_cut_off_leaves_no_text(stream: bool) -> None:
    engine = FakeEngine(['<tool_call>\n{"name": "wea'], finish="length")
    answer = chat(engine, tools=TOOLS, tool_choice="required", stream=stream)
    if stream:
        texts = [c["delta"].get("content") for e in answer.events[:-1] for c in e["choices"]]
        assert not any(texts)
    else:
        assert answer.json["choices"][0]["message"]["content"] == ""
    free = chat(FakeEngine(['<tool_call>\n{"name": "wea'], finish="length"), tools=TOOLS)
    assert free.json["choices"][0]["message"]["content"].startswith("<tool_call>")
