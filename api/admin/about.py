"""Models, health, load and metrics of the server."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace
from starlette.types import Receive, Scope, Send

from ...errors import RequestError
from ...ipc.messages import Snapshot
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
    model: str | UnsetType = UNSET  # which it computes, if there are several


class Status(Struct, frozen=True, omit_defaults=True):
    status: str
    engines: list[EngineStatus] = []  # of models that have several and are loaded
    waits_for: str = ""  # what an engine waits for on other machines while it goes on, a clause


class Version(Struct, frozen=True):
    version: str


class ModelLoad(Struct, frozen=True):
    state: Literal["loaded", "loading", "leaving", "unloaded", "failed"]  # loading: also if it is next to be loaded
    fits: bool  # it can be loaded without unloading another one
    files_digest: str  # hex; engines with equal files of a model have the same; empty: unknown
    max_model_len: int  # prompt and output, tokens
    kv_digest: str  # hex; KV travels by the p2p connector between engines with the same; empty: it does not, or unknown


class Load(Struct, frozen=True):
    server_load: int
    version: str  # of pagewire
    num_running: int
    num_waiting: int
    kv_cache_usage: float
    role: str  # prefill, decode or both: what the p2p connector's option says
    kv_host: str | None  # where others load this engine's KV over TCP; None: at this server's host, if there is a port
    kv_port: int | None
    takes_peers: bool  # it loads KV from the peers that requests name
    prompt_ms: float  # to compute a prompt's token, as far as known; 0: unknown
    load_ms: float  # to load a token's KV from elsewhere; 0: unknown
    models: dict[str, ModelLoad]  # by name; aliases have entries of their own


class AboutEndpoints:
    def __init__(self, services: Sequence[Service]) -> None:
        """`services`: of all models."""
        self._services = services
        self._service = service = services[0]
        self._started = int(time.time())
        self._role = Role.of(service.config)
        prefix = service.http.reports.metrics_prefix
        self._metrics = [
            Metrics(each.gateway, each.config, prefix=prefix, residence=each.residence) for each in services
        ]

    def replaced(self, number: int) -> None:
        """One of the models has another version."""
        self._metrics[number].config = self._services[number].config

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
        cards = [self._card(each, name) for each in self._services for name in each.config.served_model_names]
        await send_json(send, ModelList(cards))

    async def model(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = scope["path_params"]["id"]
        found = (each for each in self._services if name in each.config.served_model_names)
        service = next(found, self._service)
        await send_json(send, self._card(service, service.model_name(name)))

    async def health(self, scope: Scope, receive: Receive, send: Send) -> None:
        """200 while the engine answers, also while it drains: it must not be killed then."""
        if (trouble := self._trouble()) is not None:
            raise as_http_error(RequestError("unavailable", trouble))
        status = "ok" if self._service.gateway.refusal is None else "draining"
        await send_json(send, Status(status, self._engines(), self._service.gateway.waits_for))

    async def ready(self, scope: Scope, receive: Receive, send: Send) -> None:
        """200 while a new request would be accepted. Other than /health it fails while the queue is full."""
        cores = self._cores()
        trouble = self._service.gateway.refusal or self._trouble()
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
        cores = self._cores()
        load = Load(
            server_load=sum(each.gateway.num_requests for each in self._services),
            version=self._service.version,
            num_running=sum(core.num_running for core in cores),
            num_waiting=sum(core.num_waiting for core in cores),
            kv_cache_usage=sum(core.num_blocks_used for core in cores) / (sum(core.num_blocks for core in cores) or 1),
            role=self._role.name,
            kv_host=self._role.host,
            kv_port=self._role.port,
            takes_peers=self._role.takes_named,
            prompt_ms=max((core.prompt_ms for core in cores), default=0.0),
            load_ms=max((core.load_ms for core in cores), default=0.0),
            models={name: _load_of(each) for each in self._services for name in each.config.served_model_names},
        )
        await send_json(send, load)

    async def metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        first, *others = self._metrics
        await send_body(send, 200, first.render(others), content_type=CONTENT_TYPE.encode())

    async def version(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, Version(self._service.version))

    def _trouble(self) -> str | None:
        """What is wrong, in one sentence; None if one of the models is healthy."""
        troubles = [each.healthy() for each in self._services]
        return None if None in troubles else troubles[0]

    def _cores(self) -> list[Snapshot]:
        """The last reports of the cores that run."""
        return [core for each in self._services if each.is_loaded for core in each.gateway.snapshots]

    def _engines(self) -> list[EngineStatus]:
        several = [each for each in self._services if len(each.gateway.engines) > 1 and each.is_loaded]
        now = time.monotonic()
        found = []
        for service, engine in [(each, engine) for each in several for engine in each.gateway.engines]:
            outage = engine.outage
            trouble = None if outage is None else outage.reason
            if engine.is_leaving and trouble is None:
                trouble = "It is leaving."
            since_s = None if outage is None else now - outage.since
            model = UNSET if service.residence is None else service.config.served_model_names[0]
            found.append(EngineStatus(engine.number, engine.is_able, trouble, since_s, engine.num_open, model))
        return found

    def _card(self, service: Service, name: str) -> ModelCard:
        # Folders are the administrators' affair.
        served = [one for one in service.http.versions if one.state != "failed"]
        versions = tuple(replace(one, root=Path(one.root).name) for one in served)
        found = None if service.residence is None else service.residence.state
        return ModelCard(
            id=name,
            created=self._started,
            root=service.config.served_model_names[0],
            max_model_len=service.config.max_model_len,
            batch_invariance=service.config.batch_invariance,
            state=UNSET if found is None else found.state,
            progress=UNSET if found is None or found.progress is None else found.progress,
            versions=versions if len(versions) > 1 else UNSET,
        )


def _load_of(service: Service) -> ModelLoad:
    config, residence = service.config, service.residence
    tiers = [tier for core in service.gateway.snapshots for tier in core.tiers]
    kv_digest = next((tier.kv_digest for tier in tiers if tier.kv_digest), "")
    facts = (config.model.files_digest, config.max_model_len, kv_digest)
    if residence is None:
        return ModelLoad("loaded", False, *facts)
    state = residence.state.state
    return ModelLoad("loading" if state == "unloaded" and residence.is_open else state, residence.state.fits, *facts)
