"""/v1/conversations: items that are kept under an id, which responses continue."""

import time
from typing import Annotated, Literal
from urllib.parse import parse_qsl

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace
from starlette.types import Receive, Scope, Send

from ..http.exchange import read_json, send_json
from ..http.http_error import HttpError
from ..http.operation import Operation
from ..openai.conversation import Conversation
from ..openai.translate import decode_body, request_decoder
from ..output.reply import new_id
from ..state.records import Records
from .input_items import InputItemsQuery, Item, ItemList, input_items, page
from .request import add_item
from .store import StoredConversation
from .types import InputItem

MAX_ADDED = 20  # items of one request, as at OpenAI
_Items = Annotated[list[InputItem], Meta(max_length=MAX_ADDED)]
_Metadata = Annotated[dict[str, str], Meta(max_length=16)]
_items_decoder = msgspec.json.Decoder(list[InputItem])
_fields_decoder = msgspec.json.Decoder(list[Item])


class CreateConversation(Struct, frozen=True):
    """POST /v1/conversations"""

    items: _Items | None = None
    metadata: _Metadata | None = None


class UpdateConversation(Struct, frozen=True):
    """POST /v1/conversations/{id}"""

    metadata: _Metadata


class AddItems(Struct, frozen=True):
    """POST /v1/conversations/{id}/items"""

    items: _Items


class ConversationBody(Struct, frozen=True):
    id: str
    created_at: int
    metadata: dict[str, str]
    object: Literal["conversation"] = "conversation"


class ConversationDeleted(Struct, frozen=True):
    id: str
    object: Literal["conversation.deleted"] = "conversation.deleted"
    deleted: bool = True


class Conversations:
    """The stored conversations, as responses use them."""

    def __init__(self, store: Records[StoredConversation]) -> None:
        self.store = store

    async def get(self, owner: bytes, id: str, *, status: int = 404) -> StoredConversation:
        """Raises HttpError with this status."""
        stored = await self.store.get(owner, id)
        if stored is None:
            detail = f"There is no conversation {id[:100]!r}; only the latest are stored."
            raise HttpError(status, detail, code="not_found", param=None if status == 404 else "conversation")
        return stored

    async def messages(self, owner: bytes, id: str) -> bytes:
        """The conversation as chat messages. Raises HttpError 400."""
        return messages_of(_items_decoder.decode((await self.get(owner, id, status=400)).items))

    async def extend(self, owner: bytes, id: str, items: bytes) -> None:
        """Adds a JSON array of items, unless the conversation was deleted meanwhile."""
        await self.store.change(owner, id, lambda stored: replace(stored, items=joined(stored.items, items)))


class ConversationEndpoints:
    def __init__(self, conversations: Conversations) -> None:
        self._conversations = conversations
        self._create_decoder = request_decoder(CreateConversation)
        self._update_decoder = request_decoder(UpdateConversation)
        self._add_decoder = request_decoder(AddItems)

    def routes(self) -> list[Operation]:
        base = "/v1/conversations"
        one, items, item = f"{base}/{{id}}", f"{base}/{{id}}/items", f"{base}/{{id}}/items/{{item_id}}"
        return [
            Operation(
                "POST", base, self.create, "Keep a conversation", takes=CreateConversation, gives=ConversationBody
            ),
            Operation("GET", one, self.conversation, "A conversation", gives=ConversationBody),
            Operation("POST", one, self.update, "Set its metadata", takes=UpdateConversation, gives=ConversationBody),
            Operation("DELETE", one, self.forget, "Forget a conversation", gives=ConversationDeleted),
            Operation("GET", items, self.items, "Its items", query=InputItemsQuery, gives=ItemList),
            Operation("POST", items, self.add, "Add items to it", takes=AddItems, gives=ItemList),
            Operation("GET", item, self.item, "One of its items", gives=Item),
            Operation("DELETE", item, self.remove, "Remove an item", gives=ConversationBody),
        ]

    async def create(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = decode_body(self._create_decoder, await read_json(scope, receive))
        id = new_id("conv_")
        stored = StoredConversation(int(time.time()), request.metadata or {}, new_items(request.items or []))
        await self._conversations.store.put(scope["state"]["salt"], id, stored)
        await send_json(send, _body(id, stored))

    async def conversation(self, scope: Scope, receive: Receive, send: Send) -> None:
        _, id, stored = await self._found(scope)
        await send_json(send, _body(id, stored))

    async def update(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = decode_body(self._update_decoder, await read_json(scope, receive))
        owner, id, stored = await self._found(scope)
        stored = replace(stored, metadata=request.metadata)
        await self._conversations.store.put(owner, id, stored)
        await send_json(send, _body(id, stored))

    async def forget(self, scope: Scope, receive: Receive, send: Send) -> None:
        owner, id, _ = await self._found(scope)
        await self._conversations.store.delete(owner, id)
        await send_json(send, ConversationDeleted(id))

    async def items(self, scope: Scope, receive: Receive, send: Send) -> None:
        _, _, stored = await self._found(scope)
        await send_json(send, page(stored.items, dict(parse_qsl(scope["query_string"].decode("latin-1")))))

    async def add(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = decode_body(self._add_decoder, await read_json(scope, receive))
        owner, id, _ = await self._found(scope)
        added = new_items(request.items)
        await self._conversations.extend(owner, id, added)
        await send_json(send, page(added, {"order": "asc", "limit": "100"}))

    async def item(self, scope: Scope, receive: Receive, send: Send) -> None:
        _, _, stored = await self._found(scope)
        await send_json(send, self._item(scope, stored)[1])

    async def remove(self, scope: Scope, receive: Receive, send: Send) -> None:
        owner, id, stored = await self._found(scope)
        items, item = self._item(scope, stored)
        stored = replace(stored, items=msgspec.json.encode([one for one in items if one is not item]))
        await self._conversations.store.put(owner, id, stored)
        await send_json(send, _body(id, stored))

    async def _found(self, scope: Scope) -> tuple[bytes, str, StoredConversation]:
        owner, id = scope["state"]["salt"], scope["path_params"]["id"]
        return owner, id, await self._conversations.get(owner, id)

    def _item(self, scope: Scope, stored: StoredConversation) -> tuple[list[Item], Item]:
        """(all items, the one that the path names). Raises HttpError 404."""
        id, items = scope["path_params"]["item_id"], _fields_decoder.decode(stored.items)
        for item in items:
            if item.get("id") == id:
                return items, item
        raise HttpError(404, f"The conversation has no item {id[:100]!r}.", code="not_found")


def messages_of(items: list[InputItem]) -> bytes:
    """Items as chat messages. Raises HttpError."""
    conversation = Conversation()
    for i, item in enumerate(items):
        add_item(conversation, item, f"items[{i}]")
    return conversation.json()


def new_items(items: list[InputItem]) -> bytes:
    """Items of a client as they are stored, with new ids. Raises HttpError."""
    return input_items(messages_of(items))


def joined(first: bytes, second: bytes) -> bytes:
    """Two JSON arrays as one."""
    return msgspec.json.encode([*_fields_decoder.decode(first), *_fields_decoder.decode(second)])


def _body(id: str, stored: StoredConversation) -> ConversationBody:
    return ConversationBody(id, stored.created_at, stored.metadata)
