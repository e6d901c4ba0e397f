"""Rules of Lark grammars that force a model to write tool calls in the form of its family.

A family's speller makes the rules; one of them, `calls`, is the calls and nothing else. A string that may be a special
token is a mark, `mark0` and so on in the rules: the grammar process knows whether this model's vocabulary has it.
Whatever the rules allow, the family's reader must read back as the same calls.

Rules for JSON schemas are named `arguments<i>` (the arguments of tool i) or `schema<i>_<j>` (one of them), so that an
error of the grammar process can name the request's field.
"""

import json
from collections.abc import Sequence
from typing import Literal, NamedTuple

from .block import is_call_name

Schema = dict[str, object]
Tools = Sequence[tuple[str, Schema]]
"""The name of each tool and the schema of its arguments, which is an object's."""

ANY_OBJECT: Schema = {"type": "object"}

MAX_ARGUMENTS = 64  # of a call of a tool whose schema does not name them
NOTES = {"title", "description", "$schema", "$defs", "definitions", "examples", "default", "strict"}  # allow everything
_OF_AN_OBJECT = {"type", "properties", "required", "additionalProperties"}  # what arguments by name can express
MAX_CALLS = 16  # of one answer, so that a model that repeats itself ends


class CannotSpell(Exception):
    """This family cannot be forced to call this tool. `field`: of the function, the one at fault."""

    def __init__(self, text: str, field: Literal["name", "parameters"]) -> None:
        super().__init__(text)
        self.field = field


class CallRules(NamedTuple):
    """Lark rules, one of them `calls`, and the strings that `mark0`, `mark1`, … stand for."""

    rules: list[str]
    marks: tuple[str, ...]


def rule(name: str, *parts: str) -> str:
    """A rule on one line, because a JSON schema in it ends with the line."""
    return f"{name}: {' '.join(parts)}"


def literal(text: str) -> str:
    """The literal `text`."""
    return json.dumps(text)


def repeat(call: str, between: str, several: bool) -> str:
    """The rule `call`, once or, if `several`, up to 16 times with the literal `between` in between."""
    return f"{call} ({literal(between)} {call}){{0,{MAX_CALLS - 1}}}" if several else call


def one_of(name: str, parts: Sequence[str], tools: Tools) -> list[str]:
    """A rule that is `parts` for any of the tools. In `parts`, `name` becomes the tool's name, and `arguments` and
    `first` become the rules of these names for this tool."""
    rules = [rule(name, " | ".join(f"{name}{i}" for i in range(len(tools))))]
    for i, (tool, _) in enumerate(tools):
        own = {"name": literal(tool), "arguments": f"arguments{i}", "first": f"first{i}"}
        rules.append(rule(f"{name}{i}", *(own.get(part, part) for part in parts)))
    return rules


def call_objects(tools: Tools, key: str) -> list[str]:
    """The rule `object`, which is `{"name": …, key: {…}}`, and those of the arguments."""
    parts = [literal('{"name": "'), "name", literal(f'", "{key}": '), "arguments", literal("}")]
    return [*one_of("object", parts, tools), *argument_schemas(tools)]


def named_properties(name: str, schema: Schema) -> list[tuple[str, object, bool]] | None:
    """For families that write each argument by its name: the name, the schema, and whether it is required; None if the
    schema allows any object. Raises CannotSpell if an argument's schema depends on another argument."""
    if schema == ANY_OBJECT:
        return None
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if (
        not schema.keys() <= _OF_AN_OBJECT | NOTES
        or not isinstance(properties, dict)
        or not isinstance(required, list)
        or not all(map(is_call_name, properties))
        or not properties.keys() >= set(required)
    ):
        raise CannotSpell(
            f"{name!r} cannot be forced on this model, which writes each argument by its name: its parameters must be "
            "an object with named properties and nothing else",
            "parameters",
        )
    return [(key, inner, key in required) for key, inner in properties.items()]


def argument_schemas(tools: Tools) -> list[str]:
    """The rules `arguments<i>`."""
    return [rule(f"arguments{i}", "%json " + json.dumps(schema)) for i, (_, schema) in enumerate(tools)]
