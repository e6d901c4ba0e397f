"""Which positions a step computes."""

from fakes import enqueue

from pagewire.ipc.messages import bytes_to_ids

from .test_scheduler import make, worker_for


def test_a_long_prompt_is_chunked_and_decode_rows_go_first() -> None:
    scheduler = make(budget=8)
    worker = worker_for(scheduler)
    scheduler.add(enqueue(1, [1, 2, 3], ignore_eos=True, max_tokens=30))
    scheduler.apply(worker.run(scheduler.plan()))  # type: ignore[arg-type]
    scheduler.add(enqueue(2, list(range(20)), ignore_eos=True))
    for expected in ([1, 7], [1, 7], [1, 6]):
        plan = scheduler.plan()
        assert plan is not None and list(bytes_to_ids(plan.counts)) == expected
        scheduler.apply(worker.run(plan))


def test_plans_do_not_wait_for_the_tokens_of_earlier_steps() -> None:
    scheduler = make(depth=3)
    scheduler.add(enqueue(1, [1, 2], max_tokens=10))
    plans = [scheduler.plan() for _ in range(3)]
    assert all(plans) and scheduler.plan() is None
    assert [list(bytes_to_ids(p.counts)) for p in plans if p] == [[2], [1], [1]]
