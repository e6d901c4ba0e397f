"""What the endpoints do: read a request, hand it to the gateway, watch its client, answer.

Owns the way from an ASGI call to a `Reply` and back. Routes and everything around them are `app`'s.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

import msgspec
from starlette.types import Receive, Scope, Send

from ..config import EngineConfig
from ..errors import RequestError
from ..ipc.messages import Submit
from .chat import ChatReply
from .completions import CompletionReply
from .gateway import ClientGone, Gateway, Stream
from .http_error import HttpError, as_http_error
from .metrics import CONTENT_TYPE, Metrics
from .openai_types import ChatRequest, CompletionRequest, GenerationRequest, ModelCard, ModelList
from .reply import Reply
from .sse import send_stream
from .translate import chat_orders, completion_orders, decode_body, output_grammar

MAX_BODY_BYTES = 16 << 20
BODY_TIMEOUT_S = 30.0

Headers = Sequence[tuple[bytes, bytes]]


class Service:
    """The endpoints of one api process; each is an ASGI application."""

    def __init__(
        self, gateway: Gateway, config: EngineConfig, *, healthy: Callable[[], str | None], version: str
    ) -> None:
        """`healthy` returns None, or one sentence that says what is wrong with the engine."""
        self._gateway = gateway
        self._config = config
        self._healthy = healthy
        self._version = version
        self._started = int(time.time())
        self._metrics = Metrics(gateway, config.served_model_names[0])
        self._chat_decoder = msgspec.json.Decoder(ChatRequest)
        self._completion_decoder = msgspec.json.Decoder(CompletionRequest)

    # ── generation ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def chat(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST /v1/chat/completions"""
        request = decode_body(self._chat_decoder, await _read_json(scope, receive))
        model = self._model_name(request.model)
        orders = chat_orders(request, self._config, scope["state"]["salt"])
        reply = ChatReply(
            model=model,
            created=int(time.time()),
            n=request.n or 1,
            include_usage=_includes_usage(request),
            has_logprobs=bool(request.logprobs),
            has_token_ids=bool(request.return_token_ids),
            grammar=output_grammar(request, self._config),
            parallel_tool_calls=request.parallel_tool_calls is not False,
            include_reasoning=request.include_reasoning is not False,
        )
        await self._answer(orders, reply, bool(request.stream), receive, send)

    async def completions(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST /v1/completions"""
        request = decode_body(self._completion_decoder, await _read_json(scope, receive))
        model = self._model_name(request.model)
        orders = completion_orders(request, self._config, scope["state"]["salt"])
        reply = CompletionReply(
            model=model,
            created=int(time.time()),
            orders=orders,
            include_usage=_includes_usage(request),
            echo=bool(request.echo),
            has_logprobs=request.logprobs is not None,
            has_token_ids=bool(request.return_token_ids),
        )
        await self._answer(orders, reply, bool(request.stream), receive, send)

    async def _answer(
        self, orders: Sequence[Submit], reply: Reply, streamed: bool, receive: Receive, send: Send
    ) -> None:
        """The first byte waits for the engine to take the request, so that a refusal still has its status."""
        if (trouble := self._healthy()) is not None:
            raise RequestError("unavailable", trouble)
        stream = self._gateway.submit(orders)
        watcher = asyncio.create_task(_cancel_when_gone(receive, stream))
        try:
            await stream.admitted()
            if streamed:
                await send_stream(send, stream, reply)
            else:
                while not stream.finished:
                    for index, chunk in await stream.news():
                        reply.add(index, chunk)
                await send_body(send, 200, reply.body())
        finally:
            watcher.cancel()
            stream.cancel()

    def _model_name(self, asked: str | None) -> str:
        """The served name that was asked for. Raises HttpError 404."""
        names = self._config.served_model_names
        if not asked:
            return names[0]
        if asked not in names:
            raise HttpError(404, f"The model {asked[:200]!r} does not exist.", code="model_not_found", param="model")
        return asked

    # ── about the server ─────────────────────────────────────────────────────────────────────────────────────────────

    async def models(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /v1/models"""
        await _send_json(send, ModelList([self._card(name) for name in self._config.served_model_names]))

    async def model(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /v1/models/{id}"""
        await _send_json(send, self._card(self._model_name(scope["path_params"]["id"])))

    async def health(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /health: 200 while the engine answers and new requests are taken."""
        trouble = self._gateway.refusal or self._healthy()
        if trouble is not None:
            raise as_http_error(RequestError("unavailable", trouble))
        await _send_json(send, {"status": "ok"})

    async def metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /metrics"""
        await send_body(send, 200, self._metrics.render(), content_type=CONTENT_TYPE.encode())

    async def version(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /version"""
        await _send_json(send, {"version": self._version})

    def _card(self, name: str) -> ModelCard:
        return ModelCard(
            id=name,
            created=self._started,
            root=self._config.served_model_names[0],
            max_model_len=self._config.max_model_len,
        )


def _includes_usage(request: GenerationRequest) -> bool:
    return request.stream_options is not None and bool(request.stream_options.include_usage)


async def send_body(
    send: Send, status: int, body: bytes, *, content_type: bytes = b"application/json", headers: Headers = ()
) -> None:
    """Sends a whole response."""
    all_headers = [(b"content-type", content_type), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": all_headers})
    await send({"type": "http.response.body", "body": body})


async def _send_json(send: Send, value: object) -> None:
    await send_body(send, 200, msgspec.json.encode(value))


async def _cancel_when_gone(receive: Receive, stream: Stream) -> None:
    """The one reader of `receive` once the body is in."""
    while (await receive())["type"] != "http.disconnect":
        pass
    stream.cancel()


async def _read_json(scope: Scope, receive: Receive) -> bytes:
    """The body. Raises HttpError if it is not said to be JSON, too large or too slow; ClientGone."""
    content_type = next((value for name, value in scope["headers"] if name == b"content-type"), b"")
    if content_type.partition(b";")[0].strip().lower() != b"application/json":
        raise HttpError(400, "The content type must be application/json.", code="invalid_json")
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                body += message.get("body", b"")
                if len(body) > MAX_BODY_BYTES:
                    raise too_large()
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        raise HttpError(408, "The body did not arrive in time.", headers=((b"connection", b"close"),)) from None


def too_large() -> HttpError:
    """What a body over `MAX_BODY_BYTES` gets."""
    return HttpError(413, f"The body is larger than {MAX_BODY_BYTES} bytes.", headers=((b"connection", b"close"),))
