"""The responses that may be asked for again, in memory and within a bound: the longest unused go first.

Owned by one api process and gone with it. A response belongs to the API key that it was made with.
"""

from collections import OrderedDict
from typing import NamedTuple

MAX_STORED_BYTES = 64 << 20
_ENTRY_BYTES = 512  # what an entry costs besides its contents, roughly


class StoredResponse(NamedTuple):
    """One response and what it takes to go on after it."""

    body: bytes  # the response object, as it was sent
    messages: bytes  # the conversation in chat's shape, answer included and instructions not
    input_items: bytes = b"[]"  # the conversation before the answer, as a JSON array of items


class ResponseStore:
    """Response by owner and id."""

    def __init__(self, max_bytes: int = MAX_STORED_BYTES) -> None:
        self._max_bytes = max_bytes
        self._responses: OrderedDict[tuple[bytes, str], StoredResponse] = OrderedDict()
        self.num_bytes = 0

    def put(self, owner: bytes, id: str, response: StoredResponse) -> None:
        """Keeps it, at the cost of others; not at all if it alone is over the bound."""
        self.delete(owner, id)
        size = _size(response)
        if size > self._max_bytes:
            return
        self._responses[owner, id] = response
        self.num_bytes += size
        while self.num_bytes > self._max_bytes:
            _, gone = self._responses.popitem(last=False)
            self.num_bytes -= _size(gone)

    def get(self, owner: bytes, id: str) -> StoredResponse | None:
        """The response, if it is still here and this owner's."""
        response = self._responses.get((owner, id))
        if response is not None:
            self._responses.move_to_end((owner, id))
        return response

    def delete(self, owner: bytes, id: str) -> bool:
        """Whether there was one."""
        gone = self._responses.pop((owner, id), None)
        if gone is not None:
            self.num_bytes -= _size(gone)
        return gone is not None


def _size(response: StoredResponse) -> int:
    return len(response.body) + len(response.messages) + len(response.input_items) + _ENTRY_BYTES
