"""/tokenize, /detokenize, /ready and /load."""

import asyncio
from typing import Any

import pytest
from harness import FakeEngine, request, run
from msgspec.structs import replace

from pagewire.errors import RequestError
from pagewire.ipc.messages import ChatPrompt, Snapshot, TextPrompt, TierSnapshot, Tokenize

IDLE = Snapshot(9, 3, 2, 100, 25, 1, 70, 30, 44, 0.5)


def test_a_text_is_tokenized() -> None:
    engine = FakeEngine()
    assert request(engine, "/tokenize", {"prompt": "abc", "model": "demo"}).json == {
        "count": 3,
        "max_model_len": 128,
        "tokens": [97, 98, 99],
        "token_strs": None,
    }
    body = {"prompt": "ab", "return_token_strs": True, "add_special_tokens": False}
    assert request(engine, "/tokenize", body).json["token_strs"] == ["a", "b"]
    assert [q.prompt for q in engine.questions if isinstance(q, Tokenize)] == [
        TextPrompt("abc"),
        TextPrompt("ab", add_special_tokens=False),
    ]


def test_a_conversation_is_tokenized() -> None:
    engine = FakeEngine()
    body = {"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": False}
    assert request(engine, "/tokenize", body).json["count"] == 3
    (question,) = engine.questions
    assert isinstance(question, Tokenize) and isinstance(question.prompt, ChatPrompt)
    assert not question.prompt.add_generation_prompt


def test_ids_are_detokenized() -> None:
    assert request(FakeEngine(), "/detokenize", {"tokens": [97, 98]}).json == {"prompt": "ab"}
    assert request(FakeEngine(), "/detokenize", {"tokens": []}).json == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": ["x"]}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "x", "chat_template": "x"}, "chat_template"),
        ("/detokenize", {"tokens": [1000]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {}, None),
    ],
)  # fmt: skip
def test_invalid_requests_are_refused(path: str, body: dict[str, Any], param: str | None) -> None:
    engine = FakeEngine()
    answer = request(engine, path, body)
    assert (answer.status, answer.error["param"]) == (400, param) and not engine.questions


def test_a_refusal_of_the_tokenizer_is_returned() -> None:
    engine = FakeEngine()
    engine.refuse = ("invalid_request", "The chat template refuses this.")
    assert request(engine, "/tokenize", {"prompt": "x"}).error["message"] == "The chat template refuses this."


def test_close_ends_tokenizer_calls() -> None:
    async def work() -> None:
        engine = FakeEngine()
        engine._answer = lambda question: None  # type: ignore[method-assign]  # the tokenizer hangs
        tokenized = asyncio.create_task(engine.gateway.tokenize(TextPrompt("x")))
        await asyncio.sleep(0)
        engine.gateway.close("The end.")
        with pytest.raises(RequestError, match="The end"):
            await tokenized
        await engine.gateway.drained()
        with pytest.raises(RequestError, match="The end"):
            await engine.gateway.detokenize(b"")

    run(work())


def test_a_full_queue_is_not_ready_but_healthy() -> None:
    engine = FakeEngine()
    assert request(engine, "/ready").json == {"status": "ready"}
    engine.gateway.handle([replace(IDLE, num_waiting=4)])  # the maximum
    assert request(engine, "/ready").status == 503 and request(engine, "/health").status == 200
    engine.gateway.handle([IDLE])
    assert request(engine, "/ready").status == 200
    assert request(engine, "/ready", healthy=lambda: "The core is gone.").error["message"] == "The core is gone."
    engine.gateway.refuse("The server is shutting down.")
    assert request(engine, "/ready").status == 503


def test_load() -> None:
    engine = FakeEngine()
    model = {"state": "loaded", "fits": False, "files_digest": "abc", "max_model_len": 64, "kv_digest": ""}
    facts: dict[str, Any] = {"files_digest": "abc", "max_model_len": 64}
    empty = {
        **{"server_load": 0, "version": "1.2.3", "num_running": 0, "num_waiting": 0, "kv_cache_usage": 0.0},
        **{"role": "both", "kv_host": None, "kv_port": None, "takes_peers": False, "prompt_ms": 0.0, "load_ms": 0.0},
        "models": {name: model for name in ("demo", "org/demo-alias")},
    }
    assert request(engine, "/load", **facts).json == empty
    engine.gateway.handle([IDLE])
    assert request(engine, "/load", **facts).json == {
        **empty,
        "num_running": 3,
        "num_waiting": 2,
        "kv_cache_usage": 0.25,
    }
    tiers = (TierSnapshot("host", 0, 0, 0, 0, 0, 0), TierSnapshot("p2p", 0, 0, 0, 0, 0, 0, kv_digest="ab"))
    engine.gateway.handle([replace(IDLE, tiers=tiers)])
    models = request(engine, "/load", **facts).json["models"]
    assert models == {name: {**model, "kv_digest": "ab"} for name in models}


def test_tokenizer_info() -> None:
    assert request(FakeEngine(), "/tokenizer_info").json == {
        "chat_template": "{{ messages }}",
        "bos_token": None,
        "eos_token": "</s>",
        "pad_token": None,
        "unk_token": None,
        "tokenizer_class": None,
    }
