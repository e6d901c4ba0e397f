"""Replaces the model of a running server: the engine that serves, and the one that takes its place.

Each model is served by one engine or several, with processes of their own. Both models share the listening socket: when
the new one is ready, the old one stops accepting, serves its open connections, and ends. If memory does not suffice for
both, the old one ends first, and new connections wait in the socket's queue.
"""

import asyncio
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec
from msgspec import structs

from ..config.config import Config, EngineConfig, ModelVersion, ServerConfig
from ..config.flags import from_options
from ..config.live import RELOADABLE
from ..config.machine import machine_facts
from ..errors import ConfigError, PagewireError
from ..ipc.messages import Swap, Swapped
from ..ipc.zmq_channel import make_run_folder, remove_run_folder
from .child import process_age_s
from .engines import Engines
from .kept_settings import SettingsFile
from .listening import Listening
from .live_settings import LiveSettings
from .prepare import read_keys
from .supervisor import Supervisor, with_state

Generation = Supervisor | Engines
"""What serves one model; a launch of several engines has one object for all of them."""

_KV_BYTES = 4 << 30  # a worker's KV cache at most, if --kv-cache-memory is not given
_PROCESSES_BYTES = 1 << 30  # of the processes themselves


class Generations:
    """The engines of one `pagewire serve`. `run` is called once."""

    def __init__(
        self,
        config: Config,
        prepare: Callable[[Config], ServerConfig],
        read_again: Callable[[], Config] | None = None,
    ) -> None:
        """`prepare` may take long; from its second call on it runs on a thread. `read_again`: reads flags and files
        once more, on SIGHUP (default: nothing but the files of keys is read)."""
        self._prepare = prepare
        self._read_again = read_again
        self._config = config
        self._configs: dict[int, Config] = {}  # by version
        self._versions: tuple[ModelVersion, ...] = ()
        self._engine: Generation
        self._running: dict[Generation, asyncio.Task[int]] = {}  # also one that drains or starts
        self._swap: asyncio.Task[None] | None = None
        self._settings: LiveSettings | None = None  # of the engine that was started last
        self._reading: asyncio.Task[None] | None = None  # because of SIGHUP
        self._signals: list[signal.Signals] = []
        self._asked_at_s = 0.0  # age of this process when the last swap was asked for

    async def run(self) -> int:
        """From start to stop. The exit code is that of the engine that served last."""
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, self._on_signal, signum)
        prepared = self._prepare(self._config)
        loop.add_signal_handler(signal.SIGHUP, self._on_hangup)
        self._listening = Listening(prepared.http.listen)
        self._folder = make_run_folder()
        state = prepared.http.reports.state
        file = None if state is None else SettingsFile(state)
        self._settings = LiveSettings(prepared, file=file)
        try:
            for line in await self._settings.restore():
                self._print(line)
            self._begin(self._config, prepared)
            self._engine.serve()
            return await self._watch()
        finally:
            if file is not None:
                file.close()
            self._listening.close()
            remove_run_folder(self._folder)

    async def _watch(self) -> int:
        """Waits until the engine that serves has ended and no swap is under way. The exit code."""
        while True:
            engine = self._engine
            await asyncio.wait({self._running[engine]})
            if self._swap is not None:  # it may have ended because of the swap
                await asyncio.wait({self._swap})
            if engine is self._engine:
                for other in () if self._signals else self._running:  # else they got the signal
                    other.on_signal(signal.SIGTERM)
                return max([await task for task in list(self._running.values())])

    def _on_signal(self, signum: signal.Signals) -> None:
        self._signals.append(signum)
        for engine in self._running:
            engine.on_signal(signum)

    def _on_hangup(self) -> None:
        if self._swap is None and (self._reading is None or self._reading.done()):
            self._reading = asyncio.ensure_future(self._follow_files())

    async def _follow_files(self) -> None:
        """Takes over what the file of settings and those of keys say now. Several engines restart one by one."""
        engine, settings = self._engine, self._engine.settings
        try:
            config = self._config if self._read_again is None else await asyncio.to_thread(self._read_again)
            keys, admin_keys = read_keys(config)
            found, others = settings.read_again(config, keys, admin_keys, "SIGHUP", time.time())
        except ConfigError as error:
            self._print(f"SIGHUP: {error} Nothing was changed.")
        else:
            if found is not None:
                await engine.apply(found)
                if problem := await settings.keep():
                    self._print(problem)
            last = () if found is None else [one for one in found.history if one.at == found.history[-1].at]
            for one in last:
                self._print(f"SIGHUP: {one.name} is {msgspec.json.encode(one.new).decode()} now.")
            for name in others:
                self._print(f"SIGHUP: {name} needs a restart.")
            if not last and not others:
                self._print("SIGHUP: no setting has changed.")
        if isinstance(engine, Engines) and engine is self._engine and self._swap is None:
            engine.on_hangup()

    def _print(self, text: str) -> None:
        print(f"pagewire: {text}", file=sys.stderr, flush=True)

    def _begin(self, config: Config, prepared: ServerConfig, weight_fds: Sequence[int] = ()) -> Generation:
        """Starts an engine, which does not listen yet. weight_fds: packed weights of another one."""
        number = len(self._versions) + 1
        self._configs[number] = config
        retired = tuple(
            version if version.state == "failed" else structs.replace(version, state="retired")
            for version in self._versions
        )
        model, name = prepared.engine.model, prepared.engine.served_model_names[0]
        version = ModelVersion(number, model.path, name, int(time.time()), "serving")
        self._versions = (*retired, version)
        http = structs.replace(prepared.http, versions=self._versions)
        prepared = structs.replace(prepared, http=with_state(http, self._folder))
        assert self._settings is not None
        if number > 1:
            self._settings = self._settings.after(prepared)
        one = partial(Supervisor, asked_at_s=self._asked_at_s)  # several have no timeline
        make: Callable[..., Generation] = Engines if prepared.engine.data_parallel_size > 1 else one
        engine: Generation = make(
            prepared,
            listening=self._listening,
            on_swap=lambda swap: self._on_swap(engine, swap),
            weight_fds=weight_fds,
            settings=self._settings,
        )
        self._running[engine] = asyncio.ensure_future(engine.run())
        self._engine = engine
        return engine

    def _on_swap(self, engine: Generation, swap: Swap) -> None:
        """`engine`: the one whose api got the request; a request on an old connection may reach one that drains."""
        if self._swap is not None or self._signals or engine is not self._engine:
            detail = "Another model is being loaded or has taken over, or the server stops."
            engine.answer(swap.name, Swapped(swap.number, 409, detail))
            return
        engine.settings.hindrance = "Another model is being loaded; change settings when that is over."
        if (said := engine.settings.now.said) is not None:  # with what was changed meanwhile
            self._config = self._configs[len(self._versions)] = said.config
        self._swap = asyncio.ensure_future(self._replace(engine, swap))
        self._swap.add_done_callback(self._swapped)

    def _swapped(self, task: asyncio.Task[None]) -> None:
        self._swap = None
        self._engine.settings.hindrance = ""
        task.result()  # the loop logs an exception

    async def _replace(self, old: Generation, swap: Swap) -> None:
        """Replaces `old`, or keeps it if the new engine does not start."""
        self._asked_at_s = process_age_s()
        try:
            config = self._changed(swap)
            prepared = await asyncio.to_thread(self._prepare, config)
        except PagewireError as error:
            old.answer(swap.name, Swapped(swap.number, 400, str(error)))
            return
        before = self._config
        weight_fds = old.weights_for(prepared.engine)
        if swap.must_drain or not _has_room(prepared.engine, shares_weights=bool(weight_fds)):
            old.answer(swap.name, Swapped(swap.number, 202, "The model is loaded when open requests have ended."))
            old.retire()
            await self._running.pop(old)
            if not await self._try(config, prepared, weight_fds) and not self._signals:
                failed = self._engine
                print("pagewire: going back to the model before.", file=sys.stderr)
                self._asked_at_s = process_age_s()
                if await self._try(before, await asyncio.to_thread(self._prepare, before)):
                    del self._running[failed]  # its exit code is not the server's
            return
        versions = self._versions
        engine = self._begin(config, prepared, weight_fds)
        if not await self._is_up(engine):
            detail = f"The model could not be loaded: {engine.failure or 'it was stopped.'}"
            del self._running[engine]
            self._engine, self._versions = old, versions
            old.answer(swap.name, Swapped(swap.number, 422, detail))
            return
        self._config = config
        old.answer(swap.name, Swapped(swap.number, 200, f"{prepared.engine.served_model_names[0]} is served now."))
        old.retire()
        engine.serve()
        self._running[old].add_done_callback(lambda _: self._running.pop(old, None))

    async def _try(self, config: Config, prepared: ServerConfig, weight_fds: Sequence[int] = ()) -> bool:
        """Starts this engine and has it listen. Whether it became ready."""
        versions = self._versions
        engine = self._begin(config, prepared, weight_fds)
        if not await self._is_up(engine):
            (*_, version) = self._versions
            problem = engine.failure or "It was stopped."
            self._versions = (*versions, structs.replace(version, state="failed", problem=problem))
            return False
        self._config = config
        engine.serve()
        return True

    async def _is_up(self, engine: Generation) -> bool:
        """Waits until the engine is ready or has ended. Whether it is ready."""
        ready = asyncio.ensure_future(engine.is_ready.wait())
        await asyncio.wait((ready, self._running[engine]), return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        return engine.is_ready.is_set() and not self._running[engine].done()

    def _changed(self, swap: Swap) -> Config:
        """The settings that `swap` asks for. Raises ConfigError."""
        config = self._config if swap.version is None else self._configs.get(swap.version)
        if config is None:
            raise ConfigError(f"There is no version {swap.version}; there are 1 to {len(self._versions)}.")
        return changed(config, msgspec.json.decode(swap.changes, type=dict[str, object]))


def changed(config: Config, changes: dict[str, object]) -> Config:
    """`config` with the settings that a request of an administrator changes. Raises ConfigError."""
    if unknown := sorted(changes.keys() - RELOADABLE):
        raise ConfigError(f"{unknown[0]} cannot be changed while serving; {', '.join(sorted(RELOADABLE))} can.")
    for name in ("tool_call_parser", "reasoning_parser"):
        if ":" in str(changes.get(name, "")):  # importing a module runs its code
            raise ConfigError(f"{name} must be the name of a family here; only the command line may name a module.")
    return from_options("POST /admin/models", changes, base=config)


def _has_room(config: EngineConfig, *, shares_weights: bool) -> bool:
    """Whether this engine can run beside the present one: memory for its weights and KV, and no fixed addresses.
    shares_weights: it maps those of the present engine."""
    has_gpu = config.device == "cuda" or (config.device == "auto" and machine_facts().has_gpu)
    if has_gpu or config.client_address or config.kv_events or config.kv_connector:
        return False
    weights = 0 if shares_weights else 2 * _weight_bytes(config)  # twice while they are packed
    needed = weights + config.data_parallel_size * ((config.kv_cache_memory or _KV_BYTES) + _PROCESSES_BYTES)
    lines = Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else []
    available = sum(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    return needed <= available


def _weight_bytes(config: EngineConfig) -> int:
    """About what the engine's weights take, at most."""
    model = config.model
    if config.runs_in_c and config.quantization is None:
        return model.weight_bytes if model.checkpoint_dtype != "float16" else 2 * model.weight_bytes  # float32
    return model.wide_bytes * (2 if config.dtype == "float32" != model.checkpoint_dtype else 1)
