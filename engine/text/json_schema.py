"""Rewrites a client's JSON schema for the grammar library.

Keywords that cannot be enforced are left out: `uniqueItems`, most of `propertyNames`, formats that are not standard.
Objects that name properties and do not mention others are closed, as in OpenAI's strict mode, because a model would
invent properties. A schema's own `additionalProperties` stays as it is.

Closing never makes a schema unsatisfiable. Where several schemas describe one object (`allOf`, `$ref` with siblings,
`anyOf` beside `properties`), each of them stays open, and the object is closed with the names of all of them. Where two
of them describe the same property, that property's schemas stay open.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from urllib.parse import unquote

Schema = dict[str, object]

# Others are annotations.
_STANDARD_FORMATS = (
    "date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6",
    "uri", "uri-reference", "iri", "iri-reference", "uuid", "uri-template", "json-pointer", "relative-json-pointer",
    "regex",
)  # fmt: skip
_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_LISTS_OF_SCHEMAS = ("anyOf", "allOf", "oneOf", "prefixItems")
_ONE_SCHEMA = ("items", "additionalProperties")
_IN_PLACE = ("allOf", "anyOf", "oneOf")  # their schemas describe the same value as the schema that has them
_OF_AN_OBJECT = frozenset(
    {"properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties"}
)
# An object with one of these may need a property that the schema does not name.
_OPENING = ("unevaluatedProperties", "dependentRequired", "dependentSchemas", "$dynamicRef", "not", "if")
# Whatever else describes the same object.
_APPLICATORS = frozenset(
    {"allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "not", "if", "dependentSchemas", "dependentRequired"}
)
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_TYPES = ("null", "boolean", "number", "string", "array", "object")
_MAX_DEPENDENT = 4  # optional properties of `dependentRequired`, which double the alternatives each
_MAX_BRANCHES = 100  # of a oneOf, for comparing each with each
_NOT_A_REGULAR_LANGUAGE = re.compile(r"\(\?<?[=!]|\\[1-9]|\\k<")


def tidy(schema: Schema) -> Schema:
    """A new schema without annotations and with closed objects."""
    cleaned = _Cleaner(schema).clean(schema)
    _Closer(cleaned).close()
    return cleaned


class _Root:
    """Resolves the references of one schema."""

    def __init__(self, root: Schema) -> None:
        self._root = root

    def target(self, reference: object) -> object:
        """What a reference refers to; None if that is not in the schema."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        found: object = self._root
        for part in unquote(reference[1:]).split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict):
                found = found.get(name)
            elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            else:
                return None
        return found

    def behind(self, schema: object) -> object:
        """`schema`, with its `$ref` followed if it has one."""
        for _ in range(64):
            if not (isinstance(schema, dict) and "$ref" in schema):
                break
            schema = self.target(schema["$ref"])
        return schema


class _Cleaner(_Root):
    """Copies a schema without keywords that cannot be enforced."""

    def clean(self, schema: Schema) -> Schema:
        cleaned: Schema = {}
        for word, value in schema.items():
            if word == "uniqueItems" or (word == "format" and value not in _STANDARD_FORMATS):
                continue
            if word in _SCHEMAS_BY_NAME and isinstance(value, dict):
                value = {name: self._clean_any(one) for name, one in value.items()}
            elif word in _LISTS_OF_SCHEMAS and isinstance(value, list):
                value = [self._clean_any(one) for one in value]
            elif word in _ONE_SCHEMA:
                value = self._clean_any(value)
            elif word in _COUNTS and isinstance(value, float) and value.is_integer():
                value = int(value)
            cleaned[word] = value
        if cleaned.get("unevaluatedProperties") is False and not _APPLICATORS & cleaned.keys():
            del cleaned["unevaluatedProperties"]  # nothing else evaluates properties
            cleaned.setdefault("additionalProperties", False)
        if "not" in cleaned:
            _exclude(cleaned)
        if "dependentRequired" in cleaned:
            cleaned = _spell_out(cleaned)
        if "propertyNames" in cleaned:
            self._name(cleaned, cleaned.pop("propertyNames"))
        return cleaned

    def _clean_any(self, schema: object) -> object:
        return self.clean(schema) if isinstance(schema, dict) else schema

    def _name(self, schema: Schema, names: object) -> None:
        """Expresses `propertyNames` with keywords that the library knows, where that is possible."""
        names = self.behind(names)
        listed, patterns = schema.get("properties") or {}, schema.get("patternProperties")
        if not isinstance(names, dict) or patterns or not isinstance(listed, dict):
            return
        others = schema.get("additionalProperties", True)
        allowed = names.get("enum", [names["const"]] if "const" in names else None)
        if isinstance(allowed, list):
            own = {name: one for name, one in listed.items() if name in allowed}
            more = {} if others is False else {name: others for name in allowed if isinstance(name, str)}
            schema |= {"properties": {**own, **{n: one for n, one in more.items() if n not in own}}}
            schema["additionalProperties"] = False
        elif not listed and others is not False and (pattern := _pattern(names)) is not None:
            schema |= {"patternProperties": {pattern: others}, "additionalProperties": False}


