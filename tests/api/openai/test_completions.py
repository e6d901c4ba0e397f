"""Completions: prompts of every kind, echo, log-probabilities, batches."""

from typing import Any

import pytest
from harness import FakeEngine, complete

from pagewire.ipc.messages import IdsPrompt, TextPrompt, bytes_to_ids


def test_plain() -> None:
    body = complete(FakeEngine()).json
    assert body["id"].startswith("cmpl-") and body["object"] == "text_completion" and body["model"] == "demo"
    assert body["choices"] == [
        {"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop", "stop_reason": None,
         "token_ids": None, "prompt_token_ids": None, "prompt_logprobs": None}
    ]  # fmt: skip
    assert body["usage"]["total_tokens"] == 8


def test_stream() -> None:
    *events, done = complete(FakeEngine(), stream=True).events
    assert done == "[DONE]"
    assert [e["choices"][0]["text"] for e in events] == ["Hel", "lo"]
    assert [e["choices"][0]["finish_reason"] for e in events] == [None, "stop"]
    assert len({(e["id"], e["created"]) for e in events}) == 1


def test_stream_with_usage() -> None:
    *events, usage, _ = complete(FakeEngine(), stream=True, stream_options={"include_usage": True}).events
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 5
    assert all(e["usage"] is None for e in events)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("abc", ["abc"]),
        ("", [""]),
        (["a", "b"], ["a", "b"]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_prompts(prompt: Any, expected: list[Any]) -> None:
    engine = FakeEngine()
    complete(engine, prompt=prompt, add_special_tokens=False)
    got = [
        submit.prompt.text if isinstance(submit.prompt, TextPrompt) else bytes_to_ids(submit.prompt.ids).tolist()
        for submit in engine.submits
        if isinstance(submit.prompt, TextPrompt | IdsPrompt)
    ]
    assert got == expected
    assert engine.submits[0].limits.max_tokens == 16


def test_choices_are_prompt_major() -> None:
    engine = FakeEngine(["x"])
    body = complete(engine, prompt=["a", "b", "c"], n=2, echo=True).json
    assert [c["text"] for c in body["choices"]] == ["ax", "ax", "bx", "bx", "cx", "cx"]
    assert [c["index"] for c in body["choices"]] == list(range(6))
    assert [submit.rid for submit in engine.submits] == [0, 2, 4]
    assert body["usage"]["prompt_tokens"] == 9 and body["usage"]["completion_tokens"] == 6
    assert len({submit.sampling.seed for submit in engine.submits}) == 3


def test_a_seed_is_the_same_for_every_prompt() -> None:
    engine = FakeEngine()
    complete(engine, prompt=["a", "a"], seed=7)
    assert [submit.sampling.seed for submit in engine.submits] == [7, 7]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("prompt", ["abc", [97, 98, 99]])
def test_echo_with_logprobs(stream: bool, prompt: Any) -> None:
    answer = complete(FakeEngine(["de", "f"]), prompt=prompt, echo=True, logprobs=1, stream=stream)
    choices = [e["choices"][0] for e in answer.events[:-1]] if stream else answer.json["choices"]
    assert "".join(c["text"] for c in choices) == "abcdef"
    logprobs: dict[str, list[Any]] = {}
    for choice in choices:
        for name, column in choice["logprobs"].items():
            logprobs.setdefault(name, []).extend(column)
    assert logprobs["tokens"] == list("abcdef")
    assert logprobs["token_logprobs"] == [None, *[-0.5] * 5]
    assert logprobs["top_logprobs"] == [None, *({char: -0.5} for char in "bcdef")]
    assert logprobs["text_offset"] == [0, 1, 2, 3, 4, 5]


def test_scoring_without_output() -> None:
    engine = FakeEngine([""], finish="length")
    choice = complete(engine, echo=True, logprobs=2, max_tokens=0).json["choices"][0]
    assert choice["text"] == "abc" and choice["logprobs"]["tokens"] == ["a", "b", "c"]
    assert choice["logprobs"]["top_logprobs"][1] == {"b": -0.5, "~": -2.0}
    assert engine.submits[0].limits.max_tokens == 0 and engine.submits[0].sampling.prompt_logprobs == 2


def test_logprobs_of_the_output_only() -> None:
    engine = FakeEngine(["hé"])
    logprobs = complete(engine, logprobs=0).json["choices"][0]["logprobs"]
    assert logprobs == {
        "tokens": ["h", "é"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"h": -0.5}, {"é": -0.5}],
        "text_offset": [0, 1],
    }
    assert engine.submits[0].sampling.prompt_logprobs is None


@pytest.mark.parametrize("stream", [True, False])
def test_token_ids(stream: bool) -> None:
    answer = complete(FakeEngine(), prompt=[97, 98], return_token_ids=True, stream=stream)
    choices = [e["choices"][0] for e in answer.events[:-1]] if stream else answer.json["choices"]
    assert choices[0]["prompt_token_ids"] == [97, 98]
    assert [i for c in choices for i in c["token_ids"]] == list(map(ord, "Hello"))
    assert "".join(c["text"] for c in choices) == "Hello"


def test_stop_strings_are_submitted() -> None:
    engine = FakeEngine(stop_reason="!")
    body = complete(engine, stop=["!", "?"], include_stop_str_in_output=True, skip_special_tokens=False).json
    spec = engine.submits[0].text
    assert spec.stop == ("!", "?") and spec.include_stop and not spec.skip_special_tokens
    assert body["choices"][0]["stop_reason"] == "!"


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("value", [-1, 21])
def test_more_candidates_than_twenty_are_refused(name: str, value: int) -> None:
    answer = complete(FakeEngine(), **{name: value})
    assert answer.status == 400 and answer.error["param"] == name
