"""Rules of the scheduler that no test of its parts holds, and helpers of those tests."""

import pytest
from fakes import EOS, FakeWorker, all_tokens, enqueue
from invariants import check

from pagewire.engine.core.block_pool import BlockPool
from pagewire.engine.core.scheduler import Scheduler
from pagewire.ipc.messages import StepResult, TokenBatch, Tokens, bytes_to_ids

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
