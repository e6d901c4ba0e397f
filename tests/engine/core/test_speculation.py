"""The scheduler's rules for speculative decoding, one rule a test."""

from collections.abc import Callable, Sequence

import pytest
from fakes import EOS, FakeRow, FakeWorker, all_tokens, enqueue, expected_output, kv_of, next_token
from invariants import check

from pagewire.config.flags import make_config
from pagewire.engine.core.block_pool import BlockPool
from pagewire.engine.core.cost import CAUTIOUS
from pagewire.engine.core.scheduler import Scheduler
from pagewire.engine.core.speculation import num_draft_tokens
from pagewire.errors import ConfigError
from pagewire.ipc.messages import Failed, StepPlan, StepResult, TokenBatch, Tokens, bytes_to_ids, ids_to_bytes
from pagewire.procs.prepare import prepare

BLOCK_SIZE = 4
Drafted = Callable[[FakeRow, int], Sequence[int]]


def truth(row: FakeRow, num: int) -> list[int]:
    """The tokens that the model samples next."""
    ids = list(row.ids)
    for _ in range(num):
        ids.append(next_token(kv_of(ids), row.sampling.seed))
    return ids[len(row.ids) :]


def wrong(row: FakeRow, num: int) -> list[int]:
    """Draft tokens of which every one is rejected."""
    return [token ^ 1 for token in truth(row, num)]


def make(draft: Drafted = truth, *, num_blocks: int = 64, **more: object) -> tuple[Scheduler, FakeWorker]:
    options = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 100,
        "max_queued_requests": 100,
        "max_queued_tokens": 10**6,
        "depth": 1,
        "eos_token_ids": (EOS,),
        "speculate": 3,
        **more,
    }
    scheduler = Scheduler(pool=BlockPool(num_pages=num_blocks), block_size=BLOCK_SIZE, **options)  # type: ignore[arg-type]
    worker = FakeWorker(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        draft=draft,
    )
    return scheduler, worker


def run(scheduler: Scheduler, worker: FakeWorker, num_plans: int = 1000) -> list[tuple[StepPlan, StepResult]]:
    """Runs to the end, or `num_plans` plans, with as many in flight as allowed."""
    done: list[tuple[StepPlan, StepResult]] = []
    in_flight: list[tuple[StepPlan, StepResult]] = []
    while True:
        while len(done) + len(in_flight) < num_plans and (plan := scheduler.plan()) is not None:
            in_flight.append((plan, worker.run(plan)))
            check(scheduler)
        if not in_flight:
            return done
        done.append(in_flight.pop(0))
        scheduler.apply(done[-1][1])
        check(scheduler)


def outputs_of(scheduler: Scheduler) -> dict[int, list[Tokens]]:
    outputs: dict[int, list[Tokens]] = {}
    for item in scheduler.take_outputs():
        for tokens in all_tokens(item) if isinstance(item, TokenBatch) else ():
            outputs.setdefault(tokens.rid, []).append(tokens)
    return outputs


def output(outputs: list[Tokens]) -> list[int]:
    return [i for tokens in outputs for i in bytes_to_ids(tokens.ids)]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_accepted_draft_tokens_save_steps(depth: int) -> None:
    scheduler, worker = make(depth=depth)
    scheduler.add(enqueue(1, [1, 2, 3], max_tokens=41, ignore_eos=True))
    steps = run(scheduler, worker)
    assert output(outputs_of(scheduler)[1]) == expected_output([1, 2, 3], 41, 100, 0, ignore_eos=True)
    assert len(steps) <= 1 + 10 + 3, "the first token, four a step, and the last few one by one"
    counters = scheduler.counters
    assert counters.num_drafts <= 10 and counters.num_accepted_tokens == counters.num_draft_tokens >= 27
    assert counters.num_output_tokens == 41


def test_rejected_draft_tokens_cost_no_step() -> None:
    scheduler, worker = make(wrong, depth=2)
    scheduler.add(enqueue(1, [1, 2, 3], max_tokens=41, ignore_eos=True))
    assert len(run(scheduler, worker)) == 41
    assert output(outputs_of(scheduler)[1]) == expected_output([1, 2, 3], 41, 100, 0, ignore_eos=True)
    assert scheduler.counters.num_accepted_tokens == 0 < scheduler.counters.num_draft_tokens


