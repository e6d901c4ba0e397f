"""Several models behind one port: `pagewire serve MODEL MODEL …`.

Each model that is loaded is an engine or several, with processes, epochs and a supervisor of its own, as those of
`procs/engines.py`. The api processes belong to none of them and know all models from the start: one that is not loaded
is to them an engine in an outage, so its requests wait in their gateway. `residency.py` decides what is loaded.
"""

import asyncio
import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from urllib.parse import quote

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from ..config.config import Config, EngineConfig, MachineFacts, ServerConfig
from ..config.gpu import free_gpu_memory
from ..config.machine import available_memory, machine_facts
from ..config.model_list import ModelEntry, read_models
from ..engine.kv_connector.registry import host_bytes, in_folder, serve_addresses
from ..engine.runner.needs import Need, Question
from ..errors import ConfigError
from ..ipc.epochs import NO_ENGINE
from ..ipc.messages import Demand, ModelState, ModelStates, Replaced, Reset, Swap, Swapped
from ..ipc.zmq_channel import make_run_folder, remove_run_folder
from . import interpreter
from .child import EngineMailboxes
from .engines import EnginePart, of_engine
from .generations import changed
from .gpu_memory import Free, place, wait_for_room
from .listening import Listening
from .residency import Load, Residency, Resident, Terms, misfits
from .shared_apis import SharedApis
from .template import Templates
from .weight_memory import close_segments, new_segments

PROCESSES_BYTES = 400 << 20  # of an engine's processes, besides weights, workspace and KV
GPU_WORKER_BYTES = 2 << 30  # of the host's memory, for a worker that has opened a GPU; estimated
GPU_BYTES = 1 << 30  # of a GPU, for the context, the kernels and the recorded steps of a worker; estimated
_BUDGET_SHARE = 0.8  # of the host's memory that is free at the start


class ServedModel(Struct, frozen=True):
    """One of the models, decided."""

    entry: ModelEntry
    engines: tuple[EngineConfig, ...]
    terms: Terms
    gpu_needs: dict[str, int] = {}  # bytes of each GPU that it takes, by its name

    @property
    def name(self) -> str:
        return self.engines[0].served_model_names[0]


class Change(Struct, frozen=True):
    """What an administrator asks for, as the body of `Swap`."""

    model: int  # its number
    loaded: bool | None = None
    pinned: bool | None = None
    settings: dict[str, object] | None = None  # of another version


def prepare_models(
    config: Config, prepare: Callable[[Config], ServerConfig]
) -> tuple[ServerConfig, tuple[ServedModel, ...], tuple[int, ...]]:
    """The settings of the api processes, the models, and the bytes of each memory that they may take together: the
    host's, and each GPU's. Raises ConfigError, with a sentence for each model that cannot be served."""
    _check(config)
    entries = read_models(config)
    prepared: list[ServerConfig] = []
    problems: list[str] = []
    for entry in entries:
        try:
            _check_engine(entry.config, "")
            prepared.append(prepare(entry.config))
        except ConfigError as error:
            problems.append(f"--models {entry.where}: {error}")
    _raise(problems)
    engines = [_of_entry(entry, server) for server, entry in zip(prepared, entries, strict=True)]
    _raise(_clashes(entries, engines))
    machine = machine_facts()
    budgets = _budgets(config, machine, has_gpu=any(engine.kernels is None for engine in engines))
    models = _plan(entries, engines, machine, budgets)
    for number in misfits(budgets, [model.terms for model in models]):
        needs = zip(models[number].terms.needs, budgets, strict=True)
        what = ", ".join(
            f"{need / 1e9:.1f} of {budget / 1e9:.1f} GB of {'a GPU' if place else 'memory'}"
            for place, (need, budget) in enumerate(needs)
            if need
        )
        problems.append(
            f"--models {entries[number].where}: it takes {what}, and what is pinned leaves less; raise --models-memory "
            "or lower its kv_cache_memory."
        )
    _raise(problems)
    return replace(prepared[0], engine=models[0].engines[0]), models, budgets


