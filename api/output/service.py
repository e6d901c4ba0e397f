"""What the endpoints share: hand a request to the gateway, watch its client, send the `Reply`."""

import asyncio
from collections.abc import Callable, Sequence

from starlette.types import Receive, Scope, Send

from ...config.config import EngineConfig, HttpConfig
from ...config.latency_classes import with_default
from ...errors import RequestError
from ...ipc.messages import Chunk, Submit
from ..gateway.gateway import Gateway
from ..gateway.request_end import Observer, request_end
from ..gateway.residence import Residence
from ..gateway.stream import Stream
from ..http.direct import DIRECT
from ..http.entitlement import Entitlement
from ..http.exchange import ClientGone, client_gone, send_body
from ..http.http_error import HttpError
from ..http.rate_limit import Account
from ..state.database import Database
from ..state.jobs import Jobs
from .reply import Reply
from .sse import send_stream


class Service:
    """What the endpoints of one api process share."""

    def __init__(
        self,
        gateway: Gateway,
        config: EngineConfig,
        http: HttpConfig,
        *,
        healthy: Callable[[], str | None],
        version: str,
        observers: Sequence[Observer] = (),
        residence: Residence | None = None,
        state: Database | None = None,
        jobs: Jobs | None = None,
    ) -> None:
        """`healthy` returns None, or one sentence that says what is wrong with the engine. `observers` get each
        request that has ended. `residence`: of one of several models. `state` and `jobs`: what their services share
        (default: of its own)."""
        self.gateway = gateway
        self.config = config
        self.http = http
        self.healthy = healthy
        self.version = version
        self.residence = residence
        self.state = Database(http.reports.state) if state is None else state  # of what is kept for later requests
        self.jobs = Jobs(self.state) if jobs is None else jobs
        self._observers = observers

    def change(self, config: EngineConfig, http: HttpConfig, observers: Sequence[Observer]) -> None:
        """These hold for requests from now on."""
        self.config, self.http, self._observers = config, http, observers

    async def answer(
        self, submits: Sequence[Submit], reply: Reply, streamed: bool, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Sends nothing before the engine has admitted the request, so that a refusal has its own status. The account
        in the scope's state pays for the tokens."""
        self.check_health()
        submits = self.classify(submits, scope)
        account: Account = scope["state"]["account"]
        with account.hold(submits) as hold:
            stream = self.gateway.submit(submits)
            request = stream.request
            try:
                await self._answer(stream, reply, streamed, scope, receive, send)
            finally:
                hold.num_tokens = request.num_tokens
                if self._observers:
                    end = request_end(scope, request)
                    for observe in self._observers:
                        observe(end)

    async def _answer(
        self, stream: Stream, reply: Reply, streamed: bool, scope: Scope, receive: Receive, send: Send
    ) -> None:
        watcher = asyncio.create_task(_cancel_when_gone(receive, stream))
        limit_s = self.http.clients.request_timeout_s
        deadline = (
            None if limit_s is None else asyncio.get_running_loop().call_later(limit_s, stream.end, too_slow(limit_s))
        )
        try:
            await stream.admitted()
            reply.admitted(stream.request.nums_prompt)
            if streamed:
                await send_stream(send, stream, reply, scope.get("extensions", {}).get(DIRECT))
            else:
                stream.consumer = _Collector(reply)
                async for chunks in stream:
                    for index, chunk in chunks:
                        reply.take(index, chunk)
                reply.ended(stream.request.timeline())
                await reply.settle()
                body = reply.body()
                await send_body(send, 200, body, content_type=reply.body_type, headers=reply.headers())
        except ClientGone:
            stream.cancel()
            raise
        finally:
            if deadline is not None:
                deadline.cancel()
            watcher.cancel()
            stream.end(RequestError("internal", "The answer could not be made."))

    def classify(self, submits: Sequence[Submit], scope: Scope) -> list[Submit]:
        """The request with the latency class that it may have; the same again if it has it already. Raises
        HttpError."""
        entitlement: Entitlement = scope["state"]["entitlement"]
        return entitlement.apply(submits, dict(scope["headers"]), with_default(self.config.latency_classes))

    def check_health(self) -> None:
        """Raises RequestError if the engine is unhealthy. Requests may wait while a part of it is being replaced."""
        if self.gateway.outage is None and (trouble := self.healthy()) is not None:
            raise RequestError("unavailable", trouble)

    @property
    def is_loaded(self) -> bool:
        """Whether the model takes memory now, or is the only one."""
        return self.residence is None or self.residence.state.state in ("loaded", "leaving")

    def model_name(self, asked: str | None) -> str:
        """The served name for the request's `model`; the first one if it is empty. Raises HttpError 404."""
        names = self.config.served_model_names
        if not asked:
            return names[0]
        if asked not in names:
            raise HttpError(404, f"The model {asked[:200]!r} does not exist.", code="model_not_found", param="model")
        return asked


class _Collector:
    """Gives a plain answer its chunks where they arrive. The last chunk of a choice wakes the reader."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply

    def take(self, index: int, chunk: Chunk) -> bool:
        if chunk.finish is not None:
            return False
        self._reply.take(index, chunk)
        return True

    def flush(self) -> None:
        pass


def too_slow(limit_s: float) -> HttpError:
    """The error of a request that has reached --request-timeout-s."""
    return HttpError(504, f"The request has taken longer than {limit_s:g} s.", code="request_timeout")


async def _cancel_when_gone(receive: Receive, stream: Stream) -> None:
    await client_gone(receive)
    stream.cancel()
