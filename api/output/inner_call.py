"""Calls of the server's own endpoints, as batches make them: no connection, no checks of keys and rates."""

import asyncio
import logging

from starlette.types import ASGIApp, Message

from ...config.latency_classes import BATCH_CLASS
from ..http.entitlement import Entitlement
from ..http.http_error import anthropic_error_body, as_http_error, error_body, speaks_anthropic
from ..http.rate_limit import Account

log = logging.getLogger(__name__)

_BATCH = Entitlement((BATCH_CLASS,), 0)
"""Requests of batches wait behind those for which somebody waits."""


async def call_endpoint(app: ASGIApp, path: str, body: bytes, *, owner: bytes, request_id: str) -> tuple[int, bytes]:
    """Posts JSON to an endpoint for the owner of a key. Returns status and body, also of errors."""
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
