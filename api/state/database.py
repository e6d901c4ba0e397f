"""One SQLite database of an api process, of its own or in a file that other processes and later servers open too.

A thread of its own does all work on it, in the order of the calls, so the event loop never waits for a disk. A database
that is damaged, full or locked costs the requests that need it an error, and nothing else; it is opened again at the
next use, so that a mended one serves without a restart.
"""

import asyncio
import contextlib
import logging
import os
import sqlite3
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ..http.http_error import HttpError

T = TypeVar("T")

_OURS = 0x70776972  # in SQLite's header: the file was made by pagewire
_VERSION = 1  # of the tables
_LOCK_WAIT_S = 5.0
_CACHE_KIB = 65_536  # in memory; of a database of its own the rest goes to a file without a name
_TABLES = """
CREATE TABLE entries (
    number INTEGER PRIMARY KEY,  -- in the order of creation
    kind TEXT NOT NULL,
    owner BLOB NOT NULL,
    id TEXT NOT NULL,
    used INTEGER NOT NULL,  -- the kind's clock at the last use
    size INTEGER NOT NULL,  -- bytes that count towards the kind's bound
    value BLOB NOT NULL,
    UNIQUE (kind, owner, id)
);
CREATE INDEX by_use ON entries (kind, used);
CREATE TABLE kinds (
    kind TEXT PRIMARY KEY,
    clock INTEGER NOT NULL,  -- uses so far
    size INTEGER NOT NULL  -- sum over its entries
);
"""

log = logging.getLogger(__name__)


class Database:
    def __init__(self, path: str | None = None) -> None:
        """`path`: of the file, which is created at the first use; None: it is this object's own and ends with it."""
        self._path = path
        self._complaint = ""  # what was logged since it last worked
        self._opened: list[sqlite3.Connection] = []  # one, or none
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="state")
        weakref.finalize(self, _close, self._opened)  # at the latest when the process ends

    async def run(self, work: Callable[[sqlite3.Connection], T], *, writes: bool = True) -> T:
        """Calls `work` in the thread, within one transaction. `writes` False: it only reads, so it waits for no other
        process, and none waits for it. Raises HttpError 503 if the database cannot be used."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._run, work, writes)

    def close(self) -> None:
        """Waits for the work that was begun."""
        self._thread.shutdown()
        _close(self._opened)

    def _run(self, work: Callable[[sqlite3.Connection], T], writes: bool) -> T:
        try:
            if not self._opened:
                self._opened.append(self._open())
            connection = self._opened[0]
            connection.execute("BEGIN IMMEDIATE" if writes else "BEGIN")
            try:
                done = work(connection)
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:  # a full disk has ended it
                    connection.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            if str(error) != self._complaint:
                log.error("the stored state cannot be used: %s", error)
                self._complaint = str(error)
            if self._path is not None:
                _close(self._opened)
            raise HttpError(503, _sentence(error), code="state_unavailable") from error
        self._complaint = ""
        return done

    def _open(self) -> sqlite3.Connection:
        """Raises sqlite3.Error."""
        if self._path is not None:
            with contextlib.suppress(OSError):  # SQLite says what is wrong
                os.close(os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))  # it holds conversations
        connection = sqlite3.connect(
            self._path or "", timeout=_LOCK_WAIT_S, isolation_level=None, check_same_thread=False
        )
        try:
            connection.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")  # a lost power supply costs the last changes only
            connection.execute("BEGIN IMMEDIATE")
            owner, version = (connection.execute(f"PRAGMA {name}").fetchone()[0] for name in _HEADER)
            if not owner and not connection.execute("SELECT 1 FROM sqlite_master").fetchone():
                for statement in _TABLES.split(";\n"):
                    connection.execute(statement)
                connection.execute(f"PRAGMA application_id = {_OURS}")
                connection.execute(f"PRAGMA user_version = {_VERSION}")
            elif (owner, version) != (_OURS, _VERSION):
                raise _ForeignFileError("the file was made by another program or another version of pagewire")
            connection.execute("COMMIT")
        except BaseException:
            connection.close()
            raise
        return connection


def _close(opened: list[sqlite3.Connection]) -> None:
    while opened:
        opened.pop().close()


_HEADER = ("application_id", "user_version")


class _ForeignFileError(sqlite3.DatabaseError):
    pass


def _sentence(error: sqlite3.Error) -> str:
    """What a client is told; the log has SQLite's own words."""
    if isinstance(error, _ForeignFileError):
        return "The server's state file is not one of this version of pagewire."
    match getattr(error, "sqlite_errorcode", None):
        case sqlite3.SQLITE_FULL:
            return "The server's state file is full, so this cannot be stored."
        case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
            return "The server's state file is damaged, so nothing stored can be read."
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return "The server's state file is locked by another program; try again."
        case _:
            return "The server's state file cannot be used; its log says why."
