"""Bytes that no honest client sends, to the real server over a socket: each is answered or cut off, and in time."""

import asyncio
import contextlib
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from served import Served

BODY = b'{"prompt": "x"}'
POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"
END = b"connection: close\r\n\r\n"
CODED = POST + b"transfer-encoding: %b\r\n"
CHUNKED = CODED % b"chunked"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served(timeout_keep_alive=1) as running:
        yield running


def chunks(*parts: bytes, extension: bytes = b"", trailers: bytes = b"") -> bytes:
    framed = b"".join(b"%x%b\r\n%b\r\n" % (len(part), extension, part) for part in parts)
    return framed + b"0%b\r\n%b\r\n" % (extension, trailers)


CASES: dict[str, tuple[bytes, tuple[int, ...]]] = {
    # the request line
    "line of 1 MB": (b"GET /" + b"a" * (1 << 20) + b" HTTP/1.1\r\nhost: localhost\r\n\r\n", (414, 431)),
    "method of 1 MB": (b"A" * (1 << 20) + b" / HTTP/1.1\r\nhost: localhost\r\n\r\n", (400,)),
    "unknown method": (b"BREW / HTTP/1.1\r\nhost: localhost\r\n\r\n", (400,)),
    "unknown version": (b"GET /health HTTP/9.9\r\nhost: localhost\r\n\r\n", (400,)),
    "version 0.9": (b"GET /health\r\n\r\n", (400,)),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", (400,)),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500), (400,)),
    "absolute form": (b"GET http://x/health HTTP/1.1\r\nhost: localhost\r\n" + END, (200,)),
    "absolute form of nothing": (b"GET http:// HTTP/1.1\r\nhost: localhost\r\n" + END, (400,)),
    "absolute form without a path": (b"GET http://x HTTP/1.1\r\nhost: localhost\r\n" + END, (400,)),
    "authority form": (b"CONNECT x:80 HTTP/1.1\r\nhost: localhost\r\n" + END, (400, 404, 405)),
    "asterisk form": (b"OPTIONS * HTTP/1.1\r\nhost: localhost\r\n" + END, (400, 404, 405)),
    "NUL in the path": (b"GET /hea\0lth HTTP/1.1\r\nhost: localhost\r\n" + END, (400,)),
    "%00 in the path": (b"GET /health%00 HTTP/1.1\r\nhost: localhost\r\n" + END, (404,)),
    "bad % in the path": (b"GET /%zz%ff%c0%ae HTTP/1.1\r\nhost: localhost\r\n" + END, (404,)),
    "raw bytes in the path": (b"GET /\xff\xfe HTTP/1.1\r\nhost: localhost\r\n" + END, (400, 404)),
    "control character in the path": (b"GET /\x1b[31m HTTP/1.1\r\nhost: localhost\r\n" + END, (400, 404)),
    "two spaces": (b"GET  /health HTTP/1.1\r\nhost: localhost\r\n" + END, (200, 400)),
    "bare LF after the line": (b"GET /health HTTP/1.1\nhost: localhost\r\n" + END, (400,)),
    "nothing but bare LF": (b"GET /health HTTP/1.1\nhost: localhost\nconnection: close\n\n", (400,)),
    "tabs for spaces": (b"GET\t/health\tHTTP/1.1\r\nhost: localhost\r\n" + END, (400,)),
    # headers
    "header of 1 MB": (GET + b"a: " + b"b" * (1 << 20) + b"\r\n\r\n", (431,)),
    "name of 1 MB": (GET + b"b" * (1 << 20) + b": a\r\n\r\n", (431,)),
    "100,000 headers": (GET + b"a: b\r\n" * 100_000 + b"\r\n", (431,)),
    "101 headers": (GET + b"a: b\r\n" * 100 + b"\r\n", (431,)),
    "NUL in a value": (GET + b"a: b\0c\r\n" + END, (400,)),
    "NUL in a name": (GET + b"a\0b: c\r\n" + END, (400,)),
    "space before the colon": (GET + b"a : b\r\n" + END, (400,)),
    "folded": (GET + b"a: b\r\n c\r\n" + END, (400,)),
    "folded with a tab": (GET + b"a: b\r\n\tc\r\n" + END, (400,)),
    "first header folded": (b"GET /health HTTP/1.1\r\n a: b\r\nhost: localhost\r\n" + END, (400,)),
    "folded length": (POST + b"content-length:\r\n 15\r\n" + END + BODY, (400,)),
    "no colon": (GET + b"abc\r\n" + END, (400,)),
    "no name": (GET + b": b\r\n" + END, (400,)),
    "bare CR": (GET + b"a: b\rc: d\r\n" + END, (400,)),
    "bare LF": (GET + b"a: b\nc: d\r\n" + END, (400,)),
    "bare LF at the end": (GET + b"connection: close\r\n\n", (400,)),
    "CR CR LF": (GET + b"a: b\r\r\n" + END, (400,)),
    "control character in a value": (GET + b"a: \x01\r\n" + END, (400,)),
    "DEL in a value": (GET + b"a: \x7f\r\n" + END, (400,)),
    "no host": (b"GET /health HTTP/1.1\r\n" + END, (400,)),
    "no host in HTTP/1.0": (b"GET /health HTTP/1.0\r\n\r\n", (200,)),
    "malformed host in HTTP/1.0": (b"GET /health HTTP/1.0\r\nhost: a/b\r\n\r\n", (400,)),
    "two hosts": (GET + b"host: y\r\n" + END, (400,)),
    "host with a bracket": (b"GET /health HTTP/1.1\r\nhost: [1.2\r\n" + END, (400,)),
    "malformed address in brackets": (b"GET /health HTTP/1.1\r\nhost: [1.2.3]\r\n" + END, (403,)),
    "host with a port of six digits": (b"GET /health HTTP/1.1\r\nhost: localhost:123456\r\n" + END, (400,)),
    "host with a path": (b"GET /health HTTP/1.1\r\nhost: x/?y=\r\n" + END, (400,)),
    "host with a user": (b"GET /health HTTP/1.1\r\nhost: a@b\r\n" + END, (400,)),
    "upgrade to h2c": (GET + b"upgrade: h2c\r\nhttp2-settings: AAMA\r\nconnection: Upgrade\r\n\r\n", (200,)),
    "upgrade to a web socket": (
        GET + b"upgrade: websocket\r\nsec-websocket-key: x\r\nsec-websocket-version: 13\r\nconnection: Upgrade\r\n\r\n",
        (200, 400),
    ),
    "expectation": (POST + b"expect: nonsense\r\ncontent-length: 15\r\n" + END + BODY, (200, 417)),
    # lengths
    "two lengths": (POST + b"content-length: 15\r\ncontent-length: 14\r\n" + END + BODY, (400,)),
    "the same length twice": (POST + b"content-length: 15\r\ncontent-length: 15\r\n" + END + BODY, (400,)),
    "list of lengths": (POST + b"content-length: 15, 15\r\n" + END + BODY, (400,)),
    "negative length": (POST + b"content-length: -1\r\n" + END, (400,)),
    "signed length": (POST + b"content-length: +15\r\n" + END + BODY, (400,)),
    "empty length": (POST + b"content-length: \r\n" + END + BODY, (400,)),
    "length of two words": (POST + b"content-length: 1 5\r\n" + END + BODY, (400,)),
    "length with an underscore": (POST + b"content-length: 1_5\r\n" + END + BODY, (400,)),
    "length with a space before the colon": (POST + b"content-length : 15\r\n" + END + BODY, (400,)),
    "chunks in HTTP/1.0": (CHUNKED.replace(b"HTTP/1.1", b"HTTP/1.0") + END + chunks(BODY), (400,)),
    "hexadecimal length": (POST + b"content-length: 0xf\r\n" + END + BODY, (400,)),
    "length beyond 64 bits": (POST + b"content-length: 99999999999999999999999\r\n" + END, (400, 413)),
    "length beyond the bound": (POST + b"content-length: 99999999999\r\n" + END, (413,)),
    "length and chunks": (CHUNKED + b"content-length: 15\r\n" + END + chunks(BODY), (400,)),
    "chunks and length": (POST + b"content-length: 15\r\ntransfer-encoding: chunked\r\n" + END + chunks(BODY), (400,)),
    "compressed and chunked": (POST + b"transfer-encoding: gzip, chunked\r\n" + END + chunks(BODY), (400,)),
    "chunked twice": (CHUNKED + b"transfer-encoding: chunked\r\n" + END + chunks(BODY), (400,)),
    "not chunked at the end": (POST + b"transfer-encoding: chunked, gzip\r\n" + END, (400,)),
    "hidden chunked": (POST + b"transfer-encoding: \x0bchunked\r\n" + END + chunks(BODY), (400,)),
    "encodings on two lines": (CODED % b"identity" + b"transfer-encoding: chunked\r\n" + END + chunks(BODY), (400,)),
    "encodings on two lines, reversed": (CHUNKED + b"transfer-encoding: identity\r\n" + END + BODY, (400,)),
    "empty encoding, then chunked": (CODED % b"" + b"transfer-encoding: chunked\r\n" + END + chunks(BODY), (400,)),
    "chunked twice on a line": (CODED % b"chunked, chunked" + END + chunks(BODY), (400,)),
    "chunked and an empty one": (CODED % b"chunked," + END + chunks(BODY), (400,)),
    "identity and chunked": (CODED % b"identity, chunked" + END + chunks(BODY), (400,)),
    "identity": (CODED % b"identity" + END, (400,)),
    "identity and a length": (CODED % b"identity" + b"content-length: 15\r\n" + END + BODY, (400,)),
    "empty encoding": (CODED % b"" + END, (400,)),
    "empty encoding and a length": (CODED % b"" + b"content-length: 15\r\n" + END + BODY, (400,)),
    "quoted chunked": (CODED % b'"chunked"' + END + chunks(BODY), (400,)),
    "chunked with a parameter": (CODED % b"chunked;q=1" + END + chunks(BODY), (400,)),
    "chunked in mixed case": (CODED % b" \tChUnKeD " + END + chunks(BODY), (200,)),
    "encoding of a body that is not read": (GET + b"transfer-encoding: identity\r\n" + END, (400,)),
    "identity in HTTP/1.0": ((CODED % b"identity").replace(b"/1.1", b"/1.0") + END, (400,)),
    "compressed last": (POST + b"content-encoding: identity, br\r\ncontent-length: 15\r\n" + END + BODY, (415,)),
    "compressed twice": (POST + b"content-encoding: identity\r\ncontent-encoding: gzip\r\n" + END + BODY, (400,)),
    "compressed": (POST + b"content-encoding: gzip\r\ncontent-length: 15\r\n" + END + BODY, (415,)),
    # chunks
    "good chunks": (CHUNKED + END + chunks(BODY[:4], BODY[4:]), (200,)),
    "chunks of a byte": (CHUNKED + END + chunks(*(bytes([byte]) for byte in BODY + b" " * 50_000)), (200,)),
    "small extensions": (CHUNKED + END + chunks(BODY, extension=b";a=b"), (200,)),
    "extension of 1 MB": (CHUNKED + END + chunks(BODY, extension=b";" + b"a" * (1 << 20)), (400,)),
    "extensions of 1 MB": (CHUNKED + END + chunks(*[b" "] * 10_000, extension=b";a=" + b"b" * 100), (400,)),
    "trailers of 1 MB": (CHUNKED + END + chunks(BODY, trailers=b"a: b\r\n" * 200_000), (200, 400)),
    "a few trailers": (CHUNKED + END + chunks(BODY, trailers=b"authorization: Bearer x\r\n"), (200,)),
    "chunk beyond 64 bits": (CHUNKED + END + b"ffffffffffffffffff\r\n", (400,)),
    "negative chunk": (CHUNKED + END + b"-1\r\nx\r\n0\r\n\r\n", (400,)),
    "chunk with 0x": (CHUNKED + END + b"0xf\r\n" + BODY + b"\r\n0\r\n\r\n", (400,)),
    "chunk with a sign": (CHUNKED + END + b"+f\r\n" + BODY + b"\r\n0\r\n\r\n", (400,)),
    "chunk with a space": (CHUNKED + END + b"f \r\n" + BODY + b"\r\n0\r\n\r\n", (400,)),
    "chunk and bare LF": (CHUNKED + END + b"f\n" + BODY + b"\r\n0\r\n\r\n", (400,)),
    "extension and bare LF": (CHUNKED + END + b"f;a\n" + BODY + b"\r\n0\r\n\r\n", (400,)),
    "bare LF after a chunk": (CHUNKED + END + b"f\r\n" + BODY + b"\n0\r\n\r\n", (400,)),
    "bare LF after the last chunk": (CHUNKED + END + b"f\r\n" + BODY + b"\r\n0\n\n", (400,)),
    "malformed chunk": (CHUNKED + END + b"nonsense\r\n", (400,)),
    "chunk with too much": (CHUNKED + END + b"1\r\nxyz\r\n0\r\n\r\n", (400,)),
    "17 MB in chunks": (CHUNKED + END + chunks(*[b" " * (1 << 20)] * 17), (413,)),
    # bodies
    "nested": (POST + b"content-length: 200000\r\n" + END + b"[" * 200_000, (400,)),
    "invalid UTF-8": (POST + b"content-length: 14\r\n" + END + b'{"prompt":"\xff"}', (400,)),
}  # fmt: skip