def _pattern(names: Schema) -> str | None:
    """The regular expression that names have to match; None if there is none or it cannot be enforced."""
    pattern, least, most = names.get("pattern"), names.get("minLength", 0), names.get("maxLength")
    if isinstance(pattern, str):
        return None if _NOT_A_REGULAR_LANGUAGE.search(pattern) else pattern
    if not isinstance(least, int) or not isinstance(most, int | None) or not (least or most is not None):
        return None
    return f"^(?s:.{{{least},{'' if most is None else most}}})$"


def _exclude(schema: Schema) -> None:
    """Expresses `not` with keywords that the library knows, in place, where that is possible: types, listed values, and
    a property that there must not be."""
    match schema["not"]:
        case {"type": str() | list() as types, **others} if not others:
            excluded = {types} if isinstance(types, str) else set(types)
            given = schema.get("type", list(_TYPES))
            kept = [one for one in (given if isinstance(given, list) else [given]) if one not in excluded]
            is_split = ("integer" in excluded) != ("number" in excluded) and {"integer", "number"} & {*kept}
            if kept and not is_split and excluded <= {*_TYPES, "integer"}:
                schema["type"] = kept
                del schema["not"]
        case {"enum": list(values), **others} if not others:
            _exclude_values(schema, values)
        case {"const": value, **others} if not others:
            _exclude_values(schema, [value])
        case {"required": [str(name)], **others} if not others and _is_closed(schema):
            properties = _dict(schema, "properties")
            if name not in _list(schema, "required"):
                schema["properties"] = {one: value for one, value in properties.items() if one != name}
                del schema["not"]


def _exclude_values(schema: Schema, values: list[object]) -> None:
    listed = [True, False] if schema.get("type") == "boolean" else _list(schema, "enum")
    excluded = {json.dumps(value, sort_keys=True) for value in values}
    kept = [value for value in listed if json.dumps(value, sort_keys=True) not in excluded]
    if kept:
        schema["enum"] = kept
        del schema["not"]


def _spell_out(schema: Schema) -> Schema:
    """Expresses `dependentRequired` as alternatives, in which a property and what it requires is there, or it is not.
    Where that is not possible, it stays."""
    needs = _dict(schema, "dependentRequired")
    if not _is_closed(schema) or not all(isinstance(names, list) for names in needs.values()):
        return schema
    outer: Schema = {word: schema[word] for word in ("$defs", "definitions", "$schema", "$id") if word in schema}
    inner = {word: value for word, value in schema.items() if word not in (*outer, "dependentRequired")}
    optional = [name for name in needs if name in _dict(schema, "properties") and name not in _list(schema, "required")]
    if len(optional) > _MAX_DEPENDENT:
        return schema
    found: list[Schema] = []
    for number in range(1 << len(optional)):
        absent = {name for i, name in enumerate(optional) if number >> i & 1}
        required = dict.fromkeys(one for one in _list(schema, "required") if isinstance(one, str))
        required |= dict.fromkeys(name for name in optional if name not in absent)
        while more := [one for name in required for one in _list(needs, name) if one not in required]:
            required |= dict.fromkeys(one for one in more if isinstance(one, str))
        properties = {name: one for name, one in _dict(schema, "properties").items() if name not in absent}
        if required.keys() <= properties.keys():
            found.append({**inner, "properties": properties, "required": [*required], "additionalProperties": False})
    if not found:
        return schema
    return {**outer, "anyOf": found} if len(found) > 1 else {**outer, **found[0]}


