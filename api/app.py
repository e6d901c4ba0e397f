"""The ASGI application: routes, and the edge that every request passes.

Before an endpoint sees a request, the edge refuses it if it has no key, exceeds a rate, comes from a foreign origin,
has an ambiguous head, or a body that is too large or too slow. The edge turns every exception into an error object,
gives each response its x-request-id, and writes the access log.
"""

import asyncio
import contextlib
import logging
import re
import secrets
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from starlette.exceptions import HTTPException
from starlette.routing import Match, Route, Router
from starlette.types import Message, Receive, Scope, Send

from ..config.config import EngineConfig, HttpConfig
from ..errors import PagewireError
from .admin.about import AboutEndpoints
from .admin.endpoints import ADMIN_PATHS, EITHER_PATHS, AdminEndpoints, Sleeper
from .admin.invocations import InvocationsEndpoint
from .admin.models import ModelEndpoints
from .admin.settings import Holding, SettingsEndpoints
from .admin.swapping import Swap, SwapEndpoints
from .anthropic.endpoints import AnthropicEndpoints
from .anthropic.message_batches import MessageBatches
from .batches.endpoints import BatchEndpoints
from .batches.store import MAX_FILE_BYTES
from .by_model import ByModel
from .gateway.gateway import Gateway
from .gateway.request_end import Observer
from .gateway.residence import Residence
from .gateway.stats import Stats
from .http.admission_throttle import AdmissionThrottle
from .http.exchange import ClientGone, send_body, too_large
from .http.http_error import HttpError, as_http_error, error_body_at, speaks_anthropic
from .http.keys import Caller, Keys
from .http.operation import Operation
from .http.origins import Origins
from .http.rate_limit import Account
from .llamacpp.endpoints import LlamaCppEndpoints
from .ollama.endpoints import Download, OllamaEndpoints
from .openai.endpoints import OpenAIEndpoints
from .openai.generate import GenerateEndpoints
from .openai.render import RenderEndpoints
from .openai.tokenizing import TokenizeEndpoints
from .output.inner_call import InnerCalls
from .output.service import Service
from .pooling.endpoints import PoolingEndpoints
from .responses.background import BackgroundRuns
from .responses.endpoints import ResponsesEndpoints
from .state.database import Database
from .state.jobs import Jobs
from .state.rates import SharedRates
from .web.openapi import Description, describe
from .web.page import PAGE_FILES, PageFile

_OPEN_PATHS = frozenset({"/health", "/ping", "/ready", "/version", *PAGE_FILES})
FILES_PATH = "/v1/files"
_POLLED_PATHS = _OPEN_PATHS | {"/metrics", "/load"}  # logged only if they fail
_ONCE = frozenset(
    {b"host", b"origin", b"authorization", b"x-api-key", b"content-type", b"content-length", b"content-encoding"}
)
_HOST = re.compile(rb"[A-Za-z0-9._-]{1,253}(:[0-9]{1,5})?|\[[0-9A-Fa-f:.]{2,45}\](:[0-9]{1,5})?")
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_CLOSE = ((b"connection", b"close"),)
_ABSENT = {
    "/v1/moderations": "pagewire serves text models and has no model for moderation",
    "/v1/audio": "pagewire serves text models, which neither read nor speak audio",
    "/v1/images": "pagewire serves text models, which make no images",
    "/v1/videos": "pagewire serves text models, which make no videos",
    "/v1/responses/compact": "conversations are not compacted; leave their oldest items out",
    "/v1/realtime": "pagewire has no realtime sessions; /v1/responses can be streamed",
    "/v1/assistants": "assistants were replaced by /v1/responses and /v1/conversations",
    "/v1/threads": "threads were replaced by /v1/responses and /v1/conversations",
    "/v1/vector_stores": "pagewire stores no vectors; /v1/embeddings makes them",
    "/v1/fine_tuning": "pagewire serves models and does not train them",
}
_CLIENT_LEFT = 499  # in the access log, as in nginx's

Headers = tuple[tuple[bytes, bytes], ...]

log = logging.getLogger(__name__)
access = logging.getLogger("pagewire.access")


class Served(NamedTuple):
    """One of the models of an api process, and what serves it; fields as the arguments of `Service`."""

    gateway: Gateway
    config: EngineConfig
    sleeper: Sleeper
    healthy: Callable[[], str | None]
    observers: Sequence[Observer] = ()
    residence: Residence | None = None  # None: it is the only one


