"""Several models behind one port: `pagewire serve MODEL MODEL …`.

Each model that is loaded is an engine with processes, epochs and a supervisor of its own, as those of
`procs/engines.py`. The api processes belong to none of them and know all models from the start: one that is not loaded
is to them an engine in an outage, so its requests wait in their gateway. `residency.py` decides what is loaded.
"""

import asyncio
import contextlib
import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from ..config.config import Config, EngineConfig, ServerConfig
from ..config.machine import available_memory
from ..config.model_list import ModelEntry, read_models
from ..engine.runner.needs import Need
from ..errors import ConfigError
from ..ipc.messages import Demand, ModelState, ModelStates, Reset, Swap, Swapped
from ..ipc.zmq_channel import make_run_folder, remove_run_folder
from . import interpreter
from .child import EngineMailboxes
from .engines import EnginePart
from .listening import Listening
from .residency import Load, Residency, Resident, Terms, misfits
from .shared_apis import SharedApis
from .template import Templates

PROCESSES_BYTES = 400 << 20  # of an engine's processes, besides weights, workspace and KV
_BUDGET_SHARE = 0.8  # of the memory that is free at the start


class ServedModel(Struct, frozen=True):
    """One of the models, decided."""

    engine: EngineConfig
    terms: Terms

    @property
    def name(self) -> str:
        return self.engine.served_model_names[0]


class Change(Struct, frozen=True):
    """What an administrator asks for, as the body of `Swap`."""

    model: int  # its number
    loaded: bool | None = None
    pinned: bool | None = None


def prepare_models(
    config: Config, prepare: Callable[[Config], ServerConfig]
) -> tuple[ServerConfig, tuple[ServedModel, ...], int]:
    """The settings of the api processes, the models and the bytes that they may take together. Raises ConfigError, with
    a sentence for each model that cannot be served."""
    _check(config)
    entries = read_models(config)
    prepared: list[ServerConfig] = []
    problems: list[str] = []
    for entry in entries:
        try:
            prepared.append(prepare(entry.config))
        except ConfigError as error:
            problems.append(f"--models {entry.where}: {error}")
    _raise(problems)
    engines = [
        _of_model(number, server.engine, entry)
        for number, (server, entry) in enumerate(zip(prepared, entries, strict=True))
    ]
    names: dict[str, str] = {}
    for engine, entry in zip(engines, entries, strict=True):
        for name in engine.served_model_names:
            if name in names:
                problems.append(
                    f"--models {entry.where}: {names[name]} is called {name!r} as well; give one of them a "
                    "served_model_name."
                )
            names[name] = entry.where
        if engine.device == "cuda":
            problems.append(f"--models {entry.where}: several models are for --device cpu.")
    _raise(problems)
    budget = config.service.models_memory or int(_BUDGET_SHARE * available_memory())
    models = []
    for engine, entry, need in zip(engines, entries, _needs(engines), strict=True):
        if need.problem:
            problems.append(f"--models {entry.where}: {need.problem}")
        total = need.weights + need.workspace + need.kv_cache + PROCESSES_BYTES
        terms = Terms(total, entry.is_pinned, entry.keep_alive_s)
        models.append(ServedModel(replace(engine, kv_cache_memory=need.kv_cache or engine.kv_cache_memory), terms))
    _raise(problems)
    for number in misfits(budget, [model.terms for model in models]):
        problems.append(
            f"--models {entries[number].where}: it takes {models[number].terms.need_bytes / 1e9:.1f} GB, and what is "
            f"pinned leaves less of {budget / 1e9:.1f} GB; raise --models-memory or lower its kv_cache_memory."
        )
    _raise(problems)
    return replace(prepared[0], engine=engines[0]), tuple(models), budget


def _raise(problems: Sequence[str]) -> None:
    if problems:
        raise ConfigError(" ".join(problems))


def _check(config: Config) -> None:
    """Refuses what only a single model can have. Raises ConfigError."""
    engine, service = config.engine, config.service
    for flag, is_asked in (
        ("--data-parallel-size", engine.data_parallel_size > 1),
        ("--nnodes", service.nnodes > 1 or service.join_address is not None),
        ("--backend ray", service.backend == "ray"),
        ("--enable-model-swap", config.admin.enable_model_swap),
        ("--client-address", engine.client_address is not None),
        ("--record-trace", engine.record_trace is not None),
        ("--kv-events", engine.kv_events is not None),
        ("--kv-connector disk or p2p", any(spec.startswith(("disk", "p2p")) for spec in engine.kv_connector)),
    ):
        if is_asked:
            raise ConfigError(f"{flag} is for a server of one model; leave it out, or name one model.")