def test_no_position_is_computed_from_the_last_token_on() -> None:
    scheduler, worker = make()
    for rid, max_tokens in enumerate(range(1, 9), start=1):
        scheduler.add(enqueue(rid, [rid], max_tokens=max_tokens, ignore_eos=True))
    assert any(plan.num_speculative for plan, _ in run(scheduler, worker))
    for state in worker.rows:
        assert state is not None and state.num_computed <= state.ids[0], "the prompt is [max_tokens]"
    outputs = outputs_of(scheduler)
    for rid in range(1, 9):
        assert output(outputs[rid]) == expected_output([rid], rid, 100, 0, ignore_eos=True)


def test_no_row_speculates_when_the_budget_is_short_or_a_prompt_is_computed() -> None:
    for budget, num_speculative in ((8, 2), (7, 0)):
        scheduler, worker = make(max_num_batched_tokens=budget)
        for rid in (1, 2):
            scheduler.add(enqueue(rid, [rid], max_tokens=30, ignore_eos=True))
        run(scheduler, worker, 1)
        plan = scheduler.plan()
        assert plan is not None and plan.num_speculative == num_speculative
        assert plan.speculate == (3 if num_speculative else 0)
        assert not num_speculative or plan.break_even == CAUTIOUS
    scheduler, worker = make(max_num_batched_tokens=12)
    scheduler.add(enqueue(1, [1], max_tokens=30, ignore_eos=True))
    run(scheduler, worker, 1)
    scheduler.add(enqueue(2, list(range(20)), max_tokens=30, ignore_eos=True))
    plans = [plan for plan, _ in run(scheduler, worker, 2)]
    assert list(bytes_to_ids(plans[0].counts)) == [1, 8], "12 less the row and its 3 draft tokens"
    assert list(bytes_to_ids(plans[1].counts)) == [1, 11], "beside a prompt, draft tokens cost too much"


def test_a_request_for_logprobs_is_planned_without_draft_tokens() -> None:
    scheduler, worker = make()
    scheduler.add(enqueue(1, [1], max_tokens=20, ignore_eos=True, logprobs=0))
    scheduler.add(enqueue(2, [2], max_tokens=20, ignore_eos=True))
    plans = [plan for plan, _ in run(scheduler, worker, 3)]
    assert plans[2].num_speculative == 1 and len(plans[2].sample) == 2
    run(scheduler, worker)
    outputs = outputs_of(scheduler)
    assert all(tokens.logprobs is not None and len(tokens.ids) == 4 for tokens in outputs[1])
    assert output(outputs[2]) == expected_output([2], 20, 100, 0, ignore_eos=True)


def test_draft_tokens_never_cause_a_preemption() -> None:
    scheduler, worker = make(num_blocks=8, max_model_len=32)
    for rid in (1, 2):
        scheduler.add(enqueue(rid, [rid], max_tokens=16, ignore_eos=True))
    plans = [plan for plan, _ in run(scheduler, worker)]
    outputs = outputs_of(scheduler)
    for rid in (1, 2):
        assert output(outputs[rid]) == expected_output([rid], 16, 32, 0, ignore_eos=True)
    assert scheduler.counters.num_preemptions == 0 and any(plan.num_speculative for plan in plans)


def test_a_stop_token_among_accepted_draft_tokens_ends_the_output() -> None:
    whole = expected_output([1], 60, 100, 0, ignore_eos=True)
    for i in range(1, 20):
        if whole.index(whole[i]) < i:
            continue
        scheduler, worker = make()
        scheduler.add(enqueue(1, [1], max_tokens=60, ignore_eos=True, stop_token_ids=(whole[i],)))
        run(scheduler, worker)
        outputs = outputs_of(scheduler)[1]
        assert output(outputs) == whole[: i + 1]
        assert outputs[-1].finish == "stop" and outputs[-1].usage is not None and outputs[-1].usage.num_output == i + 1
        assert scheduler.counters.num_output_tokens == i + 1 and scheduler.pool.num_held == 0


