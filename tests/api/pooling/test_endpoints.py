"""Embeddings, rerank and score over HTTP: what goes to the engine, what comes back, and what is refused."""

import json
from array import array
from base64 import b64decode
from typing import Any

import pytest
from harness import Answer, Client, FakeEngine, make_app, request, run
from waiting import until_async

from pagewire.config.config import Purpose
from pagewire.ipc.messages import IdsPrompt, Limits, PairPrompt, Pooling, TextPrompt, bytes_to_ids

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
    for order, text in zip(engine.submits, "abc", strict=True):
        assert order.prompt == TextPrompt(text) and order.n == 1
        assert order.pooling == Pooling("last", is_normalized=True)
        assert order.limits == Limits(max_tokens=0, queue_timeout_s=9)
        assert (order.priority, order.tenant, order.text.detokenize) == (-3, "u", False)
    assert [order.rid for order in engine.submits] == [0, 1, 2]


def test_base64_is_little_endian_float32() -> None:
    (data,) = embed(FakeEngine(), encoding_format="base64").json["data"]
    assert array("f", b64decode(data["embedding"])).tolist() == [0.5, -1.0]


def test_token_ids() -> None:
    engine = FakeEngine()
    assert len(embed(engine, input=[1, 2, 3]).json["data"]) == 1
    assert len(embed(engine, input=[[1, 2], [3]]).json["data"]) == 2
    prompts = [order.prompt for order in engine.submits]
    assert all(isinstance(prompt, IdsPrompt) for prompt in prompts)
    assert [list(bytes_to_ids(prompt.ids)) for prompt in prompts] == [[1, 2, 3], [1, 2], [3]]  # type: ignore[union-attr]


def test_how_the_vector_is_made() -> None:
    engine = FakeEngine()
    embed(engine, PURPOSE, dimensions=8, normalize=False, truncate_prompt_tokens=-1)
    embed(engine, PURPOSE, prompt_name="document", truncate_prompt_tokens=5, add_special_tokens=False)
    first, second = engine.submits
    assert (first.prompt, second.prompt) == (TextPrompt("q: abc"), TextPrompt("abc", add_special_tokens=False))
    assert first.pooling == Pooling("mean", is_normalized=False, dimensions=8, truncate=128)
    assert second.pooling == Pooling("mean", is_normalized=True, truncate=5)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"input": []}, "input", "not empty"),
        ({"input": [[]]}, "input", "not empty"),
        ({"input": ["a", 1]}, "input", "input must be"),
        ({"input": None}, "input", "Expected"),
        ({"input": ["a"] * 2049}, None, "At most 2048 texts"),
        ({"dimensions": 9}, "dimensions", "at most 8"),
        ({"dimensions": 0}, "dimensions", ">= 1"),
        ({"encoding_format": "hex"}, "encoding_format", "Invalid enum value"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "-1 or at least 1"),
        ({"prompt_name": "x"}, "prompt_name", "is not one of this model's: query, document."),
        ({"prompt_name": "query", "input": [1]}, "prompt_name", "is for texts"),
        ({"messages": []}, "messages", "is not supported"),
        ({"embed_dtype": "float16"}, "embed_dtype", "is not supported"),
    ],
)
def test_embeddings_that_are_refused(fields: dict[str, Any], param: str | None, message: str) -> None:
    engine = FakeEngine()
    answer = embed(engine, PURPOSE, **fields)
    assert (answer.status, answer.error["param"]) == (400, param)
    assert message in answer.error["message"]
    assert not engine.submits


def test_what_the_engine_refuses() -> None:
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
    assert [order.prompt for order in engine.submits] == [PairPrompt("q", text) for text in ("one", "two", "three")]
    assert {order.pooling for order in engine.submits} == {Pooling("score")}


def test_the_best_without_their_texts() -> None:
    fields = {"query": "q", "documents": ["a", "b", "c"], "top_n": 2, "return_documents": False}
    assert request(FakeEngine(), "/rerank", fields).json["results"] == [
        {"index": 2, "relevance_score": 0.75},
        {"index": 0, "relevance_score": 0.5},
    ]


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
    assert [order.prompt for order in engine.submits] == [PairPrompt(*pair) for pair in pairs]
    assert {order.pooling for order in engine.submits} == {Pooling("score", truncate=7)}
    assert body["object"] == "list" and body["model"] == "demo" and body["created"] > 0
    scores = [vector[0] for vector in engine.vectors[: len(pairs)]]
    assert body["data"] == [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/score", {"text_1": "a"}, "text_2"),
        ("/score", {}, "queries"),
        ("/score", {"text_1": [], "text_2": "a"}, "text_1"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("/score", {"text_1": "a", "text_2": "b", "use_activation": False}, "use_activation"),
        ("/rerank", {"query": "q"}, None),
        ("/rerank", {"query": "q", "documents": []}, "documents"),
        ("/rerank", {"query": "q", "documents": [{"title": "x"}]}, "documents[0]"),
        ("/rerank", {"query": "q", "documents": ["a"], "top_n": 0}, "top_n"),
        ("/rerank", {"query": "q", "documents": ["a"], "rank_fields": ["text"]}, "rank_fields"),
        ("/rerank", {"query": "q", "documents": ["a"], "model": "other"}, "model"),
    ],
)
def test_pairs_that_are_refused(path: str, fields: dict[str, Any], param: str | None) -> None:
    engine = FakeEngine()
    answer = request(engine, path, fields)
    assert (answer.status, answer.error["param"]) == (404 if param == "model" else 400, param)
    assert not engine.submits


def test_a_client_that_leaves_takes_its_texts_along() -> None:
    engine = FakeEngine()
    engine.hold = True

    async def scenario() -> None:
        import asyncio

        client = Client(make_app(engine, purpose=PURPOSE))
        call = asyncio.ensure_future(client.call("POST", "/v1/embeddings", json.dumps({"input": ["a", "b"]}).encode()))
        await until_async(lambda: len(engine.submits) == 2, "the engine has both")
        client.leave()
        await call

    run(scenario())
    assert engine.cancels == [0, 1] and not engine.open
