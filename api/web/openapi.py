"""/openapi.json: the operations, with schemas made from the structs that decode requests and encode answers.

Optional fields of type `object` are declared only to be refused, so they are left out.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec
from starlette.types import Receive, Scope, Send

from ..admin.endpoints import ADMIN_PATHS
from ..http.exchange import send_body
from ..http.http_error import AnthropicErrorBody, ErrorBody, OllamaErrorBody, speaks_anthropic
from ..http.operation import Operation
from ..openai.types import Message, Tool

Json = dict[str, object]

_ERRORS = {"Error": ErrorBody, "AnthropicError": AnthropicErrorBody, "OllamaError": OllamaErrorBody}
_REFERRED_TO = (Message, Tool)  # by fields that are raw JSON in the structs
_ANYTHING: Json = {"description": "Any JSON value."}
_REFUSED_FIELD = {**_ANYTHING, "default": None}  # msgspec's schema of `object = None`


class Description:
    """Answers GET /openapi.json."""

    def __init__(self, description: Json) -> None:
        self._body = msgspec.json.encode(description)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_body(send, 200, self._body)


def describe(
    sections: Mapping[str, Sequence[Operation]], *, version: str, has_keys: bool, open_paths: Collection[str]
) -> Json:
    """The description of all operations by section. `has_keys`: all but those at `open_paths` need a key."""
    operations = [operation for section in sections.values() for operation in section]
    shapes = [shape for one in operations for shape in (one.takes, one.query, one.gives, one.streams)]
    schemas = _Schemas([*filter(None, shapes), *_ERRORS.values(), *_REFERRED_TO])
    paths: dict[str, Json] = {}
    for section, members in sections.items():
        for one in members:
            described = {"tags": [section], **_operation(one, schemas)}
            if has_keys and one.path in open_paths:
                described["security"] = []
            if one.path in ADMIN_PATHS:
                described["security"] = [{"bearer": []}]
            paths.setdefault(one.path_format, {})[one.method.lower()] = described
    return {
        "openapi": "3.1.0",
        "info": {"title": "pagewire", "version": version},
        "servers": [{"url": "."}],  # relative to this description, because a proxy may add a prefix
        "tags": [{"name": section} for section in sections],
        "security": [{"bearer": []}] if has_keys else [],
        "paths": paths,
        "components": {
            "schemas": schemas.components,
            "responses": {
                name: {
                    "description": "An error.",
                    "content": {"application/json": {"schema": schemas.of(body)}},
                }
                for name, body in _ERRORS.items()
            },
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(operation: Operation, schemas: "_Schemas") -> Json:
    described: Json = {
        "summary": operation.summary,
        "operationId": "_".join([operation.method.lower(), *re.findall(r"\w+", operation.path_format)]),
    }
    if parameters := [*_path_parameters(operation), *schemas.query_parameters(operation.query)]:
        described["parameters"] = parameters
    if operation.takes is not None:
        content: Json = {"schema": schemas.of(operation.takes)}
        if operation.example is not None:
            content["example"] = operation.example
        described["requestBody"] = {"required": True, "content": {operation.takes_as: content}}
    return {**described, "responses": _responses(operation, schemas)}


def _path_parameters(operation: Operation) -> list[Json]:
    schema = {"type": "string", "minLength": 1}
    return [{"name": name, "in": "path", "required": True, "schema": schema} for name in operation.param_convertors]


def _responses(operation: Operation, schemas: "_Schemas") -> Json:
    content: Json = {operation.gives_as: {"schema": schemas.of(operation.gives)}}
    about = "The answer."
    if operation.streams is not None:
        data = {
            "type": "string",
            "contentMediaType": "application/json",
            "contentSchema": schemas.of(operation.streams),
        }
        event: Json = {"type": "object", "properties": {"data": data}, "required": ["data"]}
        if operation.streams_as == "application/x-ndjson":
            event = schemas.of(operation.streams)
        content[operation.streams_as] = {"schema": event}
        about = "The answer, or with `stream` a stream: the schema is that of one event or line."
    is_ollama = operation.path.startswith("/api/")
    name = "OllamaError" if is_ollama else "AnthropicError" if speaks_anthropic(operation.path) else "Error"
    error = {"$ref": f"#/components/responses/{name}"}
    return {"200": {"description": about, "content": content}, "4XX": error, "5XX": error}


class _Schemas:
    """The JSON schema of every shape, and of the structs that they share."""

    def __init__(self, shapes: Iterable[object]) -> None:
        self._shapes = list(shapes)
        self._schemas, self.components = msgspec.json.schema_components(
            self._shapes, schema_hook=_anything, ref_template="#/components/schemas/{name}"
        )
        for schema in self.components.values():
            fields = schema.get("properties", {})
            schema["properties"] = {name: field for name, field in fields.items() if field != _REFUSED_FIELD}

    def of(self, shape: object) -> Json:
        """The schema of one of the shapes."""
        return self._schemas[self._shapes.index(shape)]

    def query_parameters(self, struct: object) -> list[Json]:
        """A struct's fields as query parameters."""
        if struct is None:
            return []
        fields = self.components[str(self.of(struct)["$ref"]).rpartition("/")[2]]["properties"]
        return [{"name": name, "in": "query", "schema": schema} for name, schema in fields.items()]


def _anything(shape: type) -> Json:
    """The schema of `object`, the only type for which msgspec has none."""
    assert shape is object, shape
    return dict(_ANYTHING)  # msgspec writes into it
