"""A peer with an OpenAI-compatible server: when it is up, and streams from it.

The client stores what arrives with its time and reads it when everything has arrived, so that it takes as little as it
can of the machine that it measures.
"""

import asyncio
import json
import socket
import time
import urllib.request
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import cast

import uvloop

from .base import RUN_TIMEOUT_S, START_TIMEOUT_S, PeerError, Request, Stream
from .process_tree import ProcessTree

MODEL = "bench"  # the name that servers are told to give the model
_DONE = b"data: [DONE]"
_HOST = "127.0.0.1"


def free_port() -> int:
    """A port on which nothing listens now."""
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])


class Server:
    """`command` makes the command line for a port; `/health` answers 200 once it is ready."""

    def __init__(
        self, command: Callable[[int], Sequence[str]], log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self._port = free_port()
        self._stopped = False
        self.meter = ProcessTree(command(self._port), log, environment=environment)

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._healthy():
            self.meter.check_alive()
            if time.monotonic() > deadline:
                raise PeerError(f"it was not ready within {START_TIMEOUT_S:g} s; {self.meter.log_tail()}")
            time.sleep(0.02)

    def run(self, requests: Sequence[Request]) -> list[Stream]:
        try:
            return uvloop.run(self._all(requests))
        except TimeoutError:
            raise PeerError(
                f"{len(requests)} requests took more than {RUN_TIMEOUT_S:g} s; {self.meter.log_tail()}"
            ) from None
        except OSError as error:
            raise PeerError(f"it could not be reached: {error}; {self.meter.log_tail()}") from error

    def stop(self) -> None:
        if not self._stopped:
            self._stopped = True
            self.meter.end()

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{_HOST}:{self._port}/health", timeout=2) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    async def _all(self, requests: Sequence[Request]) -> list[Stream]:
        loop = asyncio.get_running_loop()
        clients = [_Client(_request_bytes(request), loop.create_future()) for request in requests]
        try:
            async with asyncio.timeout(RUN_TIMEOUT_S):
                await asyncio.gather(*(loop.create_connection(partial(_same, c), _HOST, self._port) for c in clients))
                await asyncio.gather(*(client.ended for client in clients))
        finally:
            for client in clients:
                client.close()
        return [read_stream(c.sent, c.parts, request) for c, request in zip(clients, requests, strict=True)]


def _same(client: "_Client") -> "_Client":
    return client


class _Client(asyncio.Protocol):
    """One request on a connection of its own."""

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
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {_HOST}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


def read_stream(sent: float, parts: Sequence[tuple[float, bytes]], request: Request) -> Stream:
    """What a whole response, in the parts it arrived in, says. Raises PeerError unless it is all that was asked for.

    An event counts when it carries text or is not the one that only says why the stream ends: some tokens have no text.
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
    """The chunks of a chunked body that lies at `start`, and where each lies. The last may be cut short."""
    found, position = [], 0
    while (end := body.find(b"\r\n", position)) >= 0:
        size = int(body[position:end].partition(b";")[0], 16)
        if size == 0:
            break
        found.append((start + end + 2, body[end + 2 : end + 2 + size]))
        position = end + 2 + size + 2
    return found
