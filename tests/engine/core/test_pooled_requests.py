"""Requests for an embedding instead of tokens, and schedulers of encoders, which compute a whole text in one step.

The fake worker's vector is the KV of a prompt's last position, or of all positions that it has computed since the row
was assigned. So a position that is left out, computed twice or read from the cache changes the vector.
"""

import random
from typing import Any

import pytest
from fakes import EOS, FakeWorker, all_tokens, enqueue, expected_output, kv_of
from invariants import check

from pagewire.engine.core.block_pool import BlockPool
from pagewire.engine.core.scheduler import Scheduler
from pagewire.ipc.messages import Failed, Pooling, StepPlan, TokenBatch, Tokens, bytes_to_ids

BLOCK_SIZE = 4
LAST, MEAN = Pooling("last"), Pooling("mean")


def make(*, num_blocks: int = 64, budget: int = 32, depth: int = 1, **more: Any) -> tuple[Scheduler, FakeWorker]:
    sizes: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": budget}
    scheduler = Scheduler(
        pool=BlockPool(num_pages=num_blocks),
        block_size=BLOCK_SIZE,
        depth=depth,
        max_model_len=100,
        max_queued_requests=100,
        max_queued_tokens=10**6,
        eos_token_ids=(EOS,),
        **sizes,
        **more,
    )
    return scheduler, FakeWorker(num_blocks=num_blocks, block_size=BLOCK_SIZE, **sizes)


def serve(scheduler: Scheduler, worker: FakeWorker) -> dict[int, Tokens | Failed]:
    """Runs to the end, with as many plans in flight as allowed. Returns the last output of each request."""
    in_flight: list[StepPlan] = []
    while True:
        while (plan := scheduler.plan()) is not None:
            in_flight.append(plan)
        if not in_flight:
            break
        scheduler.apply(worker.run(in_flight.pop(0)))
        check(scheduler)
    last: dict[int, Tokens | Failed] = {}
    for item in scheduler.take_outputs():
        if isinstance(item, Failed):
            last[item.rid] = item
        elif isinstance(item, TokenBatch):
            last.update((tokens.rid, tokens) for tokens in all_tokens(item) if tokens.finish is not None)
    return last


def vector(answer: Tokens | Failed) -> bytes:
    assert isinstance(answer, Tokens) and answer.finish == "stop" and not answer.ids and answer.usage is not None
    return answer.vector


def test_a_chunked_prompt_gives_one_vector_and_no_token() -> None:
    scheduler, worker = make(budget=8)
    prompt = list(range(1, 30))
    scheduler.add(enqueue(1, prompt, pooling=MEAN))
    answer = serve(scheduler, worker)[1]
    assert vector(answer) == kv_of(prompt)
    assert isinstance(answer, Tokens) and answer.usage is not None
    assert (answer.usage.num_prompt, answer.usage.num_output, answer.usage.num_cached) == (29, 0, 0)
    assert scheduler.pool.num_held == 0


def test_last_pooling_uses_cached_positions_and_mean_pooling_does_not() -> None:
    scheduler, worker = make()
    prompt = list(range(1, 18))
    scheduler.add(enqueue(1, prompt, max_tokens=1))
    serve(scheduler, worker)
    scheduler.add(enqueue(2, prompt, pooling=LAST))
    scheduler.add(enqueue(3, prompt, pooling=MEAN))
    last = serve(scheduler, worker)
    assert vector(last[2]) == kv_of(prompt)[-4:] and vector(last[3]) == kv_of(prompt)
    assert [
        answer.usage.num_cached for answer in (last[2], last[3]) if isinstance(answer, Tokens) and answer.usage
    ] == [16, 0]


def test_other_requests_reuse_the_blocks_of_a_pooled_prompt() -> None:
    scheduler, worker = make()
    prompt = list(range(1, 18))
    scheduler.add(enqueue(1, prompt, pooling=MEAN))
    serve(scheduler, worker)
    scheduler.add(enqueue(2, prompt, max_tokens=1))
    answer = serve(scheduler, worker)[2]
    assert isinstance(answer, Tokens) and answer.usage is not None and answer.usage.num_cached == 16


