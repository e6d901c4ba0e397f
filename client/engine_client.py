"""`EngineClient`: token ids in, token ids out, over IPC to the core of an engine. No HTTP and no tokenizer.

Connects to a running engine (`--client-address`) or starts one for itself. Everything happens on the event loop of the
caller. What travels is described in docs/ipc-protocol.md.

A connection that breaks is made again, and what was open goes on after the last token that arrived: a token depends on
its prompt, its seed and its position only, so the caller sees no seam.
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

WINDOW = 64  # `News` on the way
MAX_LOSSES = 2  # more of the engine, until a request that got nothing meanwhile is taken for the reason
SILENCE_LIMIT_S = 3.0  # the core is heard twice a second
_DOUBT_S = 1.0  # of silence, after which we ask: a core that took the place of ours says that it does not know us
_STOP_LIMIT_S = 30.0  # for an engine of one's own to end
_TICK_S = 0.25
_HELLO_AGAIN_S = 1.0
_MAX_UNSENT = 10_000  # messages that the engine has not taken yet

log = logging.getLogger("pagewire.client")
_generate: Decoder[Generate] = Decoder(Generate)


class Generation:
    """The sequences of one prompt. Iterate over it for their news, as (choice, `Tokens`); one reader.

    What is not read is put together, so a slow reader gets more at once. Leaving an `async with` block cancels what is
    open."""

    def __init__(self, client: "EngineClient", request: Generate) -> None:
        self._client = client
        self._request = request
        self._ids = [array("i") for _ in range(request.n)]  # that arrived
        self._open = set(range(request.n))
        self._cancelled: set[int] = set()  # choices
        self._num_losses = 0  # engines lost since its last news
        self._scored = False  # prompt log-probabilities have arrived
        self._news: dict[int, Tokens] = {}  # by choice; not read yet
        self._error: RequestError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, Tokens]:
        """The next news. Raises RequestError if the engine refuses the request or fails, once all news is read."""
        while not self._news:
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
        choice = next(iter(self._news))
        return choice, self._news.pop(choice)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    async def ids(self) -> list[list[int]]:
        """Waits for the end; the output of each choice. Raises RequestError."""
        async for _ in self:
            pass
        return [ids.tolist() for ids in self._ids]

    def cancel(self, choice: int | None = None) -> None:
        """Ends what is open, or one choice: its last news has the finish reason "abort". Harmless when nothing is."""
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
        before = self._news.get(choice)
        self._news[choice] = tokens if before is None else join_tokens(before, tokens)
        self._wake()

    def _fail(self, error: RequestError) -> None:
        """The first error stands."""
        self._error = self._error or error
        self._open.clear()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _again(self) -> list[Generate]:
        """What is to be asked of an engine that does not know of it."""
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
    """One connection to an engine core, made again when it breaks. Made by `connect` or `start`."""

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
        """For `connect` and `start`, which also wait until the engine answers."""
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
        self._heard_at = self._said_at = time.monotonic()  # the engine's last word; our last Hello
        self._lost_at: float | None = self._heard_at  # since when there is no session
        self._generations: dict[int, Generation] = {}  # by rid, of every sequence that is open
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
        """To an engine that was started with `--client-address`. `name`: for its log, and the tenant of requests that
        name none. `reconnect_s`: how long a lost engine is looked for before what is open fails.

        Raises StartError if nobody answers in time, ConfigError for an address that is none."""
        client = cls(address, key_file=None if key_file is None else Path(key_file), name=name, reconnect_s=reconnect_s)
        await client._wait_welcome(timeout_s)
        return client

    @classmethod
    async def start(cls, model: str = "", **options: object) -> Self:
        """Starts an engine of one's own that ends with this client or this process. `options`: settings by name.

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
            start_new_session=True,  # Ctrl-C is this process's own affair
        )
        assert process.stdin is not None and config.engine.client_address is not None
        process.stdin.write(msgspec.json.encode(config) + b"\n")
        client = cls(config.engine.client_address, process=process, folder=folder)
        await client._wait_welcome(config.service.start_timeout_s)
        return client

    @property
    def facts(self) -> Welcome:
        """What the engine is: its model, its longest context, its vocabulary."""
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
        """Asks for `n` sequences of one prompt. Without `sampling`, at temperature 1 with a seed of their own.

        Raises RequestError if a value is out of bounds, or the engine is gone or takes nothing."""
        if self._closed:
            raise RequestError("unavailable", "The client is closed.")
        if len(self._unsent) >= _MAX_UNSENT:
            raise RequestError("queue_full", "The engine does not take what is sent to it.")
        sampling = sampling or Sampling(seed=secrets.randbits(62))
        if (
            len(prompt_ids) > self.facts.max_model_len
        ):  # however long: what is too long to be sent breaks the connection
            num = len(prompt_ids)
            raise prompt_too_long(self.facts.max_model_len, f"the prompt has {num} tokens", num_tokens=num)
        try:
            data = ids_to_bytes(list(prompt_ids))
            request = Generate(
                self._next_rid, n, data, sampling, limits or Limits(), priority, salt, tenant, constraint=constraint
            )
            request = _generate.decode(encode(request))  # in bounds, as the engine will see it
        except (*DecodeError, OverflowError, TypeError) as error:
            raise RequestError("invalid_request", f"{error}.") from error
        self._next_rid += n
        generation = Generation(self, request)
        self._generations.update(dict.fromkeys(range(request.rid, request.rid + n), generation))
        if self._is_welcome:  # else the welcome brings it along
            self._send(request)
        return generation

    async def snapshot(self) -> Snapshot:
        """The engine's gauges and counters, within half a second. Raises RequestError if it is gone."""
        if self._closed:
            raise RequestError("unavailable", "The client is closed.")
        future: asyncio.Future[Snapshot] = asyncio.get_running_loop().create_future()
        self._snapshots.append(future)
        return await future

    async def close(self) -> None:
        """Cancels what is open, leaves, and ends the engine if it was started for this client."""
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
        """A new connection: what the old one still brings is of no use."""
        if self._socket is not None:
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
        """Looks for what does not come as a message."""
        while True:
            await asyncio.sleep(_TICK_S)
            now = time.monotonic()
            if self._process is not None and self._process.returncode is not None:
                reason = f"The engine has ended with exit code {self._process.returncode}."
                if not self._first.done():
                    self._first.set_exception(StartError(reason))
                self._fail_all(RequestError("unavailable", reason))
            if self._is_welcome and now - self._heard_at > SILENCE_LIMIT_S:
                self._lose("It is silent.")
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
        asyncio.get_running_loop().call_soon(self._receive)  # sending may have swallowed the word of an arrival

    def _receive(self) -> None:
        while not self._closed and self._socket is not None and (data := self._socket.receive()) is not None:
            try:
                message = self._decoder.decode(data)
            except DecodeError as error:
                return self._lose(f"It sent bytes that are no message ({error}).")
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
                        return self._lose(f"News {self._seq + 1} was lost.")
                    self._hear(message)
                case _:
                    assert_never(message)

    def _enter(self, welcome: Welcome) -> None:
        """A session is open: what is under way goes on in it."""
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
                self._end(generation, RequestError("unavailable", "The engine was lost while a prompt was scored."))
            elif generation._num_losses >= MAX_LOSSES:
                self._end(generation, RequestError("unavailable", "The engine was lost over it again and again."))
            else:
                generation._num_losses += 1
                for request in generation._again():
                    self._send(request)

    def _part(self, reason: str) -> None:
        """The engine has ended the session, or refuses one."""
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
        """One of its sequences has failed: the others have no reader any more."""
        generation = self._generations.get(failed.rid)
        if generation is not None:
            generation._open.discard(failed.rid - generation._request.rid)
            self._end(generation, RequestError(failed.kind, failed.detail, num_tokens=failed.num_tokens))

    def _end(self, generation: Generation, error: RequestError) -> None:
        generation.cancel()
        for rid in range(generation._request.rid, generation._request.rid + generation._request.n):
            self._generations.pop(rid, None)
        generation._fail(error)