def create_app(
    served: Sequence[Served],
    http: HttpConfig,
    *,
    version: str,
    swap: Swap | None = None,
    holding: Holding | None = None,
    download: Download | None = None,
) -> "Edge":
    """The application of one api process. `swap` asks the supervisor for another model, or to load one of several.
    `holding`: the settings, if they may change. `download` gets a model from the Hub, for a server whose model may be
    swapped."""
    if not http.admin.enable_model_swap:
        download = None
    state = Database(http.reports.state)
    jobs = Jobs(state)
    services = [
        Service(
            each.gateway,
            each.config,
            http,
            healthy=each.healthy,
            version=version,
            observers=each.observers,
            residence=each.residence,
            state=state,
            jobs=jobs,
        )
        for each in served
    ]
    routers = [Router(redirect_slashes=False) for _ in served]
    names = [each.config.served_model_names for each in served]
    app = routers[0] if len(served) == 1 else ByModel(routers, names)
    # What names no model is there once.
    calls = InnerCalls(app, most=min(64, served[0].config.max_num_seqs))
    batches = BatchEndpoints(services[0], calls)
    message_batches = MessageBatches(services[0], calls)
    runs = BackgroundRuns(state, jobs)
    about = AboutEndpoints(services)

    def fill(number: int) -> None:
        """Makes the routes of a model."""
        router, service = routers[number], services[number]
        sections = {
            "Chat and completions": OpenAIEndpoints(service).routes(),
            "Responses": ResponsesEndpoints(service, runs).routes(),
            "Anthropic's messages": AnthropicEndpoints(service).routes() + message_batches.routes(),
            "Ollama's API": OllamaEndpoints(service, services, download).routes(),
            "llama-server's API": LlamaCppEndpoints(service).routes(),
            "Embeddings and scores": PoolingEndpoints(service).routes(),
            "Tokens": [
                *TokenizeEndpoints(service).routes(),
                *RenderEndpoints(service).routes(),
                *GenerateEndpoints(service).routes(),
            ],
            "Files and batches": batches.routes(),
            "The server": about.routes() + InvocationsEndpoint(service, router).routes(),
            "Administration": [
                *AdminEndpoints(service, served[number].sleeper).routes(),
                *_changing(services, swap),
                *(() if holding is None else SettingsEndpoints(service, holding).routes()),
            ],
        }
        router.routes[:] = [operation for section in sections.values() for operation in section]
        if number == 0:
            description = describe(sections, version=version, has_keys=bool(http.api_keys), open_paths=_OPEN_PATHS)
            router.routes += [
                Route("/openapi.json", Description(description), methods=["GET"]),
                *(Route(path, PageFile(name), methods=["GET"]) for path, name in PAGE_FILES.items()),
            ]

    def replaced(number: int, config: EngineConfig) -> None:
        services[number].config = config
        about.replaced(number)
        fill(number)

    for number in range(len(served)):
        fill(number)
    return Edge(
        app,
        jobs,
        config=http,
        stats=services[0].gateway.stats,
        retry_after_s=lambda: max(service.gateway.retry_after_s for service in services),
        state=state,
        replaced=replaced,
        services=services,
    )


def _changing(services: Sequence[Service], swap: Swap | None) -> list[Operation]:
    if swap is None:
        return []
    if services[0].residence is None:
        return SwapEndpoints(services[0], swap).routes()
    return ModelEndpoints(services, swap).routes()


def _no_model(model: int, config: EngineConfig) -> None:
    raise AssertionError(f"there is no model {model}")


class Background(Protocol):
    """Work that goes on without a client, while the server runs."""

    def start(self) -> None: ...

    async def stop(self) -> None: ...


