"""Reads many streams at once at little cost: raw sockets, one thread, and parsing only after the last byte.

`python -m pagewire.bench.serve.cheap_client HOST PORT NUM_STREAMS < BODY > JSON`; `frontend` runs it.
"""

import json
import select
import socket
import sys
import time

import msgspec

_POLL_S = 0.01  # between reads of the sockets, so that one read takes several events


def read_streams(host: str, port: int, body: bytes, num_streams: int) -> tuple[float, float, list[bytes]]:
    """Sends the same request on `num_streams` connections. Returns the seconds until the last byte, the CPU seconds of
    this process, and the answers."""
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body
    sockets = {s.fileno(): s for s in (socket.create_connection((host, port)) for _ in range(num_streams))}
    received: dict[int, list[bytes]] = {fd: [] for fd in sockets}
    with select.epoll() as epoll:
        started, cpu_started = time.perf_counter(), time.process_time()
        for fd, connection in sockets.items():
            connection.setblocking(False)
            epoll.register(fd, select.EPOLLIN)
            connection.send(request)
        while sockets:
            for fd, _ in epoll.poll():
                data = sockets[fd].recv(1 << 18)
                if data:
                    received[fd].append(data)
                else:
                    sockets.pop(fd).close()
            time.sleep(_POLL_S)
        seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
    return seconds, cpu_s, [b"".join(parts) for parts in received.values()]


def chat_body(num_tokens: int) -> bytes:
    """The body of a request for a stream of `num_tokens` tokens."""
    messages = [{"role": "user", "content": "Count from 1 to 10"}]
    return json.dumps({"messages": messages, "max_tokens": num_tokens, "ignore_eos": True, "stream": True}).encode()


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
    seconds, cpu_s, answers = read_streams(host, int(port), sys.stdin.buffer.read(), int(num_streams))
    json.dump({"seconds": seconds, "cpu_s": cpu_s, "streams": list(map(read_events, answers))}, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