def _is_closed(schema: Schema) -> bool:
    """Whether an object has no other properties than those that this schema names, or will have none."""
    is_alone = not (_APPLICATORS | {"not", "patternProperties"}) & (schema.keys() - {"not", "dependentRequired"})
    is_object = schema.get("type") == "object"
    return is_alone and is_object and "properties" in schema and schema.get("additionalProperties", False) is False


class _Closer(_Root):
    """Closes the objects of a schema, in place."""

    def __init__(self, root: Schema) -> None:
        super().__init__(root)
        self._alone: list[Schema] = []  # those that describe their value alone, or before others do
        self._shared: set[int] = set()  # ids of those that describe a value together with others; they stay open
        self._shared_deep: set[int] = set()  # ids of those whose inner schemas are shared as well
        self._look(root, True)

    def close(self) -> None:
        # Collect all names before changing anything: a schema may be part of another one's place.
        open_ones = [one for one in self._alone if id(one) not in self._shared and "additionalProperties" not in one]
        for schema, names in [(one, self._names(one)) for one in open_ones]:
            if names is not None:
                for word, of_word in zip(("properties", "patternProperties"), names, strict=True):
                    own = schema.get(word, {})
                    assert isinstance(own, dict), own
                    if of_word:
                        schema[word] = {**own, **{name: {} for name in of_word if name not in own}}
                schema["additionalProperties"] = False

    def _look(self, schema: object, is_alone: bool) -> None:
        """Sorts a schema and all its inner ones into alone and shared."""
        if not isinstance(schema, dict):
            return
        parts = [one for word in _IN_PLACE for one in _list(schema, word)]
        num_words = len(_list(schema, "allOf")) + sum(word in schema for word in ("anyOf", "oneOf", "$ref"))
        if is_alone and num_words == 1 and not _OF_AN_OBJECT & schema.keys():
            # Each part is the whole description. Branches of oneOf that exclude each other only if they are closed
            # stay open, or an answer could be an instance of two of them as the client wrote them.
            is_alone = "oneOf" not in schema or self._exclude_each_other(parts)
            if not is_alone:
                self._share(schema)
        elif is_alone:
            self._alone.append(schema)
            self._look_for_overlaps(schema)
            is_alone = not num_words
        if num_words and not is_alone:
            for part in (*parts, self.target(schema.get("$ref"))):
                self._share(part)
        for part in parts:
            self._look(part, is_alone)
        for child in _children(schema):
            self._look(child, True)

    def _share(self, schema: object, *, deep: bool = False) -> None:
        """Marks this schema, those in its place and, if `deep`, all inner ones as shared."""
        waiting, seen = [schema], self._shared_deep if deep else self._shared
        while waiting:
            one = waiting.pop()
            if isinstance(one, dict) and id(one) not in seen:
                seen.add(id(one))
                self._shared.add(id(one))
                waiting += [part for word in _IN_PLACE for part in _list(one, word)]
                waiting.append(self.target(one.get("$ref")))
                waiting += _children(one) if deep else ()

    def _look_for_overlaps(self, schema: Schema) -> None:
        """Marks properties and items that more than one schema in the same place describes as shared."""
        together = list(self._together(schema))
        has_patterns = any(one.get("patternProperties") for one in together)
        others = [one["additionalProperties"] for one in together if isinstance(one.get("additionalProperties"), dict)]
        num_named = Counter(name for one in together for name in _dict(one, "properties"))
        num_with_items = sum("items" in one or "prefixItems" in one for one in together)
        mixes = has_patterns or (len(together) > 1 and bool(others))  # a name may match any of them
        for one in together:
            for name, child in _dict(one, "properties").items():
                if mixes or num_named[name] > 1:
                    self._share(child, deep=True)
            if num_with_items > 1:
                for child in (one.get("items"), *_list(one, "prefixItems")):
                    self._share(child, deep=True)
            if num_named or len(together) > 1 or len(_dict(one, "patternProperties")) > 1:
                for child in _dict(one, "patternProperties").values():
                    self._share(child, deep=True)
        for child in others if len(together) > 1 else ():
            self._share(child, deep=True)

    def _together(self, schema: object) -> Iterator[Schema]:
        """The schemas that describe the same value: this one, what it refers to, and its parts."""
        waiting, seen = [schema], set[int]()
        while waiting:
            one = waiting.pop()
            if isinstance(one, dict) and id(one) not in seen:
                seen.add(id(one))
                yield one
                parts = [part for word in _IN_PLACE for part in _list(one, word)]
                waiting += [*reversed(parts), self.target(one.get("$ref"))]

    def _names(self, schema: Schema) -> tuple[list[str], list[str]] | None:
        """The names and patterns of an object's properties; None if it must stay open."""
        names: dict[str, None] = {}
        patterns: dict[str, None] = {}
        is_object = False
        together = list(self._together(schema))
        for one in together:
            if one.get("additionalProperties", False) is not False or any(word in one for word in _OPENING):
                return None
            if any(isinstance(value, dict) for value in (one.get("const"), *_list(one, "enum"))):
                return None
            if "$ref" in one and self.target(one["$ref"]) is None:
                return None
            is_object |= bool({"properties", "patternProperties"} & one.keys())
            names |= dict.fromkeys(_dict(one, "properties"))
            names |= dict.fromkeys(name for name in _list(one, "required") if isinstance(name, str))
            patterns |= dict.fromkeys(_dict(one, "patternProperties"))
        least = max((n for one in together if isinstance(n := one.get("minProperties", 0), int)), default=0)
        if not is_object or (least and (len(together) > 1 or (least > len(names) and not patterns))):
            return None
        return list(names), list(patterns)

    def _exclude_each_other(self, branches: list[object]) -> bool:
        """Whether types or constants show that no value is an instance of two of them."""
        if len(branches) > _MAX_BRANCHES:
            return False
        return not any(
            self._may_overlap(first, second) for i, first in enumerate(branches) for second in branches[i + 1 :]
        )

    def _may_overlap(self, first: object, second: object) -> bool:
        first, second = self.behind(first), self.behind(second)
        if not isinstance(first, dict) or not isinstance(second, dict):
            return True
        if not _may_be_equal(first, second):
            return False
        required = {name for name in _list(first, "required") if isinstance(name, str)}
        for name in required.intersection(name for name in _list(second, "required") if isinstance(name, str)):
            pair = [self.behind(_dict(one, "properties").get(name)) for one in (first, second)]
            if all(isinstance(one, dict) for one in pair) and not _may_be_equal(*pair):
                return False
        return True


