"""Forced values without quotes: whatever the rules allow is read back as a value that the schema allows."""

import json
import random
from contextlib import suppress
from typing import Any

import jsonschema
import pytest
from drawing import allowed, draw, grammars_of, json_tokenizer

from pagewire.api.output.parsers.bare_spelling import End, spell_bare
from pagewire.api.output.parsers.events import CallArguments, CallStart
from pagewire.api.output.parsers.lexer import Lexer
from pagewire.api.output.parsers.registry import find_family
from pagewire.api.output.parsers.spelling import CannotSpell
from pagewire.ipc.messages import Constraint

FAMILIES = ("glm45", "glm47", "minimax_m2", "seed_oss", "qwen3_coder")
VALUES: dict[str, Any] = {
    "short": {"type": "string", "minLength": 1, "maxLength": 3},
    "matched": {"type": "string", "pattern": r"^[a-c]{2}\d/x$"},
    "found": {"type": "string", "pattern": "b[/]|c", "maxLength": 6},
    "chosen": {"enum": ["a", "", "null", None, 5, "5", " b\n"]},
    "constant": {"const": "true"},
    "optional": {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "null"}]},
    "listed": {"type": ["string", "integer", "array"], "maxLength": 4, "maximum": 9, "minimum": 0, "maxItems": 1},
    "referred": {"$ref": "#/$defs/text"},
    "wrapped": {"allOf": [{"$ref": "#/$defs/text"}], "description": "a text"},
    "anything": {},
    "number": {"type": "number", "minimum": 0, "maximum": 1},
    "nested": {"type": "object", "properties": {"a": {"$ref": "#/$defs/text"}}, "additionalProperties": False},
    "switch": {"type": "boolean"},
}
TOOL: dict[str, Any] = {
    "type": "object",
    "properties": VALUES,
    "required": [name for name in VALUES if name != "optional"],
    "additionalProperties": False,
    "$defs": {"text": {"type": "string", "maxLength": 4}},
}


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("parser", FAMILIES)
def test_forced_values_are_read_as_the_schema_allows(parser: str, special: bool) -> None:
    family = find_family(parser, "none")
    rules = family.spell_calls([("f", TOOL)], several=False)
    assert rules is not None
    tokenizer = json_tokenizer(rules.marks, special=special)
    constraint = Constraint("lark", "\n".join(["start: calls", *rules.rules]), lark_marks=rules.marks)
    grammars = grammars_of(tokenizer)
    end = "</arg_value>" if "<arg_value>" in rules.marks else "\n</parameter>"
    seen: dict[str, list[Any]] = {name: [] for name in VALUES}
    for seed in range(8):
        output = tokenizer.decode(draw(grammars.compile(constraint, ""), tokenizer, seed, 300, end), False)
        rng, pieces, left = random.Random(seed), [], output
        while left:
            size = rng.randint(1, 9)
            pieces.append(left[:size])
            left = left[size:]
        lexer, calls = Lexer(family.calls._replace(schemas={"f": TOOL})), []
        for event in [*(event for piece in pieces for event in lexer.push(piece)), *lexer.flush()]:
            match event:
                case CallStart():
                    calls.append("")
                case CallArguments(text=text):
                    calls[-1] += text
                case _:
                    assert not event.text.strip(), output
        assert len(calls) == 1
        for call in calls:
            jsonschema.validate(arguments := json.loads(call), TOOL)
            for name, value in arguments.items():
                seen[name].append(value)
    assert all(values for name, values in seen.items() if name != "optional")
    # Text that would be read as null or a number is left out.
    assert set(seen["chosen"]) <= {"a", "", None, 5, " b\n"}


@pytest.mark.parametrize(
    ("name", "text", "is_allowed"),
    [
        ("optional", "null", True),
        ("optional", "nul", True),
        ("optional", "nulls", False),
        ("listed", "[5]", True),
        ("listed", "9", True),
        ("listed", "10", False),
        ("listed", "a\nb", True),
        ("chosen", "null", True),
        ("chosen", "5", True),
        ("chosen", "b", False),
        ("anything", "True", False),
        ("matched", "ab5/x", True),
        ("matched", "ab5/xy", False),
    ],
)
def test_which_texts_can_be_forced(name: str, text: str, is_allowed: bool) -> None:
    schema = {**TOOL, "properties": {name: VALUES[name]}, "required": [name]}
    rules = find_family("glm45", "none").spell_calls([("f", schema)], several=False)
    assert rules is not None
    tokenizer = json_tokenizer(rules.marks, special=False)
    constraint = Constraint("lark", "\n".join(["start: calls", *rules.rules]), lark_marks=rules.marks)
    matcher = grammars_of(tokenizer).compile(constraint, "")
    whole = f"<tool_call>f\n<arg_key>{name}</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"
    accepted = []
    for id in tokenizer.encode(whole, False):
        accepted.append(id in (allowed(matcher, tokenizer) or []))
        if not accepted[-1]:
            break
        matcher.accept([id])
    assert all(accepted) == is_allowed


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {"type": "number"}},
        {"type": "strng"},
        {"const": "a</v>"},
        {"type": "string", "pattern": "^a|b$"},
        {"type": "string", "pattern": "a$b"},
        {"$ref": "#/$defs/loop"},
        {"anyOf": [{"type": "string"}], "minLength": 2},
        False,
    ],
)
def test_values_that_cannot_be_forced_are_refused(schema: object) -> None:
    root: dict[str, object] = {"type": "object", "$defs": {"loop": {"$ref": "#/$defs/loop"}}}
    with pytest.raises(CannotSpell, match="writes strings without quotes"):
        spell_bare("value0_0", "0_0", schema, root, End("</v>", "mark0"))


@pytest.mark.parametrize("parser", [*FAMILIES, "gemma4"])
@pytest.mark.parametrize(
    "schema",
    [
        {"type": [{}]},
        {"type": 5},
        {"type": "string", "minLength": "0}/"},
        {"type": "string", "maxLength": {}},
        {"type": "string", "pattern": "a)|(b["},
        {"type": "string", "pattern": "a\\\nb\n/"},
        {"enum": 5},
        {"anyOf": {}},
        {"anyOf": []},
        {"$ref": []},
        {"type": ["array", "string"], "items": [], "minItems": {}},
        {"enum": [[], {}, {"a": [1]}]},
    ],
)
def test_invalid_schemas_are_refused_or_stay_on_their_lines(parser: str, schema: object) -> None:
    whole: dict[str, Any] = {"type": "object", "properties": {"a": schema}, "additionalProperties": False}
    with suppress(CannotSpell):
        rules = find_family(parser, "none").spell_calls([("f", whole)], several=True)
        assert rules is not None and not any("\n" in rule for rule in rules.rules)