def statuses(received: bytes) -> list[int]:
    return [int(part[:3]) for part in received.split(b"HTTP/1.1 ")[1:]]


@pytest.mark.parametrize("name", CASES)
def test_each_case_gets_its_status(served: Served, name: str) -> None:
    data, allowed = CASES[name]
    received = served.raw(data)  # waits at most for its timeout
    # A client that is still sending when the connection is closed may not receive the answer.
    if received or len(data) < 1 << 16:
        assert statuses(received)[-1:] and statuses(received)[-1] in allowed, received[:300]
        if statuses(received)[-1] >= 400:
            assert json.loads(received.rpartition(b"\r\n\r\n")[2])["error"]["message"]
    assert served.raw(GET + END).startswith(b"HTTP/1.1 200")
    assert not served.engine.open


@pytest.mark.parametrize(
    "parts",
    [
        [b"G", b"E", b"T", b" "],  # in the request line
        [GET, *[b"a: b\r\n"] * 1000],  # one header after another
        [GET + b"a: ", *[b"b"] * 1000],  # within one
        [],  # nothing at all
        [b"\r\n"] * 1000,  # empty lines, which may come before a request
        [GET + b"\r\n", *[b"\r\n"] * 1000],  # and between two
        [POST + b"content-length: 1000\r\n\r\n", *[b" "] * 999],  # in the body
        [CHUNKED + b"\r\n", *[b"1\r\n \r\n"] * 1000],
        [CHUNKED + b"\r\n1;", *[b"a"] * 1000],
        [GET + b"content-length: 1000\r\n\r\n", *[b" "] * 999],  # in the body of a GET, which is not read
    ],
)
def test_a_slow_client_is_disconnected(parts: list[bytes]) -> None:
    limits: dict[str, Any] = {"head_timeout_s": 0.1, "body_timeout_s": 0.1, "timeout_keep_alive": 1}
    with Served(**limits) as served, served.connect() as connection:
        connection.settimeout(0.02)
        received, waiting, is_open = b"", list(reversed(parts)), True
        for _ in range(250):  # at most 20 ms each
            if not is_open:
                break
            with contextlib.suppress(TimeoutError):
                try:
                    if waiting:
                        connection.sendall(waiting.pop())
                    part = connection.recv(1 << 16)
                    is_open = bool(part)
                    received += part
                except (ConnectionResetError, BrokenPipeError):
                    is_open = False
        assert not is_open
        assert all(status in (200, 400, 408) for status in statuses(received))
        assert served.raw(GET + END).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("name", [name for name in CASES if "encoding" in name or "chunked" in name])
