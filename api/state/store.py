"""One kind of what is kept for later: values by owner and id, of a bounded size in all.

An entry belongs to the API key that it was made with; nobody else sees it. Values are bytes, whose format is the
caller's. Every call is one transaction, so processes that share a file see each other's changes whole.
"""

import sqlite3
from collections.abc import Callable

from ..http.http_error import HttpError
from .database import Database

ENTRY_BYTES = 512  # overhead of an entry, roughly

_Entries = list[tuple[bytes, str, bytes]]


class Store:
    def __init__(self, database: Database, kind: str, *, max_bytes: int, drops_oldest: bool = True) -> None:
        """`kind`: its name in the database. `max_bytes`: of all its entries. `drops_oldest`: the least recently used
        entries leave for new ones; else a new one is refused."""
        self._database = database
        self._kind = kind
        self._max_bytes = max_bytes
        self._drops_oldest = drops_oldest

    async def put(self, owner: bytes, id: str, value: bytes) -> None:
        """Creates or replaces an entry. An entry that alone exceeds the bound is not stored where the oldest leave.
        Raises HttpError 413 if all is full, 503 if the database cannot be used; so do all methods."""
        await self._database.run(lambda connection: self._put(connection, owner, id, value))

    async def get(self, owner: bytes, id: str) -> bytes | None:
        """The value, if it is still stored and belongs to the owner."""
        return await self._database.run(
            lambda connection: self._get(connection, owner, id),
            writes=self._drops_oldest,  # it is a use
        )

    async def delete(self, owner: bytes, id: str) -> bool:
        """Returns whether there was one."""
        return await self._database.run(lambda connection: self._delete(connection, owner, id))

    async def entries(self, owner: bytes) -> list[tuple[str, bytes]]:
        """Ids and values of the owner's entries, latest first. It is no use that keeps an entry."""
        return await self._database.run(lambda connection: self._entries(connection, owner), writes=False)

    async def entries_between(self, owner: bytes, first: str, end: str, max_bytes: int) -> list[tuple[str, bytes]]:
        """Ids and values of the owner's entries from id `first` to before `end`, in the order of their ids: at least
        one, if there is one, and then as many as `max_bytes` allow. It is no use that keeps an entry."""

        def work(connection: sqlite3.Connection) -> list[tuple[str, bytes]]:
            query = "SELECT id, value FROM entries WHERE kind = ? AND owner = ? AND id >= ? AND id < ? ORDER BY id"
            found, size = list[tuple[str, bytes]](), 0
            for id, value in connection.execute(query, (self._kind, owner, first, end)):
                size += len(value)
                if found and size > max_bytes:
                    break
                found.append((id, value))
            return found

        return await self._database.run(work, writes=False)

    async def change_all(self, change: Callable[[bytes, str, bytes], bytes | None]) -> list[tuple[bytes, str, bytes]]:
        """Replaces each entry of every owner by what `change` makes of owner, id and value, oldest first, with no
        change of others in between, and returns (owner, id, value) of all then. None deletes an entry. `change` is
        called in another thread, and again from the first entry on if it changes one, so it must have no effects."""

        def look(connection: sqlite3.Connection) -> tuple[_Entries, bool]:
            before = self._all(connection)
            after = [(owner, id, change(owner, id, value)) for owner, id, value in before]
            return before, after != before

        def work(connection: sqlite3.Connection) -> _Entries:
            after: _Entries = []
            for owner, id, value in self._all(connection):
                changed = change(owner, id, value)
                if changed is None:
                    self._delete(connection, owner, id)
                    continue
                if changed != value:
                    self._put(connection, owner, id, changed)
                after.append((owner, id, changed))
            return after

        found, differs = await self._database.run(look, writes=False)
        return await self._database.run(work) if differs else found

    async def change(self, owner: bytes, id: str, change: Callable[[bytes | None], bytes | None]) -> bytes | None:
        """Replaces an entry by what `change` makes of its value, with no change of others in between, and returns that.
        None stands for no entry. `change` is called in another thread; what it raises is raised, and nothing changes.
        """

        def work(connection: sqlite3.Connection) -> bytes | None:
            value = change(self._get(connection, owner, id))
            if value is None:
                self._delete(connection, owner, id)
            else:
                self._put(connection, owner, id, value)
            return value

        return await self._database.run(work)

    async def num_bytes(self) -> int:
        """What counts towards the bound."""
        return await self._database.run(self._num_bytes, writes=False)

    # ── within a transaction ─────────────────────────────────────────────────────────────────────────────────────────

    def _put(self, connection: sqlite3.Connection, owner: bytes, id: str, value: bytes) -> None:
        size = len(value) + len(id.encode()) + len(owner) + ENTRY_BYTES
        if size > self._max_bytes and self._drops_oldest:
            self._delete(connection, owner, id)
            return
        old = connection.execute(
            "SELECT size FROM entries WHERE kind = ? AND owner = ? AND id = ?", (self._kind, owner, id)
        ).fetchone()
        total = self._num_bytes(connection) + size - (old[0] if old is not None else 0)
        if total > self._max_bytes and not self._drops_oldest:
            raise HttpError(413, f"What is stored already has {self._max_bytes >> 20} MiB; delete some.")
        connection.execute(
            "INSERT INTO entries (kind, owner, id, used, size, value) VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT "
            "(kind, owner, id) DO UPDATE SET used = excluded.used, size = excluded.size, value = excluded.value",
            (self._kind, owner, id, self._tick(connection), size, value),
        )
        while total > self._max_bytes:
            number, freed = connection.execute(
                "SELECT number, size FROM entries WHERE kind = ? ORDER BY used LIMIT 1", (self._kind,)
            ).fetchone()
            connection.execute("DELETE FROM entries WHERE number = ?", (number,))
            total -= freed
        connection.execute("UPDATE kinds SET size = ? WHERE kind = ?", (total, self._kind))

    def _get(self, connection: sqlite3.Connection, owner: bytes, id: str) -> bytes | None:
        row = connection.execute(
            "SELECT number, value FROM entries WHERE kind = ? AND owner = ? AND id = ?", (self._kind, owner, id)
        ).fetchone()
        if row is None:
            return None
        if self._drops_oldest:
            connection.execute("UPDATE entries SET used = ? WHERE number = ?", (self._tick(connection), row[0]))
        value: bytes = row[1]
        return value

    def _delete(self, connection: sqlite3.Connection, owner: bytes, id: str) -> bool:
        deleted = connection.execute(
            "DELETE FROM entries WHERE kind = ? AND owner = ? AND id = ? RETURNING size", (self._kind, owner, id)
        ).fetchone()
        if deleted is not None:
            connection.execute("UPDATE kinds SET size = size - ? WHERE kind = ?", (deleted[0], self._kind))
        return deleted is not None

    def _entries(self, connection: sqlite3.Connection, owner: bytes) -> list[tuple[str, bytes]]:
        query = "SELECT id, value FROM entries WHERE kind = ? AND owner = ? ORDER BY number DESC"
        return connection.execute(query, (self._kind, owner)).fetchall()

    def _all(self, connection: sqlite3.Connection) -> _Entries:
        query = "SELECT owner, id, value FROM entries WHERE kind = ? ORDER BY number"
        return connection.execute(query, (self._kind,)).fetchall()

    def _num_bytes(self, connection: sqlite3.Connection) -> int:
        row = connection.execute("SELECT size FROM kinds WHERE kind = ?", (self._kind,)).fetchone()
        return 0 if row is None else int(row[0])

    def _tick(self, connection: sqlite3.Connection) -> int:
        """The kind's clock, one later."""
        row = connection.execute(
            "INSERT INTO kinds VALUES (?, 1, 0) ON CONFLICT (kind) DO UPDATE SET clock = clock + 1 RETURNING clock",
            (self._kind,),
        ).fetchone()
        return int(row[0])
