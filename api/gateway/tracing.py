"""Sends a span for each request, with a child span for each part of its time, to an OpenTelemetry collector over HTTP.

Spans are made from the request's timeline when it has ended, and are sent by the exporter's thread. This module is
imported only with `--otlp-traces-endpoint`, because its packages are the extra `otel`. OpenTelemetry's own environment
variables for headers, certificates and limits apply.
"""

import logging
import time
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from ...ipc.messages import Pooling
from .request_end import RequestEnd

_FLUSH_S = 2.0  # the most that an unresponsive collector can delay the end of the process


class Tracing:
    """Spans of one api process."""

    def __init__(self, endpoint: str, *, model: str, version: str) -> None:
        """`endpoint`: a collector's address; without a path, spans go to /v1/traces there."""
        url = endpoint if urlsplit(endpoint).path.strip("/") else f"{endpoint.rstrip('/')}/v1/traces"
        logging.getLogger("opentelemetry.exporter").setLevel(logging.ERROR)  # report a lost batch, not each attempt
        self._model = model
        self._propagator = TraceContextTextMapPropagator()
        resource = Resource.create({"service.name": "pagewire", "service.version": version})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
        self._tracer = self._provider.get_tracer("pagewire", version)

    def observe(self, end: RequestEnd) -> None:
        """Hands a request's spans to the exporter's thread, unless the trace that it belongs to is not sampled."""
        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in end.headers}
        operation = operation_of(end.path, end.submits[0].pooling)
        offset = time.time_ns() - time.monotonic_ns()

        def wall(stamp: float) -> int:
            return offset + int(stamp * 1e9)

        span = self._tracer.start_span(
            f"{operation} {self._model}",
            self._propagator.extract(carrier),
            SpanKind.SERVER,
            {"gen_ai.operation.name": operation, **self._attributes(end)},
            start_time=wall(end.timeline.arrived),
        )
        if not span.is_recording():
            return
        for outcome in end.outcomes:
            if outcome.startswith(("error", "abort")):
                span.set_attribute("error.type", outcome)
                span.set_status(StatusCode.ERROR)
        inside = set_span_in_context(span)
        start = end.timeline.arrived
        for part, seconds in end.timeline.parts().items():
            child = self._tracer.start_span(part, inside, start_time=wall(start))
            start += seconds
            child.end(wall(start))
        span.end(wall(end.timeline.ended))

    def _attributes(self, end: RequestEnd) -> dict[str, Any]:
        """Named by the semantic conventions for generative AI."""
        submit = end.submits[0]
        sampling = submit.sampling
        attributes: dict[str, Any] = {
            "gen_ai.provider.name": "pagewire",
            "gen_ai.request.model": self._model,
            "gen_ai.response.model": self._model,
            "gen_ai.request.choice.count": submit.n,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
            "gen_ai.request.presence_penalty": sampling.presence_penalty,
            "gen_ai.response.finish_reasons": end.outcomes,
            "gen_ai.usage.input_tokens": end.num_prompt,
            "gen_ai.usage.cache_read.input_tokens": end.num_cached,
            "gen_ai.usage.output_tokens": end.num_output,
            "http.request.header.x-request-id": [end.request_id],
            "url.path": end.path,
        }
        if sampling.top_k:
            attributes["gen_ai.request.top_k"] = sampling.top_k
        if submit.limits.max_tokens is not None:
            attributes["gen_ai.request.max_tokens"] = submit.limits.max_tokens
        return attributes

    def close(self) -> None:
        """Sends what is left, within `_FLUSH_S`."""
        flushing = Thread(target=self._provider.shutdown, name="otlp-flush", daemon=True)
        flushing.start()
        flushing.join(_FLUSH_S)


def operation_of(path: str, pooling: Pooling | None) -> str:
    """The semantic conventions' name of the operation, where they have one."""
    match path:
        case "/v1/completions":
            return "text_completion"
        case "/v1/embeddings":
            return "embeddings"
        case _:
            return "chat" if pooling is None else "score"
