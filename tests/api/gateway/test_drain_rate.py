"""When to come again: as long as what is open will take at the speed of late."""

from pagewire.api.gateway.drain_rate import DrainRate


def test_nothing_is_known_at_first() -> None:
    assert DrainRate(0.0).retry_after_s(1000) == 1


def test_the_speed_of_late() -> None:
    rate = DrainRate(0.0)
    for second in range(1, 201):
        rate.note(second / 10, is_busy=True, num_ended=1)  # ten a second
    assert rate.retry_after_s(0) == 1 and rate.retry_after_s(5) == 1
    assert rate.retry_after_s(95) == 10 and rate.retry_after_s(100_000) == 60, "nobody waits for more than a minute"
    for second in range(1, 101):
        rate.note(20 + second, is_busy=True, num_ended=1)  # now one a second
    assert 9 <= rate.retry_after_s(10) <= 10


def test_an_idle_hour_says_nothing_of_the_speed() -> None:
    rate = DrainRate(0.0)
    for second in range(1, 21):
        rate.note(second, is_busy=second < 20, num_ended=4)
    before = rate.retry_after_s(100)
    assert 20 < before <= 26
    rate.note(3600.0, is_busy=True)
    assert rate.retry_after_s(100) == before
    rate.note(3604.0, is_busy=True)
    assert rate.retry_after_s(100) > before, "four seconds of work have ended nothing"