def test_a_body_of_unclear_length_ends_its_connection(served: Served, name: str) -> None:
    """Another server may read the bytes after it as a request, so this one must not."""
    data, allowed = CASES[name]
    received = served.raw(data.replace(END, b"\r\n") + GET + END)
    assert statuses(received) == ([400] if allowed == (400,) else [200, 200]), received[:300]


def test_pipelined_requests(served: Served) -> None:
    one = POST + b"content-length: %d\r\n" % len(BODY)
    received = served.raw((one + b"\r\n" + BODY) * 9 + one + END + BODY)
    assert statuses(received) == [200] * 10
    received = served.raw((GET + b"\r\n") * 50_000)
    assert all(status == 200 for status in statuses(received)) and len(statuses(received)) < 50_000


@pytest.mark.parametrize("path", [b"/v1/messages", b"/v1/messages/count_tokens?a=b"])
def test_parser_errors_have_the_shape_of_the_path(served: Served, path: bytes) -> None:
    for line in (b"a b: c\r\n", b"a: b\r\n" * 200, b"content-length: x\r\n"):
        received = served.raw(b"POST " + path + b" HTTP/1.1\r\nhost: localhost\r\n" + line + END)
        error = json.loads(received.rpartition(b"\r\n\r\n")[2])
        assert error["type"] == "error" and set(error["error"]) == {"type", "message"}


