"""The order in which a stage does what it is asked for, and how long it waited."""

from pagewire.engine.parallel.stage import Due, StageQueue, StageTimes
from pagewire.ipc.messages import Hidden, Sleep, StageSeconds, StepPlan, Wake


def plan(step: int) -> StepPlan:
    return StepPlan(step, (), b"", b"", b"", b"", b"")


def test_a_later_stage_runs_plans_in_their_order_when_their_input_is_there() -> None:
    queue = StageQueue(is_first=False, knows_ids=lambda _: False)
    hidden = {step: Hidden(step) for step in (1, 2, 3)}
    queue.put(hidden[2])  # before its plan, and before the one of an earlier step
    for task in (plan(1), plan(2), Sleep(), Wake(), plan(3)):
        queue.put(task)
    assert queue.next() is None and queue.is_waiting
    queue.put(hidden[1])
    assert [queue.next() for _ in range(5)] == [
        Due(plan(1), hidden[1]), Due(plan(2), hidden[2]), Due(Sleep(), None), Due(Wake(), None), None
    ]  # fmt: skip
    queue.put(hidden[3])
    assert queue.next() == Due(plan(3), hidden[3]) and queue.next() is None and not queue.is_waiting


def test_the_first_stage_runs_a_plan_when_its_ids_are_known() -> None:
    known: set[int] = set()
    queue = StageQueue(is_first=True, knows_ids=lambda each: each.step in known)
    for task in (plan(1), plan(2), Sleep()):
        queue.put(task)
    assert queue.next() is None
    known.add(2)
    assert queue.next() is None, "an earlier plan waits"
    known.add(1)
    assert [queue.next() for _ in range(4)] == [Due(plan(1), None), Due(plan(2), None), Due(Sleep(), None), None]


def test_seconds_are_told_apart() -> None:
    now = 10.0
    times = StageTimes(lambda: now)
    times.waits()
    now = 11.0
    times.waits()
    now = 13.0
    times.begins(is_first=True)
    now = 14.0
    times.ends()
    assert times.take() == StageSeconds(1.0, 0.0, 3.0)
    now = 20.0  # without a plan, which does not count here
    times.begins(is_first=False)
    times.ends()
    times.waits()
    now = 22.0
    times.begins(is_first=False)
    assert times.take() == StageSeconds(0.0, 2.0, 0.0)
