"""The settings of an engine that may change while it runs: what holds now, and who changed what.

A supervisor owns them, because it outlives its processes. It has a change checked here, as one, by the parsing and the
checks of the start, tells its processes (`Settings`), and waits until those that serve requests say that it holds.
Whatever it starts later is given the settings of the engine's start, within which workers have reserved memory, and the
last `Settings`.
"""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from ..config.access import ApiKey
from ..config.config import Config, Said, ServerConfig, num_machines
from ..config.flags import SETTINGS, from_options, get_setting
from ..config.live import LIVE, check_live, decide, value_of
from ..engine.core.speculation import num_draft_tokens
from ..engine.kv_connector import registry as kv_connectors
from ..errors import ConfigError
from ..ipc.messages import Change, ChangedSetting, Settings, Swapped
from .kept_settings import Kept, KeptSettings, SettingsFile

MAX_HISTORY = 200

Apply = Callable[[Settings], Awaitable[None]]
"""Tells all processes; returns when the settings hold in all that serve requests."""


class LiveSettings:
    """Those of one engine, or of several that share the requests."""

    def __init__(self, config: ServerConfig, *, file: SettingsFile | None = None) -> None:
        """`config`: with which the engine is started. `file`: where changes are kept for later servers."""
        self._start = self.now = config
        self._read = config.said  # what flags and files said last
        self._file = file
        self.history: tuple[ChangedSetting, ...] = ()
        self._number = 0  # of changes
        self.hindrance = ""  # why nothing can be changed now

    def after(self, config: ServerConfig) -> "LiveSettings":
        """Those of an engine that takes the place of this one. `config`: with which it is started."""
        found = LiveSettings(config, file=self._file)
        found.history, found._read = self.history, self._read
        if self._read is not None and config.said is not None:  # what it is loaded with besides is no change to keep
            before = self._said.config
            loaded = {
                one.name: get_setting(config.said.config, one.name)
                for one in LIVE
                if get_setting(config.said.config, one.name) != get_setting(before, one.name)
            }
            found._read = replace(self._read, config=from_options("after", loaded, base=self._read.config))
        return found

    @property
    def message(self) -> Settings | None:
        """For a process that starts now; None: nothing was changed."""
        if not self._number and not self.history:
            return None
        kept = () if self._file is None else tuple(self._kept())
        return Settings(self._number, self.now.engine, self.now.http, self.history, kept)

    async def answer(self, asked: Change, apply: Apply) -> Swapped:
        """Does what an administrator asks for. The answer comes when it holds everywhere."""
        if self.hindrance:
            return Swapped(asked.number, 409, self.hindrance)
        try:
            changes = msgspec.json.decode(asked.changes, type=dict[str, object])
            settings = self.change(changes, asked.who, time.time())
        except ConfigError as error:
            return Swapped(asked.number, 400, str(error))
        if settings is None:
            return Swapped(asked.number, 200, "It was so already.")
        await apply(settings)
        return Swapped(asked.number, 200, await self.keep())

    async def keep(self) -> str:
        """Has later servers begin with what was changed. A sentence for the operator if that failed."""
        if self._file is None:
            return ""
        problem = await self._file.write(KeptSettings(self._kept(), self.history))
        return f"The change holds, but later servers will not have it: {problem}" if problem else ""

    def _kept(self) -> dict[str, Kept]:
        """The live settings that are not as flags and files say."""
        if self._read is None or self.now.said is None:
            return {}
        pairs = {
            one.name: Kept(*(msgspec.to_builtins(get_setting(said.config, one.name)) for said in (now, self._read)))
            for now in [self.now.said]
            for one in LIVE
        }
        return {name: kept for name, kept in pairs.items() if kept.value != kept.said}

    async def restore(self) -> list[str]:
        """At the start: what earlier servers have kept holds, as far as flags and files still say what they said then.
        Returns lines for the operator."""
        if self._file is None:
            return []
        kept, problem = await self._file.read()
        lines = [f"changed settings cannot be read: {problem}"] if problem else []
        config = self._said.config
        changes: dict[str, object] = {}
        for name, one in kept.values.items():
            if name not in SETTINGS or SETTINGS[name].live is None:
                continue
            if msgspec.to_builtins(get_setting(config, name)) == one.said:
                changes[name] = one.value
            else:
                lines.append(f"{SETTINGS[name].flag} is another one than when {name} was changed, and holds now")
        try:
            if changes:
                self.change(changes, "", 0.0)
                what = ", ".join(f"{name} = {msgspec.json.encode(value).decode()}" for name, value in changes.items())
                lines.append(f"settings that were changed before hold again: {what}")
        except ConfigError as error:
            lines.append(f"settings that were changed before do not hold: {error}")
        self.history = kept.history
        return lines

    def change(self, changes: Mapping[str, object], who: str, at: float) -> Settings | None:
        """Changes settings by name, all or none. None: they are so already. Raises ConfigError."""
        for name in changes:
            check_live(name)
        said = self._said
        config = from_options("/admin/settings", changes, base=said.config)
        return self._become(replace(said, config=config), who, at)

    def read_again(
        self, config: Config, keys: Sequence[ApiKey], admin_keys: Sequence[ApiKey], who: str, at: float
    ) -> tuple[Settings | None, list[str]]:
        """Takes over what flags and files say differently than when they were read last. Returns what follows, if
        anything, and the names of those settings that need a restart. Raises ConfigError."""
        said = self._said
        before = said if self._read is None else self._read
        changed = {
            name: get_setting(config, name)
            for name in SETTINGS
            if get_setting(config, name) != get_setting(before.config, name)
        }
        live = {name: value for name, value in changed.items() if SETTINGS[name].live is not None}
        new = replace(said, keys=tuple(keys), admin_keys=tuple(admin_keys))
        found = self._become(replace(new, config=from_options("--config", live, base=said.config)), who, at)
        self._read = replace(new, config=config)
        return found, [name for name in changed if name not in live]

    @property
    def _said(self) -> Said:
        if self.now.said is None:
            raise ConfigError("The settings of this server cannot be changed while it runs.")
        return self.now.said

    def _become(self, said: Said, who: str, at: float) -> Settings | None:
        """What `said` leads to holds from now on, unless it is refused."""
        before, after = self.now, decide(said, self.now)
        self._check_within(after)
        changed = [
            ChangedSetting(one.name, value_of(before.engine, before.http, one.name), new, who, at)
            for one in LIVE
            if (new := value_of(after.engine, after.http, one.name)) != value_of(before.engine, before.http, one.name)
        ]
        for name in ("api_keys", "admin_keys"):  # themselves they are not shown
            old, new = (getattr(config.http, name) for config in (before, after))
            if [key.key for key in old] != [key.key for key in new] or (old != new and not changed):
                changed.append(ChangedSetting(name, f"{len(old)} keys", f"{len(new)} keys", who, at))
        self.now = after
        if not changed:
            return None
        self._number += 1
        self.history = (*self.history, *changed)[-MAX_HISTORY:]
        return self.message

    def _check_within(self, after: ServerConfig) -> None:
        """Raises ConfigError for more than the start has reserved."""
        start, new = self._start.engine, after.engine
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            asked, most = getattr(new, name), getattr(start, name)
            if asked > most:
                raise ConfigError(
                    f"{name} {asked} is more than the {most} for which memory was reserved at the start; more needs a "
                    "restart."
                )
        drafts, most = num_draft_tokens(new.speculative), num_draft_tokens(start.speculative)
        if drafts > most:
            given = f"--speculative {start.speculative}" if most else "no --speculative"
            raise ConfigError(f"speculative {new.speculative}: the start was given {given}; more needs a restart.")
        if new.kv_connector != start.kv_connector:
            kv_connectors.check_smaller(start.kv_connector, new.kv_connector)
        service, before = after.http.service, self.now.http.service
        is_spread = num_machines(service, new.pipeline_parallel_size) > 1 or service.backend != "local"
        if is_spread and service.hang_timeout_s != before.hang_timeout_s:
            raise ConfigError("hang_timeout_s needs a restart on several machines: their leases depend on it.")
