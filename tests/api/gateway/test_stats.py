"""Counts and durations of the gateway."""

from pagewire.ipc.messages import (
    Failed,
    TextBatch,
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