def test_a_large_request_does_not_count_towards_the_next_head(served: Served) -> None:
    """The end of the request may arrive together with the beginning of the next."""
    ahead = BODY + b" " * 100_000
    with served.connect() as connection:
        connection.sendall(POST + b"content-length: %d\r\n\r\n" % len(ahead) + ahead + GET)
        received = connection.recv(1 << 16)
        connection.sendall(END)
        while part := connection.recv(1 << 16):
            received += part
    assert statuses(received) == [200, 200]


def sized_request(kind: str, limit: int) -> bytes:
    """A request with exactly `limit` units of `kind`."""
    length = POST + END.removesuffix(b"\r\n")
    match kind:
        case "bytes of the target":
            return b"GET /health?" + b"a" * (limit - len("/health?")) + b" HTTP/1.1\r\nhost: localhost\r\n" + END
        case "headers":
            return GET + b"a: b\r\n" * (limit - 2) + END
        case "bytes of headers":
            used = len(b"host" + b"localhost" + b"connection" + b"close" + b"a")
            return GET + b"a: " + b"b" * (limit - used) + b"\r\n" + END
        case "bytes of a body":
            return length + b"content-length: %d\r\n\r\n" % limit + BODY + b" " * (limit - len(BODY))
        case "bytes of chunks":
            body = BODY + b" " * (limit - len(BODY))
            return length + b"transfer-encoding: chunked\r\n\r\n" + chunks(body[:50_000], body[50_000:])
    raise AssertionError(kind)


