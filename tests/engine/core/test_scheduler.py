"""Rules of the scheduler that no test of its parts holds, and helpers of those tests."""

from collections import deque
from typing import get_args

import pytest
from fakes import EOS, FakeWorker, all_tokens, enqueue
from invariants import check
from msgspec.structs import replace

from pagewire.config.latency_classes import LatencyClass
from pagewire.engine.core.block_pool import BlockPool
from pagewire.engine.core.domains import Domains
from pagewire.engine.core.policy import PolicyName
from pagewire.engine.core.scheduler import Adjustable, Scheduler
from pagewire.ipc.messages import Accepted, Failed, RowFailure, StepResult, TokenBatch, Tokens, bytes_to_ids

BLOCK_SIZE = 4


def make(*, num_blocks: int = 64, max_num_seqs: int = 8, budget: int = 32, depth: int = 1, **more: object) -> Scheduler:
    options = {
        "pool": BlockPool(num_pages=num_blocks),
        "max_model_len": 100,
        "max_queued_requests": 100,
        "max_queued_tokens": 10**6,
        "eos_token_ids": (EOS,),
        **more,
    }
    return Scheduler(
        block_size=BLOCK_SIZE,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        depth=depth,
        **options,  # type: ignore[arg-type]
    )


def worker_for(scheduler: Scheduler) -> FakeWorker:
    return FakeWorker(
        num_blocks=scheduler.pool.num_pages,
        block_size=BLOCK_SIZE,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
    )


def run_all(scheduler: Scheduler, worker: FakeWorker) -> list[Tokens]:
    """Runs to the end. Returns all tokens in order."""
    while (plan := scheduler.plan()) is not None:
        scheduler.apply(worker.run(plan))
        check(scheduler)
    return [t for item in scheduler.take_outputs() if isinstance(item, TokenBatch) for t in all_tokens(item)]


def drain(scheduler: Scheduler, worker: FakeWorker) -> dict[int, list[Tokens]]:
    """Runs to the end. Returns the tokens of each request."""
    outputs: dict[int, list[Tokens]] = {}
    for tokens in run_all(scheduler, worker):
        outputs.setdefault(tokens.rid, []).append(tokens)
    return outputs


def output(outputs: list[Tokens]) -> list[int]:
    return [i for tokens in outputs for i in bytes_to_ids(tokens.ids)]


def test_a_result_of_another_step_or_without_its_tokens_is_refused() -> None:
    scheduler = make()
    with pytest.raises(ValueError, match="step 3 where step None"):
        scheduler.apply(StepResult(3, b"", {}, {}, 0.0))
    scheduler.add(enqueue(1, [1]))
    scheduler.plan()
    with pytest.raises(ValueError, match="sampled 0 tokens"):
        scheduler.apply(StepResult(1, b"", {}, {}, 0.0))


def test_deadlines_of_ended_requests_are_dropped() -> None:
    scheduler = make()
    worker = worker_for(scheduler)
    for rid in range(1, 500):
        scheduler.add(enqueue(rid, [rid % 50], max_tokens=1, queue_timeout_s=1e6))
        drain(scheduler, worker)
    assert len(scheduler.deadlines) < 100


def test_a_request_that_a_plugin_fails_ends_and_leaves_nothing_behind() -> None:
    """With plans in flight, of a chunk and of a decode row; the request beside it gets its tokens, and nobody finds the
    KV of the one that failed."""
    for at in range(1, 6):
        scheduler = make(depth=2, budget=6)
        worker, failed = worker_for(scheduler), []
        scheduler.add(enqueue(1, [*range(10, 20)], max_tokens=6, ignore_eos=True))
        scheduler.add(enqueue(2, [*range(30, 33)], max_tokens=6, ignore_eos=True))
        results, outputs = deque[StepResult](), list[Tokens]()
        row = -1
        while True:
            while (plan := scheduler.plan()) is not None:
                row = next((opened.row for opened in plan.open if opened.rid == 1), row)
                rows = bytes_to_ids(plan.rows)
                result = worker.run(plan)
                if plan.step >= at and row in rows:
                    why = RowFailure("internal", "It has failed.")
                    result = replace(result, failed={rows.index(row): why}, num_failed_calls=1)
                results.append(result)
            if not results:
                break
            scheduler.apply(results.popleft())
            check(scheduler)
            for item in scheduler.take_outputs():
                failed += [item] if isinstance(item, Failed) else []
                outputs += all_tokens(item) if isinstance(item, TokenBatch) else []
        assert failed == [Failed(1, "internal", "It has failed.")]
        of_other = [tokens for tokens in outputs if tokens.rid == 2]
        assert len(output(of_other)) == 6 and of_other[-1].finish == "length"
        assert scheduler.counters.num_failed_calls >= 1 and scheduler.pool.num_free == scheduler.pool.num_pages
        scheduler.add(enqueue(3, [*range(10, 20)], max_tokens=1))
        drain(scheduler, worker)
        assert scheduler.counters.num_cached_tokens == 0


@pytest.mark.parametrize(("keys_by_args", "num_cached"), [(False, 8), (True, 0)])
def test_requests_with_other_arguments_for_a_plugin_share_kv_only_if_it_allows_that(
    keys_by_args: bool, num_cached: int
) -> None:
    scheduler = make(keys_by_args=keys_by_args)
    worker = worker_for(scheduler)
    for rid, args in enumerate((b"", b'{"a": 1}', b'{"a": 2}'), 1):
        before = scheduler.counters.num_cached_tokens
        for again in (0, 100):
            message = enqueue(rid + again, [*range(10, 20)], max_tokens=1)
            scheduler.add(replace(message, sampling=replace(message.sampling, extra_args=args)))
            drain(scheduler, worker)
        expected = (num_cached if rid > 1 else 0) + 8  # the second one always finds what the first has computed
        assert scheduler.counters.num_cached_tokens - before == expected


