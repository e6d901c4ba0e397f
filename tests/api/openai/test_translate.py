"""The rarer parameters of chat and completions, in the submits to the engine and in the answers."""

import json
from typing import Any

import pytest
from harness import FakeEngine, candidate, chat, complete, request
from msgspec.structs import replace

from pagewire.ipc.messages import ChatPrompt, Chunk, Submit, TokenLogprob


def submitted(**fields: Any) -> Submit:
    engine = FakeEngine()
    assert chat(engine, **fields).status == 200
    (submit,) = engine.submits
    return submit


def test_parameters_are_submitted() -> None:
    submit = submitted(
        min_tokens=5, max_tokens=9, allowed_token_ids=[3, 4], truncate_prompt_tokens=-1, stop=["x"], prompt_logprobs=2
    )
    assert submit.limits.min_tokens == submit.text.min_tokens == 5
    assert submit.sampling.allowed_token_ids == (3, 4) and submit.sampling.prompt_logprobs == 2
    assert submit.truncate == -1 and submit.text.prompt
    assert not submitted(detokenize=False).text.detokenize and submitted().text.detokenize


@pytest.mark.parametrize("fields", [{"max_tokens": 4}, {"max_completion_tokens": 4, "max_tokens": 9}])
def test_min_tokens_is_at_most_max_tokens(fields: dict[str, int]) -> None:
    answer = chat(FakeEngine(), min_tokens=5, **fields)
    assert (answer.status, answer.error["param"]) == (400, "min_tokens")
    assert complete(FakeEngine(), min_tokens=17).error["param"] == "min_tokens", "the default is 16"


def test_stop_strings_need_text() -> None:
    assert chat(FakeEngine(), detokenize=False, stop="x").error["param"] == "stop"


@pytest.mark.parametrize("trusted", [True, False])
def test_a_template_in_the_request_needs_trust(trusted: bool) -> None:
    engine = FakeEngine()
    body = {"messages": [{"role": "user", "content": "hi"}], "chat_template": "{{ messages }}"}
    for path, received in (("/v1/chat/completions", engine.submits), ("/tokenize", engine.questions)):
        answer = request(engine, path, body, trust_request_chat_template=trusted)
        assert answer.status == (200 if trusted else 400)
        if trusted:
            assert received[-1].prompt.template == "{{ messages }}"  # type: ignore[union-attr]
        else:
            assert (answer.error["param"], answer.error["code"]) == ("chat_template", "unsupported_value")
            assert "--trust-request-chat-template" in answer.error["message"] and not received


@pytest.mark.parametrize(
    ("kwargs", "switches"),
    [
        ({}, {"enable_thinking": False, "thinking": False}),
        ({"enable_thinking": True}, {"enable_thinking": True}),
        ({"thinking": True}, {"thinking": True}),
    ],
)
def test_effort_none_disables_reasoning(kwargs: dict[str, bool], switches: dict[str, bool]) -> None:
    """Variables that the request sets take precedence."""
    prompt = submitted(reasoning_effort="none", chat_template_kwargs=kwargs).prompt
    variables = json.loads(prompt.template_kwargs)  # type: ignore[union-attr]
    assert variables == {"reasoning_effort": "none", **switches}


def test_default_values_change_nothing() -> None:
    plain = submitted(seed=1)
    for fields in ({"length_penalty": 1.0}, {"length_penalty": 1}, {"early_stopping": False}, {"top_logprobs": 0}):
        assert replace(submitted(seed=1, **fields), rid=plain.rid) == plain, fields


def test_reasoning_effort_and_verbosity_are_variables_of_the_template() -> None:
    prompt = submitted(reasoning_effort="low", verbosity="high", chat_template_kwargs={"verbosity": "mine"}).prompt
    assert prompt.template_kwargs == b'{"verbosity":"mine","reasoning_effort":"low"}'  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({}, {"enable_thinking": False, "tone": "dry"}),
        ({"chat_template_kwargs": {"enable_thinking": True}}, {"enable_thinking": True, "tone": "dry"}),
        ({"chat_template_kwargs": {"thinking": True, "tone": 1}}, {"thinking": True, "tone": 1}),
    ],
)
def test_the_operator_sets_variables_that_requests_leave_open(
    fields: dict[str, object], variables: dict[str, object]
) -> None:
    engine = FakeEngine()
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    defaults = {"enable_thinking": False, "tone": "dry"}
    assert request(engine, "/v1/chat/completions", body, default_chat_template_kwargs=defaults).status == 200
    prompt = engine.submits[-1].prompt
    assert json.loads(prompt.template_kwargs) == variables  # type: ignore[union-attr]


# ── log-probabilities ────────────────────────────────────────────────────────────────────────────────────────────────


