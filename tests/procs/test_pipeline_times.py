"""Where the seconds of stages go."""

import struct

import pytest

from pagewire.ipc.messages import StageSnapshot
from pagewire.procs.pipeline_times import PipelineTimes


def test_what_is_neither_busy_nor_waiting_waits_for_a_plan() -> None:
    times = PipelineTimes(2)
    times.note(100.0, is_in_flight=True)
    times.answered(struct.pack("<6f", 1.0, 0.0, 0.5, 2.0, 0.25, 0.0))
    times.note(104.0, is_in_flight=False)
    times.note(150.0, is_in_flight=True)  # idle meanwhile
    times.note(151.0, is_in_flight=True)
    stages, ratio = times.report(151.0)
    assert stages == (StageSnapshot(1.0, 3.5, 0.0, 0.5), StageSnapshot(2.0, 2.75, 0.25, 0.0))
    assert ratio == 0.0, "there is no earlier report"


def test_the_bubble_is_that_of_the_last_ten_seconds() -> None:
    times = PipelineTimes(2)
    assert times.report(0.0) == ((StageSnapshot(0.0, 0.0, 0.0, 0.0),) * 2, 0.0)
    times.note(0.0, is_in_flight=True)
    for second in range(1, 31):
        busy = (0.5, 0.5) if second <= 15 else (1.0, 0.5)
        times.answered(struct.pack("<6f", busy[0], 0.0, 0.0, busy[1], 0.0, 0.0))
        _, ratio = times.report(float(second))
        if second == 15:
            assert ratio == pytest.approx(0.5)
        elif second == 20:
            assert ratio == pytest.approx(1 - (5 * 1.0 + 5 * 1.5) / 20)
    assert ratio == pytest.approx(0.25)
