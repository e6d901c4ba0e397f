"""What the scheduler promises, one rule a test."""

import msgspec
import pytest
from fakes import EOS, FakeWorker, all_tokens, enqueue, expected_output
from invariants import check

from pagewire.engine.core.block_pool import BlockPool
from pagewire.engine.core.scheduler import Scheduler
from pagewire.ipc.messages import Accepted, Failed, Opened, StepResult, TokenBatch, Tokens, bytes_to_ids

BLOCK_SIZE = 4


def make(*, num_blocks: int = 64, max_num_seqs: int = 8, budget: int = 32, depth: int = 1, **more: object) -> Scheduler:
    options = {
        "max_model_len": 100,
        "max_queued_requests": 100,
        "max_queued_tokens": 10**6,
        "eos_token_ids": (EOS,),
        **more,
    }
    return Scheduler(
        pool=BlockPool(num_blocks=num_blocks),
        block_size=BLOCK_SIZE,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        depth=depth,
        **options,  # type: ignore[arg-type]
    )


def worker_for(scheduler: Scheduler) -> FakeWorker:
    return FakeWorker(
        num_blocks=scheduler.pool.num_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
    )


def run_all(scheduler: Scheduler, worker: FakeWorker) -> list[Tokens]:
    """Runs to the end; all tokens in order."""
    while (plan := scheduler.plan()) is not None:
        scheduler.apply(worker.run(plan))
        check(scheduler)
    return [t for item in scheduler.take_outputs() if isinstance(item, TokenBatch) for t in all_tokens(item)]


def drain(scheduler: Scheduler, worker: FakeWorker) -> dict[int, list[Tokens]]:
    """Runs to the end; the tokens of each request."""
    outputs: dict[int, list[Tokens]] = {}
    for tokens in run_all(scheduler, worker):
        outputs.setdefault(tokens.rid, []).append(tokens)
    return outputs


def output(outputs: list[Tokens]) -> list[int]:
    return [i for tokens in outputs for i in bytes_to_ids(tokens.ids)]


def test_a_long_prompt_is_chunked_and_streams_go_first() -> None:
    scheduler = make(budget=8)
    worker = worker_for(scheduler)
    scheduler.add(enqueue(1, [1, 2, 3], ignore_eos=True, max_tokens=30))
    scheduler.apply(worker.run(scheduler.plan()))  # type: ignore[arg-type]
    scheduler.add(enqueue(2, list(range(20)), ignore_eos=True))
    for expected in ([1, 7], [1, 7], [1, 6]):
        plan = scheduler.plan()
        assert plan is not None and list(bytes_to_ids(plan.counts)) == expected
        scheduler.apply(worker.run(plan))


def test_equal_prefixes_are_computed_once_and_salts_keep_them_apart() -> None:
    scheduler = make()
    worker = worker_for(scheduler)
    prompt = list(range(17))
    scheduler.add(enqueue(1, prompt, max_tokens=1))
    drain(scheduler, worker)
    scheduler.add(enqueue(2, prompt, max_tokens=1))
    scheduler.add(enqueue(3, prompt, max_tokens=1, salt=b"mine"))
    scheduler.add(enqueue(4, prompt[:16], max_tokens=1))
    outputs = drain(scheduler, worker)
    cached = {rid: n[-1].usage.num_cached for rid, n in outputs.items() if n[-1].usage}
    assert cached == {2: 16, 3: 0, 4: 15}  # one position is always computed, in a copy of the last block


def test_twins_that_arrive_together_share_one_prefill() -> None:
    scheduler = make(budget=64, depth=2)
    worker = worker_for(scheduler)
    prompt = list(range(18))
    for rid in range(1, 6):
        scheduler.add(enqueue(rid, prompt, max_tokens=3, seed=rid))
    first, second = scheduler.plan(), scheduler.plan()
    assert first is not None and list(bytes_to_ids(first.counts)) == [18]
    assert second is not None and list(bytes_to_ids(second.counts)) == [1, 1, 1, 1, 1]
    assert len(bytes_to_ids(second.copies)) == 2 * 4, "each copies the block that the prompt fills only partly"
    for plan in (first, second):
        scheduler.apply(worker.run(plan))
    drain(scheduler, worker)
    assert scheduler.counters.num_cached_tokens == 4 * 17


