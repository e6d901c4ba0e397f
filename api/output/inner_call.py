"""Calls of the server's own endpoints, as batches make them: no connection, no checks of keys and rates."""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterable, Callable, Coroutine
from typing import NamedTuple, TypeVar

from starlette.types import ASGIApp, Message

from ...config.latency_classes import BATCH_CLASS
from ..http.entitlement import Entitlement
from ..http.http_error import anthropic_error_body, as_http_error, error_body, speaks_anthropic
from ..http.rate_limit import Account

_PAUSE_S = 1.0  # before a request is sent again after 429 or 503

R = TypeVar("R")

log = logging.getLogger(__name__)

_BATCH = Entitlement((BATCH_CLASS,), 0)
"""Requests of batches wait behind those for which somebody waits."""


class InnerAnswer(NamedTuple):
    status: int
    request_id: str
    body: bytes  # also of an error


class InnerCalls:
    """Calls a few at a time, so that clients of connections find room beside them."""

    def __init__(self, app: ASGIApp, *, most: int) -> None:
        """`app`: the endpoints. `most`: calls at the same time."""
        self._app = app
        self._most = most
        self._slots = asyncio.Semaphore(most)

    async def for_each(self, requests: AsyncIterable[R], do: Callable[[R], Coroutine[None, None, None]]) -> None:
        """Runs `do` for each. A task is created when another ends, so that the requests are never all in memory. The
        first error ends all and is raised."""
        ahead = asyncio.Semaphore(self._most)
        try:
            async with asyncio.TaskGroup() as group:
                async for request in requests:
                    await ahead.acquire()
                    group.create_task(do(request)).add_done_callback(lambda _: ahead.release())
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def post(self, path: str, body: bytes, *, owner: bytes) -> InnerAnswer:
        """Posts JSON to an endpoint for the owner of a key, again while the engine has no room."""
        request_id = secrets.token_hex(12)
        async with self._slots:
            while True:
                status, answer = await _call(self._app, path, body, owner=owner, request_id=request_id)
                if status not in (429, 503):
                    return InnerAnswer(status, request_id, answer)
                await asyncio.sleep(_PAUSE_S)


async def _call(app: ASGIApp, path: str, body: bytes, *, owner: bytes, request_id: str) -> tuple[int, bytes]:
    """Returns status and body, also of errors."""
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "state": {"salt": owner, "request_id": request_id, "account": Account(), "entitlement": _BATCH},
        "app": app,  # makes the router raise errors
    }
    incoming = [body]
    status, parts = 0, [b""]

    async def receive() -> Message:
        if incoming:
            return {"type": "http.request", "body": incoming.pop(), "more_body": False}
        await asyncio.Event().wait()  # a batch never disconnects; its task is cancelled
        raise AssertionError

    async def send(message: Message) -> None:
        nonlocal status
        status = message.get("status", status)
        parts.append(message.get("body", b""))

    try:
        await app(scope, receive, send)
    except Exception as error:
        http_error = as_http_error(error)
        if http_error.status == 500:
            log.exception("a request of a batch failed")
        text = anthropic_error_body(http_error) if speaks_anthropic(path) else error_body(http_error)
        return http_error.status, text
    return status, b"".join(parts)
