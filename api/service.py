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
from ..ipc.messages import ChatPrompt, Submit, TextPrompt, ids_to_bytes
from .anthropic import MessagesReply
from .anthropic_request import chat_request as chat_of_messages
from .anthropic_request import in_terms_of_messages
from .anthropic_types import CountTokensRequest, MessagesRequest
from .chat import ChatReply
from .completions import CompletionReply
from .gateway import ClientGone, Gateway, Stream
from .http_error import HttpError, as_http_error
from .metrics import CONTENT_TYPE, Metrics
from .openai_types import ChatRequest, CompletionRequest, GenerationRequest, ModelCard, ModelList
from .reply import Reply, id_list
from .response_store import ResponseStore, StoredResponse
from .responses import ResponsesReply, go_on, new_response
from .responses_request import chat_request as chat_of_response
from .responses_request import check_response, conversation_of, in_terms_of_responses, wants_logprobs
from .responses_types import ResponseBody, ResponsesRequest
from .sse import send_stream
from .tokenize_types import DetokenizeAnswer, DetokenizeRequest, TokenizeAnswer, TokenizeRequest
from .translate import chat_orders, completion_orders, decode_body, output_grammar
from .turn import Turn

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
        self._responses_decoder = msgspec.json.Decoder(ResponsesRequest)
        self._messages_decoder = msgspec.json.Decoder(MessagesRequest)
        self._count_tokens_decoder = msgspec.json.Decoder(CountTokensRequest)
        self._tokenize_decoder = msgspec.json.Decoder(TokenizeRequest)
        self._detokenize_decoder = msgspec.json.Decoder(DetokenizeRequest)
        self._responses = ResponseStore()

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

    async def responses(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST /v1/responses"""
        request = decode_body(self._responses_decoder, await _read_json(scope, receive))
        model = self._model_name(request.model)
        owner = scope["state"]["salt"]
        check_response(request)
        conversation = conversation_of(request, self._earlier_messages(owner, request.previous_response_id))
        chat = chat_of_response(request, conversation.json())
        try:
            orders = chat_orders(chat, self._config, owner)
        except HttpError as error:
            raise in_terms_of_responses(error) from None
        sampling = orders[0].sampling
        response = new_response(request, model=model, temperature=sampling.temperature, top_p=sampling.top_p)

        def keep(ended: ResponseBody) -> None:
            if ended.store:
                stored = StoredResponse(msgspec.json.encode(ended), go_on(conversation, ended))
                self._responses.put(owner, ended.id, stored)

        turn = self._turn(chat)
        reply = ResponsesReply(response, turn=turn, has_logprobs=wants_logprobs(request), on_end=keep)
        await self._answer(orders, reply, bool(request.stream), receive, send)

    async def messages(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST /v1/messages"""
        request = decode_body(self._messages_decoder, await _read_json(scope, receive))
        model = self._model_name(request.model)
        chat = chat_of_messages(request)
        try:
            orders = chat_orders(chat, self._config, scope["state"]["salt"])
        except HttpError as error:
            raise in_terms_of_messages(error) from None
        turn = self._turn(chat)
        await self._answer(orders, MessagesReply(model=model, turn=turn), bool(request.stream), receive, send)

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
            reply.admitted(stream.num_prompt)
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

    def _turn(self, request: ChatRequest) -> Turn:
        """Reads the one output of a chat request."""
        grammar = output_grammar(request, self._config)
        return Turn(grammar, parallel_tool_calls=request.parallel_tool_calls is not False)

    def _model_name(self, asked: str | None) -> str:
        """The served name that was asked for. Raises HttpError 404."""
        names = self._config.served_model_names
        if not asked:
            return names[0]
        if asked not in names:
            raise HttpError(404, f"The model {asked[:200]!r} does not exist.", code="model_not_found", param="model")
        return asked

    def _earlier_messages(self, owner: bytes, id: str | None) -> bytes:
        """The conversation up to the response with this id, in chat's shape. Raises HttpError 400."""
        if id is None:
            return b"[]"
        stored = self._responses.get(owner, id)
        if stored is None:
            raise HttpError(
                400,
                f"There is no response {id[:100]!r}, or no longer: only the latest are kept, in memory.",
                code="previous_response_not_found",
                param="previous_response_id",
            )
        return stored.messages

    # ── without generating ───────────────────────────────────────────────────────────────────────────────────────────

    async def response(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET and DELETE /v1/responses/{id}"""
        owner, id = scope["state"]["salt"], scope["path_params"]["id"]
        stored = self._responses.get(owner, id)
        if stored is None:
            raise HttpError(404, f"There is no response {id[:100]!r}, or no longer.", code="not_found")
        if b"stream=true" in scope["query_string"]:
            raise HttpError(400, "A stored response is not streamed.", code="unsupported_value", param="stream")
        if scope["method"] == "DELETE":
            self._responses.delete(owner, id)
            await _send_json(send, {"id": id, "object": "response.deleted", "deleted": True})
        else:
            await send_body(send, 200, stored.body)

    async def count_tokens(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST /v1/messages/count_tokens"""
        request = decode_body(self._count_tokens_decoder, await _read_json(scope, receive))
        self._model_name(request.model)
        tokenized = await self._gateway.tokenize(self._chat_prompt(chat_of_messages(request)))
        await _send_json(send, {"input_tokens": len(id_list(tokenized.ids))})

    async def tokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST /tokenize"""
        request = decode_body(self._tokenize_decoder, await _read_json(scope, receive))
        self._model_name(request.model)
        if request.chat_template is not None:
            raise HttpError(400, "chat_template is not supported.", code="unsupported_value", param="chat_template")
        prompt: TextPrompt | ChatPrompt
        if request.prompt is not None and not bytes(request.messages):
            prompt = TextPrompt(request.prompt, request.add_special_tokens is not False)
        elif request.prompt is None and bytes(request.messages):
            if request.add_special_tokens:
                raise HttpError(
                    400,
                    "add_special_tokens must be false with messages: the chat template writes them itself.",
                    code="unsupported_value",
                    param="add_special_tokens",
                )
            chat = ChatRequest(
                messages=request.messages,
                tools=request.tools,
                add_generation_prompt=request.add_generation_prompt,
                continue_final_message=request.continue_final_message,
                chat_template_kwargs=request.chat_template_kwargs,
            )
            prompt = self._chat_prompt(chat)
        else:
            raise HttpError(400, "Send either prompt or messages.", param="prompt")
        tokenized = await self._gateway.tokenize(prompt, pieces=bool(request.return_token_strs))
        ids = id_list(tokenized.ids)
        pieces = list(tokenized.pieces) if request.return_token_strs else None
        await _send_json(send, TokenizeAnswer(len(ids), self._config.max_model_len, ids, pieces))

    async def detokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST /detokenize"""
        request = decode_body(self._detokenize_decoder, await _read_json(scope, receive))
        self._model_name(request.model)
        last = self._config.vocab_size - 1
        if max(request.tokens, default=0) > last:
            raise HttpError(400, f"tokens must hold token ids between 0 and {last}.", param="tokens")
        await _send_json(send, DetokenizeAnswer(await self._gateway.detokenize(ids_to_bytes(request.tokens))))

    def _chat_prompt(self, chat: ChatRequest) -> ChatPrompt:
        """What a chat request would show the model. Raises HttpError."""
        prompt = chat_orders(chat, self._config, b"")[0].prompt
        assert isinstance(prompt, ChatPrompt), prompt
        return prompt

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

    async def ready(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /ready: 200 while a new request would be taken; a full queue is no reason to kill a server."""
        core = self._gateway.snapshot
        trouble = self._gateway.refusal or self._healthy()
        if trouble is None and core is not None and core.num_waiting >= self._config.max_queued_requests:
            trouble = f"The queue is full: {core.num_waiting} sequences wait."
        if trouble is not None:
            raise as_http_error(RequestError("unavailable", trouble))
        await _send_json(send, {"status": "ready"})

    async def load(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /load: requests in this process, and the engine's rows, queue and KV memory as it last reported them."""
        core = self._gateway.snapshot
        await _send_json(
            send,
            {
                "server_load": self._gateway.num_requests,
                "num_running": core.num_running if core else 0,
                "num_waiting": core.num_waiting if core else 0,
                "kv_cache_usage": core.num_blocks_used / core.num_blocks if core and core.num_blocks else 0.0,
            },
        )

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
