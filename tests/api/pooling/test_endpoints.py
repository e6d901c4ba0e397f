"""Embeddings, rerank and score over HTTP: submits, answers and refusals."""

import json
from typing import Any

import pytest
from harness import Answer, Client, FakeEngine, make_app, request, run
from waiting import until_async

from pagewire.config.config import Purpose
from pagewire.ipc.messages import Limits, PairPrompt, Pooling, TextPrompt

SCORING = Purpose(tasks=("score",), size=1)
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
    answer = request(engine, path, {"query": "q", "documents": documents, "model": "demo"}, purpose=SCORING)
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
    body = request(engine, path, {**fields, "truncate_prompt_tokens": 7}, purpose=SCORING).json
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


# ── scores of models that make vectors ───────────────────────────────────────────────────────────────────────────────


def test_rerank_with_an_embedding_model_compares_vectors() -> None:
    engine = FakeEngine()
    engine.vectors = [[1.0, 0.0], [0.0, 2.0], [3.0, 3.0]]  # of the query and two documents
    fields = {"query": "a", "documents": ["b", "c", "b"]}
    body = request(engine, "/rerank", fields, purpose=PURPOSE).json
    assert [submit.prompt for submit in engine.submits] == [TextPrompt("q: a"), TextPrompt("b"), TextPrompt("c")]
    assert {submit.pooling for submit in engine.submits} == {Pooling("mean", True)}
    assert [result["index"] for result in body["results"]] == [1, 0, 2]
    assert [round(result["relevance_score"], 6) for result in body["results"]] == [round(0.5**0.5, 6), 0, 0]


def test_score_with_an_embedding_model_compares_vectors() -> None:
    engine = FakeEngine()
    engine.vectors = [[1.0, 0.0], [-2.0, 0.0]]
    body = request(engine, "/score", {"text_1": "a", "text_2": ["b", "a"]}, purpose=Purpose(size=2)).json
    assert [data["score"] for data in body["data"]] == [-1.0, 1.0]
    assert body["usage"]["prompt_tokens"] == 6, "the same text is computed once"


# ── pooling and classify ─────────────────────────────────────────────────────────────────────────────────────────────


def test_pooling_gives_a_vector_or_one_for_each_token() -> None:
    engine = FakeEngine()
    engine.vectors = [[1.0, 2.0, 3.0, 4.0]]
    purpose = Purpose(size=2)
    whole = request(engine, "/pooling", {"input": "ab"}, purpose=purpose).json
    assert whole["object"] == "list" and whole["data"] == [{"index": 0, "object": "pooling", "data": [1, 2, 3, 4]}]
    each = request(engine, "/pooling", {"input": "ab", "task": "token_embed"}, purpose=purpose).json
    assert each["data"][0]["data"] == [[1, 2], [3, 4]]
    assert [submit.pooling for submit in engine.submits] == [Pooling("last", True), Pooling("all")]


def test_pooling_and_classify_of_a_model_with_a_head() -> None:
    engine = FakeEngine()
    engine.vectors = [[0.75]]
    assert request(engine, "/pooling", {"input": "a"}, purpose=SCORING).json["data"][0]["data"] == [0.75]
    several = Purpose(tasks=("classify",), size=2, labels=("glad", "sad"))
    body = request(FakeEngine(), "/classify", {"input": ["a", "b"]}, purpose=several).json
    assert body["data"][0] == {"index": 0, "label": "glad", "probs": [0.5, -1.0], "num_classes": 2}
    assert body["data"][1] == {"index": 1, "label": "sad", "probs": [0.25, 2.0], "num_classes": 2}
    body = request(engine, "/classify", {"input": ["a"]}, purpose=SCORING).json
    assert body["data"] == [{"index": 0, "label": "LABEL_0", "probs": [0.75], "num_classes": 1}]
    assert {submit.pooling for submit in engine.submits} == {Pooling("score")}