@pytest.mark.parametrize(
    ("kind", "limit", "status"),
    [
        ("bytes of the target", 8192, 414),
        ("headers", 100, 431),
        ("bytes of headers", 4096, 431),
        ("bytes of a body", 100_000, 413),
        ("bytes of chunks", 100_000, 413),
    ],
)
def test_limits_are_exact(small: Served, kind: str, limit: int, status: int) -> None:
    assert statuses(small.raw(sized_request(kind, limit))) == [200]
    assert statuses(small.raw(sized_request(kind, limit + 1))) == [status]


@pytest.fixture(scope="module")
def small() -> Iterator[Served]:
    with Served(timeout_keep_alive=1, max_head_size=4096, max_body_size=100_000) as running:
        yield running


def test_a_bad_request_does_not_disturb_the_answer_before_it(served: Served) -> None:
    body = b'{"prompt": "x", "stream": true}'
    received = served.raw(POST + b"content-length: %d\r\n\r\n" % len(body) + body + b"nonsense\r\n\r\n")
    assert b"HTTP/1.1 400" not in received


def test_a_client_cannot_send_an_endless_body_that_is_not_read() -> None:
    """The answer is sent at once; what the client sends afterwards is bounded."""
    with Served(max_body_size=100_000) as served, served.connect() as connection:
        connection.sendall(GET + b"transfer-encoding: chunked\r\n\r\n")
        num_sent = 0
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            while num_sent < 1 << 28:
                connection.sendall(b"1000\r\n" + b" " * 4096 + b"\r\n")
                num_sent += 4096
        assert num_sent < 1 << 26


