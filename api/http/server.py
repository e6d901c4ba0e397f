"""uvicorn's settings, and limits that its httptools protocol lacks: on the bytes and the time that a client takes."""

import asyncio
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from ...config.config import HttpConfig
from .direct import DIRECT
from .http_error import HttpError, error_body_at
from .tls import tls_context

BACKLOG = 2048
ACCEPTS_A_TURN = 16  # connections a turn of the loop: libuv accepts one for each descriptor of the socket
MAX_URL_BYTES = 8 << 10
MAX_HEADERS = 100
MAX_PIPELINED = 16  # requests on a connection that wait for an earlier response
MAX_FRAMING_BYTES = 64 << 10  # of a chunked body (sizes, extensions, trailers), on top of FRAMING_BYTES_A_BYTE
FRAMING_BYTES_A_BYTE = 8
STALL_TIMEOUT_S = 60.0  # how long a client may leave what is sent to it unread
MAX_UNSENT_BYTES = 128 << 10  # of a connection, in the kernel; its default is megabytes
_HANDOVER_LOOK_S = 0.05
CLOSE_TIMEOUT_S = 5  # how long a stopping server waits until finished responses are sent


class UvicornConfig(uvicorn.Config):
    """uvicorn's settings, and ours for `BoundedHttp`."""

    def __init__(self, app: ASGIApp, config: HttpConfig) -> None:
        """Raises ConfigError if TLS's files cannot be used."""
        super().__init__(
            app,
            loop="uvloop",
            http=BoundedHttp,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,  # `app` writes it
            server_header=False,
            proxy_headers=False,
            backlog=BACKLOG,
            timeout_keep_alive=config.clients.timeout_keep_alive,
            timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
        )
        self.limits = config.clients
        self.path_prefix = config.listen.root_path
        self._tls = tls_context(config.listen)

    def load(self) -> None:
        """Overridden because uvicorn would ask for the key's password on the terminal."""
        super().load()
        self.ssl = self._tls


class HttpServer(uvicorn.Server):
    """Does not handle signals: its owner sets `should_exit`."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Sets options that connections inherit from the listening socket."""
        for listening in sockets or ():
            if sys.platform == "linux" and listening.family != socket.AF_UNIX:
                listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_BYTES)
                listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(STALL_TIMEOUT_S * 1000))
        await super().startup([listening.dup() for listening in sockets or () for _ in range(ACCEPTS_A_TURN)])

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def hand_over(self, grace_s: float) -> None:
        """Leaves the socket to another server: accepts nothing more and closes each open connection after its next
        response. Returns when none is left, or after `grace_s` seconds."""
        for server in self.servers:
            server.close()  # the socket itself is still the supervisor's
        self.config.encoded_headers.append(
            (b"connection", b"close")
        )  # uvicorn rebuilds its defaults from these every second
        self.server_state.default_headers.append((b"connection", b"close"))
        deadline = asyncio.get_running_loop().time() + grace_s
        while self.server_state.connections and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(_HANDOVER_LOOK_S)


def _without_chunks(cycle: RequestResponseCycle) -> Callable[[ASGISendEvent], Coroutine[Any, Any, None]]:
    """The `send` of a response to HTTP/1.0, which knows no chunks: the body ends where the connection does."""
    send_as_usual = cycle.send

    async def send(message: ASGISendEvent) -> None:
        cycle.chunked_encoding, cycle.keep_alive = False, False
        if message["type"] == "http.response.body":
            cycle.expected_content_length = len(message.get("body", b""))  # the whole length may not be known
        await send_as_usual(message)

    return send


