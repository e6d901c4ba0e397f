"""docs/http-api.md says of every field whether it is used, ignored or refused, and the server does so."""

import re
from pathlib import Path
from typing import Any

import pytest
from harness import Answer, FakeEngine, request
from msgspec import Struct
from msgspec.structs import replace

from pagewire.api.anthropic.types import MessagesRequest
from pagewire.api.llamacpp.sampling import SamplingOptions
from pagewire.api.llamacpp.types import InfillRequest, LlamaCompletionRequest, TextRequest
from pagewire.api.ollama.types import (
    EmbedRequest,
    ModelQuestion,
    OldEmbeddingsRequest,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaRequest,
    Options,
)
from pagewire.api.openai.generate_types import GenerateRequest
from pagewire.api.openai.tokenizing import DetokenizeRequest, TokenizeRequest
from pagewire.api.openai.types import ChatRequest, CompletionRequest
from pagewire.api.output.shapes import GenerationRequest
from pagewire.api.responses.types import ResponsesRequest

TEXT = (Path(__file__).parents[2] / "docs" / "http-api.md").read_text()
SHAPES: dict[str, type[Struct]] = {
    "Shared": GenerationRequest,
    "POST /v1/chat/completions": ChatRequest,
    "POST /v1/completions": CompletionRequest,
    "POST /v1/responses": ResponsesRequest,
    "POST /v1/messages": MessagesRequest,
    "POST /inference/v1/generate": GenerateRequest,
    "Ollama's shared fields": OllamaRequest,
    "Sampling by llama.cpp's names": SamplingOptions,
    "Ollama's options": Options,
    "POST /api/chat": OllamaChatRequest,
    "POST /api/generate": OllamaGenerateRequest,
    "POST /api/embed": EmbedRequest,
    "POST /api/embeddings": OldEmbeddingsRequest,
    "POST /api/show": ModelQuestion,
    "llama-server's shared fields": TextRequest,
    "POST /completion": LlamaCompletionRequest,
    "POST /infill": InfillRequest,
    "POST /tokenize": TokenizeRequest,
    "POST /detokenize": DetokenizeRequest,
}
BODIES: dict[str, dict[str, Any]] = {
    "POST /v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "POST /v1/completions": {"prompt": "hi"},
    "POST /v1/responses": {"input": "hi"},
    "POST /v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5},
    "POST /api/chat": {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "options": {"seed": 1}},
    "POST /api/generate": {"model": "demo", "prompt": "hi", "options": {"seed": 1}},
    "POST /completion": {"prompt": "hi"},
}
VALUES: list[Any] = [{"a": 1}, True, "x", [{"name": "x"}], 1]  # one of them is of the field's type


def table(section: str) -> dict[str, str]:
    """Field → yes, ignored or refused."""
    (body,) = re.findall(rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)", TEXT, re.M | re.S)
    found: dict[str, str] = {}
    for names, word in re.findall(r"^\| ([a-z_, ]+) \| (yes|ignored|refused) \|", body, re.M):
        for name in names.split(", "):
            assert name not in found, f"{section} lists {name} twice"
            found[name] = word
    return found


def fields(endpoint: str) -> dict[str, str]:
    """All fields of a request to the endpoint, shared ones included; its own tables come last."""
    found: dict[str, str] = {}
    for section, shape in SHAPES.items():
        if issubclass(SHAPES[endpoint], shape):
            found |= table(section)
    return found


@pytest.mark.parametrize("section", SHAPES)
def test_every_field_is_listed(section: str) -> None:
    listed, shape = set(table(section)), SHAPES[section]
    known = set(shape.__struct_fields__)
    assert listed <= known, "these are not fields of the request"
    for base in SHAPES.values():
        if issubclass(shape, base) and shape is not base:
            known -= set(base.__struct_fields__)
    assert known <= listed


def ask(endpoint: str, engine: FakeEngine, **more: Any) -> Answer:
    return request(engine, endpoint.removeprefix("POST "), {**BODIES[endpoint], "seed": 1, **more})


@pytest.mark.slow
@pytest.mark.parametrize("endpoint", BODIES)
def test_refused_fields_are_named_in_the_error(endpoint: str) -> None:
    for name in (name for name, word in fields(endpoint).items() if word == "refused"):
        messages = []
        for value in VALUES:
            engine = FakeEngine()
            answer = ask(endpoint, engine, **{name: value})
            assert answer.status == 400 and not engine.submits, f"{name}={value}"
            error = answer.json["error"]
            messages.append(error if isinstance(error, str) else error["message"])
        assert any(message.startswith(f"{name} is not supported") for message in messages), (name, messages)


@pytest.mark.slow
@pytest.mark.parametrize("endpoint", BODIES)
def test_ignored_fields_change_nothing(endpoint: str) -> None:
    def submit(**more: Any) -> Any:
        engine = FakeEngine()
        assert ask(endpoint, engine, **more).status == 200, more
        return replace(engine.submits[0], rid=0)

    plain = submit()
    for name in (name for name, word in fields(endpoint).items() if word == "ignored"):
        assert all(submit(**{name: value}) == plain for value in VALUES), name


@pytest.mark.slow
@pytest.mark.parametrize("endpoint", BODIES)
def test_null_is_the_same_as_absent(endpoint: str) -> None:
    required = BODIES[endpoint].keys()
    for name in fields(endpoint).keys() - required:
        assert ask(endpoint, FakeEngine(), **{name: None}).status == 200, name
