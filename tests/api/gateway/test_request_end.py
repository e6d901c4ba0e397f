"""The end of a request: its counts, its log line, and the cause of an abort."""

import logging

import pytest

from pagewire.api.gateway.request_end import log_request
from pagewire.api.gateway.timeline import timeline
from pagewire.api.http.http_error import ShuttingDown
from pagewire.errors import RequestError
from pagewire.ipc.messages import (
    Chunk,
    Failed,
    Times,
    Usage,
)

from .test_timeline import Clocked, ended, make_submit


def test_prompt_tokens_count_once_and_output_tokens_per_choice() -> None:
    box, end = ended()
    assert (end.num_prompt, end.num_cached, end.num_output, end.num_sequences) == (10 + 12, 16, 5 + 6 + 7, 4)
    assert end.outcomes == ("length", "error:internal") and end.timeline == timeline(1.0, Times(1.5, 1.75, 3), 4, 8)
    stats = box.gateway.stats
    assert stats.max_generation_tokens.total == 7 and sum(stats.max_generation_tokens.counts) == 1
    assert stats.part_s["decode"].total == 6.0 and stats.inference_s.total == 9.0
    assert stats.time_per_output_token_s.total == pytest.approx(2 / 4 + 2 / 5 + 2 / 6)
    assert stats.prompt_tokens.total == 33 and stats.choices.total == 4


def test_the_log_line_has_counts_and_times_but_no_text(caplog: pytest.LogCaptureFixture) -> None:
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
    stream = box.gateway.submit([make_submit(3)])
    box.at(2.0, Chunk(0, "", b"", finish="stop", usage=Usage(1, 0, 0)))
    if error is None:
        stream.cancel()
    else:
        stream.end(error)
    assert {name: count for name, count in box.gateway.stats.aborts.items() if count} == {reason: 2}
    assert [ended.outcome for ended in stream.request.ended] == ["stop", f"abort:{reason}", f"abort:{reason}"]


def test_a_refused_choice_aborts_the_others() -> None:
    box = Clocked()
    box.gateway.submit([make_submit(3)])
    box.gateway.handle([Failed(1, "queue_full", "Full.")])
    stats = box.gateway.stats
    assert stats.errors["queue_full"] == 1 and stats.aborts["queue_full"] == 2
    assert stats.finished["error"] == 1 and stats.finished["abort"] == 2