def _raise(problems: Sequence[str]) -> None:
    if problems:
        raise ConfigError(" ".join(problems))


def _check(config: Config) -> None:
    """Refuses what only a single model can have. Raises ConfigError."""
    service = config.service
    for flag, is_asked in (
        ("--nnodes", service.nnodes > 1 or service.join_address is not None),
        ("--backend ray", service.backend == "ray"),
    ):
        if is_asked:
            raise ConfigError(f"{flag} is for a server of one model; leave it out, or name one model.")
    _check_engine(config, ", or name one model")


def _check_engine(config: Config, instead: str) -> None:
    """Refuses the same among the settings of an engine. `instead`: what else the user could do. Raises ConfigError."""
    engine = config.engine
    for flag, is_asked in (
        ("--client-address", engine.client_address is not None),
        ("--record-trace", engine.record_trace is not None),
        ("--kv-events", engine.kv_events is not None),
    ):
        if is_asked:
            raise ConfigError(f"{flag} is for a server of one model; leave it out{instead}.")
    tiers = [spec for spec in engine.kv_connector if spec.partition(",")[0] in ("disk", "p2p")]
    if tiers and engine.data_parallel_size > 1:
        raise ConfigError(f"--kv-connector {tiers[0]} is for a single engine; leave it or --data-parallel-size out.")


def _of_entry(entry: ModelEntry, server: ServerConfig) -> EngineConfig:
    """With a folder of its own in that of the tier `disk`, which locks its folder."""
    engine = server.engine
    name = quote(engine.served_model_names[0], safe="")
    name = f"%2E{name[1:]}" if name.startswith(".") else name
    return replace(engine, kv_connector=in_folder(engine.kv_connector, name), system_prompt=entry.system_prompt)


def _clashes(entries: Sequence[ModelEntry], engines: Sequence[EngineConfig]) -> list[str]:
    """What two models have, and only one can: a name, an address. A sentence for each."""
    problems, taken = [], dict[tuple[str, str], str]()
    for entry, engine in zip(entries, engines, strict=True):
        own = [("is called", name, "give one of them a served_model_name") for name in engine.served_model_names]
        own += [
            ("serves its KV at", address, "give one of them a kv_connector with an address of its own")
            for address in serve_addresses(engine.kv_connector, engine.num_ranks)
        ]
        for what, name, advice in own:
            if (what, name) in taken:
                problems.append(f"--models {entry.where}: {taken[what, name]} {what} {name!r} as well; {advice}.")
            taken[what, name] = entry.where
    num = sum(engine.data_parallel_size for engine in engines)
    if num > NO_ENGINE:
        problems.append(f"--data-parallel-size: the models have {num} engines together; {NO_ENGINE} are possible.")
    return problems


def _budgets(config: Config, machine: MachineFacts, *, has_gpu: bool) -> tuple[int, ...]:
    """What the models may take of each memory. Raises ConfigError."""
    host = config.service.models_memory or int(_BUDGET_SHARE * available_memory())
    if not has_gpu:
        return (host,)
    if not machine.gpus:
        raise ConfigError(
            "Several models on GPUs need to know how much memory these have, and NVIDIA's management library (NVML) "
            "does not say it, or CUDA_VISIBLE_DEVICES has numbers of different GPUs: name them as GPU-…, or take "
            "--device cpu."
        )
    share = config.engine.gpu_memory_utilization
    return (host, *(min(int(share * gpu.total_bytes), gpu.free_bytes) for gpu in machine.gpus))


