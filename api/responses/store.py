"""Stored responses, in the memory of one api process, with a bound: the least recently used are dropped first.

A response belongs to the API key that it was made with.
"""

from collections import OrderedDict
from typing import NamedTuple

MAX_STORED_BYTES = 64 << 20
_ENTRY_BYTES = 512  # overhead of an entry, roughly


class StoredResponse(NamedTuple):
    """A response, and the conversation for a request that continues it."""

    body: bytes  # the response object as JSON
    messages: bytes  # chat messages as JSON, with the answer and without the instructions
    input_items: bytes = b"[]"  # the conversation before the answer, as a JSON array of items


class ResponseStore:
    def __init__(self, max_bytes: int = MAX_STORED_BYTES) -> None:
        self._max_bytes = max_bytes
        self._responses: OrderedDict[tuple[bytes, str], StoredResponse] = OrderedDict()
        self.num_bytes = 0

    def put(self, owner: bytes, id: str, response: StoredResponse) -> None:
        """Stores a response and drops others for it; does nothing if it alone exceeds the bound."""
        self.delete(owner, id)
        size = _size(response)
        if size > self._max_bytes:
            return
        self._responses[owner, id] = response
        self.num_bytes += size
        while self.num_bytes > self._max_bytes:
            _, dropped = self._responses.popitem(last=False)
            self.num_bytes -= _size(dropped)

    def get(self, owner: bytes, id: str) -> StoredResponse | None:
        """The response, if it is still stored and belongs to the owner."""
        response = self._responses.get((owner, id))
        if response is not None:
            self._responses.move_to_end((owner, id))
        return response

    def delete(self, owner: bytes, id: str) -> bool:
        """Returns whether there was one."""
        deleted = self._responses.pop((owner, id), None)
        if deleted is not None:
            self.num_bytes -= _size(deleted)
        return deleted is not None


def _size(response: StoredResponse) -> int:
    return len(response.body) + len(response.messages) + len(response.input_items) + _ENTRY_BYTES
