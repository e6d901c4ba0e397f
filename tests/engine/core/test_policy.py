"""Which request each policy runs first, and which it preempts."""

from typing import NamedTuple

import pytest
from fakes import FakeWorker, all_tokens, enqueue, expected_output
from msgspec.structs import replace

from pagewire.config.latency_classes import LatencyClass
from pagewire.engine.core.cost import Work, with_chunk
from pagewire.engine.core.policy import MAX_PATIENCE_MS, PATIENCE, Expected, Shortest, Slo, Stake
from pagewire.engine.core.preemption import order
from pagewire.engine.core.request import Request
from pagewire.engine.core.scheduler import Scheduler
from pagewire.ipc.messages import Times, TokenBatch, Tokens, bytes_to_ids

from .test_scheduler import drain, make, output, run_all, worker_for


class Place(NamedTuple):
    """A request as a policy sees it."""

    place: float
    queue_key: str = ""
    is_streaming: bool = False


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


def shortest() -> Scheduler:
    return make(max_num_seqs=1, policy="shortest", num_blocks=1000, max_model_len=4000)


def test_the_shortest_runs_first() -> None:
    scheduler = shortest()
    worker = worker_for(scheduler)
    for rid, num_prompt, max_tokens in ((1, 3, 20), (2, 3, 4), (3, 18, 4), (4, 3, 4), (5, 1, 9)):
        scheduler.add(enqueue(rid, [rid] * num_prompt, max_tokens=max_tokens, ignore_eos=True), 1.0)
    finished = [t.rid for t in run_all(scheduler, worker) if t.finish]
    assert finished == [2, 4, 5, 3, 1]


def test_a_request_without_max_tokens_counts_as_long() -> None:
    scheduler = shortest()
    for rid, max_tokens in ((1, None), (2, 2000)):
        scheduler.add(enqueue(rid, [1], max_tokens=max_tokens), 1.0)
    first = scheduler.table.waiting.first()
    assert first is not None and first.rid == 2


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


CLASSES = {
    "chat": LatencyClass(ttft_ms=500, itl_ms=50),
    "report": LatencyClass(ttft_ms=5000),
    "batch": LatencyClass(weight=2),
}


def slo(classes: dict[str, LatencyClass] | None = None, **more: int) -> Scheduler:
    return make(
        policy="slo",
        latency_classes=CLASSES if classes is None else classes,
        num_blocks=1000,
        max_model_len=4000,
        **more,
    )


def ask(scheduler: Scheduler, rid: int, name: str, now: float, num_prompt: int = 1, max_tokens: int = 5) -> None:
    prompt = [rid % 50] * num_prompt
    scheduler.add(enqueue(rid, prompt, max_tokens=max_tokens, seed=rid, latency_class=name, ignore_eos=True), now)


def ends(scheduler: Scheduler, worker: FakeWorker) -> list[int]:
    return [t.rid for t in run_all(scheduler, worker) if t.finish]


def test_the_earliest_deadline_goes_first() -> None:
    scheduler = slo(max_num_seqs=1)
    worker = worker_for(scheduler)
    for rid, name, now in ((1, "report", 1.0), (2, "", 1.0), (3, "chat", 1.2), (4, "batch", 1.0), (5, "chat", 6.0)):
        ask(scheduler, rid, name, now)
    ask(scheduler, 6, "unknown", 1.0)  # a class that a configuration before had
    # Deadlines: 6.0, 31.0, 1.7, 16.0, 6.5, 31.0 s; those without a target have 30 s over the weight.
    assert ends(scheduler, worker) == [3, 1, 5, 4, 2, 6]


def test_a_request_that_cannot_meet_its_target_steps_behind_those_that_can() -> None:
    scheduler = slo(max_num_seqs=1)
    worker = worker_for(scheduler)
    ask(scheduler, 1, "chat", 1.0, num_prompt=20)  # nothing is known of steps yet, so its prompt takes 20 ms
    ask(scheduler, 2, "chat", 1.4)
    ask(scheduler, 3, "batch", 1.0)
    assert scheduler.has_deadlines
    scheduler.expire(1.479)
    assert [request.rid for request in waiting(scheduler)] == [1, 2, 3]
    scheduler.expire(1.481)
    assert [request.rid for request in waiting(scheduler)] == [2, 3, 1]
    scheduler.expire(1.89)  # its place changes once
    assert ends(scheduler, worker) == [2, 3, 1] and not scheduler.counters.num_preemptions
    scheduler.expire(100.0)
    assert not scheduler.has_deadlines


def test_the_order_counts_from_the_time_when_the_tokenizer_took_it() -> None:
    early, late = enqueue(1, [1], latency_class="chat"), enqueue(2, [1], latency_class="chat")
    early = replace(early, times=Times(taken=9.0))
    late = replace(late, times=Times(taken=12.0))  # another machine's clock
    policy, expected = Slo(CLASSES), Expected(1, 1)
    assert policy.place(early, 10_000.0, expected) == 9500.0
    assert policy.place(late, 10_000.0, expected) == 10_500.0


