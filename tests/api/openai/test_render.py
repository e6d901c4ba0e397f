"""The render endpoints: what they say of a request, read as llm-d reads it, and sent on to generate.

llm-d/llm-d-router of 2026-08-21 (ebab687, `…/dataproducer/tokenizer/vllm_http.go`, `pkg/coordinator/steps/render.go`)
reads an object with `token_ids` for a chat, and an array with an element for each prompt of a completion.
"""

from typing import Any

import pytest
from harness import Answer, FakeEngine, request

from pagewire.ipc.messages import IdsPrompt, bytes_to_ids

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
PARAMS: dict[str, Any] = {
    "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 3, "stop": ["x"], "stop_token_ids": [4],
    "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.5, "logit_bias": {"5": 1.0},
    "max_tokens": 9, "min_tokens": 2, "ignore_eos": True, "bad_words": ["no"], "allowed_token_ids": [1, 2],
    "skip_special_tokens": False, "include_stop_str_in_output": True, "n": 2, "cache_salt": "s", "priority": 4,
}  # fmt: skip


def render(path: str, body: dict[str, Any]) -> Answer:
    engine = FakeEngine()
    answer = request(engine, f"{path}/render", body)
    assert not engine.submits, "nothing is generated"
    return answer


def _first(rendered: Any) -> Any:
    """That of the first prompt."""
    return rendered[0] if isinstance(rendered, list) else rendered


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"prompt": "abc"}),
        ("/v1/completions", {"prompt": [97, 98, 99]}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {**CHAT, "max_tokens": 5}),
    ],
)
def test_generate_continues_what_was_rendered_as_if_it_had_been_sent_at_once(path: str, body: dict[str, Any]) -> None:
    direct, again = FakeEngine(), FakeEngine()
    body = body if path in ("/v1/responses", "/v1/messages") else {**body, **PARAMS}
    assert request(direct, path, body).status == 200
    rendered = _first(render(path, body).json)
    assert rendered["token_ids"] and all(isinstance(one, int) for one in rendered["token_ids"])
    answer = request(again, "/inference/v1/generate", rendered)
    assert answer.status == 200, answer.error
    (was,), (now,) = direct.submits, again.submits
    assert isinstance(now.prompt, IdsPrompt) and list(bytes_to_ids(now.prompt.ids)) == rendered["token_ids"]
    for name in ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "logit_bias", "allowed_token_ids"):
        assert getattr(now.sampling, name) == getattr(was.sampling, name), name
    if "seed" in body:
        assert now.sampling.seed == was.sampling.seed
    assert (now.limits, now.n, now.bad_words, now.salt) == (was.limits, was.n, was.bad_words, was.salt)
    assert (now.priority, now.text.stop, now.text.skip_special_tokens) == (
        was.priority, was.text.stop, was.text.skip_special_tokens
    )  # fmt: skip


def test_each_prompt_is_an_element() -> None:
    rendered = render("/v1/completions", {"prompt": ["ab", "c"]}).json
    assert [[chr(one) for one in each["token_ids"]] for each in rendered] == [["a", "b"], ["c"]]
    assert all(each["model"] == "demo" for each in rendered)


def test_a_prompt_is_truncated_or_too_long_as_it_would_be() -> None:
    cut = render("/v1/completions", {"prompt": "abcdef", "truncate_prompt_tokens": 2}).json
    assert cut[0]["token_ids"] == [ord("e"), ord("f")]
    cut = render("/v1/completions", {"prompt": "a" * 300, "truncate_prompt_tokens": -1, "max_tokens": 28}).json
    assert len(cut[0]["token_ids"]) == 100
    answer = render("/v1/completions", {"prompt": "a" * 200})
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")


def test_an_empty_prompt_is_refused_as_it_would_be() -> None:
    for prompt in ("", ["a", ""]):
        answer = render("/v1/completions", {"prompt": prompt})
        assert (answer.status, answer.error["message"]) == (400, "The prompt is empty.")


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/v1/completions", {"prompt": "a", "n": 1, "best_of": 3}, "best_of"),
        ("/v1/completions", {"prompt": "a", "use_beam_search": True, "n": 2}, "use_beam_search"),
        ("/v1/completions", {"prompt": "a", "echo": True}, "echo"),
        ("/v1/completions", {"prompt": "a", "resume_token_ids": [[98]]}, "resume_token_ids"),
        ("/v1/chat/completions", {**CHAT, "use_beam_search": True}, "use_beam_search"),
        ("/v1/chat/completions", {**CHAT, "echo": True}, "echo"),
        ("/v1/chat/completions", {**CHAT, "n": 2, "resume_token_ids": [[98], [99]]}, "resume_token_ids"),
    ],
)
@pytest.mark.parametrize("settings", [{}, {"runner_plugin": "module:Class"}])
def test_what_a_rendered_request_cannot_say_is_refused_later_by_name(
    path: str, body: dict[str, Any], name: str, settings: dict[str, Any]
) -> None:
    rendered = _first(render(path, body).json)
    assert rendered["sampling_params"].get("n", 1) == body.get("n", 1) and "logprobs" not in rendered["sampling_params"]
    answer = request(FakeEngine(), "/inference/v1/generate", rendered, **settings)
    assert (answer.status, answer.error["param"]) == (400, f"sampling_params.extra_args.{name}")


def test_a_best_of_that_is_n_is_no_more_than_n() -> None:
    engine = FakeEngine()
    (rendered,) = render("/v1/completions", {"prompt": "a", "n": 2, "best_of": 2, "logprobs": 3}).json
    assert request(engine, "/inference/v1/generate", rendered).status == 200
    (submit,) = engine.submits
    assert (submit.n, submit.sampling.logprobs) == (2, 3)


def test_arguments_for_the_runner_plugin_are_kept() -> None:
    plugin: dict[str, Any] = {"runner_plugin": "module:Class"}
    args = {"voice": "low", "pitch": [1, 2]}
    for path, prompt in (("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "a"})):
        direct, again, body = FakeEngine(), FakeEngine(), {**prompt, "vllm_xargs": args}
        assert request(direct, path, body, **plugin).status == 200
        rendered = request(FakeEngine(), f"{path}/render", body, **plugin).json
        answer = request(again, "/inference/v1/generate", _first(rendered), **plugin)
        assert answer.status == 200, answer.error
        assert again.submits[0].sampling.extra_args == direct.submits[0].sampling.extra_args != b""


@pytest.mark.parametrize(
    "field",
    [
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "a+"}},
        {"tool_choice": "required", "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]},
    ],
)
def test_what_a_rendered_chat_cannot_say_is_refused_later_by_name(field: dict[str, Any]) -> None:
    rendered = render("/v1/chat/completions", {**CHAT, **field}).json
    answer = request(FakeEngine(), "/inference/v1/generate", rendered)
    name = next(iter(field))
    assert (answer.status, answer.error["param"]) == (400, f"sampling_params.extra_args.{name}")


def test_the_format_of_a_completion_is_kept() -> None:
    (rendered,) = render("/v1/completions", {"prompt": "a", "structured_outputs": {"regex": "a+"}}).json
    engine = FakeEngine()
    assert request(engine, "/inference/v1/generate", rendered).status == 200
    assert engine.submits[0].constraint is not None


def test_a_bad_body_is_refused_as_by_the_endpoint_itself() -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"):
        assert render(path, {"input": [], "model": 5}).status == 400
    answer = render("/v1/chat/completions", {**CHAT, "model": "other"})
    assert answer.status == 404
