"""Where the seconds of stages go."""

from itertools import pairwise

import pytest
from msgspec.structs import astuple

from pagewire.ipc.messages import StageSeconds, StageSnapshot
from pagewire.procs.pipeline_times import PipelineTimes


def test_what_is_neither_busy_nor_waiting_waits_for_a_plan() -> None:
    times = PipelineTimes(2)
    assert times.slowest() == 1.0
    times.note(100.0, is_in_flight=True)
    first, second = StageSeconds(1.0, ids=0.5), StageSeconds(2.0, input=0.25, output=0.25)
    for stage, seconds in enumerate((first, second)):
        times.take(stage, seconds, 103.5 + stage / 4)
    stages, ratio = times.report()
    assert stages == (StageSnapshot(first, 2.0), StageSnapshot(second, 1.25))
    assert ratio == pytest.approx(1 - 3.0 / (3.5 + 3.75)) and times.slowest() == 1.0
    times.note(104.0, is_in_flight=False)
    times.note(150.0, is_in_flight=True)  # idle meanwhile
    times.note(151.0, is_in_flight=True)
    times.take(0, StageSeconds(0.5), 151.0)
    assert times.report()[0] == (StageSnapshot(StageSeconds(1.5, ids=0.5), 3.0), StageSnapshot(second, 1.25))


def test_no_state_of_a_stage_goes_down() -> None:
    """Steps of 300 ms without a break count at their ends: of half a second one, then two."""
    times = PipelineTimes(2)
    times.note(0.0, is_in_flight=True)
    seen = [StageSnapshot(StageSeconds(0.0), 0.0)]
    for number, busy in enumerate((0.3, 0.6, 0.6, 0.3, 0.6, 0.6), start=1):
        times.take(0, StageSeconds(busy), number / 2)
        seen.append(times.report()[0][0])
    totals = [(each.plan_s, *astuple(each.seconds)) for each in seen]
    assert all(now >= before for pair in pairwise(totals) for before, now in zip(*pair, strict=True)), totals
    assert seen[1].plan_s == seen[-1].plan_s == pytest.approx(0.2) and seen[-1].seconds.busy == pytest.approx(3.0)


def test_the_bubble_is_that_of_the_last_ten_seconds() -> None:
    """Stages report at different times."""
    times = PipelineTimes(2)
    assert times.report() == ((StageSnapshot(StageSeconds(0.0), 0.0),) * 2, 0.0)
    times.note(0.0, is_in_flight=True)
    for second in range(1, 31):
        times.take(0, StageSeconds(0.5 if second <= 15 else 1.0), float(second))
        times.take(1, StageSeconds(0.5), second + 0.5)
        _, ratio = times.report()
        if second == 15:
            assert ratio == pytest.approx(0.5)
        elif second == 20:
            assert ratio == pytest.approx(1 - (5 * 1.0 + 5 * 1.5) / 20)
    assert ratio == pytest.approx(0.25) and times.slowest() == pytest.approx(2.0)


def test_what_the_last_stage_says_after_a_break_is_no_measure() -> None:
    """The first one has reported the first steps after it, and the last one a single one."""
    times = PipelineTimes(2)
    times.note(0.0, is_in_flight=True)
    for second in range(20):  # hardly anything to do
        times.take(0, StageSeconds(0.001), float(second))
        times.take(1, StageSeconds(0.001), second + 0.25)
    times.take(0, StageSeconds(0.45), 20.0)
    times.take(1, StageSeconds(0.01), 20.25)
    assert times.slowest() == 1.0
    for half in range(1, 4):
        assert times.slowest() == 1.0
        times.take(0, StageSeconds(0.45), 20.0 + half / 2)
        times.take(1, StageSeconds(0.4), 20.25 + half / 2)
    assert times.slowest() == pytest.approx(1.8 / 1.21, rel=0.02)