def test_prompt_logprobs_bypass_the_prefix_cache() -> None:
    scheduler = make()
    worker = worker_for(scheduler)
    for rid in (1, 2):
        scheduler.add(enqueue(rid, list(range(17)), max_tokens=0, prompt_logprobs=0))
        (tokens,) = drain(scheduler, worker)[rid]
        assert tokens.finish == "length" and tokens.prompt_logprobs is not None
        assert list(bytes_to_ids(tokens.prompt_logprobs.ids)) == list(range(1, 17))


def test_a_plan_needs_no_token_of_the_step_before() -> None:
    scheduler = make(depth=3)
    scheduler.add(enqueue(1, [1, 2], max_tokens=10))
    plans = [scheduler.plan() for _ in range(3)]
    assert all(plans) and scheduler.plan() is None
    assert [list(bytes_to_ids(p.counts)) for p in plans if p] == [[2], [1], [1]]


def test_cancelled_in_flight_keeps_row_and_blocks_until_applied() -> None:
    scheduler = make(depth=2)
    worker = worker_for(scheduler)
    scheduler.add(enqueue(1, [1, 2], max_tokens=10))
    results = [worker.run(scheduler.plan()), worker.run(scheduler.plan())]  # type: ignore[arg-type]
    scheduler.cancel(1)
    assert scheduler.pool.num_held == 1 and scheduler.num_running == 0
    scheduler.apply(results[0])
    assert scheduler.pool.num_held == 1
    scheduler.apply(results[1])
    assert scheduler.pool.num_held == 0
    assert [type(item) for item in scheduler.take_outputs()] == [Opened, TokenBatch]


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


def test_priority_is_served_first() -> None:
    scheduler = make(max_num_seqs=1, policy="priority")
    worker = worker_for(scheduler)
    for rid, priority in ((1, 5), (2, 0), (3, 5), (4, -1)):
        scheduler.add(enqueue(rid, [rid], max_tokens=1, priority=priority))
    assert list(drain(scheduler, worker)) == [4, 2, 1, 3]


def test_what_a_failed_request_computed_is_not_found_again() -> None:
    scheduler = make()
    worker = worker_for(scheduler)
    worker.fail_seeds.add(1)
    scheduler.add(enqueue(1, list(range(17)), seed=1))
    drain(scheduler, worker)
    scheduler.add(enqueue(2, list(range(17)), seed=2))
    outputs = drain(scheduler, worker)[2]
    assert outputs[-1].usage is not None and outputs[-1].usage.num_cached == 0


def test_a_better_priority_interrupts_a_worse_one_which_keeps_its_place() -> None:
    scheduler = make(max_num_seqs=2, policy="priority")
    worker = worker_for(scheduler)
    for rid in (1, 2, 3):
        scheduler.add(enqueue(rid, [rid], max_tokens=6, priority=5, seed=rid, ignore_eos=True))
    scheduler.apply(worker.run(scheduler.plan()))  # type: ignore[arg-type]
    scheduler.add(enqueue(4, [4], max_tokens=6, priority=1, seed=4, ignore_eos=True))
    tokens = run_all(scheduler, worker)
    assert [t.rid for t in tokens if t.finish] == [1, 4, 2, 3]  # 2 was interrupted, and goes before 3 again
    for rid in (1, 2, 3, 4):
        assert output([t for t in tokens if t.rid == rid]) == expected_output([rid], 6, 100, rid, ignore_eos=True)
    assert scheduler.counters.num_preemptions == 1


def test_equals_are_not_interrupted() -> None:
    scheduler = make(max_num_seqs=1, policy="priority")
    worker = worker_for(scheduler)
    for rid in (1, 2):
        scheduler.add(enqueue(rid, [rid], max_tokens=6, priority=3, ignore_eos=True))
    drain(scheduler, worker)
    assert scheduler.counters.num_preemptions == 0


def test_fair_serves_tenants_alike_however_many_requests_each_has() -> None:
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


def test_fair_interrupts_who_is_far_ahead() -> None:
    scheduler = make(max_num_seqs=1, policy="fair", num_blocks=1000, max_model_len=4000)
    worker = worker_for(scheduler)
    scheduler.add(enqueue(1, [1], max_tokens=1500, tenant="long", ignore_eos=True))
    scheduler.add(enqueue(2, [2], max_tokens=5, tenant="short", ignore_eos=True))
    finished = [t.rid for t in run_all(scheduler, worker) if t.finish]
    assert finished == [2, 1] and scheduler.counters.num_preemptions == 1


