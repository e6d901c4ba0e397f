"""uvicorn's settings, and what its fast protocol lacks: limits on a request's head and on readers that stall."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .http_error import HttpError, error_body

KEEP_ALIVE_S = 75  # longer than clients' pools keep a connection, so that they do not race with our closing it
BACKLOG = 2048
MAX_URL_BYTES = 8 << 10
MAX_HEADERS = 100
MAX_HEADERS_BYTES = 32 << 10
HEAD_TIMEOUT_S = 10.0
STALL_TIMEOUT_S = 60.0  # how long a client may leave what is sent to it unread
CLOSE_TIMEOUT_S = 5  # how long a stopping server waits for answers that have ended to leave


def server_config(app: ASGIApp) -> uvicorn.Config:
    """For `HttpServer(server_config(app)).serve(sockets=[…])` on a uvloop that already runs."""
    return uvicorn.Config(
        app,
        loop="uvloop",
        http=BoundedHttp,
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
    )


class HttpServer(uvicorn.Server):
    """Leaves the process's signals alone: its owner sets `should_exit`."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """For uvicorn."""
        yield


class BoundedHttp(HttpToolsProtocol):
    """HTTP/1.1 with bounds on a request's head, in bytes and seconds, and on how long a client may stall."""

    _in_head = False
    _num_head_bytes = 0
    _overflow: str | None = None  # why the parser was stopped
    _timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        self._set_timer(KEEP_ALIVE_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._set_timer(None)
        self._end_stall()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head and not self.transport.is_closing():
            # The parser tells of a header only when it is whole, so what it still holds is counted here.
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_URL_BYTES + MAX_HEADERS_BYTES:
                self._overflow = "The request head is too large."
                self.send_400_response("")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._num_head_bytes = 0
        self._set_timer(HEAD_TIMEOUT_S)

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > MAX_URL_BYTES:
            self._stop("The URL is too long.")

    def on_headers_complete(self) -> None:
        num_bytes = sum(len(name) + len(value) for name, value in self.headers)
        if len(self.headers) > MAX_HEADERS or num_bytes > MAX_HEADERS_BYTES:
            self._stop("The request head is too large.")
        self._in_head = False
        self._set_timer(None)
        super().on_headers_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._end_stall()
        self._stall_timer = self.loop.call_later(STALL_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        self._end_stall()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """For uvicorn: what the parser did not take is answered in OpenAI's shape, too."""
        status = b"431 Request Header Fields Too Large" if self._overflow else b"400 Bad Request"
        body = error_body(HttpError(400, self._overflow or "The request is no valid HTTP."))
        head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(head % (status, len(body)) + body)
        self.transport.close()

    def _stop(self, why: str) -> None:
        self._overflow = why
        raise ValueError(why)  # stops the parser, which has uvicorn call `send_400_response`

    def _set_timer(self, timeout_s: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if timeout_s is None else self.loop.call_later(timeout_s, self._time_out)

    def _end_stall(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _time_out(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()
