"""What is kept of responses and conversations."""

from msgspec import Struct

from ..output.store import Store

MAX_STORED_BYTES = 64 << 20


class StoredResponse(Struct, frozen=True):
    """A response, and the conversation for a request that continues it."""

    body: bytes  # the response object as JSON
    messages: bytes  # chat messages as JSON, with the answer and without the instructions
    input_items: bytes = b"[]"  # the conversation before the answer, as a JSON array of items
    is_background: bool = False
    has_ended: bool = True
    events: bytes = b""  # all events of its stream, if it is streamed in the background


class StoredConversation(Struct, frozen=True):
    created_at: int  # seconds since 1970
    metadata: dict[str, str]
    items: bytes = b"[]"  # a JSON array


def response_store(max_bytes: int = MAX_STORED_BYTES) -> Store[StoredResponse]:
    return Store(StoredResponse, max_bytes)


def conversation_store(max_bytes: int = MAX_STORED_BYTES) -> Store[StoredConversation]:
    return Store(StoredConversation, max_bytes)