class Edge:
    """The outermost application, in an engine's server and in a router."""

    def __init__(
        self,
        app: Router | ByModel,
        background: Background,
        *,
        config: HttpConfig,
        stats: Stats,
        retry_after_s: Callable[[], int],
        admin_paths: frozenset[str] = ADMIN_PATHS,
        clock: Callable[[], float] = time.monotonic,
        state: Database | None = None,
        replaced: Callable[[int, EngineConfig], None] = _no_model,
        services: Sequence[Service] = (),
    ) -> None:
        """`retry_after_s`: the Retry-After of 429 and 503. `admin_paths` need an admin key, if there is one. `clock`:
        of the rate limits, which are shared through `state`, if that is given. `replaced`: call it when one of several
        models has another version, with its number. `services`: that follow changes of settings."""
        self.replaced = replaced
        self._services = services
        self._app = app
        self._background = background
        self._limits = config.clients
        self._has_started = False
        self._root_path = config.listen.root_path
        self._stats = stats
        self._retry_after_s = retry_after_s
        self._anyone = Account(self._limits.requests_per_minute, self._limits.tokens_per_minute, clock=clock)
        self._keys = Keys(config.api_keys, self._anyone, clock)
        self._admin_keys = Keys(config.admin_keys, self._anyone, clock)
        self._admin_paths = admin_paths if config.admin_keys else frozenset()
        self._rates = None if state is None else SharedRates(state, self._keys.buckets())
        self._origins = Origins(config)
        self._throttle = AdmissionThrottle()

    def start(self) -> None:
        """Starts the background work, when the engine is ready."""
        self._background.start()
        self._has_started = True
        if self._rates is not None:
            self._rates.start()

    def change(self, engine: EngineConfig, config: HttpConfig, observers: Sequence[Observer]) -> None:
        """These settings hold for requests from now on."""
        for service in self._services:
            service.change(engine, config, observers)
        self._limits = config.clients
        self._anyone.change(self._limits.requests_per_minute, self._limits.tokens_per_minute)
        self._keys.change(config.api_keys)
        self._admin_keys.change(config.admin_keys)
        self._origins = Origins(config)
        if self._rates is not None:
            self._rates.buckets = self._keys.buckets()
            if self._has_started:
                self._rates.start()

    async def stop(self) -> None:
        await self._background.stop()
        if self._rates is not None:
            await self._rates.stop()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        started = time.monotonic()
        scope["app"] = self  # makes the router raise instead of answering
        scope = _below(self._root_path, scope)
        request = _Request(scope, send)
        try:
            await self._serve(request, scope, receive)
        except ClientGone:
            request.status = _CLIENT_LEFT
        except Exception as error:
            http_error = self._from_router(error, scope) if isinstance(error, HTTPException) else as_http_error(error)
            if http_error.status == 500 and not isinstance(error, PagewireError):
                log.exception("request %s failed", request.id)
            elif http_error.status == 500:
                log.warning("request %s failed: %s", request.id, http_error)
            if request.status:
                raise
            self._stats.refused[http_error.code or str(http_error.status)] += 1
            body = error_body_at(scope["path"], http_error)
            headers = (*http_error.headers, *self._when_to_retry(http_error))
            await send_body(request.send, http_error.status, body, headers=headers)
        finally:
            if self._limits.access_log and not (request.status < 400 and scope["path"] in _POLLED_PATHS):
                access.info("%s", request.line(time.monotonic() - started))

    async def _serve(self, request: "_Request", scope: Scope, receive: Receive) -> None:
        headers = request.headers
        _check_head(scope, headers)
        self._origins.check_name(headers.get(b"host", b""))
        request.extra = self._origins.headers(headers)
        if scope["method"] == "OPTIONS" and (answer := self._origins.preflight(headers)) is not None:
            await request.send_empty(204, answer)
            return
        if not scope["path"]:  # the page's links are relative to the slash
            await request.send_empty(308, ((b"location", self._root_path.encode() + b"/"),))
            return
        state = {**scope.get("state", {}), "salt": b"", "request_id": request.id}
        if scope["path"] not in _OPEN_PATHS:
            caller = self._caller(scope["path"], headers)
            state |= {"salt": caller.salt, "account": caller.account, "entitlement": caller.entitlement}
            state["caller"] = caller.name
            state["is_admin"] = caller in self._admin_keys
            if scope["method"] == "POST":
                request.account = caller.account
                caller.account.take_request()
                await self._throttle.enter()
        max_bytes = MAX_FILE_BYTES if scope["path"] == FILES_PATH else self._limits.max_body_size
        self._check_body(headers, max_bytes)
        scope["state"] = state
        await self._app(scope, self._bounded(receive, max_bytes), request.send)

    def _caller(self, path: str, headers: dict[bytes, bytes]) -> Caller:
        """The owner of the request's key. Raises HttpError 401."""
        if path in EITHER_PATHS and self._admin_paths:
            with contextlib.suppress(HttpError):
                return self._admin_keys.caller(headers)
        return (self._admin_keys if path in self._admin_paths else self._keys).caller(headers)

    def _check_body(self, headers: dict[bytes, bytes], max_bytes: int) -> None:
        length = headers.get(b"content-length", b"0")
        if not length.isdigit():
            raise HttpError(400, "The Content-Length header is not valid.")
        if len(length) > 18 or int(length) > max_bytes:
            raise too_large(max_bytes)
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise HttpError(415, "Compressed bodies are not accepted.")

    def _bounded(self, receive: Receive, max_bytes: int) -> Receive:
        """`receive`, which raises HttpError if the body is too large or too slow. A larger `max_bytes` allows more time
        in all, but no longer pause."""
        loop, max_s = asyncio.get_running_loop(), self._limits.body_timeout_s
        deadline = loop.time() + max_s * max(1.0, max_bytes / self._limits.max_body_size)
        num_bytes: int | None = 0  # None: the body is complete

        async def receive_in_bounds() -> Message:
            nonlocal num_bytes
            if num_bytes is None:
                return await receive()
            try:
                async with asyncio.timeout_at(min(deadline, loop.time() + max_s)):
                    message = await receive()
            except TimeoutError:
                raise HttpError(408, "The body did not arrive in time.", headers=_CLOSE) from None
            num_bytes += len(message.get("body", b""))
            if num_bytes > max_bytes:
                raise too_large(max_bytes)
            if not message.get("more_body", False):
                num_bytes = None
            return message

        return receive_in_bounds

    def _when_to_retry(self, error: HttpError) -> Headers:
        """Retry-After for a 429 or 503 that has none from a rate limit."""
        if error.status not in (429, 503) or any(name == b"retry-after" for name, _ in error.headers):
            return ()
        return ((b"retry-after", b"%d" % self._retry_after_s()),)

    def _from_router(self, error: HTTPException, scope: Scope) -> HttpError:
        """404 or 405; the router stops at the first route of a path, which may have one for each method."""
        matching = [route for route in self._app.routes if route.matches(scope)[0] is not Match.NONE]
        allowed = sorted({method for route in matching if isinstance(route, Route) for method in route.methods or ()})
        if not allowed or scope["path"] in _ABSENT:
            return HttpError(404, _absent(scope["path"]), code="not_found")
        return HttpError(405, "This method is not allowed here.", headers=((b"allow", ", ".join(allowed).encode()),))