def test_fair_lets_nobody_save_up() -> None:
    scheduler = make(max_num_seqs=1, policy="fair", num_blocks=1000, max_model_len=4000)
    worker = worker_for(scheduler)
    scheduler.add(enqueue(1, [1], max_tokens=1600, tenant="long", ignore_eos=True))
    for _ in range(1500):
        scheduler.apply(worker.run(scheduler.plan()))  # type: ignore[arg-type]
    scheduler.add(enqueue(2, [2], max_tokens=5, tenant="new", ignore_eos=True))
    finished = [t.rid for t in run_all(scheduler, worker) if t.finish]
    assert finished == [1, 2] and scheduler.counters.num_preemptions == 0  # a newcomer starts level


def test_the_cheapest_of_the_last_in_line_is_preempted() -> None:
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


def test_a_request_may_refuse_to_wait() -> None:
    scheduler = make(max_num_seqs=1)
    worker = worker_for(scheduler)
    scheduler.add(enqueue(1, [1], max_tokens=5, ignore_eos=True), now=10.0)
    for rid, timeout in ((2, 5.0), (3, 50.0)):
        message = enqueue(rid, [rid], max_tokens=5, ignore_eos=True)
        limits = msgspec.structs.replace(message.limits, queue_timeout_s=timeout)
        scheduler.add(msgspec.structs.replace(message, limits=limits), now=10.0)
    scheduler.apply(worker.run(scheduler.plan()))  # type: ignore[arg-type]
    scheduler.take_outputs()
    scheduler.expire(14.9)
    assert scheduler.take_outputs() == [] and scheduler.num_waiting == 2
    scheduler.expire(15.0)
    (failed,) = scheduler.take_outputs()
    assert isinstance(failed, Failed) and failed.rid == 2 and failed.kind == "unavailable"
    assert set(drain(scheduler, worker)) == {1, 3}
    scheduler.expire(1e9)
    assert scheduler.take_outputs() == []


def test_the_queue_is_bounded_in_tokens() -> None:
    scheduler = make(max_queued_tokens=30)

    def add(rid: int, num_prompt: int, n: int = 1) -> set[type]:
        return {type(reply) for reply in scheduler.add(enqueue(rid, [1] * num_prompt, max_tokens=4, n=n))}

    assert add(1, 8) == {Accepted}
    assert add(2, 6, n=2) == {Failed}  # 2 · (6 + 4) tokens beside the 12 that wait: none of the two
    assert scheduler.num_waiting == 1
    assert add(4, 5, n=2) == {Accepted}
    scheduler.cancel(1)
    assert add(6, 8) == {Accepted}


def test_a_request_that_could_never_be_taken_is_told_so() -> None:
    scheduler = make(max_queued_tokens=30)
    (refused, _) = scheduler.add(enqueue(1, [1] * 12, max_tokens=4, n=2))
    assert isinstance(refused, Failed) and refused.kind == "invalid_request" and "32 tokens" in refused.detail


def test_the_queue_is_bounded_and_a_prompt_must_fit() -> None:
    scheduler = make(num_blocks=4, max_queued_requests=2)
    assert isinstance(scheduler.add(enqueue(1, [1]))[0], Accepted)
    (refused,) = scheduler.add(enqueue(2, list(range(16)), max_tokens=None))
    assert isinstance(refused, Failed) and refused.kind == "context_length_exceeded" and "16 tokens" in refused.detail
    assert isinstance(scheduler.add(enqueue(3, [1]))[0], Accepted)
    (refused,) = scheduler.add(enqueue(4, [1]))
    assert isinstance(refused, Failed) and refused.kind == "queue_full"
    (refused,) = scheduler.add(enqueue(5, []))
    assert isinstance(refused, Failed) and refused.kind == "invalid_request"


def test_output_stops_at_the_context_length() -> None:
    scheduler = make(num_blocks=4, max_model_len=14)
    worker = worker_for(scheduler)
    scheduler.add(enqueue(1, list(range(10)), max_tokens=None, ignore_eos=True))
    outputs = drain(scheduler, worker)[1]
    assert len(output(outputs)) == 4 and outputs[-1].finish == "length"


def test_a_result_that_is_not_due_is_refused() -> None:
    scheduler = make()
    with pytest.raises(ValueError, match="step 3 where step None"):
        scheduler.apply(StepResult(3, b"", {}, {}, 0.0))
    scheduler.add(enqueue(1, [1]))
    scheduler.plan()
    with pytest.raises(ValueError, match="drew 0 tokens"):
        scheduler.apply(StepResult(1, b"", {}, {}, 0.0))


