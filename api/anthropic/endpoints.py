"""POST /v1/messages and /v1/messages/count_tokens."""

from starlette.types import Receive, Scope, Send

from ..http.exchange import read_json, send_json
from ..http.operation import Operation
from ..openai.generate_types import GenerateRequest
from ..openai.render import rendered
from ..openai.translate import chat_prompt, chat_submits, decode_body, read_turn, request_decoder
from ..output.reply import Reply, id_list
from ..output.resumable import WithTokenIds
from ..output.service import Service
from .reply import MessagesReply
from .request import chat_request, in_terms_of_messages
from .types import CountTokensRequest, MessageBody, MessageEvent, MessagesRequest, TokenCount


class AnthropicEndpoints:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._messages_decoder = request_decoder(MessagesRequest)
        self._count_tokens_decoder = request_decoder(CountTokensRequest)

    def routes(self) -> list[Operation]:
        return [
            Operation(
                "POST",
                "/v1/messages",
                self.messages,
                "Answer a conversation",
                takes=MessagesRequest,
                example={"messages": [{"role": "user", "content": "Count from 1 to 5"}], "max_tokens": 60},
                gives=MessageBody,
                streams=MessageEvent,
            ),
            Operation(
                "POST",
                "/v1/messages/render",
                self.render,
                "The tokens of a conversation, as a request to generate",
                takes=MessagesRequest,
                example={"messages": [{"role": "user", "content": "Count from 1 to 5"}], "max_tokens": 60},
                gives=GenerateRequest,
            ),
            Operation(
                "POST",
                "/v1/messages/count_tokens",
                self.count_tokens,
                "How many tokens a conversation is",
                takes=CountTokensRequest,
                example={"messages": [{"role": "user", "content": "Count from 1 to 5"}]},
                gives=TokenCount,
            ),
        ]

    async def messages(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = decode_body(self._messages_decoder, await read_json(scope, receive))
        model = self._service.model_name(request.model)
        config = self._service.config
        chat = chat_request(request, config)
        with in_terms_of_messages(config):
            submits = chat_submits(chat, config, scope["state"]["salt"])
            reply: Reply = MessagesReply(model=model, turn=read_turn(chat, self._service.config), id=request.resume_id)
            if request.return_token_ids:
                reply = WithTokenIds(reply)
            await self._service.answer(submits, reply, bool(request.stream), scope, receive, send)

    async def render(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = decode_body(self._messages_decoder, await read_json(scope, receive))
        model = self._service.model_name(request.model)
        config = self._service.config
        chat = chat_request(request, config)
        with in_terms_of_messages(config):
            submits = chat_submits(chat, config, b"")
            await send_json(send, (await rendered(self._service, chat, submits[:1], model))[0])

    async def count_tokens(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = decode_body(self._count_tokens_decoder, await read_json(scope, receive))
        self._service.model_name(request.model)
        config = self._service.config
        chat = chat_request(request, config)
        with in_terms_of_messages(config):
            tokenized = await self._service.gateway.tokenize(chat_prompt(chat, config))
        await send_json(send, TokenCount(len(id_list(tokenized.ids))))
