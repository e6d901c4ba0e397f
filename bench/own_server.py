"""A server with the demo model, started by a benchmark and observed from outside: the resources of its processes, and
its metrics.

The client is small, so that it uses little of the machine: one connection per request, bytes in and bytes out.
"""

import asyncio
import json
import resource
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

import psutil

HOST = "127.0.0.1"
MB = 1 << 20
_START_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 20.0


class Holding(NamedTuple):
    """What a process has of its own."""

    num_bytes: int  # that no other process shares
    num_fds: int
    num_threads: int


def holding(process: psutil.Process) -> Holding:
    """What it holds now. Raises psutil.Error if the process has ended."""
    with process.oneshot():
        return Holding(process.memory_full_info().uss, process.num_fds(), process.num_threads())


class OwnServer:
    """Runs."""

    def __init__(self, port: int, process: "subprocess.Popen[bytes]") -> None:
        self.port = port
        self._process = process

    def processes(self) -> dict[str, psutil.Process]:
        """The supervisor and its children, by name."""
        supervisor = psutil.Process(self._process.pid)
        children = {" ".join(p.cmdline()).removeprefix("pagewire: ").strip(): p for p in supervisor.children()}
        return {"supervisor": supervisor, **children}

    def holdings(self) -> dict[str, Holding]:
        """What each process holds now."""
        return {name: holding(process) for name, process in self.processes().items()}

    def num_bytes(self) -> int:
        """What all processes hold."""
        return sum(held.num_bytes for held in self.holdings().values())

    def metric(self, name: str) -> float:
        """The sum over all labels of a metric."""
        with urllib.request.urlopen(f"http://{HOST}:{self.port}/metrics", timeout=10) as response:
            lines = [
                line for line in response.read().decode().splitlines() if line.startswith((name + "{", name + " "))
            ]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def load(self) -> dict[str, float]:
        """/load: rows, queue and KV memory, as the core last reported them."""
        with urllib.request.urlopen(f"http://{HOST}:{self.port}/load", timeout=10) as response:
            return dict(json.load(response))

    def is_healthy(self, timeout_s: float) -> bool:
        """/health is 200."""
        try:
            with urllib.request.urlopen(f"http://{HOST}:{self.port}/health", timeout=timeout_s):
                return True
        except OSError:
            return False

    def wait_idle(self, timeout_s: float = 60.0) -> float:
        """Returns when nothing runs, waits or holds KV any more: the seconds it took. Raises SystemExit."""
        began = time.monotonic()
        while any(self.load().values()):
            if time.monotonic() - began > timeout_s:
                raise SystemExit(f"the server is not idle after {timeout_s:g} s: {self.load()}")
            time.sleep(0.02)
        return time.monotonic() - began


@contextmanager
def serving(*flags: str) -> Iterator[OwnServer]:
    """A server that is ready. Raises SystemExit if it does not start."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # thousands of connections, one descriptor each
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = int(probe.getsockname()[1])
    command = [sys.executable, "-m", "pagewire", "serve", "--port", str(port), "--threads", "1", "--no-access-log"]
    process = subprocess.Popen([*command, *flags], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while True:
            with suppress(OSError), urllib.request.urlopen(f"http://{HOST}:{port}/ready", timeout=5):
                break
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("the server did not start")
            time.sleep(0.05)
        yield OwnServer(port, process)
    finally:
        process.terminate()
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Answer(NamedTuple):
    """What came back."""

    status: int  # 0: no whole answer
    head: bytes
    body: bytes
    seconds: float

    @property
    def is_refusal(self) -> bool:
        """Refused correctly: with a Retry-After."""
        return self.status in (429, 503) and b"\r\nretry-after: " in self.head.lower()


def request_bytes(path: str, body: dict[str, object] | None = None) -> bytes:
    """A GET, or a POST of JSON; the server closes the connection behind its answer."""
    data = b"" if body is None else json.dumps(body).encode()
    head = [f"{'GET' if body is None else 'POST'} {path} HTTP/1.1", f"Host: {HOST}", "Connection: close"]
    head += [] if body is None else ["Content-Type: application/json", f"Content-Length: {len(data)}"]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + data


def completion(num_tokens: int, *, is_stream: bool = False, prompt: str = "hello") -> bytes:
    """A request for exactly `num_tokens` tokens."""
    body = {"prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0, "stream": is_stream}
    return request_bytes("/v1/completions", body)


async def ask(port: int, request: bytes, timeout_s: float) -> Answer:
    """One request on a connection of its own. Whatever is no whole answer in time has status 0."""
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
    """The answers to all requests, of which so many are open at any time."""
    waiting, answers = iter(requests), list[Answer]()

    async def client() -> None:
        for request in waiting:
            answers.append(await ask(port, request, timeout_s))

    await asyncio.gather(*(client() for _ in range(concurrency)))
    return answers


async def connect(port: int, data: bytes = b"", *, receive_buffer: int | None = None) -> socket.socket:
    """A connection on which `data` was sent."""
    connection = socket.socket()
    connection.setblocking(False)
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(connection, (HOST, port))
    await loop.sock_sendall(connection, data)
    return connection


def leave(connection: socket.socket, *, is_reset: bool) -> None:
    """Hangs up, with or without good manners."""
    if is_reset:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