def test_a_disconnect_within_a_request_leaves_nothing_open(served: Served) -> None:
    whole = POST + b"content-length: %d\r\n" % len(BODY) + END + BODY
    for end in range(0, len(whole), 7):
        with served.connect() as connection:
            connection.sendall(whole[:end])
    assert served.raw(GET + END).startswith(b"HTTP/1.1 200")
    assert served.engine.gateway.num_open == 0


def mutated(rng: random.Random, data: bytes) -> bytes:
    """The request with a few random mutations."""
    mutant = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(mutant) + 1)
        length = rng.choice((1, 1, 2, 8, 40))
        match rng.randrange(5):
            case 0:
                mutant[at : at + length] = rng.randbytes(length)
            case 1:
                mutant[at:at] = mutant[at : at + length] * rng.choice((1, 2, 500))
            case 2:
                del mutant[at : at + length]
            case 3:
                mutant[at:at] = rng.choice((b"\r\n", b"\n", b"\0", b":", b" ", b"\t", b",", b";", b"%", b"\xff", b"-1"))
            case _:
                other = rng.randrange(len(mutant) + 1)
                mutant[at : at + length] = mutant[other : other + length]
    return bytes(mutant)


def test_mutated_requests() -> None:
    """Each is answered with 200 or a 4xx, or cut off, and later requests are served."""
    length = b"content-length: %d\r\n" % len(BODY)
    whole = [
        GET + END,
        POST + length + END + BODY,
        POST + length + b"\r\n" + BODY + GET + END,
        CHUNKED
        + b"expect: 100-continue\r\n"
        + END
        + chunks(BODY[:5], BODY[5:], extension=b";a=b", trailers=b"c: d\r\n"),
        b"OPTIONS /v1/models HTTP/1.1\r\nhost: localhost\r\norigin: http://localhost\r\n"
        b"access-control-request-method: GET\r\n" + END,
    ]
    limits: dict[str, Any] = {"head_timeout_s": 0.2, "body_timeout_s": 0.2, "timeout_keep_alive": 1}

    async def send(port: int, data: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(data)
            with contextlib.suppress(ConnectionError):
                return await asyncio.wait_for(reader.read(), 10)
            return b""
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def work(port: int) -> None:
        rng = random.Random(7)
        for _ in range(4):
            batch = [mutated(rng, rng.choice(whole)) for _ in range(150)]
            for data, received in zip(batch, await asyncio.gather(*(send(port, data) for data in batch)), strict=True):
                assert {status // 100 for status in statuses(received)} <= {1, 2, 4}, (data, received)

    with Served(**limits) as served:
        asyncio.run(work(served.port))
        assert served.raw(GET + END).startswith(b"HTTP/1.1 200")
        assert served.engine.gateway.num_open == 0
