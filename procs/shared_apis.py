"""The api processes of a launch of several engines (`procs/engines.py`), and the supervisor that replaces them.

They serve every engine, so their deaths begin no epoch of their own: each engine begins one, to forget their requests.
"""

import asyncio
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from ..config.config import ServerConfig
from ..ipc.epochs import NO_ENGINE
from ..ipc.messages import Change, Demand, ModelStates, Replaced, Reset, Swap, Vacate, Vacated
from .child import EngineMailboxes
from .listening import Listening
from .live_settings import LiveSettings
from .supervisor import Supervisor
from .topology import apis

_VACATED_POLL_S = 0.05


class SharedApis(Supervisor):
    """`run` is called once, as of every supervisor."""

    def __init__(
        self,
        config: ServerConfig,
        *,
        folder: Path,
        listening: Listening,
        engines: Callable[[], tuple[EngineMailboxes, ...]],
        on_lost: Callable[[Sequence[str], str], None],
        on_swap: Callable[[Swap], None] | None,
        notes: Callable[[], list[str]],
        on_demand: Callable[[Demand], None] | None = None,
        on_change: Callable[[Change], None] | None = None,
        settings: LiveSettings | None = None,
    ) -> None:
        """`folder`: for their mailboxes. `engines`: the engines as they are now. `on_lost` is called with the names of
        processes that are replaced, and the reason. `notes`: of the engines, for the announcement. `on_demand`: of
        several models. `on_change`: of engines that share the requests; `settings` are theirs."""
        names = apis(config.http.service.api_processes)
        super().__init__(config, actors=names, listening=listening, on_swap=on_swap, settings=settings)
        self._given_folder = folder
        self._engine = NO_ENGINE
        self._mailboxes_of_engines = engines  # type: ignore[method-assign]
        self._on_lost = on_lost
        self._demanded = on_demand
        self._on_asked_change = on_change
        self._notes_of_engines = notes
        self._vacated: dict[int, set[str]] = {}  # engine → the api processes that have nothing open there
        self.addresses = {name: f"ipc://{folder}/{name}" for name in names}

    @property
    def notes(self) -> list[str]:
        return self._notes_of_engines()

    def serve(self) -> None:
        self._mark("engines ready")
        super().serve()

    def tell(self, message: Reset | Vacate | ModelStates | Replaced) -> None:
        """Sends it to all of them."""
        if not self._is_over:
            for outbox in self._outboxes.values():
                outbox.send(message)

    async def fail(self) -> None:
        """Has them fail every open request, and ends."""
        for child in self._children.values():
            child.may_end = True
        await self._fail_requests()
        self.on_signal(signal.SIGTERM)

    async def vacate(self, engine: int, within_s: float) -> None:
        """Has them send this engine nothing new; returns when nothing is open there, or after `within_s`."""
        vacated = self._vacated[engine] = set[str]()
        self.tell(Vacate(engine))
        deadline = asyncio.get_running_loop().time() + within_s
        while not vacated.issuperset(self._apis) and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(_VACATED_POLL_S)

    def _on_demand(self, message: Demand) -> None:
        if self._demanded is not None:
            self._demanded(message)

    def _on_asked(self, change: Change) -> None:
        if self._on_asked_change is not None:
            self._on_asked_change(change)

    def _on_vacated(self, message: Vacated) -> None:
        self._vacated.setdefault(message.engine, set()).add(message.name)

    def _tell_reset(self, lost: Sequence[str], reason: str, *, is_planned: bool = False) -> None:
        self._on_lost(lost, reason)

    def _tell_restored(self) -> None:
        """The engines do, when they have forgotten the requests of lost api processes."""
        self._restored = self._epoch
