"""Embeddings, rerank and score over HTTP: submits, answers and refusals."""

import json
from typing import Any

import pytest
from harness import Answer, Client, FakeEngine, make_app, request, run
from waiting import until_async

from pagewire.config.config import Purpose
from pagewire.ipc.messages import Limits, PairPrompt, Pooling, TextPrompt

PURPOSE = Purpose(pooling="mean", size=8, prompts={"query": "q: ", "document": ""}, default_prompt="query")


def embed(engine: FakeEngine, purpose: Purpose = Purpose(size=8), **fields: Any) -> Answer:  # noqa: B008  # frozen
    return request(engine, "/v1/embeddings", {"input": "abc", **fields}, purpose=purpose)


def test_embeddings() -> None:
    engine = FakeEngine()
    answer = embed(engine, input=["a", "b", "c"], user="u", priority=-3, timeout=9)
    assert answer.status == 200
    assert answer.json == {
        "object": "list",
        "model": "demo",
        "data": [{"object": "embedding", "index": i, "embedding": v} for i, v in enumerate(engine.vectors)],
        "usage": {"prompt_tokens": 9, "total_tokens": 9},
    }
    for submit, text in zip(engine.submits, "abc", strict=True):
        assert submit.prompt == TextPrompt(text) and submit.n == 1
        assert submit.pooling == Pooling("last", is_normalized=True)
        assert submit.limits == Limits(max_tokens=0, queue_timeout_s=9)
        assert (submit.priority, submit.tenant, submit.text.detokenize) == (-3, "u", False)
    assert [submit.rid for submit in engine.submits] == [0, 1, 2]


def test_a_refusal_of_the_engine_is_a_400() -> None:
    engine = FakeEngine()
    engine.refuse = ("invalid_request", "This model scores pairs of texts; embeddings are made by others.")
    answer = embed(engine)
    assert (answer.status, answer.error["message"]) == (400, (engine.refuse or ("", ""))[1])


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_rerank(path: str) -> None:
    engine = FakeEngine()
    documents = ["one", {"text": "two"}, "three"]
    answer = request(engine, path, {"query": "q", "documents": documents, "model": "demo"})
    body = answer.json
    assert body.pop("id").startswith("rerank-")
    assert body == {
        "model": "demo",
        "results": [
            {"index": 2, "relevance_score": 0.75, "document": {"text": "three"}},
            {"index": 0, "relevance_score": 0.5, "document": {"text": "one"}},
            {"index": 1, "relevance_score": 0.25, "document": {"text": "two"}},
        ],
        "usage": {"prompt_tokens": 9, "total_tokens": 9},
    }
    assert [submit.prompt for submit in engine.submits] == [PairPrompt("q", text) for text in ("one", "two", "three")]
    assert {submit.pooling for submit in engine.submits} == {Pooling("score")}


@pytest.mark.parametrize(
    ("fields", "pairs"),
    [
        ({"text_1": "a", "text_2": "b"}, ["ab"]),
        ({"text_1": "a", "text_2": ["b", "c"]}, ["ab", "ac"]),
        ({"text_1": ["a", "b"], "text_2": ["c", "d"]}, ["ac", "bd"]),
        ({"queries": "a", "items": ["b", "c", "d"]}, ["ab", "ac", "ad"]),
    ],
)
@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_score(path: str, fields: dict[str, Any], pairs: list[str]) -> None:
    engine = FakeEngine()
    body = request(engine, path, {**fields, "truncate_prompt_tokens": 7}).json
    assert [submit.prompt for submit in engine.submits] == [PairPrompt(*pair) for pair in pairs]
    assert {submit.pooling for submit in engine.submits} == {Pooling("score", truncate=7)}
    assert body["object"] == "list" and body["model"] == "demo" and body["created"] > 0
    scores = [vector[0] for vector in engine.vectors[: len(pairs)]]
    assert body["data"] == [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)]


def test_a_disconnect_cancels_all_texts() -> None:
    engine = FakeEngine()
    engine.hold = True

    async def scenario() -> None:
        import asyncio

        client = Client(make_app(engine, purpose=PURPOSE))
        call = asyncio.ensure_future(client.call("POST", "/v1/embeddings", json.dumps({"input": ["a", "b"]}).encode()))
        await until_async(lambda: len(engine.submits) == 2, "both texts are submitted")
        client.leave()
        await call

    run(scenario())
    assert engine.cancels == [0, 1] and not engine.open
