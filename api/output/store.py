"""What an api process keeps for later requests, by owner and id, with a bound: what was used least recently goes first.

An owner is the salt of the API key that a thing was made with. Others can neither read nor delete it.
"""

from collections import OrderedDict
from typing import Generic, TypeVar

import msgspec

_ENTRY_BYTES = 512  # overhead of an entry, roughly

R = TypeVar("R", bound=msgspec.Struct)


class Store(Generic[R]):
    """Records of one type, in memory."""

    def __init__(self, type: type[R], max_bytes: int) -> None:
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(type).decode
        self._max_bytes = max_bytes
        self._records: OrderedDict[tuple[bytes, str], bytes] = OrderedDict()
        self.num_bytes = 0

    def put(self, owner: bytes, id: str, record: R) -> None:
        """Stores or replaces a record, and drops others for it; does nothing if it alone exceeds the bound."""
        self.delete(owner, id)
        data = self._encode(record)
        if len(data) + _ENTRY_BYTES > self._max_bytes:
            return
        self._records[owner, id] = data
        self.num_bytes += len(data) + _ENTRY_BYTES
        while self.num_bytes > self._max_bytes:
            _, dropped = self._records.popitem(last=False)
            self.num_bytes -= len(dropped) + _ENTRY_BYTES

    def get(self, owner: bytes, id: str) -> R | None:
        """The record, if it is still stored and belongs to the owner."""
        data = self._records.get((owner, id))
        if data is None:
            return None
        self._records.move_to_end((owner, id))
        return self._decode(data)

    def delete(self, owner: bytes, id: str) -> bool:
        """Returns whether there was one."""
        data = self._records.pop((owner, id), None)
        if data is not None:
            self.num_bytes -= len(data) + _ENTRY_BYTES
        return data is not None

    def list(self, owner: bytes, containing: bytes = b"") -> "list[tuple[str, R]]":
        """(id, record) of the owner's records in which these bytes occur, the one used last first."""
        found = [(id, data) for (of, id), data in self._records.items() if of == owner and containing in data]
        return [(id, self._decode(data)) for id, data in reversed(found)]
