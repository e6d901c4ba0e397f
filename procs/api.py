"""The api process: uvicorn and the gateway on one event loop. It listens when every other actor is ready. On `Stop` it
refuses new requests, lets open ones go on for the grace time, and then ends them.
"""

import asyncio
import contextlib
import logging
import resource
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import msgspec
import uvicorn

from ..api.admin.endpoints import Sleeper
from ..api.admin.settings import Holding
from ..api.app import Served, create_app
from ..api.gateway.engine import Engine
from ..api.gateway.gateway import Bounds, FromEngine, Gateway
from ..api.gateway.request_end import Observer, log_request
from ..api.gateway.residence import Residence
from ..api.http.server import HttpServer, UvicornConfig
from ..config.config import EngineConfig, HttpConfig
from ..config.latency_classes import with_default
from ..errors import ConfigError
from ..ipc.actor import Post
from ..ipc.messages import (
    RID_BITS,
    Change,
    Demand,
    Facts,
    Leave,
    ModelStates,
    Ping,
    Pulse,
    Replaced,
    Reset,
    Restored,
    Serve,
    Serving,
    Settings,
    Slept,
    Snapshot,
    Stop,
    Swap,
    Swapped,
    TextBatch,
    ToApi,
    Vacate,
    Vacated,
)
from ..version import __version__
from .download import download
from .listening import shown_address

if TYPE_CHECKING:
    from ..api.gateway.tracing import Tracing

SILENT_LIMIT_S = 10.0  # without a report of the core, which sends two a second
STEP_LIMIT_S = 120.0  # for one step; of a large model on a slow CPU it takes many seconds
_LEAVING = "The server is shutting down."
CLOSE_TIMEOUT_S = 3.0  # for connections to take their last bytes

M = TypeVar("M", bound=FromEngine | Slept)


