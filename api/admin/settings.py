"""/admin/settings: administrators see which settings hold, who changed what and when, and change some of them while the
server runs."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, Struct
from starlette.types import Receive, Scope, Send

from ...config.config import EngineConfig
from ...config.flags import SETTINGS
from ...config.live import LIVE, RELOADABLE, value_of
from ...ipc.messages import Settings, Swapped
from ..http.exchange import read_json, send_json
from ..http.http_error import HttpError
from ..http.operation import Operation
from ..openai.translate import decode_body
from ..output.service import Service

Change = Callable[[bytes, str], Awaitable[Swapped]]
"""Asks the supervisor for changed settings: a JSON object, and who asks. The answer comes when they hold everywhere."""

Changes = Annotated[dict[str, object], Meta(description="Settings by the names of their flags, such as max_num_seqs")]


class Holding:
    """What an api process knows of the settings that hold."""

    def __init__(self, start: EngineConfig, settings: Callable[[], Settings], change: Change) -> None:
        """`start`: by which memory was reserved."""
        self.start = start
        self.settings = settings
        self.change = change


class SettingStatus(Struct, frozen=True):
    name: str
    value: object
    kept: bool  # a change, which later servers with the same --state have as well
    within: object = UNSET  # its value at the start, which has reserved memory for no more


class PastChange(Struct, frozen=True):
    name: str
    old: object
    new: object
    who: str  # key and the beginning of the key's SHA-256, or SIGHUP, or the state that was kept
    at: float  # seconds since 1970


class SettingList(Struct, frozen=True):
    data: list[SettingStatus]  # that may change now
    history: list[PastChange]  # the last changes, oldest first
    reload: list[str]  # settings that POST /admin/models changes, by loading the model again
    restart: list[str]  # settings that need a restart
    detail: str = ""  # to a change: what an administrator should know besides


class SettingsEndpoints:
    def __init__(self, service: Service, holding: Holding) -> None:
        self._service = service
        self._holding = holding
        self._decoder = msgspec.json.Decoder(dict[str, object])

    def routes(self) -> Sequence[Operation]:
        """They need an administrator's key, so a server without one has no operation for them."""
        if not self._service.http.admin_keys:
            return []
        path = "/admin/settings"
        example: dict[str, object] = {"max_queued_requests": self._service.config.max_queued_requests}
        change = Operation(
            "PATCH",
            path,
            self.change,
            "Change settings while the server runs",
            takes=Changes,
            example=example,
            gives=SettingList,
        )
        return [Operation("GET", path, self.show, "Settings, and who changed what and when", gives=SettingList), change]

    async def show(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, self._list())

    async def change(self, scope: Scope, receive: Receive, send: Send) -> None:
        """All that the body names, or nothing. Answers when it holds in every process that serves requests."""
        changes = decode_body(self._decoder, await read_json(scope, receive))
        if not changes:
            raise HttpError(400, 'Say what to change, such as {"max_num_seqs": 64}.')
        answer = await self._holding.change(msgspec.json.encode(changes), scope["state"]["caller"])
        if answer.status >= 400:
            raise HttpError(answer.status, answer.detail)
        await send_json(send, self._list(answer.detail))

    def _list(self, detail: str = "") -> SettingList:
        now, http = self._holding.settings(), self._service.http
        data = []
        for one in LIVE:
            within = value_of(self._holding.start, http, one.name) if one.live == "within" else UNSET
            data.append(SettingStatus(one.name, value_of(now.engine, http, one.name), one.name in now.kept, within))
        history = [PastChange(one.name, one.old, one.new, one.who, one.at) for one in now.history]
        others = [one.name for one in SETTINGS.values() if one.live is None]
        return SettingList(
            data,
            history,
            reload=[name for name in others if name in RELOADABLE],
            restart=[name for name in others if name not in RELOADABLE],
            detail=detail,
        )
