"""The output of a model with random weights at temperature 1, from a real server, conforms to its constraint."""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import checkpoints
import httpx
import openai
import pytest
import vocabulary
from json_schemas import check_instance, make_schema
from waiting import until

from pagewire.tools.servers import Server

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).parents[2]
QUESTION = [{"role": "user", "content": "hi"}]
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 10}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Small weights give tokens similar probabilities, so that numbers and spaces end by themselves.
    changes: dict[str, Any] = {"initializer_range": 0.02, "max_position_embeddings": 4096}
    folder = checkpoints.make_checkpoint(tmp_path_factory.mktemp("structured"), "llama", **changes)
    return vocabulary.add_tokenizer(folder)


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("server"), str(folder), "--reasoning-parser", "qwen3") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300)


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    model = client.models.list().data[0].id
    # No reasoning, because a model with random weights would not end it.
    extra: dict[str, Any] = {"thinking_token_budget": 0, **fields.pop("extra_body", {})}
    fields = {
        "model": model,
        "messages": QUESTION,
        "temperature": 1,
        "max_tokens": 2000,
        "extra_body": extra,
        **fields,
    }
    return client.chat.completions.create(**fields)


@pytest.mark.long
@pytest.mark.slow
def test_output_conforms_to_300_random_schemas(server: Server) -> None:
    with httpx.Client(base_url=server.url, timeout=600) as http, ThreadPoolExecutor(16) as threads:

        def answer(seed: int) -> tuple[int, str, str]:
            schema = make_schema(seed)
            body = {
                "messages": QUESTION,
                "temperature": 1,
                "seed": seed,
                "max_tokens": 3000,
                "thinking_token_budget": 0,
                "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
            }
            response = http.post("/v1/chat/completions", json=body)
            assert response.status_code == 200, (seed, response.text)
            choice = response.json()["choices"][0]
            return seed, choice["finish_reason"], choice["message"]["content"]

        for seed, finish, text in threads.map(answer, range(300)):
            assert finish == "stop", (seed, text)
            check_instance(make_schema(seed), json.loads(text))


@pytest.mark.parametrize("stream", [True, False])
def test_output_conforms_to_a_choice_a_regex_a_grammar_and_bad_words(client: openai.OpenAI, stream: bool) -> None:
    def text_of(**extra: Any) -> str:
        answer = ask(client, extra_body=extra, stream=stream)
        if stream:
            return "".join(chunk.choices[0].delta.content or "" for chunk in answer)
        return str(answer.choices[0].message.content)

    for _ in range(4):
        assert text_of(structured_outputs={"choice": ["red", "grün"]}) in ("red", "grün")
        assert re.fullmatch(r"[a-c]{2,5}-[0-9]{3}", text_of(guided_regex=r"[a-c]{2,5}-\d{3}"))
        assert re.fullmatch(r"(\(\+)*x\)*", text_of(guided_grammar='start: "(+" start ")" | "x"'))
        assert "e" not in text_of(guided_regex="[a-g]{20}", bad_words=["e"])


def test_steps_run_while_the_masks_of_their_rows_are_made(server: Server, client: openai.OpenAI) -> None:
    """Alone, a constrained request delays no other, so its rows may be late."""
    name = "pagewire:step_mask_wait_time_seconds_count"

    def num_late() -> float:
        return server.metric(name)

    def has_waited() -> bool:
        """The masks of all its steps may come before the forward passes end."""
        assert len(ask(client, extra_body={"guided_regex": "[a-z]{40}"}).choices[0].message.content) == 40
        return num_late() > before

    before = num_late()
    until(has_waited, "a step that waited for masks is reported", 60)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
@pytest.mark.parametrize("stream", [True, False])
def test_forced_tool_calls_conform_to_their_schemas(client: openai.OpenAI, choice: Any, stream: bool) -> None:
    for seed in range(6):
        answer = ask(client, tools=TOOLS, tool_choice=choice, stream=stream, seed=seed)
        calls: list[list[str]] = []
        if stream:
            for chunk in answer:
                for call in chunk.choices[0].delta.tool_calls or ():
                    if call.function.name:
                        calls.append([call.function.name, ""])
                    calls[-1][1] += call.function.arguments or ""
            assert chunk.choices[0].finish_reason == "tool_calls"
        else:
            assert answer.choices[0].finish_reason == "tool_calls" and answer.choices[0].message.content is None
            calls = [[call.function.name, call.function.arguments] for call in answer.choices[0].message.tool_calls]
        assert len(calls) == 1 if choice != "required" else 1 <= len(calls) <= 16
        for name, arguments in calls:
            if name == "weather":
                check_instance(WEATHER, json.loads(arguments))
            else:
                assert (name, json.loads(arguments)) == ("now", {}) and choice == "required"


def test_tool_calls_have_the_format_of_a_family_from_a_module(
    start: Callable[..., Server], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(ROOT / "docs" / "examples" / "tagged_calls.py", tmp_path / "my_family.py")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    flags = ("--tool-call-parser", "my_family:FAMILY", "--reasoning-parser", "my_family:FAMILY")
    server = start(str(folder), *flags).wait_ready()
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300)
    message = ask(client, tools=TOOLS[:1], tool_choice="required", parallel_tool_calls=False).choices[0].message
    assert [call.function.name for call in message.tool_calls] == ["weather"]
    check_instance(WEATHER, json.loads(message.tool_calls[0].function.arguments))
    constrained = ask(client, tools=TOOLS, tool_choice="auto", extra_body={"guided_regex": r"<call:now>\{\}</call>"})
    assert [call.function.name for call in constrained.choices[0].message.tool_calls] == ["now"]


def test_a_constraint_applies_after_the_reasoning(start: Callable[..., Server], folder: Path, tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text(vocabulary.CHAT_TEMPLATE + "<think>\n")
    server = start(str(folder), "--chat-template", str(tmp_path / "chat.jinja"), "--reasoning-parser", "qwen3")
    client = openai.OpenAI(base_url=f"{server.wait_ready().url}/v1", api_key="none", max_retries=0, timeout=300)
    for budget in (0, 5, 40):
        extra: dict[str, Any] = {"structured_outputs": {"choice": ["yes", "no"]}, "thinking_token_budget": budget}
        answer = ask(client, extra_body=extra)
        assert answer.choices[0].message.content in ("yes", "no")
        num_reasoning = answer.usage.completion_tokens_details.reasoning_tokens
        assert num_reasoning <= budget + 4 + len("</think>"), "a character and the tag that ends it"
        free = {"thinking_token_budget": budget, "ignore_eos": True}  # otherwise it might end during the reasoning
        answer = ask(client, extra_body=free, max_tokens=80)
        assert answer.usage.completion_tokens_details.reasoning_tokens <= budget + len("</think>")
        assert answer.choices[0].message.content
    letters = list("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
    answer = ask(client, extra_body={"bad_words": letters}, max_tokens=80)
    content = re.sub(r"<unused\d+>", "", answer.choices[0].message.content)  # these tokens' names contain letters
    assert content and not set(letters) & set(content)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "strng"}, "Invalid type"),
        ({"not": {}}, "not"),
        ({"$ref": "#"}, "no text"),
        ({"type": "integer", "multipleOf": 9_999_991, "minimum": 1, "maximum": 10**15}, "fuel"),
    ],
)
def test_an_unenforceable_schema_is_a_400(client: openai.OpenAI, schema: Any, words: str) -> None:
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for stream in (True, False):
        with pytest.raises(openai.BadRequestError, match=words):
            ask(client, response_format=format, stream=stream)
