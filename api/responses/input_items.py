"""GET /v1/responses/{id}/input_items: the conversation before a response, as a list of items in pages."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from ..http.http_error import HttpError
from ..output.reply import new_id

MAX_LISTED = 100
_LISTED = 20  # by default
Item = dict[str, object]


class InputItemsQuery(Struct, frozen=True):
    limit: Annotated[int, Meta(ge=1, le=MAX_LISTED)] = _LISTED
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None


class ItemList(Struct, frozen=True):
    """A page. `has_more`: there are items after `last_id`."""

    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class _Function(Struct):
    name: str
    arguments: str


class _Call(Struct):
    id: str
    function: _Function


class _Part(Struct):
    text: str


class _Message(Struct):
    """A message as `Conversation` writes it."""

    role: str
    content: str | list[_Part]
    reasoning_content: str | None = None
    tool_calls: list[_Call] = []
    tool_call_id: str = ""


def input_items(messages: bytes) -> bytes:
    """The messages of a `Conversation` as a JSON array of items with new ids."""
    items: list[Item] = []
    for message in msgspec.json.decode(messages, type=list[_Message]):
        texts = [message.content] if isinstance(message.content, str) else [part.text for part in message.content]
        if message.role == "tool":
            items.append(_item("fco_", "function_call_output", call_id=message.tool_call_id, output=texts[0]))
            continue
        if message.reasoning_content is not None:
            thought = {"type": "reasoning_text", "text": message.reasoning_content}
            items.append(_item("rs_", "reasoning", summary=[], content=[thought]))
        parts: list[Item] = [{"type": "input_text", "text": text} for text in texts]
        if message.role == "assistant":
            parts = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []} for text in texts if text]
        if parts:
            items.append(_item("msg_", "message", role=message.role, content=parts))
        for call in message.tool_calls:
            function = call.function
            items.append(
                _item("fc_", "function_call", call_id=call.id, name=function.name, arguments=function.arguments)
            )
    return msgspec.json.encode(items)


def decode_items(items: bytes) -> list[Item]:
    """The items of a JSON array."""
    return msgspec.json.decode(items, type=list[Item])


def page(items: bytes, query: dict[str, str]) -> ItemList:
    """The requested part of `items`. Raises HttpError."""
    found = decode_items(items)
    order, after, limit = query.get("order", "desc"), query.get("after"), query.get("limit", str(_LISTED))
    if order not in ("asc", "desc"):
        raise HttpError(400, 'order must be "asc" or "desc".', param="order")
    if not (limit.isascii() and limit.isdigit() and len(limit) < 4 and 1 <= int(limit) <= MAX_LISTED):
        raise HttpError(400, f"limit must be a number from 1 to {MAX_LISTED}.", param="limit")
    if order == "desc":
        found.reverse()
    if after is not None:
        places = [i for i, item in enumerate(found, start=1) if item["id"] == after]
        if not places:
            raise HttpError(400, f"after: there is no item {after[:100]!r}.", param="after")
        found = found[places[0] :]
    shown = found[: int(limit)]
    first, last = (str(shown[0]["id"]), str(shown[-1]["id"])) if shown else (None, None)
    return ItemList(shown, first, last, has_more=len(found) > len(shown))


def _item(prefix: str, type: str, **fields: object) -> Item:
    return {"id": new_id(prefix), "type": type, "status": "completed", **fields}