def test_cancelled_requests_leave_nothing_in_a_long_queue() -> None:
    scheduler = make(max_num_seqs=1)
    for rid in range(1, 60):
        scheduler.add(enqueue(rid, [rid]))
    for rid in range(1, 60):
        scheduler.cancel(rid)
        check(scheduler)
    assert scheduler.num_waiting == 0 and scheduler.plan() is None


def test_the_choices_of_one_prompt_are_numbered_seeded_and_forked() -> None:
    scheduler = make(budget=64)
    worker = worker_for(scheduler)
    prompt = list(range(10))
    assert [reply.rid for reply in scheduler.add(enqueue(5, prompt, max_tokens=6, seed=40, n=3))] == [5, 6, 7]
    outputs = drain(scheduler, worker)
    for choice in range(3):
        assert output(outputs[5 + choice]) == expected_output(prompt, 6, 100, 40 + choice, ignore_eos=False)
    cached = {rid: n[-1].usage.num_cached for rid, n in outputs.items() if n[-1].usage}
    assert cached == {5: 0, 6: 9, 7: 9}, "all but the last position is shared: two blocks, and a copy of the third"


def test_a_fork_does_not_see_what_the_other_writes_behind_it() -> None:
    scheduler = make(depth=2)
    worker = worker_for(scheduler)
    prompt = list(range(6))
    scheduler.add(enqueue(1, prompt, max_tokens=8, seed=1, ignore_eos=True))
    for _ in range(2):
        scheduler.apply(worker.run(scheduler.plan()))  # type: ignore[arg-type]
    scheduler.add(enqueue(2, prompt, max_tokens=8, seed=2, ignore_eos=True))
    outputs = drain(scheduler, worker)
    assert output(outputs[2]) == expected_output(prompt, 8, 100, 2, ignore_eos=True)
    assert outputs[2][-1].usage is not None and outputs[2][-1].usage.num_cached == 5


def test_a_conversation_goes_on_after_its_last_position() -> None:
    scheduler = make()
    worker = worker_for(scheduler)
    scheduler.add(enqueue(1, list(range(6)), max_tokens=8, seed=1, ignore_eos=True))
    said = output(drain(scheduler, worker)[1])
    turn = [*range(6), *said, 30, 31, 32]
    scheduler.add(enqueue(2, turn, max_tokens=4, seed=2, ignore_eos=True))
    outputs = drain(scheduler, worker)[2]
    assert output(outputs) == expected_output(turn, 4, 100, 2, ignore_eos=True)
    assert outputs[-1].usage is not None and outputs[-1].usage.num_cached == 6 + 8 - 1, (
        "the last token drawn has no KV yet"
    )


@pytest.mark.parametrize("num_delivered", range(9))
def test_a_request_that_was_lost_goes_on_where_it_was(num_delivered: int) -> None:
    whole = expected_output([1, 2, 3], 8, 100, 5, ignore_eos=True)
    scheduler = make()
    worker = worker_for(scheduler)
    message = enqueue(1, [1, 2, 3], max_tokens=8, seed=5, ignore_eos=True, resume_ids=whole[:num_delivered])
    assert isinstance(scheduler.add(message)[0], Accepted)
    outputs = drain(scheduler, worker)[1]
    assert output(outputs) == whole[num_delivered:]
    assert outputs[-1].finish == "length" and outputs[-1].usage is not None and outputs[-1].usage.num_output == 8


def test_an_output_cannot_be_known_to_be_longer_than_it_may_be() -> None:
    scheduler = make()
    for rid, max_tokens in ((1, 4), (2, None)):
        known = [5] * (5 if max_tokens else scheduler.max_model_len - 2)
        (refused,) = scheduler.add(enqueue(rid, [1, 2, 3], max_tokens=max_tokens, resume_ids=known))
        assert isinstance(refused, Failed) and refused.kind == "invalid_request" and f"{len(known)}" in refused.detail


