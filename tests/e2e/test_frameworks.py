"""Frameworks on top of the clients, against a real server: answers, streams, tools, errors.

Structured output is tested in test_structured_clients.py.
"""

import asyncio
import contextlib
import gc
import json
import os
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import openai
import pytest

from pagewire.tools.servers import Server

# None of them may use the network.
os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false", "LOGFIRE_SEND_TO_LOGFIRE": "false"}
REASON = "make test-clients installs it"
langchain: Any = pytest.importorskip("langchain_openai", reason=REASON)
litellm: Any = pytest.importorskip("litellm", reason=REASON)
pydantic_ai: Any = pytest.importorskip("pydantic_ai", reason=REASON)
from pydantic_ai.models.openai import OpenAIChatModel  # noqa: E402
from pydantic_ai.providers.openai import OpenAIProvider  # noqa: E402

# Their warnings do not concern us. They leave connections to the garbage collector, which runs after every test.
pytestmark = [pytest.mark.e2e, pytest.mark.clients, pytest.mark.filterwarnings("ignore")]
MODEL = "pagewire-demo"
QUESTION = "Count from 1 to 5"
ANSWER = "1, 2, 3, 4, 5"
WEATHER = "What is the weather in Paris?"


def get_weather(city: str) -> str:
    """Get the weather of a city"""
    return "sunny"


@pytest.fixture(autouse=True)
def collect_garbage() -> Iterator[None]:
    yield
    gc.collect()


def chat_openai(server: Server, **fields: Any) -> Any:
    return langchain.ChatOpenAI(
        base_url=f"{server.url}/v1", api_key="none", model=MODEL, temperature=0, max_retries=0, **fields
    )


@pytest.fixture
def chat_model(server: Server) -> Any:
    return chat_openai(server)


def test_langchain_answers_and_streams(chat_model: Any) -> None:
    answer = chat_model.invoke(QUESTION)
    assert answer.content == ANSWER and answer.usage_metadata["output_tokens"] > 10
    assert answer.response_metadata["finish_reason"] == "stop"
    pieces = [chunk.text for chunk in chat_model.stream(QUESTION)]
    assert "".join(pieces) == ANSWER and len(pieces) > 5
    batch = chat_model.batch([QUESTION, "Count from 2 to 4"])
    assert [one.content for one in batch] == [ANSWER, "2, 3, 4"]


def test_langchain_streams_async_and_gets_logprobs(server: Server, chat_model: Any) -> None:
    async def scenario() -> str:
        async with openai.DefaultAsyncHttpxClient() as http:
            model = chat_openai(server, http_async_client=http)
            return "".join([chunk.text async for chunk in model.astream(QUESTION)])

    assert asyncio.run(scenario()) == ANSWER
    answer = chat_model.bind(logprobs=True, top_logprobs=2).invoke(QUESTION)
    assert all(len(token["top_logprobs"]) == 2 for token in answer.response_metadata["logprobs"]["content"])


def test_langchain_calls_a_tool(chat_model: Any) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage

    model = chat_model.bind_tools([get_weather])
    call = model.invoke(WEATHER)
    (tool_call,) = call.tool_calls
    assert (tool_call["name"], tool_call["args"]) == ("get_weather", {"city": "Paris"})
    streamed = None
    for chunk in model.stream(WEATHER):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed is not None and streamed.tool_calls[0]["args"] == {"city": "Paris"}
    answer = model.invoke([HumanMessage(WEATHER), call, ToolMessage("sunny", tool_call_id=tool_call["id"])])
    assert answer.response_metadata["finish_reason"] in ("stop", "tool_calls")


def test_langchain_uses_the_responses_api(server: Server) -> None:
    model = chat_openai(server, use_responses_api=True)
    assert model.invoke(QUESTION).text == ANSWER
    assert "".join(chunk.text for chunk in model.stream(QUESTION)) == ANSWER


def test_langchain_uses_the_completions_api(server: Server) -> None:
    model = langchain.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", model=MODEL, temperature=0, max_tokens=30, max_retries=0
    )
    prompt = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    assert model.invoke(prompt) == ANSWER


def ask_litellm(server: Server, **fields: Any) -> Any:
    messages = [{"role": "user", "content": fields.pop("question", QUESTION)}]
    return litellm.completion(
        model=f"hosted_vllm/{MODEL}", api_base=f"{server.url}/v1", messages=messages, temperature=0, **fields
    )


def test_litellm_answers_and_streams(server: Server) -> None:
    answer = ask_litellm(server)
    assert answer.choices[0].message.content == ANSWER and answer.usage.completion_tokens > 10
    chunks = list(ask_litellm(server, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ANSWER
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens


def test_litellm_calls_a_tool(server: Server) -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": parameters}}
    (call,) = ask_litellm(server, question=WEATHER, tools=[tool]).choices[0].message.tool_calls
    assert call.function.name == "get_weather" and json.loads(call.function.arguments) == {"city": "Paris"}


def test_litellm_maps_our_errors_to_its_exceptions(server: Server) -> None:
    for num_words in (20_000, 1_000_000):  # the longer one is refused before it is encoded
        with pytest.raises(litellm.ContextWindowExceededError):
            ask_litellm(server, question="word " * num_words)
        with pytest.raises(litellm.ContextWindowExceededError):
            litellm.completion(
                model=f"anthropic/{MODEL}",
                api_base=server.url,
                api_key="none",
                messages=[{"role": "user", "content": "word " * num_words}],
                max_tokens=9,
            )
    with pytest.raises(litellm.BadRequestError, match="logit_bias"):
        ask_litellm(server, logit_bias={"999999": 1})
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(
            model="hosted_vllm/gpt-4",
            api_base=f"{server.url}/v1",
            messages=[{"role": "user", "content": QUESTION}],
            num_retries=0,
        )


def run_agent(server: Server, scenario: Callable[[Any], Awaitable[Any]]) -> Any:
    """The result of `scenario` with an agent that uses this server."""

    async def run() -> Any:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            model = OpenAIChatModel(MODEL, provider=OpenAIProvider(openai_client=client))
            return await scenario(pydantic_ai.Agent(model, model_settings={"temperature": 0}))

    return asyncio.run(run())


def test_pydantic_ai_answers_and_streams(server: Server) -> None:
    async def scenario(agent: Any) -> None:
        assert (await agent.run(QUESTION)).output == ANSWER
        async with agent.run_stream(QUESTION) as stream:
            pieces = [piece async for piece in stream.stream_text(delta=True, debounce_by=None)]
        assert "".join(pieces) == ANSWER and len(pieces) > 5

    run_agent(server, scenario)


def test_pydantic_ai_calls_a_tool(server: Server) -> None:
    cities: list[str] = []

    async def scenario(agent: Any) -> None:
        @agent.tool_plain  # type: ignore[untyped-decorator]
        def get_weather(city: str) -> str:
            """Get the weather of a city"""
            cities.append(city)
            return "sunny"

        limits = pydantic_ai.UsageLimits(request_limit=2)
        with contextlib.suppress(pydantic_ai.UsageLimitExceeded):  # so small a model may call the tool again
            await agent.run(WEATHER, usage_limits=limits)

    run_agent(server, scenario)
    assert cities[0] == "Paris"
