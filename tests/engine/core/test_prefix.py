"""Equal prefixes are computed once."""

from random import Random

import pytest
from fakes import FakeWorker, enqueue, expected_output
from invariants import check

from pagewire.engine.core.block_pool import BlockPool
from pagewire.engine.core.groups import Groups
from pagewire.engine.core.prefix import PrefixCache
from pagewire.engine.core.request import Request
from pagewire.ipc.messages import GroupShape, bytes_to_ids

from .test_scheduler import BLOCK_SIZE, drain, make, output, worker_for


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


def request_of(ids: list[int]) -> Request:
    return Request(enqueue(1, ids), choice=0, arrival=1, queue_key=None, max_model_len=100, block_size=BLOCK_SIZE,
                   root=b"", eos_token_ids=frozenset())  # fmt: skip


def longest_of(request: Request, pool: BlockPool) -> int:
    """The longest prefix that every group can restore, tried position by position."""
    size, most = BLOCK_SIZE, len(request.ids) - 1
    keys = request.block_keys(len(request.ids) // size, size)
    run = most // size if pool.groups.full is None else len(pool.match(keys[: most // size], pool.groups.full))

    def restores(num: int) -> bool:
        place, rest = divmod(num, size)
        names = [*request.partial_keys(place, min(size - 1, most - place * size), size)[rest - 1 :]] if rest else []
        names += keys[place : place + 1] if rest else []
        return all(
            all(pool.find(keys[i], g) is not None for i in range(pool.groups.need_from(g, num) // size, place))
            and (not rest or any(pool.find(name, g) is not None for name in names))
            for g in range(pool.groups.num_tables)
        )

    def is_tried(num: int) -> bool:
        place, rest = divmod(num, size)
        return place <= run and (not rest or place == run or restores(place * size))

    return max(num for num in range(most + 1) if is_tried(num) and restores(num))


def test_the_longest_prefix_that_every_group_can_restore_is_found() -> None:
    found = []
    for seed in range(400):
        rng = Random(seed)
        kinds = [("full", 0), ("window", rng.randint(1, 9)), ("chunk", rng.randint(1, 9))]
        groups = Groups([GroupShape(*rng.choice(kinds), rng.randint(1, 3)) for _ in range(rng.randint(1, 3))])  # type: ignore[arg-type]
        pool = BlockPool(num_pages=400, groups=groups)
        request = request_of([rng.randrange(50) for _ in range(rng.randint(1, 40))])
        share, size = rng.choice([0.5, 0.9, 0.98]), BLOCK_SIZE
        for group in range(groups.num_tables):
            for i, key in enumerate(request.block_keys(len(request.ids) // size, size)):
                if rng.random() < share:
                    pool.register(pool.allocate(1, group)[0], key, i)
            place = rng.randrange(len(request.ids)) // size
            if beginnings := request.partial_keys(place, min(size - 1, len(request.ids) - place * size), size):
                pool.register_partial(pool.allocate(1, group)[0], rng.choice(beginnings))
        prefix = PrefixCache(pool, block_size=size, enabled=True, kv_events=False)
        found.append(prefix.find(request).num)
        assert found[-1] == longest_of(request, pool), seed
        tables = prefix.find(request, copies=False).tables
        assert all(t.first + len(t.blocks) == found[-1] // size or found[-1] % size for t in tables), seed
    assert sum(num > 0 for num in found) > 200 and sum(num % BLOCK_SIZE > 0 for num in found) > 30


def test_a_row_keeps_only_the_blocks_that_its_window_reads() -> None:
    groups = Groups([GroupShape("window", 6, 2)])
    scheduler = make(pool=BlockPool(num_pages=60, groups=groups), budget=8)
    worker = FakeWorker(num_blocks=60, block_size=BLOCK_SIZE, max_num_seqs=8, max_num_batched_tokens=8, groups=groups)
    prompt = list(range(30))
    scheduler.add(enqueue(1, prompt, max_tokens=40, ignore_eos=True))
    most = 0
    while (plan := scheduler.plan()) is not None:
        most = max(most, scheduler.pool.num_held)
        scheduler.apply(worker.run(plan))
        check(scheduler)
    assert most <= groups.num_pages(0, 70, 8, BLOCK_SIZE) < 2 * 70 // BLOCK_SIZE
    scheduler.add(enqueue(2, prompt, max_tokens=9, seed=2, ignore_eos=True))
    outputs = drain(scheduler, worker)[2]
    assert output(outputs) == expected_output(prompt, 9, 100, 2, ignore_eos=True, groups=groups)
    assert outputs[-1].usage is not None and outputs[-1].usage.num_cached == 28, "what was released is found"
