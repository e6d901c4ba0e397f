"""Whether masks are quick beside steps, and which are overdue, with a clock that the test sets."""

from pagewire.procs.mask_times import LIMIT_S, MaskTimes


def measured(*mask_s: float, step_s: float = 0.01) -> MaskTimes:
    times = MaskTimes()
    times.stepped(step_s)
    for number, seconds in enumerate(mask_s):
        times.asked([1, 2], float(number))
        times.came([2, 1], number + seconds)
    return times


def test_masks_are_quick_once_measured_below_a_step() -> None:
    assert not measured().are_quick, "nothing was measured"
    assert measured(0.001).are_quick and not measured(0.02).are_quick
    assert not measured(0.0099).are_quick, "messages take time, too"


def test_one_slow_mask_counts_for_some_time() -> None:
    assert not measured(0.001, 0.02, 0.001).are_quick
    assert measured(0.02, *[0.001] * 30).are_quick


def test_one_quick_step_counts_for_some_time() -> None:
    times = measured(0.005)
    times.stepped(0.001)
    times.stepped(0.01)
    assert not times.are_quick
    for _ in range(30):
        times.stepped(0.01)
    assert times.are_quick


def test_the_first_mask_of_a_request_is_no_measure_of_others() -> None:
    times = measured()
    times.began([1], 0.0)
    times.came([1], 0.0)  # with the message that its grammar is compiled
    assert not times.are_quick


def test_masks_are_overdue_until_they_come_or_their_request_ends() -> None:
    times = MaskTimes()
    times.asked([1, 2, 3], 0.0)
    times.began([4, 5], 0.0)
    times.asked([6], LIMIT_S)
    assert times.overdue(LIMIT_S) == set()
    late = 1.5 * LIMIT_S
    assert times.overdue(late) == {1, 2, 3, 4, 5}
    times.came([1, 4], late)
    times.ended([2, 5])
    assert times.overdue(late) == {3}
    times.forget()
    assert times.overdue(9.0) == set() and not times.are_quick
