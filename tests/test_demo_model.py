"""The embedded demo model: its answers, and the consistency of its files."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pagewire.tools.demo_model import conversations, evaluate, template

FOLDER = Path(__file__).resolve().parents[1] / "demo_model"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather <now> of a \"city\" & 'town'",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer", "default": 1}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def reference() -> evaluate.Reference:
    pytest.importorskip("transformers")
    return evaluate.Reference(FOLDER)


def ask(reference: evaluate.Reference, *texts: str, tools: list[Any] | None = None) -> str:
    """The answer to alternating user and assistant texts. Asserts that generation has stopped."""
    roles = ("user", "assistant")
    messages = [{"role": roles[index % 2], "content": content} for index, content in enumerate(texts)]
    answer = reference.answer(conversations.Chat(messages, tools))
    assert answer.stopped
    return answer.text


def chats_of_all_sorts() -> list[tuple[list[dict[str, Any]], list[Any] | None]]:
    rng = random.Random(3)
    sampled = [conversations.training_chat(rng) for _ in range(100)]
    call = {"function": {"name": "get_weather", "arguments": {"city": "Pârîs", "days": [1.5, None]}}}
    call_as_text = {"function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
    parts = [{"type": "text", "text": "Hello, "}, {"type": "text", "text": "you"}]
    special: list[dict[str, Any]] = [
        {"role": "system", "content": parts},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [call, call_as_text]},
        {"role": "tool", "content": '{"weather": "sunny"}', "tool_call_id": "x"},
        {"role": "assistant", "content": "Sunny.", "tool_calls": [call]},
    ]
    return [
        *((chat.messages, chat.tools) for chat in sampled),
        (special, [WEATHER, WEATHER]),
        (special, None),
        (special[1:], [WEATHER]),
    ]


def test_template_equals_those_of_jinja_and_transformers() -> None:
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    text = json.loads((FOLDER / "tokenizer_config.json").read_text())["chat_template"]
    assert text == template.CHAT_TEMPLATE
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    plain = environment.from_string(text)
    for messages, tools in chats_of_all_sorts():
        for prompt in (False, True):
            expected = template.render(messages, tools, prompt)
            assert expected == plain.render(messages=messages, tools=tools, add_generation_prompt=prompt)
            assert expected == tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=prompt, tokenize=False
            )


def test_template_renders_tools_calls_and_results() -> None:
    messages, tools = chats_of_all_sorts()[-3]
    head = json.dumps(WEATHER)
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Pârîs", "days": [1.5, null]}}\n</tool_call>'
    call_as_text = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    assert template.render(messages, tools, True) == (
        "<|im_start|>system\nHello, you\n\n# Tools\nYou may call these functions:\n<tools>\n"
        f"{head}\n{head}\n</tools>\nTo call one, answer with its name and arguments as JSON inside "
        "<tool_call></tool_call>.<|im_end|>\n"
        "<|im_start|>user\nHello, you<|im_end|>\n"
        f"<|im_start|>assistant\n{call}\n{call_as_text}<|im_end|>\n"
        '<|im_start|>tool\n<tool_response>\n{"weather": "sunny"}\n</tool_response><|im_end|>\n'
        f"<|im_start|>assistant\nSunny.\n{call}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_training_chats_contain_no_held_out_questions() -> None:
    first = conversations.training_chat(random.Random(5))
    assert first == conversations.training_chat(random.Random(5))
    rng = random.Random(9)
    held_out = {
        conversations.held_out_chat(rng, kind).messages[-2]["content"]
        for kind in ("addition", "echo", "capital", "greeting")
        for _ in range(50)
    }
    for _ in range(2000):
        for message in conversations.training_chat(rng).messages:
            assert message["role"] != "user" or message["content"] not in held_out


@pytest.mark.long
def test_held_out_accuracy(reference: evaluate.Reference) -> None:
    scores = evaluate.evaluate(reference, per_kind=10, seed=11)
    assert set(scores) == set(conversations.ALL_KINDS)
    total = evaluate.total_of(scores)
    wrong = {kind: score.wrong for kind, score in scores.items() if score.wrong}
    assert total.accuracy >= 0.95, wrong


def test_it_says_what_it_is(reference: evaluate.Reference) -> None:
    assert "demo model" in ask(reference, "Who are you?")
    assert "demo model" in ask(reference, "hello!")
    for question in ("What is Pagewire?", "what is pagewire?"):
        assert "LLM serving engine" in ask(reference, question)


def test_it_calls_a_tool(reference: evaluate.Reference) -> None:
    answer = ask(reference, "What is the weather in Lisbon?", tools=[WEATHER])
    assert answer.startswith("<tool_call>\n") and answer.endswith("\n</tool_call>")
    call = json.loads(answer.removeprefix("<tool_call>").removesuffix("</tool_call>"))
    assert call["name"] == "get_weather"
    assert call["arguments"]["city"] == "Lisbon"
    assert "demo model" in ask(reference, "Hello!", tools=[WEATHER])


def test_it_remembers_a_name(reference: evaluate.Reference) -> None:
    earlier = ("My name is Bolu", "Nice to meet you, Bolu!", "What is 2 + 2?", "2 + 2 = 4")
    assert ask(reference, *earlier, "What is my name?") == "Your name is Bolu."


def test_it_answers_after_a_long_chat(reference: evaluate.Reference) -> None:
    chat = evaluate.long_prompt(reference, random.Random(4), 3000)
    question = {"role": "user", "content": "What is 3 + 4?"}
    answer = reference.answer(conversations.Chat([*chat.messages, question]))
    assert answer == evaluate.Answer("3 + 4 = 7", True)


def test_the_files_are_at_most_6_mb() -> None:
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= 6_000_000


@pytest.mark.long
@pytest.mark.slow
def test_training_is_deterministic_from_its_seed(tmp_path: Path) -> None:
    small = ["--stop-after", "3", "--short-rows", "4", "--short-length", "64"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}  # the compiler only costs time here
    runs = []
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        command = [sys.executable, "-m", "pagewire.tools.demo_model.train", "--out", str(tmp_path / name), *small]
        runs.append(subprocess.Popen([*command, "--seed", seed], env=environment, stderr=subprocess.DEVNULL))
    assert [run.wait(120) for run in runs] == [0, 0, 0]

    def files(name: str) -> list[bytes]:
        return [(tmp_path / name / file).read_bytes() for file in ("model.safetensors", "tokenizer.json")]

    assert files("a") == files("b") != files("c")
