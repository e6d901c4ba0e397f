"""Requests for vectors and scores: what is submitted, and what is refused."""

from typing import Any

import pytest
from harness import FakeEngine, request

from pagewire.ipc.messages import ChatPrompt, IdsPrompt, Pooling, TextPrompt, bytes_to_ids

from .test_endpoints import PURPOSE, embed


def test_token_ids_are_submitted() -> None:
    engine = FakeEngine()
    assert len(embed(engine, input=[1, 2, 3]).json["data"]) == 1
    assert len(embed(engine, input=[[1, 2], [3]]).json["data"]) == 2
    prompts = [submit.prompt for submit in engine.submits]
    assert all(isinstance(prompt, IdsPrompt) for prompt in prompts)
    assert [list(bytes_to_ids(prompt.ids)) for prompt in prompts] == [[1, 2, 3], [1, 2], [3]]  # type: ignore[union-attr]


def test_pooling_options_are_submitted() -> None:
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
        ({"input": None}, "input", "either input or messages"),
        ({"messages": [{"role": "user", "content": "x"}]}, "messages", "either input or messages"),
        ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs", "only allowed with messages"),
        ({"input": ["a"] * 2049}, None, "At most 2048 texts"),
        ({"dimensions": 9}, "dimensions", "at most 8"),
        ({"dimensions": 0}, "dimensions", ">= 1"),
        ({"encoding_format": "hex"}, "encoding_format", "Invalid enum value"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "-1 or at least 1"),
        ({"prompt_name": "x"}, "prompt_name", "is not one of this model's: query, document."),
        ({"prompt_name": "query", "input": [1]}, "prompt_name", "is for texts"),
        ({"input": None, "messages": []}, "messages", "not be empty"),
        ({"embed_dtype": "fp8_e4m3"}, "embed_dtype", "Invalid enum value"),
        ({"endianness": "middle"}, "endianness", "Invalid enum value"),
        ({"padding": "max_length"}, "padding", "Invalid enum value"),
        ({"truncation_side": "left"}, "truncation_side", "Invalid enum value"),
        ({"use_activation": True, "normalize": False}, "use_activation", "contradict"),
        ({"encoding_format": "bytes", "input": ["a"] * 65}, "encoding_format", "at most 64"),
    ],
)
def test_invalid_embedding_requests_are_refused(fields: dict[str, Any], param: str | None, message: str) -> None:
    engine = FakeEngine()
    answer = embed(engine, PURPOSE, **fields)
    assert (answer.status, answer.error["param"]) == (400, param)
    assert message in answer.error["message"]
    assert not engine.submits


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
def test_invalid_pairs_are_refused(path: str, fields: dict[str, Any], param: str | None) -> None:
    engine = FakeEngine()
    answer = request(engine, path, fields)
    assert (answer.status, answer.error["param"]) == (404 if param == "model" else 400, param)
    assert not engine.submits


def test_use_activation_is_normalize() -> None:
    engine = FakeEngine()
    embed(engine, PURPOSE, use_activation=False)
    embed(engine, PURPOSE, use_activation=True, padding="longest", truncation_side="right")
    assert [submit.pooling.is_normalized for submit in engine.submits if submit.pooling] == [False, True]


def test_a_conversation_is_embedded_as_the_template_renders_it() -> None:
    engine = FakeEngine()
    messages = [{"role": "user", "content": "x"}]
    assert request(engine, "/v1/embeddings", {"messages": messages}, purpose=PURPOSE).status == 200
    prompt = engine.submits[0].prompt
    assert isinstance(prompt, ChatPrompt) and not prompt.add_generation_prompt
    assert engine.submits[0].pooling == Pooling("mean", True)
