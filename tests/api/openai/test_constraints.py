"""Constraints on the output: from the fields of each API to the submitted constraint, and which can be combined."""

import json
import re
from typing import Any

import pytest
from drawing import draw, grammars_of, json_tokenizer
from harness import Answer, FakeEngine, chat, complete, request
from msgspec.structs import replace

from pagewire.api.output.parsers.events import CallArguments, CallStart, Text
from pagewire.api.output.parsers.lexer import Lexer
from pagewire.api.output.parsers.registry import find_grammar
from pagewire.errors import RequestError
from pagewire.ipc.messages import Constraint, Source

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
NOW = {"type": "function", "function": {"name": "now"}}
NAMED = {"type": "function", "function": {"name": "weather"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"a": 1}}\n</tool_call>'
THINK: dict[str, Any] = {"reasoning_parser": "qwen3"}


def formatted(**fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": fields}


FORMATS: list[tuple[dict[str, Any], str, Any]] = [
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


@pytest.mark.parametrize(("fields", "kind", "value"), FORMATS)
@pytest.mark.parametrize("ask", [chat, complete])
def test_each_format_becomes_its_constraint(ask: Any, fields: dict[str, Any], kind: str, value: Any) -> None:
    engine = FakeEngine()
    constraint = constraint_of(engine, ask(engine, **fields))
    text = constraint.text if kind in ("regex", "lark") else json.loads(constraint.text)
    assert (constraint.kind, text) == (kind, value)
    (source,) = constraint.sources
    assert constraint == Constraint(constraint.kind, constraint.text, sources=(source,)), "it applies at once"
    assert source.field.partition(".")[0] == next(iter(fields)) and not source.tool


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"structured_outputs": None}])
def test_without_a_format_there_is_no_constraint(fields: dict[str, Any]) -> None:
    engine = FakeEngine()
    assert chat(engine, **fields, tools=[WEATHER], tool_choice="auto").status == 200
    assert engine.submits[-1].constraint is None and engine.submits[-1].bad_words == ()


def test_a_constraint_starts_after_the_reasoning() -> None:
    engine = FakeEngine()
    fields: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "guided_regex": "a"}
    constraint = constraint_of(engine, request(engine, "/v1/chat/completions", fields, **THINK))
    assert (constraint.reasoning_starts, constraint.reasoning_ends) == (("<think>",), ("</think>",))
    constraint = constraint_of(
        engine, request(engine, "/v1/completions", {"prompt": "a", "guided_regex": "a"}, **THINK)
    )
    assert constraint.reasoning_ends == (), "a completion has no reasoning"


def test_an_answer_in_harmony_is_a_message_of_the_final_channel() -> None:
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
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}], "tool_choice": "required"},
            "tools[0].function.name",
        ),
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
def test_conflicting_fields_are_named(fields: dict[str, Any], param: str) -> None:
    engine = FakeEngine()
    answer = chat(engine, **fields)
    assert (answer.status, answer.error["param"]) == (400, param) and not engine.submits
    assert param.partition("[")[0] in answer.error["message"]


@pytest.mark.parametrize(("choice", "called"), [("required", {"weather", "now"}), (NAMED, {"weather"})])
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_a_forced_call(choice: Any, called: set[str], parallel: bool, stream: bool) -> None:
    engine = FakeEngine([CALL[:20], CALL[20:]])
    fields: dict[str, Any] = {
        "tools": [WEATHER, NOW],
        "tool_choice": choice,
        "parallel_tool_calls": parallel,
        "stream": stream,
    }
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
    assert len(json.loads(prompt.tools)) == 2, "the prompt lists all tools"  # type: ignore[union-attr]


@pytest.mark.parametrize("parser", ["hermes", "openai", "none"])
def test_a_format_beside_tools_allows_calls(parser: str) -> None:
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
def test_a_schema_of_any_depth_is_accepted_or_refused(ask: str) -> None:
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


def test_without_a_parser_the_error_names_the_flag() -> None:
    engine = FakeEngine()
    fields: dict[str, Any] = {
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [NOW],
        "tool_choice": "required",
    }
    answer = request(engine, "/v1/chat/completions", fields, tool_call_parser="none")
    assert answer.status == 400 and "--tool-call-parser" in answer.error["message"]
    fields = {"messages": [{"role": "user", "content": "hi"}], "thinking_token_budget": 5}
    answer = request(engine, "/v1/chat/completions", fields)
    assert answer.status == 400 and "--reasoning-parser" in answer.error["message"]