class _Server(HttpServer):
    """Calls `on_listening` when it listens."""

    def __init__(self, config: uvicorn.Config, on_listening: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_listening = on_listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_listening()


class ApiActor:
    """Passes requests from HTTP to the other actors, and their output back."""

    def __init__(
        self,
        config: EngineConfig,
        http: HttpConfig,
        *,
        http_fd: int,
        name: str = "api",
        index: int = 0,
        engines: Sequence[Post] = (),
        outages: Sequence[str] = (),
        models: Sequence[EngineConfig] = (),
        settings: Settings | None = None,
    ) -> None:
        """`http_fd`: a bound socket that does not listen yet, or on which other api processes listen. `index`: the high
        bits of its rids. `engines`: what sends to each of several engines; `start` is given what sends to one.
        `outages`: why each of them takes no requests until it is restored; empty: it takes them. `models`: those that
        they serve, if there are several; the engines of each follow each other. `settings`: that hold instead of
        `config`."""
        self._name = name
        self._engines = engines
        self._outages = outages
        self._models = models
        self._start = config
        self._settings = Settings(0, config, http) if settings is None else settings
        self._config = self._settings.engine
        self._http = http
        self._http_fd = http_fd
        self._index = index
        self._serving: asyncio.Task[None] | None = None
        self._served: list[Served] = []  # the models
        self._places: list[tuple[int, int]] = []  # of each of several models' engines: its model, its number there
        self._heard_at: list[list[float]] = []  # for each model each core's last report
        self._tracings: list[Tracing] = []
        self._hands_over = False  # to another engine, when it stops
        self._failure: str | None = None  # of the engine
        self._num_swaps = 0
        self._swaps: dict[int, asyncio.Future[Swapped]] = {}  # not answered yet, by number
        self._leaving: set[asyncio.Task[None]] = set()  # a task for each engine that gets nothing new

    def start(self, post: Post) -> Facts:
        self._post = post
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # a connection is a descriptor
        # uvicorn warns of bytes that are not HTTP, which anyone can send; the supervisor logs the open port.
        logging.getLogger("uvicorn").setLevel(logging.ERROR)
        engines = self._engines or (post,)
        if self._models:
            for model, config in enumerate(self._models):
                first = len(self._places)
                self._places += [(model, number) for number in range(config.data_parallel_size)]
                self._served.append(self._serve(model, config, engines[first : len(self._places)]))
            assert len(self._places) == len(engines), (self._places, engines)
        else:
            self._served = [self._serve(0, self._config, engines)]
        self._heard()
        self._socket = socket.socket(fileno=self._http_fd)
        self._app = create_app(
            self._served,
            self._http,
            version=__version__,
            swap=self.swap,
            download=download,
            holding=None if self._models else Holding(self._start, lambda: self._settings, self.change),
        )
        self._server = _Server(UvicornConfig(self._app, self._http), self._on_listening)
        return Facts()

    def _serve(self, number: int, config: EngineConfig, engines: Sequence[Post]) -> Served:
        """What serves one of the models, by these engines."""
        residence: Residence | None = None
        index = self._index
        if self._models:
            residence = Residence(partial(self._demand, number))
            epoch, rest = divmod(self._index, self._http.service.api_processes)
            index = (epoch * len(self._models) + number) * self._http.service.api_processes + rest
        gateway = Gateway(
            *(partial(engine, "tokenizer") for engine in engines),
            api_index=index,
            **self._bounds(config, len(engines)),
            has_siblings=self._http.service.api_processes > 1,
            on_use=(lambda _: None) if residence is None else residence.use,
        )
        if residence is not None:  # until it is said to be there
            why = f"{config.served_model_names[0]} is not loaded."
            gateway.handle([Reset(1, 1, (), why, engine.number) for engine in gateway.engines])
        else:
            gateway.handle([Reset(1, 1, (), why, engine) for engine, why in enumerate(self._outages) if why])
        return Served(
            gateway,
            config,
            Sleeper(*(partial(engine, "core") for engine in engines)),
            healthy=partial(self._complaint_of_model, number),
            observers=self._observers(self._trace(config)),
            residence=residence,
        )

    def _bounds(self, config: EngineConfig, num_engines: int) -> Bounds:
        """Those of a gateway."""
        service = self._http.service
        return {
            "outage_wait_s": service.model_wait if self._models else service.outage_wait,
            "max_held": num_engines * config.max_queued_requests,
            "max_open": num_engines * (config.max_num_seqs + config.max_queued_requests),
            "latency_classes": with_default(config.latency_classes),
        }

    def _settle(self, settings: Settings) -> None:
        """Follows other settings, unless they were sent to a process before this one."""
        if settings.number <= self._settings.number or settings.http is None:
            return
        self._settings, self._config, self._http = settings, settings.engine, settings.http
        for served in () if self._models else self._served:
            served.gateway.change(self._bounds(self._config, len(served.gateway.engines)))
        self._app.change(self._config, self._http, self._observers(self._tracings))

    def _demand(self, model: int, is_open: bool, keep_alive_s: float | None) -> None:
        self._post("supervisor", Demand(self._name, model, is_open, keep_alive_s))

    def handle(self, messages: list[ToApi]) -> None:
        outputs: list[list[FromEngine]] = [[] for _ in self._served]
        for message in messages:
            match message:
                case Serve() | Swapped() | Stop() | Vacate() | Ping() | ModelStates() | Replaced() | Leave():
                    self._obey(message)
                case Settings():
                    self._settle(message)
                case Slept():
                    number, slept = self._of_model(message)
                    self._served[number].sleeper.hear(slept)
                case _:
                    number, output = self._of_model(message)
                    if isinstance(output, Reset):
                        self._served[number].sleeper.interrupt(output.reason)
                    if isinstance(output, Snapshot | Restored):
                        self._heard_at[number][output.engine] = time.monotonic()
                    outputs[number].append(output)
        for served, of_model in zip(self._served, outputs, strict=True):
            if of_model:
                served.gateway.handle(of_model)

    def _obey(self, message: Serve | Swapped | Stop | Vacate | Ping | ModelStates | Replaced | Leave) -> None:
        """What the supervisor says."""
        match message:
            case Serve() if self._serving is None:
                self._heard()
                self._app.start()
                self._serving = asyncio.ensure_future(self._server.serve(sockets=[self._socket]))
            case Swapped():
                if (swap := self._swaps.pop(message.number, None)) is not None and not swap.done():
                    swap.set_result(message)
            case Stop():
                self._hands_over = message.hands_over
                if message.is_failure:  # draining requests end now
                    self._failure = message.reason
                    for served in self._served:
                        served.gateway.close(message.reason, has_failed=True)
            case Vacate(engine=engine):
                leaving = asyncio.create_task(self._vacate(engine))
                self._leaving.add(leaving)
                leaving.add_done_callback(self._leaving.discard)
            case Ping():
                self._served[0].gateway.late_beats = message.late_beats
                self._served[0].gateway.waits_for = message.waits_for
            case ModelStates():
                self._note_states(message)
            case Replaced():
                config = msgspec.json.decode(message.config, type=EngineConfig)
                why = f"Another version of {config.served_model_names[0]} has taken its place."
                gateway = self._served[message.model].gateway
                gateway.change(self._bounds(config, len(gateway.engines)))
                gateway.replaced(why)
                self._app.replaced(message.model, config)
            case Serve() | Leave():
                pass

    def _of_model(self, message: M) -> tuple[int, M]:
        """The number of the model that a message is about, and the message as the gateway of that model takes it: it
        counts only its own engines."""
        if not self._models:
            return 0, message
        match message:
            case Snapshot() | Pulse() | Reset() | Restored() | Slept():
                own = self._places[message.engine] if message.engine < len(self._places) else (0, 0)
                return own[0], msgspec.structs.replace(message, engine=own[1])
            case TextBatch(chunks=chunks):
                rid = chunks[0].rid if chunks else 0
            case _:
                rid = message.rid
        return (rid >> RID_BITS) // self._http.service.api_processes % len(self._models), message

    def _note_states(self, message: ModelStates) -> None:
        for served, state in zip(self._served, message.models, strict=True):
            assert served.residence is not None
            served.residence.state = state
            served.gateway.hinder(state.problem if state.state == "failed" else None)

    def _heard(self) -> None:
        """Gives the cores time for their next report."""
        self._heard_at = [[time.monotonic()] * len(served.gateway.engines) for served in self._served]

    async def stop(self, grace_s: float) -> None:
        if self._hands_over:
            await self._app.stop()
            await self._server.hand_over(grace_s)
        else:
            for served in self._served:
                served.gateway.refuse(self._failure or _LEAVING)
            await self._app.stop()
            if grace_s > 0:
                with contextlib.suppress(TimeoutError):
                    drained = asyncio.gather(*(served.gateway.drained() for served in self._served))
                    await asyncio.wait_for(drained, grace_s)
        for served in self._served:
            served.gateway.close(self._failure or _LEAVING)
        if self._serving is not None:
            self._server.should_exit = True
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._serving, CLOSE_TIMEOUT_S)
        for tracing in self._tracings:
            tracing.close()

    async def swap(self, changes: bytes, version: int | None, must_drain: bool) -> Swapped:
        """Asks the supervisor to replace the model; see `Swap`."""
        return await self._ask(lambda number: Swap(self._name, number, changes, version, must_drain))

    async def change(self, changes: bytes, who: str) -> Swapped:
        """Asks the supervisor for other settings; see `Change`."""
        return await self._ask(lambda number: Change(self._name, number, changes, who))

    async def _ask(self, message: Callable[[int], Swap | Change]) -> Swapped:
        """Asks the supervisor. `message`: of this number."""
        self._num_swaps += 1
        number = self._num_swaps
        answer: asyncio.Future[Swapped] = asyncio.get_running_loop().create_future()
        self._swaps[number] = answer
        self._post("supervisor", message(number))
        return await answer

    async def _vacate(self, engine: int) -> None:
        model, number = self._places[engine] if self._models else (0, engine)
        await self._served[model].gateway.vacated(number)
        self._post("supervisor", Vacated(self._name, engine))

    def _observers(self, tracings: "Sequence[Tracing]") -> list[Observer]:
        """What is called at the end of each request."""
        observers: list[Observer] = [log_request] if self._http.reports.enable_log_requests else []
        return [*observers, *(tracing.observe for tracing in tracings)]

    def _trace(self, config: EngineConfig) -> "list[Tracing]":
        """What sends spans of the requests of a model, if that was asked for. Raises ConfigError."""
        if (endpoint := self._http.reports.otlp_traces_endpoint) is None:
            return []
        try:
            from ..api.gateway.tracing import Tracing
        except ModuleNotFoundError as error:
            raise ConfigError(
                "--otlp-traces-endpoint needs packages that are not installed: pip install 'pagewire[otel]'."
            ) from error
        tracing = Tracing(endpoint, model=config.served_model_names[0], version=__version__)
        self._tracings.append(tracing)
        return [tracing]

    def _on_listening(self) -> None:
        self._post("supervisor", Serving(shown_address(self._http.listen, self._socket)))

    def _complaint_of_model(self, number: int) -> str | None:
        """What is wrong with the engines of a model, for /health; None if one of them is healthy or only busy, or the
        model is not loaded."""
        if self._failure is not None:
            return self._failure
        served = self._served[number]
        if served.residence is not None and served.residence.state.state != "loaded":
            return None
        complaints = [self._complaint_of(engine, self._heard_at[number]) for engine in served.gateway.engines]
        return None if None in complaints else complaints[0]

    def _complaint_of(self, engine: Engine, heard_at: Sequence[float]) -> str | None:
        now = time.monotonic()
        if (outage := engine.outage) is not None:
            for_s = now - outage.since
            waits_for = self._served[0].gateway.waits_for
            still = f" It is {waits_for}." if waits_for else ""
            return f"{outage.reason} It has been down for {for_s:.1f} s; requests wait until it is replaced.{still}"
        silent = now - heard_at[engine.number]
        if silent > SILENT_LIMIT_S:
            return f"The engine core has not reported for {silent:.0f} s."
        snapshot = engine.snapshot
        if snapshot is not None and snapshot.step_age_s + silent > STEP_LIMIT_S:
            return f"The worker has been at one step for {snapshot.step_age_s + silent:.0f} s."
        return None
