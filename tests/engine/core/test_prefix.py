"""Equal prefixes are computed once."""

import pytest
from fakes import enqueue, expected_output

from pagewire.ipc.messages import bytes_to_ids

from .test_scheduler import drain, make, output, worker_for


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


def test_equal_prompts_that_arrive_together_share_one_prefill() -> None:
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


def test_blocks_of_a_failed_request_are_not_found_again() -> None:
    scheduler = make()
    worker = worker_for(scheduler)
    worker.fail_seeds.add(1)
    scheduler.add(enqueue(1, list(range(17)), seed=1))
    drain(scheduler, worker)
    scheduler.add(enqueue(2, list(range(17)), seed=2))
    outputs = drain(scheduler, worker)[2]
    assert outputs[-1].usage is not None and outputs[-1].usage.num_cached == 0


def test_a_fork_does_not_see_tokens_that_the_first_request_writes_later() -> None:
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


def test_the_next_turn_of_a_conversation_reuses_prompt_and_output() -> None:
    scheduler = make()
    worker = worker_for(scheduler)
    scheduler.add(enqueue(1, list(range(6)), max_tokens=8, seed=1, ignore_eos=True))
    answer = output(drain(scheduler, worker)[1])
    turn = [*range(6), *answer, 30, 31, 32]
    scheduler.add(enqueue(2, turn, max_tokens=4, seed=2, ignore_eos=True))
    outputs = drain(scheduler, worker)[2]
    assert output(outputs) == expected_output(turn, 4, 100, 2, ignore_eos=True)
    assert outputs[-1].usage is not None and outputs[-1].usage.num_cached == 6 + 8 - 1, (
        "the last sampled token has no KV yet"
    )


@pytest.mark.parametrize("cancelled", [False, True])
def test_blocks_with_non_finite_numbers_are_not_found_again(cancelled: bool) -> None:
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
