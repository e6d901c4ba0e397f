"""Sends a request to an engine and its answer to the client, and tries other engines when one is lost.

A request is sent again as long as the client has no byte of the answer. A stream that has begun is continued by another
engine with its `Journal`, if it has one. This module decides what is retried and when to stop; `choice.py` decides
which engine is next.
"""

import asyncio
import contextlib
import secrets
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence

import aiohttp
from starlette.types import Scope, Send
from yarl import URL

from ..api.http.direct import DIRECT, DirectWriter
from ..api.http.exchange import ClientGone
from ..api.http.http_error import HttpError, anthropic_error_body, as_http_error, error_body, speaks_anthropic
from ..api.output.sse import as_event
from ..errors import PagewireError
from .ask import Ask
from .engines import Engine, Fleet
from .journal import EngineLeaves, Journal, StreamDiffers

MAX_REFUSALS = 8  # engines that are asked in turn whether they have room
MAX_FRUITLESS = 2  # engines lost in a row without a new token; then the request may be the cause
_MAX_WHOLE_BYTES = 64 << 20  # of an answer that is kept until it is complete; larger ones are streamed
_MAX_RESPONSE_IDS = 100_000
_PARAMS = "kv_transfer_params"
_NO_TRANSFER: Mapping[str, object] = {}

# Headers of one connection, and headers that the router sets itself.
_HOP_HEADERS = {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "upgrade"}
_OWN_HEADERS = _HOP_HEADERS | {"transfer-encoding", "content-length", "expect", "host", "origin", "date", "server"}
_OWN_HEADERS |= {"x-request-id", "request-id"}
Headers = Sequence[tuple[bytes, bytes]]


class RelayStats:
    """Counters since the start."""

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()  # by status
        self.retries = 0  # requests sent again before the first byte of an answer
        self.resumes = 0  # streams continued by another engine
        self.resumed_tokens = 0  # tokens that those streams had by then
        self.prefill_legs = 0  # prompts that another engine was to compute
        self.prefill_failures = 0  # of these, the ones that it did not
        self.failures: Counter[str] = Counter({"no_engine": 0, "fruitless": 0, "broken_off": 0})