def _plan(
    entries: Sequence[ModelEntry], engines: Sequence[EngineConfig], machine: MachineFacts, budgets: Sequence[int]
) -> tuple[ServedModel, ...]:
    """The models with what they need, by the memory plan, and where. Raises ConfigError."""
    needs = _needs(_questions(engines, machine, budgets))
    problems = [
        f"--models {entry.where}: {need.problem}" for entry, need in zip(entries, needs, strict=True) if need.problem
    ]
    num_gpus = len(budgets) - 1
    of_gpus = []
    for entry, engine, need in zip(entries, engines, needs, strict=True):
        num = engine.num_ranks * engine.data_parallel_size if engine.kernels is None else 0
        if num > num_gpus:
            problems.append(f"--models {entry.where}: it needs {num} GPUs, and there are {num_gpus}.")
        of_gpus.append((num, _gpu_need(need)))
    _raise(problems)
    places = place(of_gpus, num_gpus, [entry.is_pinned for entry in entries])
    models: list[ServedModel] = []
    for entry, engine, need, own in zip(entries, engines, needs, places, strict=True):
        first = sum(len(model.engines) for model in models)
        models.append(_planned(entry, engine, need, first, machine, own, num_gpus))
    return tuple(models)


def another_version(
    model: ServedModel, entry: ModelEntry, budgets: Sequence[int], prepare: Callable[[Config], ServerConfig]
) -> ServedModel:
    """What takes the place of a model, on its GPUs and under its names. Raises ConfigError."""
    before = model.engines[0]
    source = replace(entry.config.source, served_model_name=before.served_model_names)
    entry = replace(entry, config=replace(entry.config, source=source))
    engine, machine = _of_entry(entry, prepare(entry.config)), machine_facts()
    (need,) = _needs(_questions([engine], machine, budgets))
    if need.problem:
        raise ConfigError(need.problem)
    own = tuple(gpu for gpu, needed in enumerate(model.terms.needs[1:]) if needed)
    return _planned(entry, engine, need, before.engine_number, machine, own, len(budgets) - 1)


def _questions(engines: Sequence[EngineConfig], machine: MachineFacts, budgets: Sequence[int]) -> list[Question]:
    smallest = min((gpu.total_bytes for gpu in machine.gpus), default=0)
    asked = []
    for engine in engines:
        of_gpu = min(int(engine.gpu_memory_utilization * smallest), *budgets[1:], smallest) - GPU_BYTES
        on_gpu = engine.kernels is None
        asked.append(Question(engine, max(1, of_gpu) if on_gpu else 0, machine.gpu_capability))
    return asked


def _planned(
    entry: ModelEntry,
    engine: EngineConfig,
    need: Need,
    first: int,
    machine: MachineFacts,
    own: Sequence[int],
    num_gpus: int,
) -> ServedModel:
    """`first`: the number of its first engine. `own`: the numbers of its GPUs."""
    each = _gpu_need(need)
    needs = (_host_need(engine, need), *(each if gpu in own else 0 for gpu in range(num_gpus)))
    names = tuple(machine.gpus[gpu].name for gpu in own)
    engine = replace(engine, kv_cache_memory=need.kv_cache or engine.kv_cache_memory, gpu_ids=names)
    terms = Terms(needs, entry.is_pinned, entry.keep_alive_s)
    return ServedModel(entry, _engines(engine, first), terms, dict.fromkeys(names, each))


def _gpu_need(need: Need) -> int:
    """Of each GPU."""
    return need.weights + need.workspace + need.kv_cache + GPU_BYTES


def _host_need(engine: EngineConfig, need: Need) -> int:
    """Of the host's memory, for all engines of a model. Those on a CPU share packed weights."""
    num, tiers = engine.data_parallel_size, host_bytes(engine.kv_connector)
    if engine.kernels is None:
        return num * (PROCESSES_BYTES + tiers + engine.num_ranks * GPU_WORKER_BYTES)
    copies = 1 if engine.runs_in_c else num
    of_rank = copies * need.weights + num * (need.workspace + need.kv_cache)
    return engine.num_ranks * of_rank + num * (PROCESSES_BYTES + tiers)


