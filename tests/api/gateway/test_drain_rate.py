"""Retry-After is the time that the open requests will take at the recent rate."""

from pagewire.api.gateway.drain_rate import DrainRate


def test_it_is_one_second_before_any_request_has_ended() -> None:
    assert DrainRate(0.0).retry_after_s(1000) == 1


def test_the_recent_rate_counts() -> None:
    rate = DrainRate(0.0)
    for second in range(1, 201):
        rate.note(second / 10, is_busy=True, num_ended=1)  # ten a second
    assert rate.retry_after_s(0) == 1 and rate.retry_after_s(5) == 1
    assert rate.retry_after_s(95) == 10 and rate.retry_after_s(100_000) == 60, "at most a minute"
    for second in range(1, 101):
        rate.note(20 + second, is_busy=True, num_ended=1)  # now one a second
    assert 9 <= rate.retry_after_s(10) <= 10


def test_idle_time_does_not_change_the_rate() -> None:
    rate = DrainRate(0.0)
    for second in range(1, 21):
        rate.note(second, is_busy=second < 20, num_ended=4)
    before = rate.retry_after_s(100)
    assert 20 < before <= 26
    rate.note(3600.0, is_busy=True)
    assert rate.retry_after_s(100) == before
    rate.note(3604.0, is_busy=True)
    assert rate.retry_after_s(100) > before, "no request has ended in four busy seconds"
