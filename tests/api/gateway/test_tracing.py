"""Spans of requests."""

import pytest

from pagewire.ipc.messages import (
    Pooling,
)


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