class BoundedHttp(HttpToolsProtocol):
    """HTTP/1.1 with limits on a request's head and body, in bytes and seconds, on pipelined requests, and on how long a
    client may leave data unread."""

    config: UvicornConfig
    _in_head = False
    _in_body = False
    _num_head_bytes = 0
    _has_begun = False  # a request began within the bytes that are being read
    _num_body_bytes = 0
    _num_framing_bytes = 0  # after the head, other than the body's
    _refusal: HttpError | None = None  # why the parser was stopped
    _timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None

    def __init__(
        self,
        config: UvicornConfig,
        server_state: ServerState,
        app_state: dict[str, object],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits = config.limits
        self._path_prefix = config.path_prefix

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        self._set_timer(self._limits.timeout_keep_alive)

    def connection_lost(self, exc: Exception | None) -> None:
        self._set_timer(None)
        self._end_stall()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        was_in_body, before = self._in_body, self._num_body_bytes
        self._has_begun = False
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._in_head:
            # The parser reports only complete headers, so the bytes that it holds are counted here. Bytes that came
            # together with the head's beginning may belong to the request before it.
            self._num_head_bytes += 0 if self._has_begun else len(data)
            if self._num_head_bytes > MAX_URL_BYTES + self._limits.max_head_size:
                self._refusal = HttpError(431, "The request head is too large.")
                self.send_400_response("")
        elif was_in_body and self._in_body:
            self._num_framing_bytes += len(data) - (self._num_body_bytes - before)
            if self._num_framing_bytes > MAX_FRAMING_BYTES + FRAMING_BYTES_A_BYTE * self._num_body_bytes:
                self._refusal = HttpError(400, "The request body has more framing than content.")
                self.send_400_response("")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {DIRECT: self}  # type: ignore[dict-item]  # uvicorn's type allows plain values only
        self._in_head = self._has_begun = True
        self._num_head_bytes = self._num_body_bytes = self._num_framing_bytes = 0
        self._set_timer(self._limits.head_timeout_s)

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > MAX_URL_BYTES:
            self._stop(414, "The URL is too long.")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # trailers are ignored
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        num_bytes = sum(len(name) + len(value) for name, value in self.headers)
        if len(self.headers) > MAX_HEADERS or num_bytes > self._limits.max_head_size:
            self._stop(431, "The request head is too large.")
        if len(self.pipeline) >= MAX_PIPELINED:
            self._stop(400, "Too many requests are sent ahead.")
        self._check_framing()
        self._in_head = False
        self._in_body = True
        self._set_timer(self._limits.body_timeout_s)
        is_old = self.parser.get_http_version() == "1.0"
        if is_old:
            self.scope["extensions"] = {}  # the direct writer sends chunks
        super().on_headers_complete()
        if is_old:
            self.cycle.send = _without_chunks(self.cycle)  # type: ignore[assignment]  # uvicorn always sends chunks

    def on_body(self, body: bytes) -> None:
        self._num_body_bytes += len(body)
        if self._num_body_bytes > self._limits.max_body_size and self.cycle.response_complete:
            self._stop(
                413, "The body is too large."
            )  # after the response nothing reads the body, so `app` cannot count it
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_body = False
        super().on_message_complete()
        self._set_timer(self._limits.timeout_keep_alive if self.cycle.response_complete else None)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not (self._in_head or self._in_body or self.pipeline or self.transport.is_closing()):
            # uvicorn's own timer is cancelled by any byte, such as an empty line.
            self._set_timer(self._limits.timeout_keep_alive)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._end_stall()
        self._stall_timer = self.loop.call_later(STALL_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        self._end_stall()
        super().resume_writing()

    def keeps_up(self) -> bool:
        return not self.flow.write_paused and not self.transport.is_closing()

    def write_parts(self, parts: Sequence[bytes]) -> None:
        self.transport.write(b"".join([b"%x\r\n%b\r\n" % (len(part), part) for part in parts]))

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn when the parser fails. Answers with an error in the API's shape, unless the client would
        read it as a part of a response that has begun."""
        cycle = self.cycle
        if (
            cycle is None
            or cycle.response_complete
            or (self._in_body and not (cycle.response_started or self.pipeline))
        ):
            error = self._refusal or HttpError(400, "The request is not valid HTTP.")
            path = self.url.partition(b"?")[0].decode("latin-1").removeprefix(self._path_prefix)
            body = error_body_at(path, error)
            head = (
                b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head % (error.status, HTTPStatus(error.status).phrase.encode(), len(body)) + body)
        self.transport.close()

    def _check_framing(self) -> None:
        """Refuses a body whose end a proxy could see in another place than this server (request smuggling). The
        connection is closed, because the bytes that follow could be read as another request."""
        encodings = [value for name, value in self.headers if name == b"transfer-encoding"]
        if not encodings:
            return
        if self.parser.get_http_version() != "1.1":
            self._stop(400, "HTTP/1.0 has no Transfer-Encoding.")
        if any(name == b"content-length" for name, _ in self.headers):
            self._stop(400, "A request must not have both a Transfer-Encoding and a Content-Length.")
        if len(encodings) > 1 or encodings[0].strip(b" \t").lower() != b"chunked":
            self._stop(400, "A request may have one Transfer-Encoding header, and its value must be chunked.")

    def _stop(self, status: int, why: str) -> None:
        """Called in the parser's callbacks. The exception stops the parser, and uvicorn calls `send_400_response`."""
        self._refusal = HttpError(status, why)
        raise ValueError(why)

    def _set_timer(self, timeout_s: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if timeout_s is None else self.loop.call_later(timeout_s, self._time_out, timeout_s)

    def _end_stall(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _time_out(self, timeout_s: float) -> None:
        # `app` bounds the time of a body that is being read. A paused connection waits for an earlier response.
        if self.flow.read_paused or (self._in_body and not self.cycle.response_complete):
            self._set_timer(timeout_s)
        else:
            self.transport.close()
