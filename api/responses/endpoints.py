"""POST /v1/responses, and the stored responses."""

import contextlib
from typing import NamedTuple
from urllib.parse import parse_qsl

import msgspec
from msgspec.structs import replace
from starlette.types import Receive, Scope, Send

from ..http.exchange import read_json, send_body, send_json, while_connected
from ..http.http_error import HttpError, unsupported
from ..http.operation import Operation
from ..openai.conversation import Conversation
from ..openai.generate_types import GenerateRequest
from ..openai.render import rendered
from ..openai.translate import chat_prompt, chat_submits, decode_body, read_turn, request_decoder
from ..openai.types import ChatRequest
from ..output.reply import Reply, id_list
from ..output.resumable import WithTokenIds
from ..output.service import Service
from ..output.sse import send_events
from .background import BackgroundRuns, Prepared
from .conversations import ConversationEndpoints, Conversations
from .input_items import InputItemsQuery, ItemList, decode_items, input_items, page
from .reply import ResponsesReply, go_on, new_response
from .request import (
    chat_request,
    check_response,
    conversation_of,
    custom_names,
    in_terms_of_responses,
    references,
    wants_logprobs,
)
from .store import ResponseStore, StoredResponse, conversation_store
from .types import (
    ConversationName,
    InputItem,
    InputTokens,
    ResponseBody,
    ResponseDeleted,
    ResponseEvent,
    ResponsesRequest,
)


