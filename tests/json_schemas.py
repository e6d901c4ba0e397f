"""Random JSON schemas of common keywords. All instances of a schema are short."""

import random
import re
from collections.abc import Callable
from typing import Any

import jsonschema

Schema = dict[str, Any]

FORMATS = ("date", "time", "date-time", "email", "ipv4", "ipv6", "uuid", "hostname")
PATTERNS = ("^[a-z]{1,8}$", "^[A-Z]{2}-\\d{3}$", "^(yes|no|maybe)$", "^[^\\s]{3,6}$", "^\\+?[0-9]{4,10}$", "^x")
WORDS = ("red", "green", "blau", "größe", "a b", 'q"t', "line\nend", "🙂", "")


def make_schema(seed: int) -> Schema:
    """The schema of this seed."""
    return _Maker(random.Random(seed)).root()


def check_instance(schema: Schema, value: object) -> None:
    """Raises unless `value` is an instance of `schema`, formats included. Properties that are not listed are forbidden
    where the schema lists properties and does not mention others."""
    for one in (schema, closed(schema)):
        jsonschema.Draft202012Validator(one, format_checker=_FORMATS).validate(value)


def closed(schema: Any, is_part: bool = False) -> Any:
    """The schema with unlisted properties forbidden explicitly. `is_part`: the schema is a part of allOf."""
    if not isinstance(schema, dict):
        return schema
    found = dict(schema)
    for word in ("properties", "$defs"):
        if word in found:
            found[word] = {name: closed(one) for name, one in found[word].items()}
    for word in ("anyOf", "oneOf", "allOf", "prefixItems"):
        if word in found:
            found[word] = [closed(one, word == "allOf") for one in found[word]]
    for word in ("items", "additionalProperties"):
        if word in found:
            found[word] = closed(found[word])
    if ("properties" in found or "allOf" in found) and "additionalProperties" not in found and not is_part:
        found["unevaluatedProperties"] = False
    return found


_FORMATS = jsonschema.FormatChecker(("date", "email", "ipv4", "ipv6", "uuid"))
_TIME = r"([01]\d|2[0-3]):[0-5]\d:([0-5]\d|60)(\.\d+)?([zZ]|[+-]([01]\d|2[0-3]):[0-5]\d)"  # RFC 3339
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_PATTERNS = {
    "time": _TIME,
    "date-time": rf"\d{{4}}-\d\d-\d\d[tT ]{_TIME}",
    "hostname": rf"{_LABEL}(\.{_LABEL})*",
}


def _matches(pattern: str) -> Callable[[object], bool]:
    return lambda value: not isinstance(value, str) or re.fullmatch(pattern, value) is not None


for _format, _pattern in _PATTERNS.items():
    _FORMATS.checks(_format)(_matches(_pattern))


