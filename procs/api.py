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
from ..api.app import Served, create_app
from ..api.gateway.engine import Engine
from ..api.gateway.gateway import FromEngine, Gateway
from ..api.gateway.request_end import Observer, log_request
from ..api.gateway.residence import Residence
from ..api.http.server import HttpServer, UvicornConfig
from ..config.config import EngineConfig, HttpConfig
from ..config.latency_classes import with_default
from ..errors import ConfigError
from ..ipc.actor import Post
from ..ipc.messages import (
    RID_BITS,
    Demand,
    Facts,
    Leave,
    ModelStates,
    Ping,
    Pulse,
    Reset,
    Restored,
    Serve,
    Serving,
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
        models: Sequence[EngineConfig] = (),
    ) -> None:
        """`http_fd`: a bound socket that does not listen yet, or on which other api processes listen. `index`: the high
        bits of its rids. `engines`: what sends to each of several engines; `start` is given what sends to one.
        `models`: of each of these engines, if they serve different models."""
        self._name = name
        self._engines = engines
        self._models = models
        self._config = config
        self._http = http
        self._http_fd = http_fd
        self._index = index
        self._serving: asyncio.Task[None] | None = None
        self._served: list[Served] = []  # the models
        self._heard_at: list[list[float]] = []  # for each model each core's last report
        self._tracings: list[Tracing] = []
        self._hands_over = False  # to another engine, when it stops
        self._failure: str | None = None  # of the engine
        self._waits_for = ""  # what a replacement waits for on other machines
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
            self._served = [
                self._serve(number, config, [engine])
                for number, (config, engine) in enumerate(zip(self._models, engines, strict=True))
            ]
        else:
            self._served = [self._serve(0, self._config, engines)]
        self._heard()
        self._socket = socket.socket(fileno=self._http_fd)
        self._app = create_app(self._served, self._http, version=__version__, swap=self.swap, download=download)
        self._server = _Server(UvicornConfig(self._app, self._http), self._on_listening)
        return Facts()

    def _serve(self, number: int, config: EngineConfig, engines: Sequence[Post]) -> Served:
        """What serves one of the models, by these engines."""
        residence: Residence | None = None
        index, wait_s = self._index, self._http.service.outage_wait
        if self._models:
            residence = Residence(partial(self._demand, number))
            epoch, rest = divmod(self._index, self._http.service.api_processes)
            index = (epoch * len(self._models) + number) * self._http.service.api_processes + rest
            wait_s = self._http.service.model_wait
        gateway = Gateway(
            *(partial(engine, "tokenizer") for engine in engines),
            api_index=index,
            outage_wait_s=wait_s,
            max_held=len(engines) * config.max_queued_requests,
            max_open=len(engines) * (config.max_num_seqs + config.max_queued_requests),
            has_siblings=self._http.service.api_processes > 1,
            on_use=(lambda _: None) if residence is None else residence.use,
            latency_classes=with_default(config.latency_classes),
        )
        if residence is not None:  # until it is said to be there
            gateway.handle([Reset(1, 1, (), f"{config.served_model_names[0]} is not loaded.")])
        return Served(
            gateway,
            config,
            Sleeper(*(partial(engine, "core") for engine in engines)),
            healthy=partial(self._complaint_of_model, number),
            observers=self._observers(config),
            residence=residence,
        )

    def _demand(self, model: int, is_open: bool, keep_alive_s: float | None) -> None:
        self._post("supervisor", Demand(self._name, model, is_open, keep_alive_s))

    def handle(self, messages: list[ToApi]) -> None:
        outputs: list[list[FromEngine]] = [[] for _ in self._served]
        for message in messages:
            match message:
                case Serve() | Swapped() | Stop() | Vacate() | Ping() | ModelStates() | Leave():
                    self._obey(message)
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

    def _obey(self, message: Serve | Swapped | Stop | Vacate | Ping | ModelStates | Leave) -> None:
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
                self._waits_for = message.waits_for
            case ModelStates():
                self._note_states(message)
            case Serve() | Leave():
                pass

    def _of_model(self, message: M) -> tuple[int, M]:
        """The number of the model that a message is about, and the message as the gateway of that model takes it: its
        only engine has number 0."""
        if not self._models:
            return 0, message
        match message:
            case Snapshot() | Pulse() | Reset() | Restored() | Slept():
                number = message.engine if message.engine < len(self._models) else 0
                return number, msgspec.structs.replace(message, engine=0)
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
        self._num_swaps += 1
        number = self._num_swaps
        answer: asyncio.Future[Swapped] = asyncio.get_running_loop().create_future()
        self._swaps[number] = answer
        self._post("supervisor", Swap(self._name, number, changes, version, must_drain))
        return await answer

    async def _vacate(self, engine: int) -> None:
        if self._models:
            await self._served[engine].gateway.vacated(0)
        else:
            await self._served[0].gateway.vacated(engine)
        self._post("supervisor", Vacated(self._name, engine))

    def _observers(self, config: EngineConfig) -> list[Observer]:
        """What is called at the end of each request. Raises ConfigError."""
        observers: list[Observer] = [log_request] if self._http.reports.enable_log_requests else []
        if (endpoint := self._http.reports.otlp_traces_endpoint) is not None:
            try:
                from ..api.gateway.tracing import Tracing
            except ModuleNotFoundError as error:
                raise ConfigError(
                    "--otlp-traces-endpoint needs packages that are not installed: pip install 'pagewire[otel]'."
                ) from error
            tracing = Tracing(endpoint, model=config.served_model_names[0], version=__version__)
            self._tracings.append(tracing)
            observers.append(tracing.observe)
        return observers

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
            still = f" It is {self._waits_for}." if self._waits_for else ""
            return f"{outage.reason} It has been down for {for_s:.1f} s; requests wait until it is replaced.{still}"
        silent = now - heard_at[engine.number]
        if silent > SILENT_LIMIT_S:
            return f"The engine core has not reported for {silent:.0f} s."
        snapshot = engine.snapshot
        if snapshot is not None and snapshot.step_age_s + silent > STEP_LIMIT_S:
            return f"The worker has been at one step for {snapshot.step_age_s + silent:.0f} s."
        return None
