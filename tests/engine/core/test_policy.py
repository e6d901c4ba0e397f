"""Which request each policy runs first, and which it preempts."""

from typing import NamedTuple

from fakes import all_tokens, enqueue, expected_output
from msgspec.structs import replace

from pagewire.engine.core.policy import MAX_PATIENCE_MS, PATIENCE, Expected, Shortest, Stake
from pagewire.engine.core.scheduler import Scheduler
from pagewire.ipc.messages import TokenBatch

from .test_scheduler import drain, make, output, run_all, worker_for


class Place(NamedTuple):
    """A request as a policy sees it."""

    place: float
    queue_key: str = ""


def test_the_best_priority_runs_first() -> None:
    scheduler = make(max_num_seqs=1, policy="priority")
    worker = worker_for(scheduler)
    for rid, priority in ((1, 5), (2, 0), (3, 5), (4, -1)):
        scheduler.add(enqueue(rid, [rid], max_tokens=1, priority=priority))
    assert list(drain(scheduler, worker)) == [4, 2, 1, 3]


def test_a_better_priority_preempts_a_worse_one_which_keeps_its_place_in_the_queue() -> None:
    scheduler = make(max_num_seqs=2, policy="priority")
    worker = worker_for(scheduler)
    for rid in (1, 2, 3):
        scheduler.add(enqueue(rid, [rid], max_tokens=6, priority=5, seed=rid, ignore_eos=True))
    scheduler.apply(worker.run(scheduler.plan()))  # type: ignore[arg-type]
    scheduler.add(enqueue(4, [4], max_tokens=6, priority=1, seed=4, ignore_eos=True))
    tokens = run_all(scheduler, worker)
    assert [t.rid for t in tokens if t.finish] == [1, 4, 2, 3]  # 2 was preempted, and runs again before 3
    for rid in (1, 2, 3, 4):
        assert output([t for t in tokens if t.rid == rid]) == expected_output([rid], 6, 100, rid, ignore_eos=True)
    assert scheduler.counters.num_preemptions == 1


def test_equal_priorities_do_not_preempt_each_other() -> None:
    scheduler = make(max_num_seqs=1, policy="priority")
    worker = worker_for(scheduler)
    for rid in (1, 2):
        scheduler.add(enqueue(rid, [rid], max_tokens=6, priority=3, ignore_eos=True))
    drain(scheduler, worker)
    assert scheduler.counters.num_preemptions == 0


def test_fair_serves_tenants_equally_however_many_requests_each_has() -> None:
    scheduler = make(max_num_seqs=2, policy="fair", num_blocks=200)
    worker = worker_for(scheduler)
    for rid in range(1, 41):
        scheduler.add(enqueue(rid, [rid % 50], max_tokens=10, tenant="many", ignore_eos=True))
    for rid in range(41, 45):
        scheduler.add(enqueue(rid, [rid % 50], max_tokens=10, tenant="few", ignore_eos=True))
    for _ in range(60):
        scheduler.apply(worker.run(scheduler.plan()))  # type: ignore[arg-type]
    done = {
        t.rid for item in scheduler.take_outputs() if isinstance(item, TokenBatch) for t in all_tokens(item) if t.finish
    }
    assert {41, 42, 43, 44} <= done and len(done) < 15


def test_fair_preempts_a_tenant_that_is_far_ahead() -> None:
    scheduler = make(max_num_seqs=1, policy="fair", num_blocks=1000, max_model_len=4000)
    worker = worker_for(scheduler)
    scheduler.add(enqueue(1, [1], max_tokens=1500, tenant="long", ignore_eos=True))
    scheduler.add(enqueue(2, [2], max_tokens=5, tenant="short", ignore_eos=True))
    finished = [t.rid for t in run_all(scheduler, worker) if t.finish]
    assert finished == [2, 1] and scheduler.counters.num_preemptions == 1


def test_fair_gives_a_new_tenant_no_credit() -> None:
    scheduler = make(max_num_seqs=1, policy="fair", num_blocks=1000, max_model_len=4000)
    worker = worker_for(scheduler)
    scheduler.add(enqueue(1, [1], max_tokens=1600, tenant="long", ignore_eos=True))
    for _ in range(1500):
        scheduler.apply(worker.run(scheduler.plan()))  # type: ignore[arg-type]
    scheduler.add(enqueue(2, [2], max_tokens=5, tenant="new", ignore_eos=True))
    finished = [t.rid for t in run_all(scheduler, worker) if t.finish]
    assert finished == [1, 2] and scheduler.counters.num_preemptions == 0  # a new tenant starts level with the others


