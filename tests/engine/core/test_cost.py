"""The cost model learns what steps cost, follows changes, and bounds chunks by it."""

import random

import pytest
from fakes import FakeWorker, all_tokens, enqueue
from invariants import check

from pagewire.engine.core.block_pool import BlockPool
from pagewire.engine.core.cost import CAUTIOUS, CostModel, Work, with_chunk
from pagewire.engine.core.scheduler import Scheduler
from pagewire.ipc.messages import TokenBatch, bytes_to_ids


def true_ms(work: Work, slower: float = 1.0) -> float:
    return slower * (2.0 + 0.05 * work.rows + 1e-4 * work.context + 0.02 * work.prefill + 2e-6 * work.pairs)


def random_work(rng: random.Random) -> Work:
    work = Work(rng.randint(0, 64), rng.randint(0, 64) * rng.randint(1, 2000), 0, 0)
    return with_chunk(work, rng.randint(0, 30_000), rng.randint(1, 2048)) if rng.random() < 0.5 else work


def trained(rng: random.Random, steps: int = 300) -> CostModel:
    model = CostModel()
    for _ in range(steps):
        work = random_work(rng)
        model.observe(work, true_ms(work) * rng.uniform(0.97, 1.03))
    return model


def test_the_model_learns_what_steps_cost() -> None:
    rng = random.Random(1)
    model = trained(rng)
    for _ in range(50):
        work = random_work(rng)
        assert model.predict(work) == pytest.approx(true_ms(work), rel=0.15, abs=1.0)


def test_draft_tokens_of_more_rows_need_a_higher_acceptance_rate() -> None:
    rng = random.Random(4)
    model = CostModel()
    assert model.break_even(Work(8, 800, 0, 0)) == CAUTIOUS
    model = trained(rng)
    shares = [model.break_even(Work(rows, rows * 200, 0, 0)) for rows in (1, 8, 64)]
    assert shares == sorted(shares) and shares[0] == 0.1
    assert shares[2] == pytest.approx((64 * 0.05 + 64 * 0.02) / (2 + 64 * 0.05 + 64 * 0.02), abs=0.1)


def test_a_request_costs_its_prompt_and_a_step_for_each_token() -> None:
    assert CostModel().of_request(100, 20) == (100.0, 20.0), "a millisecond each until steps were seen"
    prompt_ms, output_ms = trained(random.Random(6)).of_request(1000, 200)
    assert prompt_ms == pytest.approx(true_ms(with_chunk(Work(0, 0, 0, 0), 0, 1000)), rel=0.1)
    assert output_ms == pytest.approx(200 * true_ms(Work(1, 1100, 0, 0)), rel=0.15)


def test_a_row_and_what_it_reads_have_their_own_costs() -> None:
    assert CostModel().of_rows() == (1.0, 0.0), "all rows are equal until steps were seen"
    of_row, of_position = trained(random.Random(5)).of_rows()
    assert of_row == pytest.approx(0.05, rel=0.2) and of_position == pytest.approx(1e-4, rel=0.2)


def test_the_model_follows_a_machine_that_gets_slower() -> None:
    rng = random.Random(2)
    model = trained(rng)
    for _ in range(600):
        work = random_work(rng)
        model.observe(work, true_ms(work, slower=3.0))
    work = with_chunk(Work(32, 30_000, 0, 0), 1000, 500)
    assert model.predict(work) == pytest.approx(true_ms(work, slower=3.0), rel=0.2)


def test_chunks_are_still_predicted_after_many_steps_without_one() -> None:
    rng = random.Random(3)
    model = trained(rng)
    for _ in range(20_000):
        model.observe(Work(32, 32_000, 0, 0), true_ms(Work(32, 32_000, 0, 0)))
    work = with_chunk(Work(32, 32_000, 0, 0), 0, 1000)
    assert model.predict(work) == pytest.approx(true_ms(work), rel=0.5)


def test_predictions_stay_accurate_over_many_similar_steps() -> None:
    rng = random.Random(6)
    model = CostModel()
    for step in range(60_000):
        context = rng.randint(30_000, 34_000)
        work = Work(32, context, 0, 0)
        if step % 50 == 0:  # a prompt now and then, in chunks of similar length
            work = with_chunk(work, 0, rng.randint(300, 340))
        model.observe(work, true_ms(work) * rng.uniform(0.9, 1.2))
    for num in (100, 320):
        work = with_chunk(Work(32, 32_000, 0, 0), 0, num)
        assert model.predict(work) == pytest.approx(true_ms(work), rel=0.3)


def test_the_longest_chunk_stays_below_the_target() -> None:
    model = trained(random.Random(4))
    beside = Work(32, 32_000, 0, 0)
    for past in (0, 1000, 30_000):
        num = model.longest_chunk(beside, past, 15.0, 2048)
        assert model.predict(with_chunk(beside, past, num)) <= 15.0 < model.predict(with_chunk(beside, past, num + 1))
    assert model.longest_chunk(beside, 30_000, 15.0, 2048) < model.longest_chunk(beside, 0, 15.0, 2048)
    assert model.longest_chunk(beside, 0, 0.1, 2048) == 0 and model.longest_chunk(beside, 0, 1e9, 2048) == 2048


def test_chunks_of_a_long_prompt_beside_decode_rows_keep_to_the_target() -> None:
    target_ms = 3.0  # the fake worker takes 1 ms and 0.01 ms a position
    scheduler = Scheduler(
        pool=BlockPool(num_pages=4000),
        block_size=4,
        max_num_seqs=16,
        max_num_batched_tokens=2048,
        max_model_len=9000,
        max_queued_requests=100,
        max_queued_tokens=10**6,
        depth=2,
        eos_token_ids=(),
        itl_target_ms=target_ms,
    )
    worker = FakeWorker(num_blocks=4000, block_size=4, max_num_seqs=16, max_num_batched_tokens=2048)
    for rid in range(1, 9):
        scheduler.add(enqueue(rid, [rid], max_tokens=200, ignore_eos=True))
    results, times, chunks = [], [], []
    for step in range(150):
        if step == 20:
            scheduler.add(enqueue(9, [i % 50 for i in range(8000)], max_tokens=4))
        while (plan := scheduler.plan()) is not None:
            results.append(worker.run(plan))
            times.append(results[-1].device_ms)
            chunks.append(max(bytes_to_ids(plan.counts)))
        scheduler.apply(results.pop(0))
        check(scheduler)
    done = [
        t for item in scheduler.take_outputs() if isinstance(item, TokenBatch) for t in all_tokens(item) if t.rid == 9
    ]
    assert done, "the long prompt was computed"
    assert max(times[20:]) <= target_ms * 1.1 and max(chunks) > 150  # chunks use the time that the target leaves
