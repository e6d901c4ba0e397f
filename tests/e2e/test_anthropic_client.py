"""The real `anthropic` client, with and without streaming, against a real server."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from waiting import until

from pagewire.tools.servers import Server

anthropic: Any = pytest.importorskip("anthropic", reason="make test-clients installs it")

pytestmark = [pytest.mark.e2e, pytest.mark.clients]
MODEL = "pagewire-demo"
QUESTION: Any = [{"role": "user", "content": "Count from 1 to 5"}]
ANSWER = "1, 2, 3, 4, 5"
TOOL: Any = {
    "name": "get_weather",
    "description": "Get the weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def greedy(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 60, "messages": QUESTION, "extra_body": {"temperature": 0}, **fields}


def test_a_message_is_created_and_its_tokens_are_counted(client: Any) -> None:
    message = client.messages.create(**greedy())
    assert [block.text for block in message.content] == [ANSWER]
    assert message.stop_reason == "end_turn" and message.usage.output_tokens > 10 and message._request_id
    counted = client.messages.count_tokens(model=MODEL, messages=QUESTION)
    assert counted.input_tokens == message.usage.input_tokens + message.usage.cache_read_input_tokens


def test_a_message_is_streamed(client: Any) -> None:
    with client.messages.stream(**greedy()) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == ANSWER == final.content[0].text and final.stop_reason == "end_turn"
    assert final.usage.output_tokens > 10
    types = [event.type for event in client.messages.create(**greedy(stream=True))]
    assert types[:2] == ["message_start", "content_block_start"] and types[-2:] == ["message_delta", "message_stop"]


def test_max_tokens_stop_sequences_and_a_prefilled_answer(client: Any) -> None:
    short = client.messages.create(**greedy(max_tokens=3))
    assert short.stop_reason == "max_tokens" and short.usage.output_tokens == 3
    stopped = client.messages.create(**greedy(stop_sequences=[", 4"]))
    assert (stopped.content[0].text, stopped.stop_reason, stopped.stop_sequence) == (
        "1, 2, 3",
        "stop_sequence",
        ", 4",
    )
    continued = client.messages.create(**greedy(messages=[*QUESTION, {"role": "assistant", "content": "1, 2,"}]))
    assert continued.content[0].text.strip() == "3, 4, 5"


def test_tool_use_tool_results_and_a_system_prompt(client: Any) -> None:
    question: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
    message = client.messages.create(**greedy(messages=question, tools=[TOOL]))
    (block,) = message.content
    assert message.stop_reason == "tool_use" and (block.name, block.input) == ("get_weather", {"city": "Paris"})
    with client.messages.stream(**greedy(messages=question, tools=[TOOL])) as stream:
        assert stream.get_final_message().content[0].input == {"city": "Paris"}
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "sunny"}
    answer = client.messages.create(
        **greedy(
            system=[{"type": "text", "text": "You are brief.", "cache_control": {"type": "ephemeral"}}],
            messages=[
                *question,
                {"role": "assistant", "content": [block.to_dict()]},
                {"role": "user", "content": [result]},
            ],
            tools=[TOOL],
        )
    )
    assert answer.role == "assistant" and answer.usage.input_tokens + answer.usage.cache_read_input_tokens > 20


def test_errors_raise_the_exceptions_of_the_client(client: Any) -> None:
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        client.messages.create(**greedy(model="claude"))
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].content\[0\]") as caught:
        image: Any = {"type": "image", "source": {"type": "url", "url": "http://x"}}
        client.messages.create(**greedy(messages=[{"role": "user", "content": [image]}]))
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    for words, length in ((20_000, r"\d{5}"), (1_000_000, "more than 8192")):  # the longer one is not encoded
        with pytest.raises(anthropic.BadRequestError, match=f"prompt is too long: {length} tokens > 8192 maximum"):
            client.messages.create(**greedy(messages=[{"role": "user", "content": "word " * words}]))
    tool = {**TOOL, "input_schema": {"type": "object", "properties": {"city": {"not": {}}}}}
    with pytest.raises(anthropic.BadRequestError, match=r"tools\[0\].input_schema .* cannot be enforced"):
        client.messages.create(**greedy(tools=[tool], tool_choice={"type": "any"}))


def test_optional_beta_fields_are_accepted_and_unsupported_edits_refused(client: Any) -> None:
    clearing: Any = {
        "edits": [
            {"type": "clear_thinking_20251015", "keep": "all"},
            {"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": 3000}},
        ]
    }
    fields = greedy(
        betas=["context-management-2025-06-27"],
        context_management=clearing,
        cache_control={"type": "ephemeral"},
        thinking={"type": "adaptive"},
        service_tier="auto",
    )
    message = client.beta.messages.create(**fields)
    assert message.content[0].text == ANSWER
    with client.beta.messages.stream(**fields) as stream:
        assert stream.get_final_message().content[0].text == ANSWER
    counted = client.beta.messages.count_tokens(model=MODEL, messages=QUESTION, context_management=clearing)
    assert counted.input_tokens == message.usage.input_tokens + message.usage.cache_read_input_tokens
    with pytest.raises(anthropic.BadRequestError, match=r"context_management.edits\[0\].type 'compact_20260112'"):
        client.beta.messages.create(**greedy(context_management={"edits": [{"type": "compact_20260112"}]}))


def test_the_api_key_is_checked(start: Callable[..., Server]) -> None:
    server = start("--api-key", "secret").wait_ready()
    with anthropic.Anthropic(base_url=server.url, api_key="secret") as client:
        assert client.messages.create(**greedy()).content
    stranger = anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0)
    with stranger, pytest.raises(anthropic.AuthenticationError):
        stranger.messages.create(**greedy())


def test_a_batch_of_messages_is_answered(client: Any) -> None:
    params = {"model": MODEL, "max_tokens": 60, "messages": QUESTION, "temperature": 0}
    requests = [{"custom_id": "good", "params": params}, {"custom_id": "bad", "params": params | {"max_tokens": 0}}]
    batch = client.messages.batches.create(requests=requests)
    until(lambda: client.messages.batches.retrieve(batch.id).processing_status == "ended", "the batch has ended", 60)
    good, bad = client.messages.batches.results(batch.id)
    assert (good.custom_id, good.result.message.content[0].text) == ("good", ANSWER)
    assert (bad.custom_id, bad.result.type) == ("bad", "errored")
    assert client.messages.batches.delete(batch.id).id == batch.id