def _may_be_equal(first: object, second: object) -> bool:
    """Whether a value may be an instance of both schemas, as far as types and constants show."""
    assert isinstance(first, dict) and isinstance(second, dict), (first, second)
    types, other_types = _types(first), _types(second)
    if types is not None and other_types is not None and not types & other_types:
        return False
    values, other_values = _values(first), _values(second)
    return values is None or other_values is None or bool(values & other_values)


def _types(schema: Schema) -> set[object] | None:
    given = schema.get("type")
    if given is None:
        return None
    types: set[object] = {one for one in (given if isinstance(given, list) else [given]) if isinstance(one, str)}
    return types | {"integer"} if "number" in types else types


def _values(schema: Schema) -> set[str] | None:
    if "const" in schema:
        return {json.dumps(schema["const"], sort_keys=True)}
    return {json.dumps(one, sort_keys=True) for one in _list(schema, "enum")} if "enum" in schema else None


def _children(schema: Schema) -> list[object]:
    """The schemas of a value's members, and those that are only referred to."""
    found = [one for word in _SCHEMAS_BY_NAME for one in _dict(schema, word).values()]
    return [*found, *_list(schema, "prefixItems"), *(schema.get(word) for word in _ONE_SCHEMA)]


def _dict(schema: Schema, word: str) -> dict[str, object]:
    value = schema.get(word)
    return value if isinstance(value, dict) else {}


def _list(schema: Schema, word: str) -> list[object]:
    value = schema.get(word)
    return value if isinstance(value, list) else []
