"""The number of engines that a Ray Serve application wants."""

import pytest

from pagewire.ray.policy import num_wanted

Metrics = dict[str, dict[str, float]]


def wanted(num_running: int, waiting: list[float], running: list[float], ttft: list[float]) -> int | None:
    """The values of each engine; ten sequences for one engine, and 100 ms to the first token."""
    columns = {"waiting": waiting, "running": running, "ttft_p90_ms": ttft}
    metrics: Metrics = {name: {str(i): value for i, value in enumerate(column)} for name, column in columns.items()}
    return num_wanted(metrics, num_running, requests_per_replica=10, ttft_target_ms=100)


def test_nothing_is_wanted_before_an_engine_has_reported() -> None:
    assert num_wanted({}, 1, requests_per_replica=10, ttft_target_ms=100) is None
    assert wanted(0, [], [], []) is None


@pytest.mark.parametrize(("open_sequences", "num"), [(0, 0), (1, 1), (10, 1), (11, 2), (35, 4)])
def test_sequences_in_the_queue_and_in_the_batch_count_alike(open_sequences: int, num: int) -> None:
    assert wanted(1, [open_sequences], [0], [0]) == num
    assert wanted(1, [0], [open_sequences], [0]) == num


def test_an_engine_that_has_not_reported_counts_like_the_others() -> None:
    assert wanted(2, [10], [0], [0]) == 2, "not 1: the other one has as many, as far as is known"


def test_slow_first_tokens_ask_for_one_more_engine_if_sequences_wait() -> None:
    assert wanted(2, [1, 0], [3, 3], [150, 20]) == 3
    assert wanted(2, [0, 0], [3, 3], [150, 20]) == 1, "another engine would not make a long prompt shorter"


def test_an_engine_does_not_go_while_first_tokens_are_nearly_too_slow() -> None:
    assert wanted(2, [1, 0], [3, 3], [60, 20]) == 2
    assert wanted(2, [1, 0], [3, 3], [40, 20]) == 1
