"""The engines behind a router: which are ready, and how busy each is. `api/engines/choice.py` chooses among them.

The router checks each engine twice a second, or less often if it has very many. An engine that is not ready, cannot be
reached, or has broken off an answer is ejected: it gets no new requests until a check succeeds, and keeps its open
ones. An engine that has not answered for `SILENT_LIMIT_S` is given up: its open requests go to other engines. One that
refuses the router's keys would refuse its clients' requests too, so it is not ready.
"""

import asyncio
import contextlib
import logging
import ssl
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from urllib.parse import urlsplit

import aiohttp
from msgspec import Struct

from ..api.engines.choice import Choice, Condition, Conversation, Member, check_interval_s
from ..api.engines.presence import Presence
from ..errors import ConfigError
from .agreement import Agreement, Offer, Server
from .load_report import LoadReader, LoadReport, ModelReport, bearer
from .trouble import UNCHECKED, broken_off, not_ready, unreached

CHECK_TIMEOUT_S = 2.0
SILENT_LIMIT_S = 10.0  # the api of a busy engine still answers
CONNECT_TIMEOUT_S = 5.0
_COMPARE_INTERVAL_S = 1.0  # of the engines' speeds
_REMOVAL_POLL_S = 0.1

log = logging.getLogger("pagewire.route")


class EngineState(Struct, frozen=True):
    """One engine in /health and /admin/engines."""

    url: str
    ready: bool
    trouble: str | None
    since_s: float  # seconds since `ready` changed
    open: int  # requests
    loaded: tuple[str, ...] = ()  # names of models that it has loaded, or is loading
    warning: str | None = None  # what is wrong although it may be ready: sentences


