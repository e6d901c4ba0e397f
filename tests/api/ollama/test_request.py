"""What Ollama's requests become: messages, sampling parameters, formats, and what is refused."""

import json
from typing import Any

import pytest
from harness import FakeEngine, request

from pagewire.config.config import Infill
from pagewire.ipc.messages import ChatPrompt, Submit, TextPrompt

INFILL = Infill(prefix="<P>", suffix="<S>", middle="<M>", stop_ids=(7,))


def submit(path: str, settings: dict[str, Any] | None = None, **fields: Any) -> Submit:
    engine = FakeEngine()
    answer = request(engine, path, {"model": "demo", "stream": False, **fields}, **(settings or {}))
    assert answer.status == 200, answer.body
    return engine.submits[0]


def messages(*given: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    prompt = submit("/api/chat", messages=list(given), **fields).prompt
    assert isinstance(prompt, ChatPrompt)
    found: list[dict[str, Any]] = json.loads(prompt.messages)
    return found


def error(path: str, **fields: Any) -> str:
    engine = FakeEngine()
    answer = request(engine, path, {"model": "demo", "stream": False, **fields})
    assert answer.status == 400 and not engine.submits
    return str(answer.json["error"])


def test_options_are_sampling_parameters() -> None:
    options = {
        "temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "seed": 3, "stop": ["x", "y"], "num_predict": 9,
        "repeat_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.25, "num_ctx": 4096, "num_gpu": 1,
        "mirostat": 0, "typical_p": 1.0, "unknown": [],
    }  # fmt: skip
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    generate = {"prompt": "hi"}
    for path, question in (
        ("/api/chat", chat),
        ("/api/generate", generate),
        ("/api/generate", generate | {"raw": True}),
    ):
        found = submit(path, options=options, **question)
        sampling = found.sampling
        assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 7, 0.9, 0.1)
        assert (sampling.seed, sampling.repetition_penalty) == (3, 1.2)
        assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, 0.25)
        assert found.limits.max_tokens == 9 and found.text.stop == ("x", "y")


@pytest.mark.parametrize("num_predict", [None, -1, -2, 0])
def test_without_a_bound_the_output_is_as_long_as_fits(num_predict: int | None) -> None:
    for question in ({"prompt": "hi"}, {"prompt": "hi", "raw": True}):
        assert submit("/api/generate", options={"num_predict": num_predict}, **question).limits.max_tokens is None


def test_values_that_mean_off_are_off() -> None:
    options = {"seed": -1, "top_k": -1, "repeat_last_n": 0, "repeat_penalty": 1.5}
    sampling = submit("/api/generate", prompt="hi", options=options).sampling
    assert sampling.top_k == 0 and sampling.repetition_penalty == 1.0 and sampling.seed >= 0
    assert submit("/api/generate", prompt="hi", options={"top_p": 0}).sampling.top_k == 1


@pytest.mark.parametrize("options", [{"mirostat": 2}, {"typical_p": 0.5}, {"tfs_z": 0.5}])
def test_other_samplers_are_refused(options: dict[str, float]) -> None:
    (name,) = options
    assert error("/api/generate", prompt="hi", options=options).startswith(f"options.{name} is not supported")


def test_a_prompt_is_a_question_and_raw_is_a_text() -> None:
    prompt = submit("/api/generate", prompt="hi", system="Be kind.").prompt
    assert isinstance(prompt, ChatPrompt)
    assert [m["content"] for m in json.loads(prompt.messages)] == ["Be kind.", "hi"]
    raw = submit("/api/generate", prompt="hi", raw=True)
    assert isinstance(raw.prompt, TextPrompt) and raw.prompt.text == "hi"


def test_a_suffix_is_infilled() -> None:
    found = submit("/api/generate", {"infill": INFILL}, prompt="def f(", suffix="return 1")
    assert isinstance(found.prompt, TextPrompt) and found.prompt.text == "<P>def f(<S>return 1<M>"
    assert found.limits.stop_token_ids == (7,)
    assert "no tokens for infilling" in error("/api/generate", prompt="a", suffix="b")


def test_a_tool_loop() -> None:
    calls = [{"function": {"name": "one", "arguments": {"x": 1}}}, {"function": {"name": "two", "arguments": "{}"}}]
    found = messages(
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": calls},
        {"role": "tool", "content": "2nd", "tool_name": "two"},
        {"role": "tool", "content": "1st"},
    )
    assert [m["role"] for m in found] == ["user", "assistant", "tool", "tool"]
    first, second = (call["id"] for call in found[1]["tool_calls"])
    assert [m["tool_call_id"] for m in found[2:]] == [second, first]
    assert found[1]["tool_calls"][0]["function"] == {"name": "one", "arguments": '{"x":1}'}
    assert found[1]["reasoning_content"] == "hm"


def test_a_last_message_of_the_assistant_goes_on() -> None:
    prompt = submit(
        "/api/chat", messages=[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "One,"}]
    ).prompt
    assert isinstance(prompt, ChatPrompt) and prompt.continue_final_message and not prompt.add_generation_prompt


def test_formats_are_enforced() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    for path, question in (("/api/chat", chat), ("/api/generate", {"prompt": "hi", "raw": True})):
        assert submit(path, format="", **question).constraint is None
        either = [submit(path, format=format, **question).constraint for format in ("json", schema)]
        assert all(either) and either[0] != either[1]
    assert error("/api/chat", format="xml", **chat).startswith("format must be")


def test_thinking_is_switched() -> None:
    def kwargs(think: Any) -> Any:
        question = [{"role": "user", "content": "hi"}]
        prompt = submit("/api/chat", {"reasoning_parser": "qwen3"}, messages=question, think=think).prompt
        assert isinstance(prompt, ChatPrompt)
        return json.loads(prompt.template_kwargs or b"{}")

    assert kwargs(None) == {} and kwargs(False)["enable_thinking"] is False
    assert kwargs(True)["enable_thinking"] is True and kwargs("high")["reasoning_effort"] == "high"
    assert "low, medium, high" in error("/api/chat", messages=[{"role": "user", "content": "hi"}], think="much")


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/api/generate", {"prompt": "hi", "images": ["aGk="]}),
        ("/api/chat", {"messages": [{"role": "user", "content": "hi", "images": ["aGk="]}]}),
    ],
)
def test_images_are_one_sentence(path: str, fields: dict[str, Any]) -> None:
    assert error(path, **fields).endswith("images is not supported: this model takes text only.")


@pytest.mark.parametrize("field", [{"context": [1, 2]}, {"template": "{{ .Prompt }}"}])
def test_what_would_change_the_prompt_is_refused(field: dict[str, Any]) -> None:
    assert error("/api/generate", prompt="hi", **field).startswith(f"{next(iter(field))} is not supported")
