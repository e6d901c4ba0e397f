"""Rules for values that are written without quotes, so that `bare_values` reads them back as what the schema allows.

Strings become terminals of text that does not contain the value's end, everything else `%json`. Where a schema allows
both, texts that would be read as another value are left out.
"""

import json
from typing import NamedTuple

from .bare_values import as_json
from .schema_types import TYPES, referred, type_of, types_of
from .spelling import NOTES, CannotSpell, Schema, literal, rule

_OF_STRINGS = {"minLength", "maxLength", "pattern", "format"}
_OF_OTHERS = {
    "items", "prefixItems", "minItems",
    "maxItems", "uniqueItems", "properties", "required", "additionalProperties",
}  # fmt: skip
_MAX_DEPTH = 8  # of references and branches
_OF_NUMBERS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
# What is read as a value that is not a string: words and numbers by themselves, and brackets with what follows.
_LIKE_A_VALUE = r"\s*((true|false|null|True|False|None|-?[0-9][-+.0-9eE]*)\s*|[{\[](?s:.*))"
_LIKE_A_NUMBER = r"\s*[-0-9](?s:.*)"
_NUMBERS = {"integer": "-?(0|[1-9][0-9]{0,14})", "number": r"-?(0|[1-9][0-9]{0,14})(\.[0-9]{1,14})?"}
_IN_LARK = {r"\d": "[0-9]", "/": r"\/", "\n": r"\n", "\\\n": r"\n"}  # \d would be every digit of Unicode
_ANY_TEXT = "(?s:.*)"


class End(NamedTuple):
    """What comes after a value."""

    text: str
    mark: str  # the rule of that text, which may be a special token
    pad: str = ""  # see `bare_value`


def spell_bare(name: str, numbers: str, schema: object, root: Schema, end: End) -> list[str]:
    """The rule `name` and those it needs: a value that `schema` allows, and its end. `numbers` makes names of rules
    unique: the tool's and the argument's, as in `0_1`. Raises CannotSpell."""
    types = types_of(schema, root)
    texts, other = _split(schema, root, _MAX_DEPTH) if "string" in types else ([], schema)
    begins = types_of(other, root) if other is not None else frozenset()
    rules: list[str] = []
    ways: list[str] = []
    if terminals := [one for text in texts if (one := _terminal(text, types, begins, end)) is not None]:
        rules.append(f"TEXT{numbers}: {' | '.join(terminals)}")
        # A terminal takes as many characters as it can, so it has to hold an end that is text.
        rules.append(f"WHOLE{numbers}: TEXT{numbers} {literal(end.pad + end.text)}")
        ways.append(f"WHOLE{numbers}")
        if end.pad:
            rules.append(f"PADDED{numbers}: TEXT{numbers} {literal(end.pad)}")
        ways.append(f"{'PADDED' if end.pad else 'TEXT'}{numbers} {end.mark}")
    if other is not None:
        definitions: Schema = {key: root[key] for key in ("$defs", "definitions") if key in root}
        inner = {**other, **definitions} if isinstance(other, dict) else other
        rules.append(rule(f"schema{numbers}", "%json " + json.dumps(inner)))
        ways.append(f"schema{numbers} {literal(end.pad)} {end.mark}" if end.pad else f"schema{numbers} {end.mark}")
    if not ways:
        raise _cannot("no value that it may have can be written")
    if end.pad:
        ways = [f"{literal(end.pad)} {way}" for way in ways]
    return [rule(name, " | ".join(ways)), *rules]


class _Text(NamedTuple):
    """Texts that a value may be: one, or those that match a regular expression."""

    constant: str | None
    pattern: str = ""
    is_json: bool = False  # not a string, but a value as JSON writes it


def _terminal(text: _Text, types: frozenset[str], begins: frozenset[str], end: End) -> str | None:
    """A terminal for texts; None if none of them can be written. `begins`: the types of values that are `%json`. A
    terminal takes as many characters as it can, so it must not begin as one of those."""
    if text.constant is not None:
        read = as_json(text.constant, types, end.text, end.pad)
        wanted = json.loads(text.constant) if text.is_json else text.constant
        return literal(text.constant) if read is not None and json.loads(read) == wanted else None
    if text.is_json:
        return f"/{text.pattern}/"
    terminal = f"/{text.pattern}/ & ~/{_ANY_TEXT}{_regex(end.text)}{_ANY_TEXT}/"
    if types != {"string"}:
        terminal += f" & ~/{_LIKE_A_VALUE}/"
    if "integer" in begins:
        terminal += f" & ~/{_LIKE_A_NUMBER}/"
    return f"({terminal})"


