"""A peer with an OpenAI-compatible server, and the client that reads streams from it.

The client stores data with the times of arrival and parses it after everything has arrived, so that it uses little of
the machine that it measures.
"""

import asyncio
import json
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import cast

import psutil
import uvloop

from ...tools.servers import HOST, Server, ServerError, end, log_tail
from .base import RUN_TIMEOUT_S, START_TIMEOUT_S, PeerError, Request, Stream
from .process_tree import ProcessTree

MODEL = "bench"  # the served model name
_DONE = b"data: [DONE]"


class OpenAiServer:
    """`command` gets a `--port`; `/health` answers 200 once it is ready."""

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
        self._server = Server(log.with_suffix(""), command=command, environment=environment, cwd=Path())
        self.meter = ProcessTree(self._server.process)

    def wait_ready(self) -> None:
        try:
            self._server.wait_ready("/health", START_TIMEOUT_S)
        except ServerError as error:
            raise PeerError(str(error)) from None

    def run(self, requests: Sequence[Request]) -> list[Stream]:
        try:
            return uvloop.run(self._all(requests))
        except TimeoutError:
            raise PeerError(
                f"{len(requests)} requests took more than {RUN_TIMEOUT_S:g} s; {log_tail(self._server.log)}"
            ) from None
        except OSError as error:
            raise PeerError(f"it could not be reached: {error}; {log_tail(self._server.log)}") from error

    def of_kind(self, kind: str) -> list[psutil.Process]:
        """Its processes of this kind, if it is pagewire."""
        return self._server.of_kind(kind)

    def stop(self) -> None:
        self.meter.close()
        end(self._server.process, self.meter.seen)
        self._server.close()

    async def _all(self, requests: Sequence[Request]) -> list[Stream]:
        loop = asyncio.get_running_loop()
        clients = [_Client(_request_bytes(request), loop.create_future()) for request in requests]
        try:
            async with asyncio.timeout(RUN_TIMEOUT_S):
                await asyncio.gather(
                    *(loop.create_connection(partial(_same, c), HOST, self._server.port) for c in clients)
                )
                await asyncio.gather(*(client.ended for client in clients))
        finally:
            for client in clients:
                client.close()
        return [read_stream(c.sent, c.parts, request) for c, request in zip(clients, requests, strict=True)]


def _same(client: "_Client") -> "_Client":
    return client


class _Client(asyncio.Protocol):
    """One request on its own connection."""

    def __init__(self, request: bytes, ended: asyncio.Future[None]) -> None:
        self._request = request
        self._transport: asyncio.Transport | None = None
        self._last = b""
        self.ended = ended
        self.sent = 0.0
        self.parts: list[tuple[float, bytes]] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.sent = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.parts.append((time.perf_counter(), data))
        if _DONE in self._last + data:
            self.close()
        self._last = data[-len(_DONE) :]

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


def _request_bytes(request: Request) -> bytes:
    body = json.dumps(
        {
            "model": MODEL,
            "prompt": request.prompt,
            "max_tokens": request.num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


def read_stream(sent: float, parts: Sequence[tuple[float, bytes]], request: Request) -> Stream:
    """Parses a whole response from its parts with their times. Raises PeerError unless it has all requested tokens.

    Every event counts except one that has only the finish reason, because some tokens have no text.
    """
    ends = list(accumulate(len(data) for _, data in parts))
    head, _, body = b"".join(data for _, data in parts).partition(b"\r\n\r\n")
    status = head.partition(b"\r\n")[0].decode(errors="replace")
    if status.split(" ")[1:2] != ["200"]:
        raise PeerError(f"it answered {status!r}: {body[:300].decode(errors='replace')!r}")
    start = len(head) + 4
    chunked = b"transfer-encoding: chunked" in head.lower()
    pieces = _dechunk(body, start) if chunked else [(start, body)]
    text = b"".join(piece for _, piece in pieces)
    piece_ends = list(accumulate(len(piece) for _, piece in pieces))

    def time_of(end: int) -> float:
        """When the text up to `end` had arrived."""
        i = bisect_left(piece_ends, end)
        place, piece = pieces[i]
        return parts[bisect_left(ends, place + end - (piece_ends[i] - len(piece)))][0]

    times, usage, position = [], None, 0
    for line in text.splitlines(keepends=True):
        position += len(line)
        if not line.startswith(b"data: ") or line.startswith(_DONE):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            raise PeerError(f"a stream ended with {event['error']!r}")
        usage = event.get("usage") or usage
        if any(choice.get("text") or not choice.get("finish_reason") for choice in event.get("choices", ())):
            times.append(time_of(position))
    if _DONE not in text:
        raise PeerError("a stream ended early")
    num_tokens = usage["completion_tokens"] if usage else len(times)
    if num_tokens != request.num_tokens or not times:
        raise PeerError(
            f"a stream had {num_tokens} tokens in {len(times)} events instead of {request.num_tokens} tokens"
        )
    return Stream(sent, times, num_tokens)


def _dechunk(body: bytes, start: int) -> list[tuple[int, bytes]]:
    """The (position, data) of the chunks of a chunked body that begins at `start`. The last may be incomplete."""
    found, position = [], 0
    while (end := body.find(b"\r\n", position)) >= 0:
        size = int(body[position:end].partition(b";")[0], 16)
        if size == 0:
            break
        found.append((start + end + 2, body[end + 2 : end + 2 + size]))
        position = end + 2 + size + 2
    return found
