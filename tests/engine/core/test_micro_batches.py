"""Which rows each plan serves when the layers are divided into stages."""

from array import array
from collections import Counter, deque
from collections.abc import Callable
from itertools import pairwise

import pytest
from counting import lines_of
from fakes import bits_of, enqueue
from invariants import check

from pagewire.engine import core
from pagewire.engine.core.block_pool import BlockPool
from pagewire.engine.core.cost import Work, with_chunk
from pagewire.engine.core.scheduler import Scheduler
from pagewire.ipc.messages import Constraint, Masks, StepPlan, StepResult, bytes_to_ids, ids_to_bytes

ROWS = 64


class Engine:
    """A scheduler whose plans come back in order, when the test says so. Every token is 5."""

    def __init__(self, num_stages: int, *, budget: int = 2048, depth: int = 2, **more: object) -> None:
        options = {"max_num_seqs": 512, "prefix_caching": False, **more}
        self.scheduler = Scheduler(
            pool=BlockPool(num_pages=20_000),
            block_size=16,
            max_num_batched_tokens=budget,
            max_model_len=100_000,
            max_queued_requests=1000,
            max_queued_tokens=10**8,
            depth=depth,
            num_stages=num_stages,
            eos_token_ids=(),
            **options,  # type: ignore[arg-type]
        )
        self.sent: deque[StepPlan] = deque()

    def add(self, rid: int, num_prompt: int = 1, max_tokens: int = 2000, **more: object) -> None:
        self.scheduler.add(enqueue(rid, [5] * num_prompt, max_tokens=max_tokens, **more))  # type: ignore[arg-type]

    def fill(self) -> list[StepPlan]:
        """Makes plans until there is none."""
        plans = []
        while (plan := self.scheduler.plan()) is not None:
            self.sent.append(plan)
            plans.append(plan)
        return plans

    def answer(self, ms: Callable[[StepPlan], float] = lambda plan: 1.0) -> StepPlan:
        """Applies the result of the oldest plan."""
        plan = self.sent.popleft()
        ids = ids_to_bytes([5] * sum(plan.sample))
        self.scheduler.apply(StepResult(plan.step, ids, {}, {}, ms(plan)))
        return plan

    def run(self, num: int) -> list[StepPlan]:
        """Makes so many plans, each when it can be."""
        plans: list[StepPlan] = []
        while len(plans) < num:
            plans += self.fill()
            check(self.scheduler)
            if len(plans) < num:
                self.answer()
        return plans


def rows_of(plans: list[StepPlan]) -> list[list[int]]:
    return [list(bytes_to_ids(plan.rows)) for plan in plans]


