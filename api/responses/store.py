"""Stored responses. The least recently used are dropped first."""

import msgspec

from ..state.database import Database
from ..state.store import Store

MAX_STORED_BYTES = 64 << 20


class StoredResponse(msgspec.Struct, frozen=True, array_like=True):
    """A response, and the conversation for a request that continues it."""

    body: bytes  # the response object as JSON
    messages: bytes  # chat messages as JSON, with the answer and without the instructions
    input_items: bytes = b"[]"  # the conversation before the answer, as a JSON array of items


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(StoredResponse).decode


class ResponseStore:
    """Responses by owner, the API key that they were made with, and id. Raises what `Store` raises."""

    def __init__(self, database: Database, max_bytes: int = MAX_STORED_BYTES) -> None:
        self._store = Store(database, "response", max_bytes=max_bytes)

    async def put(self, owner: bytes, id: str, response: StoredResponse) -> None:
        """Stores a response and drops others for it; does nothing if it alone exceeds the bound."""
        await self._store.put(owner, id, _encode(response))

    async def get(self, owner: bytes, id: str) -> StoredResponse | None:
        """The response, if it is still stored and belongs to the owner."""
        value = await self._store.get(owner, id)
        return None if value is None else _decode(value)

    async def delete(self, owner: bytes, id: str) -> bool:
        """Returns whether there was one."""
        return await self._store.delete(owner, id)
