"""Which request is preempted, and that preempted requests resume with the same output."""

import pytest
from fakes import enqueue, expected_output
from invariants import check

from pagewire.engine.core.preemption import choose_interrupted, choose_victim, order
from pagewire.engine.core.request import Request
from pagewire.engine.core.scheduler import Scheduler

from .test_scheduler import drain, make, output, worker_for


def run_until_preemption(scheduler: Scheduler) -> list[int]:
    """The requests that are preempted first."""
    worker = worker_for(scheduler)
    while not scheduler.counters.num_preemptions:
        if plan := scheduler.plan():
            scheduler.apply(worker.run(plan))
        check(scheduler)
    return [request.rid for request in scheduler.table.waiting]


def started(scheduler: Scheduler, lengths: dict[int, int], priority: int = 0) -> list[Request]:
    """Requests with prompts of these lengths, each with its first token, in the order of the policy."""
    worker = worker_for(scheduler)
    for rid, length in lengths.items():
        scheduler.add(
            enqueue(rid, [rid * 9 + i for i in range(length)], max_tokens=9, ignore_eos=True, priority=priority)
        )
    while any(len(request.ids) == request.num_prompt for request in scheduler.table.requests.values()):
        plan = scheduler.plan()
        assert plan is not None
        scheduler.apply(worker.run(plan))
    return sorted(scheduler.table.running, key=order(scheduler._policy))


@pytest.mark.parametrize(
    ("lengths", "victim"),
    [
        ({1: 3, 2: 14, 3: 6, 4: 10}, 3),  # the cheapest but for the first, which is cheaper still
        ({1: 6, 2: 6, 3: 6, 4: 6}, 4),  # of equal ones the one that came last
    ],
)
def test_the_victim_is_the_cheapest_to_compute_again(lengths: dict[int, int], victim: int) -> None:
    num_blocks = sum(-(-length // 4) for length in lengths.values()) + len(lengths)
    scheduler = make(num_blocks=num_blocks, max_model_len=48, budget=64)
    for rid, length in lengths.items():
        scheduler.add(enqueue(rid, [rid * 9 + i for i in range(length)], max_tokens=30, seed=rid, ignore_eos=True))
    assert run_until_preemption(scheduler) == [victim]


def test_the_request_of_the_best_priority_is_never_the_victim() -> None:
    scheduler = make(num_blocks=12, max_model_len=48, budget=64, policy="priority")
    for rid, length, priority in ((1, 5, 2), (2, 9, 1), (3, 3, 0)):
        prompt = [rid * 9 + i for i in range(length)]
        scheduler.add(enqueue(rid, prompt, max_tokens=30, ignore_eos=True, priority=priority))
    assert run_until_preemption(scheduler) == [1]


def test_the_cost_of_a_victim_is_per_block_that_is_needed_and_freed() -> None:
    scheduler = make(budget=64)
    running = started(scheduler, {1: 3, 2: 15, 3: 7})
    assert [len(request.blocks) for request in running] == [1, 4, 2]
    prices = {1: 1.0, 2: 30.0, 3: 20.0}

    def victim(need: int, candidates: list[Request]) -> int | None:
        found = choose_victim(candidates, need, pool=scheduler.pool, price=lambda request: prices[request.rid])
        return None if found is None else found.rid

    assert [victim(need, running) for need in (1, 2, 4, 9)] == [3, 3, 2, 2]  # 20 < 30, 10 < 15, 10 > 7.5
    assert victim(1, running[:1]) is None, "one request always makes progress"
    scheduler.pool.hold(running[2].blocks)  # another block table has them, so that its end frees nothing
    assert victim(1, running) == 2
    scheduler.pool.release(running[2].blocks)


def test_only_the_last_eight_requests_are_priced() -> None:
    scheduler = make(max_num_seqs=12)
    running = started(scheduler, dict.fromkeys(range(1, 13), 3))
    priced: list[int] = []

    def price(request: Request) -> float:
        priced.append(request.rid)
        return request.rid

    found = choose_victim(running, 1, pool=scheduler.pool, price=price)
    assert sorted(priced) == list(range(5, 13)) and found is not None and found.rid == 5


def test_a_waiting_request_interrupts_the_last_ones_of_a_worse_rank_if_they_make_enough_room() -> None:
    scheduler = make(budget=64, policy="priority")
    running = started(scheduler, {1: 3, 2: 7, 3: 3}, priority=1)
    better, equal = (enqueue(rid, [1] * 8, priority=priority) for rid, priority in ((8, 0), (9, 1)))
    for message in (better, equal):
        scheduler.add(message)

    def interrupted(rid: int, short: int, *, has_row: bool) -> list[int]:
        request = scheduler.table.requests[rid]
        pool, policy = scheduler.pool, scheduler._policy
        found = choose_interrupted(
            running, request, short, has_row, pool=pool, policy=policy, stake=scheduler._planner._stake
        )
        return [r.rid for r in found]

    assert interrupted(8, 0, has_row=False) == interrupted(8, 2, has_row=True) == [3]
    assert interrupted(8, 3, has_row=True) == [3, 2]  # each also frees the block that was reserved for its next one
    assert interrupted(8, 7, has_row=True) == [3, 2, 1] and interrupted(8, 8, has_row=True) == []
    assert interrupted(9, 1, has_row=False) == []


def test_preempted_requests_resume_with_their_output() -> None:
    scheduler = make(num_blocks=10, max_model_len=40)
    worker = worker_for(scheduler)
    prompts = {rid: [rid * 3 + i for i in range(6)] for rid in range(1, 5)}
    for rid, prompt in prompts.items():
        scheduler.add(enqueue(rid, prompt, max_tokens=20, seed=rid, ignore_eos=True))
    outputs = drain(scheduler, worker)
    assert scheduler.counters.num_preemptions > 0
    for rid, prompt in prompts.items():
        assert output(outputs[rid]) == expected_output(prompt, 20, 100, rid, ignore_eos=True)


def test_preempted_requests_of_unequal_lengths_resume_with_their_output() -> None:
    scheduler = make(num_blocks=12, max_model_len=48, budget=64)
    worker = worker_for(scheduler)
    lengths = {1: 7, 2: 4, 3: 15, 4: 3}
    for rid, length in lengths.items():
        scheduler.add(enqueue(rid, [rid * 9 + i for i in range(length)], max_tokens=24, seed=rid, ignore_eos=True))
    outputs = drain(scheduler, worker)
    assert scheduler.counters.num_preemptions > 0
    for rid, length in lengths.items():
        prompt = [rid * 9 + i for i in range(length)]
        assert output(outputs[rid]) == expected_output(prompt, 24, 100, rid, ignore_eos=True)