@pytest.mark.parametrize("num_rows", [4, 8, 10, 37, 64])
@pytest.mark.parametrize("depth", [1, 2])
def test_rows_that_come_together_are_divided_evenly_and_each_is_in_every_pth_plan(num_rows: int, depth: int) -> None:
    engine = Engine(4, depth=depth)
    for rid in range(num_rows):
        engine.add(rid)
    rows = rows_of(engine.run(60))[20:]
    sizes = {len(plan) for plan in rows}
    assert sizes <= {num_rows // 4, num_rows // 4 + 1}, sizes
    for i, plan in enumerate(rows[4:]):
        assert sorted(plan) == sorted(rows[i]), "the same rows as four plans before"
    assert engine.scheduler.num_in_flight == 3 + depth


@pytest.mark.parametrize(("num_rows", "expected"), [(1, 2), (2, 3), (3, 4), (4, 5), (9, 5)])
def test_as_many_plans_are_in_flight_as_there_are_micro_batches_and_depth_allows(num_rows: int, expected: int) -> None:
    engine = Engine(4)
    for rid in range(num_rows):
        engine.add(rid)
    engine.run(30)
    engine.fill()
    assert engine.scheduler.num_in_flight == expected


def test_rows_that_join_and_end_are_spread_over_later_plans() -> None:
    engine = Engine(4)
    for rid in range(40):
        engine.add(rid, max_tokens=10 + rid)
    seen: dict[int, int] = {}
    for step in range(400):
        if step % 10 == 0:
            engine.add(1000 + step, num_prompt=1 + step % 7, max_tokens=20)
        for plan in engine.fill():
            for row in bytes_to_ids(plan.rows):
                assert plan.step - seen.get(row, plan.step) <= 7, "a row waits for more than 2P − 1 plans"
                seen[row] = plan.step
        for request in list(engine.scheduler.table.running):
            if request.num_planned == request.num_due:
                seen.pop(request.row, None)
        check(engine.scheduler)
        engine.answer()


def test_a_plan_without_its_turn_is_made_when_all_tokens_are_known() -> None:
    engine = Engine(4)
    for rid in range(4):
        engine.add(rid)
    (first,) = engine.fill()
    assert len(first.rows) == 4 * 4, "all prompts are in one plan, and nothing else can be computed before it is over"
    engine.answer()
    assert [len(rows) for rows in rows_of(engine.fill())] == [1, 1, 1, 1, 1]


def test_long_contexts_count_as_what_they_cost() -> None:
    engine = Engine(2, budget=8192)
    for rid in range(3):
        engine.add(rid, num_prompt=9000)
    for rid in range(10, 40):
        engine.add(rid, num_prompt=100)

    def ms(plan: StepPlan) -> float:
        work = engine.scheduler._in_flight[0].work
        return 1.0 if work is None else 2.0 + 0.1 * work.rows + 1e-3 * work.context + 0.01 * work.prefill

    for _ in range(400):
        engine.fill()
        engine.answer(ms)
    of_row, of_position = engine.scheduler._cost.of_rows()
    assert of_position / of_row == pytest.approx(0.01, rel=0.2)
    costs = []
    for _ in range(20):
        engine.fill()
        flight = engine.scheduler._in_flight[-1]
        costs.append(sum(of_row + of_position * request.num_planned for request in flight.decodes))
        engine.answer(ms)
    assert max(costs) < 1.6 * min(costs), "a share is within a row of the others"
    sizes = Counter(len(flight.decodes) for flight in engine.scheduler._in_flight)
    assert max(sizes) > min(sizes) + 5, "one long row beside many short ones"


def test_chunks_of_one_prompt_are_in_consecutive_plans_of_equal_predicted_time() -> None:
    engine = Engine(4, budget=2048)
    true = (1.0, 0.01, 2e-6)

    def ms(plan: StepPlan) -> float:
        work = engine.scheduler._in_flight[0].work
        assert work is not None
        return true[0] + true[1] * work.prefill + true[2] * work.pairs

    engine.add(0, num_prompt=20_000, max_tokens=1)
    while engine.scheduler.table.requests:
        engine.fill()
        engine.answer(ms)
    engine.add(1, num_prompt=60_000, max_tokens=1)
    chunks: list[int] = []
    most = 0
    while engine.scheduler.table.requests:
        chunks += [sum(bytes_to_ids(plan.counts)) for plan in engine.fill()]
        most = max(most, engine.scheduler.num_in_flight)
        engine.answer(ms)
    assert sum(chunks) == 60_000 and most == 5
    times = []
    past = 0
    for chunk in chunks[:-1]:
        work = with_chunk(Work(0, 0, 0, 0), past, chunk)
        times.append(true[0] + true[1] * work.prefill + true[2] * work.pairs)
        past += chunk
    assert max(times) < 1.1 * min(times) and chunks[0] > 2 * chunks[-2]
    assert len(chunks) >= 16


def test_a_short_prompt_is_cut_for_the_stages_unless_its_chunks_get_too_short() -> None:
    def chunks(constant_ms: float) -> list[int]:
        engine = Engine(4, budget=4096)

        def ms(plan: StepPlan) -> float:
            return constant_ms + 0.01 * sum(bytes_to_ids(plan.counts))

        for rid in range(2):
            engine.add(rid, num_prompt=20_000, max_tokens=1)
            sizes: list[int] = []
            while engine.scheduler.table.requests:
                sizes += [sum(bytes_to_ids(plan.counts)) for plan in engine.fill()]
                engine.answer(ms)
        return sizes

    assert len(chunks(0.1)) >= 16
    assert 4 < len(chunks(3.0)) < 10, "27 of 30 ms are the chunk's"


def test_a_chunk_beside_streams_takes_a_stage_s_part_of_the_latency_target() -> None:
    def longest_ms(num_stages: int) -> float:
        engine = Engine(num_stages, itl_target_ms=24.0)
        times: list[float] = []

        def ms(plan: StepPlan) -> float:
            times.append(2.0 + 0.02 * sum(bytes_to_ids(plan.counts)))
            return times[-1]

        for rid in range(8):
            engine.add(rid)
        for step in range(300):
            if step in (50, 150):
                engine.add(100 + step, num_prompt=12_000, max_tokens=1)
                times.clear()
            engine.fill()
            engine.answer(ms)
        return max(times)

    assert longest_ms(1) == pytest.approx(24.0, rel=0.1)
    assert longest_ms(4) == pytest.approx(6.0, rel=0.1)


def test_rows_beside_a_prompt_leave_plans_to_its_chunks() -> None:
    """One row must not hold up the stages: plans without it are in between."""
    engine = Engine(4, budget=64)
    engine.add(0)
    engine.run(5)
    engine.add(1, num_prompt=3000)
    plans = engine.run(40)[6:]
    with_row = [plan.step for plan in plans if 0 in bytes_to_ids(plan.rows)]
    assert {b - a for a, b in pairwise(with_row)} == {4}
    assert all(1 in bytes_to_ids(plan.rows) for plan in plans)


def test_a_constrained_row_is_first_when_its_mask_comes() -> None:
    engine = Engine(2)
    engine.add(0, constraint=Constraint())
    for rid in range(1, 9):
        engine.add(rid)
    scheduler = engine.scheduler
    mask = Masks(array("q", [0]).tobytes(), bits_of([5]))
    scheduler.allow(mask)
    engine.run(12)
    assert 0 not in {row for rows in rows_of(list(engine.sent)) for row in rows}, "it waits for its mask"
    scheduler.allow(mask)
    engine.answer()
    (plan, *_) = engine.fill()
    assert 0 in bytes_to_ids(plan.rows) and bytes_to_ids(plan.masked_rows)[0] == 0
    check(scheduler)


def plan_lines(num_stages: int, num_rows: int) -> int:
    """Lines of `engine/core` for a plan of decode rows."""
    engine = Engine(num_stages)
    for rid in range(num_rows):
        engine.add(rid)
    engine.run(6 * num_stages)
    engine.fill()
    engine.answer()
    return lines_of(core, engine.fill)


def test_a_plan_visits_only_the_rows_of_its_micro_batch() -> None:
    few, many = plan_lines(2, 2 * ROWS), plan_lines(8, 8 * ROWS)
    assert few > 10 * ROWS and many < 1.05 * few, "eight times as many rows in eight micro-batches"


def test_one_stage_keeps_no_micro_batches() -> None:
    engine = Engine(1)
    for rid in range(8):
        engine.add(rid)
    rows = rows_of(engine.run(10))
    assert all(plan == rows[0] for plan in rows) and engine.scheduler.micro_batches.num_rows == 0


def test_each_stage_allows_one_plan_more_in_flight() -> None:
    settings = [(1, 1), (1, 3), (4, 1), (4, 2)]
    assert [Engine(num, depth=depth).scheduler.max_in_flight for num, depth in settings] == [1, 3, 4, 5]