@pytest.mark.parametrize(("fields", "budget"), [({"thinking_token_budget": 9}, 9), ({"thinking_budget": 0}, 0)])
def test_a_thinking_budget(fields: dict[str, Any], budget: int) -> None:
    engine = FakeEngine()
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], **fields}
    constraint = constraint_of(engine, request(engine, "/v1/chat/completions", body, **THINK))
    assert constraint == Constraint(thinking_budget=budget, reasoning_starts=("<think>",), reasoning_ends=("</think>",))
    assert chat(engine, thinking_token_budget=-1).status == 200
    assert engine.submits[-1].constraint is None
    assert complete(engine, **fields).error["param"] == next(iter(fields))


def test_bad_words_are_submitted_as_text() -> None:
    engine = FakeEngine()
    for ask in (chat, complete):
        assert ask(engine, bad_words=["damn", " it"]).status == 200
        assert engine.submits[-1].bad_words == ("damn", " it") and engine.submits[-1].constraint is None


def test_a_refused_grammar_is_a_400_before_the_first_byte() -> None:
    engine = FakeEngine()
    engine.refuse = ("invalid_request", "The JSON schema cannot be enforced: no.")
    answer = chat(engine, guided_json=SCHEMA, stream=True)
    assert answer.status == 400 and answer.error["message"].startswith("The JSON schema")


def test_the_other_apis_submit_the_same_constraints() -> None:
    engine = FakeEngine([CALL])
    format = {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}
    answer = request(engine, "/v1/responses", {"input": "hi", "text": {"format": format}})
    assert json.loads(constraint_of(engine, answer).text) == SCHEMA
    tool = {"type": "function", "name": "weather", "parameters": SCHEMA}
    for choice in ("required", {"type": "function", "name": "weather"}):
        body: dict[str, Any] = {"input": "hi", "tools": [tool], "tool_choice": choice}
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
    assert engine.submits[-1].constraint is None, "without a reasoning parser there is nothing to bound"


# ── unenforceable schemas ────────────────────────────────────────────────────────────────────────────────────────────

# Tools in requests that also have a format. No grammar can follow the parameters of the second and third.
ODD: list[tuple[str, Any]] = [
    ("weather", SCHEMA),
    ("odd", {"type": "object", "properties": {"x": {"if": {"type": "string"}, "then": {"minLength": 2}}}}),
    (
        "deep",
        {"type": "object", "properties": {"x": {"const": 1, "enum": [[[]], {"a": 1}]}, "y": {"type": "strng"}}},
    ),
    ("no object", {"type": "object"}),
    ("nested", {"type": "object", "properties": json.loads('{"a":' * 80 + "{}" + "}" * 80)}),
    ("list", {"type": "array"}),
    ("open", True),
]
OBJECTS = ("hermes", "llama3_json", "mistral", "deepseek_v3", "deepseek_v31", "openai", "kimi_k2", "granite")
FAMILIES = (*OBJECTS, "pythonic", "lfm2")


def odd_tools(*names: str) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in ODD
        if not names or name in names
    ]


def ask_beside_tools(engine: FakeEngine, parser: str, **fields: Any) -> Answer:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], **fields}
    return request(engine, "/v1/chat/completions", body, tool_call_parser=parser)


@pytest.mark.parametrize("parser", FAMILIES)
def test_a_tool_that_cannot_be_enforced_takes_any_object(parser: str) -> None:
    """Its arguments are not enforced; the answer and the other tools' arguments still are."""
    engine = FakeEngine(["{}"])
    answer_schema = {"type": "object", "properties": {"ok": {"const": 1}}, "required": ["ok"]}
    fields: dict[str, Any] = {"tools": odd_tools(), "response_format": formatted(schema=answer_schema)}
    constraint = constraint_of(engine, ask_beside_tools(engine, parser, **fields))
    assert constraint.sources[0].tool == "weather"
    assert "no object" not in constraint.text, "no call can have a name with a space"
    assert constraint.sources[-1] == Source("response_format.json_schema.schema")
    tokenizer = json_tokenizer([*constraint.lark_marks, "<|start|>", "<|end|>"], special=True)
    grammars = grammars_of(tokenizer)
    constraint = replace(constraint, reasoning_starts=(), reasoning_ends=())
    grammar = find_grammar(parser, "none", True)
    assert grammar is not None
    outputs: dict[str, list[Any]] = {}
    for seed in range(100):
        output = tokenizer.decode(draw(grammars.compile(constraint, ""), tokenizer, seed, most=1000), False)
        lexer = Lexer(grammar, "")
        name, arguments = "answer", ""
        for event in [*lexer.push(output), *lexer.flush()]:
            match event:
                case CallStart(name=called):
                    outputs.setdefault(name, []).append(arguments)
                    name, arguments = called, ""
                case CallArguments(text=text) | Text(text=text):
                    arguments += text
        outputs.setdefault(name, []).append(arguments)
    assert {"answer", "weather", "odd", "deep", "nested", "list", "open"} <= outputs.keys()
    answers = [json.loads(text) for text in outputs.pop("answer") if text.strip()]
    assert answers and all(value == {"ok": 1} for value in answers)
    values = {name: [json.loads(text) for text in texts] for name, texts in outputs.items()}
    assert all(isinstance(value, dict) for several in values.values() for value in several)
    assert all(value.keys() == {"a"} and isinstance(value["a"], int) for value in values["weather"])
    # Some objects are not what their schemas describe.
    assert any(value.get("x", 1) != 1 for value in values["deep"])
    assert all(len({frozenset(value) for value in values[name]}) > 1 for name in ("odd", "deep", "nested", "list"))


