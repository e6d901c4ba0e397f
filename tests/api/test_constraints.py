"""What an output has to keep to: from the fields of each API to the constraint that travels, and what goes together."""

import json
from typing import Any

import pytest

from pagewire.ipc.messages import Constraint

from .harness import Answer, FakeEngine, chat, complete, request

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
NOW = {"type": "function", "function": {"name": "now"}}
NAMED = {"type": "function", "function": {"name": "weather"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"a": 1}}\n</tool_call>'
THINK = {"reasoning_parser": "qwen3"}


def formatted(**fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": fields}


ASKED: list[tuple[dict[str, Any], str, Any]] = [
    ({"response_format": {"type": "json_object"}}, "json_schema", {"type": "object"}),
    (
        {"response_format": formatted(name="n", schema=SCHEMA)},
        "json_schema",
        SCHEMA,
    ),
    (
        {"response_format": formatted(schema=True, strict=False)},
        "json_schema",
        True,
    ),
    ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json_schema", SCHEMA),
    ({"structured_outputs": {"json_object": True}}, "json_schema", {"type": "object"}),
    (
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
        "json_schema",
        {**SCHEMA, "x-guidance": {"whitespace_flexible": False}},
    ),
    (
        {"structured_outputs": {"json_object": True, "whitespace_pattern": " ?"}},
        "json_schema",
        {"type": "object", "x-guidance": {"whitespace_pattern": " ?"}},
    ),
    ({"structured_outputs": {"choice": ["a", "ü"]}}, "choice", ["a", "ü"]),
    ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
    ({"structured_outputs": {"grammar": "start: A"}}, "lark", "start: A"),
    ({"guided_json": SCHEMA}, "json_schema", SCHEMA),
    ({"guided_choice": ["a"]}, "choice", ["a"]),
    ({"guided_regex": "a+"}, "regex", "a+"),
    ({"guided_grammar": "start: A"}, "lark", "start: A"),
]


def constraint_of(engine: FakeEngine, answer: Answer) -> Constraint:
    assert answer.status == 200, answer.body
    constraint = engine.submits[-1].constraint
    assert constraint is not None
    return constraint


@pytest.mark.parametrize(("fields", "kind", "value"), ASKED)
@pytest.mark.parametrize("ask", [chat, complete])
def test_each_format(ask: Any, fields: dict[str, Any], kind: str, value: Any) -> None:
    engine = FakeEngine()
    constraint = constraint_of(engine, ask(engine, **fields))
    text = constraint.text if kind in ("regex", "lark") else json.loads(constraint.text)
    assert (constraint.kind, text) == (kind, value)
    assert constraint == Constraint(constraint.kind, constraint.text), "it starts at once"


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"structured_outputs": None}])
def test_nothing_is_asked_for(fields: dict[str, Any]) -> None:
    engine = FakeEngine()
    assert chat(engine, **fields, tools=[WEATHER], tool_choice="auto").status == 200
    assert engine.submits[-1].constraint is None and engine.submits[-1].bad_words == ()


def test_it_starts_after_the_reasoning() -> None:
    engine = FakeEngine()
    fields = {"messages": [{"role": "user", "content": "hi"}], "guided_regex": "a"}
    constraint = constraint_of(engine, request(engine, "/v1/chat/completions", fields, **THINK))
    assert (constraint.reasoning_starts, constraint.reasoning_ends) == (("<think>",), ("</think>",))
    constraint = constraint_of(
        engine, request(engine, "/v1/completions", {"prompt": "a", "guided_regex": "a"}, **THINK)
    )
    assert constraint.reasoning_ends == (), "a completion is no chat"