class Engine(Member):
    """One engine and its state. Create it on the event loop that uses it."""

    def __init__(
        self, url: str, choice: "Choice[Engine]", *, cacert: str | None = None, keys: Sequence[str] = ()
    ) -> None:
        """`url`: http://, https:// or unix:PATH. `choice`: what is told of its state. `keys`: API keys of the router's
        clients, which the engine should accept. Raises ConfigError."""
        self.url = url.rstrip("/")
        super().__init__(self.url)
        self._choice = choice
        parts = urlsplit(self.url)
        connector: aiohttp.BaseConnector
        if parts.scheme == "unix" and parts.path and not parts.netloc:
            self.base = "http://localhost"
            connector = aiohttp.UnixConnector(parts.path, limit=0)
        elif parts.scheme in ("http", "https") and parts.hostname and not (parts.query or parts.fragment):
            self.base = self.url
            tls = parts.scheme == "https" and cacert is not None
            connector = aiohttp.TCPConnector(limit=0, ssl=_tls(cacert) if tls else True)
        else:
            raise ConfigError(f"{url} is not an engine's address; write http://host:port, or unix:/path.")
        self.session = aiohttp.ClientSession(
            connector=connector,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
        )
        self._load = LoadReader(self.session, self.base + "/load", keys)
        self.trouble: str | None = UNCHECKED  # None: it is ready
        self.difference: str | None = None  # from the other engines, sentences
        self.offers: Mapping[str, Offer] = {}  # what it said last of its models, by name; another object if it differs
        self.is_new = False  # it has started since this router did, or starts now
        self.num_ejections = 0
        self.num_streaming = 0  # streams of this router that have had tokens
        self.num_tokens = 0  # of those streams
        self.kv_address: tuple[str, int] | None = None  # where other engines load its KV; None: where each is told to
        self.takes_peers = False  # it loads from engines that requests name
        self.checked = asyncio.Event()  # set: check it again at once
        self._concern: str | None = None  # of `_load`, as the log has it
        self._since = self._heard_at = time.monotonic()
        self._attempts: set[asyncio.Timeout] = set()
        self._paced_at, self._paced_tokens = self._since, 0

    def state(self) -> EngineState:
        trouble = "It is leaving." if self.is_leaving else self.trouble
        loaded = tuple(name for name, presence in self.models.items() if presence is Presence.LOADED)
        warning = " ".join(filter(None, (self._concern, self.difference))) or None
        return EngineState(
            self.url, trouble is None, trouble, time.monotonic() - self._since, self.num_open, loaded, warning
        )

    @contextlib.contextmanager
    def attempt(self, limit: asyncio.Timeout) -> Iterator[None]:
        """The time in which it has a request. `limit` expires when the engine is given up."""
        self._choice.opened(self)
        self._attempts.add(limit)
        try:
            yield
        finally:
            self._choice.closed(self)
            self._attempts.discard(limit)

    def leave(self, is_leaving: bool = True) -> None:
        """It gets no new requests, whatever its checks say; or gets them again."""
        self._choice.leaves(self, is_leaving)

    def eject(self, trouble: str, condition: Condition = Condition.OUT) -> None:
        """The engine gets no new requests until a check succeeds."""
        if self.trouble is None:
            self.num_ejections += 1
            self._since = time.monotonic()
            log.warning("engine %s gets no new requests: %s", self.url, trouble)
        elif self.trouble == UNCHECKED or trouble == self._load.refusal != self.trouble:
            log.warning("engine %s is not ready: %s", self.url, trouble)
        self.trouble = trouble
        self._choice.turned(self, condition)

    def lost(self, trouble: str) -> None:
        """The engine broke off a connection and may have died: ejects it and checks it at once."""
        self.eject(trouble)
        self.is_new = True
        self._choice.lost(self)
        self.checked.set()

    async def check(self) -> None:
        """Checks it once."""
        try:
            async with asyncio.timeout(CHECK_TIMEOUT_S):
                async with self.session.get(self.base + "/ready") as response:
                    status, body = response.status, await response.read()
                report = await self._load.read()
        except TimeoutError:
            self.eject(f"It does not answer within {CHECK_TIMEOUT_S:g} s.", Condition.SILENT)
        except aiohttp.ClientConnectorError as error:
            self.eject(unreached(error))
            self._load.restarted()
            self.is_new = self.is_new or self.num_sent > 0
        except (aiohttp.ClientError, OSError):
            self.eject(broken_off(has_tls=self.base.startswith("https:")))
        else:
            self._heard_at = time.monotonic()
            if report is not None:
                self._take(report)
            self._measure_pace()
            if self._load.refusal is not None and status not in (401, 403):  # its /ready takes any key, or none
                self.eject(self._load.refusal)
            elif status == 200:
                self._admit()
                self._say_concern()  # a proxy whose engine is away answers both paths alike, which is no news of /load
            else:
                self.eject(not_ready(status, body))
        if time.monotonic() - self._heard_at > SILENT_LIMIT_S:
            self._give_up()

    def _take(self, load: LoadReport) -> None:
        self._choice.reported(self, load.server_load)
        self._choice.described(self, load.role, load.prompt_ms, load.load_ms)
        self._choice.hosts(self, {name: _presence(model) for name, model in load.models.items()})
        host = load.kv_host or urlsplit(self.url).hostname
        self.kv_address = (host, load.kv_port) if host and load.kv_port else None
        self.takes_peers = load.takes_peers
        has_role = load.role != "both" or load.takes_peers
        offers = {}
        for name, one in load.models.items():
            before = self.offers.get(name)
            # It says none until its core has reported.
            kv_digest = one.kv_digest or (before.kv_digest if before is not None else "") if has_role else ""
            offers[name] = Offer(one.files_digest, one.max_model_len, load.version, kv_digest)
        if offers != self.offers:
            self.offers = offers

    def _say_concern(self) -> None:
        """Logs what is wrong with its keys or its /load, once, and that it is over."""
        concern, before = self._load.concern, self._concern
        if concern is not None and concern != before:
            log.warning("engine %s: %s", self.url, concern)
        elif concern is None and before is not None:
            log.warning("engine %s: this is over: %s", self.url, before)
        self._concern = concern

    @contextlib.contextmanager
    def computing(self, num_tokens: int) -> Iterator[None]:
        """The time in which it computes a prompt of so many tokens for another engine."""
        self.num_due_tokens += num_tokens
        try:
            yield
        finally:
            self.num_due_tokens -= num_tokens

    async def metrics(self) -> str:
        """Its /metrics page; empty if it cannot be had."""
        with contextlib.suppress(TimeoutError, aiohttp.ClientError, OSError):
            async with asyncio.timeout(CHECK_TIMEOUT_S):
                async with self.session.get(self.base + "/metrics", headers=bearer(self._load.key)) as response:
                    return await response.text() if response.status == 200 else ""
        return ""

    async def close(self) -> None:
        await self.session.close()

    def _admit(self) -> None:
        if self.trouble is not None:
            self._since = time.monotonic()
            log.warning("engine %s is ready", self.url)
            if self.is_new:
                self._choice.started(self, self._since)
        self.trouble, self.is_new = None, False
        self._choice.turned(self, Condition.ABLE)

    def _measure_pace(self) -> None:
        """Tells how long its streams waited for a token since the last check."""
        now, num_tokens = self._heard_at, self.num_tokens - self._paced_tokens
        if self.num_streaming:
            self._choice.paced(self, (now - self._paced_at) * self.num_streaming / max(1, num_tokens))
        self._paced_at, self._paced_tokens = now, self.num_tokens

    def _give_up(self) -> None:
        now = asyncio.get_running_loop().time()
        for limit in self._attempts:
            limit.reschedule(now)
        self._attempts.clear()


