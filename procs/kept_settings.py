"""What of the changed settings later servers with the same --state have as well.

Only a supervisor reads and writes it. Its loop waits for no disk: the database works in a thread of its own.
"""

import msgspec
from msgspec import Struct

from ..api.http.http_error import HttpError
from ..api.state.database import Database
from ..api.state.store import Store
from ..ipc.messages import ChangedSetting

_MAX_BYTES = 4 << 20
_ID = "live"


class Kept(Struct, frozen=True):
    """A changed setting. Values are of JSON's types."""

    value: object
    said: object  # by a flag, a file or the default; while they say so, the changed value holds


class KeptSettings(Struct, frozen=True):
    values: dict[str, Kept] = {}  # by name
    history: tuple[ChangedSetting, ...] = ()


class SettingsFile:
    def __init__(self, path: str) -> None:
        self._database = Database(path)
        self._store = Store(self._database, "settings", max_bytes=_MAX_BYTES)

    async def read(self) -> tuple[KeptSettings, str]:
        """What is kept, and one sentence about why it cannot be read."""
        try:
            value = await self._store.get(b"", _ID)
            return KeptSettings() if value is None else msgspec.json.decode(value, type=KeptSettings), ""
        except (HttpError, msgspec.DecodeError) as error:
            return KeptSettings(), str(error)

    async def write(self, kept: KeptSettings) -> str:
        """One sentence about why that failed; empty: it did not."""
        try:
            await self._store.put(b"", _ID, msgspec.json.encode(kept))
        except HttpError as error:
            return str(error)
        return ""

    def close(self) -> None:
        self._database.close()
