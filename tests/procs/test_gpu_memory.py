"""Which GPUs several models get, and waiting for their memory."""

import asyncio
from collections.abc import Sequence

from pagewire.procs.gpu_memory import place, wait_for_room

GB = 10**9


def test_models_are_dealt_to_the_gpus_that_have_least() -> None:
    assert place([(1, 6), (1, 5), (1, 4), (1, 3)], 2, [False] * 4) == [(0,), (1,), (1,), (0,)]
    assert place([(2, 5), (1, 9), (0, 0)], 3, [False] * 3) == [(1, 2), (0,), ()]


def test_pinned_models_are_dealt_first() -> None:
    """Each gets a GPU of its own, however small it is."""
    places = place([(1, 9), (1, 1), (1, 2)], 2, [False, True, True])
    assert {places[1], places[2]} == {(0,), (1,)} and places[0] == places[1]


def test_a_load_waits_for_memory_that_comes_back_late() -> None:
    answers: list[Sequence[int]] = [(1 * GB, 9 * GB), (2 * GB, 9 * GB), (6 * GB, 9 * GB), (0, 0)]
    asked: list[list[str]] = []

    def free(names: Sequence[str]) -> Sequence[int]:
        asked.append(list(names))
        return answers[len(asked) - 1]

    assert asyncio.run(wait_for_room({"GPU-a": 5 * GB, "GPU-b": 5 * GB}, free, within_s=60.0)) == ""
    assert asked == [["GPU-a", "GPU-b"]] * 3


def test_what_other_programs_have_taken_is_said() -> None:
    why = asyncio.run(wait_for_room({"GPU-a": 5 * GB}, lambda names: [2 * GB], within_s=0.0))
    assert why.startswith("GPU-a has 2.0 GB free, and the model takes 5.0 GB there: other programs")


def test_without_a_gpu_or_an_answer_nothing_waits() -> None:
    def never(names: Sequence[str]) -> Sequence[int]:
        raise AssertionError(names)

    assert asyncio.run(wait_for_room({}, never)) == ""
    assert asyncio.run(wait_for_room({"GPU-a": 1}, lambda names: None)) == ""