def test_an_answer_of_harmony_is_a_message_of_its_channel() -> None:
    engine = FakeEngine()
    fields: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "guided_json": SCHEMA}
    constraint = constraint_of(engine, request(engine, "/v1/chat/completions", fields, tool_call_parser="openai"))
    assert constraint.lark_marks == ("<|channel|>final<|message|>",)
    assert constraint.reasoning_ends == ("<|end|><|start|>assistant",)
    fields = {**fields, "guided_json": None, "guided_grammar": "start: A"}
    answer = request(engine, "/v1/chat/completions", fields, tool_call_parser="openai")
    assert (answer.status, answer.error["param"]) == (400, "guided_grammar")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_json": SCHEMA, "response_format": {"type": "json_object"}}, "guided_json"),
        ({"guided_regex": "a", "structured_outputs": {"regex": "a"}}, "guided_regex"),
        ({"structured_outputs": {"choice": ["a"], "grammar": "x"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"choice": ["a"], "json_object": True}}, "structured_outputs.json_object"),
        ({"guided_regex": "a", "tools": [WEATHER], "tool_choice": "required"}, "guided_regex"),
        ({"response_format": {"type": "json_object"}, "tools": [WEATHER], "tool_choice": NAMED}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": NAMED}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}], "tool_choice": "required"}, "tools"),
        (
            {
                "tools": [NOW, {"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}],
                "tool_choice": "required",
            },
            "tools[1].function.parameters",
        ),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"enum": ["x" * 300_000]}}}],
                "tool_choice": "required",
            },
            "tools",
        ),
        ({"thinking_token_budget": 5, "thinking_budget": 5}, "thinking_budget"),
    ],
)
def test_what_does_not_go_together_names_the_field(fields: dict[str, Any], param: str) -> None:
    engine = FakeEngine()
    answer = chat(engine, **fields)
    assert (answer.status, answer.error["param"]) == (400, param) and not engine.submits
    assert param.partition("[")[0] in answer.error["message"]


@pytest.mark.parametrize(("choice", "called"), [("required", {"weather", "now"}), (NAMED, {"weather"})])
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_a_forced_call(choice: Any, called: set[str], parallel: bool, stream: bool) -> None:
    engine = FakeEngine([CALL[:20], CALL[20:]])
    fields = {"tools": [WEATHER, NOW], "tool_choice": choice, "parallel_tool_calls": parallel, "stream": stream}
    answer = chat(engine, **fields)
    constraint = constraint_of(engine, answer)
    assert constraint.kind == "lark" and constraint.lark_marks == ("<tool_call>", "</tool_call>")
    assert {name for name in ("weather", "now") if f' "{name}" ' in constraint.text} == called
    assert ("{0,15}" in constraint.text) == (parallel and choice == "required")
    if stream:
        finishes = [event["choices"][0]["finish_reason"] for event in answer.events if event != "[DONE]"]
        assert finishes[-1] == "tool_calls"
    else:
        (call,) = answer.json["choices"][0]["message"]["tool_calls"]
        assert call["function"] == {"name": "weather", "arguments": '{"a": 1}'}
        assert answer.json["choices"][0]["finish_reason"] == "tool_calls"
    prompt = engine.submits[-1].prompt
    assert len(json.loads(prompt.tools)) == 2, "the model is told of all of them"  # type: ignore[union-attr]


@pytest.mark.parametrize("parser", ["hermes", "openai", "none"])
def test_a_format_beside_tools_leaves_calls_to_the_model(parser: str) -> None:
    engine = FakeEngine(["{}"])
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "tools": [WEATHER, NOW]}
    body["response_format"] = formatted(schema=SCHEMA)
    constraint = constraint_of(engine, request(engine, "/v1/chat/completions", body, tool_call_parser=parser))
    if parser == "none":
        assert (constraint.kind, json.loads(constraint.text)) == ("json_schema", SCHEMA)
    else:
        assert constraint.kind == "lark" and constraint.text.startswith("start: calls | answer\n")
        assert f"%json {json.dumps(SCHEMA)}" in constraint.text.splitlines()[-1]
        assert (constraint.lark_marks[-1] == "<|channel|>final<|message|>") == (parser == "openai")
    body["tool_choice"] = "none"
    constraint = constraint_of(engine, request(engine, "/v1/chat/completions", body, tool_call_parser=parser))
    assert constraint.kind == "json_schema"


