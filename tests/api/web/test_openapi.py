"""/openapi.json describes every route, is consistent, and is true: its examples get the answers it describes."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from harness import FakeEngine, make_app, request

from pagewire.api.http.operation import Operation
from pagewire.api.web.page import PAGE_FILES

DESCRIPTION: dict[str, Any] = request(FakeEngine(), "/openapi.json").json
SCHEMAS: dict[str, Any] = DESCRIPTION["components"]["schemas"]
OPERATIONS = [
    (method, path, operation)
    for path, methods in DESCRIPTION["paths"].items()
    for method, operation in methods.items()
]  # fmt: skip
EXAMPLES = [
    (path, content["example"])
    for _, path, operation in OPERATIONS
    for content in operation.get("requestBody", {}).get("content", {}).values()
    if "example" in content
]


def test_every_route_is_described() -> None:
    routes = [route for route in make_app(FakeEngine())._app.routes if route.path not in PAGE_FILES]
    undescribed = [route.path for route in routes if not isinstance(route, Operation)]
    assert undescribed == ["/openapi.json"], "describe the others with an Operation"
    described = {(method.upper(), path) for method, path, _ in OPERATIONS}
    assert described == {(route.method, route.path_format) for route in routes if isinstance(route, Operation)}


def test_references_and_parameters_are_consistent() -> None:
    def references(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            for name, inner in value.items():
                if name == "$ref":
                    yield inner
                yield from references(inner)
        elif isinstance(value, list):
            for inner in value:
                yield from references(inner)

    for reference in set(references(DESCRIPTION)):
        place: Any = DESCRIPTION
        for name in reference.removeprefix("#/").split("/"):
            place = place[name]
    ids = [operation["operationId"] for _, _, operation in OPERATIONS]
    assert len(set(ids)) == len(ids)
    for _, path, operation in OPERATIONS:
        assert [one["name"] for one in operation.get("parameters", []) if one["in"] == "path"] == re.findall(
            r"{(\w+)}", path
        )


def test_schemas_follow_the_structs() -> None:
    chat = SCHEMAS["ChatRequest"]
    assert chat["required"] == ["messages"]
    assert chat["properties"]["messages"]["items"] == {"$ref": "#/components/schemas/Message"}
    assert chat["properties"]["temperature"]["anyOf"][0] == {"type": "number", "minimum": 0.0, "maximum": 2.0}
    assert "audio" not in chat["properties"], "a field that is always refused is not listed"
    stream = DESCRIPTION["paths"]["/v1/chat/completions"]["post"]["responses"]["200"]["content"]["text/event-stream"]
    assert stream["schema"]["properties"]["data"]["contentSchema"] == {"$ref": "#/components/schemas/ChatChunk"}


def test_errors_have_the_shape_of_their_api() -> None:
    for _, path, operation in OPERATIONS:
        names = {"/v1/messages": "AnthropicError", "/api/": "OllamaError"}
        name = next((name for start, name in names.items() if path.startswith(start)), "Error")
        assert (
            operation["responses"]["4XX"] == operation["responses"]["5XX"] == {"$ref": f"#/components/responses/{name}"}
        )
    error = request(FakeEngine(), "/v1/completions", {}).json
    assert set(error["error"]) == set(SCHEMAS["ErrorFields"]["properties"])
    for path, body in (("/v1/messages", "AnthropicErrorBody"), ("/api/chat", "OllamaErrorBody")):
        assert set(request(FakeEngine(), path, {}).json) == set(SCHEMAS[body]["properties"])


@pytest.mark.parametrize(("path", "example"), EXAMPLES, ids=[path for path, _ in EXAMPLES])
def test_an_example_is_answered_as_described(path: str, example: dict[str, Any]) -> None:
    answer = request(FakeEngine(), path, example)
    assert answer.status == 200, answer.json
    content = DESCRIPTION["paths"][path]["post"]["responses"]["200"]["content"]["application/json"]
    described = content["schema"]
    bodies = answer.json if described.get("type") == "array" else [answer.json]
    schema = SCHEMAS[described.get("items", described)["$ref"].rpartition("/")[2]]
    for body in bodies:
        assert set(schema["required"]) <= set(body) <= set(schema["properties"])


def test_the_security_scheme_is_listed_if_keys_are_needed() -> None:
    assert DESCRIPTION["security"] == []
    assert request(FakeEngine(), "/openapi.json", api_keys=("secret",)).status == 401
    headers = {"authorization": "Bearer secret"}
    guarded = request(FakeEngine(), "/openapi.json", headers=headers, api_keys=("secret",)).json
    assert guarded["security"] == [{"bearer": []}] and "bearer" in guarded["components"]["securitySchemes"]
    assert guarded["paths"]["/health"]["get"]["security"] == [] and "security" not in guarded["paths"]["/load"]["get"]


def test_a_path_of_two_routes_allows_both_methods() -> None:
    answer = request(FakeEngine(), "/v1/responses/resp_1", method="PUT")
    assert answer.status == 405 and answer.headers["allow"] == "DELETE, GET, HEAD"
