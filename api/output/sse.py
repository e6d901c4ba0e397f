"""Streams over raw ASGI: one event an HTTP chunk, keep-alive comments, errors after the first byte.

Knows how a stream is framed, not what its events say. While a client keeps up, chunks are written to its connection
as they arrive; otherwise the request's task sends them with ASGI's `send`, which waits.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable

from starlette.types import Send

from ...errors import PagewireError
from ...ipc.messages import Chunk
from ..gateway.stream import Stream
from ..http.direct import DirectWriter
from ..http.exchange import ClientGone
from ..http.http_error import as_http_error
from .reply import Reply

KEEP_ALIVE_S = 15.0
_HEADERS = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]

log = logging.getLogger(__name__)


def as_event(body: bytes) -> bytes:
    """One line of JSON as an event."""
    return b"data: " + body + b"\n\n"


async def send_stream(send: Send, stream: Stream, reply: Reply, writer: DirectWriter | None) -> None:
    """Sends the whole response. An error ends it with the reply's `failure`. Raises ClientGone."""
    headers = [(b"content-type", reply.content_type), *_HEADERS]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    ticker = _Ticker(stream)
    try:
        await _send_all(send, reply.opening())
        if writer is not None:
            stream.consumer = _ToConnection(reply, writer, ticker)
        async for chunks in stream:
            if not chunks and reply.keep_alive:
                await _send_all(send, [reply.keep_alive])
            for index, chunk in chunks:
                ticker.is_fresh = True
                await _send_all(send, reply.take(index, chunk))
        reply.ended(stream.request.timeline())
        await reply.settle()
        await _send_all(send, reply.closing())
        last = reply.ending()
    except ClientGone:
        raise
    except PagewireError as error:
        last = reply.failure(as_http_error(error))
    except Exception as error:  # the status was sent: the error has to be an event
        log.exception("a stream failed")
        last = reply.failure(as_http_error(error))
    finally:
        ticker.stop()
        stream.consumer = None  # it holds the ticker, which holds the stream
    await send({"type": "http.response.body", "body": last, "more_body": False})


async def send_events(send: Send, events: AsyncIterator[bytes]) -> None:
    """Sends a stream whose events are made elsewhere."""
    await send(_START)
    async for event in events:
        await send({"type": "http.response.body", "body": event, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_all(send: Send, events: Iterable[bytes]) -> None:
    for event in events:
        await send({"type": "http.response.body", "body": event, "more_body": True})


class _Ticker:
    """Wakes a stream's reader when nothing was sent for a whole interval. One timer a stream, none a token."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._loop = asyncio.get_running_loop()
        self.is_fresh = True  # something was sent since the last tick
        self._timer = self._loop.call_later(KEEP_ALIVE_S, self._tick)

    def stop(self) -> None:
        self._timer.cancel()

    def _tick(self) -> None:
        if not self.is_fresh:
            self._stream.wake()
        self.is_fresh = False
        self._timer = self._loop.call_later(KEEP_ALIVE_S, self._tick)


class _ToConnection:
    """Writes chunks to the connection as they arrive. The last chunk of a choice is left to the reader, which knows
    what follows it."""

    def __init__(self, reply: Reply, writer: DirectWriter, ticker: _Ticker) -> None:
        self._reply = reply
        self._writer = writer
        self._ticker = ticker
        self._events: list[bytes] = []  # to be written

    def take(self, index: int, chunk: Chunk) -> bool:
        if chunk.finish is not None or not self._writer.keeps_up():
            return False
        self._events += self._reply.take(index, chunk)
        return True

    def flush(self) -> None:
        self._ticker.is_fresh = True
        if self._events:
            self._writer.write_parts(self._events)
            self._events.clear()
