"""A real uvicorn on a free port, with the real OpenAI client and raw sockets as its clients."""

import asyncio
import json
import socket
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import openai
import pytest
from harness import run
from served import Served
from waiting import until

from pagewire.api.http import server

TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Köln"}}</tool_call>'
MESSAGES: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture
def served() -> Iterator[Served]:
    running = Served(api_keys=("key",))
    yield running
    running.stop()


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.url, api_key="key", max_retries=0) as opened:
        yield opened


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="demo", messages=MESSAGES, logprobs=True, top_logprobs=1, n=2)
    assert [choice.message.content for choice in answer.choices] == ["Hello 🙂"] * 2
    assert answer.usage is not None and answer.usage.completion_tokens == 14
    assert answer.usage.prompt_tokens_details is not None and answer.usage.prompt_tokens_details.cached_tokens == 1
    assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.content is not None
    assert bytes(answer.choices[0].logprobs.content[-1].bytes or ()).decode() == "🙂"
    assert answer._request_id


def test_chat_stream(client: openai.OpenAI) -> None:
    with client.chat.completions.create(
        model="demo", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    ) as stream:
        chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello 🙂"
    assert chunks[-1].usage is not None and chunks[-1].usage.total_tokens == 10


def test_chat_stream_helper_with_tools(served: Served, client: openai.OpenAI) -> None:
    served.engine.pieces = list(CALL + CALL)
    with client.chat.completions.stream(model="demo", messages=MESSAGES, tools=TOOLS) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].finish_reason == "tool_calls"
    calls = final.choices[0].message.tool_calls or []
    assert [json.loads(call.function.arguments) for call in calls] == [{"city": "Köln"}] * 2
    assert len({call.id for call in calls}) == 2


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="demo", prompt=["a", "b"], echo=True, logprobs=1)
    assert [choice.text for choice in answer.choices] == ["aHello 🙂", "bHello 🙂"]
    with client.completions.create(model="demo", prompt=[1, 2], stream=True) as stream:
        assert "".join(chunk.choices[0].text for chunk in stream) == "Hello 🙂"


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo", "org/demo-alias"]
    assert client.models.retrieve("org/demo-alias").id == "org/demo-alias"


def test_errors(served: Served, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as not_found:
        client.chat.completions.create(model="other", messages=MESSAGES)
    assert not_found.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="demo", messages=MESSAGES, temperature=3)
    assert bad.value.param == "temperature"
    with openai.OpenAI(base_url=served.url, api_key="wrong", max_retries=0) as other:
        with pytest.raises(openai.AuthenticationError) as wrong:
            other.models.list()
        assert wrong.value.code == "invalid_api_key"
    served.engine.refuse = ("context_length_exceeded", "This model's maximum context length is 128 tokens. However, x.")
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model="demo", messages=MESSAGES, stream=True)
    assert long.value.code == "context_length_exceeded"


def test_an_error_after_the_first_byte(served: Served, client: openai.OpenAI) -> None:
    served.engine.fail_after = 1
    stream = client.chat.completions.create(model="demo", messages=MESSAGES, stream=True)
    with pytest.raises(openai.APIError, match="A worker failed"), stream:
        list(stream)