def _split(schema: object, root: Schema, depth: int) -> tuple[list[_Text], Schema | None]:
    """The texts that a schema of strings and other types allows, and the schema of all else; None if there is none."""
    if schema is True:
        schema = {}
    if not isinstance(schema, dict) or depth == 0:
        raise _cannot("its schema cannot be written without quotes")
    words = schema.keys() - NOTES
    types = types_of(schema, root)
    if types <= {"object", "array"}:
        return [], schema
    if words == {"$ref"}:
        return _split(referred(schema["$ref"], root), root, depth - 1)
    if len(words) == 1 and words <= {"anyOf", "oneOf"}:
        (word,) = words
        parts = [_split(branch, root, depth - 1) for branch in _list(schema[word])]
        others = [other for _, other in parts if other is not None]
        return [text for texts, _ in parts for text in texts], ({"anyOf": others} if others else None)
    if words == {"allOf"} and len(branches := _list(schema["allOf"])) == 1:
        return _split(branches[0], root, depth - 1)
    if words & {"enum", "const"} and words <= {"enum", "const", "type"}:
        values = _list(schema["enum"]) if "enum" in words else [schema["const"]]
        values = [value for value in values if type_of(value) in types and schema.get("const", value) == value]
        large = [value for value in values if isinstance(value, list | dict)]
        return [_constant(value) for value in values if value not in large], ({"enum": large} if large else None)
    if words <= {"type"} | _OF_STRINGS | _OF_OTHERS | _OF_NUMBERS:
        return _split_types(schema)
    raise _cannot("its schema cannot be written without quotes")


def _constant(value: object) -> _Text:
    return _Text(value) if isinstance(value, str) else _Text(json.dumps(value), is_json=True)


def _split_types(schema: Schema) -> tuple[list[_Text], Schema | None]:
    """`_split` of a schema without branches."""
    named = schema.get("type", sorted(TYPES - {"integer"}))
    names = {str(name) for name in (named if isinstance(named, list) else [named])}
    if not TYPES.issuperset(names):
        raise _cannot("its schema names an unknown type")
    texts = [_Text(None, _text_pattern(schema))] if "string" in names else []
    texts += [_constant(None)] if "null" in names else []
    texts += [_constant(True), _constant(False)] if "boolean" in names else []
    rest = names & {"object", "array"}
    if schema.keys() & _OF_NUMBERS:
        rest |= names & _NUMBERS.keys()
    else:
        texts += [_Text(None, _NUMBERS[name], is_json=True) for name in sorted(names & _NUMBERS.keys())]
    others: Schema = {key: schema[key] for key in schema if key not in _OF_STRINGS}
    return texts, ({**others, "type": sorted(rest)} if rest else None)


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _text_pattern(schema: Schema) -> str:
    """A regular expression of the library for the strings of a schema."""
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    if not isinstance(least, int) or not (most == "" or isinstance(most, int)):
        raise _cannot("its length has bounds that are not integers")
    text = f"(?s:.{{{least},{most}}})" if least or most != "" else _ANY_TEXT
    if "pattern" not in schema:
        return text
    pattern = _searched(str(schema["pattern"]))
    return pattern if text == _ANY_TEXT else f"{text}/ & /{pattern}"


def _searched(pattern: str) -> str:
    """A schema's pattern, which may match anywhere in a string, as one that matches all of it."""
    starts, ends, has_branches = pattern.startswith("^"), False, False
    at, depth, is_class = int(starts), 0, False
    parts: list[str] = []
    while at < len(pattern):
        char = pattern[at : at + 2] if pattern[at] == "\\" else pattern[at]
        at += len(char)
        if is_class:
            is_class = char != "]"
        elif char == "$" and at == len(pattern):
            ends = True
            break
        elif char in ("^", "$"):
            raise _cannot("its pattern has anchors inside")
        else:
            is_class = char == "["
            depth += (char == "(") - (char == ")")
            has_branches |= char == "|" and depth == 0
        parts.append(_IN_LARK.get(char, char))
    if has_branches and (starts or ends):
        raise _cannot("its pattern has anchors inside")
    return f"{'' if starts else _ANY_TEXT}({''.join(parts)}){'' if ends else _ANY_TEXT}"


def _regex(text: str) -> str:
    return "".join(char if char.isalnum() or char in "<>_:" else f"\\{char}" for char in text)


def _cannot(why: str) -> CannotSpell:
    return CannotSpell(
        f"one of its parameters cannot be forced on this model, which writes strings without quotes: {why}",
        "parameters",
    )