class _Maker:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._definitions: dict[str, Schema] = {}

    def root(self) -> Schema:
        kinds = (self._object, self._object, self._object, self._array, self._union, self._reference, self._scalar)
        schema = self._rng.choice(kinds)(3)
        if self._definitions:
            schema = {**schema, "$defs": self._definitions}
        if self._rng.random() < 0.2:
            schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "T", **schema}
        return schema

    def _any(self, levels: int) -> Schema:
        if levels <= 0:
            return self._scalar(0)
        kinds = (self._scalar, self._scalar, self._scalar, self._object, self._array, self._union, self._reference)
        schema = self._rng.choice(kinds)(levels - 1)
        return {**schema, "description": "…"} if self._rng.random() < 0.2 else schema

    def _scalar(self, levels: int) -> Schema:
        kinds = (
            self._string,
            self._string,
            self._integer,
            self._number,
            self._enum,
            lambda: {"type": "boolean"},
            lambda: {"type": "null"},
            lambda: {"const": self._rng.choice([1, "x", None, True, [1, 2], {"a": 1}])},
            lambda: {"type": self._rng.sample(["integer", "boolean", "null"], 2)},
        )
        return self._rng.choice(kinds)()

    def _string(self) -> Schema:
        kind = self._rng.randrange(4)
        if kind == 0:
            return {"type": "string", "format": self._rng.choice(FORMATS)}
        if kind == 1:
            pattern = self._rng.choice(PATTERNS)
            return {"type": "string", "pattern": pattern, **({"maxLength": 9} if pattern == "^x" else {})}
        shortest = self._rng.randrange(4)
        return {"type": "string", "minLength": shortest, "maxLength": shortest + self._rng.randrange(12)}

    def _integer(self) -> Schema:
        low = self._rng.randrange(-1000, 1000)
        kind = self._rng.randrange(4)
        if kind == 0:
            return {"type": "integer", "minimum": low, "maximum": low + self._rng.randrange(500)}
        if kind == 1:
            return {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + 2 + self._rng.randrange(50)}
        if kind == 2:
            return {"type": "integer", "multipleOf": self._rng.choice([2, 5, 10]), "minimum": 0, "maximum": 10_000}
        return {"type": "integer", "minimum": 0, "maximum": 10 ** self._rng.randrange(1, 12)}

    def _number(self) -> Schema:
        low = self._rng.choice([-2.5, 0, 0.001, 17, -1000])
        return {"type": "number", "minimum": low, "maximum": low + self._rng.choice([0.5, 1, 12.75, 10_000])}

    def _enum(self) -> Schema:
        values: list[Any] = [*self._rng.sample(WORDS, self._rng.randrange(1, 5))]
        if self._rng.random() < 0.3:
            values += [3, None, False, 2.5]
        return {"enum": values}

    def _object(self, levels: int) -> Schema:
        names = self._rng.sample(["id", "name", "größe", "a b", "kind", "x-1", "tags", "items", "$id"], 4)
        properties = {name: self._any(levels - 1) for name in names[: self._rng.randrange(5)]}
        required = [name for name in properties if self._rng.random() < 0.6]
        schema: Schema = {"type": "object", "properties": properties, "required": required}
        match self._rng.randrange(6):
            case 0:
                schema["additionalProperties"] = self._scalar(0)
                schema["required"] = list(properties)
                schema["maxProperties"] = len(properties) + 2
                if self._rng.random() < 0.5:
                    schema["propertyNames"] = {"type": "string"}
            case 1:
                names = self._rng.sample(["first", "second", "größe"], 2)
                schema = {"type": "object", "propertyNames": {"enum": names}, "additionalProperties": self._scalar(0)}
            case 2:
                more = {"more": self._any(levels - 1)}
                schema = {"allOf": [schema, {"type": "object", "properties": more, "required": ["more"]}]}
            case 3:
                schema["additionalProperties"] = False
        return schema

    def _array(self, levels: int) -> Schema:
        if self._rng.random() < 0.25:
            return {
                "type": "array",
                "prefixItems": [self._any(levels - 1) for _ in range(2)],
                "items": False,
                "minItems": self._rng.randrange(3),
            }
        least = self._rng.randrange(3)
        return {
            "type": "array",
            "items": self._any(levels - 1),
            "minItems": least,
            "maxItems": least + self._rng.randrange(4),
        }

    def _union(self, levels: int) -> Schema:
        kind = self._rng.randrange(3)
        if kind == 0:
            return {"anyOf": [self._any(levels - 1) for _ in range(self._rng.randrange(2, 4))]}
        if kind == 1:  # told apart by a constant, as typed unions are
            return {
                "oneOf": [
                    {
                        "type": "object",
                        "properties": {"kind": {"const": name}, "value": self._any(levels - 1)},
                        "required": ["kind", "value"],
                    }
                    for name in ("first", "second")
                ]
            }
        return {"oneOf": [{"type": "null"}, self._string(), {"type": "array", "items": self._integer(), "maxItems": 2}]}

    def _reference(self, levels: int) -> Schema:
        name = f"d{len(self._definitions)}"
        self._definitions[name] = {}
        self._definitions[name] = self._any(levels - 1)
        if self._rng.random() < 0.3:  # a tree
            inner = {"type": "array", "items": {"$ref": f"#/$defs/{name}"}, "maxItems": 1}
            self._definitions[name] = {
                "type": "object",
                "properties": {"value": self._definitions[name], "next": inner},
                "required": ["value"],
            }
        return {"$ref": f"#/$defs/{name}"}