ASKED = Adjustable(
    max_num_seqs=8,
    max_num_batched_tokens=32,
    max_queued_requests=100,
    max_queued_tokens=10**6,
    policy="fcfs",
    latency_classes={},
    itl_target_ms=None,
    speculate=0,
)


def test_what_runs_goes_on_when_fewer_rows_may_be_held_and_nobody_joins_meanwhile() -> None:
    scheduler = make()
    worker = worker_for(scheduler)
    for rid in (1, 2, 3):
        scheduler.add(enqueue(rid, [rid], max_tokens=5, seed=rid, ignore_eos=True))
    step(scheduler, worker)
    assert scheduler.num_running == 3
    scheduler.change(ASKED._replace(max_num_seqs=2))
    for rid in (4, 5):
        scheduler.add(enqueue(rid, [rid], max_tokens=5, seed=rid, ignore_eos=True))
    most = []
    while (plan := scheduler.plan()) is not None:
        scheduler.apply(worker.run(plan))
        most.append(scheduler.num_running)
        check(scheduler, 8)
    assert most[0] == 3 and set(most[4:]) == {2, 0}, most
    assert scheduler.counters.num_preemptions == 0


def step(scheduler: Scheduler, worker: FakeWorker) -> list[int]:
    """Runs one step. Returns the rows' counts."""
    plan = scheduler.plan()
    assert plan is not None
    scheduler.apply(worker.run(plan))
    return list(bytes_to_ids(plan.counts))


def test_a_smaller_step_and_no_draft_tokens_hold_from_the_next_plan_on() -> None:
    scheduler = make(speculate=3)
    worker = worker_for(scheduler)
    scheduler.add(enqueue(1, [*range(60)], max_tokens=30, ignore_eos=True))
    assert step(scheduler, worker) == [32]
    scheduler.change(ASKED._replace(max_num_batched_tokens=10, speculate=3))
    assert [step(scheduler, worker) for _ in range(3)] == [[10], [10], [8]]
    plan = scheduler.plan()
    assert plan is not None and plan.speculate == 3
    scheduler.change(ASKED)  # while its result is due
    scheduler.apply(worker.run(plan))
    plan = scheduler.plan()
    assert plan is not None and plan.speculate == 0
    scheduler.apply(worker.run(plan))
    run_all(scheduler, worker)


def test_the_bounds_of_the_queue_hold_for_requests_that_arrive() -> None:
    scheduler = make()
    for rid in (1, 2):
        assert isinstance(scheduler.add(enqueue(rid, [1]))[0], Accepted)
    scheduler.change(ASKED._replace(max_queued_requests=2))
    (refused,) = scheduler.add(enqueue(3, [1]))
    assert isinstance(refused, Failed) and refused.kind == "queue_full" and scheduler.num_waiting == 2


CLASSES = {"default": LatencyClass(), "chat": LatencyClass(ttft_ms=20.0), "batch": LatencyClass(share=0.5)}


@pytest.mark.parametrize("policy", get_args(PolicyName))
def test_another_policy_orders_requests_as_if_they_had_arrived_under_it(policy: PolicyName) -> None:
    asked = ASKED._replace(max_num_seqs=1, policy=policy, latency_classes=CLASSES)
    orders = []
    for is_changed in (False, True):
        first: PolicyName = ("fcfs" if policy != "fcfs" else "priority") if is_changed else policy
        scheduler = make(max_num_seqs=1, policy=first, latency_classes=CLASSES)
        worker = worker_for(scheduler)
        for rid in range(1, 9):
            more = {"priority": -rid % 3, "tenant": "ab"[rid % 3 > 0], "latency_class": ("", "chat", "batch")[rid % 3]}
            message = enqueue(rid, [*range(rid * 7 % 11 + 1)], max_tokens=3, seed=rid, ignore_eos=True, **more)  # type: ignore[arg-type]
            scheduler.add(message, now=rid / 1e3)
        if is_changed:
            scheduler.change(asked)
        order: list[int] = []
        while True:
            scheduler.expire(0.010)
            if (plan := scheduler.plan()) is None:
                break
            order += [row.rid for row in plan.open]
            scheduler.apply(worker.run(plan))
        orders.append(order)
    assert orders[0] == orders[1], orders
    assert policy == "fcfs" or orders[0] != sorted(orders[0]), "the order would be the same under fcfs"


def test_a_policy_that_stays_keeps_what_it_knows() -> None:
    """What tenants were served decides under `fair`, so an unrelated change must not reset it."""
    scheduler = make(policy="fair")
    policy = scheduler._policy
    scheduler.change(ASKED._replace(policy="fair", max_queued_requests=3, latency_classes=CLASSES))
    assert scheduler._policy is policy
    scheduler.change(ASKED._replace(policy="slo", latency_classes=CLASSES))
    assert scheduler._policy is not policy


def test_domains_change_together() -> None:
    options = {"policy": "fcfs", "max_num_seqs": 4}
    domains = Domains(lambda _, first: make(beside=first, **options), 2)  # type: ignore[arg-type]
    for rid in range(6):
        domains.add(enqueue(rid, [rid], priority=-rid))
    domains.change(ASKED._replace(policy="priority", max_num_seqs=1))
    firsts = [scheduler.table.waiting.first() for scheduler in domains.schedulers]
    assert [first.rid for first in firsts if first is not None] == [4, 5]
    assert domains.schedulers[0]._policy is domains.schedulers[1]._policy
    domains.plan()
    assert [scheduler.num_running for scheduler in domains.schedulers] == [1, 1]
