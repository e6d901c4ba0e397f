"""A model that its template makes reason, through real processes and the real client: what is said before `</think>` is
reasoning, streamed and not, and counts as such."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from servers import Server

pytestmark = pytest.mark.e2e
QUESTION = [{"role": "user", "content": "Count from 1 to 5"}]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content.split('</think>')[-1] }}"
    "<|im_end|>\n{% endfor %}<|im_start|>assistant\n{% if enable_thinking is not false %}<think>\n{% endif %}"
)


def test_what_the_template_makes_a_model_think(start: Callable[..., Server], tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    server = start("--chat-template", str(tmp_path / "chat.jinja")).wait_ready()
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)

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

    answer = ask(extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    assert answer.choices[0].message.content == "1, 2, 3, 4, 5"
    assert answer.usage is not None and answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0
