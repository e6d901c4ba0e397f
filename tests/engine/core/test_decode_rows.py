"""Decode rows treated in bulk and row by row give the same plans, outputs and counters."""

from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from unittest.mock import patch

import pytest
from fakes import EOS, enqueue
from sim.history import History

from pagewire.engine.core import decode_rows
from pagewire.engine.core.block_pool import BlockPool
from pagewire.engine.core.request import Request
from pagewire.engine.core.scheduler import Scheduler
from pagewire.ipc.messages import StepResult, TokenBatch, ids_to_bytes

NUM_HISTORIES = 60
_counters = attrgetter(*(name for name in Request.__slots__ if name not in ("asked", "ids", "keys", "root", "tables")))
_plan, _apply, _apply_drafted = decode_rows.plan, decode_rows.apply, decode_rows.apply_drafted


def plan_none(running: list[Request], limit: int) -> tuple[list[Request], list[Request]]:
    return [], list(running)


def apply_none(requests: list[Request], tokens: "array[int]") -> decode_rows.Left:
    return [(request, tokens[i : i + 1]) for i, request in enumerate(requests)]


def apply_none_drafted(
    requests: list[Request], nums: "array[int]", most: int, tokens: "array[int]"
) -> decode_rows.Left:
    left, end = [], 0
    for request, num in zip(requests, nums, strict=True):
        start, end = end, end + num
        request.roll_back(most - num)
        left.append((request, tokens[start:end]))
    return left


@contextmanager
def row_by_row() -> Iterator[None]:
    """The bulk functions leave out every row, so decode rows are treated like all other rows."""
    with (
        patch.object(decode_rows, "plan", plan_none),
        patch.object(decode_rows, "apply", apply_none),
        patch.object(decode_rows, "apply_drafted", apply_none_drafted),
    ):
        yield


@contextmanager
def counted(counts: Counter[str]) -> Iterator[None]:
    """Adds to `counts` how many rows are treated in bulk and how many are left out."""

    def plan(running: list[Request], limit: int) -> tuple[list[Request], list[Request]]:
        planned, others = _plan(running, limit)
        counts.update({"planned": len(planned), "not planned": len(others)})
        return planned, others

    def apply(requests: list[Request], tokens: "array[int]") -> decode_rows.Left:
        left = _apply(requests, tokens)
        counts.update({"applied": len(requests) - len(left), "not applied": len(left)})
        return left

    def apply_drafted(requests: list[Request], nums: "array[int]", most: int, tokens: "array[int]") -> decode_rows.Left:
        left = _apply_drafted(requests, nums, most, tokens)
        counts.update({"drafted": len(requests) - len(left), "drafted, left": len(left)})
        return left

    with (
        patch.object(decode_rows, "plan", plan),
        patch.object(decode_rows, "apply", apply),
        patch.object(decode_rows, "apply_drafted", apply_drafted),
    ):
        yield


def state(scheduler: Scheduler) -> list[object]:
    """Every counter of the scheduler and of the requests that hold a row."""
    counters = [value for value in vars(scheduler.counters).values() if isinstance(value, int)]
    return [counters, *((_counters(r), len(r.ids), r.held.copy()) for r in scheduler.table.running)]


def log_of(seed: int, num_stages: int = 1) -> list[object]:
    """Runs a history. Returns the scheduler's plans and outputs, with all counters after each."""
    log: list[object] = []

    def logged(name: str):  # type: ignore[no-untyped-def]
        method = getattr(Scheduler, name)

        def call(self: Scheduler, *args: object) -> object:
            result = method(self, *args)
            log.append((name, result, state(self)))
            return result

        return patch.object(Scheduler, name, call)

    with logged("plan"), logged("apply"), logged("take_outputs"):
        History(seed, num_stages=num_stages).run()
    return log


def test_bulk_and_row_by_row_give_the_same_history() -> None:
    counts: Counter[str] = Counter()
    for seed in range(NUM_HISTORIES):
        with counted(counts):
            in_bulk = log_of(seed)
        with row_by_row():
            by_row = log_of(seed)
        for i, (ours, theirs) in enumerate(zip(in_bulk, by_row, strict=False)):
            assert ours == theirs, f"history {seed} differs at call {i}"
        assert len(in_bulk) == len(by_row), seed
    assert min(counts[name] for name in ("planned", "not planned", "applied", "not applied", "drafted")) > 100, counts
    assert counts["drafted, left"] > 15, counts


def test_bulk_and_row_by_row_give_the_same_history_of_stages() -> None:
    for seed in range(8):
        in_bulk = log_of(seed, num_stages=3)
        with row_by_row():
            assert log_of(seed, num_stages=3) == in_bulk, f"history {seed} differs"


@pytest.mark.parametrize("name", ["plan_each", "apply_each", "apply_drafted"])
def test_a_wrong_counter_in_a_bulk_method_is_noticed(name: str) -> None:
    method = getattr(Request, name)

    def wrong(requests, *args):  # type: ignore[no-untyped-def]
        result = method(requests, *args)
        for request in requests:
            request.num_total += 1
        return result

    def differs(seed: int) -> bool:
        with row_by_row():
            by_row = log_of(seed)
        try:
            with patch.object(Request, name, staticmethod(wrong)):
                return log_of(seed) != by_row
        except AssertionError:
            return True

    assert any(differs(seed) for seed in range(20))


def scheduler_with(num_rows: int, **more: object) -> Scheduler:
    """A scheduler with a request of three prompt tokens for every row."""
    scheduler = Scheduler(
        pool=BlockPool(num_pages=1024),
        block_size=4,
        max_num_seqs=num_rows,
        max_num_batched_tokens=256,
        max_model_len=400,
        max_queued_requests=100,
        max_queued_tokens=10**6,
        depth=1,
        eos_token_ids=(EOS,),
        **more,  # type: ignore[arg-type]
    )
    for rid in range(num_rows):
        scheduler.add(enqueue(rid, [rid, 1, 2], max_tokens=300))
    return scheduler


@pytest.mark.parametrize("is_row_by_row", [False, True])
def test_a_step_of_decode_rows_is_one_batch_with_one_token_a_request(is_row_by_row: bool) -> None:
    scheduler = scheduler_with(20)
    with row_by_row() if is_row_by_row else counted(Counter()):
        for step in range(1, 200):
            plan = scheduler.plan()
            assert plan is not None and plan.step == step and sum(plan.sample) == 20
            scheduler.apply(StepResult(step, ids_to_bytes(list(range(20, 40))), {}, {}, 0.0))
            (batch,) = [item for item in scheduler.take_outputs() if isinstance(item, TokenBatch)]
            assert [rid for rid, _ in batch.columns()] == list(range(20)) and batch.ids == ids_to_bytes(
                list(range(20, 40))
            )
    assert all(r.num_computed == 3 + 198 == r.num_planned and r.num_in_flight == 0 for r in scheduler.table.running)
    assert all(r.num_committed == 192 // 4 for r in scheduler.table.running), "blocks are committed every 32 positions"
