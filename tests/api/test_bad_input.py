"""Invalid requests are answered with a 4xx in OpenAI's shape that names the field, and never reach the engine."""

import json
from typing import Any

import pytest
from harness import CONFIG, FakeEngine, chat, complete, request

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses", "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b'{"a": 1} x',
        b'{"temperature": NaN}',
        b'{"temperature": Infinity}',
        b'{"temperature": 1e999}',
        b'{"a": "\\ud800"',
        b"\xff\xfe",
        b'{"user": "\xff"}',
        b"[" * 100_000,
        b'{"x": ' * 50_000,
        b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b', "prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    ],
)
def test_invalid_json_is_refused(path: str, body: bytes) -> None:
    engine = FakeEngine()
    answer = request(engine, path, body)
    assert answer.status == 400 and answer.error["type"] == "invalid_request_error"
    assert answer.error["code"] in ("invalid_json", None) and not engine.submits


@pytest.mark.parametrize("body", [b"[]", b"5", b"null", b'"text"', b"{}"])
def test_json_that_is_not_a_request_is_refused(body: bytes) -> None:
    assert request(FakeEngine(), CHAT, body).status == 400


@pytest.mark.parametrize("text", [b'"\\ud800"', b'"a\\udfffb"'])
def test_lone_surrogates_are_refused(text: bytes) -> None:
    body = b'{"messages": [{"role": "user", "content": ' + text + b"}]}"
    assert request(FakeEngine(), CHAT, body).error["code"] == "invalid_json"
    assert request(FakeEngine(), "/v1/completions", b'{"prompt": ' + text + b"}").error["code"] == "invalid_json"


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "", "multipart/form-data"])
def test_other_content_types_are_refused(content_type: str) -> None:
    answer = request(FakeEngine(), CHAT, {"messages": MESSAGES}, headers={"content-type": content_type})
    assert answer.status == 400 and answer.error["code"] == "invalid_json"
    good = {"content-type": "Application/JSON; charset=utf-8"}
    assert request(FakeEngine(), CHAT, {"messages": MESSAGES}, headers=good).status == 200