def _absent(path: str) -> str:
    """What a 404 says: more than usual about endpoints of OpenAI that no text model can have."""
    for beginning, what in _ABSENT.items():
        if path == beginning or path.startswith(beginning + "/"):
            return f"There is nothing at this path: {what}."
    return "There is nothing at this path."


class _Request:
    """One request, for the headers of its response and for the access log."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope = scope
        self._send = send
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        given = self.headers.get(b"x-request-id", b"")
        self.id = given.decode() if _REQUEST_ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"
        self.is_anthropic = speaks_anthropic(scope["path"])
        self.account: Account | None = None
        self.extra: Headers = ()  # CORS headers
        self.status = 0  # until the response has begun

    async def send(self, message: Message) -> None:
        """Adds the headers that every response has."""
        if not self.status:
            self.status = message["status"]
            id = self.id.encode()
            headers = [*message["headers"], (b"x-request-id", id), *self.extra]
            if self.is_anthropic:
                headers.append((b"request-id", id))
            if self.account is not None:
                headers += self.account.headers()
            message = {**message, "headers": headers}
        await self._send(message)

    async def send_empty(self, status: int, headers: Headers) -> None:
        """A whole response without a body."""
        length = () if status == 204 else ((b"content-length", b"0"),)
        await self.send({"type": "http.response.start", "status": status, "headers": (*headers, *length)})
        await self.send({"type": "http.response.body", "body": b""})

    def line(self, seconds: float) -> str:
        """The line of the access log. The query is left out, because it may hold secrets."""
        client = self._scope.get("client")
        path = self._scope.get("raw_path", b"").partition(b"?")[0][:200].decode("latin-1")
        shown = path if path.isascii() and path.isprintable() else ascii(path)[1:-1]
        return f"{client[0] if client else '-'} {self._scope['method']} {shown} {self.status} {seconds:.3f}s {self.id}"


def _check_head(scope: Scope, headers: dict[bytes, bytes]) -> None:
    """Refuses heads that proxies and servers may read in different ways."""
    if len(headers) < len(scope["headers"]):
        names = [name for name, _ in scope["headers"] if name in _ONCE]
        if len(names) > len(set(names)):
            raise HttpError(400, f"There may be only one {max(names, key=names.count).decode()} header.")
    is_old = scope.get("http_version", "1.1") == "1.0"  # the only one without a Host
    if not _HOST.fullmatch(headers.get(b"host", b"")) and not (is_old and b"host" not in headers):
        raise HttpError(400, "The Host header is not valid.")


def _below(root_path: str, scope: Scope) -> Scope:
    """The scope with its path below `root_path`, whether a proxy has removed that already or not."""
    path: str = scope["path"]
    if root_path and (path == root_path or path.startswith(root_path + "/")):
        return {**scope, "path": path.removeprefix(root_path)}
    return scope
