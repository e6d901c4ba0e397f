"""Models, health, load and metrics of the server."""

import time
from pathlib import Path

from msgspec import UNSET, Struct
from msgspec.structs import replace
from starlette.types import Receive, Scope, Send

from ...errors import RequestError
from ..gateway.metrics import CONTENT_TYPE, Metrics
from ..http.exchange import send_body, send_json
from ..http.http_error import as_http_error
from ..http.operation import Operation
from ..openai.kv_transfer import Role
from ..openai.types import ModelCard, ModelList
from ..output.service import Service
from .endpoints import are_asleep


class EngineStatus(Struct, frozen=True):
    engine: int
    ready: bool
    trouble: str | None  # one sentence
    since_s: float | None  # seconds since a process was lost; null: it is whole
    open: int  # requests of this api process


class Status(Struct, frozen=True, omit_defaults=True):
    status: str
    engines: list[EngineStatus] = []  # if there are several


class Version(Struct, frozen=True):
    version: str


class Load(Struct, frozen=True):
    server_load: int
    num_running: int
    num_waiting: int
    kv_cache_usage: float
    role: str  # prefill, decode or both: what the p2p connector's option says
    kv_host: str | None  # where others load this engine's KV over TCP; None: at this server's host, if there is a port
    kv_port: int | None
    takes_peers: bool  # it loads KV from the peers that requests name
    prompt_ms: float  # to compute a prompt's token, as far as known; 0: unknown
    load_ms: float  # to load a token's KV from elsewhere; 0: unknown


class AboutEndpoints:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._started = int(time.time())
        self._role = Role.of(service.config)
        self._metrics = Metrics(service.gateway, service.config, prefix=service.http.reports.metrics_prefix)

    def routes(self) -> list[Operation]:
        return [
            Operation("GET", "/v1/models", self.models, "The models that are served", gives=ModelList),
            Operation("GET", "/v1/models/{id:path}", self.model, "One of the models", gives=ModelCard),
            Operation("GET", "/health", self.health, "Whether the engine answers", gives=Status),
            Operation("GET", "/ping", self.health, "The same, for SageMaker", gives=Status),
            Operation("POST", "/ping", self.health, "The same, for SageMaker", gives=Status),
            Operation("GET", "/ready", self.ready, "Whether a new request would be accepted", gives=Status),
            Operation("GET", "/load", self.load, "Running and waiting requests, and KV cache usage", gives=Load),
            Operation("GET", "/metrics", self.metrics, "Prometheus metrics", gives=str, gives_as="text/plain"),
            Operation("GET", "/version", self.version, "The server's version", gives=Version),
        ]

    async def models(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, ModelList([self._card(name) for name in self._service.config.served_model_names]))

    async def model(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, self._card(self._service.model_name(scope["path_params"]["id"])))

    async def health(self, scope: Scope, receive: Receive, send: Send) -> None:
        """200 while the engine answers, also while it drains: it must not be killed then."""
        if (trouble := self._service.healthy()) is not None:
            raise as_http_error(RequestError("unavailable", trouble))
        status = "ok" if self._service.gateway.refusal is None else "draining"
        await send_json(send, Status(status, self._engines()))

    async def ready(self, scope: Scope, receive: Receive, send: Send) -> None:
        """200 while a new request would be accepted. Other than /health it fails while the queue is full."""
        cores = self._service.gateway.snapshots
        trouble = self._service.gateway.refusal or self._service.healthy()
        limit = self._service.config.max_queued_requests
        if trouble is None and cores and all(core.num_waiting >= limit for core in cores):
            trouble = f"The queue is full: {sum(core.num_waiting for core in cores)} sequences wait."
        if trouble is None and are_asleep(cores):
            trouble = "The engine sleeps; requests wait until it is woken."
        if trouble is not None:
            raise as_http_error(RequestError("unavailable", trouble))
        await send_json(send, Status("ready"))

    async def load(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Requests of this process, and the engines' rows, queues and KV memory as last reported."""
        cores = self._service.gateway.snapshots
        load = Load(
            server_load=self._service.gateway.num_requests,
            num_running=sum(core.num_running for core in cores),
            num_waiting=sum(core.num_waiting for core in cores),
            kv_cache_usage=sum(core.num_blocks_used for core in cores) / (sum(core.num_blocks for core in cores) or 1),
            role=self._role.name,
            kv_host=self._role.host,
            kv_port=self._role.port,
            takes_peers=self._role.takes_named,
            prompt_ms=max((core.prompt_ms for core in cores), default=0.0),
            load_ms=max((core.load_ms for core in cores), default=0.0),
        )
        await send_json(send, load)

    async def metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_body(send, 200, self._metrics.render(), content_type=CONTENT_TYPE.encode())

    async def version(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, Version(self._service.version))

    def _engines(self) -> list[EngineStatus]:
        engines = self._service.gateway.engines
        if len(engines) == 1:
            return []
        now = time.monotonic()
        found = []
        for engine in engines:
            outage = engine.outage
            trouble = None if outage is None else outage.reason
            if engine.is_leaving and trouble is None:
                trouble = "It is leaving."
            since_s = None if outage is None else now - outage.since
            found.append(EngineStatus(engine.number, engine.is_able, trouble, since_s, engine.num_open))
        return found

    def _card(self, name: str) -> ModelCard:
        # Folders are the administrators' affair.
        versions = tuple(replace(one, root=Path(one.root).name) for one in self._service.http.versions)
        return ModelCard(
            id=name,
            created=self._started,
            root=self._service.config.served_model_names[0],
            max_model_len=self._service.config.max_model_len,
            batch_invariance=self._service.config.batch_invariance,
            versions=versions if len(versions) > 1 else UNSET,
        )