class _Refused(Exception):
    """The engine does not accept the request now; another one may."""

    def __init__(self, status: int, headers: Headers, body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body


class _Lost(Exception):
    """The engine was lost, or left, before the answer was complete."""

    def __init__(self, *, may_be_cause: bool = True) -> None:
        """`may_be_cause`: the request reached the engine and may have made it fail."""
        self.may_be_cause = may_be_cause


class _LegRefused(Exception):
    """The engine does not take KV from the one that was to compute the prompt."""


class _Prompt:
    """What is known of one request's prompt."""

    def __init__(self) -> None:
        self.computed_by: Engine | None = None  # for another engine


class Answer:
    """The response to the client."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._send = send
        self._writer: DirectWriter | None = scope.get("extensions", {}).get(DIRECT)
        self._is_anthropic = speaks_anthropic(scope["path"])
        self.status = 0  # 0: not started
        self.has_ended = False

    @property
    def has_started(self) -> bool:
        return self.status > 0

    async def whole(self, status: int, headers: Headers, body: bytes) -> None:
        await self.start(status, [*headers, (b"content-length", b"%d" % len(body))])
        await self.end(body)

    async def start(self, status: int, headers: Headers) -> None:
        if not self.has_started:
            self.status = status
            await self._send({"type": "http.response.start", "status": status, "headers": list(headers)})

    async def write(self, parts: list[bytes]) -> None:
        """Writes to the socket at once while the client reads fast enough, otherwise waits for it."""
        if self._writer is not None and self._writer.keeps_up():
            self._writer.write_parts(parts)
        else:
            await self._send({"type": "http.response.body", "body": b"".join(parts), "more_body": True})

    async def end(self, last: bytes = b"") -> None:
        self.has_ended = True
        await self._send({"type": "http.response.body", "body": last, "more_body": False})

    async def fail(self, error: HttpError) -> None:
        """Ends a stream that has begun with an error as its last event."""
        if not self.has_ended:
            event = b"event: error\n" + as_event(anthropic_error_body(error)) if self._is_anthropic else None
            await self.end(event or as_event(error_body(error)))


class Relay:
    """Relays all requests of one router."""

    def __init__(self, fleet: Fleet, *, outage_wait_s: float, root_path: str = "") -> None:
        """`outage_wait_s`: how long a request waits while no engine is ready. `root_path`: a prefix of the router's
        paths, which is removed for the engines."""
        self._fleet = fleet
        self._root = root_path.encode()
        self._outage_wait_s = outage_wait_s
        self._home_of: OrderedDict[str, Engine] = OrderedDict()  # id of a stored response → the engine that has it
        self.stats = RelayStats()

    async def serve(self, ask: Ask, scope: Scope, answer: Answer) -> int:
        """Answers one request. Returns its tokens: counted for a stream with a journal, else estimated. Raises
        HttpError."""
        journal = ask.new_journal()
        try:
            await self._serve(ask, scope, answer, journal)
        except PagewireError as error:
            if not answer.has_started:
                raise
            await answer.fail(as_http_error(error))
        self.stats.requests[str(answer.status)] += 1
        return ask.num_tokens if journal is None else journal.num_prompt + journal.num_ids

    async def _serve(self, ask: Ask, scope: Scope, answer: Answer, journal: Journal | None) -> None:
        loop = asyncio.get_running_loop()
        avoid: set[Engine] = set()
        refusal: _Refused | None = None
        num_fruitless, num_ids = 0, 0
        deadline: float | None = None
        prompt = _Prompt()
        while True:
            engine, helper = self._engines(ask, avoid)
            if engine is None:
                if refusal is not None and refusal.status == 429 and not answer.has_started:
                    await answer.whole(refusal.status, refusal.headers, refusal.body)
                    return
                deadline = deadline or loop.time() + min(self._outage_wait_s, ask.patience_s)
                if not await self._fleet.news(deadline):
                    self.stats.failures["no_engine"] += 1
                    raise HttpError(503, "No engine takes requests at the moment.", code="engine_unavailable")
                avoid.clear()
                continue
            try:
                await self._send(engine, helper, prompt, ask, scope, answer, journal)
                return
            except _Refused as refused:
                refusal = refused
                avoid.add(engine)
                engine.checked.set()
                self.stats.retries += not answer.has_started
            except StreamDiffers:
                self.stats.failures["broken_off"] += 1
                raise HttpError(
                    500, "The engine was lost, and another one sampled other tokens; send the request again."
                ) from None
            except _Lost as lost:
                engine.lost("It broke off an answer.")
                if (answer.has_started and journal is None) or (lost.may_be_cause and not ask.is_repeatable):
                    self.stats.failures["broken_off"] += 1
                    raise _unavailable("The engine that had the request was lost; send the request again.") from None
                if journal is not None and journal.num_ids > num_ids:
                    num_fruitless, num_ids, deadline = 0, journal.num_ids, None
                elif lost.may_be_cause:
                    num_fruitless, deadline = num_fruitless + 1, None
                if num_fruitless >= MAX_FRUITLESS:
                    self.stats.failures["fruitless"] += 1
                    raise _unavailable(
                        f"{MAX_FRUITLESS} engines were lost during this request; it is not tried again."
                    ) from None
                if journal is not None and answer.has_started:
                    self.stats.resumes += 1
                    self.stats.resumed_tokens += journal.restart()
                else:
                    self.stats.retries += 1

    def _engines(self, ask: Ask, avoid: set[Engine]) -> tuple[Engine | None, Engine | None]:
        """The engine that gets it now, None if no engine is ready for it; and the one that computes its prompt for
        that one, if that pays."""
        if ask.is_for_home:
            home = self._fleet.engines[0] if self._fleet.engines else None
        else:
            home = self._home_of.get(ask.response_id or "")
        if home is not None and home in self._fleet.engines:
            return (home if home.is_able and home not in avoid else None), None
        if len(avoid) >= MAX_REFUSALS:
            return None, None
        return self._fleet.legs(ask.blocks, ask.conversation, ask.num_prompt, avoid, ask.key_of, ask.model)

    async def _send(
        self,
        engine: Engine,
        helper: Engine | None,
        prompt: "_Prompt",
        ask: Ask,
        scope: Scope,
        answer: Answer,
        journal: Journal | None,
    ) -> None:
        """One attempt, with an engine that computes the prompt, or has computed it in an earlier attempt. Raises as
        `_attempt`, but not _LegRefused."""
        try:
            if helper is not None and prompt.computed_by is None:
                prompt.computed_by = helper
                await self._attempt_legs(engine, helper, ask, scope, answer, journal)
            else:
                await self._attempt(engine, ask, scope, answer, journal, _from_store(engine, prompt.computed_by))
        except _LegRefused:
            await self._attempt(engine, ask, scope, answer, journal)

    async def _attempt_legs(
        self, engine: Engine, helper: Engine, ask: Ask, scope: Scope, answer: Answer, journal: Journal | None
    ) -> None:
        """Sends the prompt to `helper` and the request to `engine`, which takes the KV from it, at once. If `helper`
        fails before the first token, `engine` gets the request again without it, and need not wait for it. Raises as
        `_attempt`."""
        self.stats.prefill_legs += 1
        name = secrets.token_hex(8)
        told = {"remote_prefiller": _remote(name, engine, helper)}
        main = asyncio.create_task(self._attempt(engine, ask, scope, answer, journal, {_PARAMS: told}))
        leg = asyncio.create_task(self._prefill(helper, ask, scope, name))
        try:
            await asyncio.wait((main, leg), return_when=asyncio.FIRST_COMPLETED)
            if leg.done() and not leg.result():
                self.stats.prefill_failures += 1
                has_nothing = journal.num_ids == 0 if journal is not None else not answer.has_started
                if has_nothing and not main.done():
                    main.cancel()
                    await asyncio.wait((main,))
                    if main.cancelled():
                        if journal is not None and answer.has_started:
                            journal.restart()
                        await self._attempt(engine, ask, scope, answer, journal)
                        return
            await main
        finally:
            for task in (main, leg):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(main, leg, return_exceptions=True)

    async def _prefill(self, helper: Engine, ask: Ask, scope: Scope, name: str) -> bool:
        """Lets an engine compute the prompt. Whether it did."""
        body = ask.prefill_body({_PARAMS: {"remote_decoder": {"kv_request_id": name}}})
        try:
            async with asyncio.timeout(None) as limit:
                with helper.attempt(limit), helper.computing(ask.num_prompt):
                    async with helper.session.request(
                        scope["method"], _url(helper, scope, self._root), headers=_request_headers(scope), data=body
                    ) as response:
                        await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError):
            helper.lost("It broke off a prompt.")
            return False
        if response.status != 200:
            helper.checked.set()
        return response.status == 200

    async def _attempt(
        self,
        engine: Engine,
        ask: Ask,
        scope: Scope,
        answer: Answer,
        journal: Journal | None,
        transfer: Mapping[str, object] = _NO_TRANSFER,
    ) -> None:
        """`transfer`: what the body says of KV elsewhere. Raises _Refused, _Lost, _LegRefused, StreamDiffers."""
        body = ask.body_with({**({} if journal is None else journal.resumption(ask.num_choices)), **transfer})
        upload = None if ask.upload is None else ask.upload.parts()
        try:
            async with asyncio.timeout(None) as limit:
                with engine.attempt(limit):
                    async with engine.session.request(
                        scope["method"],
                        _url(engine, scope, self._root),
                        headers=_request_headers(scope),
                        data=upload or body or None,
                    ) as response:
                        if transfer and response.status == 400 and _PARAMS.encode() in await response.read():
                            raise _LegRefused
                        await self._answer(response, engine, ask, answer, journal)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
            raise _Lost(may_be_cause=False) from None
        except (aiohttp.ClientError, OSError, TimeoutError):
            if ask.upload is not None and ask.upload.has_client_left:
                raise ClientGone from None
            raise _Lost from None

    async def _answer(
        self,
        response: aiohttp.ClientResponse,
        engine: Engine,
        ask: Ask,
        answer: Answer,
        journal: Journal | None,
    ) -> None:
        headers = _response_headers(response)
        is_stream = response.content_type == "text/event-stream"
        if is_stream and response.status == 200:
            await answer.start(200, headers)
            if journal is not None:
                await self._pass_on_new(response, engine, ask, answer, journal)
            else:
                await self._pass_on(response, engine, ask, answer)
        elif not answer.has_started and (response.content_length or 0) > _MAX_WHOLE_BYTES:
            await answer.start(response.status, headers)
            await self._pass_on(response, engine, ask, answer)
        else:
            body = await response.read()
            if response.status == 503 and b'"engine_failed"' in body:
                raise _Lost
            if response.status == 503 or (response.status == 429 and b'"queue_full"' in body):
                raise _Refused(response.status, headers, body)
            if answer.has_started:
                raise HttpError(500, "The engine was lost, and another one cannot continue; send the request again.")
            self._note_response(ask, engine, body)
            await answer.whole(response.status, headers, body)

    async def _pass_on(self, response: aiohttp.ClientResponse, engine: Engine, ask: Ask, answer: Answer) -> None:
        is_noted = False
        async for data in response.content.iter_any():
            if not is_noted:
                is_noted = True
                self._note_response(ask, engine, data)
            await answer.write([data])
        await answer.end()

    def _note_response(self, ask: Ask, engine: Engine, data: bytes) -> None:
        """Remembers which engine has a stored response; the answer begins with its id."""
        if not ask.makes_response:
            return
        _, found, rest = data.partition(b'"id":"resp_')
        if found:
            self._note_home(ask, engine, "resp_" + rest.partition(b'"')[0].decode("latin-1"))

    def _note_home(self, ask: Ask, engine: Engine, response_id: str) -> None:
        if ask.makes_response and response_id:
            self._home_of[response_id] = engine
            if len(self._home_of) > _MAX_RESPONSE_IDS:
                self._home_of.popitem(last=False)

    async def _pass_on_new(
        self, response: aiohttp.ClientResponse, engine: Engine, ask: Ask, answer: Answer, journal: Journal
    ) -> None:
        """Sends what the journal lets through. Raises _Lost if the connection ends before the stream does."""
        rest, num_before = b"", journal.num_ids
        is_streaming = False
        try:
            async for data in response.content.iter_any():
                *events, rest = (rest + data).split(b"\n\n")
                fresh: list[bytes] = []
                for event in events:
                    try:
                        shown = journal.take(event)
                    except EngineLeaves as leaving:
                        await _flush(answer, fresh)
                        raise _Lost(may_be_cause=leaving.may_be_cause) from None
                    if shown is not None:
                        fresh.append(shown)
                    if journal.has_ended:
                        self._note_home(ask, engine, journal.id)
                        await answer.end(b"".join(fresh))
                        fresh.clear()
                await _flush(answer, fresh)
                if (num_new := journal.num_ids - num_before) > 0:
                    engine.num_tokens += num_new
                    num_before = journal.num_ids
                    if not is_streaming:
                        is_streaming = True
                        engine.num_streaming += 1
        finally:
            engine.num_streaming -= is_streaming
        if not answer.has_ended:
            raise _Lost


async def _flush(answer: Answer, parts: list[bytes]) -> None:
    if parts and not answer.has_ended:
        await answer.write(parts)


def _remote(name: str, engine: Engine, helper: Engine) -> dict[str, object]:
    """Where `engine` finds the KV of `helper`, if it is to be told."""
    told: dict[str, object] = {"kv_request_id": name}
    if engine.takes_peers and helper.kv_address is not None:
        told["remote_host"], told["remote_port"] = helper.kv_address
    return told


def _from_store(engine: Engine, source: Engine | None) -> Mapping[str, object]:
    """The part of a body that names the engine that has computed the prompt for another one."""
    if source is None or not source.is_able or source is engine or not engine.takes_peers:
        return _NO_TRANSFER
    return {_PARAMS: {"remote_kv_source": _remote("resumed", engine, source)}}


def _unavailable(message: str) -> HttpError:
    return HttpError(503, message, code="engine_unavailable")


def _url(engine: Engine, scope: Scope, root: bytes) -> URL:
    """The engine's URL with the same path and query, byte for byte."""
    path: bytes = scope["raw_path"]
    if root and path.startswith(root + b"/"):
        path = path.removeprefix(root)
    query = b"?" + scope["query_string"] if scope["query_string"] else b""
    return URL(engine.base + (path + query).decode("latin-1"), encoded=True)


def _request_headers(scope: Scope) -> list[tuple[str, str]]:
    found = _kept((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])
    return [*found, ("x-request-id", scope["state"]["request_id"])]


def _response_headers(response: aiohttp.ClientResponse) -> Headers:
    kept = _kept((name.lower(), value) for name, value in response.headers.items())
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in kept]


def _kept(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    return [
        (name, value)
        for name, value in headers
        if not (name in _OWN_HEADERS or name.startswith(("x-ratelimit-", "access-control-")))
    ]