def test_prompt_logprobs_of_chat() -> None:
    logprobs = chat(FakeEngine(), prompt_logprobs=2).json["prompt_logprobs"]
    best, second = (
        {"logprob": -0.5, "rank": 1, "decoded_token": "b"},
        {"logprob": -2.0, "rank": 2, "decoded_token": "~"},
    )
    assert logprobs[0] is None and logprobs[1] == {str(ord("b")): best, str(ord("~")): second} and len(logprobs) == 3
    assert chat(FakeEngine()).json["prompt_logprobs"] is None


def test_prompt_logprobs_of_completions_are_those_of_each_prompt() -> None:
    choices = complete(FakeEngine(), prompt=["ab", "c"], prompt_logprobs=0)
    first, second = (choice["prompt_logprobs"] for choice in choices.json["choices"])
    # With no candidates asked for, the rank of the prompt's own token is not known.
    assert first == [None, {str(ord("b")): {"logprob": -0.5, "rank": None, "decoded_token": "b"}}]
    assert second == [None]


def test_prompt_logprobs_are_not_streamed() -> None:
    answer = chat(FakeEngine(), prompt_logprobs=1, stream=True)
    assert (answer.status, answer.error["param"]) == (400, "prompt_logprobs")


def test_tokens_may_be_returned_as_ids() -> None:
    fields = {"return_tokens_as_token_ids": True}
    content = chat(FakeEngine(["a"]), logprobs=True, top_logprobs=2, **fields).json["choices"][0]["logprobs"]["content"]
    assert content[0]["token"] == "token_id:97" and content[0]["bytes"] == [97]
    assert [top["token"] for top in content[0]["top_logprobs"]] == ["token_id:97", "token_id:126"]
    logprobs = complete(FakeEngine(["a"]), logprobs=1, echo=True, **fields).json["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [f"token_id:{ord(char)}" for char in "abca"]
    assert logprobs["text_offset"] == [0, 1, 2, 3] and logprobs["top_logprobs"][3] == {"token_id:97": -0.5}


# ── usage, echo, best_of ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("call", [chat, complete])
def test_usage_in_every_event(call: Any) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *events, last, done = call(FakeEngine(["ab", "c"]), stream=True, stream_options=options).events
    assert done == "[DONE]" and last["choices"] == [] and last["usage"]["total_tokens"] == 6
    usages = [event["usage"] for event in events if event["choices"][0].get("delta", event["choices"][0])]
    assert all(usage["prompt_tokens"] == 3 for usage in usages)
    assert [usage["completion_tokens"] for usage in usages] == ([0, 2, 3] if call is chat else [2, 3])
    plain = call(FakeEngine(["ab"]), stream=True, stream_options={"continuous_usage_stats": True}).events
    assert all("usage" not in event for event in plain[:-1]), "only with include_usage"


@pytest.mark.parametrize("stream", [True, False])
def test_echo_repeats_the_final_message_that_chat_continues(stream: bool) -> None:
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [{"type": "text", "text": "Well, "}]},
    ]
    answer = chat(FakeEngine(), messages=messages, continue_final_message=True, echo=True, stream=stream)
    if stream:
        text = "".join(event["choices"][0]["delta"].get("content", "") for event in answer.events[:-1])
    else:
        text = answer.json["choices"][0]["message"]["content"]
    assert text == "Well, Hello"
    assert chat(FakeEngine(), echo=True).json["choices"][0]["message"]["content"] == "Hello", (
        "a user's message is not repeated"
    )


class _Candidates(FakeEngine):
    """Each sequence of a request has its own text and log-probabilities."""

    def _chunk(self, rid: int, submitted: Submit, step: int) -> Chunk:
        index = rid - submitted.rid
        chunk = super()._chunk(rid, submitted, step)
        logprob = (-3.0, -0.25, -1.0, -2.0)[index]
        position = TokenLogprob(candidate(chunk.text, logprob), ())
        return replace(chunk, text=f"{index}", logprobs=(position,) if chunk.logprobs is not None else None)


def test_best_of_returns_the_likeliest() -> None:
    engine = _Candidates(["a"])
    answer = complete(engine, prompt=["x", "y"], n=2, best_of=4).json
    assert [(c["index"], c["text"], c["logprobs"]) for c in answer["choices"]] == [
        (0, "1", None),
        (1, "2", None),
        (2, "1", None),
        (3, "2", None),
    ]
    assert answer["usage"]["completion_tokens"] == 8, "all candidates were computed"
    assert answer["usage"]["prompt_tokens"] == 6
    assert [submitted.n for submitted in engine.submits] == [4, 4] and engine.submits[0].sampling.logprobs == 0
    assert complete(_Candidates(["a"]), n=4, best_of=4).json["choices"][0]["text"] == "0", "nothing to choose"