class Fleet:
    """All engines of one router."""

    def __init__(self, urls: Sequence[str], *, cacert: str | None = None, keys: Sequence[str] = ()) -> None:
        """`keys`: API keys of the clients, which the engines should accept. Raises ConfigError."""
        self._cacert = cacert
        self._keys = keys
        self.choice: Choice[Engine] = Choice()
        self._watchers: dict[Engine, asyncio.Task[None]] = {}
        self._waiters: set[asyncio.Future[None]] = set()
        self._compared_at = 0.0
        self._agreement = Agreement()
        self._compared_offers: list[Mapping[str, Offer]] = []
        for url in urls:
            self.choice.add(Engine(url, self.choice, cacert=cacert, keys=keys))

    @property
    def engines(self) -> Sequence[Engine]:
        return self.choice.members

    def start(self) -> None:
        for engine in self.engines:
            self._watch(engine)

    async def stop(self) -> None:
        for engine in list(self.engines):
            await self._forget(engine)

    def find(self, url: str) -> Engine | None:
        return next((engine for engine in self.engines if engine.url == url.rstrip("/")), None)

    def add(self, url: str) -> Engine:
        """Adds an engine, which gets requests once it is ready, or cancels its removal. Raises ConfigError."""
        engine = self.find(url)
        if engine is None:
            engine = Engine(url, self.choice, cacert=self._cacert, keys=self._keys)
            engine.is_new = True
            self.choice.add(engine)
            self._watch(engine)
        engine.leave(False)
        engine.checked.set()
        return engine

    async def remove(self, engine: Engine) -> None:
        """Removes an engine after its open requests have ended; until then it gets no new ones."""
        engine.leave()
        while engine.is_leaving and engine.num_open:
            await asyncio.sleep(_REMOVAL_POLL_S)
        if engine.is_leaving and engine in self.engines:
            await self._forget(engine)

    def legs(
        self,
        blocks: Sequence[int],
        conversation: Conversation | None,
        num_tokens: int,
        avoid: Collection[Engine],
        key_of: Callable[[int], int] | None,
        model: str | None,
    ) -> tuple[Engine | None, Engine | None]:
        """The engine for a request, and the one that computes its prompt for it, as `Choice.legs` says. `num_tokens`:
        of a prompt that another engine may compute, else 0."""
        return self.choice.legs(blocks, conversation, num_tokens, time.monotonic(), avoid, key_of, model)

    async def news(self, deadline: float) -> bool:
        """Waits for the next check of an engine. False: the loop's clock has reached `deadline`."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            async with asyncio.timeout_at(deadline):
                await waiter
        except TimeoutError:
            return False
        finally:
            self._waiters.discard(waiter)
        return True

    async def pages(self) -> dict[str, str]:
        """Address → /metrics page of the engines on Unix sockets, which Prometheus cannot reach."""
        hidden = [engine for engine in self.engines if engine.url.startswith("unix:")]
        pages = await asyncio.gather(*(engine.metrics() for engine in hidden))
        return {engine.url: page for engine, page in zip(hidden, pages, strict=True)}

    def _watch(self, engine: Engine) -> None:
        self._watchers[engine] = asyncio.create_task(self._check_on(engine))

    async def _check_on(self, engine: Engine) -> None:
        while True:
            engine.checked.clear()
            await engine.check()
            if (now := time.monotonic()) > self._compared_at + _COMPARE_INTERVAL_S:
                self._compared_at = now
                self.choice.compare()
                self._compare_offers()
            for waiter in self._waiters:
                if not waiter.done():
                    waiter.set_result(None)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(check_interval_s(len(self.engines))):
                    await engine.checked.wait()

    def _compare_offers(self) -> None:
        """Finds the engines whose models differ from those of others, if an engine said something else than before."""
        offers = [engine.offers for engine in self.engines]
        if offers == self._compared_offers:  # of 1,000 engines in some 10 µs, since equal ones are the same objects
            return
        self._compared_offers = offers
        found = self._agreement.compare([Server(engine.url, engine.offers) for engine in self.engines])
        for engine in self.engines:
            engine.difference = found.get(engine.url)

    async def _forget(self, engine: Engine) -> None:
        self.choice.remove(engine)
        if (watcher := self._watchers.pop(engine, None)) is not None:
            watcher.cancel()
        await engine.close()


def _presence(model: ModelReport) -> Presence:
    match model.state:
        case "loaded" | "loading":
            return Presence.LOADED
        case "failed":
            return Presence.FAILED
        case _:
            return Presence.FITS if model.fits else Presence.UNLOADED


def _tls(cacert: str | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=cacert)
    except OSError as error:
        raise ConfigError(f"--cacert {cacert} cannot be used: {error.strerror or error}.") from error
