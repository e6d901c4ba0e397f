"""What is told of a request that has ended: its parts, its line, why it was cut short, and its times in the answer."""

import logging
from typing import Any

import pytest
from harness import FakeEngine, chat, complete

from pagewire.api.gateway.gateway import Gateway
from pagewire.api.gateway.request_end import RequestEnd, log_request, request_end
from pagewire.api.gateway.timeline import timeline, together
from pagewire.api.http.http_error import ShuttingDown
from pagewire.errors import RequestError
from pagewire.ipc.messages import (
    Chunk,
    Failed,
    Limits,
    Pooling,
    Sampling,
    Submit,
    TextBatch,
    TextPrompt,
    TextSpec,
    Times,
    Usage,
)

PASSED = timeline(1.0, Times(1.5, 1.75, 3.0), 4.0, 8.0)
SCOPE = {"path": "/v1/completions", "headers": [], "state": {"request_id": "r1"}}


def order(n: int = 1) -> Submit:
    return Submit(0, n, TextPrompt("secret"), Sampling(), Limits(), TextSpec())


class Clocked:
    """A gateway at a time of one's choice."""

    def __init__(self) -> None:
        self.now = 1.0
        self.gateway = Gateway(lambda message: None, clock=lambda: self.now)

    def at(self, now: float, *chunks: Chunk) -> None:
        self.now = now
        self.gateway.handle([TextBatch(chunks)])


def test_parts_add_up() -> None:
    parts = PASSED.parts()
    assert parts == {"tokenizer_queue": 0.5, "tokenize": 0.25, "queue": 1.25, "prefill": 1.0, "decode": 4.0}
    assert sum(parts.values()) == PASSED.total == 7.0


def test_parts_that_it_did_not_come_to_are_left_out() -> None:
    assert timeline(1.0, None, None, 3.0).parts() == {}
    assert timeline(1.0, Times(2.0, 2.5), None, 3.0).parts() == {"tokenizer_queue": 1.0, "tokenize": 0.5}
    scored = timeline(1.0, Times(2.0, 2.5, 3.0), None, 9.0)
    assert list(scored.parts()) == ["tokenizer_queue", "tokenize", "queue"] and scored.total == 8.0


def test_another_machines_clock_makes_no_time_run_backwards() -> None:
    assert min(timeline(100.0, Times(3.0, 4.0, 105.0), 106.0, 107.0).parts().values()) == 0.0


def test_a_request_is_as_early_as_its_first_choice_and_as_late_as_its_last() -> None:
    late, refused = timeline(1.0, Times(1.5, 1.75, 5.0), 7.0, 9.0), timeline(1.0, None, None, 2.0)
    assert together([refused, late, PASSED]) == timeline(1.0, Times(1.5, 1.75, 3.0), 4.0, 9.0)
    assert together([refused]).parts() == {}


def ended() -> tuple[Clocked, RequestEnd]:
    """Two prompts with two choices each, of which the last one failed."""
    box = Clocked()
    stream = box.gateway.submit([order(2), order(2)])
    times = Times(1.5, 1.75, 3.0)
    box.at(4.0, *(Chunk(rid, "x", b"\1\0\0\0", times=times) for rid in range(3)))
    box.at(6.0, *(Chunk(rid, "", b"", finish="length", usage=Usage(10 + rid, 5 + rid, 8)) for rid in range(3)))
    box.now = 8.0
    box.gateway.handle([Failed(3, "internal", "x")])
    return box, request_end(SCOPE, [order(2), order(2)], stream)


def test_a_prompt_counts_once_and_every_output() -> None:
    box, end = ended()
    assert (end.num_prompt, end.num_cached, end.num_output, end.num_sequences) == (10 + 12, 16, 5 + 6 + 7, 4)
    assert end.outcomes == ("length", "error:internal") and end.timeline == timeline(1.0, Times(1.5, 1.75, 3), 4, 8)
    stats = box.gateway.stats
    assert stats.max_generation_tokens.total == 7 and sum(stats.max_generation_tokens.counts) == 1
    assert stats.part_s["decode"].total == 6.0 and stats.inference_s.total == 9.0
    assert stats.time_per_output_token_s.total == pytest.approx(2 / 4 + 2 / 5 + 2 / 6)
    assert stats.prompt_tokens.total == 33 and stats.choices.total == 4


def test_the_line_tells_counts_and_times_and_no_text(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        log_request(ended()[1])
    assert caplog.messages == [
        "request_id=r1 path=/v1/completions ended=length,error:internal sequences=4 prompt=22 cached=16 output=18 "
        "tokenizer_queue_ms=500.0 tokenize_ms=250.0 queue_ms=1250.0 prefill_ms=1000.0 decode_ms=4000.0 total_ms=7000.0"
    ]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ShuttingDown("bye"), "shutting_down"),
        (RequestError("queue_full", "x"), "queue_full"),
        (OSError("x"), "internal"),
        (None, "client_gone"),
    ],
)
def test_aborts_are_counted_by_cause(error: Exception | None, reason: str) -> None:
    box = Clocked()
    stream = box.gateway.submit([order(3)])
    box.at(2.0, Chunk(0, "", b"", finish="stop", usage=Usage(1, 0, 0)))
    if error is None:
        stream.cancel()
    else:
        box.gateway.end(stream, error)
    assert {name: count for name, count in box.gateway.stats.aborts.items() if count} == {reason: 2}
    assert [ended.outcome for ended in stream.ended] == ["stop", f"abort:{reason}", f"abort:{reason}"]


def test_a_refusal_cuts_the_other_choices_short() -> None:
    box = Clocked()
    box.gateway.submit([order(3)])
    box.gateway.handle([Failed(1, "queue_full", "Full.")])
    stats = box.gateway.stats
    assert stats.errors["queue_full"] == 1 and stats.aborts["queue_full"] == 2
    assert stats.finished["error"] == 1 and stats.finished["abort"] == 2


def test_what_the_tokenizer_has_is_counted() -> None:
    box = Clocked()
    box.gateway.submit([order(3)])
    assert box.gateway.num_unanswered == 3
    box.at(2.0, Chunk(0, "x", b"\1\0\0\0"))
    assert box.gateway.num_unanswered == 2


@pytest.mark.parametrize("ask", [chat, complete])
@pytest.mark.parametrize("usage", [False, True])
def test_times_come_last_and_only_when_asked_for(ask: Any, usage: bool) -> None:
    options = {"stream": True, "stream_options": {"include_usage": usage}}
    assert "timings" not in ask(FakeEngine()).json and b"timings" not in ask(FakeEngine(), **options).body
    assert ask(FakeEngine(), return_timings=True).json["timings"] == {"total_ms": 0.0}
    *events, done = ask(FakeEngine(), return_timings=True, **options).events
    assert done == "[DONE]"
    assert ["timings" in event for event in events] == [False] * (len(events) - 1) + [True]
    assert events[-1]["choices"] == [] and (events[-1].get("usage") is not None) == usage


@pytest.mark.parametrize(
    ("path", "pooling", "operation"),
    [
        ("/v1/completions", None, "text_completion"),
        ("/v1/embeddings", Pooling("mean"), "embeddings"),
        ("/v2/rerank", Pooling("score"), "score"),
        ("/v1/messages", None, "chat"),
    ],
)
def test_what_a_span_calls_the_request(path: str, pooling: Pooling | None, operation: str) -> None:
    pytest.importorskip("opentelemetry.exporter")
    from pagewire.api.gateway.tracing import operation_of

    assert operation_of(path, pooling) == operation
