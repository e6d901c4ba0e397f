"""What the broker does next, of every state of the placement group and of the holders."""

import pytest

from pagewire.ray.placing import HolderState, Step, next_steps, waits_for

NONE, RUNS, UNCERTAIN, ENDED = HolderState


@pytest.mark.parametrize("group", [None, "REMOVED"])
def test_without_a_group_nothing_else_is_done(group: str | None) -> None:
    assert next_steps(group, [NONE, RUNS]) == [(Step.MAKE_GROUP, -1)]


def test_a_holder_is_started_only_in_a_group_that_has_its_room() -> None:
    assert next_steps("PENDING", [NONE, NONE]) == []
    assert next_steps("CREATED", [NONE, RUNS, NONE]) == [(Step.START, 0), (Step.START, 2)]


def test_a_holder_that_may_still_run_is_asked_and_not_replaced() -> None:
    for group in ("CREATED", "RESCHEDULING"):
        assert next_steps(group, [UNCERTAIN, RUNS]) == [(Step.ASK_AGAIN, 0)]


def test_a_holder_that_has_ended_is_forgotten_before_another_one_starts() -> None:
    assert next_steps("CREATED", [ENDED, RUNS]) == [(Step.FORGET, 0)]
    assert next_steps("RESCHEDULING", [ENDED]) == [(Step.FORGET, 0)]


def test_what_the_engine_waits_for() -> None:
    bundle = {"CPU": 2.0, "GPU": 2.0}
    assert waits_for("RESCHEDULING", [RUNS, NONE], bundle, {"CPU": 3.0, "memory": 1e9}) == (
        "Ray has no room for 2 times 2 CPU, 2 GPU, each on one node "
        "(its state: RESCHEDULING; free on all nodes: 3 CPU, 0 GPU)"
    )
    assert waits_for("CREATED", [RUNS, NONE], bundle, {}) == "Ray starts 1 of 2 followers"
    assert waits_for("CREATED", [RUNS, UNCERTAIN], bundle, {}) == ""
