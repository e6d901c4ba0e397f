"""Beam search: what is refused beside it, and how it ends early."""

import asyncio
import json
from typing import Any

import pytest
from harness import Client, FakeEngine, complete, make_app, request, run
from waiting import until_async

from .test_translate import BESIDE_BEAMS


@pytest.mark.parametrize(("name", "value"), BESIDE_BEAMS)
def test_what_beams_would_ignore_is_refused(name: str, value: Any) -> None:
    engine = FakeEngine()
    answer = complete(engine, use_beam_search=True, **{name: value})
    assert (answer.status, answer.error["param"]) == (400, name) and not engine.submits


@pytest.mark.parametrize("name", ["thinking_token_budget", "thinking_budget"])
def test_beams_keep_to_no_thinking_budget(name: str) -> None:
    engine = FakeEngine()
    messages = [{"role": "user", "content": "hi"}]
    body = {"messages": messages, "use_beam_search": True, name: 5}
    answer = request(engine, "/v1/chat/completions", body, reasoning_parser="qwen3")
    assert (answer.status, answer.error["param"]) == (400, "thinking_token_budget") and not engine.submits


def test_what_is_as_if_it_were_absent_is_fine_beside_beams() -> None:
    off = {"stop": [], "stream": False, "presence_penalty": 0, "logit_bias": {}, "repetition_penalty": 1.0}
    engine = FakeEngine()
    engine.refuse = ("queue_full", "Later.")
    assert complete(engine, prompt=[5], use_beam_search=True, **off).status == 429, "it got as far as the engine"


def test_beams_of_nothing() -> None:
    answer = complete(FakeEngine(), prompt="", use_beam_search=True)
    assert (answer.status, answer.error["message"]) == (400, "The prompt is empty.")


def test_a_sick_engine_is_not_asked_for_beams() -> None:
    body = {"prompt": [5], "use_beam_search": True}
    answer = request(FakeEngine(), "/v1/completions", body, healthy=lambda: "It is sick.")
    assert (answer.status, answer.error["message"]) == (503, "It is sick.")


def test_a_refusal_of_the_engine_ends_a_beam_search() -> None:
    engine = FakeEngine()
    engine.refuse = ("queue_full", "Later.")
    assert complete(engine, prompt=[5, 6], use_beam_search=True).status == 429


def test_a_client_that_leaves_ends_its_beam_search() -> None:
    engine = FakeEngine()
    engine.hold = True

    async def scenario() -> None:
        app = make_app(engine, tokens_per_minute=1000)
        client = Client(app)
        body = json.dumps({"prompt": [5, 6], "use_beam_search": True, "n": 2}).encode()
        call = asyncio.ensure_future(client.call("POST", "/v1/completions", body))
        await until_async(lambda: engine.open, "the engine has it")
        client.leave()
        await call
        assert not client.messages and not engine.open
        assert app._keys.caller({}).account._tokens.level < 999, "what was computed is paid for"

    run(scenario())


def test_a_beam_search_that_takes_too_long() -> None:
    engine = FakeEngine()
    engine.hold = True
    body = {"prompt": [5, 6], "use_beam_search": True}
    answer = request(engine, "/v1/completions", body, request_timeout_s=0.02)
    assert (answer.status, answer.error["code"]) == (504, "request_timeout")
