"""The types that schemas allow, also schemas that are invalid or refer to themselves."""

import pytest

from pagewire.api.output.parsers.schema_types import TYPES, argument_schema, types_of

ROOT = {
    "properties": {"a": {"type": "string"}},
    "additionalProperties": {"type": "null"},
    "$defs": {"b/c": {"type": "array"}, "loop": {"$ref": "#/$defs/loop"}},
}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        (True, TYPES),
        ({}, TYPES),
        ({"type": "number"}, {"number", "integer"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"type": "strng"}, TYPES),
        ({"type": 5}, TYPES),
        ({"enum": ["a", 1, 1.5, True, None, [], {}]}, TYPES),
        ({"enum": ["a", None], "type": "string"}, {"string"}),
        ({"const": 2.0}, {"integer"}),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, {"string", "null"}),
        ({"allOf": [{"type": ["string", "null"]}, {"type": ["null", "array"]}]}, {"null"}),
        ({"$ref": "#/$defs/b~1c"}, {"array"}),
        ({"$ref": "#/nowhere"}, TYPES),
        ({"$ref": "https://example.com"}, TYPES),
        ({"$ref": "#/$defs/loop"}, TYPES),
        ({"anyOf": [{"anyOf": [{"$ref": "#/$defs/loop"}] * 9}] * 99}, TYPES),
    ],
)
def test_types(schema: object, types: set[str]) -> None:
    assert types_of(schema, ROOT) == types


def test_the_schema_of_an_argument() -> None:
    assert argument_schema({"f": ROOT}, "f", "a")[0] == {"type": "string"}
    assert argument_schema({"f": ROOT}, "f", "b")[0] == {"type": "null"}
    assert argument_schema({"f": {}}, "f", "a")[0] is True
    assert argument_schema({"f": None}, "f", "a")[0] is True
    assert argument_schema({}, "g", "a")[0] is True
