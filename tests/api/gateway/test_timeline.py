"""The timeline of a request: its parts, and the timings in the answer."""

from typing import Any

import pytest
from harness import FakeEngine, chat, complete

from pagewire.api.gateway.gateway import Gateway
from pagewire.api.gateway.request_end import RequestEnd, request_end
from pagewire.api.gateway.timeline import timeline, together
from pagewire.ipc.messages import (
    Chunk,
    Failed,
    Limits,
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


def make_submit(n: int = 1) -> Submit:
    return Submit(0, n, TextPrompt("secret"), Sampling(), Limits(), TextSpec())


class Clocked:
    """A gateway whose clock the test sets."""

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


def test_parts_that_were_not_reached_are_left_out() -> None:
    assert timeline(1.0, None, None, 3.0).parts() == {}
    assert timeline(1.0, Times(2.0, 2.5), None, 3.0).parts() == {"tokenizer_queue": 1.0, "tokenize": 0.5}
    scored = timeline(1.0, Times(2.0, 2.5, 3.0), None, 9.0)
    assert list(scored.parts()) == ["tokenizer_queue", "tokenize", "queue"] and scored.total == 8.0


def test_clock_skew_makes_no_part_negative() -> None:
    assert min(timeline(100.0, Times(3.0, 4.0, 105.0), 106.0, 107.0).parts().values()) == 0.0


def test_a_request_lasts_from_its_first_choice_to_its_last() -> None:
    late, refused = timeline(1.0, Times(1.5, 1.75, 5.0), 7.0, 9.0), timeline(1.0, None, None, 2.0)
    assert together([refused, late, PASSED]) == timeline(1.0, Times(1.5, 1.75, 3.0), 4.0, 9.0)
    assert together([refused]).parts() == {}


def ended() -> tuple[Clocked, RequestEnd]:
    """Two prompts with two choices each, of which the last one failed."""
    box = Clocked()
    stream = box.gateway.submit([make_submit(2), make_submit(2)])
    times = Times(1.5, 1.75, 3.0)
    box.at(4.0, *(Chunk(rid, "x", b"\1\0\0\0", times=times) for rid in range(3)))
    box.at(6.0, *(Chunk(rid, "", b"", finish="length", usage=Usage(10 + rid, 5 + rid, 8)) for rid in range(3)))
    box.now = 8.0
    box.gateway.handle([Failed(3, "internal", "x")])
    return box, request_end(SCOPE, stream.request)


@pytest.mark.parametrize(("last_at", "decode_s"), [(7.5, 3.5), (4.0, 0.0)])
def test_a_token_counts_from_when_it_is_received(last_at: float, decode_s: float) -> None:
    """Tokens that are received together have no decode time between them."""
    box = Clocked()
    stream = box.gateway.submit([make_submit()])
    box.at(4.0, Chunk(0, "x", b"\1\0\0\0", times=Times(1.5, 1.75, 3.0)))
    box.at(last_at, Chunk(0, "y", b"\2\0\0\0", finish="length", usage=Usage(10, 2, 8)))
    parts = request_end(SCOPE, stream.request).timeline.parts()
    assert (parts["prefill"], parts["decode"]) == (1.0, decode_s)


def test_unanswered_sequences_are_counted() -> None:
    box = Clocked()
    box.gateway.submit([make_submit(3)])
    assert box.gateway.num_unanswered == 3
    box.at(2.0, Chunk(0, "x", b"\1\0\0\0"))
    assert box.gateway.num_unanswered == 2


@pytest.mark.parametrize("ask", [chat, complete])
@pytest.mark.parametrize("usage", [False, True])
def test_timings_come_last_and_only_on_request(ask: Any, usage: bool) -> None:
    options = {"stream": True, "stream_options": {"include_usage": usage}}
    assert "timings" not in ask(FakeEngine()).json and b"timings" not in ask(FakeEngine(), **options).body
    assert ask(FakeEngine(), return_timings=True).json["timings"] == {"total_ms": 0.0}
    *events, done = ask(FakeEngine(), return_timings=True, **options).events
    assert done == "[DONE]"
    assert ["timings" in event for event in events] == [False] * (len(events) - 1) + [True]
    assert events[-1]["choices"] == [] and (events[-1].get("usage") is not None) == usage
