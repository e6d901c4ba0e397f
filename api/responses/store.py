"""Stored responses and conversations. The least recently used are dropped first."""

from msgspec import Struct

from ..state.database import Database
from ..state.records import Records

MAX_STORED_BYTES = 64 << 20


class StoredResponse(Struct, frozen=True, array_like=True):
    """A response, and the conversation for a request that continues it."""

    body: bytes  # the response object as JSON
    messages: bytes  # chat messages as JSON, with the answer, if it has ended, and without the instructions
    input_items: bytes = b"[]"  # the conversation before the answer, as a JSON array of items
    is_background: bool = False
    has_ended: bool = True
    events: bytes = b""  # all events of its stream, if it is streamed in the background
    is_streamed: bool = False  # in the background
    request: bytes = b""  # as JSON, until it has ended
    num_earlier: int = 0  # of `input_items`, how many are not of this request


class StoredConversation(Struct, frozen=True, array_like=True):
    created_at: int  # seconds since 1970
    metadata: dict[str, str]
    items: bytes = b"[]"  # a JSON array


class ResponseStore(Records[StoredResponse]):
    """Responses by owner, the API key that they were made with, and id."""

    def __init__(self, database: Database, max_bytes: int = MAX_STORED_BYTES) -> None:
        super().__init__(database, "response", StoredResponse, max_bytes=max_bytes)


def conversation_store(database: Database, max_bytes: int = MAX_STORED_BYTES) -> Records[StoredConversation]:
    return Records(database, "conversation", StoredConversation, max_bytes=max_bytes)
