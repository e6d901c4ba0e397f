"""How families of models write the calls that they are made to write: the counterpart of `calls`, as rules of Lark.

A family's rules say `calls`, the calls and nothing else, with the arguments of each as its tool's schema has them. What
may be a special token is a mark: the grammar process knows whether this model's vocabulary has it. Whatever a rule
allows, the family's reader reads back as the same calls.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from .block import MAX_NAME

Schema = dict[str, object]
Tools = Sequence[tuple[str, Schema]]
"""A name and the schema of an object each."""

ANY_OBJECT: Schema = {"type": "object"}

_MAX_KEYWORDS = 64  # of a call, where a tool does not say which it takes
_MAX_CALLS = 16  # of one answer; a model that repeats itself comes to an end
_NAME = re.compile(rf"[A-Za-z0-9_.:/-]{{1,{MAX_NAME}}}")
_OF_AN_OBJECT = {"type", "properties", "required", "additionalProperties"}  # what pythonic arguments can be made of
_NOTES = {"title", "description", "$schema", "$defs", "definitions", "examples", "default", "strict"}


class CannotSpell(Exception):
    """This family cannot be made to call this tool. `field`: of the function, what is at fault."""

    def __init__(self, text: str, field: Literal["name", "parameters"]) -> None:
        super().__init__(text)
        self.field = field


class CallRules(NamedTuple):
    """Rules, with `calls` among them, and what their marks stand for."""

    rules: list[str]
    marks: tuple[str, ...]


def spell_calls(parser: str, tools: Tools, *, several: bool) -> CallRules | None:
    """The rules for calls of any of `tools`. None: the family is not known. Raises CannotSpell."""
    for name, _ in tools:
        if not _NAME.fullmatch(name):
            raise CannotSpell(f"{name[:80]!r} is no name that a call can have", "name")
    spell = _SPELLINGS.get(parser)
    return None if spell is None else spell(tools, several)


def _hermes(tools: Tools, several: bool) -> CallRules:
    call = _rule("call", "mark0", _text("\n"), "object", _text("\n"), "mark1")
    return CallRules(
        [_rule("calls", _row("call", "\n", several)), call, *_objects(tools, "arguments")],
        ("<tool_call>", "</tool_call>"),
    )


def _llama3_json(tools: Tools, several: bool) -> CallRules:
    calls = _rule("calls", "mark0?", _row("object", "; ", several))
    return CallRules([calls, *_objects(tools, "parameters")], ("<|python_tag|>",))


def _mistral(tools: Tools, several: bool) -> CallRules:
    """The older and the newer way: a model knows one of them."""
    older = ["mark0", _text("["), _row("object", ", ", several), _text("]")]
    rules = [
        _rule("calls", *older, "|", _row("named", "", several)),
        *_one_of("named", ["mark0", "name", "mark1", "arguments"], tools),
        *_objects(tools, "arguments"),
    ]
    return CallRules(rules, ("[TOOL_CALLS]", "[ARGS]"))


def _deepseek_v3(tools: Tools, several: bool) -> CallRules:
    parts = ["mark1", _text("function"), "mark2", "name", _text("\n```json\n"), "arguments", _text("\n```"), "mark3"]
    return _deepseek(parts, "\n", tools, several)


def _deepseek_v31(tools: Tools, several: bool) -> CallRules:
    return _deepseek(["mark1", "name", "mark2", "arguments", "mark3"], "", tools, several)


def _deepseek(parts: Sequence[str], between: str, tools: Tools, several: bool) -> CallRules:
    calls = _rule("calls", "mark0", _row("call", between, several), "mark4")
    return CallRules([calls, *_one_of("call", parts, tools), *_schemas(tools)], _DEEPSEEK_MARKS)


_DEEPSEEK_MARKS = (
    *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    "<｜tool▁calls▁end｜>",
)


def _harmony(tools: Tools, several: bool) -> CallRules:
    """A turn ends with its first call."""
    to = ["mark0", _text("commentary to=functions."), "name", _text(" "), "mark1", _text("json"), "mark2", "arguments"]
    return CallRules([*_one_of("calls", to, tools), *_schemas(tools)], ("<|channel|>", "<|constrain|>", "<|message|>"))


def _pythonic(tools: Tools, several: bool) -> CallRules:
    """Values are written as JSON, which its reader takes as well."""
    rules = [
        _rule("calls", "list | mark0 list mark1"),
        _rule("list", _text("["), _row("call", ", ", several), _text("]")),
        *_one_of("call", ["name", _text("("), "first", _text(")")], tools),
    ]
    for i, (name, schema) in enumerate(tools):
        rules += _keywords(i, name, schema)
    return CallRules(rules, ("<|python_start|>", "<|python_end|>"))


def _keywords(tool: int, name: str, schema: Schema) -> list[str]:
    """`key=value, …` in the order of the properties: `first` until one was written, `next` from then on."""
    if schema == ANY_OBJECT:
        return _any_keywords(tool)
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if (
        not schema.keys() <= _OF_AN_OBJECT | _NOTES
        or not isinstance(properties, dict)
        or not isinstance(required, list)
        or not all(map(_NAME.fullmatch, properties))
        or not properties.keys() >= set(required)
    ):
        raise CannotSpell(
            f"{name!r} cannot be forced on this model, which writes calls as Python does: its parameters must be "
            "an object with named properties and nothing else",
            "parameters",
        )
    definitions: Schema = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    rules = [_rule(f"first{tool}", f"first{tool}_0")]
    for i, (key, inner) in enumerate(properties.items()):
        value, first, following = f"value{tool}_{i}", f"first{tool}_{i}", f"next{tool}_{i}"
        first_after, next_after = f"first{tool}_{i + 1}", f"next{tool}_{i + 1}"
        inner = {**inner, **definitions} if isinstance(inner, dict) else inner  # it may refer to them
        rules.append(_rule(value, _text(f"{key}="), f"schema{tool}_{i}"))
        rules.append(_rule(f"schema{tool}_{i}", "%json " + json.dumps(inner)))
        rules.append(_rule(first, value, next_after, *([] if key in required else ["|", first_after])))
        rules.append(_rule(following, _text(", "), value, next_after, *([] if key in required else ["|", next_after])))
    return [*rules, *(_rule(f"{state}{tool}_{len(properties)}", _text("")) for state in ("first", "next"))]


def _any_keywords(tool: int) -> list[str]:
    """Of a tool that does not say what it takes."""
    pair = f"pair{tool}"
    return [
        _rule(f"first{tool}", f"({pair} ({_text(', ')} {pair}){{0,{_MAX_KEYWORDS - 1}}})?"),
        _rule(pair, r"/[A-Za-z_][A-Za-z0-9_]{0,63}/", _text("="), f"schema{tool}_0"),
        _rule(f"schema{tool}_0", "%json {}"),
    ]


# ── rules ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _rule(name: str, *parts: str) -> str:
    """One line: a schema ends with its line."""
    return f"{name}: {' '.join(parts)}"


def _text(text: str) -> str:
    return json.dumps(text)


def _row(call: str, between: str, several: bool) -> str:
    """One or more."""
    return f"{call} ({_text(between)} {call}){{0,{_MAX_CALLS - 1}}}" if several else call


def _one_of(rule: str, parts: Sequence[str], tools: Tools) -> list[str]:
    """`rule` for any of the tools. In `parts`, `name` is the tool's, and a rule of its own has its number behind."""
    rules = [_rule(rule, " | ".join(f"{rule}{i}" for i in range(len(tools))))]
    for i, (name, _) in enumerate(tools):
        own = {"name": _text(name), "arguments": f"arguments{i}", "first": f"first{i}"}
        rules.append(_rule(f"{rule}{i}", *(own.get(part, part) for part in parts)))
    return rules


def _objects(tools: Tools, key: str) -> list[str]:
    """`{"name": …, key: {…}}`"""
    parts = [_text('{"name": "'), "name", _text(f'", "{key}": '), "arguments", _text("}")]
    return [*_one_of("object", parts, tools), *_schemas(tools)]


def _schemas(tools: Tools) -> list[str]:
    return [_rule(f"arguments{i}", "%json " + json.dumps(schema)) for i, (_, schema) in enumerate(tools)]


_SPELLINGS: dict[str, Callable[[Tools, bool], CallRules]] = {
    "hermes": _hermes,
    "llama3_json": _llama3_json,
    "mistral": _mistral,
    "pythonic": _pythonic,
    "deepseek_v3": _deepseek_v3,
    "deepseek_v31": _deepseek_v31,
    "openai": _harmony,
}
