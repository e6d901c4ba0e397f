"""POST /tokenize and /detokenize, compatible with vLLM."""

from typing import Annotated

from msgspec import Meta, Raw, Struct, field
from starlette.types import Receive, Scope, Send

from ...ipc.messages import ChatPrompt, TextPrompt, ids_to_bytes
from ..http.exchange import read_json, send_json
from ..http.http_error import HttpError
from ..http.operation import Operation
from ..output.reply import id_list
from ..output.service import Service
from ..output.shapes import MessagesJson, TokenId, ToolsJson
from .translate import chat_prompt, decode_body, request_decoder
from .types import ChatRequest


class TokenizeRequest(Struct, frozen=True, kw_only=True):
    """POST /tokenize: a text, or a conversation as the chat template renders it."""

    model: str | None = None
    prompt: str | None = None
    messages: MessagesJson = field(default_factory=Raw)
    tools: ToolsJson = field(default_factory=Raw)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, object] | None = None
    chat_template: str | None = None  # needs --trust-request-chat-template
    return_token_strs: bool | None = None


class TokenizeAnswer(Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Struct, frozen=True, kw_only=True):
    """POST /detokenize. The text includes special tokens."""

    tokens: Annotated[list[TokenId], Meta(max_length=2**20)]
    model: str | None = None


class TokenizerInfo(Struct, frozen=True):
    """GET /tokenizer_info"""

    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    tokenizer_class: str | None


class DetokenizeAnswer(Struct, frozen=True):
    prompt: str


class TokenizeEndpoints:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._tokenize_decoder = request_decoder(TokenizeRequest)
        self._detokenize_decoder = request_decoder(DetokenizeRequest)

    def routes(self) -> list[Operation]:
        return [
            Operation(
                "POST",
                "/tokenize",
                self.tokenize,
                "The ids of a text or a conversation",
                takes=TokenizeRequest,
                example={"prompt": "Count from 1 to 5", "return_token_strs": True},
                gives=TokenizeAnswer,
            ),
            Operation(
                "POST",
                "/detokenize",
                self.detokenize,
                "The text of ids",
                takes=DetokenizeRequest,
                example={"tokens": [40, 50, 60]},
                gives=DetokenizeAnswer,
            ),
            Operation("GET", "/tokenizer_info", self.info, "Special tokens and the chat template", gives=TokenizerInfo),
        ]

    async def tokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = decode_body(self._tokenize_decoder, await read_json(scope, receive))
        self._service.model_name(request.model)
        if request.chat_template is not None and not bytes(request.messages):
            raise HttpError(400, "chat_template is only allowed with messages.", param="chat_template")
        prompt: TextPrompt | ChatPrompt
        if request.prompt is not None and not bytes(request.messages):
            prompt = TextPrompt(request.prompt, request.add_special_tokens is not False)
        elif request.prompt is None and bytes(request.messages):
            chat = ChatRequest(
                messages=request.messages,
                tools=request.tools,
                add_generation_prompt=request.add_generation_prompt,
                continue_final_message=request.continue_final_message,
                chat_template_kwargs=request.chat_template_kwargs,
                chat_template=request.chat_template,
                add_special_tokens=request.add_special_tokens,
            )
            prompt = chat_prompt(chat, self._service.config)
        else:
            raise HttpError(400, "Send either prompt or messages.", param="prompt")
        tokenized = await self._service.gateway.tokenize(prompt, pieces=bool(request.return_token_strs))
        ids = id_list(tokenized.ids)
        pieces = list(tokenized.pieces) if request.return_token_strs else None
        await send_json(send, TokenizeAnswer(len(ids), self._service.config.max_model_len, ids, pieces))

    async def info(self, scope: Scope, receive: Receive, send: Send) -> None:
        described = await self._service.gateway.describe_tokenizer()
        names = (name for name in TokenizerInfo.__struct_fields__ if name.endswith("_token"))
        tokens = {name: described.special_tokens.get(name) for name in names}
        await send_json(
            send,
            TokenizerInfo(
                chat_template=described.chat_template, tokenizer_class=described.tokenizer_class or None, **tokens
            ),
        )

    async def detokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = decode_body(self._detokenize_decoder, await read_json(scope, receive))
        self._service.model_name(request.model)
        last = self._service.config.model.vocab_size - 1
        if max(request.tokens, default=0) > last:
            raise HttpError(400, f"tokens must hold token ids between 0 and {last}.", param="tokens")
        await send_json(send, DetokenizeAnswer(await self._service.gateway.detokenize(ids_to_bytes(request.tokens))))
