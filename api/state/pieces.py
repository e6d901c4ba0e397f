"""Contents of any length, such as files: numbered pieces, so that none is in memory as a whole."""

from collections.abc import AsyncIterator

from .database import Database
from .store import Store

PIECE_BYTES = 256 << 10  # of a content that its writer cuts
_READ_BYTES = 1 << 20  # at a time


class Pieces:
    """Contents by owner and id. Nothing leaves by itself. Raises what `Store` raises."""

    def __init__(self, database: Database, kind: str, *, max_bytes: int) -> None:
        """`kind`: its name in the database. `max_bytes`: of all contents."""
        self._store = Store(database, kind, max_bytes=max_bytes, drops_oldest=False)

    async def put(self, owner: bytes, id: str, number: int, piece: bytes) -> None:
        """Stores or replaces a piece. Numbers may be left out; the order of pieces is that of their numbers."""
        await self._store.put(owner, _key(id, number), piece)

    async def read(self, owner: bytes, id: str, first: int = 0) -> AsyncIterator[tuple[int, bytes]]:
        """(number, piece), from the number `first` on. Pieces that are put meanwhile may come or not."""
        while found := await self._store.entries_between(owner, _key(id, first), _end(id), _READ_BYTES):
            for key, piece in found:
                first = int(key.rpartition("/")[2])
                yield first, piece
            first += 1

    async def delete(self, owner: bytes, id: str) -> None:
        """Deletes all pieces, if there are any."""
        while found := await self._store.entries_between(owner, _key(id, 0), _end(id), _READ_BYTES):
            for key, _ in found:
                await self._store.delete(owner, key)

    async def num_bytes(self) -> int:
        """What counts towards the bound."""
        return await self._store.num_bytes()


def _key(id: str, number: int) -> str:
    return f"{id}/{number:010}"


def _end(id: str) -> str:
    return f"{id}0"  # follows the slash
