"""Records of one type in a `Store`."""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import msgspec

from .database import Database
from .store import Store

R = TypeVar("R", bound=msgspec.Struct)


class Records(Generic[R]):
    """Entries by owner and id. Raises what `Store` raises."""

    def __init__(
        self, database: Database, kind: str, type: type[R], *, max_bytes: int, drops_oldest: bool = True
    ) -> None:
        """Parameters as of `Store`."""
        self._store = Store(database, kind, max_bytes=max_bytes, drops_oldest=drops_oldest)
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(type).decode

    async def put(self, owner: bytes, id: str, record: R) -> None:
        """Stores or replaces a record, as `Store.put`."""
        await self._store.put(owner, id, self._encode(record))

    async def get(self, owner: bytes, id: str) -> R | None:
        """The record, if it is still stored and belongs to the owner."""
        value = await self._store.get(owner, id)
        return None if value is None else self._decode(value)

    async def delete(self, owner: bytes, id: str) -> bool:
        """Returns whether there was one."""
        return await self._store.delete(owner, id)

    async def list(self, owner: bytes, containing: bytes = b"") -> "list[tuple[str, R]]":
        """(id, record) of the owner's records in which these bytes occur, latest first."""
        found = await self._store.entries(owner)
        return [(id, self._decode(value)) for id, value in found if containing in value]

    async def change(self, owner: bytes, id: str, change: Callable[[R], R]) -> R | None:
        """Replaces a record by what `change` makes of it, with no change of others in between; None: there is none."""

        def changed(value: bytes | None) -> bytes | None:
            return None if value is None else self._encode(change(self._decode(value)))

        value = await self._store.change(owner, id, changed)
        return None if value is None else self._decode(value)

    async def change_all(self, change: Callable[[bytes, str, R], R | None]) -> Sequence[tuple[bytes, str, R]]:
        """Replaces each record by what `change` makes of owner, id and record, as `Store.change_all`."""

        def changed(owner: bytes, id: str, value: bytes) -> bytes | None:
            record = change(owner, id, self._decode(value))
            return None if record is None else self._encode(record)

        return [(owner, id, self._decode(value)) for owner, id, value in await self._store.change_all(changed)]

    async def all(self) -> Sequence[tuple[bytes, str, R]]:
        """(owner, id, record) of all records, oldest first."""
        return await self.change_all(lambda owner, id, record: record)
