"""Equal prefixes are computed once."""

from random import Random

import pytest
from fakes import FakeWorker, all_tokens, enqueue, expected_output
from invariants import check

from pagewire.engine.core.block_pool import BlockPool
from pagewire.engine.core.groups import Groups
from pagewire.engine.core.prefix import PrefixCache, key_at
from pagewire.engine.core.request import Request
from pagewire.engine.core.scheduler import Scheduler
from pagewire.ipc.messages import GroupShape, StepResult, TokenBatch, Tokens, bytes_to_ids

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

    if (group := pool.groups.state) is None:
        return max(num for num in range(most + 1) if is_tried(num) and restores(num))
    states = [num for num in range(1, most + 1) if pool.find(key_at(request, num), group) is not None]
    return max([num for num in states if num // size <= run and restores(num)], default=0)


def test_the_longest_prefix_that_every_group_can_restore_is_found() -> None:
    found = []
    for seed in range(400):
        rng = Random(seed)
        kinds = [("full", 0), ("window", rng.randint(1, 9)), ("chunk", rng.randint(1, 9))]
        shapes = [GroupShape(*rng.choice(kinds), rng.randint(1, 3)) for _ in range(rng.randint(1, 3))]  # type: ignore[arg-type]
        groups = Groups([*shapes, GroupShape("state", 0, 2)] if rng.random() < 0.5 else shapes)
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
        for num in range(1, len(request.ids) if groups.state is not None else 1):
            if rng.random() < 0.4:
                place, rest = divmod(num, size)
                behind = request.block_keys(place, size)[-1] if place else request.root
                pool.register_state(pool.allocate(1, groups.state or 0)[0], key_at(request, num), place, behind, rest)
        found.append(prefix.find(request).num)
        assert found[-1] == longest_of(request, pool), seed
        tables = prefix.find(request).tables
        assert all(t.first + len(t.blocks) == found[-1] // size for t in tables), seed
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


HYBRID = Groups([GroupShape("full", 0, 1), GroupShape("state", 0, 3)], interval=400)


def hybrid(**more: object) -> tuple[Scheduler, FakeWorker]:
    """A scheduler of a model with attention and recurrent states, and its worker."""
    scheduler = make(pool=BlockPool(num_pages=200, groups=HYBRID), budget=64, **more)  # type: ignore[arg-type]
    worker = FakeWorker(num_blocks=200, block_size=BLOCK_SIZE, max_num_seqs=8, max_num_batched_tokens=64, groups=HYBRID)
    return scheduler, worker


def drain_ahead(scheduler: Scheduler, worker: FakeWorker) -> dict[int, list[Tokens]]:
    """Plans and applies until nothing is left, with as many plans in flight as allowed."""
    outputs: dict[int, list[Tokens]] = {}
    results: list[StepResult] = []
    while True:
        while (plan := scheduler.plan()) is not None:
            results.append(worker.run(plan))
        if not results:
            break
        scheduler.apply(results.pop(0))
        check(scheduler)
    for item in scheduler.take_outputs():
        for tokens in all_tokens(item) if isinstance(item, TokenBatch) else ():
            outputs.setdefault(tokens.rid, []).append(tokens)
    return outputs


def ask(scheduler: Scheduler, worker: FakeWorker, rid: int, prompt: list[int], **more: object) -> tuple[list[int], int]:
    """The output of a request, which must be right, and how many of its positions were found."""
    scheduler.add(enqueue(rid, prompt, max_tokens=8, seed=rid, ignore_eos=True, **more))  # type: ignore[arg-type]
    tokens = drain_ahead(scheduler, worker)[rid]
    assert output(tokens) == expected_output(prompt, 8, 100, rid, True, groups=HYBRID)
    assert tokens[-1].usage is not None
    return output(tokens), tokens[-1].usage.num_cached


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_next_turn_goes_on_from_the_state_at_the_end_of_the_last(depth: int) -> None:
    scheduler, worker = hybrid(depth=depth)
    prompt = list(range(10))
    for turn in range(1, 4):
        answer, num_cached = ask(scheduler, worker, turn, prompt)
        assert num_cached == (len(prompt) - 4 if turn > 1 else 0), "all but the last sampled token and what is new"
        prompt = [*prompt, *answer, 30, 31, 32]


def test_a_turn_that_ends_with_a_stop_token_in_flight_goes_on_behind_it() -> None:
    """The plan in flight has fed the stop token: the state stands behind it, where the next turn needs it."""
    scheduler, worker = hybrid(depth=2)
    prompt = list(range(10))
    whole = expected_output(prompt, 8, 100, 1, True, groups=HYBRID)
    stop = next(token for i, token in enumerate(whole) if i > 2 and token not in whole[:i])
    scheduler.add(enqueue(1, prompt, max_tokens=20, seed=1, ignore_eos=True, stop_token_ids=(stop,)))
    answer = output(drain_ahead(scheduler, worker)[1])
    assert answer == whole[: whole.index(stop) + 1]
    assert ask(scheduler, worker, 2, [*prompt, *answer, 30, 31])[1] == 10 + len(answer)


def test_the_second_request_of_a_shared_prefix_keeps_a_state_and_the_third_finds_it() -> None:
    scheduler, worker = hybrid()
    system = list(range(21))
    found = [ask(scheduler, worker, rid, [*system, 30 + rid, rid, rid + 1])[1] for rid in (1, 2, 3)]
    assert found == [0, 0, 20], "to the last whole block"


def test_a_mark_keeps_a_state_where_later_prompts_go_on() -> None:
    scheduler, worker = hybrid()
    history = list(range(18))
    assert ask(scheduler, worker, 1, [*history, 40, 41], marks=(18,))[1] == 0
    assert ask(scheduler, worker, 2, [*history, 20, 21, 40, 41])[1] == 16


def test_choices_of_one_prompt_compute_it_once() -> None:
    scheduler, worker = hybrid(depth=2)
    scheduler.add(enqueue(1, list(range(18)), max_tokens=3, seed=1, ignore_eos=True, n=4))
    outputs = drain(scheduler, worker)
    cached = [outputs[rid][-1].usage.num_cached for rid in range(1, 5)]  # type: ignore[union-attr]
    assert cached == [0, 17, 17, 17]


def test_a_long_prompt_leaves_the_last_four_of_its_regular_states() -> None:
    groups = Groups(HYBRID.shapes, interval=8)
    scheduler = make(pool=BlockPool(num_pages=200, groups=groups), budget=10)
    worker = FakeWorker(num_blocks=200, block_size=BLOCK_SIZE, max_num_seqs=8, max_num_batched_tokens=10, groups=groups)
    scheduler.add(enqueue(1, list(range(90)), max_tokens=2))
    drain(scheduler, worker)
    assert sum(map(len, scheduler.pool.standing.values())) == 5, "four, and that of the end"
    scheduler.add(enqueue(2, [*range(75), 7, 7], max_tokens=1))
    (tokens,) = drain(scheduler, worker)[2]
    assert tokens.usage is not None and tokens.usage.num_cached == 72


def test_states_between_two_blocks_cost_no_more_than_the_attention_between_them() -> None:
    def interval(state: int, full: int) -> int:
        shapes = [GroupShape("full", 0, full)] if full else []
        return Groups([*shapes, GroupShape("state", 0, state)]).interval(64)

    assert interval(25, 1) == 25 * 64 and interval(1, 1) == 256 and interval(1000, 1) == 8192 and interval(9, 0) == 1024
