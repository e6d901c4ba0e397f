"""Gemma 4: `<|tool_call>call:name{key:value,…}<tool_call|>`. Strings stand between `<|"|>` and have no escapes, keys
have no quotes, everything else is as in JSON. Reasoning is `<|channel>thought`, a newline, the text, `<channel|>`."""

import json
from typing import ClassVar

from ..bare_spelling import End, spell_bare
from ..bare_values import bare_string
from ..block import PYTHON, Block, Broken, Give, Reads, Syntax, call_name, closing, one_tag, value
from ..family import Family
from ..lexer import Grammar
from ..schema_types import TYPES, referred, types_of
from ..spelling import (
    MAX_ARGUMENTS,
    NOTES,
    CallRules,
    CannotSpell,
    Schema,
    Tools,
    literal,
    named_properties,
    one_of,
    repeat,
    rule,
)

_CALL, _CALL_END, _QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'


def _string(first: str, give: Give) -> Reads[None]:
    yield from one_tag(first, (_QUOTE,))
    yield from bare_string(give, _QUOTE)


_GEMMA = Syntax("<", PYTHON.words, _string, has_trailing_comma=False, has_bare_keys=True)


def _read(tag: str, block: Block) -> Reads[str]:
    yield from one_tag((yield), ("call:",))
    name, char = yield from call_name((yield))
    if char != "{":
        raise Broken
    block.start(name)
    yield from value(char, block.argue, _GEMMA)
    block.settle()
    yield from closing(_CALL_END)
    return ""


