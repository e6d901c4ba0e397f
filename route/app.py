"""The router's application: its own endpoints, and everything else, which it passes on to the engines.

The same `Edge` as in an engine's api checks headers, origins, keys, rates and the size of bodies, here once.
"""

import asyncio
import time
from collections import Counter

import msgspec
from msgspec import Struct
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from ..api.app import FILES_PATH, Edge
from ..api.gateway.drain_rate import DrainRate
from ..api.gateway.metrics import CONTENT_TYPE
from ..api.gateway.stats import Stats
from ..api.http.exchange import Endpoint, read_body, send_body, send_json, while_connected
from ..api.http.http_error import HttpError, ShuttingDown, as_http_error
from ..api.http.rate_limit import Account
from ..api.output.service import too_slow
from ..errors import ConfigError
from ..version import __version__
from .ask import Ask, Upload
from .config import RouteConfig
from .engines import EngineState, Fleet
from .metrics import merge_pages, render
from .relay import Answer, Relay

_ENGINES_PATH = "/admin/engines"


class Health(Struct, frozen=True):
    status: str
    engines: list[EngineState]


class Load(Struct, frozen=True):
    server_load: int
    num_engines: int


class Change(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /admin/engines: exactly one of the two."""

    add: str | None = None
    remove: str | None = None


class RouterApp:
    def __init__(self, fleet: Fleet, config: RouteConfig) -> None:
        self._fleet = fleet
        self._config = config
        self._stats = Stats()  # of the edge
        http = config.http
        self._relay = Relay(fleet, outage_wait_s=http.service.outage_wait, root_path=http.listen.root_path)
        self._anyone = Account()  # of requests without a key
        self._open: Counter[Account] = Counter()  # open requests
        self._drain_rate = DrainRate(time.monotonic())  # gives Retry-After of the router's own refusals
        self._ends: set[asyncio.Timeout] = set()  # one for each open request
        self._refusal: str | None = None  # why new requests are refused
        self._idle = asyncio.Event()
        self._removals: set[asyncio.Task[None]] = set()

    def edge(self) -> Edge:
        """The whole application, with the edge in front."""
        own = {
            "/health": self.health,
            "/ready": self.ready,
            "/load": self.load,
            "/metrics": self.metrics,
            "/version": self.version,
            _ENGINES_PATH: self.engines,
        }
        routes = [Route(path, Endpoint(call), methods=["GET"]) for path, call in own.items()]
        routes.append(Route(_ENGINES_PATH, Endpoint(self.change_engines), methods=["POST"]))
        routes.append(Route("/{path:path}", Endpoint(self.pass_on)))
        router = Router(routes, redirect_slashes=False)
        return Edge(
            router,
            self._fleet,
            config=self._config.http,
            stats=self._stats,
            retry_after_s=lambda: self._drain_rate.retry_after_s(sum(self._open.values())),
            admin_paths=frozenset({_ENGINES_PATH}),
        )

    def refuse(self, reason: str) -> None:
        """From now on, new requests get 503 with this reason; open ones continue."""
        self._refusal = reason

    async def drained(self) -> None:
        """Returns when no request is open."""
        while self._ends:
            self._idle.clear()
            await self._idle.wait()

    def close(self) -> None:
        """Ends open requests: each gets its error."""
        now = asyncio.get_running_loop().time()
        for end in self._ends:
            end.reschedule(now)

    # ── endpoints of the engines ─────────────────────────────────────────────────────────────────────────────────────

    async def pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Any path that is not the router's own."""
        if scope["path"].startswith("/admin/"):
            raise HttpError(
                404, f"The router does not serve {scope['path']}; send it to each engine.", code="not_found"
            )
        if self._refusal is not None:
            raise ShuttingDown(self._refusal)
        account: Account = scope["state"].get("account", self._anyone)
        most = self._config.max_open_requests
        if most is not None and self._open[account] >= most:
            raise HttpError(
                429, f"{most} requests are open, the most allowed; wait until one ends.", code="rate_limit_exceeded"
            )
        self._open[account] += 1
        self._drain_rate.note(time.monotonic(), is_busy=True)
        try:
            answer = Answer(scope, send)
            if scope["path"] == FILES_PATH and scope["method"] == "POST":
                upload = Ask("POST", FILES_PATH, b"", b"", upload=Upload(receive))
                await self._bounded(upload, scope, answer)
                return
            ask = Ask(scope["method"], scope["path"], await read_body(receive), scope["state"]["salt"])
            with account.hold_tokens(ask.num_tokens if scope["method"] == "POST" else 0) as hold:
                hold.num_tokens = ask.num_tokens
                hold.num_tokens = await while_connected(receive, self._bounded(ask, scope, answer))
        finally:
            self._open[account] -= 1
            if not self._open[account]:
                del self._open[account]
            self._drain_rate.note(time.monotonic(), is_busy=bool(self._open), num_ended=scope["method"] == "POST")

    async def _bounded(self, ask: Ask, scope: Scope, answer: Answer) -> int:
        """Relays the request until it ends, its time limit is reached, or the router stops."""
        limit_s = self._config.http.clients.request_timeout_s
        end: asyncio.Timeout | None = None
        try:
            async with asyncio.timeout(limit_s) as end:
                self._ends.add(end)
                return await self._relay.serve(ask, scope, answer)
        except TimeoutError:
            error = too_slow(limit_s or 0.0) if self._refusal is None else as_http_error(ShuttingDown(self._refusal))
            if not answer.has_started:
                raise error from None
            await answer.fail(error)
            return ask.num_tokens
        finally:
            if end is not None:
                self._ends.discard(end)
            self._idle.set()

    # ── endpoints of the router ──────────────────────────────────────────────────────────────────────────────────────

    async def health(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /health: 200 while the router runs, with the state of its engines."""
        states = [engine.state() for engine in self._fleet.engines]
        await send_json(send, Health("ok" if any(state.ready for state in states) else "no engine", states))

    async def ready(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /ready: 200 while a new request would be accepted."""
        if self._refusal is not None:
            raise ShuttingDown(self._refusal)
        if not any(engine.is_able for engine in self._fleet.engines):
            raise HttpError(503, "No engine takes requests at the moment.", code="engine_unavailable")
        await send_json(send, {"status": "ready"})

    async def load(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /load: the number of open requests."""
        await send_json(send, Load(len(self._ends), len(self._fleet.engines)))

    async def metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /metrics: the router's own metrics, and those of engines on Unix sockets."""
        page = render(self._fleet, self._relay.stats, self._stats, num_open=len(self._ends))
        page += merge_pages(await self._fleet.pages())
        await send_body(send, 200, page, content_type=CONTENT_TYPE.encode())

    async def version(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /version"""
        await send_json(send, {"version": __version__})

    async def engines(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /admin/engines"""
        self._check_admin()
        await send_json(send, [engine.state() for engine in self._fleet.engines])

    async def change_engines(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST /admin/engines: adds an engine, or removes one after its open requests have ended."""
        self._check_admin()
        try:
            change = msgspec.json.decode(await read_body(receive), type=Change)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            change = Change()
        if (change.add is None) == (change.remove is None):
            raise HttpError(400, 'The body must be {"add": URL} or {"remove": URL}.')
        if change.add is not None:
            try:
                self._fleet.add(change.add)
            except ConfigError as error:
                raise HttpError(400, str(error), param="add") from None
        elif change.remove is not None:
            engine = self._fleet.find(change.remove)
            if engine is None:
                raise HttpError(
                    404, f"{change.remove} is not an engine of this router.", code="not_found", param="remove"
                )
            removal = asyncio.create_task(self._fleet.remove(engine))
            self._removals.add(removal)
            removal.add_done_callback(self._removals.discard)
            await asyncio.sleep(0)  # so that the removal has begun and the answer shows it
        await send_json(send, [engine.state() for engine in self._fleet.engines])

    def _check_admin(self) -> None:
        """The edge has checked the key; without admin keys there is no such endpoint."""
        if not self._config.http.admin_keys:
            raise HttpError(404, "Start the router with --admin-api-key to use this endpoint.", code="not_found")
