"""POST /invocations, the one path that SageMaker calls: the body shows which endpoint is meant."""

from typing import Annotated

from msgspec import Meta, Struct
from starlette.types import ASGIApp, Receive, Scope, Send

from ..http.exchange import read_json, replayed
from ..http.http_error import HttpError
from ..http.operation import Operation
from ..openai.translate import decode_body, request_decoder
from ..output.service import Service

_PATHS = {
    "messages": "/v1/chat/completions",
    "prompt": "/v1/completions",
    "documents": "/v1/rerank",
    "text_1": "/v1/score",
    "queries": "/v1/score",
    "task": "/pooling",
    "input": "/v1/embeddings",
}
"""The endpoint by a field that its body must have; the first that is found counts."""

_Any = Annotated[dict[str, object], Meta(description="A body of one of the endpoints")]


class Invocation(Struct, frozen=True):
    """The fields by which the endpoint is chosen; the others are the endpoint's own."""

    messages: object = None
    prompt: object = None
    documents: object = None
    text_1: object = None
    queries: object = None
    task: object = None
    input: object = None


class InvocationsEndpoint:
    def __init__(self, service: Service, app: ASGIApp) -> None:
        """`app`: has the endpoints."""
        self._generates = "generate" in service.config.model.purpose.tasks
        self._app = app
        self._decoder = request_decoder(Invocation)

    def routes(self) -> list[Operation]:
        return [
            Operation(
                "POST",
                "/invocations",
                self.invoke,
                "A request to chat, completions, embeddings, pooling, rerank or score",
                takes=Invocation,
                gives=_Any,
            )
        ]

    async def invoke(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_json(scope, receive)
        request = decode_body(self._decoder, body)
        found = [path for name, path in _PATHS.items() if getattr(request, name) is not None]
        if not found:
            fields = ", ".join(_PATHS)
            raise HttpError(400, f"The body fits no endpoint: it has none of {fields}.")
        path = found[0] if self._generates or found[0] != "/v1/chat/completions" else "/v1/embeddings"
        await self._app({**scope, "path": path, "raw_path": path.encode()}, replayed(body, receive), send)
