"""A small client that uses little of the machine: one connection per request, bytes in and bytes out."""

import asyncio
import json
import resource
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from ...tools.servers import HOST, Server


def serving(*flags: str) -> Server:
    """A server with the demo model for thousands of connections; raises this process's descriptor limit for them."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return Server(None, "--no-access-log", *flags)


class Answer(NamedTuple):
    status: int  # 0: no complete answer
    head: bytes
    body: bytes
    seconds: float

    @property
    def is_refusal(self) -> bool:
        """Refused with a Retry-After."""
        return self.status in (429, 503) and b"\r\nretry-after: " in self.head.lower()


def request_bytes(path: str, body: dict[str, object] | None = None) -> bytes:
    """A GET, or a POST of JSON; the server closes the connection after its answer."""
    data = b"" if body is None else json.dumps(body).encode()
    head = [f"{'GET' if body is None else 'POST'} {path} HTTP/1.1", f"Host: {HOST}", "Connection: close"]
    head += [] if body is None else ["Content-Type: application/json", f"Content-Length: {len(data)}"]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + data


def completion(num_tokens: int, *, is_stream: bool = False, prompt: str = "hello") -> bytes:
    """A request for exactly `num_tokens` tokens."""
    body = {"prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0, "stream": is_stream}
    return request_bytes("/v1/completions", body)


async def ask(port: int, request: bytes, timeout_s: float) -> Answer:
    """Sends one request on a new connection. Without a complete answer in time the status is 0."""
    began = time.monotonic()
    data = b""
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(HOST, port)
            try:
                writer.write(request)
                data = await reader.read(-1)
            finally:
                writer.close()
    head, _, body = data.partition(b"\r\n\r\n")
    status = int(head[9:12]) if head.startswith(b"HTTP/1.1 ") else 0
    is_cut = status == 200 and b"chunked" in head.lower() and not body.endswith(b"0\r\n\r\n")
    return Answer(0 if is_cut else status, head, body, time.monotonic() - began)


async def closed_loop(port: int, requests: Sequence[bytes], concurrency: int, timeout_s: float) -> list[Answer]:
    """The answers to all requests, `concurrency` of which are open at any time."""
    waiting, answers = iter(requests), list[Answer]()

    async def client() -> None:
        for request in waiting:
            answers.append(await ask(port, request, timeout_s))

    await asyncio.gather(*(client() for _ in range(concurrency)))
    return answers


async def connect(port: int, data: bytes = b"", *, receive_buffer: int | None = None) -> socket.socket:
    """Connects and sends `data`."""
    connection = socket.socket()
    connection.setblocking(False)
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(connection, (HOST, port))
    await loop.sock_sendall(connection, data)
    return connection


def leave(connection: socket.socket, *, is_reset: bool) -> None:
    """Closes the connection, or resets it."""
    if is_reset:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
