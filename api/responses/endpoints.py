"""POST /v1/responses, and the stored responses."""

import contextlib
from urllib.parse import parse_qsl

import msgspec
from starlette.types import Receive, Scope, Send

from ..http.exchange import read_json, send_body, send_json
from ..http.http_error import HttpError, unsupported
from ..http.operation import Operation
from ..openai.generate_types import GenerateRequest
from ..openai.render import rendered
from ..openai.translate import chat_submits, decode_body, read_turn
from ..output.reply import Reply
from ..output.resumable import WithTokenIds
from ..output.service import Service
from .input_items import InputItemsQuery, ItemList, input_items, page
from .reply import ResponsesReply, go_on, new_response
from .request import chat_request, check_response, conversation_of, in_terms_of_responses, wants_logprobs
from .store import ResponseStore, StoredResponse
from .types import ResponseBody, ResponseDeleted, ResponseEvent, ResponsesRequest


class ResponsesEndpoints:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._decoder = msgspec.json.Decoder(ResponsesRequest)
        self._store = ResponseStore(service.state)

    def routes(self) -> list[Operation]:
        return [
            Operation(
                "POST",
                "/v1/responses",
                self.respond,
                "Respond",
                takes=ResponsesRequest,
                example={"input": "Count from 1 to 5", "temperature": 0},
                gives=ResponseBody,
                streams=ResponseEvent,
            ),
            Operation(
                "POST",
                "/v1/responses/render",
                self.render,
                "The tokens of a response's input, as a request to generate",
                takes=ResponsesRequest,
                example={"input": "Count from 1 to 5", "temperature": 0},
                gives=GenerateRequest,
            ),
            Operation("GET", "/v1/responses/{id}", self.response, "A stored response", gives=ResponseBody),
            Operation("DELETE", "/v1/responses/{id}", self.forget, "Forget a response", gives=ResponseDeleted),
            Operation(
                "GET",
                "/v1/responses/{id}/input_items",
                self.input_items,
                "The input of a stored response",
                query=InputItemsQuery,
                gives=ItemList,
            ),
        ]

    async def respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = decode_body(self._decoder, await read_json(scope, receive))
        model = self._service.model_name(request.model)
        owner = scope["state"]["salt"]
        check_response(request)
        conversation = conversation_of(request, await self._earlier_messages(owner, request.previous_response_id))
        chat = chat_request(request, conversation.json())
        with in_terms_of_responses(request):
            submits = chat_submits(chat, self._service.config, owner)
        sampling = submits[0].sampling
        response = new_response(request, model=model, temperature=sampling.temperature, top_p=sampling.top_p)

        async def keep(ended: ResponseBody) -> None:
            if ended.store:
                items = input_items(conversation.json())
                stored = StoredResponse(msgspec.json.encode(ended), go_on(conversation, ended), items)
                # The answer has been made: the client gets it also where the database, which has logged why, fails.
                with contextlib.suppress(HttpError):
                    await self._store.put(owner, ended.id, stored)

        turn = read_turn(chat, self._service.config)
        reply: Reply = ResponsesReply(response, turn=turn, has_logprobs=wants_logprobs(request), on_end=keep)
        if request.return_token_ids:
            reply = WithTokenIds(reply)
        with in_terms_of_responses(request):
            await self._service.answer(submits, reply, bool(request.stream), scope, receive, send)

    async def render(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = decode_body(self._decoder, await read_json(scope, receive))
        model = self._service.model_name(request.model)
        check_response(request)
        earlier = await self._earlier_messages(scope["state"]["salt"], request.previous_response_id)
        chat = chat_request(request, conversation_of(request, earlier).json())
        with in_terms_of_responses(request):
            submits = chat_submits(chat, self._service.config, b"")
            await send_json(send, (await rendered(self._service, chat, submits[:1], model))[0])

    async def response(self, scope: Scope, receive: Receive, send: Send) -> None:
        stored = await self._stored(scope["state"]["salt"], scope["path_params"]["id"])
        if b"stream=true" in scope["query_string"]:
            raise unsupported("stream", "A stored response is not streamed.")
        await send_body(send, 200, stored.body)

    async def forget(self, scope: Scope, receive: Receive, send: Send) -> None:
        id = scope["path_params"]["id"]
        if not await self._store.delete(scope["state"]["salt"], id):
            raise _no_response(id)
        await send_json(send, ResponseDeleted(id))

    async def input_items(self, scope: Scope, receive: Receive, send: Send) -> None:
        stored = await self._stored(scope["state"]["salt"], scope["path_params"]["id"])
        query = dict(parse_qsl(scope["query_string"].decode("latin-1")))
        await send_json(send, page(stored.input_items, query))

    async def _stored(self, owner: bytes, id: str) -> StoredResponse:
        stored = await self._store.get(owner, id)
        if stored is None:
            raise _no_response(id)
        return stored

    async def _earlier_messages(self, owner: bytes, id: str | None) -> bytes:
        """The messages up to and including the response with this id. Raises HttpError 400."""
        if id is None:
            return b"[]"
        stored = await self._store.get(owner, id)
        if stored is None:
            raise HttpError(
                400,
                f"There is no response {id[:100]!r}; only the latest are stored.",
                code="previous_response_not_found",
                param="previous_response_id",
            )
        return stored.messages


def _no_response(id: str) -> HttpError:
    return HttpError(404, f"There is no response {id[:100]!r}; only the latest are stored.", code="not_found")