@pytest.mark.parametrize("num_good", [0, 1, 3])
def test_tokens_before_a_non_finite_position_are_output(num_good: int) -> None:
    scheduler, worker = make()
    scheduler.add(enqueue(1, [1] * 4, max_tokens=20, ignore_eos=True))
    run(scheduler, worker, 1)
    plan = scheduler.plan()
    assert plan is not None and plan.num_speculative == 1
    ids = [*[20, 21, 22][:num_good], -1]
    scheduler.apply(StepResult(plan.step, ids_to_bytes(ids), {}, {}, 1.0, ids_to_bytes([len(ids)]), 1, 3))
    check(scheduler)
    *batches, failed = scheduler.take_outputs()[1:]
    assert isinstance(failed, Failed) and failed.kind == "internal"
    sent = [
        i for batch in batches if isinstance(batch, TokenBatch) for t in all_tokens(batch) for i in bytes_to_ids(t.ids)
    ]
    assert sent[1:] == ids[:-1]
    assert not scheduler.pool._by_name, "none of its blocks is found again"


def test_only_blocks_of_accepted_draft_tokens_are_found_again() -> None:
    for draft in (truth, wrong):
        scheduler, worker = make(draft, depth=2)
        scheduler.add(enqueue(1, [1, 2, 3], max_tokens=42, seed=1, ignore_eos=True))
        run(scheduler, worker)
        turn = [1, 2, 3, *output(outputs_of(scheduler)[1]), 9]
        scheduler.add(enqueue(2, turn, max_tokens=8, seed=2, ignore_eos=True))
        run(scheduler, worker)
        outputs = outputs_of(scheduler)[2]
        assert output(outputs) == expected_output(turn, 8, 100, 2, ignore_eos=True)
        assert outputs[-1].usage is not None and outputs[-1].usage.num_cached == 44, "the last sampled token has no KV"


def test_a_step_gives_one_batch_with_all_tokens_of_each_request() -> None:
    scheduler, worker = make()
    for rid in (1, 2):
        scheduler.add(enqueue(rid, [rid], max_tokens=30, ignore_eos=True))
    run(scheduler, worker, 1)
    scheduler.take_outputs()
    run(scheduler, worker, 1)
    (batch,) = scheduler.take_outputs()
    assert isinstance(batch, TokenBatch) and not batch.tokens
    assert [(rid, len(data)) for rid, data in batch.columns()] == [(1, 16), (2, 16)]


def test_fair_counts_accepted_draft_tokens() -> None:
    for draft, num in ((truth, 4), (wrong, 1)):
        scheduler, worker = make(draft, policy="fair")
        scheduler.add(enqueue(1, [1], max_tokens=30, ignore_eos=True, tenant="a"))
        run(scheduler, worker, 1)
        (request,) = scheduler.table.running
        before = scheduler._policy.rank(request)
        run(scheduler, worker, 1)
        assert scheduler._policy.rank(request) - before == num


@pytest.mark.parametrize(("ids", "nums"), [([1, 2], b""), ([1, 2], [1]), ([1] * 5, [5]), ([], [0]), ([1, 2], [1, 1])])
def test_a_result_whose_token_counts_contradict_the_plan_is_refused(ids: list[int], nums: list[int] | bytes) -> None:
    scheduler, worker = make()
    scheduler.add(enqueue(1, [1], max_tokens=30, ignore_eos=True))
    run(scheduler, worker, 1)
    plan = scheduler.plan()
    assert plan is not None
    data = nums if isinstance(nums, bytes) else ids_to_bytes(nums)
    with pytest.raises(ValueError, match="sampled"):
        scheduler.apply(StepResult(plan.step, ids_to_bytes(ids), {}, {}, 1.0, data))


def test_the_flag_gives_the_number_of_draft_tokens() -> None:
    assert num_draft_tokens(None) == 0 and num_draft_tokens("ngram") == 4 and num_draft_tokens("ngram,tokens=15") == 15


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("eagle", "--speculative eagle: write ngram, or ngram,tokens=N."),
        ("ngram,n=3", "--speculative ngram,n=3: write ngram, or ngram,tokens=N."),
        ("ngram,tokens=16", "--speculative ngram,tokens=16: tokens is a number from 1 to 15."),
        ("ngram,tokens=0", "--speculative ngram,tokens=0: tokens is a number from 1 to 15."),
        ("ngram,tokens=\u0663", "--speculative ngram,tokens=\u0663: tokens is a number from 1 to 15."),
    ],
)
def test_an_invalid_flag_gives_a_one_sentence_error(spec: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        prepare(make_config(model="./nowhere", speculative=spec))
    assert str(error.value) == sentence
