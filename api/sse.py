"""Server-sent events over raw ASGI: one event an HTTP chunk, keep-alive comments, errors after the first byte.

Owns the bytes of a stream's frame, not of its events.
"""

import asyncio
import logging

from starlette.types import Send

from ..errors import PagewireError
from .gateway import ClientGone, Stream
from .http_error import as_http_error
from .reply import Reply

KEEP_ALIVE_S = 15.0
_KEEP_ALIVE = b": keep-alive\n\n"

_START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    ],
}

log = logging.getLogger(__name__)


def as_event(body: bytes) -> bytes:
    """One line of JSON as an event."""
    return b"data: " + body + b"\n\n"


async def send_stream(send: Send, stream: Stream, reply: Reply) -> None:
    """Sends the whole response. An error ends it with the reply's `failure`. Raises ClientGone."""
    await send(_START)
    ticker = _Ticker(stream)
    try:
        for event in reply.opening():
            await _send_part(send, event)
        while not stream.finished:
            news = await stream.news()
            if not news:
                await _send_part(send, _KEEP_ALIVE)
            for index, chunk in news:
                ticker.is_fresh = True
                for event in reply.events(index, chunk):
                    await _send_part(send, event)
        reply.ended(stream.timeline())
        for event in reply.closing():
            await _send_part(send, event)
        last = reply.ending()
    except ClientGone:
        raise
    except PagewireError as error:
        last = reply.failure(as_http_error(error))
    except Exception as error:  # the status is out: all that is left is to say so and to close in good form
        log.exception("a stream failed")
        last = reply.failure(as_http_error(error))
    finally:
        ticker.stop()
    await send({"type": "http.response.body", "body": last, "more_body": False})


async def _send_part(send: Send, event: bytes) -> None:
    await send({"type": "http.response.body", "body": event, "more_body": True})


class _Ticker:
    """Wakes a stream's reader when a whole interval has passed without news; one timer a stream, none a token."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._loop = asyncio.get_running_loop()
        self.is_fresh = True
        self._timer = self._loop.call_later(KEEP_ALIVE_S, self._tick)

    def stop(self) -> None:
        self._timer.cancel()

    def _tick(self) -> None:
        if not self.is_fresh:
            self._stream.wake()
        self.is_fresh = False
        self._timer = self._loop.call_later(KEEP_ALIVE_S, self._tick)
