"""The embedded demo models: their answers, and the consistency of their files."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pagewire import LLM, SamplingParams
from pagewire.tools.demo_model import conversations, evaluate, network, template
from pagewire.tools.demo_model.hybrid import HybridShape

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = [ROOT / "demo_model", ROOT / "demo_hybrid"]
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


@pytest.fixture(scope="module", params=FOLDERS, ids=lambda folder: folder.name)
def reference(request: pytest.FixtureRequest) -> evaluate.Reference:
    pytest.importorskip("transformers")
    return evaluate.Reference(request.param)


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


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_template_equals_those_of_jinja_and_transformers(folder: Path) -> None:
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
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


def test_the_engine_answers_as_transformers_does(reference: evaluate.Reference) -> None:
    rng = random.Random(3)
    chats = [conversations.held_out_chat(rng, kind) for kind in conversations.ALL_KINDS]
    asked = [conversations.Chat(chat.messages[:-1], chat.tools) for chat in chats]
    asked.append(evaluate.long_prompt(reference, rng, 700))
    expected = dict(reference.answers(asked))
    llm = LLM(str(reference.folder), dtype="float32", max_model_len=2048)
    params = SamplingParams(temperature=0, max_tokens=evaluate.MAX_ANSWER)
    for _ in range(2):  # the second time with prefixes from the cache
        for i, chat in enumerate(asked):
            (output,) = llm.chat(chat.messages, params, tools=chat.tools, use_tqdm=False)
            assert output.outputs[0].text == expected[i].text


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


@pytest.mark.parametrize(("folder", "num_bytes"), [(FOLDERS[0], 6_000_000), (FOLDERS[1], 4_100_000)])
def test_the_files_are_small(folder: Path, num_bytes: int) -> None:
    assert sum(file.stat().st_size for file in folder.iterdir()) <= num_bytes


def test_the_network_of_the_hybrid_is_that_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    made = network.Network(shape := HybridShape(context=256))
    for parameter in made.parameters():
        parameter.data = parameter.data.bfloat16().float()
    network.save_network(made, shape, tmp_path, eos=1, pad=0)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.randint(0, shape.vocabulary, (2, 150))  # more than two chunks
    cos, sin = (table[None, None, :150] for table in network.rotary_table(shape))
    with torch.inference_mode():
        logits = made(ids, cos, sin) @ made.embed_tokens.weight.T
        torch.testing.assert_close(logits, reference(ids).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("hybrid", [False, True])
def test_training_is_deterministic_from_its_seed(hybrid: bool, tmp_path: Path) -> None:
    small = ["--stop-after", "3", "--short-rows", "4", "--short-length", "64"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}  # the compiler only costs time here
    runs = []
    kind = ["--hybrid"] if hybrid else []
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        command = [sys.executable, "-m", "pagewire.tools.demo_model.train", "--out", str(tmp_path / name), *small]
        runs.append(subprocess.Popen([*command, *kind, "--seed", seed], env=environment, stderr=subprocess.DEVNULL))
    try:
        assert [run.wait(900) for run in runs] == [0, 0, 0]
    finally:
        for run in runs:
            run.kill()

    def files(name: str) -> list[bytes]:
        return [(tmp_path / name / file).read_bytes() for file in ("model.safetensors", "tokenizer.json")]

    assert files("a") == files("b") != files("c")
