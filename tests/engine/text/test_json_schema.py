"""How a schema is changed before it is compiled: which objects are closed, and which keywords are left out."""

import json
from typing import Any

import jsonschema
import pytest
from counting import lines_of
from drawing import grammars_of

from pagewire.engine.text import json_schema
from pagewire.engine.text.json_schema import tidy
from pagewire.errors import RequestError
from pagewire.ipc.messages import Constraint

from .tokenizers_for_tests import make

TOKENIZER = make("byte_level", eos_token="<|im_end|>")
GRAMMARS = grammars_of(TOKENIZER)
Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}


def record(**properties: Any) -> Schema:
    return {"type": "object", "properties": properties}


def required(schema: Schema, *names: str) -> Schema:
    return {**schema, "required": list(names)}


def variant(kind: str, **more: Any) -> Schema:
    return required(record(kind={"const": kind}, **more), "kind")


def accepts(schema: Schema, value: Any) -> bool:
    """Whether a model that follows this schema can write this value."""
    matcher = GRAMMARS.compile(Constraint("json_schema", json.dumps(schema)), "")
    try:
        matcher.accept(TOKENIZER.encode(json.dumps(value, separators=(",", ":"), ensure_ascii=False), False))
    except RequestError:
        return False
    return matcher.is_ended


BASE = record(a=TEXT)
# A schema, values that a model may write, and values that it may not, although some are instances of the schema.
CASES: dict[str, tuple[Schema, list[Any], list[Any]]] = {
    "an object": (BASE, [{}, {"a": "x"}], [{"b": 1}, {"a": "x", "b": 1}]),
    "a nested object": (record(a=record(b=TEXT)), [{"a": {"b": "x"}}], [{"a": {"c": 1}}]),
    "in a list": ({"type": "array", "items": BASE}, [[{"a": "x"}]], [[{"b": 1}]]),
    "in a tuple": ({"type": "array", "prefixItems": [BASE], "items": False}, [[{"a": "x"}]], [[{"b": 1}]]),
    "as a value": ({"type": "object", "additionalProperties": BASE}, [{"k": {"a": "x"}}], [{"k": {"b": 1}}]),
    "a reference": ({"$defs": {"B": BASE}, "$ref": "#/$defs/B"}, [{"a": "x"}], [{"b": 1}]),
    "in definitions": ({"definitions": {"B": BASE}, "allOf": [{"$ref": "#/definitions/B"}]}, [{"a": "x"}], [{"b": 1}]),
    "a tree": (
        {"$defs": {"T": record(v=TEXT, next={"$ref": "#/$defs/T"})}, "$ref": "#/$defs/T"},
        [{"v": "x", "next": {"next": {}}}],
        [{"next": {"next": {"a": 1}}}],
    ),
    "a tree by its root": (record(next={"$ref": "#"}), [{"next": {"next": {}}}], [{"next": {"a": 1}}]),
    "one of two": ({"anyOf": [BASE, record(b=TEXT)]}, [{"a": "x"}, {"b": "x"}], [{"c": 1}, {"a": "x", "b": "x"}]),
    "an object or null": ({"anyOf": [BASE, {"type": "null"}]}, [{"a": "x"}, None], [{"b": 1}]),
    "told apart by a constant": (
        {"oneOf": [variant("v1", a=TEXT), variant("v2", b=TEXT)]},
        [{"kind": "v1", "a": "x"}, {"kind": "v2", "b": "x"}],
        [{"kind": "v1", "b": "x"}, {"kind": "v2", "a": "x"}],
    ),
    "told apart by type": ({"oneOf": [BASE, {"type": "array", "items": BASE}]}, [{"a": "x"}, []], [{"b": 1}]),
    "explicitly open": ({**BASE, "additionalProperties": True}, [{"a": "x", "b": 1}], [{"a": 1}]),
    "open for numbers": ({**BASE, "additionalProperties": {"type": "integer"}}, [{"b": 1}], [{"b": "x"}]),
    "without properties": ({"type": "object"}, [{}, {"a": 1}], []),
    "no properties": (record(), [{}], [{"a": 1}]),
    "patterns": (
        {"type": "object", "patternProperties": {"^a": TEXT}},
        [{"ab": "x"}, {}],
        [{"b": "x"}, {"ab": 1}],
    ),
    "properties and patterns": (
        {**record(b=TEXT), "patternProperties": {"^a": TEXT}},
        [{"b": "x"}, {"b": "x", "ab": "x"}],
        [{"c": "x"}],
    ),
    "a required name that is not described": (required(BASE, "z"), [{"z": 1}, {"a": "x", "z": []}], [{"z": 1, "y": 1}]),
    "more properties than it names": ({**required(BASE, "a"), "minProperties": 2}, [{"a": "x", "b": 1}], [{"a": "x"}]),
    "only properties it names": ({**required(BASE, "a"), "minProperties": 1}, [{"a": "x"}], [{}, {"a": "x", "b": 1}]),
    "all of two": ({"allOf": [BASE, record(b=TEXT)]}, [{"a": "x", "b": "x"}], [{"a": "x", "c": 1}]),
    "all of two, required": (
        {"allOf": [required(BASE, "a"), required(record(b=TEXT), "b")]},
        [{"a": "x", "b": "x"}],
        [{"a": "x"}, {"a": "x", "b": "x", "c": 1}],
    ),
    "a base and more": (
        {"$defs": {"B": required(BASE, "a")}, "allOf": [{"$ref": "#/$defs/B"}, required(record(b=TEXT), "b")]},
        [{"a": "x", "b": "x"}],
        [{"b": "x"}, {"a": "x", "b": "x", "c": 1}],
    ),
    "a reference and more": (
        {"$defs": {"B": BASE}, "$ref": "#/$defs/B", **required(record(b=TEXT), "b")},
        [{"a": "x", "b": "x"}],
        [{"b": "x", "c": 1}],
    ),
    "a base of a base": (
        {
            "$defs": {"A": BASE, "B": {"$ref": "#/$defs/A"}, "C": {"allOf": [{"$ref": "#/$defs/B"}, record(c=TEXT)]}},
            "allOf": [{"$ref": "#/$defs/C"}, record(d=TEXT)],
        },
        [{"a": "x", "c": "x", "d": "x"}],
        [{"e": 1}],
    ),
    "the same property twice": (
        {"allOf": [record(p=required(record(x=TEXT), "x")), record(p=required(record(y=TEXT), "y"))]},
        [{"p": {"x": "x", "y": "x"}}],
        [{"q": 1}, {"p": {"x": "x"}}],
    ),
    "the same items twice": (
        {"allOf": [{"items": required(BASE, "a")}, {"items": required(record(b=TEXT), "b")}], "type": "array"},
        [[{"a": "x", "b": "x"}]],
        [[{"a": "x"}]],
    ),
    "a property that a pattern describes, too": (
        {**record(ab=required(record(x=TEXT), "x")), "patternProperties": {"^a": required(record(y=TEXT), "y")}},
        [{"ab": {"x": "x", "y": "x"}}],
        [{"ab": {"x": "x"}}],
    ),
    "one of two names": (
        {**record(a=TEXT, b=TEXT), "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [{"a": "x"}, {"b": "x"}, {"a": "x", "b": "x"}],
        [{}, {"a": "x", "c": 1}],
    ),
    "a base that is open": (
        {"allOf": [{**BASE, "additionalProperties": True}, record(b=TEXT)]},
        [{"a": "x", "b": "x", "c": 1}],
        [{"a": 1}],
    ),
    "any name": (
        {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": TEXT},
        [{}, {"any": "x"}],
        [{"any": 1}],
    ),
    "listed names": (
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": TEXT},
        [{}, {"b": "x"}, {"a": "x", "b": "x"}],
        [{"c": "x"}, {"a": 1}],
    ),
    "listed names, all of them": (
        {
            "$defs": {"Name": {"type": "string", "enum": ["a", "b"]}},
            "type": "object",
            "propertyNames": {"$ref": "#/$defs/Name"},
            "additionalProperties": TEXT,
            "required": ["a", "b"],
        },
        [{"a": "x", "b": "x"}],
        [{}, {"a": "x"}, {"a": "x", "b": "x", "c": "x"}],
    ),
    "one name": ({"type": "object", "propertyNames": {"const": "a"}}, [{}, {"a": [1]}], [{"b": 1}]),
    "names of a pattern": (
        {"type": "object", "propertyNames": {"pattern": "^[a-z]{2}$"}, "additionalProperties": TEXT},
        [{}, {"ab": "x"}],
        [{"abc": "x"}, {"ab": 1}],
    ),
    "short names": (
        {"type": "object", "propertyNames": {"type": "string", "maxLength": 2}, "additionalProperties": TEXT},
        [{}, {"ab": "x"}, {"é": "x"}],
        [{"abc": "x"}],
    ),
    "names that no grammar can describe": (
        {"type": "object", "propertyNames": {"pattern": "^(?!_)"}, "additionalProperties": TEXT},
        [{"a": "x"}],
        [{"a": 1}],
    ),
    "different items": ({"type": "array", "items": TEXT, "uniqueItems": True}, [[], ["a", "b"]], [[1]]),
    "a property that requires another": (
        {**record(a=TEXT, b=TEXT, c=TEXT), "required": ["c"], "dependentRequired": {"a": ["b"]}},
        [{"c": "x"}, {"a": "x", "b": "x", "c": "x"}, {"b": "x", "c": "x"}],
        [{"a": "x", "c": "x"}, {"c": "x", "d": "x"}, {"a": "x", "b": "x"}],
    ),
    "a chain of required properties": (
        {**record(a=TEXT, b=TEXT, c=TEXT), "dependentRequired": {"a": ["b"], "b": ["c"]}},
        [{}, {"c": "x"}, {"b": "x", "c": "x"}, {"a": "x", "b": "x", "c": "x"}],
        [{"a": "x"}, {"b": "x"}, {"a": "x", "b": "x"}],
    ),
    "a property that there must not be": (
        {**record(a=TEXT, b=TEXT), "not": {"required": ["a"]}},
        [{}, {"b": "x"}],
        [{"a": "x"}, {"a": "x", "b": "x"}],
    ),
    "a type that it must not have": (
        {"type": ["string", "null", "boolean"], "not": {"type": "null"}},
        ["x", True],
        [None, 1],
    ),
    "any type but one": ({"not": {"type": "object"}}, ["x", [1], True, None], [{}]),
    "values that it must not have": ({"enum": ["a", "b", 1], "not": {"enum": ["a", 2]}}, ["b", 1], ["a", 2]),
    "the other boolean": ({"type": "boolean", "not": {"const": True}}, [False], [True]),
    "nothing unevaluated": (
        {"type": "object", "properties": {"a": TEXT}, "unevaluatedProperties": False},
        [{}, {"a": "x"}],
        [{"b": "x"}],
    ),
    "counts with a point": ({"type": "string", "maxLength": 2.0}, ["ab"], ["abc"]),
    "properties named like keywords": (
        record(uniqueItems=TEXT, propertyNames=TEXT, properties=TEXT, allOf=TEXT),
        [{"uniqueItems": "x", "propertyNames": "x", "properties": "x", "allOf": "x"}],
        [{"a": 1}],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_values_that_a_schema_allows(name: str) -> None:
    schema, good, bad = CASES[name]
    jsonschema.Draft202012Validator.check_schema(schema)
    before = json.dumps(schema)
    for value in good:
        jsonschema.validate(value, schema)
        assert accepts(schema, value), value
    for value in bad:
        assert not accepts(schema, value), value
    assert json.dumps(schema) == before, "the client's schema is not changed"


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [required(record(a=TEXT, b=TEXT), "a"), required(record(b=TEXT), "b")]},
        {"oneOf": [BASE, record(b=TEXT)]},
        {"$defs": {"B": BASE}, "oneOf": [{"$ref": "#/$defs/B"}, record(b=TEXT)]},
    ],
)
def test_oneof_branches_that_exclude_each_other_only_when_closed_are_refused(schema: Schema) -> None:
    """{"a": …, "b": …} matches both branches of the first, so it is not an instance of the schema as it was sent."""
    with pytest.raises(RequestError, match="oneOf"):
        accepts(schema, {})


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {"type": "integer"}},
        {"type": "string", "not": {"const": "a"}},
        {"type": "object", "properties": {"a": TEXT}, "additionalProperties": True, "dependentRequired": {"a": ["b"]}},
        {**record(**{name: TEXT for name in "abcdef"}), "dependentRequired": {name: ["f"] for name in "abcde"}},
        {"if": {"type": "string"}, "then": {"minLength": 2}},
        {"type": "array", "contains": {"const": 1}},
    ],
)
def test_keywords_that_no_grammar_can_enforce_are_refused(schema: Schema) -> None:
    jsonschema.Draft202012Validator.check_schema(schema)
    with pytest.raises(RequestError, match="cannot be enforced"):
        accepts(schema, {})


def test_circular_references_terminate() -> None:
    circle: Schema = {
        "$defs": {"A": {"$ref": "#/$defs/B"}, "B": {"allOf": [{"$ref": "#/$defs/A"}, BASE]}},
        "$ref": "#/$defs/A",
    }
    assert tidy(circle)["$defs"]
    assert tidy({"$ref": "#"}) == {"$ref": "#"} and tidy({"$ref": "#/nowhere/1", **BASE})["$ref"] == "#/nowhere/1"


@pytest.mark.parametrize(
    "schema",
    [
        {"$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(900)}, "$ref": "#/$defs/d0"},
        {
            "$defs": {"big": record(**{f"p{i}": record(x=TEXT) for i in range(900)})},
            "patternProperties": {f"^{i}": {"$ref": "#/$defs/big"} for i in range(900)},
        },
        {"oneOf": [variant(str(i)) for i in range(2000)]},
        {"allOf": [{"$ref": "#/$defs/big"}] * 900, "$defs": {"big": record(**{f"p{i}": TEXT for i in range(900)})}},
    ],
)
def test_large_schemas_take_bounded_work(schema: Schema) -> None:
    assert lines_of(json_schema, lambda: tidy(schema)) < 1_000_000
