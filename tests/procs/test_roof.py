"""The bytes that steps had to read, and the time that this takes at the memory's bandwidth."""

import pytest

from pagewire.engine.core.stats import Counters
from pagewire.ipc.messages import PassReads
from pagewire.procs.roof import Passed, Roof, share_of_roof

PAGE = 1000  # bytes


def test_a_step_reads_its_weights_once_and_the_pages_of_its_contexts() -> None:
    counters = Counters()
    counters.passed(1, 2.5)
    counters.passed(64, 100.0)
    totals, _ = Roof().report(0.0, counters, 1)
    assert totals.read_bytes(PassReads(fixed=10_000), PAGE) == 2 * 10_000 + 102.5 * PAGE


def test_of_experts_a_step_reads_those_that_its_tokens_are_expected_to_choose() -> None:
    counters = Counters()
    counters.expert_share = 0.25
    reads = PassReads(fixed=0, experts=800, expert_share=0.25)
    counters.passed(1, 0.0)
    one, _ = Roof().report(0.0, counters, 1)
    assert one.read_bytes(reads, PAGE) == pytest.approx(200)
    counters.passed(2, 0.0)
    two, _ = Roof().report(0.0, counters, 1)
    assert two.since(one).read_bytes(reads, PAGE) == pytest.approx(800 * (1 - 0.75**2))
    counters.passed(10_000, 0.0)
    all_of_them, _ = Roof().report(0.0, counters, 1)
    assert all_of_them.since(two).read_bytes(reads, PAGE) == pytest.approx(800)


def test_the_share_is_one_if_steps_take_as_long_as_reading_takes() -> None:
    window = Passed(seconds=2.0, passes=10, expert_passes=10, pages=50)
    reads = PassReads(fixed=5000)
    bandwidth = (10 * 5000 + 50 * PAGE) / 2.0
    assert share_of_roof(window, reads, PAGE, bandwidth) == pytest.approx(1.0)
    assert share_of_roof(window, reads, PAGE, 4 * bandwidth) == pytest.approx(0.25)
    assert share_of_roof(window, reads, PAGE, 0.0) == 0.0, "nobody knows the bandwidth"
    assert share_of_roof(window._replace(seconds=0.0), reads, PAGE, bandwidth) == 0.0, "no step has run"


def test_the_window_is_that_of_the_last_ten_seconds_and_the_mean_of_the_domains() -> None:
    roof, counters = Roof(), Counters()
    for second in range(31):
        totals, window = roof.report(float(second), counters, 2)
        if second > 0:
            assert window.passes == min(second, 10), second
            assert window.seconds == pytest.approx(0.5 * min(second, 10))
            assert totals.passes == second
        roof.answered(0.5)
        counters.passed(1, 3.0)  # of one domain,
        counters.passed(1, 5.0)  # and of the other
    assert window.pages == 10 * 4