def test_newcomers_go_before_a_late_request_until_it_is_old() -> None:
    scheduler = slo({"chat": LatencyClass(ttft_ms=500)}, max_num_seqs=1)
    worker = worker_for(scheduler)
    ask(scheduler, 1, "chat", 1.0)
    scheduler.expire(2.0)
    for rid, now in ((2, 2.0), (3, 30.9), (4, 31.1)):
        ask(scheduler, rid, "chat", now)
    assert ends(scheduler, worker) == [2, 3, 1, 4]


def test_a_request_that_can_meet_its_target_preempts_one_without() -> None:
    scheduler = slo(max_num_seqs=1)
    worker = worker_for(scheduler)
    ask(scheduler, 1, "batch", 1.0, max_tokens=500)
    for _ in range(5):
        scheduler.apply(worker.run(scheduler.plan()))  # type: ignore[arg-type]
    ask(scheduler, 2, "chat", 1.1)
    outputs = drain(scheduler, worker)
    assert list(outputs) == [1, 2] and scheduler.counters.num_preemptions == 1
    assert output(outputs[1]) == expected_output([1], 500, 4000, 1, ignore_eos=True)


def test_a_stream_with_a_target_is_not_interrupted() -> None:
    waiting, running = Place(500.0, "chat"), Place(5000.0, "chat")
    interrupts = Slo(CLASSES).interrupts
    assert interrupts(waiting, running, Stake(1))
    assert not interrupts(waiting, running._replace(is_streaming=True), Stake(1))
    assert interrupts(waiting, running._replace(is_streaming=True, queue_key="report"), Stake(1))
    assert not interrupts(waiting, running, Stake(1, price_ms=4500, left_ms=9000))


def test_a_class_that_had_its_share_lets_others_go_first_and_no_other() -> None:
    classes = {"chat": LatencyClass(ttft_ms=500), "bulk": LatencyClass(ttft_ms=100, share=0.25)}
    scheduler = slo(classes, max_num_seqs=2, max_queued_requests=1000)
    worker = worker_for(scheduler)
    for rid in range(1, 41):
        ask(scheduler, rid, "bulk", 1.0, max_tokens=10)
    for rid in range(41, 81):
        ask(scheduler, rid, "chat", 1.0, max_tokens=10)
    finished = ends(scheduler, worker)
    share = sum(rid <= 40 for rid in finished[:40]) / 40
    assert 0.15 <= share <= 0.35, share
    assert finished[60:] == [*range(21, 41)] or set(finished[-20:]) <= set(range(1, 41))  # alone it has everything


@pytest.mark.parametrize(("weight", "held_s"), [(1, 60), (4, 15)])
def test_a_class_that_had_its_share_waits_no_longer_than_its_requests_age(weight: float, held_s: float) -> None:
    classes = {"chat": LatencyClass(ttft_ms=500), "bulk": LatencyClass(share=0.1, weight=weight)}
    scheduler = slo(classes, max_num_seqs=1, max_queued_requests=1000)
    worker = worker_for(scheduler)
    ask(scheduler, 1, "bulk", 0.5, max_tokens=1000)
    drain(scheduler, worker)
    ask(scheduler, 2, "bulk", 1.0)
    ask(scheduler, 3, "bulk", 5.0)
    begun: list[tuple[float, int]] = []
    for tick in range(10, 800):  # others always wait
        now, rid = tick / 10, 100 + tick
        ask(scheduler, rid, "chat", now, max_tokens=1)
        assert scheduler.has_deadlines
        scheduler.expire(now)
        while (plan := scheduler.plan()) is not None:
            scheduler.apply(worker.run(plan))
            begun += [(now, t.rid) for t in taken(scheduler) if t.rid < 10 and t.finish]
            if len(scheduler.table.waiting) <= 2:
                break
    assert [rid for _, rid in begun] == [2, 3]
    assert [now for now, _ in begun] == pytest.approx([1 + held_s, 5 + held_s], abs=0.3)


def taken(scheduler: Scheduler) -> list[Tokens]:
    batches = [item for item in scheduler.take_outputs() if isinstance(item, TokenBatch)]
    return [tokens for batch in batches for tokens in all_tokens(batch)]


def test_the_strictest_target_of_the_streams_bounds_the_chunk_beside_them() -> None:
    def chunk(name: str) -> int:
        scheduler = slo(max_num_seqs=4, budget=64)
        for _ in range(50):
            scheduler._cost.observe(with_chunk(Work(1, 10, 0, 0), 0, 64), 74.0)
            scheduler._cost.observe(Work(1, 10, 0, 0), 10.0)
        worker = worker_for(scheduler)
        ask(scheduler, 1, name, 1.0, max_tokens=90)
        scheduler.apply(worker.run(scheduler.plan()))  # type: ignore[arg-type]
        ask(scheduler, 2, "report", 1.0, num_prompt=64)
        plan = scheduler.plan()
        assert plan is not None
        return max(bytes_to_ids(plan.counts))

    assert chunk("batch") == 63 and 30 <= chunk("chat") <= 45  # of 50 ms the stream itself takes 10


def waiting(scheduler: Scheduler) -> list[Request]:
    return sorted(scheduler.table.waiting, key=order(scheduler._policy))