class _Values:
    """Rules for values of schemas, each rule with a number of its own."""

    _SCALARS: ClassVar[dict[str, str]] = {"null": '"null"', "boolean": '"true" | "false"'}
    _OF_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
    _OF_STRINGS = ("minLength", "maxLength", "pattern")
    _MAX_DEPTH = 16  # of schemas and references

    def __init__(self, tool: int, root: Schema) -> None:
        self._tool, self._root = tool, root
        self._num = 0
        self.rules: list[str] = []

    def spell(self, schema: object, depth: int = 0) -> str:
        """The name of the rule for a schema's values. Raises CannotSpell."""
        self._num += 1
        numbers = f"{self._tool}_{self._num}"
        name = f"value{numbers}"
        schema = {} if schema is True else schema
        if not isinstance(schema, dict) or depth > self._MAX_DEPTH:
            raise _cannot("nested too deeply" if depth else "not a schema")
        words = schema.keys() - NOTES
        if words == {"$ref"}:
            self.rules.append(rule(name, self.spell(referred(schema["$ref"], self._root), depth + 1)))
        elif len(words) == 1 and words <= {"anyOf", "oneOf"} and isinstance(branches := schema[min(words)], list):
            self.rules.append(rule(name, " | ".join(self.spell(branch, depth + 1) for branch in branches)))
        elif words & {"enum", "const"} and words <= {"enum", "const", "type"}:
            self.rules.append(rule(name, " | ".join(self._constants(schema))))
        elif words & {"$ref", "anyOf", "oneOf", "allOf", "not", "if", "enum", "const", "patternProperties"}:
            raise _cannot("a combination of schemas")
        else:
            self.rules.append(rule(name, " | ".join(self._types(schema, numbers, depth))))
        return name

    def arguments(self, name: str) -> str:
        """The rule for all arguments of the tool `name`."""
        properties = named_properties(name, self._root)
        return self._any_object(0) if properties is None else self._object(properties, 0)

    def _constants(self, schema: Schema) -> list[str]:
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        allowed = types_of(schema, self._root)
        texts = []
        for one in values if isinstance(values, list) else []:
            if types_of({"const": one}, {}) <= allowed and not isinstance(one, list | dict):
                is_text = isinstance(one, str) and _QUOTE not in one
                texts.append(f"mark2 {literal(one)} mark2" if is_text else literal(json.dumps(one)))
        if not texts:
            raise _cannot("no value that can be written")
        return texts

    def _types(self, schema: Schema, numbers: str, depth: int) -> list[str]:
        named = schema.get("type", ["string", "number", "boolean", "null", "object", "array"])
        names: list[str] = [str(name) for name in (named if isinstance(named, list) else [named])]
        if not TYPES.issuperset(names):
            raise _cannot("an unknown type")
        ways = []
        for name in names:
            match name:
                case "string":
                    limits: Schema = {key: schema[key] for key in self._OF_STRINGS if key in schema}
                    text, end = f"text{numbers}", End(_QUOTE, "mark2")
                    self.rules += spell_bare(text, numbers, {**limits, "type": "string"}, self._root, end)
                    ways.append(f"mark2 {text}")
                case "number" | "integer":
                    bounds: Schema = {key: schema[key] for key in self._OF_NUMBERS if key in schema}
                    self.rules.append(rule(f"schema{numbers}", "%json " + json.dumps({**bounds, "type": name})))
                    ways.append(f"schema{numbers}")
                case "array":
                    ways.append(self._array(schema, depth))
                case "object":
                    ways.append(self._inner_object(schema, depth))
                case _:
                    ways.append(self._SCALARS[name])
        return ways

    def _array(self, schema: Schema, depth: int) -> str:
        least, most = schema.get("minItems", 0), schema.get("maxItems", MAX_ARGUMENTS)
        if not isinstance(least, int) or not isinstance(most, int) or "prefixItems" in schema or most < least:
            raise _cannot("a list of different values")
        if most == 0 or ("items" not in schema and depth > 2):
            return '"[" "]"'
        item = self.spell(schema.get("items", True), depth + 1)
        several = f'{item} ("," {item}){{{max(least - 1, 0)},{most - 1}}}'
        return f'"[" {several} "]"' if least else f'"[" ({several})? "]"'

    def _inner_object(self, schema: Schema, depth: int) -> str:
        if not schema.get("properties"):
            return self._any_object(depth) if schema.get("additionalProperties", True) is not False else '"{" "}"'
        inner: Schema = {key: schema[key] for key in ("type", "properties", "required") if key in schema}
        properties = named_properties("an inner object", inner)
        assert properties is not None
        return self._object(properties, depth)

    def _any_object(self, depth: int) -> str:
        if depth > 2:
            return '"{" "}"'
        pair = f'/[A-Za-z_][A-Za-z0-9_]{{0,63}}/ ":" {self.spell(True, depth + 1)}'
        return f'"{{" ({pair} ("," {pair}){{0,{MAX_ARGUMENTS - 1}}})? "}}"'

    def _object(self, properties: list[tuple[str, object, bool]], depth: int) -> str:
        """`{key:value,…}` in the order of the properties: `first` until one was written, `next` from then on."""
        self._num += 1
        at = f"{self._tool}_{self._num}"
        for i, (key, inner, is_required) in enumerate(properties):
            pair = f"{literal(key + ':')} {self.spell(inner, depth + 1)}"
            skips = ["", ""] if is_required else [f" | first{at}_{i + 1}", f" | next{at}_{i + 1}"]
            self.rules.append(rule(f"first{at}_{i}", f"{pair} next{at}_{i + 1}{skips[0]}"))
            self.rules.append(rule(f"next{at}_{i}", f'"," {pair} next{at}_{i + 1}{skips[1]}'))
        last = len(properties)
        self.rules += [rule(f"{state}{at}_{last}", literal("")) for state in ("first", "next")]
        return f'"{{" first{at}_0 "}}"'


def _cannot(what: str) -> CannotSpell:
    return CannotSpell(
        f"a parameter cannot be forced on this model, which writes values in a form of its own: its schema is {what}",
        "parameters",
    )


def _spell(tools: Tools, several: bool) -> CallRules:
    rules = [rule("calls", repeat("call", "", several))]
    rules += one_of("call", ["mark0", literal("call:"), "name", "arguments", "mark1"], tools)
    for i, (name, schema) in enumerate(tools):
        values = _Values(i, schema)
        rules += [rule(f"arguments{i}", values.arguments(name)), *values.rules]
    return CallRules(rules, (_CALL, _CALL_END, _QUOTE))


GEMMA4 = Family(
    calls=Grammar(_read, tags=(_CALL,), marks=(_CALL_END, _QUOTE)),
    spell=_spell,
    shows_calls=lambda template: _CALL in template,
    reasoning=("<|channel>thought\n", "<channel|>"),
    shows_reasoning=lambda template: "<|channel>" in template and "<channel|>" in template,
)