@pytest.mark.parametrize("ask", ["format", "tools"])
def test_a_schema_of_any_depth_is_taken_or_refused(ask: str) -> None:
    for depth in range(900, 1000):
        schema = '{"a":' * depth + "1" + "}" * depth
        field = {
            "format": f'"response_format": {{"type": "json_schema", "json_schema": {{"schema": {schema}}}}}',
            "tools": '"tool_choice": "required", "tools": [{"type": "function", "function": '
            f'{{"name": "f", "parameters": {schema}}}}}]',
        }[ask]
        body = f'{{"messages": [{{"role": "user", "content": "hi"}}], {field}}}'.encode()
        answer = request(FakeEngine(), "/v1/chat/completions", body, tool_call_parser="hermes")
        assert answer.status in (200, 400), depth


def test_a_family_that_is_not_known_says_which_flag_helps() -> None:
    engine = FakeEngine()
    fields = {"messages": [{"role": "user", "content": "hi"}], "tools": [NOW], "tool_choice": "required"}
    answer = request(engine, "/v1/chat/completions", fields, tool_call_parser="none")
    assert answer.status == 400 and "--tool-call-parser" in answer.error["message"]
    fields = {"messages": [{"role": "user", "content": "hi"}], "thinking_token_budget": 5}
    answer = request(engine, "/v1/chat/completions", fields)
    assert answer.status == 400 and "--reasoning-parser" in answer.error["message"]


@pytest.mark.parametrize(("fields", "budget"), [({"thinking_token_budget": 9}, 9), ({"thinking_budget": 0}, 0)])
def test_a_thinking_budget(fields: dict[str, Any], budget: int) -> None:
    engine = FakeEngine()
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    constraint = constraint_of(engine, request(engine, "/v1/chat/completions", body, **THINK))
    assert constraint == Constraint(thinking_budget=budget, reasoning_starts=("<think>",), reasoning_ends=("</think>",))
    assert chat(engine, thinking_token_budget=-1).status == 200
    assert engine.submits[-1].constraint is None
    assert complete(engine, **fields).error["param"] == next(iter(fields))


def test_bad_words_go_to_who_can_spell_them() -> None:
    engine = FakeEngine()
    for ask in (chat, complete):
        assert ask(engine, bad_words=["damn", " it"]).status == 200
        assert engine.submits[-1].bad_words == ("damn", " it") and engine.submits[-1].constraint is None


def test_a_refused_grammar_is_a_400_before_the_first_byte() -> None:
    engine = FakeEngine()
    engine.refuse = ("invalid_request", "The JSON schema cannot be enforced: no.")
    answer = chat(engine, guided_json=SCHEMA, stream=True)
    assert answer.status == 400 and answer.error["message"].startswith("The JSON schema")


def test_the_other_apis_ask_for_the_same() -> None:
    engine = FakeEngine([CALL])
    format = {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}
    answer = request(engine, "/v1/responses", {"input": "hi", "text": {"format": format}})
    assert json.loads(constraint_of(engine, answer).text) == SCHEMA
    tool = {"type": "function", "name": "weather", "parameters": SCHEMA}
    for choice in ("required", {"type": "function", "name": "weather"}):
        body = {"input": "hi", "tools": [tool], "tool_choice": choice}
        assert constraint_of(engine, request(engine, "/v1/responses", body)).kind == "lark"

    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
    format = {"type": "json_schema", "schema": SCHEMA}
    answer = request(engine, "/v1/messages", {**body, "output_config": {"format": format}})
    assert json.loads(constraint_of(engine, answer).text) == SCHEMA
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        tools = [{"name": "weather", "input_schema": SCHEMA}]
        answer = request(engine, "/v1/messages", {**body, "tools": tools, "tool_choice": choice})
        assert constraint_of(engine, answer).kind == "lark" and answer.json["stop_reason"] == "tool_use"
    thinking = {"type": "enabled", "budget_tokens": 1024}
    answer = request(engine, "/v1/messages", {**body, "thinking": thinking}, **THINK)
    assert constraint_of(engine, answer).thinking_budget == 1024
    assert request(engine, "/v1/messages", {**body, "thinking": thinking}).status == 200
    assert engine.submits[-1].constraint is None, "a model that is not known to reason keeps to any bound"
