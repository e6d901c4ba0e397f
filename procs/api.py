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
from typing import TYPE_CHECKING

import uvicorn

from ..api.admin.endpoints import Sleeper
from ..api.app import create_app
from ..api.gateway.engine import Engine
from ..api.gateway.gateway import FromEngine, Gateway
from ..api.gateway.request_end import Observer, log_request
from ..api.http.server import HttpServer, UvicornConfig
from ..config.config import EngineConfig, HttpConfig
from ..errors import ConfigError
from ..ipc.actor import Post
from ..ipc.messages import (
    Facts,
    Leave,
    Ping,
    Reset,
    Restored,
    Serve,
    Serving,
    Slept,
    Snapshot,
    Stop,
    Swap,
    Swapped,
    ToApi,
    Vacate,
    Vacated,
)
from ..version import __version__
from .listening import shown_address

if TYPE_CHECKING:
    from ..api.gateway.tracing import Tracing

SILENT_LIMIT_S = 10.0  # without a report of the core, which sends two a second
STEP_LIMIT_S = 120.0  # for one step; of a large model on a slow CPU it takes many seconds
_LEAVING = "The server is shutting down."
CLOSE_TIMEOUT_S = 3.0  # for connections to take their last bytes


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
    ) -> None:
        """`http_fd`: a bound socket that does not listen yet, or on which other api processes listen. `index`: the high
        bits of its rids. `engines`: what sends to each of several engines; `start` is given what sends to one."""
        self._name = name
        self._engines = engines
        self._config = config
        self._http = http
        self._http_fd = http_fd
        self._index = index
        self._serving: asyncio.Task[None] | None = None
        self._heard_at: list[float] = []  # each core's last report
        self._tracing: Tracing | None = None
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
        engines, config = self._engines or (post,), self._config
        self._sleeper = Sleeper(*(partial(engine, "core") for engine in engines))
        self._gateway = Gateway(
            *(partial(engine, "tokenizer") for engine in engines),
            api_index=self._index,
            outage_wait_s=self._http.service.outage_wait,
            max_held=len(engines) * config.max_queued_requests,
            max_open=len(engines) * (config.max_num_seqs + config.max_queued_requests),
            has_siblings=self._http.service.api_processes > 1,
        )
        self._heard_at = [time.monotonic()] * len(engines)
        self._socket = socket.socket(fileno=self._http_fd)
        self._app = create_app(
            self._gateway,
            self._config,
            self._http,
            healthy=self._complaint,
            version=__version__,
            sleeper=self._sleeper,
            swap=self.swap,
            observers=self._observers(),
        )
        self._server = _Server(UvicornConfig(self._app, self._http), self._on_listening)
        return Facts()

    def handle(self, messages: list[ToApi]) -> None:
        outputs: list[FromEngine] = []
        for message in messages:
            match message:
                case Serve():
                    if self._serving is not None:
                        continue
                    self._heard_at = [time.monotonic()] * len(self._heard_at)
                    self._app.start()
                    self._serving = asyncio.ensure_future(self._server.serve(sockets=[self._socket]))
                case Slept():
                    self._sleeper.hear(message)
                case Swapped():
                    if (swap := self._swaps.pop(message.number, None)) is not None and not swap.done():
                        swap.set_result(message)
                case Stop():
                    self._hands_over = message.hands_over
                    if message.is_failure:  # draining requests end now
                        self._failure = message.reason
                        self._gateway.close(message.reason, has_failed=True)
                case Vacate(engine=engine):
                    leaving = asyncio.create_task(self._vacate(engine))
                    self._leaving.add(leaving)
                    leaving.add_done_callback(self._leaving.discard)
                case Ping():
                    self._gateway.late_beats = message.late_beats
                    self._waits_for = message.waits_for
                case Leave():
                    pass
                case _:
                    if isinstance(message, Reset):
                        self._sleeper.interrupt(message.reason)
                    if isinstance(message, Snapshot | Restored):
                        self._heard_at[message.engine] = time.monotonic()
                    outputs.append(message)
        if outputs:
            self._gateway.handle(outputs)

    async def stop(self, grace_s: float) -> None:
        if self._hands_over:
            await self._app.stop()
            await self._server.hand_over(grace_s)
        else:
            self._gateway.refuse(self._failure or _LEAVING)
            await self._app.stop()
            if grace_s > 0:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._gateway.drained(), grace_s)
        self._gateway.close(self._failure or _LEAVING)
        if self._serving is not None:
            self._server.should_exit = True
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._serving, CLOSE_TIMEOUT_S)
        if self._tracing is not None:
            self._tracing.close()

    async def swap(self, changes: bytes, version: int | None, must_drain: bool) -> Swapped:
        """Asks the supervisor to replace the model; see `Swap`."""
        self._num_swaps += 1
        number = self._num_swaps
        answer: asyncio.Future[Swapped] = asyncio.get_running_loop().create_future()
        self._swaps[number] = answer
        self._post("supervisor", Swap(self._name, number, changes, version, must_drain))
        return await answer

    async def _vacate(self, engine: int) -> None:
        await self._gateway.vacated(engine)
        self._post("supervisor", Vacated(self._name, engine))

    def _observers(self) -> list[Observer]:
        """What is called at the end of each request. Raises ConfigError."""
        observers: list[Observer] = [log_request] if self._http.reports.enable_log_requests else []
        if (endpoint := self._http.reports.otlp_traces_endpoint) is not None:
            try:
                from ..api.gateway.tracing import Tracing
            except ModuleNotFoundError as error:
                raise ConfigError(
                    "--otlp-traces-endpoint needs packages that are not installed: pip install 'pagewire[otel]'."
                ) from error
            self._tracing = Tracing(endpoint, model=self._config.served_model_names[0], version=__version__)
            observers.append(self._tracing.observe)
        return observers

    def _on_listening(self) -> None:
        self._post("supervisor", Serving(shown_address(self._http.listen, self._socket)))

    def _complaint(self) -> str | None:
        """What is wrong with the engines, for /health; None if one of them is healthy or only busy."""
        if self._failure is not None:
            return self._failure
        complaints = [self._complaint_of(engine) for engine in self._gateway.engines]
        return None if None in complaints else complaints[0]

    def _complaint_of(self, engine: Engine) -> str | None:
        now = time.monotonic()
        if (outage := engine.outage) is not None:
            for_s = now - outage.since
            still = f" It is {self._waits_for}." if self._waits_for else ""
            return f"{outage.reason} It has been down for {for_s:.1f} s; requests wait until it is replaced.{still}"
        silent = now - self._heard_at[engine.number]
        if silent > SILENT_LIMIT_S:
            return f"The engine core has not reported for {silent:.0f} s."
        snapshot = engine.snapshot
        if snapshot is not None and snapshot.step_age_s + silent > STEP_LIMIT_S:
            return f"The worker has been at one step for {snapshot.step_age_s + silent:.0f} s."
        return None