def _engines(engine: EngineConfig, first: int) -> tuple[EngineConfig, ...]:
    """Those of a model; `first`: the number of its first one."""
    size = engine.num_ranks
    return tuple(
        replace(
            of_engine(engine, number) if engine.data_parallel_size > 1 else engine,
            gpu_ids=engine.gpu_ids[number * size : (number + 1) * size],
            engine_number=first + number,
            number_in_model=number,
        )
        for number in range(engine.data_parallel_size)
    )


def _needs(asked: Sequence[Question]) -> list[Need]:
    """Of each engine, by the memory plan."""
    done = subprocess.run(
        [*interpreter.COMMAND, "pagewire.engine.runner.needs"],
        input=msgspec.json.encode(asked),
        stdout=subprocess.PIPE,
        env=interpreter.environment(),
        check=False,
    )
    if done.returncode:
        raise ConfigError("The memory that the models need could not be calculated; the lines above say why.")
    return msgspec.json.decode(done.stdout, type=list[Need])


async def _are_ready(parts: Sequence[EnginePart]) -> int:
    """Returns when all of them are; how many they are."""
    for part in parts:
        await part.is_ready.wait()
    return len(parts)


class Models:
    """The models of one launch and its api processes. `run` is called once."""

    make_part = EnginePart

    def __init__(
        self,
        config: ServerConfig,
        models: Sequence[ServedModel],
        budgets: Sequence[int],
        *,
        prepare: Callable[[Config], ServerConfig],
        free_gpu_memory: Free = free_gpu_memory,
    ) -> None:
        """`config`: of the api processes. `models` and `budgets`: as `prepare_models` returns them. `prepare`: as of
        `prepare_models`, for versions that take the place of others; it runs on a thread."""
        self._config = config
        self._prepare = prepare
        self._models = list(models)
        self._versions = [[model] for model in models]  # of each, that have been served
        self._next: dict[int, ServedModel] = {}  # what takes the place of a model when its engines have ended
        self._before: dict[int, ServedModel] = {}  # what comes back if the version after it cannot be loaded
        self._replacing: set[int] = set()  # those whose next version is being prepared
        self._service = config.http.service
        self._free_gpu_memory = free_gpu_memory
        self._residency = Residency(budgets, [model.terms for model in models], time.monotonic())
        num_engines = sum(len(model.engines) for model in models)
        self._epochs: list[tuple[int, int]] = [(1, 1)] * num_engines  # of what runs, or ran last, by engine
        self._parts: dict[int, tuple[EnginePart, ...]] = {}  # the engines of the models that run
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
            folders += [make_run_folder() for _ in range(len(self._epochs) + 1)]
            self._folders = folders[1:]  # by engine
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
        for part in self._running:
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
            for part in self._running:
                part.on_signal(signum)
        self._woken.set()

    @property
    def _running(self) -> list[EnginePart]:
        return [part for parts in self._parts.values() for part in parts]

    # ── the api processes ────────────────────────────────────────────────────────────────────────────────────────────

    def _mailboxes(self) -> tuple[EngineMailboxes, ...]:
        """The models, for an api process that starts now."""
        found = []
        for number, model in enumerate(self._models):
            parts = self._parts.get(number, ())
            for index, engine in enumerate(model.engines):
                epochs = self._epochs[engine.engine_number]
                if parts:
                    epochs = max(parts[index].epochs, epochs)
                folder = self._folders[engine.engine_number]
                addresses = {name: f"ipc://{folder}/{name}" for name in ("tokenizer", "core")}
                found.append(EngineMailboxes(addresses, *epochs, config=None if index else engine))
        return tuple(found)

    def _notes(self) -> list[str]:
        return [f"{len(self._models)} models: {', '.join(model.name for model in self._models)}"]

    def _on_lost_apis(self, lost: Sequence[str], reason: str) -> None:
        now = time.monotonic()
        for name in lost:
            self._residency.forget(name, now)
        for part in self._running:
            part.lose_apis(lost, reason)
        self._told = None
        self._woken.set()

    def _on_demand(self, demand: Demand) -> None:
        self._residency.use(
            demand.model, demand.name, time.monotonic(), is_open=demand.is_open, keep_alive_s=demand.keep_alive_s
        )
        self._woken.set()

    def _on_change(self, swap: Swap) -> None:
        """An administrator loads, unloads, pins, unpins or replaces a model."""
        change = msgspec.json.decode(swap.changes, type=Change)
        if change.settings is not None:
            self._begin(self._replace(swap, change.model, change.settings))
            return
        problem = self._residency.ask(change.model, time.monotonic(), is_loaded=change.loaded, is_pinned=change.pinned)
        answer = Swapped(swap.number, 409, problem) if problem else Swapped(swap.number, 202, "It is being done.")
        self._apis.answer(swap.name, answer)
        self._woken.set()

    async def _replace(self, swap: Swap, number: int, settings: dict[str, object]) -> None:
        """Another version takes the place of a model: when its requests have ended, or at once if it is not loaded."""
        status, detail = 409, "It is being loaded, unloaded or replaced; try again when that is done."
        if self._is_at_rest(number) and number not in self._replacing:
            self._replacing.add(number)
            try:
                model = await asyncio.to_thread(self._another, number, swap.version, settings)
                if self._is_at_rest(number):
                    status, detail = self._put(number, model)
            except ConfigError as error:
                status, detail = 400, str(error)
            finally:
                self._replacing.discard(number)
        self._apis.answer(swap.name, Swapped(swap.number, status, detail))
        self._woken.set()

    def _is_at_rest(self, number: int) -> bool:
        """It is neither loaded nor unloaded now, and nothing will take its place."""
        state = self._residency.models[number].state
        return state not in ("loading", "leaving") and number not in self._next and not self._signals

    def _another(self, number: int, version: int | None, settings: dict[str, object]) -> ServedModel:
        """Raises ConfigError."""
        versions = self._versions[number]
        if version is not None and not 1 <= version <= len(versions):
            raise ConfigError(f"There is no version {version}; there are 1 to {len(versions)}.")
        entry = (self._models[number] if version is None else versions[version - 1]).entry
        entry = replace(entry, config=changed(entry.config, settings))
        model = another_version(self._models[number], entry, self._residency.budgets, self._prepare)
        terms = [each.terms for each in self._residency.models]
        terms[number] = replace(terms[number], needs=model.terms.needs)
        if number in misfits(self._residency.budgets, terms):
            raise ConfigError(f"It takes {model.terms.need_bytes / 1e9:.1f} GB, and what is pinned leaves less.")
        return model

    def _put(self, number: int, model: ServedModel) -> tuple[int, str]:
        """The answer: status and detail."""
        if self._residency.models[number].state != "loaded":
            self._become(number, model, is_wanted=False)
            return 200, f"{model.name} is served from its next load on."
        self._next[number] = model
        self._residency.leave(number, time.monotonic())
        self._begin(self._unload(number))
        return 202, "It is loaded when the model's open requests have ended."

    def _become(self, number: int, model: ServedModel, *, is_wanted: bool, is_back: bool = False) -> None:
        """Another version of a model whose engines have ended. `is_back`: that before the last one, which failed."""
        if is_back:
            self._versions[number].pop()
        else:
            self._before[number] = self._models[number]
            self._versions[number].append(model)
        self._models[number] = model
        self._residency.replaced(number, model.terms.needs, time.monotonic(), is_wanted=is_wanted)
        self._apis.tell(Replaced(number, msgspec.json.encode(model.engines[0])))

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
                len(self._versions[model.number]),
                self._residency.fits(model),
            )
            for model in self._residency.models
        )
        found = ModelStates(states)
        if found != self._told and self._apis.is_ready.is_set():
            self._told = found
            self._apis.tell(found)

    def _progress(self, model: Resident) -> float:
        """In hundredths, because each change is told."""
        shares = [part.loaded_share for part in self._parts.get(model.number, ())]
        return math.floor(100 * sum(shares) / len(shares)) / 100 if shares else 0.0

    # ── the models ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _load(self, number: int) -> None:
        """Starts the engines of a model, and returns when they have ended."""
        model = self._models[number]
        self._print(f"{model.name} is being loaded.")
        self._lose(number, f"{model.name} is being loaded.")
        code, problem = 1, await wait_for_room(model.gpu_needs, self._free_gpu_memory)
        if not problem:
            code, problem = await self._serve(number)
        self._unloading.discard(number)
        why = f"{model.name} could not be served: {problem}" if problem else f"{model.name} is not loaded."
        self._print(why if problem else f"{model.name} is unloaded.")
        self._lose(number, why)
        if problem and model.terms.is_pinned and not self._is_open:
            self._failure = code or 1
        following = self._next.pop(number, None)
        before = self._before.pop(number, None) if problem else None
        is_told = bool(following or before)  # its requests wait for what comes now
        self._residency.has_ended(number, time.monotonic(), "" if is_told or not problem else why)
        if following is not None:
            self._become(number, following, is_wanted=True)
        elif before is not None:
            self._print(f"{model.name}: going back to the version before.")
            self._become(number, before, is_wanted=True, is_back=True)
        self._woken.set()

    async def _serve(self, number: int) -> tuple[int, str]:
        """Runs the engines of a model, which end together. The exit code, and why they ended, unless they were told
        to."""
        model = self._models[number]
        weight_fds = new_segments(model.engines[0]) if len(model.engines) > 1 else []
        parts = self._parts[number] = tuple(
            self.make_part(
                replace(self._config, engine=engine),
                folder=self._folders[engine.engine_number],
                apis=self._apis.addresses,
                epochs=self._epochs[engine.engine_number],
                weight_fds=[os.dup(fd) for fd in weight_fds],
                templates=self._templates,
                on_loading=self._woken.set,
            )
            for engine in model.engines
        )
        close_segments(weight_fds)
        running = [asyncio.ensure_future(part.run()) for part in parts]
        ready = asyncio.ensure_future(_are_ready(parts))
        try:
            await asyncio.wait((ready, *running), return_when=asyncio.FIRST_COMPLETED)
            if not any(each.done() for each in running):
                self._residency.has_loaded(number, time.monotonic())
                self._before.pop(number, None)
                self._print(f"{model.name} is loaded, after {self._residency.models[number].load_s:.1f} s.")
                for part in parts:
                    part.serve()
                self._woken.set()
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            is_told = number in self._unloading or bool(self._signals)
            if not is_told:
                for part in parts:
                    part.on_signal(signal.SIGTERM)
            code = max(await asyncio.gather(*running))
        finally:
            ready.cancel()
            for each in running:
                each.cancel()
            await asyncio.gather(ready, *running, return_exceptions=True)
            del self._parts[number]
            for part, engine in zip(parts, model.engines, strict=True):
                self._epochs[engine.engine_number] = max(part.epochs, self._epochs[engine.engine_number])
        if is_told:
            return code, ""
        return code, next((part.failure for part in parts if part.failure), f"It ended with code {code}.")

    async def _unload(self, number: int) -> None:
        """Its requests end first; those that take longer than --drain-timeout go on when it is loaded again."""
        parts, engines = self._parts[number], self._models[number].engines
        self._unloading.add(number)
        within_s = self._service.drain_timeout
        await asyncio.gather(*(self._apis.vacate(engine.engine_number, within_s) for engine in engines))
        for part in parts:
            part.on_signal(signal.SIGTERM)

    def _lose(self, number: int, why: str) -> None:
        """Has the api processes hold its requests."""
        for engine in self._models[number].engines:
            chain, device = self._epochs[engine.engine_number]
            self._epochs[engine.engine_number] = chain + 1, device + 1
            self._apis.tell(Reset(chain + 1, device + 1, (), why, engine.engine_number))

    def _print(self, text: str) -> None:
        print(f"pagewire: {text}", file=sys.stderr, flush=True)