@pytest.mark.parametrize("fields", [{"n": 3, "best_of": 2}, {"best_of": 2, "stream": True}])
def test_invalid_best_of_is_refused(fields: dict[str, Any]) -> None:
    answer = complete(FakeEngine(), **fields)
    assert (answer.status, answer.error["param"]) == (400, "best_of")
    assert complete(FakeEngine(), best_of=2, n=2, stream=True).status == 200


def test_the_echo_of_a_truncated_prompt_is_truncated() -> None:
    class Cutting(FakeEngine):
        def _echo(self, submitted: Submit) -> Any:
            return replace(super()._echo(submitted), text="bc")

    choice = complete(Cutting(), prompt="abc", echo=True, truncate_prompt_tokens=2).json["choices"][0]
    assert choice["text"] == "bcHello"


# ── beam search ──────────────────────────────────────────────────────────────────────────────────────────────────────

BESIDE_BEAMS: list[tuple[str, Any]] = [
    ("stream", True),
    ("stop", "x"),
    ("logprobs", 0),
    ("prompt_logprobs", 0),
    ("logit_bias", {"5": 1}),
    ("presence_penalty", 1.0),
    ("repetition_penalty", 1.1),
    ("min_tokens", 1),
    ("allowed_token_ids", [5]),
    ("truncate_prompt_tokens", 5),
    ("echo", True),
    ("n", 11),
]


# ── what clients of other servers send ───────────────────────────────────────────────────────────────────────────────


def test_numbers_and_booleans_may_be_strings() -> None:
    engine = FakeEngine()
    answer = chat(engine, max_tokens="4", temperature="0.5", logprobs="true", top_logprobs="2", n="1")
    submit = engine.submits[0]
    assert answer.status == 200 and submit.limits.max_tokens == 4
    assert (submit.sampling.temperature, submit.sampling.logprobs) == (0.5, 2)


@pytest.mark.parametrize(("biases", "key"), [({"5": 1, "x7": 1}, "x7"), ({"5": 101}, "5"), ({"9": "much"}, "9")])
def test_errors_of_logit_bias_name_the_entry(biases: dict[str, Any], key: str) -> None:
    error = chat(FakeEngine(), logit_bias=biases).error
    assert error["param"] == "logit_bias" and f"{key!r}" in error["message"]


@pytest.mark.parametrize(
    ("field", "value", "kind"),
    [("regex", "[a-z]+", "regex"), ("ebnf", 'root ::= "a"', "lark"), ("grammar", 'root ::= "a"', "lark"),
     ("json_schema", {"type": "object"}, "json_schema"), ("json_schema", '{"type": "object"}', "json_schema")],
)  # fmt: skip
def test_formats_by_the_names_of_other_servers(field: str, value: Any, kind: str) -> None:
    for ask in (chat, complete):
        engine = FakeEngine()
        assert ask(engine, **{field: value}).status == 200
        constraint = engine.submits[0].constraint
        assert constraint is not None and constraint.kind == kind
    assert chat(FakeEngine(), **{field: value, "guided_choice": ["a"]}).status == 400


@pytest.mark.parametrize("role", ["observation", "my-custom-role"])
def test_roles_of_ones_own_reach_the_template(role: str) -> None:
    engine = FakeEngine()
    assert chat(engine, messages=[{"role": role, "content": "x"}]).status == 200
    prompt = engine.submits[0].prompt
    assert isinstance(prompt, ChatPrompt) and role.encode() in prompt.messages


@pytest.mark.parametrize("value", [True, False])
def test_special_tokens_may_be_added_to_a_conversation(value: bool) -> None:
    engine = FakeEngine()
    assert chat(engine, add_special_tokens=value).status == 200
    prompt = engine.submits[0].prompt
    assert isinstance(prompt, ChatPrompt) and prompt.add_special_tokens == value


@pytest.mark.parametrize(("side", "keeps_start"), [("right", True), ("left", False), (None, False)])
def test_the_side_of_truncation(side: str | None, keeps_start: bool) -> None:
    engine = FakeEngine()
    assert complete(engine, truncate_prompt_tokens=2, truncation_side=side).status == 200
    assert (engine.submits[0].truncate, engine.submits[0].keeps_start) == (2, keeps_start)


def test_the_token_itself_comes_first_among_the_candidates_of_an_echo() -> None:
    engine = FakeEngine()
    logprobs = complete(engine, prompt="ab", echo=True, logprobs=2).json["choices"][0]["logprobs"]
    for token, top in zip(logprobs["tokens"][1:], logprobs["top_logprobs"][1:], strict=True):
        assert next(iter(top)) == token