def test_a_new_worker_is_given_everything_again() -> None:
    scheduler = make(depth=2)
    worker = worker_for(scheduler)
    prompts = {rid: [rid * 3 + i for i in range(6)] for rid in range(1, 5)}
    for rid, prompt in prompts.items():
        scheduler.add(enqueue(rid, prompt, max_tokens=9, seed=rid, ignore_eos=True))
    for _ in range(3):
        scheduler.apply(worker.run(scheduler.plan()))  # type: ignore[arg-type]
    scheduler.plan()
    scheduler.cancel(2)
    scheduler.reset()
    check(scheduler)
    assert scheduler.num_in_flight == 0 and scheduler.pool.num_held == 0 and scheduler.num_waiting == 3
    outputs = drain(scheduler, worker_for(scheduler))
    for rid in (1, 3, 4):
        assert output(outputs[rid]) == expected_output(prompts[rid], 9, 100, rid, ignore_eos=True)


def test_fair_counts_what_a_tenant_was_served_between_its_requests() -> None:
    scheduler = make(max_num_seqs=1, policy="fair", num_blocks=2000, max_model_len=4000, max_queued_requests=1000)
    worker = worker_for(scheduler)
    for rid in range(1, 400):
        scheduler.add(enqueue(rid, [rid % 50], max_tokens=10, tenant="small", ignore_eos=True))
    served = {"large": 0, "small": 0}
    rid = 1000
    scheduler.add(enqueue(rid, [1], max_tokens=500, tenant="large", ignore_eos=True))
    for _ in range(3000):
        if (plan := scheduler.plan()) is not None:  # else somebody was interrupted
            scheduler.apply(worker.run(plan))
        for item in scheduler.take_outputs():
            for tokens in all_tokens(item) if isinstance(item, TokenBatch) else ():
                served["large" if tokens.rid >= 1000 else "small"] += 1
                if tokens.finish and tokens.rid >= 1000:  # its next request comes when the last one has ended
                    rid += 1
                    scheduler.add(enqueue(rid, [1], max_tokens=500, tenant="large", ignore_eos=True))
    assert abs(served["large"] - served["small"]) < 600, served


def test_deadlines_of_ended_requests_are_forgotten() -> None:
    scheduler = make()
    worker = worker_for(scheduler)
    for rid in range(1, 500):
        scheduler.add(enqueue(rid, [rid % 50], max_tokens=1, queue_timeout_s=1e6))
        drain(scheduler, worker)
    assert len(scheduler.deadlines) < 100


@pytest.mark.parametrize("cancelled", [False, True])
def test_kv_that_gave_no_numbers_is_not_found_whoever_is_left(cancelled: bool) -> None:
    scheduler = make(depth=2)
    worker = worker_for(scheduler)
    worker.fail_seeds.add(1)
    scheduler.add(enqueue(1, list(range(17)), seed=1))
    result = worker.run(scheduler.plan())  # type: ignore[arg-type]
    if cancelled:
        scheduler.cancel(1)
    scheduler.apply(result)
    drain(scheduler, worker)
    scheduler.add(enqueue(2, list(range(17)), seed=2))
    outputs = drain(scheduler, worker)[2]
    assert outputs[-1].usage is not None and outputs[-1].usage.num_cached == 0


def test_the_worker_is_told_what_may_not_end_a_request_yet() -> None:
    scheduler = make(num_blocks=8, depth=1)
    message = enqueue(1, list(range(3, 11)), max_tokens=9, stop_token_ids=(40, 30))
    limits = msgspec.structs.replace(message.limits, min_tokens=3)
    scheduler.add(msgspec.structs.replace(message, limits=limits))
    worker = worker_for(scheduler)
    plan = scheduler.plan()
    assert plan is not None
    (opened,) = plan.open
    assert opened.min_len == 11 and sorted(bytes_to_ids(opened.ends)) == sorted((EOS, 30, 40))
    request = scheduler.table.requests[1]
    assert not request.may_speculate
    assert plan is not None
    scheduler.apply(worker.run(plan))
    for min_len in (11, 11, 0):  # as it would be told of again after a preemption
        row = request.as_row()
        assert row.min_len == min_len and bool(row.ends) == bool(min_len), len(request.ids)
        plan = scheduler.plan()
        assert plan is not None
        scheduler.apply(worker.run(plan))


def test_nothing_is_withheld_from_a_request_that_nothing_ends() -> None:
    scheduler = make()
    message = enqueue(1, [5, 6], max_tokens=4, ignore_eos=True)
    scheduler.add(msgspec.structs.replace(message, limits=msgspec.structs.replace(message.limits, min_tokens=3)))
    plan = scheduler.plan()
    assert plan is not None and plan.open[0].min_len == 0
