"""The JSON types that a tool's schema allows for an argument. A schema that says nothing, or is invalid, allows all."""

from collections.abc import Iterator

from .block import Schemas

TYPES = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
_MAX_DEPTH = 16  # of references and branches
_MAX_BRANCHES = 256  # of one schema, looked at


def argument_schema(schemas: Schemas, tool: str, key: str) -> tuple[object, object]:
    """The schema of one argument, and the whole schema, which its references refer to."""
    root = schemas.get(tool)
    if not isinstance(root, dict):
        return True, root
    properties = root.get("properties")
    if isinstance(properties, dict) and key in properties:
        return properties[key], root
    return root.get("additionalProperties", True), root


def types_of(schema: object, root: object) -> frozenset[str]:
    """The types that `schema` allows. `root`: what references refer to."""
    return _types(schema, root, _MAX_DEPTH, iter(range(_MAX_BRANCHES)))


def _types(schema: object, root: object, depth: int, budget: Iterator[int]) -> frozenset[str]:
    if not isinstance(schema, dict) or depth == 0 or next(budget, None) is None:
        return TYPES
    found = TYPES
    named = schema.get("type")
    if named is not None:
        names = {name for name in (named if isinstance(named, list) else [named]) if isinstance(name, str)}
        if names and names <= TYPES:
            found &= names | ({"integer"} if "number" in names else frozenset())
    if isinstance(values := schema.get("enum"), list):
        found &= {type_of(value) for value in values}
    if "const" in schema:
        found &= {type_of(schema["const"])}
    if "$ref" in schema:
        found &= _types(referred(schema["$ref"], root), root, depth - 1, budget)
    for word in ("anyOf", "oneOf"):
        if isinstance(branches := schema.get(word), list) and branches:
            found &= frozenset().union(*(_types(branch, root, depth - 1, budget) for branch in branches))
    if isinstance(branches := schema.get("allOf"), list):
        for branch in branches:
            found &= _types(branch, root, depth - 1, budget)
    return found


def type_of(value: object) -> str:
    """The type of a decoded JSON value. A number without a fraction is an integer."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def referred(reference: object, root: object) -> object:
    """What a reference such as `#/$defs/day` refers to; True if that is not in the schema."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return True
    found = root
    for part in reference.split("/")[1:]:
        if not isinstance(found, dict):
            return True
        found = found.get(part.replace("~1", "/").replace("~0", "~"), True)
    return found