def test_fair_remembers_the_service_of_a_tenant_between_its_requests() -> None:
    scheduler = make(max_num_seqs=1, policy="fair", num_blocks=2000, max_model_len=4000, max_queued_requests=1000)
    worker = worker_for(scheduler)
    for rid in range(1, 400):
        scheduler.add(enqueue(rid, [rid % 50], max_tokens=10, tenant="small", ignore_eos=True))
    served = {"large": 0, "small": 0}
    rid = 1000
    scheduler.add(enqueue(rid, [1], max_tokens=500, tenant="large", ignore_eos=True))
    for _ in range(3000):
        if (plan := scheduler.plan()) is not None:  # None where a request was preempted
            scheduler.apply(worker.run(plan))
        for item in scheduler.take_outputs():
            for tokens in all_tokens(item) if isinstance(item, TokenBatch) else ():
                served["large" if tokens.rid >= 1000 else "small"] += 1
                if tokens.finish and tokens.rid >= 1000:  # the next request arrives when the last one has ended
                    rid += 1
                    scheduler.add(enqueue(rid, [1], max_tokens=500, tenant="large", ignore_eos=True))
    assert abs(served["large"] - served["small"]) < 600, served


def shortest(**more: object) -> Scheduler:
    return make(max_num_seqs=1, policy="shortest", num_blocks=1000, max_model_len=4000, **more)


def test_the_shortest_runs_first() -> None:
    scheduler = shortest()
    worker = worker_for(scheduler)
    for rid, num_prompt, max_tokens in ((1, 3, 20), (2, 3, 4), (3, 18, 4), (4, 3, 4), (5, 1, 9)):
        scheduler.add(enqueue(rid, [rid] * num_prompt, max_tokens=max_tokens, ignore_eos=True), 1.0)
    finished = [t.rid for t in run_all(scheduler, worker) if t.finish]
    assert finished == [2, 4, 5, 3, 1]


def test_a_request_without_max_tokens_counts_as_long() -> None:
    scheduler = shortest()
    worker = worker_for(scheduler)
    scheduler.add(enqueue(1, [1], max_tokens=None), 1.0)
    scheduler.add(enqueue(2, [2], max_tokens=2000, ignore_eos=True), 1.0)
    assert next(t.rid for t in run_all(scheduler, worker) if t.finish) == 2


def test_newcomers_go_before_a_long_request_until_its_patience_ends() -> None:
    scheduler = shortest()  # nothing is known of steps yet, so a position or token takes a millisecond
    worker = worker_for(scheduler)
    scheduler.add(enqueue(1, [1] * 10, max_tokens=90, ignore_eos=True), 1.0)  # 100 ms: patient for a second
    for rid, now in ((2, 1.5), (3, 1.88), (4, 1.91), (5, 9.0)):
        scheduler.add(enqueue(rid, [rid], max_tokens=10, ignore_eos=True), now)  # 11 ms
    finished = [t.rid for t in run_all(scheduler, worker) if t.finish]
    assert finished == [2, 3, 1, 4, 5]


def test_no_patience_is_longer_than_the_longest() -> None:
    policy = Shortest()
    message = enqueue(1, [1])
    long = policy.place(message, 0.0, Expected(1e6, 1e9))
    assert long == MAX_PATIENCE_MS < policy.place(message, 1.0, Expected(1e6, 1e12))
    assert policy.place(replace(message, attempt=1), 1e9, Expected(1e6, 1e9)) < long  # it was accepted before


def test_a_short_request_preempts_a_long_one_which_goes_on_afterwards() -> None:
    scheduler = shortest()
    worker = worker_for(scheduler)
    scheduler.add(enqueue(1, [1], max_tokens=500, seed=1, ignore_eos=True), 1.0)
    for _ in range(10):
        scheduler.apply(worker.run(scheduler.plan()))  # type: ignore[arg-type]
    scheduler.add(enqueue(2, [2], max_tokens=5, seed=2, ignore_eos=True), 1.1)
    outputs = drain(scheduler, worker)
    assert list(outputs) == [1, 2] and scheduler.counters.num_preemptions == 1
    for rid, num in ((1, 500), (2, 5)):
        assert output(outputs[rid]) == expected_output([rid], num, 4000, rid, ignore_eos=True)


def test_a_long_request_is_not_preempted_where_bringing_it_back_costs_more() -> None:
    waiting, running = Place(0.0), Place(PATIENCE * 50)
    interrupts = Shortest().interrupts
    assert interrupts(waiting, running, Stake(1, price_ms=49, left_ms=1000))
    assert not interrupts(waiting, running, Stake(1, price_ms=50, left_ms=1000))  # shorter by no more than that
    assert not interrupts(waiting, running, Stake(1, price_ms=10, left_ms=10))  # it will end as soon
    assert not interrupts(running, waiting, Stake(1))


def test_resumed_requests_go_before_shorter_ones() -> None:
    scheduler = shortest()
    worker = worker_for(scheduler)
    scheduler.add(enqueue(1, [1], max_tokens=5, ignore_eos=True), 1.0)
    for rid in (2, 3):
        scheduler.add(replace(enqueue(rid, [rid], max_tokens=60 - rid, ignore_eos=True), attempt=1), 2.0)
    assert [t.rid for t in run_all(scheduler, worker) if t.finish] == [2, 3, 1]
