"""A model whose chat template makes it reason, with a real server and real clients: the text before `</think>` is
reasoning, with and without streaming, and its tokens are counted as reasoning tokens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from pagewire.tools.servers import Server

pytestmark = pytest.mark.e2e
QUESTION = [{"role": "user", "content": "Count from 1 to 5"}]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content.split('</think>')[-1] }}"
    "<|im_end|>\n{% endfor %}<|im_start|>assistant\n{% if enable_thinking is not false %}<think>\n{% endif %}"
)


@pytest.fixture
def server(start: Callable[..., Server], tmp_path: Path) -> Server:
    """A server whose chat template opens the reasoning."""
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    return start("--chat-template", str(tmp_path / "chat.jinja")).wait_ready()


def test_text_before_the_end_tag_is_reasoning(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

        def ask(**more: object) -> Any:
            fields = {"model": "pagewire-demo", "messages": QUESTION, "temperature": 0, "max_tokens": 40, **more}
            return client.chat.completions.create(**fields)  # type: ignore[call-overload]

        answer = ask()
        message = answer.choices[0].message
        assert message.reasoning == message.reasoning_content and message.reasoning and not message.content
        assert answer.usage is not None and answer.usage.completion_tokens_details is not None
        assert answer.usage.completion_tokens_details.reasoning_tokens == answer.usage.completion_tokens
        streamed = [chunk.choices[0].delta for chunk in ask(stream=True)]
        assert "".join(getattr(delta, "reasoning", "") for delta in streamed) == message.reasoning
        assert not any(delta.content for delta in streamed)

        for disabled in (
            {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
            {"reasoning_effort": "none"},
        ):
            answer = ask(**disabled)
            assert answer.choices[0].message.content == "1, 2, 3, 4, 5"
            assert answer.usage is not None and answer.usage.completion_tokens_details is not None
            assert answer.usage.completion_tokens_details.reasoning_tokens == 0
        assert ask(reasoning_effort="low").choices[0].message.reasoning
        response = client.responses.create(
            model="pagewire-demo", input="Count from 1 to 5", temperature=0, reasoning={"effort": "none"}
        )
        assert response.output_text == "1, 2, 3, 4, 5"


def test_responses_have_reasoning_items(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    fields: Any = {"model": "pagewire-demo", "input": QUESTION, "temperature": 0, "max_output_tokens": 40}
    plain = client.responses.create(**fields)
    (item,) = plain.output
    assert item.type == "reasoning" and item.content and item.content[0].text and not plain.output_text
    assert plain.usage is not None and plain.usage.output_tokens_details.reasoning_tokens == plain.usage.output_tokens
    with client.responses.stream(**fields) as stream:  # raises when events are out of order
        kinds = [event.type for event in stream]
        (last,) = stream.get_final_response().output
    assert "response.reasoning_text.delta" in kinds and "response.output_text.delta" not in kinds
    assert last.type == "reasoning" and last.content is not None and last.content[0].text == item.content[0].text
    continued = client.responses.create(**{**fields, "input": "And on?", "previous_response_id": plain.id})
    listed = client.responses.input_items.list(continued.id, order="asc")
    assert [item.type for item in listed] == ["message", "message"], "reasoning without a message is not repeated"


@pytest.mark.clients
def test_messages_have_thinking_blocks(server: Server) -> None:
    anthropic: Any = pytest.importorskip("anthropic", reason="make test-clients installs it")
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        fields: Any = {"model": "pagewire-demo", "max_tokens": 40, "messages": QUESTION}
        fields["extra_body"] = {"temperature": 0}
        (block,) = client.messages.create(**fields).content
        assert block.type == "thinking" and block.thinking and block.signature == ""
        with client.messages.stream(**fields) as stream:
            kinds = [event.type for event in stream]
            (streamed,) = stream.get_final_message().content
        assert "thinking" in kinds and "signature" in kinds and streamed.thinking == block.thinking
        (text_block,) = client.messages.create(**fields, thinking={"type": "disabled"}).content
        assert (text_block.type, text_block.text) == ("text", "1, 2, 3, 4, 5")
        again = [*QUESTION, {"role": "assistant", "content": [block.to_dict()]}, *QUESTION]
        assert client.messages.create(**{**fields, "messages": again}).content
