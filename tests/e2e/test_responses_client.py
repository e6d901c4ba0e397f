"""The Responses API with the real `openai` client, with and without streaming, against a real server.

The stream helper of the client raises when events are out of order, so a stream that it reads to the end is valid.
"""

import asyncio
import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from pagewire.tools.servers import Server

pytestmark = [pytest.mark.e2e, pytest.mark.clients]
QUESTION = "Count from 1 to 5"
ANSWER = "1, 2, 3, 4, 5"
TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_response_is_created_retrieved_and_deleted(client: openai.OpenAI) -> None:
    response = client.responses.create(model="pagewire-demo", input=QUESTION, temperature=0)
    assert response.output_text == ANSWER and response.status == "completed" and response.error is None
    assert response.usage is not None and response.usage.output_tokens > 10
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert client.responses.retrieve(response.id).output_text == ANSWER
    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_streamed_events_are_numbered_and_have_the_text(client: openai.OpenAI) -> None:
    events = list(client.responses.create(model="pagewire-demo", input=QUESTION, temperature=0, stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == ANSWER
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.completed" and events[-1].response.output_text == ANSWER


def test_the_stream_helper_assembles_the_text(client: openai.OpenAI) -> None:
    for _ in range(20):  # on a busy machine many tokens may come in one event
        with client.responses.stream(model="pagewire-demo", input=QUESTION, temperature=0) as stream:
            snapshots = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
            final = stream.get_final_response()
        assert snapshots[-1] == ANSWER == final.output_text
        if len(snapshots) > 5:
            break
    assert len(snapshots) > 5


def test_a_conversation_continues_by_response_id_or_with_resent_items(client: openai.OpenAI) -> None:
    first = client.responses.create(model="pagewire-demo", input=QUESTION, temperature=0)
    second = client.responses.create(
        model="pagewire-demo", input="Count from 2 to 4", temperature=0, previous_response_id=first.id
    )
    assert second.previous_response_id == first.id and second.usage is not None and first.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens
    assert second.usage.input_tokens_details.cached_tokens > 0  # of the first turn
    resent = client.responses.create(  # as agents do that keep the conversation themselves
        model="pagewire-demo",
        input=[
            {"role": "user", "content": QUESTION},
            *[item.to_dict() for item in first.output],  # type: ignore[list-item]
            {"role": "user", "content": "Count from 2 to 4"},
        ],
        temperature=0,
        store=False,
    )
    assert resent.output_text == second.output_text
    assert resent.usage is not None and resent.usage.input_tokens == second.usage.input_tokens


def test_a_function_is_called_and_its_output_accepted(client: openai.OpenAI) -> None:
    question = "What is the weather in Paris?"
    response = client.responses.create(model="pagewire-demo", input=question, tools=[TOOL], temperature=0)
    (call,) = response.output
    assert (
        call.type == "function_call" and call.name == "get_weather" and json.loads(call.arguments) == {"city": "Paris"}
    )
    with client.responses.stream(model="pagewire-demo", input=question, tools=[TOOL], temperature=0) as stream:
        streamed = "".join(e.delta for e in stream if e.type == "response.function_call_arguments.delta")
        (again,) = stream.get_final_response().output
    assert again.type == "function_call" and again.arguments == streamed == call.arguments
    final = client.responses.create(
        model="pagewire-demo",
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}],
        previous_response_id=response.id,
        tools=[TOOL],
        temperature=0,
    )
    assert final.status == "completed" and final.output


def test_max_output_tokens_makes_a_response_incomplete(client: openai.OpenAI) -> None:
    short = client.responses.create(model="pagewire-demo", input=QUESTION, temperature=0, max_output_tokens=3)
    assert short.status == "incomplete" and short.incomplete_details is not None
    assert short.incomplete_details.reason == "max_output_tokens" and ANSWER.startswith(short.output_text)
    events = list(
        client.responses.create(
            model="pagewire-demo",
            input=QUESTION,
            temperature=0,
            max_output_tokens=3,
            stream=True,
            top_logprobs=2,
            include=["message.output_text.logprobs"],
        )
    )
    last = events[-1]
    assert last.type == "response.incomplete" and last.response.output_text == short.output_text
    part = last.response.output[0].content[0]  # type: ignore[union-attr, index]  # a message with text
    assert len(part.logprobs) == 3 and all(len(entry.top_logprobs) == 2 for entry in part.logprobs)  # type: ignore[union-attr,arg-type]


def test_many_concurrent_async_streams_are_correct(server: Server) -> None:
    async def ask(client: openai.AsyncOpenAI, last: int) -> str:
        async with client.responses.stream(
            model="pagewire-demo", input=f"Count from 1 to {last}", temperature=0, store=False
        ) as stream:
            return (await stream.get_final_response()).output_text

    async def scenario() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            return await asyncio.gather(*(ask(client, 3 + i % 5) for i in range(20)))

    assert asyncio.run(scenario()) == [", ".join(str(n) for n in range(1, 4 + i % 5)) for i in range(20)]


def test_errors_name_the_param_or_the_code(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="pagewire-demo", input="x", temperature=9)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="pagewire-demo", input="x", previous_response_id="resp_gone")
    assert caught.value.code == "previous_response_not_found"
    with pytest.raises(openai.NotFoundError) as missing:
        client.responses.create(model="gpt-4", input="x")
    assert missing.value.code == "model_not_found"


def post(server: Server, path: str, body: dict[str, object]) -> Any:
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.loads(response.read())


def test_detokenize_is_the_inverse_of_tokenize(server: Server, client: openai.OpenAI) -> None:
    text = "Count from 1 to 5 ü🙂 <|im_end|>"
    answer = post(server, "/tokenize", {"prompt": text, "return_token_strs": True})
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"]) and answer["max_model_len"] > 100
    assert post(server, "/detokenize", {"tokens": answer["tokens"]}) == {"prompt": text}
    messages = [{"role": "user", "content": QUESTION}]
    chat = client.chat.completions.create(model="pagewire-demo", messages=messages, temperature=0)  # type: ignore[arg-type]
    assert chat.usage is not None
    assert post(server, "/tokenize", {"messages": messages})["count"] == chat.usage.prompt_tokens
    assert json.loads(server.get("/ready")) == {"status": "ready"}
    server.wait_idle()
