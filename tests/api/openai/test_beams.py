"""Beam search: fields that cannot be combined with it, and how it ends early."""

import asyncio
import json
from typing import Any

import pytest
from harness import Client, FakeEngine, complete, make_app, request, run
from waiting import until_async

from .test_translate import BESIDE_BEAMS


@pytest.mark.parametrize(("name", "value"), BESIDE_BEAMS)
def test_fields_that_beam_search_would_ignore_are_refused(name: str, value: Any) -> None:
    engine = FakeEngine()
    answer = complete(engine, use_beam_search=True, **{name: value})
    assert (answer.status, answer.error["param"]) == (400, name) and not engine.submits


@pytest.mark.parametrize("name", ["thinking_token_budget", "thinking_budget"])
def test_a_thinking_budget_is_refused(name: str) -> None:
    engine = FakeEngine()
    messages = [{"role": "user", "content": "hi"}]
    body = {"messages": messages, "use_beam_search": True, name: 5}
    answer = request(engine, "/v1/chat/completions", body, reasoning_parser="qwen3")
    assert (answer.status, answer.error["param"]) == (400, "thinking_token_budget") and not engine.submits


def test_neutral_values_are_accepted() -> None:
    off = {"stop": [], "stream": False, "presence_penalty": 0, "logit_bias": {}, "repetition_penalty": 1.0}
    engine = FakeEngine()
    engine.refuse = ("queue_full", "Later.")
    assert complete(engine, prompt=[5], use_beam_search=True, **off).status == 429, "it reached the engine"


def test_an_empty_prompt_is_refused() -> None:
    answer = complete(FakeEngine(), prompt="", use_beam_search=True)
    assert (answer.status, answer.error["message"]) == (400, "The prompt is empty.")


def test_an_unhealthy_engine_gets_no_beam_search() -> None:
    body = {"prompt": [5], "use_beam_search": True}
    answer = request(FakeEngine(), "/v1/completions", body, healthy=lambda: "It is sick.")
    assert (answer.status, answer.error["message"]) == (503, "It is sick.")


def test_a_refusal_of_the_engine_ends_a_beam_search() -> None:
    engine = FakeEngine()
    engine.refuse = ("queue_full", "Later.")
    assert complete(engine, prompt=[5, 6], use_beam_search=True).status == 429


def test_a_disconnect_ends_a_beam_search() -> None:
    engine = FakeEngine()
    engine.hold = True

    async def work() -> None:
        app = make_app(engine, tokens_per_minute=1000)
        client = Client(app)
        body = json.dumps({"prompt": [5, 6], "use_beam_search": True, "n": 2}).encode()
        call = asyncio.ensure_future(client.call("POST", "/v1/completions", body))
        await until_async(lambda: engine.open, "the engine has a request")
        client.leave()
        await call
        assert not client.messages and not engine.open
        assert app._keys.caller({}).account._tokens.level < 999, "computed tokens are charged"

    run(work())


def test_a_beam_search_times_out() -> None:
    engine = FakeEngine()
    engine.hold = True
    body = {"prompt": [5, 6], "use_beam_search": True}
    answer = request(engine, "/v1/completions", body, request_timeout_s=0.02)
    assert (answer.status, answer.error["code"]) == (504, "request_timeout")