class ResponsesEndpoints:
    def __init__(self, service: Service, runs: BackgroundRuns) -> None:
        """`runs`: of all models of this process."""
        self._service = service
        self._decoder = request_decoder(ResponsesRequest)
        self._store = ResponseStore(service.state)
        self._conversations = Conversations(conversation_store(service.state))
        self._runs = runs
        runs.add(service, self._prepared)

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
            Operation(
                "POST",
                "/v1/responses/input_tokens",
                self.input_tokens,
                "How many tokens a response's input is",
                takes=ResponsesRequest,
                example={"input": "Count from 1 to 5"},
                gives=InputTokens,
            ),
            Operation("POST", "/v1/responses/{id}/cancel", self.cancel, "Cancel a response", gives=ResponseBody),
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
            *ConversationEndpoints(self._conversations).routes(),
        ]

    async def respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_json(scope, receive)
        request = decode_body(self._decoder, body)
        model = self._service.model_name(request.model)
        owner = scope["state"]["salt"]
        check_response(request)
        conversation_id = _conversation_id(request)
        earlier = await self._earlier_messages(owner, request)
        referred = {id: await self._find_item(owner, id) for id in references(request)}
        messages = conversation_of(request, earlier, referred.get).json()
        chat = chat_request(request, messages)
        with in_terms_of_responses(request):
            submits = chat_submits(chat, self._service.config, owner)
        sampling = submits[0].sampling
        response = new_response(
            request,
            model=model,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            conversation=conversation_id,
        )
        record = StoredResponse(
            msgspec.json.encode(response),
            messages,
            input_items(messages),
            is_background=response.background,
            has_ended=not response.background,
            is_streamed=response.background and bool(request.stream),
            request=body if response.background else b"",
            num_earlier=len(decode_items(input_items(earlier))),
        )
        if response.background:
            await self._runs.begin(owner, response.id, record, scope)
            if record.is_streamed:
                await while_connected(receive, send_events(send, self._runs.follow(owner, response.id, 0)))
            else:
                await send_json(send, response)
            return
        reply: Reply = self._reply(owner, request, response, chat, record)
        if request.return_token_ids:
            reply = WithTokenIds(reply)
        with in_terms_of_responses(request):
            await self._service.answer(submits, reply, bool(request.stream), scope, receive, send)

    def _prepared(self, owner: bytes, stored: StoredResponse) -> Prepared:
        """What it takes to make a stored response that has not ended. Raises HttpError."""
        request = decode_body(self._decoder, stored.request)
        chat = chat_request(request, stored.messages)
        with in_terms_of_responses(request):
            submits = chat_submits(chat, self._service.config, owner)
        response = msgspec.json.decode(stored.body, type=ResponseBody)
        return Prepared(submits, self._reply(owner, request, response, chat, stored))

    def _reply(
        self, owner: bytes, request: ResponsesRequest, response: ResponseBody, chat: ChatRequest, stored: StoredResponse
    ) -> ResponsesReply:
        """Keeps its end. `stored`: as it is before."""

        async def keep(ended: ResponseBody) -> None:
            # The answer has been made: the client gets it also where the database, which has logged why, fails.
            with contextlib.suppress(HttpError):
                if ended.conversation is not None:
                    added = [*decode_items(stored.input_items)[stored.num_earlier :], *ended.output]
                    await self._conversations.extend(owner, ended.conversation.id, msgspec.json.encode(added))
                if ended.store:
                    messages = go_on(Conversation(stored.messages), ended)
                    record = replace(stored, body=msgspec.json.encode(ended), messages=messages, request=b"")
                    await self._store.put(owner, ended.id, replace(record, has_ended=True))

        turn = read_turn(chat, self._service.config, custom_names(request))
        return ResponsesReply(response, turn=turn, has_logprobs=wants_logprobs(request), on_end=keep)

    async def render(self, scope: Scope, receive: Receive, send: Send) -> None:
        chat, model = await self._chat(scope, receive)
        with in_terms_of_responses(chat.request):
            submits = chat_submits(chat.chat, self._service.config, b"")
            await send_json(send, (await rendered(self._service, chat.chat, submits[:1], model))[0])

    async def input_tokens(self, scope: Scope, receive: Receive, send: Send) -> None:
        chat, _ = await self._chat(scope, receive)
        with in_terms_of_responses(chat.request):
            tokenized = await self._service.gateway.tokenize(chat_prompt(chat.chat, self._service.config))
        await send_json(send, InputTokens(len(id_list(tokenized.ids))))

    async def response(self, scope: Scope, receive: Receive, send: Send) -> None:
        owner, id = scope["state"]["salt"], scope["path_params"]["id"]
        stored = await self._stored(owner, id)
        query = dict(parse_qsl(scope["query_string"].decode("latin-1")))
        if query.get("stream") != "true":
            await send_body(send, 200, stored.body)
            return
        after = query.get("starting_after", "-1")
        if not (after.removeprefix("-").isdecimal() and after.isascii() and len(after) < 10):
            raise HttpError(400, "starting_after must be the sequence_number of an event.", param="starting_after")
        first = max(0, int(after) + 1)
        if not stored.is_streamed:
            detail = "Only a response that was made with background and stream can be streamed again."
            raise unsupported("stream", detail)
        await while_connected(receive, send_events(send, self._runs.follow(owner, id, first)))

    async def cancel(self, scope: Scope, receive: Receive, send: Send) -> None:
        owner, id = scope["state"]["salt"], scope["path_params"]["id"]
        if not (await self._stored(owner, id)).is_background:
            raise HttpError(400, "Only a response that is made in the background can be cancelled.")
        await self._runs.cancel(owner, id)
        await send_body(send, 200, (await self._stored(owner, id)).body)

    async def forget(self, scope: Scope, receive: Receive, send: Send) -> None:
        owner, id = scope["state"]["salt"], scope["path_params"]["id"]
        await self._runs.cancel(owner, id)
        if not await self._store.delete(owner, id):
            raise _no_response(id)
        await send_json(send, ResponseDeleted(id))

    async def input_items(self, scope: Scope, receive: Receive, send: Send) -> None:
        stored = await self._stored(scope["state"]["salt"], scope["path_params"]["id"])
        query = dict(parse_qsl(scope["query_string"].decode("latin-1")))
        await send_json(send, page(stored.input_items, query))

    async def _chat(self, scope: Scope, receive: Receive) -> tuple["_Asked", str]:
        """(a request and what it asks of chat, the model's name). Raises HttpError."""
        request = decode_body(self._decoder, await read_json(scope, receive))
        model = self._service.model_name(request.model)
        check_response(request)
        owner = scope["state"]["salt"]
        earlier = await self._earlier_messages(owner, request)
        referred = {id: await self._find_item(owner, id) for id in references(request)}
        conversation = conversation_of(request, earlier, referred.get)
        return _Asked(request, chat_request(request, conversation.json())), model

    async def _stored(self, owner: bytes, id: str) -> StoredResponse:
        stored = await self._store.get(owner, id)
        if stored is None:
            raise _no_response(id)
        return stored

    async def _earlier_messages(self, owner: bytes, request: ResponsesRequest) -> bytes:
        """The messages before the request's own. Raises HttpError 400."""
        conversation, id = _conversation_id(request), request.previous_response_id
        if conversation is not None:
            return await self._conversations.messages(owner, conversation)
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
        if not stored.has_ended:
            raise HttpError(400, f"The response {id[:100]!r} has not ended.", param="previous_response_id")
        return stored.messages

    async def _find_item(self, owner: bytes, id: str) -> InputItem | None:
        """An item of a stored response or conversation."""
        quoted = msgspec.json.encode(id)
        for _, stored in await self._store.list(owner, quoted):
            for items in (msgspec.json.decode(stored.body)["output"], decode_items(stored.input_items)):
                for item in items:
                    if item.get("id") == id:
                        return msgspec.convert(item, InputItem)
        for _, conversation in await self._conversations.store.list(owner, quoted):
            for item in decode_items(conversation.items):
                if item.get("id") == id:
                    return msgspec.convert(item, InputItem)
        return None


class _Asked(NamedTuple):
    request: ResponsesRequest
    chat: ChatRequest


def _conversation_id(request: ResponsesRequest) -> str | None:
    return request.conversation.id if isinstance(request.conversation, ConversationName) else request.conversation


def _no_response(id: str) -> HttpError:
    return HttpError(404, f"There is no response {id[:100]!r}; only the latest are stored.", code="not_found")
