"""What every endpoint needs: read a request, hand it to the gateway, watch its client, answer.

Owns the way from an ASGI call to a `Reply` and back. The endpoints stand beside the shapes that they speak; what is
around all of them is `app`'s.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from ..config.config import EngineConfig
from ..errors import RequestError
from ..ipc.messages import Submit
from .gateway import Gateway
from .http_error import HttpError
from .openai.translate import output_grammar
from .openai.types import ChatRequest
from .rate_limit import Account
from .reply import Reply
from .request_end import Observer, request_end
from .sse import DIRECT, send_stream
from .stream import ClientGone, Stream
from .turn import Turn

Headers = Sequence[tuple[bytes, bytes]]
T = TypeVar("T")


class Endpoint:
    """A coroutine function as an ASGI application: the router would give a bare one a Request."""

    def __init__(self, call: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._call = call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._call(scope, receive, send)


class Service:
    """What the endpoints of one api process share."""

    def __init__(
        self,
        gateway: Gateway,
        config: EngineConfig,
        *,
        healthy: Callable[[], str | None],
        version: str,
        observers: Sequence[Observer] = (),
    ) -> None:
        """`healthy` returns None, or one sentence that says what is wrong with the engine. `observers` are told of
        every request that has ended."""
        self.gateway = gateway
        self.config = config
        self.healthy = healthy
        self.version = version
        self._observers = observers

    async def answer(
        self, orders: Sequence[Submit], reply: Reply, streamed: bool, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """The first byte waits for the engine to take the request, so that a refusal still has its status. The account
        in the scope's state pays for the tokens."""
        self.check_health()
        account: Account = scope["state"]["account"]
        with account.hold(orders) as hold:
            stream = self.gateway.submit(orders)
            try:
                await self._answer(stream, reply, streamed, scope, receive, send)
            finally:
                hold.num_tokens = stream.num_tokens
                if self._observers:
                    end = request_end(scope, orders, stream)
                    for observe in self._observers:
                        observe(end)

    async def _answer(
        self, stream: Stream, reply: Reply, streamed: bool, scope: Scope, receive: Receive, send: Send
    ) -> None:
        watcher = asyncio.create_task(_cancel_when_gone(receive, stream))
        limit_s = self.config.request_timeout_s
        deadline = (
            None if limit_s is None else asyncio.get_running_loop().call_later(limit_s, stream.end, too_slow(limit_s))
        )
        try:
            await stream.admitted()
            reply.admitted(stream.nums_prompt)
            if streamed:
                await send_stream(send, stream, reply, scope.get("extensions", {}).get(DIRECT))
            else:
                while not stream.finished:
                    for index, chunk in await stream.news():
                        reply.add(index, chunk)
                reply.ended(stream.timeline())
                await send_body(send, 200, reply.body())
        except ClientGone:
            stream.cancel()
            raise
        finally:
            if deadline is not None:
                deadline.cancel()
            watcher.cancel()
            self.gateway.end(stream, RequestError("internal", "The answer could not be made."))

    def check_health(self) -> None:
        """Raises RequestError if something is wrong with the engine. One that is being mended is waited for."""
        if self.gateway.outage is None and (trouble := self.healthy()) is not None:
            raise RequestError("unavailable", trouble)

    def turn(self, request: ChatRequest) -> Turn:
        """Reads the one output of a chat request."""
        grammar = output_grammar(request, self.config)
        return Turn(grammar, parallel_tool_calls=request.parallel_tool_calls is not False)

    def model_name(self, asked: str | None) -> str:
        """The served name that was asked for. Raises HttpError 404."""
        names = self.config.served_model_names
        if not asked:
            return names[0]
        if asked not in names:
            raise HttpError(404, f"The model {asked[:200]!r} does not exist.", code="model_not_found", param="model")
        return asked


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
    """What `work` gives. It is cancelled when the client leaves, which raises ClientGone."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        watcher.cancel()
        task.cancel()
        await asyncio.wait((task,))


def too_slow(limit_s: float) -> HttpError:
    """What ends a request at --request-timeout-s."""
    return HttpError(504, f"The request has taken longer than {limit_s:g} s.", code="request_timeout")


async def _cancel_when_gone(receive: Receive, stream: Stream) -> None:
    await _gone(receive)
    stream.cancel()


async def _gone(receive: Receive) -> None:
    """The one reader of `receive` once the body is in."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def read_json(scope: Scope, receive: Receive) -> bytes:
    """The body, within the bounds that `app` keeps. Raises HttpError if it is not said to be JSON; ClientGone."""
    content_type = next((value for name, value in scope["headers"] if name == b"content-type"), b"")
    if content_type.partition(b";")[0].strip().lower() != b"application/json":
        raise HttpError(400, "The content type must be application/json.", code="invalid_json")
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body += message.get("body", b"")
        if not message.get("more_body", False):
            return bytes(body)


def too_large(max_bytes: int) -> HttpError:
    """What a body over the limit gets."""
    return HttpError(413, f"The body is larger than {max_bytes} bytes.", headers=((b"connection", b"close"),))
