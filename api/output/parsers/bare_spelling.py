"""Rules for values that are written without quotes, so that `bare_values` reads them back as what the schema allows.

Strings become terminals of text that does not contain the value's end, everything else `%json`. Where a schema allows
both, texts that would be read as another value are left out.
"""

import json
import re
from typing import NamedTuple

from .bare_values import as_json
from .schema_types import TYPES, referred, type_of, types_of
from .spelling import NOTES, CannotSpell, Schema, literal, rule

_NOT_STRINGS = TYPES - {"string", "integer"}
_OF_STRINGS = {"minLength", "maxLength", "pattern", "format"}
_OF_OTHERS = {
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "items", "prefixItems", "minItems",
    "maxItems", "uniqueItems", "properties", "required", "additionalProperties",
}  # fmt: skip
_MAX_DEPTH = 8  # of references and branches
# Whatever begins like a value that is not a string: words and numbers by themselves, and brackets with what follows.
_LIKE_A_VALUE = r"\s*((true|false|null|True|False|None|-?[0-9][-+.0-9eE]*)\s*|[{\[](?s:.*))"
_ANY_TEXT = "(?s:.*)"


class End(NamedTuple):
    """What comes after a value."""

    text: str
    mark: str  # the rule of that text, which may be a special token
    pad: str = ""  # see `bare_value`


def spell_bare(name: str, numbers: str, schema: object, root: Schema, end: End) -> list[str]:
    """The rule `name` and those it needs: a value that `schema` allows, and its end. `numbers` makes names of rules
    unique: the tool's and the argument's, as in `0_1`. Raises CannotSpell."""
    texts, other = _split(schema, root, _MAX_DEPTH)
    types = types_of(schema, root)
    rules: list[str] = []
    ways: list[str] = []
    if terminals := [one for text in texts if (one := _terminal(text, types, end)) is not None]:
        rules.append(f"TEXT{numbers}: {' | '.join(terminals)}")
        # A terminal takes as many characters as it can, so it has to hold an end that is text.
        rules.append(f"WHOLE{numbers}: TEXT{numbers} {literal(end.pad + end.text)}")
        ways.append(f"WHOLE{numbers}")
        if end.pad:
            rules.append(f"PADDED{numbers}: TEXT{numbers} {literal(end.pad)}")
        ways.append(f"{'PADDED' if end.pad else 'TEXT'}{numbers} {end.mark}")
    if other is not None:
        definitions: Schema = {key: root[key] for key in ("$defs", "definitions") if key in root}
        rules.append(rule(f"schema{numbers}", "%json " + json.dumps({**other, **definitions})))
        ways.append(f"schema{numbers} {literal(end.pad)} {end.mark}" if end.pad else f"schema{numbers} {end.mark}")
    if not ways:
        raise _cannot("no value that it may have can be written")
    if end.pad:
        ways = [f"{literal(end.pad)} {way}" for way in ways]
    return [rule(name, " | ".join(ways)), *rules]


class _Text(NamedTuple):
    """Strings that a value may be: one, or those that match a regular expression."""

    constant: str | None
    pattern: str = ""


def _terminal(text: _Text, types: frozenset[str], end: End) -> str | None:
    if text.constant is not None:
        read = as_json(text.constant, types, end.text, end.pad)
        if read is None or json.loads(read) != text.constant:
            return None
        return literal(text.constant)
    terminal = f"/{text.pattern}/ & ~/{_ANY_TEXT}{_regex(end.text)}{_ANY_TEXT}/"
    if types != {"string"}:
        terminal += f" & ~/{_LIKE_A_VALUE}/"
    return f"({terminal})"


def _split(schema: object, root: Schema, depth: int) -> tuple[list[_Text], Schema | None]:
    """The strings that a schema allows, and the schema of all else; None if there is nothing else."""
    if schema is True:
        schema = {}
    if not isinstance(schema, dict) or depth == 0:
        raise _cannot("its schema cannot be written without quotes")
    words = schema.keys() - NOTES
    types = types_of(schema, root)
    if "string" not in types:
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
        rest = [value for value in values if not isinstance(value, str)]
        return [_Text(value) for value in values if isinstance(value, str)], ({"enum": rest} if rest else None)
    if words <= {"type"} | _OF_STRINGS | _OF_OTHERS:
        named = schema.get("type", sorted(_NOT_STRINGS))
        names = [name for name in (named if isinstance(named, list) else [named]) if name != "string"]
        if not TYPES.issuperset(names):
            raise _cannot("its schema names an unknown type")
        rest_of_it: Schema = {key: schema[key] for key in schema if key not in _OF_STRINGS}
        return [_Text(None, _text_pattern(schema))], ({**rest_of_it, "type": names} if names else None)
    raise _cannot("its schema cannot be written without quotes")


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _text_pattern(schema: Schema) -> str:
    """A regular expression of the library for the strings of a schema."""
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    text = f"(?s:.{{{least},{most}}})" if least or most != "" else _ANY_TEXT
    if "pattern" not in schema:
        return text
    pattern = _searched(str(schema["pattern"]))
    return pattern if text == _ANY_TEXT else f"{text}/ & /{pattern}"


def _searched(pattern: str) -> str:
    """A schema's pattern, which may match anywhere in a string, as one that matches all of it."""
    starts, ends = pattern.startswith("^"), bool(re.search(r"(?<!\\)(\\\\)*\$$", pattern))
    inner = pattern[starts : len(pattern) - ends]
    outside = re.sub(r"\\.|\[\^?\]?(\\.|[^\]])*\]", "", inner, flags=re.DOTALL)  # of classes and escapes
    if re.search(r"[$^]", outside) or ((starts or ends) and "|" in re.sub(r"\([^()]*\)", "", outside)):
        raise _cannot("its pattern has anchors inside")
    inner = re.sub(r"\\d", "[0-9]", inner)  # and not every digit of Unicode
    inner = re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", inner).replace("\n", r"\n")
    return f"{'' if starts else _ANY_TEXT}({inner}){'' if ends else _ANY_TEXT}"


def _regex(text: str) -> str:
    return re.sub(r"([^A-Za-z0-9 _<>:\"-])", r"\\\1", text)


def _cannot(why: str) -> CannotSpell:
    return CannotSpell(
        f"one of its parameters cannot be forced on this model, which writes strings without quotes: {why}",
        "parameters",
    )