@pytest.mark.parametrize("parser", FAMILIES)
@pytest.mark.parametrize("name", ["odd", "deep", "nested"])
def test_a_forced_tool_that_cannot_be_enforced_is_named(parser: str, name: str) -> None:
    engine = FakeEngine()
    fields: dict[str, Any] = {"tools": odd_tools("weather", name), "tool_choice": "required"}
    constraint = constraint_of(engine, ask_beside_tools(engine, parser, **fields))
    tokenizer = json_tokenizer(constraint.lark_marks, special=True)
    field = "tools[1].function.parameters"
    with pytest.raises(RequestError, match=re.escape(f"The JSON schema in {field} (of {name!r}) ")) as caught:
        grammars_of(tokenizer).compile(constraint, "")
    assert caught.value.param == field


def test_a_format_that_cannot_be_enforced_is_named() -> None:
    grammars = grammars_of(json_tokenizer(["<tool_call>", "</tool_call>"], special=True))
    bad = {"type": "object", "properties": {"x": {"not": {}}}}
    for fields, field in (
        ({"response_format": formatted(schema=bad)}, "response_format.json_schema.schema"),
        ({"response_format": formatted(schema=bad), "tools": [WEATHER]}, "response_format.json_schema.schema"),
        ({"structured_outputs": {"json": bad}}, "structured_outputs.json"),
        ({"guided_regex": "(("}, "guided_regex"),
        ({"structured_outputs": {"grammar": "]]]"}}, "structured_outputs.grammar"),
    ):
        engine = FakeEngine()
        constraint = constraint_of(engine, ask_beside_tools(engine, "hermes", **fields))
        with pytest.raises(RequestError, match=f"in {field} cannot be enforced: ") as caught:
            grammars.compile(constraint, "")
        assert caught.value.param == field


def test_tools_that_are_too_large_together_take_any_object() -> None:
    large = {"type": "object", "properties": {"x": {"enum": ["x" * 90_000]}}}
    tools = [{"type": "function", "function": {"name": f"t{i}", "parameters": large}} for i in range(4)]
    engine = FakeEngine(["{}"])
    constraint = constraint_of(engine, chat(engine, tools=tools, response_format=formatted(schema=SCHEMA)))
    assert len(constraint.text) < 10_000 and all(f'"t{i}"' in constraint.text for i in range(4))
    many = {"type": "object", "properties": {"x": {"anyOf": [{"$ref": "#/$defs/a"}] * 600}}, "$defs": {"a": {}}}
    tools = [{"type": "function", "function": {"name": f"t{i}", "parameters": many}} for i in range(2)]
    engine = FakeEngine(["{}"])
    constraint = constraint_of(engine, chat(engine, tools=tools, response_format=formatted(schema=SCHEMA)))
    grammars_of(json_tokenizer(constraint.lark_marks, special=True)).compile(constraint, "")


def test_a_refused_schema_is_named_to_the_client() -> None:
    engine = FakeEngine()
    field = "tools[0].function.parameters"
    engine.refuse = ("invalid_request", f"The JSON schema in {field} (of 'weather') cannot be enforced: no.", field, 0)
    answer = chat(engine, tools=[WEATHER], tool_choice="required")
    assert (answer.status, answer.error["param"]) == (400, field) and "'weather'" in answer.error["message"]
