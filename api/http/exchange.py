"""One HTTP exchange over raw ASGI: reads the body, sends the response, and notices when the client disconnects."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import msgspec
from starlette.types import Message, Receive, Scope, Send

from .http_error import HttpError

Headers = Sequence[tuple[bytes, bytes]]
T = TypeVar("T")


class ClientGone(Exception):
    """The client has disconnected; no response can be sent."""


class Endpoint:
    """A coroutine function as an ASGI application: the router would call a plain function with a Request."""

    def __init__(self, call: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._call = call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._call(scope, receive, send)


async def read_json(scope: Scope, receive: Receive, *, any_type: bool = False) -> bytes:
    """The body, whose size and time `app` bounds. Raises HttpError if the content type is not JSON, unless `any_type`,
    and ClientGone."""
    content_type = next((value for name, value in scope["headers"] if name == b"content-type"), b"")
    if not any_type and content_type.partition(b";")[0].strip().lower() != b"application/json":
        raise HttpError(400, "The content type must be application/json.", code="invalid_json")
    return await read_body(receive)


async def read_body(receive: Receive) -> bytes:
    """The whole body, whose size and time `app` bounds. Raises ClientGone."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body += message.get("body", b"")
        if not message.get("more_body", False):
            return bytes(body)


def replayed(body: bytes, receive: Receive) -> Receive:
    """`receive` for whoever reads the body that was read already."""
    is_read = False

    async def receive_again() -> Message:
        nonlocal is_read
        if is_read:
            return await receive()
        is_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_again


async def send_body(
    send: Send, status: int, body: bytes, *, content_type: bytes = b"application/json", headers: Headers = ()
) -> None:
    """Sends a whole response."""
    all_headers = [(b"content-type", content_type), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": all_headers})
    await send({"type": "http.response.body", "body": body})


async def send_json(send: Send, value: object) -> None:
    await send_body(send, 200, msgspec.json.encode(value))


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. If the client disconnects, `work` is cancelled and ClientGone is raised."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.create_task(client_gone(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        watcher.cancel()
        task.cancel()
        await asyncio.wait((task,))


async def client_gone(receive: Receive) -> None:
    """Returns when the client disconnects. Nothing else may call `receive` meanwhile."""
    while (await receive())["type"] != "http.disconnect":
        pass


def too_large(max_bytes: int) -> HttpError:
    """The error for a body over the limit."""
    return HttpError(413, f"The body is larger than {max_bytes} bytes.", headers=((b"connection", b"close"),))
