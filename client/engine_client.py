"""`EngineClient`: token ids in, token ids out, over IPC to the core of an engine. No HTTP and no tokenizer.

It connects to a running engine (`--client-address`) or starts one of its own, and runs on the caller's event loop.
docs/ipc-protocol.md describes the protocol.

If the connection breaks, the client reconnects and open requests continue after the last token that arrived. The
caller sees no difference, because a token depends only on its prompt, seed and position.
"""

import asyncio
import contextlib
import logging
import secrets
import shutil
import tempfile
import time
from array import array
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, assert_never

import msgspec

from ..config.flags import from_options
from ..errors import ConfigError, RequestError, StartError, prompt_too_long
from ..ipc.channel import ChannelFull
from ..ipc.client_messages import (
    PROTOCOL,
    Ack,
    Bye,
    Generate,
    Goodbye,
    Hello,
    News,
    ToClient,
    ToPort,
    Welcome,
    join_tokens,
)
from ..ipc.codec import DecodeError, Decoder, encode
from ..ipc.messages import Cancel, Constraint, Failed, Limits, Sampling, Snapshot, Tokens, bytes_to_ids, ids_to_bytes
from ..ipc.zmq_channel import ZmqContext, ZmqDealer, read_keys
from ..procs import interpreter

WINDOW = 64  # `News` messages that the engine may send before one of them is acknowledged
MAX_LOSSES = 2  # times a request is resumed without a new token before it is blamed for the loss of the engine
SILENCE_LIMIT_S = 3.0  # the core sends a message twice a second
_DOUBT_S = 1.0  # silence after which we send an `Ack`: a core that replaced ours answers that it has no such session
_STOP_LIMIT_S = 30.0  # for our own engine to exit
_TICK_S = 0.25
_HELLO_AGAIN_S = 1.0
_MAX_UNSENT = 10_000  # queued messages that the socket has not accepted yet

log = logging.getLogger("pagewire.client")
_generate: Decoder[Generate] = Decoder(Generate)


class Generation:
    """The sequences of one prompt. Iterating yields their output as (choice, `Tokens`); only one task may read it.

    Output that has not been read is merged, so a slow reader gets larger pieces. Leaving an `async with` block cancels
    the open sequences."""

    def __init__(self, client: "EngineClient", request: Generate) -> None:
        self._client = client
        self._request = request
        self._ids = [array("i") for _ in range(request.n)]  # all that have arrived, by choice
        self._open = set(range(request.n))
        self._cancelled: set[int] = set()  # choices
        self._num_losses = 0  # engines lost since its last token
        self._scored = False  # prompt log-probabilities have arrived
        self._unread: dict[int, Tokens] = {}  # by choice
        self._error: RequestError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, Tokens]:
        """Raises RequestError if the engine refuses the request or fails, after all output has been read."""
        while not self._unread:
            if self._error is not None:
                raise self._error
            if not self._open:
                raise StopAsyncIteration
            assert self._waiter is None, "a generation has one reader"
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        choice = next(iter(self._unread))
        return choice, self._unread.pop(choice)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    async def ids(self) -> list[list[int]]:
        """Waits for the end and returns the output ids of each choice. Raises RequestError."""
        async for _ in self:
            pass
        return [ids.tolist() for ids in self._ids]

    def cancel(self, choice: int | None = None) -> None:
        """Cancels all open choices, or one; the last `Tokens` of each has the finish reason "abort"."""
        choices = (self._open if choice is None else self._open & {choice}) - self._cancelled
        if choices:
            self._cancelled |= choices
            self._client._send(Cancel(tuple(self._request.rid + choice for choice in sorted(choices))))

    def _take(self, choice: int, tokens: Tokens) -> None:
        self._num_losses = 0
        self._ids[choice].frombytes(tokens.ids)
        self._scored |= tokens.prompt_logprobs is not None
        if tokens.finish is not None:
            self._open.discard(choice)
        before = self._unread.get(choice)
        self._unread[choice] = tokens if before is None else join_tokens(before, tokens)
        self._wake()

    def _fail(self, error: RequestError) -> None:
        self._error = self._error or error  # the first one is reported
        self._open.clear()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _resumption(self) -> list[Generate]:
        """The requests with which another engine continues the open choices."""
        request, sampling = self._request, self._request.sampling
        if not any(self._ids) and len(self._open) == request.n:
            return [request]
        return [
            msgspec.structs.replace(
                request,
                rid=request.rid + choice,
                n=1,
                sampling=msgspec.structs.replace(sampling, seed=(sampling.seed + choice) % 2**63),
                resume_ids=self._ids[choice].tobytes(),
            )
            for choice in sorted(self._open)
        ]