def test_a_pooled_request_with_non_finite_numbers_fails_and_caches_no_block() -> None:
    scheduler, worker = make()
    worker.fail_seeds.add(1)
    prompt = list(range(1, 18))
    scheduler.add(enqueue(1, prompt, seed=1, pooling=LAST))
    answer = serve(scheduler, worker)[1]
    assert isinstance(answer, Failed) and answer.kind == "internal" and "not finite" in answer.detail
    scheduler.add(enqueue(2, prompt, max_tokens=1))
    after = serve(scheduler, worker)[2]
    assert isinstance(after, Tokens) and after.usage is not None and after.usage.num_cached == 0


def test_the_texts_of_an_encoder_are_never_chunked() -> None:
    scheduler, worker = make(budget=20, is_chunked=False, prefix_caching=False)
    lengths = [12, 9, 8, 3, 20, 1]
    for rid, length in enumerate(lengths):
        scheduler.add(enqueue(rid, list(range(1, length + 1)), pooling=MEAN))
    planned = []
    while (plan := scheduler.plan()) is not None:
        planned.append(list(bytes_to_ids(plan.counts)))
        scheduler.apply(worker.run(plan))
    assert planned == [[12], [9, 8, 3], [20], [1]]  # in order of arrival, as many as the budget holds


@pytest.mark.parametrize("seed", range(150))
def test_random_histories(seed: int) -> None:
    """Pooled and generating requests together, with too few blocks, several plans in flight and cancellations."""
    rng = random.Random(seed)
    is_chunked = rng.random() < 0.7
    policy = rng.choice(["fcfs", "priority", "fair"])
    scheduler, worker = make(
        num_blocks=rng.randint(8, 24) if is_chunked else 120,
        budget=rng.randint(3, 24) if is_chunked else 40,
        depth=rng.randint(1, 3),
        is_chunked=is_chunked,
        prefix_caching=is_chunked,
        policy=policy,
    )
    requests: dict[int, tuple[list[int], Pooling | None]] = {}
    cancelled, in_flight = set(), []
    root = [rng.randint(1, 9) for _ in range(12)]
    last: dict[int, Tokens | Failed] = {}
    outputs: dict[int, list[int]] = {}
    for turn in range(400):
        if turn < 60 and rng.random() < 0.5:
            rid = len(requests)
            prompt = (root[: rng.randint(0, 12)] + [rng.randint(1, 9) for _ in range(rng.randint(1, 16))])[:26]
            pooling = rng.choice([LAST, MEAN, None]) if is_chunked else MEAN
            requests[rid] = (prompt, pooling)
            scheduler.add(enqueue(rid, prompt, max_tokens=5, seed=rid, priority=rng.randint(0, 2), pooling=pooling))
        if requests and rng.random() < 0.05:
            rid = rng.choice(list(requests))
            scheduler.cancel(rid)
            cancelled.add(rid)
        while (plan := scheduler.plan()) is not None:
            in_flight.append(plan)
        if in_flight:
            scheduler.apply(worker.run(in_flight.pop(0)))
            check(scheduler)
        for item in scheduler.take_outputs():
            if isinstance(item, TokenBatch):
                for tokens in all_tokens(item):
                    outputs.setdefault(tokens.rid, []).extend(bytes_to_ids(tokens.ids))
                    if tokens.finish is not None:
                        assert tokens.rid not in last, f"seed {seed}: {tokens.rid} ended twice"
                        last[tokens.rid] = tokens
    assert last.keys() == requests.keys(), f"seed {seed}"
    for rid, (prompt, pooling) in requests.items():
        answer = last[rid]
        assert isinstance(answer, Tokens), f"seed {seed}: {answer}"
        if answer.finish == "abort":
            assert rid in cancelled
        elif pooling is None:
            assert outputs[rid] == expected_output(prompt, 5, scheduler.max_model_len, rid, False), f"seed {seed}"
        else:
            kv = kv_of(prompt)
            assert vector(answer) == (kv[-4:] if pooling is LAST else kv), f"seed {seed}: {rid}"
    assert scheduler.pool.num_held == 0
