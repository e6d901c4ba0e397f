"""Reads many streams at once at little cost: raw sockets, one thread, and parsing only after the last byte.

`python -m pagewire.bench.serve.cheap_client HOST PORT NUM_STREAMS < BODY > JSON`; `frontend` runs it, and other
benchmarks call its functions.
"""

import json
import select
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import NamedTuple

import msgspec

_POLL_S = 0.01  # between reads of the sockets, so that one read takes several events


class Streams(NamedTuple):
    """What was read. The lists are by stream."""

    seconds: float  # until the last byte
    cpu_s: float  # of this process
    answers: list[bytes]
    arrivals: list[list[float]]  # perf_counter at each read

    @property
    def gaps_ms(self) -> list[list[float]]:
        """Between one read and the next."""
        return [[1000 * (b - a) for a, b in pairwise(arrived)] for arrived in self.arrivals]


def read_streams(
    addresses: Sequence[tuple[str, int]],
    body: bytes,
    num_streams: int,
    *,
    poll_s: float = _POLL_S,
    on_read: Callable[[], None] = lambda: None,
) -> Streams:
    """Sends the same request on `num_streams` connections, to the addresses in turn. `poll_s`: the pause between reads
    of the sockets. `on_read`: called after each read of one."""
    sockets = [socket.create_connection(addresses[i % len(addresses)]) for i in range(num_streams)]
    number = {connection.fileno(): i for i, connection in enumerate(sockets)}
    received: list[list[bytes]] = [[] for _ in sockets]
    arrivals: list[list[float]] = [[] for _ in sockets]
    with select.epoll() as epoll:
        started, cpu_started = time.perf_counter(), time.process_time()
        for i, connection in enumerate(sockets):
            connection.setblocking(False)
            epoll.register(connection.fileno(), select.EPOLLIN)
            connection.send(_request(addresses[i % len(addresses)], body, "close"))
        while number:
            for fd, _ in epoll.poll():
                i = number[fd]
                if data := sockets[i].recv(1 << 18):
                    received[i].append(data)
                    arrivals[i].append(time.perf_counter())
                    on_read()
                else:
                    del number[fd]
                    sockets[i].close()
            if poll_s:
                time.sleep(poll_s)
        seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
    return Streams(seconds, cpu_s, [b"".join(parts) for parts in received], arrivals)


def ask_again(addresses: Sequence[tuple[str, int]], body: bytes, *, num_open: int, num_requests: int) -> float:
    """Sends `num_requests` requests with plain answers, each as soon as an earlier one is answered, so that `num_open`
    are open, on as many connections that are kept. Returns the seconds. Raises ValueError if one fails."""
    with ExitStack() as stack:
        epoll = stack.enter_context(select.epoll())
        received = [b""] * num_open
        num_sent = num_answered = 0
        started = time.perf_counter()

        def ask(connection: socket.socket, i: int) -> None:
            nonlocal num_sent
            if num_sent < num_requests:
                num_sent += 1
                received[i] = b""
                connection.sendall(_request(addresses[i % len(addresses)], body, "keep-alive"))

        by_fd = dict[int, tuple[socket.socket, int]]()
        for i in range(num_open):
            connection = stack.enter_context(socket.create_connection(addresses[i % len(addresses)]))
            by_fd[connection.fileno()] = connection, i
            epoll.register(connection, select.EPOLLIN)
            ask(connection, i)
        while num_answered < num_requests:
            for fd, _ in epoll.poll():
                connection, i = by_fd[fd]
                data = connection.recv(1 << 18)
                received[i] += data
                if not data or not received[i].startswith(b"HTTP/1.1 200 "):
                    raise ValueError(f"an answer is {received[i][:500]!r}")
                if _is_whole(received[i]):
                    num_answered += 1
                    ask(connection, i)
        return time.perf_counter() - started


def _request(address: tuple[str, int], body: bytes, connection: str) -> bytes:
    host, port = address
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\nConnection: {connection}\r\n\r\n".encode() + body


def _is_whole(answer: bytes) -> bool:
    """Whether a plain answer, which has a Content-Length, has come to its end."""
    head, end, rest = answer.partition(b"\r\n\r\n")
    length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
    return bool(end) and len(rest) >= int(length)


def chat_body(num_tokens: int, *, stream: bool = True) -> bytes:
    """The body of a request for `num_tokens` tokens."""
    messages = [{"role": "user", "content": "Count from 1 to 10"}]
    return json.dumps({"messages": messages, "max_tokens": num_tokens, "ignore_eos": True, "stream": stream}).encode()


def read_events(answer: bytes) -> tuple[int, str]:
    """The number of pieces of text in an answer, and the text. Raises ValueError if it failed or ended early."""
    head, _, rest = answer.partition(b"\r\n\r\n")
    if b" 200 " not in head.partition(b"\r\n")[0]:
        raise ValueError(answer[:500].decode(errors="replace"))
    stream, start = bytearray(), 0
    while start < len(rest):  # the body's chunks
        line_end = rest.index(b"\r\n", start)
        num_bytes = int(rest[start:line_end], 16)
        stream += rest[line_end + 2 : line_end + 2 + num_bytes]
        start = line_end + 4 + num_bytes
    *events, done, end = bytes(stream).split(b"\n\n")
    if done != b"data: [DONE]" or end:
        raise ValueError(f"a stream ended with {bytes(stream[-200:])!r}")
    deltas = [msgspec.json.decode(event.removeprefix(b"data: "))["choices"][0]["delta"] for event in events]
    pieces = [text for delta in deltas if (text := delta.get("content"))]
    return len(pieces), "".join(pieces)


def main(host: str, port: str, num_streams: str) -> None:
    """Prints JSON: seconds, CPU seconds, and each stream's number of pieces and text."""
    read = read_streams([(host, int(port))], sys.stdin.buffer.read(), int(num_streams))
    json.dump(
        {"seconds": read.seconds, "cpu_s": read.cpu_s, "streams": list(map(read_events, read.answers))}, sys.stdout
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
