"""The real `openai` client, sync and async, with and without streaming, against a real server."""

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from waiting import until

from pagewire.tools.servers import Server

pytestmark = pytest.mark.e2e
QUESTION: Any = [{"role": "user", "content": "Count from 1 to 5"}]
ANSWER = "1, 2, 3, 4, 5"


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_model_is_listed_and_retrieved(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "pagewire-demo"
    assert client.models.retrieve("pagewire-demo").id == "pagewire-demo"


def test_a_chat_completion_has_text_finish_reason_and_usage(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="pagewire-demo", messages=QUESTION, temperature=0)
    (choice,) = answer.choices
    assert choice.message.content == ANSWER and choice.finish_reason == "stop"
    assert answer.usage is not None and answer.usage.completion_tokens > 10
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_streamed_chat_completion_has_text_finish_reason_and_usage(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="pagewire-demo", messages=QUESTION, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == ANSWER
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage is not None and not chunks[-1].choices


def test_many_concurrent_async_streams_are_correct(server: Server) -> None:
    async def ask(client: openai.AsyncOpenAI, a: int, b: int) -> str:
        stream = await client.chat.completions.create(
            model="pagewire-demo",
            messages=[{"role": "user", "content": f"Count from {a} to {b}"}],
            temperature=0,
            stream=True,
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def scenario() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            return await asyncio.gather(*(ask(client, 1, 3 + i % 5) for i in range(40)))

    answers = asyncio.run(scenario())
    assert answers == [", ".join(str(n) for n in range(1, 4 + i % 5)) for i in range(40)]


def test_completions_with_several_prompts_echo_and_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="pagewire-demo",
        prompt=["<|im_start|>user\nSpell cat<|im_end|>\n<|im_start|>assistant\n", "hello"],
        n=2,
        max_tokens=4,
        temperature=0,
        logprobs=2,
        echo=True,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[2].text == answer.choices[3].text and answer.choices[2].text.startswith("hello")
    logprobs = answer.choices[2].logprobs
    assert logprobs is not None and logprobs.token_logprobs is not None and logprobs.tokens is not None
    shown = "".join(token for token in logprobs.tokens if not token.startswith("<|"))  # the text omits special tokens
    assert logprobs.token_logprobs[0] is None and shown == answer.choices[2].text
    assert len(answer.choices[2].token_ids) == 4
    assert len(answer.choices[2].prompt_token_ids) == len(logprobs.tokens) - 4


def test_token_id_prompts_stop_strings_and_max_tokens(client: openai.OpenAI) -> None:
    ids = [40, 50, 60]
    first = client.completions.create(model="pagewire-demo", prompt=ids, max_tokens=8, temperature=0)
    assert first.choices[0].finish_reason in ("length", "stop")
    stopped = client.chat.completions.create(model="pagewire-demo", messages=QUESTION, temperature=0, stop=[", 4", "x"])
    assert stopped.choices[0].message.content == "1, 2, 3" and stopped.choices[0].finish_reason == "stop"
    short = client.chat.completions.create(model="pagewire-demo", messages=QUESTION, temperature=0, max_tokens=3)
    assert short.choices[0].finish_reason == "length" and short.usage and short.usage.completion_tokens == 3


def test_a_seed_gives_the_same_text_alone_and_in_a_batch(client: openai.OpenAI, server: Server) -> None:
    def sample(n: int) -> list[str | None]:
        answer = client.chat.completions.create(
            model="pagewire-demo", messages=QUESTION, temperature=1.5, seed=7, n=n, max_tokens=20
        )
        return [choice.message.content for choice in answer.choices]

    alone = sample(1)
    assert sample(8)[:1] == alone and len(set(sample(8))) > 1


def test_a_repeated_prompt_is_cached(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "Repeat after me: " + "river stone cloud " * 20}]
    for _ in range(2):
        answer = client.chat.completions.create(model="pagewire-demo", messages=messages, temperature=0, max_tokens=2)  # type: ignore[arg-type]
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert (answer.usage.prompt_tokens_details.cached_tokens or 0) >= 16


def test_a_tool_is_called(client: openai.OpenAI) -> None:
    tool = {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the weather of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
    answer = client.chat.completions.create(
        model="pagewire-demo",
        messages=[{"role": "user", "content": "What is the weather in Paris?"}],
        tools=[tool],  # type: ignore[list-item]
        temperature=0,
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls
    call = choice.message.tool_calls[0]
    assert call.function.name == "get_weather" and json.loads(call.function.arguments) == {"city": "Paris"}  # type: ignore[union-attr]


def test_a_disconnect_frees_the_row_and_the_blocks_of_the_request(server: Server) -> None:
    body = {"messages": QUESTION, "stream": True, "max_tokens": 7000, "ignore_eos": True}
    request = urllib.request.Request(
        f"{server.url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    response = urllib.request.urlopen(request, timeout=60)
    assert response.readline().startswith(b"data: ")
    until(lambda: server.metric("pagewire:num_requests_running") == 1, "the request runs", 60)
    response.close()
    until(lambda: server.metric("pagewire:num_requests_running") == 0, "the row is free", 60)
    until(lambda: server.metric("pagewire:kv_cache_usage_perc") == 0, "the blocks are free", 60)


CHAT = b'"messages": [{"role": "user", "content": "hi"}]'


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/v1/chat/completions", b"{", 400, "invalid_json"),
        ("/v1/chat/completions", b"{" + CHAT + b', "temperature": NaN}', 400, "invalid_json"),
        ("/v1/chat/completions", b'{"messages": 5}', 400, None),
        ("/v1/chat/completions", b"{" + CHAT + b', "temperature": 9}', 400, None),
        ("/v1/chat/completions", b"{" + CHAT + b', "model": "gpt-4"}', 404, "model_not_found"),
        ("/v1/completions", b'{"prompt": [999999]}', 400, None),
        ("/v1/completions", b'{"prompt": []}', 400, None),
        ("/v1/completions", b'{"prompt": "x", "logit_bias": {"999999": 1}}', 400, None),
        ("/v1/completions", b'{"prompt": "' + b"word " * 20000 + b'"}', 400, "context_length_exceeded"),
        ("/v1/nothing", b"{}", 404, "not_found"),
    ],
)  # fmt: skip
def test_an_invalid_request_gets_an_error_with_status_code_and_message(
    server: Server, path: str, body: bytes, status: int, code: str | None
) -> None:
    request = urllib.request.Request(server.url + path, body, {"Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=60)
    with caught.value as answer:
        assert answer.code == status
        error = json.loads(answer.read())["error"]
    assert error["code"] == code or code is None
    assert isinstance(error["message"], str) and len(error["message"]) > 10 and "Traceback" not in error["message"]
    assert server.answers("/health", 60)