COMMON: list[tuple[str, list[Any]]] = [
    ("temperature", [-0.1, 2.1, "x", True, [], {}]),
    ("top_p", [0, -1, 1.1, "x"]),
    ("n", [0, -1, 129, 1.5, "1.5", "0", True, 10**30]),
    ("seed", ["x", 1.5, 2**64, True]),
    ("stop", [5, [5], [""], "", ["x"] * 17, "x" * 5000]),
    ("presence_penalty", [-2.1, 2.1, "x"]),
    ("frequency_penalty", [-2.1, 2.1]),
    ("logit_bias", [{"x": 1}, {"-1": 1}, {"5": 101}, {"5": "x"}, [], {str(i): 1 for i in range(1025)}, {"1000": 1}]),
    ("max_tokens", [-1, 0, 1.5, "five", 2**40]),
    ("stream", ["yes", 2]),
    ("stream_options", [{"include_usage": True}, 5]),
    ("top_k", [-2, 1.5, 2**40]),
    ("min_p", [-0.1, 1.1]),
    ("repetition_penalty", [0, -1, 1000]),
    ("stop_token_ids", [[-1], ["x"], [1000], 5]),
    ("priority", [1.5, "x", 2**40]),
    ("cache_salt", ["", "a b", "x" * 65, "é", 5]),
    ("model", [5, []]),
    ("min_tokens", [-1, 1.5, "x", 2**40]),
    ("allowed_token_ids", [[], [-1], ["x"], [1000], 5]),
    ("truncate_prompt_tokens", [0, -2, 1.5, "x"]),
    ("prompt_logprobs", [-1, 21, True, "x"]),
    ("use_beam_search", ["x"]),
    ("length_penalty", [0.9, 11, "x"]),
    ("early_stopping", [True, "x"]),
    ("bad_words", [5, "x", [""], [5], ["x"] * 1025, ["x" * 257]]),
    ("structured_outputs", [{}, {"a": 1}, 5, {"regex": 5}, {"regex": " "}, {"choice": []}, {"structural_tag": {}}]),
    ("structured_outputs", [{"json": "{"}, {"json": "5"}, {"structural_tag": "a", "regex": "x"}]),
    ("structured_outputs", [{"json": {}, "regex": "x"}, {"grammar": ""}, {"regex": "x" * 300_000}]),
    ("guided_json", [5, "no schema", {"enum": ["x" * 300_000]}]),
    ("guided_choice", [[], "x", [5]]),
    ("guided_regex", ["", 5]),
    ("guided_grammar", ["", 5]),
    ("thinking_token_budget", [-2, 1.5, "x", 5]),
    ("response_format", [{"type": "json_schema", "json_schema": {}}, {"type": "json_schema"}, {"type": "xml"}]),
]
CHAT_ONLY: list[tuple[str, list[Any]]] = [
    (
        "messages",
        [
            [],
            None,
            5,
            "hi",
            {},
            [5],
            [None],
            [{}],
            [{"role": "", "content": "x"}],
            [{"role": "r" * 65, "content": "x"}],
            [{"role": "user"}],
            [{"role": "system", "content": None}],
            [{"role": "user", "content": 5}],
            [{"role": "user", "content": {}}],
            [{"role": "user", "content": [5]}],
            [{"role": "user", "content": [{}]}],
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}}]}],
            [{"role": "assistant", "tool_calls": [{"function": {}}]}],
            [{"role": "assistant", "tool_calls": 5}],
        ],
    ),
    ("top_logprobs", [-1, 21, 5, "x"]),
    ("logprobs", [5, "x"]),
    (
        "tools",
        [5, {}, [5], [{"type": "other"}], [{"type": "function"}], [{"type": "function", "function": {"name": ""}}]],
    ),
    ("tool_choice", ["required", "maybe", 5, {"type": "function", "function": {"name": "f"}}]),
    ("response_format", ["text", {}, {"type": "structural_tag", "structures": []}]),
    ("modalities", [["audio"], "text"]),
    ("add_special_tokens", [5]),
    ("chat_template", ["{{ 1 }}"]),
    ("functions", [[], 5, [{}], [{"name": ""}]]),
    ("function_call", [5, "maybe", {"name": 5}]),
    ("tool_choice", [{"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}]),
    ("truncation_side", ["middle"]),
    ("audio", [{"voice": "x"}]),
    ("max_completion_tokens", [0, -1]),
    ("continue_final_message", ["x"]),
]
COMPLETION_ONLY: list[tuple[str, list[Any]]] = [
    ("prompt", [None, 5, [], [[]], [1, "a"], [[1], 2], [1.5], [-1], [2**31], [True], [["a"]], {}, ["x"] * 257]),
    ("logprobs", [-1, 21, True]),
    ("echo", ["x"]),
    ("best_of", [0, 129, 1.5]),
    ("suffix", ["x"]),
]
UNSUPPORTED = ["guided_decoding_backend", "logits_processors", "prompt_embeds", "ec_transfer_params", "bootstrap_room"]


@pytest.mark.parametrize(
    ("name", "values"), COMMON + CHAT_ONLY, ids=lambda value: value if isinstance(value, str) else ""
)
def test_invalid_chat_fields_are_named(name: str, values: list[Any]) -> None:
    for value in values:
        engine = FakeEngine()
        answer = chat(engine, **{name: value})
        assert answer.status == 400, f"{name}={value!r:.60}: {answer.status}"
        assert answer.error["param"] is not None and answer.error["param"].startswith(name), (value, answer.error)
        assert name in answer.error["message"] or name in ("messages",)
        assert not engine.submits


@pytest.mark.parametrize(
    ("name", "values"), COMMON + COMPLETION_ONLY, ids=lambda value: value if isinstance(value, str) else ""
)
def test_invalid_completion_fields_are_named(name: str, values: list[Any]) -> None:
    for value in values:
        engine = FakeEngine()
        answer = complete(engine, **{name: value})
        assert answer.status == 400, f"{name}={value!r:.60}: {answer.status}"
        assert answer.error["param"] is not None and answer.error["param"].startswith(name), (value, answer.error)
        assert not engine.submits


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_fields_are_named(name: str) -> None:
    answer = chat(FakeEngine(), **{name: {"a": 1}})
    assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "unsupported_value", name)


def test_too_many_sequences_are_refused() -> None:
    answer = complete(FakeEngine(), prompt=["x"] * 256, n=128)
    assert answer.status == 400 and answer.error["param"] == "n"


def test_unknown_fields_are_ignored() -> None:
    fields = {
        "user": "u",
        "metadata": {"a": 1},
        "store": True,
        "service_tier": "auto",
        "never_heard_of": [1, {"b": None}],
    }
    assert chat(FakeEngine(), **fields).status == 200
    assert complete(FakeEngine(), **fields).status == 200


def test_an_unknown_model_is_not_found() -> None:
    for answer in (chat(FakeEngine(), model="gpt-9"), complete(FakeEngine(), model="gpt-9")):
        assert (answer.status, answer.error["code"], answer.error["param"]) == (404, "model_not_found", "model")


def test_a_path_in_place_of_a_model_name_opens_no_file() -> None:
    answer = request(FakeEngine(), "/v1/models/../../etc/passwd")
    assert answer.status == 404 and answer.error["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("method", "path", "allow"), [("GET", CHAT, "POST"), ("POST", "/v1/models", "GET"), ("DELETE", "/health", "GET")]
)
def test_wrong_method(method: str, path: str, allow: str) -> None:
    answer = request(FakeEngine(), path, method=method)
    assert answer.status == 405 and allow in answer.headers["allow"] and answer.error["code"] is None


@pytest.mark.parametrize("path", ["/v1", "/v1/chat", "/v1/embedding", "/docs/", "/v1/models2", "/health/", "//health"])
def test_unknown_path(path: str) -> None:
    answer = request(FakeEngine(), path)
    assert answer.status == 404 and answer.error["code"] == "not_found"


def test_a_too_large_content_length_is_refused() -> None:
    answer = request(FakeEngine(), CHAT, b"{}", headers={"content-length": str((16 << 20) + 1)})
    assert answer.status == 413 and answer.headers["connection"] == "close" and answer.error


def test_a_too_large_body_is_refused() -> None:
    answer = request(FakeEngine(), CHAT, b" " * ((16 << 20) + 1))
    assert answer.status == 413


def test_a_body_of_the_maximum_size_is_read() -> None:
    body = json.dumps({"messages": MESSAGES}).encode()
    assert request(FakeEngine(), CHAT, body + b" " * ((16 << 20) - len(body))).status == 200


def test_compressed_bodies_are_refused() -> None:
    assert request(FakeEngine(), CHAT, b"{}", headers={"content-encoding": "gzip"}).status == 415


@pytest.mark.parametrize(
    ("kind", "status", "type", "code"),
    [
        ("invalid_request", 400, "invalid_request_error", None),
        ("context_length_exceeded", 400, "invalid_request_error", "context_length_exceeded"),
        ("queue_full", 429, "rate_limit_error", "queue_full"),
        ("unavailable", 503, "server_error", "engine_unavailable"),
        ("internal", 500, "server_error", None),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_refusals_of_the_engine_have_their_status(
    kind: Any, status: int, type: str, code: str | None, stream: bool
) -> None:
    engine = FakeEngine()
    engine.refuse = (kind, "This model's maximum context length is 128 tokens. However, you sent more.")
    answer = chat(engine, stream=stream, n=3)
    assert (answer.status, answer.error["type"], answer.error["code"]) == (status, type, code)
    assert answer.error["message"].startswith("This model's maximum context length is")
    assert ("retry-after" in answer.headers) == (status in (429, 503))
    assert ("x-should-retry" in answer.headers) == (status == 500)


def test_every_refused_field_exists() -> None:
    from pagewire.api.openai import translate
    from pagewire.api.openai.types import ChatRequest, CompletionRequest

    fields = {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__}
    assert set(translate._REFUSED) <= fields
    assert CONFIG.model.vocab_size == 1000  # the token ids above are chosen for it


def test_an_error_does_not_repeat_a_long_value() -> None:
    answer = chat(FakeEngine(), messages=[{"role": "x" * 100_000, "content": "y"}])
    assert answer.status == 400 and len(answer.body) < 1000 and answer.error["param"] == "messages[0].role"
