"""Forced calls: whatever a family's rules allow, its parser reads as calls of the tools."""

import json
import random
from typing import Any

import jsonschema
import pytest
from drawing import draw, grammars_of, json_tokenizer
from msgspec.structs import replace

from pagewire.api.output.parsers.events import CallArguments, CallStart, Event, Reasoning, Text
from pagewire.api.output.parsers.lexer import Lexer
from pagewire.api.output.parsers.registry import find_family, find_grammar
from pagewire.api.output.parsers.spelling import CannotSpell
from pagewire.engine.text.tokenizer import Tokenizer
from pagewire.ipc.messages import Constraint

ELEMENTS = ("glm45", "glm47", "minimax_m2", "seed_oss", "qwen3_coder")
LISTS = ("mistral", "nemotron_json", "granite")
OBJECTS = ("hermes", "llama3_json", "deepseek_v3", "deepseek_v31", "openai", "kimi_k2")
FAMILIES = (*OBJECTS, *LISTS, *ELEMENTS, "pythonic", "lfm2", "gemma4")
TOOLS: list[tuple[str, dict[str, Any]]] = [
    (
        "get_weather",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 12},
                "unit": {"enum": ["C", "F", None]},
                "days": {"type": "array", "items": {"$ref": "#/$defs/day"}, "maxItems": 2},
            },
            "required": ["city"],
            "additionalProperties": False,
            "$defs": {"day": {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}}}},
        },
    ),
    ("now", {"type": "object", "properties": {}, "additionalProperties": False}),
    (
        "a.b-c/d:e",
        {
            "type": "object",
            "properties": {"x": {"type": "number", "minimum": 0, "maximum": 5}, "on": {"type": "boolean"}},
            "additionalProperties": False,
        },
    ),
]


def vocabulary(parser: str, special: bool) -> Tokenizer:
    rules = find_family(parser, "none").spell_calls(TOOLS, several=True)
    assert rules is not None
    return json_tokenizer([*rules.marks, "<think>", "</think>", "<|start|>", "<|end|>"], special=special)


def read(parser: str, reasoning: str, output: str, prompt: str, cuts: random.Random | None) -> list[Event]:
    grammar = find_grammar(parser, reasoning, True)
    assert grammar is not None
    lexer, events = Lexer(grammar._replace(schemas=dict(TOOLS)), prompt), []
    while output:
        size = len(output) if cuts is None else cuts.randint(1, 9)
        events += lexer.push(output[:size])
        output = output[size:]
    return [*events, *lexer.flush()]


def calls_in(events: list[Event]) -> list[tuple[str, Any]]:
    calls: list[tuple[str, str]] = []
    for event in events:
        match event:
            case CallStart(name=name):
                calls.append((name, ""))
            case CallArguments(text=text):
                calls[-1] = (calls[-1][0], calls[-1][1] + text)
            case Text(text=text):
                assert not text.strip(), f"{text!r} beside calls"
            case Reasoning():
                assert not calls
    return [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("reasons", [True, False])
@pytest.mark.parametrize("several", [True, False])
@pytest.mark.parametrize("parser", FAMILIES)
def test_every_spelling_is_parsed_as_calls(parser: str, several: bool, reasons: bool, special: bool) -> None:
    tokenizer = vocabulary(parser, special)
    grammars = grammars_of(tokenizer)
    rules = find_family(parser, "none").spell_calls(TOOLS, several=several)
    assert rules is not None
    text = "\n".join(["start: calls", *rules.rules])
    reasoning = "none" if not reasons else "openai_gptoss" if parser == "openai" else "qwen3"
    tags = find_family(parser, reasoning).reasoning
    constraint = Constraint("lark", text, lark_marks=rules.marks)
    if tags is not None:
        constraint = replace(constraint, reasoning_starts=tags[:1], reasoning_ends=tags[1:])
    schemas, called = dict(TOOLS), set()
    for seed in range(8):
        prompt, thoughts = "assistant\n", ""
        if tags is not None and seed % 2:
            thoughts = f"{tags[0]}I {{'a': 1}} think{tags[1]}"
        elif tags is not None:  # sampling may never end the reasoning, so the prompt ends it
            prompt = "".join(tags)
        matcher = grammars.compile(constraint, prompt)
        ids = tokenizer.encode(thoughts, False)
        matcher.accept(ids)
        output = tokenizer.decode(ids + draw(matcher, tokenizer, seed), False)
        whole = calls_in(read(parser, reasoning, output, prompt, None))
        assert whole == calls_in(read(parser, reasoning, output, prompt, random.Random(seed)))
        assert len(whole) == 1 or (several and 1 <= len(whole) <= 16), output
        for name, arguments in whole:
            jsonschema.validate(arguments, schemas[name])
            called.add(name)
    assert len(called) > 1


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("parser", ["hermes", "mistral", "pythonic", "deepseek_v31", "glm45", "qwen3_coder"])
def test_rules_may_allow_a_call_or_an_answer(parser: str, special: bool) -> None:
    tokenizer = vocabulary(parser, special)
    rules = find_family(parser, "none").spell_calls(TOOLS, several=True)
    assert rules is not None
    schema = '{"type": "object", "properties": {"ok": {"const": 1}}, "required": ["ok"], "additionalProperties": false}'
    text = "\n".join(["start: calls | answer", *rules.rules, f"answer: %json {schema}"])
    constraint, grammars = Constraint("lark", text, lark_marks=rules.marks), grammars_of(tokenizer)
    kinds = set()
    for seed in range(20):
        output = tokenizer.decode(draw(grammars.compile(constraint, ""), tokenizer, seed), False)
        events = read(parser, "none", output, "", random.Random(seed))
        if isinstance(events[0], CallStart):
            kinds |= {name for name, _ in calls_in(events)}
        else:
            kinds.add("answer")
            assert json.loads("".join(event.text for event in events if isinstance(event, Text))) == {"ok": 1}
    assert kinds > {"answer"}


def test_rules_of_one_tool_allow_only_its_call(parser: str = "hermes") -> None:
    tokenizer = vocabulary(parser, special=True)
    rules = find_family(parser, "none").spell_calls(TOOLS[1:2], several=False)
    assert rules is not None
    constraint = Constraint("lark", "\n".join(["start: calls", *rules.rules]), lark_marks=rules.marks)
    output = tokenizer.decode(draw(grammars_of(tokenizer).compile(constraint, ""), tokenizer, 0), False)
    assert output.replace(" ", "").replace("\n", "") == '<tool_call>{"name":"now","arguments":{}}</tool_call>'


@pytest.mark.parametrize("name", ["", "a b", "é", 'q"', "x" * 300])
def test_invalid_tool_names_cannot_be_spelled(name: str) -> None:
    with pytest.raises(CannotSpell, match="is not a name"):
        find_family("hermes", "none").spell_calls([(name, {"type": "object"})], several=True)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "anyOf": [{"required": ["a"]}]},
        {"type": "object", "properties": {"a b": {}}},
        {"type": "object", "properties": {}, "required": ["a"]},
        {"type": "object", "properties": []},
    ],
)
def test_parameters_that_are_not_keywords_cannot_be_spelled(schema: dict[str, Any]) -> None:
    with pytest.raises(CannotSpell, match="writes each argument by its name"):
        find_family("pythonic", "none").spell_calls([("f", schema)], several=True)


def test_without_a_family_there_are_no_rules() -> None:
    assert find_family("none", "none").spell_calls(TOOLS, several=True) is None
