"""What an encoder makes of a prompt, as the scheduler treats it: who computes it, who finds it, who waits."""

from typing import Any

from fakes import FakeWorker, enqueue

from pagewire.engine.core.block_pool import BlockPool
from pagewire.engine.core.encoded import NOTHING, Encoded
from pagewire.engine.core.groups import Groups
from pagewire.engine.core.scheduler import Scheduler
from pagewire.ipc.messages import Failed, GroupShape, Opened, StepPlan, Tokens, bytes_to_ids, ids_to_bytes

from .test_scheduler import BLOCK_SIZE as SIZE
from .test_scheduler import make

GROUPS = Groups([GroupShape("full", 0, 1), GroupShape("cross", 0, 2)])


def scheduler_of(**options: Any) -> Scheduler:
    pages = options.pop("num_pages", 60)
    pool = BlockPool(num_pages=pages, groups=GROUPS)
    return make(**{"pool": pool, "decoder_start_ids": (1,), "max_model_len": 32, **options})


def opened_by(plan: StepPlan | None) -> list[list[int]]:
    """What the encoder reads of each row that a plan opens."""
    assert plan is not None
    return [list(bytes_to_ids(row.encoder_ids)) for row in plan.open]


def test_keys_depend_on_the_whole_prompt_and_the_place() -> None:
    encoded = Encoded(ids_to_bytes([1, 2, 3, 4, 5]))
    keys = encoded.keys(b"root", SIZE)
    assert len(keys) == 2 and keys[0] != keys[1]
    assert not {*keys} & {*Encoded(ids_to_bytes([1, 2, 3, 4, 5])).keys(b"another root", SIZE)}


def test_without_an_encoder_there_is_nothing_and_it_stays_so() -> None:
    NOTHING.told()
    assert not NOTHING and not NOTHING.is_there and NOTHING.keys(b"root", SIZE) == []


def test_one_of_several_equal_prompts_is_read_and_the_others_find_it() -> None:
    scheduler, prompt = scheduler_of(), [5, 6, 7, 8, 9]
    scheduler.add(enqueue(1, prompt, n=2))
    scheduler.add(enqueue(3, prompt))
    scheduler.add(enqueue(4, prompt, salt=b"another owner"))
    assert sorted(opened_by(scheduler.plan()), key=len) == [[], [], prompt, prompt]


def test_the_client_is_told_of_its_prompt_and_not_of_what_the_decoder_begins_with() -> None:
    scheduler, prompt = scheduler_of(), [5, 6, 7, 8, 9]
    worker = FakeWorker(num_blocks=60, block_size=SIZE, max_num_seqs=8, max_num_batched_tokens=64, groups=GROUPS)
    for rid, num_cached in ((1, 0), (2, len(prompt))):
        scheduler.add(enqueue(rid, prompt, max_tokens=1, ignore_eos=True))
        plan = scheduler.plan()
        assert plan is not None
        scheduler.apply(worker.run(plan))
        opened, batch = scheduler.take_outputs()
        assert isinstance(opened, Opened) and (opened.num_prompt, opened.num_cached) == (len(prompt), num_cached)
        assert not isinstance(batch, Opened | Failed)
        (last,) = (tokens for tokens in batch.tokens if isinstance(tokens, Tokens))
        assert last.usage is not None and (last.usage.num_prompt, last.usage.num_output) == (len(prompt), 1)


def test_prompts_are_read_whole_and_as_many_as_the_budget_allows() -> None:
    """The first of a plan in any case: a step without memory may have made the budget smaller than a prompt."""
    scheduler = scheduler_of(budget=10)
    for rid, length in ((1, 12), (2, 3), (3, 20)):
        scheduler.add(enqueue(rid, [rid] * length, max_tokens=30, ignore_eos=True))
    assert [len(ids) for ids in opened_by(scheduler.plan())] == [12]
    scheduler = scheduler_of(budget=10)
    for rid, length in ((1, 6), (2, 4), (3, 1)):
        scheduler.add(enqueue(rid, [rid] * length, max_tokens=30, ignore_eos=True))
    assert [len(ids) for ids in opened_by(scheduler.plan())] == [6, 4]


def test_prompt_and_output_have_the_whole_length_each() -> None:
    scheduler = scheduler_of()
    assert not isinstance(scheduler.add(enqueue(1, [5] * 32, max_tokens=None))[0], Failed)
    assert scheduler.requests[1].max_len == 32
    (refused,) = scheduler.add(enqueue(2, [5] * 33, max_tokens=1))
    assert isinstance(refused, Failed) and refused.kind == "context_length_exceeded"


def test_a_pool_has_room_for_both() -> None:
    """A row of 16 positions beside a prompt of 16 takes 4 blocks of one page and 4 of two."""
    assert scheduler_of(num_pages=12).max_model_len == 16
    assert scheduler_of(num_pages=11).max_model_len == 12