class EngineClient:
    """One connection to an engine core, which is renewed when it breaks. Create it with `connect` or `start`."""

    def __init__(
        self,
        address: str,
        *,
        key_file: Path | None = None,
        name: str = "",
        reconnect_s: float = 30.0,
        process: asyncio.subprocess.Process | None = None,
        folder: Path | None = None,
    ) -> None:
        """Called by `connect` and `start`, which also wait until the engine answers."""
        self._address = address
        self._name = name
        self._reconnect_s = reconnect_s
        self._process = process
        self._folder = folder
        self._context = ZmqContext(read_keys(key_file) if key_file is not None else None)
        self._decoder: Decoder[ToClient] = Decoder(ToClient)
        self._socket: ZmqDealer | None = None
        self._unsent: deque[ToPort] = deque()
        self._is_welcome = False
        self._facts: Welcome | None = None
        self._seq = 0  # of the last News
        self._acked = 0
        self._heard_at = self._said_at = time.monotonic()  # the engine's last message; our last Hello
        self._lost_at: float | None = self._heard_at  # when the session ended; None while there is one
        self._generations: dict[int, Generation] = {}  # by rid, for every open sequence
        self._next_rid = 1
        self._snapshots: list[asyncio.Future[Snapshot]] = []
        self._first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._goodbye = ""
        self._closed = False
        self._connect()
        self._ticking = asyncio.ensure_future(self._tick())

    @classmethod
    async def connect(
        cls,
        address: str,
        *,
        key_file: str | Path | None = None,
        name: str = "",
        timeout_s: float = 10.0,
        reconnect_s: float = 30.0,
    ) -> Self:
        """Connects to an engine that was started with `--client-address`. `name`: shown in the engine's log, and the
        default tenant of requests. `reconnect_s`: how long to retry a lost engine before open requests fail.

        Raises StartError if no engine answers within `timeout_s`, ConfigError if the address is invalid."""
        client = cls(address, key_file=None if key_file is None else Path(key_file), name=name, reconnect_s=reconnect_s)
        await client._wait_welcome(timeout_s)
        return client

    @classmethod
    async def start(cls, model: str = "", **options: object) -> Self:
        """Starts an engine that ends with this client or this process. `options`: settings by name.

        Raises ConfigError, StartError."""
        folder = Path(tempfile.mkdtemp(prefix="pagewire-client-"))
        address = f"ipc://{folder}/engine"
        try:
            config = from_options("EngineClient", {"client_address": address, **options, "model": model})
        except ConfigError:
            shutil.rmtree(folder)
            raise
        process = await asyncio.create_subprocess_exec(
            *interpreter.COMMAND,
            "pagewire.procs.embedded",
            env=interpreter.environment(interpreter.HUB_TOKENS),
            stdin=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches only this process, which then ends the engine
        )
        assert process.stdin is not None and config.engine.client_address is not None
        process.stdin.write(msgspec.json.encode(config) + b"\n")
        client = cls(config.engine.client_address, process=process, folder=folder)
        await client._wait_welcome(config.service.start_timeout_s)
        return client

    @property
    def facts(self) -> Welcome:
        """The engine's model, longest context, vocabulary size and eos ids."""
        assert self._facts is not None
        return self._facts

    def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling | None = None,
        limits: Limits | None = None,
        *,
        n: int = 1,
        priority: int = 0,
        salt: bytes = b"",
        tenant: str = "",
        constraint: Constraint | None = None,
    ) -> Generation:
        """Requests `n` sequences of one prompt. Default `sampling`: temperature 1 and a random seed.

        Raises RequestError if a value is out of bounds, the client is closed, or the queue to the engine is full."""
        if self._closed:
            raise RequestError("unavailable", "The client is closed.")
        if len(self._unsent) >= _MAX_UNSENT:
            raise RequestError("queue_full", f"{len(self._unsent)} messages wait for the engine; send fewer at once.")
        sampling = sampling or Sampling(seed=secrets.randbits(62))
        # Checked here because a message beyond the size limit would break the connection.
        if (num := len(prompt_ids)) > self.facts.max_model_len:
            raise prompt_too_long(self.facts.max_model_len, f"the prompt has {num} tokens", num_tokens=num)
        try:
            data = ids_to_bytes(list(prompt_ids))
            request = Generate(
                self._next_rid, n, data, sampling, limits or Limits(), priority, salt, tenant, constraint=constraint
            )
            request = _generate.decode(encode(request))  # checks the bounds of all fields
        except (*DecodeError, OverflowError, TypeError) as error:
            raise RequestError("invalid_request", f"{error}.") from error
        self._next_rid += n
        generation = Generation(self, request)
        self._generations.update(dict.fromkeys(range(request.rid, request.rid + n), generation))
        if self._is_welcome:  # otherwise it is sent when the session begins
            self._send(request)
        return generation

    async def snapshot(self) -> Snapshot:
        """The engine's next gauges and counters, which it sends twice a second. Raises RequestError if it is lost."""
        if self._closed:
            raise RequestError("unavailable", "The client is closed.")
        future: asyncio.Future[Snapshot] = asyncio.get_running_loop().create_future()
        self._snapshots.append(future)
        return await future

    async def close(self) -> None:
        """Cancels open requests, disconnects, and ends the engine if it was started by this client."""
        if self._closed:
            return
        if self._is_welcome:
            self._send(Bye())
        self._fail_all(RequestError("unavailable", "The client was closed."))
        self._closed = True
        self._ticking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._ticking
        if self._socket is not None:
            self._socket.close()
        await asyncio.get_running_loop().run_in_executor(None, self._context.close)  # may take a moment
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                await asyncio.wait_for(self._process.wait(), _STOP_LIMIT_S)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # ── the connection ───────────────────────────────────────────────────────────────────────────────────────────────

    async def _wait_welcome(self, timeout_s: float) -> None:
        try:
            await asyncio.wait_for(asyncio.shield(self._first), timeout_s)
        except TimeoutError:
            await self.close()
            why = f": {self._goodbye}" if self._goodbye else "."
            raise StartError(f"No engine answers at {self._address} within {timeout_s:g} s{why}") from None
        except BaseException:
            await self.close()
            raise

    def _connect(self) -> None:
        if self._socket is not None:  # a new socket, so that no message of the old session arrives in the new one
            self._socket.close()
        self._is_welcome = False
        self._unsent.clear()
        self._seq = self._acked = 0
        self._heard_at = self._said_at = time.monotonic()
        self._socket = self._context.dealer(self._address)
        self._socket.subscribe(asyncio.get_running_loop(), self._receive)
        self._send(Hello(PROTOCOL, self._name, WINDOW))

    def _lose(self, why: str) -> None:
        if self._lost_at is None:
            log.warning("lost the engine at %s: %s", self._address, why)
            self._lost_at = time.monotonic()
        self._goodbye = why
        self._connect()

    async def _tick(self) -> None:
        """Detects what no message reports: exit of the engine's process, silence, timeouts."""
        while True:
            await asyncio.sleep(_TICK_S)
            now = time.monotonic()
            if self._process is not None and self._process.returncode is not None:
                reason = f"The engine's process ended with exit code {self._process.returncode}."
                if not self._first.done():
                    self._first.set_exception(StartError(reason))
                self._fail_all(RequestError("unavailable", reason))
            if self._is_welcome and now - self._heard_at > SILENCE_LIMIT_S:
                self._lose(f"It has not sent anything for {SILENCE_LIMIT_S:g} s.")
            elif self._is_welcome and now - self._heard_at > _DOUBT_S:
                self._send(Ack(self._seq))
            elif not self._is_welcome and now - self._said_at > _HELLO_AGAIN_S and self._goodbye:
                self._connect()
            if self._lost_at is not None and self._first.done() and now - self._lost_at > self._reconnect_s:
                self._fail_all(RequestError("unavailable", f"The engine is gone: {self._goodbye}"))
            self._flush()

    def _fail_all(self, error: RequestError) -> None:
        for generation in dict.fromkeys(self._generations.values()):
            generation._fail(error)
        self._generations.clear()
        for future in self._snapshots:
            if not future.done():
                future.set_exception(error)
        self._snapshots.clear()

    def _send(self, message: ToPort) -> None:
        if not self._closed:
            self._unsent.append(message)
            self._flush()

    def _flush(self) -> None:
        if self._socket is None or not self._unsent:
            return
        with contextlib.suppress(ChannelFull):
            while self._unsent:
                self._socket.send(self._unsent[0])
                self._unsent.popleft()
        # Sending may consume ZeroMQ's edge-triggered event for a message that has arrived.
        asyncio.get_running_loop().call_soon(self._receive)

    def _receive(self) -> None:
        while not self._closed and self._socket is not None and (data := self._socket.receive()) is not None:
            try:
                message = self._decoder.decode(data)
            except DecodeError as error:
                return self._lose(f"It sent an invalid message ({error}).")
            self._heard_at = time.monotonic()
            match message:
                case Welcome():
                    self._enter(message)
                case Goodbye():
                    return self._part(message.reason)
                case Snapshot():
                    for future in self._snapshots:
                        if not future.done():
                            future.set_result(message)
                    self._snapshots.clear()
                case News():
                    if message.seq != self._seq + 1:
                        return self._lose(f"News {self._seq + 1} is missing: {message.seq} arrived.")
                    self._hear(message)
                case _:
                    assert_never(message)

    def _enter(self, welcome: Welcome) -> None:
        """A session begins: resumes the open requests in it."""
        known, self._facts = self._facts, welcome
        self._is_welcome, self._lost_at, self._goodbye = True, None, ""
        if not self._first.done():
            self._first.set_result(None)
        if known is not None and known.model_key != welcome.model_key:
            self._fail_all(RequestError("unavailable", f"The engine serves another model now, {welcome.model}."))
        for generation in dict.fromkeys(self._generations.values()):
            for choice in generation._open & generation._cancelled:
                self._give(Tokens(generation._request.rid + choice, b"", finish="abort"))
            if not generation._open:
                pass
            elif generation._scored:
                reason = "The engine was lost, and a request with prompt log-probabilities cannot be resumed."
                self._end(generation, RequestError("unavailable", reason))
            elif generation._num_losses >= MAX_LOSSES:
                reason = f"The engine was lost {MAX_LOSSES + 1} times in a row during this request."
                self._end(generation, RequestError("unavailable", reason))
            else:
                generation._num_losses += 1
                for request in generation._resumption():
                    self._send(request)

    def _part(self, reason: str) -> None:
        """The engine ended the session, or refused to begin one."""
        if not self._is_welcome and not self._first.done():
            self._goodbye = reason
            self._said_at = time.monotonic()
        else:
            self._lose(reason)

    def _hear(self, news: News) -> None:
        self._seq = news.seq
        start, ids = 0, news.ids
        for rid, count in zip(memoryview(news.rids).cast("q"), bytes_to_ids(news.counts), strict=True):
            end = start + 4 * count
            self._give(Tokens(rid, ids[start:end]))
            start = end
        for tokens in news.tokens:
            self._give(tokens)
        for failed in news.failed:
            self._on_failed(failed)
        if self._seq - self._acked >= WINDOW // 4:
            self._acked = self._seq
            self._send(Ack(self._seq))

    def _give(self, tokens: Tokens) -> None:
        generation = self._generations.get(tokens.rid)
        if generation is None:
            return
        if tokens.finish is not None:
            del self._generations[tokens.rid]
        generation._take(tokens.rid - generation._request.rid, tokens)

    def _on_failed(self, failed: Failed) -> None:
        """One sequence failed: ends its whole generation, whose reader gets the error."""
        generation = self._generations.get(failed.rid)
        if generation is not None:
            generation._open.discard(failed.rid - generation._request.rid)
            self._end(generation, RequestError(failed.kind, failed.detail, num_tokens=failed.num_tokens))

    def _end(self, generation: Generation, error: RequestError) -> None:
        generation.cancel()
        for rid in range(generation._request.rid, generation._request.rid + generation._request.n):
            self._generations.pop(rid, None)
        generation._fail(error)