def test_async_client(served: Served) -> None:
    async def work() -> None:
        async with openai.AsyncOpenAI(base_url=served.url, api_key="key", max_retries=0) as client:

            async def one() -> str:
                stream = await client.chat.completions.create(model="demo", messages=MESSAGES, stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            assert await asyncio.gather(*(one() for _ in range(20))) == ["Hello 🙂"] * 20
            answer = await client.chat.completions.create(model="demo", messages=MESSAGES)
            assert answer.choices[0].message.content == "Hello 🙂"

    run(work())


class Cancels(list[int]):
    """Cancelled rids, and an event that the first one sets."""

    def __init__(self) -> None:
        super().__init__()
        self.arrived = threading.Event()

    def extend(self, rids: Iterable[int]) -> None:
        super().extend(rids)
        self.arrived.set()


def request_bytes(body: bytes, *more: bytes) -> bytes:
    head = [b"POST /v1/completions HTTP/1.1", b"host: localhost", b"authorization: Bearer key"]
    head += [b"content-type: application/json", b"content-length: %d" % len(body), *more]
    return b"\r\n".join(head) + b"\r\n\r\n" + body


@pytest.mark.parametrize("stream", [b"true", b"false"])
def test_http_1_0_gets_no_chunks(served: Served, stream: bytes) -> None:
    body = b'{"prompt": "hi", "stream": %b}' % stream
    answer = served.raw(request_bytes(body).replace(b"HTTP/1.1", b"HTTP/1.0", 1))
    head, _, content = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower() and b"connection: close" in head.lower()
    assert content.startswith(b"data: {" if stream == b"true" else b"{")
    assert content.endswith(b"data: [DONE]\n\n" if stream == b"true" else b"}")


@pytest.mark.parametrize("stream", [b"true", b"false"])
def test_a_disconnect_cancels_the_request(served: Served, stream: bytes) -> None:
    served.engine.hold = True
    served.engine.cancels = cancels = Cancels()
    connection = socket.create_connection(("127.0.0.1", served.port), timeout=10)
    connection.sendall(request_bytes(b'{"prompt": "x", "stream": %b}' % stream))
    if stream == b"true":
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
    connection.close()
    assert cancels.arrived.wait(10)
    assert served.engine.gateway.num_open == 0


def test_a_client_that_does_not_read_is_disconnected(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "STALL_TIMEOUT_S", 0.05)
    served.engine.pieces = ["x" * (1 << 16)] * 10_000
    served.engine.cancels = cancels = Cancels()
    with socket.create_connection(("127.0.0.1", served.port), timeout=10) as connection:
        connection.sendall(request_bytes(b'{"prompt": "x", "stream": true}'))
        assert cancels.arrived.wait(10)


def test_a_client_that_pauses_gets_the_whole_stream(served: Served) -> None:
    served.engine.pieces = [f"{i:9} " for i in range(3000)]
    with socket.create_connection(("127.0.0.1", served.port), timeout=10) as connection:
        connection.sendall(request_bytes(b'{"prompt": "x", "stream": true}', b"connection: close"))
        received = connection.recv(100)
        until(lambda: not served.engine.open, "the engine is done before its client reads on")
        while part := connection.recv(1 << 16):
            received += part
    body = received.partition(b"\r\n\r\n")[2]
    events = [json.loads(line[6:]) for line in body.splitlines() if line.startswith(b"data: {")]
    assert "".join(event["choices"][0]["text"] for event in events) == "".join(served.engine.pieces)
    assert len(events) < len(served.engine.pieces), "unread chunks are merged"


def test_the_socket_buffer_of_a_client_that_does_not_read_is_small(served: Served) -> None:
    served.engine.pieces = ["x" * 1000] * 2000
    served.engine.cancels = cancels = Cancels()
    with socket.create_connection(("127.0.0.1", served.port), timeout=10) as connection:
        connection.sendall(request_bytes(b'{"prompt": "x", "stream": true}'))
        assert cancels.arrived.wait(10), "the kernel buffered 2 MB"
        received = b""
        while b'"client_too_slow"' not in received:
            received += connection.recv(1 << 16)


def test_a_connection_is_reused(served: Served) -> None:
    body = b'{"prompt": "x", "stream": true}'
    received = served.raw(request_bytes(body) + request_bytes(body, b"connection: close"))
    assert received.count(b"HTTP/1.1 200") == 2 and received.count(b"data: [DONE]\n\n") == 2
    assert b"server: uvicorn" not in received


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: " + b"y" * 100_000 + b"\r\n\r\n", b"431"),
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: " + b"y" * 1_000_000, b"431"),
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + b"a: b\r\n" * 200 + b"\r\n", b"431"),
        (b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n", b"414"),
        (b"nonsense\r\n\r\n", b"400"),
        (
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
            b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n{}",
            b"400",
        ),
        (b"GET /health HTTP/1.1\r\nhost: a\r\nhost: b\r\nconnection: close\r\n\r\n", b"400"),
    ],
)
def test_invalid_heads_are_refused(served: Served, data: bytes, status: bytes) -> None:
    received = served.raw(data)
    assert received.startswith(b"HTTP/1.1 " + status), received[:200]
    assert "error" in json.loads(received.partition(b"\r\n\r\n")[2])


def test_an_incomplete_head_times_out() -> None:
    with Served(head_timeout_s=0.01) as served:
        assert served.raw(b"GET /health HTTP/1.1\r\nhost: localhost\r\n") == b""


def test_a_large_head_within_the_limits_is_served(served: Served) -> None:
    data = b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + b"x: " + b"y" * 30_000 + b"\r\nconnection: close\r\n\r\n"
    assert served.raw(data).startswith(b"HTTP/1.1 200")


def test_shutdown_ends_streams_with_an_error_event(served: Served) -> None:
    served.engine.hold = True
    with socket.create_connection(("127.0.0.1", served.port), timeout=10) as connection:
        connection.sendall(request_bytes(b'{"prompt": "x", "stream": true}', b"connection: close"))
        received = connection.recv(4096)
        loop = served.engine.loop
        assert loop is not None
        loop.call_soon_threadsafe(served.engine.gateway.close, "The server is shutting down.")
        while part := connection.recv(4096):
            received += part
    assert b'"shutting_down"' in received and received.endswith(b"\r\n0\r\n\r\n") and b"[DONE]" not in received
