"""Counts and durations of the gateway."""

from pagewire.api.gateway.stats import Stats
from pagewire.config.latency_classes import LatencyClass
from pagewire.ipc.messages import (
    Failed,
    TextBatch,
    Times,
)

from .test_gateway import BASE, Box, chunk, make_submit


def test_counts_and_durations() -> None:
    box = Box()
    box.gateway.submit([make_submit(2)])
    for now, messages in (
        (1.0, (chunk(BASE),)),
        (3.0, (chunk(BASE), chunk(BASE + 1))),
        (4.0, (chunk(BASE, finish="stop"),)),
    ):
        box.now = now
        box.gateway.handle([TextBatch(messages)])
    box.gateway.handle([Failed(BASE + 1, "internal", "x")])
    stats = box.gateway.stats
    assert stats.finished == {"stop": 1, "length": 0, "abort": 0, "cache_threshold": 0, "error": 1}
    assert stats.time_to_first_token_s.total == 4.0 and sum(stats.time_to_first_token_s.counts) == 2
    assert stats.inter_token_latency_s.total == 3.0 and stats.request_latency_s.total == 4.0


def test_what_the_tokenizer_knew_of_prompts() -> None:
    box = Box()
    box.gateway.submit([make_submit(2)])
    for rid in (BASE, BASE, BASE + 1):  # a sequence that is resumed has times again
        box.gateway.handle([TextBatch((chunk(rid, times=Times(1.0, num_chars=100, num_known_chars=80)),))])
    assert (box.gateway.stats.num_prompt_chars, box.gateway.stats.num_known_chars) == (200, 160)


def test_targets_that_stay_keep_their_counts_and_others_begin_again() -> None:
    stats = Stats({"chat": LatencyClass(ttft_ms=5), "batch": LatencyClass()})
    for one in stats.attainment.values():
        one.ttft.observe(0.001)
    stats.change({"chat": LatencyClass(ttft_ms=9), "batch": LatencyClass(), "new": LatencyClass()})
    assert {name: one.ttft.num for name, one in stats.attainment.items()} == {"chat": 0, "batch": 1, "new": 0}
