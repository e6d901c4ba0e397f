"""The histograms of step times, and the lag of an event loop, with a clock that the test sets."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

from pagewire.procs.loop_lag import LoopLag
from pagewire.procs.step_times import StepTimes


def test_the_wait_time_of_a_step_is_never_negative() -> None:
    times = StepTimes()
    times.answered(0.010, 0.014)
    times.answered(0.010, 0.0)  # its result came together with the one before
    times.answered(0.010, 0.017, 0.005)
    times.handled(2, 0.003)
    report = times.report()
    assert report["step_time_seconds"].total == 0.030 and sum(report["step_time_seconds"].counts) == 3
    assert abs(report["step_wait_time_seconds"].total - 0.006) < 1e-9
    assert report["step_mask_wait_time_seconds"].total == 0.005
    assert sum(report["step_mask_wait_time_seconds"].counts) == 1, "only steps that waited for masks"
    assert report["step_wait_time_seconds"].counts[0] == 1
    assert report["step_host_time_seconds"].total == 0.0015


class Loop:
    """An event loop whose timers run when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now

    def call_at(self, due: float, look: Callable[[], None]) -> SimpleNamespace:
        timer = (due, look)
        self.timers.append(timer)
        return SimpleNamespace(cancel=lambda: self.timers.remove(timer))

    def run_at(self, now: float) -> None:
        self.now = now
        for timer in [timer for timer in self.timers if timer[0] <= now]:
            self.timers.remove(timer)
            timer[1]()


def test_the_lag_of_a_busy_loop_is_measured() -> None:
    loop = Loop()
    lag = LoopLag(cast(asyncio.AbstractEventLoop, loop))
    loop.run_at(0.1)
    loop.run_at(0.9)  # 0.7 s after it was due
    loop.run_at(1.0)
    assert abs(lag.seconds.total - 0.7) < 1e-9 and sum(lag.seconds.counts) == 3
    lag.stop()
    assert loop.timers == []
