"""The paths that SageMaker calls, and the sentences of endpoints that there cannot be."""

from typing import Any

import pytest
from harness import FakeEngine, request

from pagewire.config.config import Purpose

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"messages": MESSAGES}, "chat.completion"),
        ({"prompt": "hi"}, "text_completion"),
        ({"input": "hi"}, "list"),
        ({"text_1": "a", "text_2": "b"}, "list"),
    ],
)
def test_an_invocation_is_answered_by_the_endpoint_that_it_fits(body: dict[str, Any], kind: str) -> None:
    answer = request(FakeEngine(), "/invocations", body)
    assert answer.status == 200 and answer.json["object"] == kind


def test_an_invocation_is_streamed() -> None:
    events = request(FakeEngine(), "/invocations", {"messages": MESSAGES, "stream": True}).events
    assert events[-1] == "[DONE]" and events[0]["object"] == "chat.completion.chunk"


def test_messages_are_embedded_by_an_embedding_model() -> None:
    engine = FakeEngine()
    answer = request(engine, "/invocations", {"messages": MESSAGES}, purpose=Purpose(tasks=("embed",), size=2))
    assert answer.status == 200 and engine.submits[0].pooling is not None


def test_an_invocation_that_fits_nothing_is_refused() -> None:
    assert "fits no endpoint" in request(FakeEngine(), "/invocations", {"x": 1}).error["message"]


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_ping_needs_no_key(method: str) -> None:
    assert request(FakeEngine(), "/ping", b"", method=method, api_keys=("key",)).json == {"status": "ok"}


@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("/v1/moderations", "moderation"),
        ("/v1/audio/speech", "audio"),
        ("/v1/audiobooks", "path."),
        ("/v1/responses/compact", "compacted"),
    ],
)
def test_an_endpoint_that_there_cannot_be_says_so(path: str, word: str) -> None:
    answer = request(FakeEngine(), path, {})
    assert answer.status == 404 and answer.error["code"] == "not_found" and word in answer.error["message"]