def _of_model(number: int, engine: EngineConfig, entry: ModelEntry) -> EngineConfig:
    return replace(engine, engine_number=number, is_one_of_models=True, system_prompt=entry.system_prompt)


def _needs(engines: Sequence[EngineConfig]) -> list[Need]:
    """Of each engine, by the memory plan."""
    done = subprocess.run(
        [*interpreter.COMMAND, "pagewire.engine.runner.needs"],
        input=msgspec.json.encode(engines),
        stdout=subprocess.PIPE,
        env=interpreter.environment(),
        check=False,
    )
    if done.returncode:
        raise ConfigError("The memory that the models need could not be calculated; the lines above say why.")
    return msgspec.json.decode(done.stdout, type=list[Need])


class Models:
    """The models of one launch and its api processes. `run` is called once."""

    make_part = EnginePart

    def __init__(self, config: ServerConfig, models: Sequence[ServedModel], budget_bytes: int) -> None:
        """`config`: of the api processes. `models` and `budget_bytes`: as `prepare_models` returns them."""
        self._config = config
        self._models = models
        self._service = config.http.service
        self._residency = Residency(budget_bytes, [model.terms for model in models], time.monotonic())
        self._epochs: list[tuple[int, int]] = [(1, 1)] * len(models)  # of what runs, or ran last
        self._parts: dict[int, EnginePart] = {}  # those that run
        self._templates = Templates()  # of all of them, so that only the first load imports torch
        self._tasks: set[asyncio.Task[None]] = set()  # one for each load and each unload
        self._unloading: set[int] = set()
        self._told: ModelStates | None = None
        self._signals: list[signal.Signals] = []
        self._is_open = False
        self._failure = 0  # exit code of a pinned model that did not start
        self._woken = asyncio.Event()

    async def run(self) -> int:
        """From start to stop. The exit code."""
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, self._on_signal, signum)
        listening = Listening(self._config.http.listen)
        folders: list[Path] = []
        try:
            folders += [make_run_folder() for _ in range(len(self._models) + 1)]
            self._folders = folders[1:]
            self._apis = SharedApis(
                self._config,
                folder=folders[0],
                listening=listening,
                engines=self._mailboxes,
                on_lost=self._on_lost_apis,
                on_swap=self._on_change,
                notes=self._notes,
                on_demand=self._on_demand,
            )
            self._serving = asyncio.ensure_future(self._apis.run())
            self._serving.add_done_callback(lambda _: self._woken.set())
            is_ready = asyncio.ensure_future(self._apis.is_ready.wait())
            is_ready.add_done_callback(lambda _: self._woken.set())
            code = await self._watch()
            is_ready.cancel()
            return code
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._templates.close()
            listening.close()
            for folder in folders:
                remove_run_folder(folder)

    async def _watch(self) -> int:
        """Carries out what is decided, until the api processes have ended. The exit code."""
        while not self._serving.done():
            now = time.monotonic()
            for action in () if self._signals or self._failure else self._residency.decide(now):
                self._begin(self._load(action.number) if isinstance(action, Load) else self._unload(action.number))
            self._tell_states()
            if not self._is_open and self._apis.is_ready.is_set() and self._has_pinned:
                self._is_open = True
                self._apis.serve()
            if self._failure and not self._signals:
                self._on_signal(signal.SIGTERM)
            again_at = self._residency.decide_again_at(now)
            await self._wait(None if again_at == math.inf else max(0.0, again_at - now))
        code = await self._serving
        for part in self._parts.values():
            for _ in range(max(1, len(self._signals))):
                part.on_signal(signal.SIGTERM)
        while self._parts:
            await self._wait(None)
        return self._failure or code

    async def _wait(self, timeout_s: float | None) -> None:
        """Until something has happened, or it is time to decide again."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._woken.wait(), timeout_s)
        self._woken.clear()

    @property
    def _has_pinned(self) -> bool:
        return all(model.state == "loaded" for model in self._residency.models if model.terms.is_pinned)

    def _on_signal(self, signum: signal.Signals) -> None:
        self._signals.append(signum)
        self._apis.on_signal(signum)
        if self._serving.done():
            for part in self._parts.values():
                part.on_signal(signum)
        self._woken.set()

    # ── the api processes ────────────────────────────────────────────────────────────────────────────────────────────

    def _mailboxes(self) -> tuple[EngineMailboxes, ...]:
        """The models, for an api process that starts now."""
        found = []
        for number, (model, folder) in enumerate(zip(self._models, self._folders, strict=True)):
            part = self._parts.get(number)
            epochs = self._epochs[number] if part is None else max(part.epochs, self._epochs[number])
            addresses = {name: f"ipc://{folder}/{name}" for name in ("tokenizer", "core")}
            found.append(EngineMailboxes(addresses, *epochs, config=model.engine))
        return tuple(found)

    def _notes(self) -> list[str]:
        return [f"{len(self._models)} models: {', '.join(model.name for model in self._models)}"]

    def _on_lost_apis(self, lost: Sequence[str], reason: str) -> None:
        now = time.monotonic()
        for name in lost:
            self._residency.forget(name, now)
        for part in self._parts.values():
            part.lose_apis(lost, reason)
        self._told = None
        self._woken.set()

    def _on_demand(self, demand: Demand) -> None:
        self._residency.use(
            demand.model, demand.name, time.monotonic(), is_open=demand.is_open, keep_alive_s=demand.keep_alive_s
        )
        self._woken.set()

    def _on_change(self, swap: Swap) -> None:
        """An administrator loads, unloads, pins or unpins a model."""
        change = msgspec.json.decode(swap.changes, type=Change)
        problem = self._residency.ask(change.model, time.monotonic(), is_loaded=change.loaded, is_pinned=change.pinned)
        answer = Swapped(swap.number, 409, problem) if problem else Swapped(swap.number, 202, "It is being done.")
        self._apis.answer(swap.name, answer)
        self._woken.set()

    def _tell_states(self) -> None:
        """Tells the api processes what has changed."""
        states = tuple(
            ModelState(
                model.state,
                model.since,
                model.terms.need_bytes,
                model.terms.is_pinned,
                model.expires_at(),
                model.load_s,
                model.problem,
                self._progress(model) if model.state == "loading" else None,
            )
            for model in self._residency.models
        )
        found = ModelStates(states, self._residency.budget_bytes)
        if found != self._told and self._apis.is_ready.is_set():
            self._told = found
            self._apis.tell(found)

    def _progress(self, model: Resident) -> float:
        """In hundredths, because each change is told."""
        part = self._parts.get(model.number)
        return 0.0 if part is None else math.floor(100 * part.loaded_share) / 100

    # ── the models ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _load(self, number: int) -> None:
        """Starts an engine, and returns when it has ended."""
        model = self._models[number]
        self._print(f"{model.name} is being loaded.")
        self._lose(number, f"{model.name} is being loaded.")
        part = self._parts[number] = self.make_part(
            replace(self._config, engine=model.engine),
            folder=self._folders[number],
            apis=self._apis.addresses,
            epochs=self._epochs[number],
            weight_fds=(),
            templates=self._templates,
            on_loading=self._woken.set,
        )
        running = asyncio.ensure_future(part.run())
        ready = asyncio.ensure_future(part.is_ready.wait())
        try:
            await asyncio.wait((ready, running), return_when=asyncio.FIRST_COMPLETED)
            has_loaded = ready.done() and not running.done()
            if has_loaded:
                self._residency.has_loaded(number, time.monotonic())
                self._print(f"{model.name} is loaded, after {self._residency.models[number].load_s:.1f} s.")
                part.serve()
                self._woken.set()
            code = await running
        finally:
            ready.cancel()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            del self._parts[number]
            self._woken.set()
        problem = "" if number in self._unloading or self._signals else part.failure or f"It ended with code {code}."
        self._unloading.discard(number)
        why = f"{model.name} could not be served: {problem}" if problem else f"{model.name} is not loaded."
        self._print(why if problem else f"{model.name} is unloaded.")
        self._epochs[number] = max(part.epochs, self._epochs[number])
        self._lose(number, why)
        if model.terms.is_pinned and not self._is_open:
            self._failure = code or 1
        self._residency.has_ended(number, time.monotonic(), why if problem else "")

    async def _unload(self, number: int) -> None:
        """Its requests end first; those that take longer than --drain-timeout go on when it is loaded again."""
        part = self._parts[number]
        self._unloading.add(number)
        await self._apis.vacate(number, self._service.drain_timeout)
        part.on_signal(signal.SIGTERM)

    def _lose(self, number: int, why: str) -> None:
        """Has the api processes hold its requests."""
        chain, device = self._epochs[number]
        self._epochs[number] = chain + 1, device + 1
        self._apis.tell(Reset(chain + 1, device + 1, (), why, number))

    def _print(self, text: str) -> None:
        print(f"pagewire: {text}", file=sys.stderr, flush=True)
