"""Spans of requests."""

from contextlib import closing

import pytest

from pagewire.ipc.messages import (
    Pooling,
)

from .test_timeline import ended


@pytest.mark.parametrize(
    ("path", "pooling", "operation"),
    [
        ("/v1/completions", None, "text_completion"),
        ("/v1/embeddings", Pooling("mean"), "embeddings"),
        ("/v2/rerank", Pooling("score"), "score"),
        ("/v1/messages", None, "chat"),
    ],
)
def test_the_operation_name_of_a_span(path: str, pooling: Pooling | None, operation: str) -> None:
    pytest.importorskip("opentelemetry.exporter")
    from pagewire.api.gateway.tracing import operation_of

    assert operation_of(path, pooling) == operation


def test_the_last_spans_are_sent_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.exporter")
    from collector import Collector

    from pagewire.api.gateway import tracing

    monkeypatch.setattr(tracing, "_FLUSH_S", 60.0)
    with closing(Collector()) as collector:
        sender = tracing.Tracing(collector.url, model="m", version="1")
        sender.observe(ended()[1])
        sender.close()
        parts = {"tokenizer_queue", "tokenize", "queue", "prefill", "decode"}
        assert {span.name for span in collector.spans} == {"text_completion m", *parts}
