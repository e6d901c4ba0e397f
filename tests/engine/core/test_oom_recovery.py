"""Steps that run out of memory, one rule a test; `tests/sim` mixes them with everything else at random."""

from collections import deque
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
from fakes import EOS, FakeWorker, all_tokens, enqueue, expected_output, kv_of
from invariants import check

from pagewire.engine.core.block_pool import BlockPool
from pagewire.engine.core.groups import PLAIN, Groups
from pagewire.engine.core.kv_connector import Evicted, KvEvent, KvRequest
from pagewire.engine.core.request import Request, State
from pagewire.engine.core.scheduler import Scheduler
from pagewire.engine.kv_connector.one_group import OneGroup
from pagewire.ipc.messages import (
    Failed,
    GroupShape,
    Pooling,
    StepResult,
    TierSnapshot,
    TokenBatch,
    Tokens,
    Transferred,
    bytes_to_ids,
)

SIZE = 4
SIZES: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 32}
PROMPTS = [list(range(1 + 20 * i, 14 + 21 * i)) for i in range(4)]


class Engine:
    """A scheduler, a worker with memory for steps of at most `max_positions`, and the output of all requests."""

    def __init__(
        self, *, depth: int = 2, max_positions: int = 1000, fault_every: int = 0, groups: Groups = PLAIN, **more: Any
    ) -> None:
        """fault_every: so many steps, the first and each after as many, have no memory whatever their size; 0: none."""
        self.max_positions, self.fault_every = max_positions, fault_every
        self.num_steps = 0  # that the worker was to run
        self.scheduler = Scheduler(
            pool=BlockPool(num_pages=64, groups=groups),
            block_size=SIZE,
            depth=depth,
            max_model_len=100,
            max_queued_requests=100,
            max_queued_tokens=10**6,
            eos_token_ids=(EOS,),
            **SIZES,
            **more,
        )
        self.worker = FakeWorker(
            num_blocks=64,
            block_size=SIZE,
            fits=self._fits,
            groups=groups,
            carry_out=lambda metadata: None,
            **SIZES,
        )
        self.sizes: list[int] = []  # positions of each plan
        self.results: deque[StepResult] = deque()
        self.output: dict[int, list[int]] = {}
        self.ends: dict[int, Tokens | Failed] = {}

    def _fits(self, num_positions: int) -> bool:
        self.num_steps += 1
        is_fault = self.fault_every > 0 and self.num_steps % self.fault_every == 1
        return not is_fault and num_positions <= self.max_positions

    def plan(self) -> bool:
        """Runs every plan that the scheduler allows now. Returns whether a result waits to be applied."""
        while (plan := self.scheduler.plan()) is not None:
            self.sizes.append(sum(bytes_to_ids(plan.counts)))
            self.results.append(self.worker.run(plan))
        return bool(self.results)

    def apply(self) -> StepResult:
        """Applies the oldest result and returns it."""
        result = self.results.popleft()
        self.scheduler.apply(result)
        check(self.scheduler)
        for item in self.scheduler.take_outputs():
            if isinstance(item, Failed):
                self.ends[item.rid] = item
            for tokens in all_tokens(item) if isinstance(item, TokenBatch) else ():
                self.output.setdefault(tokens.rid, []).extend(bytes_to_ids(tokens.ids))
                if tokens.finish is not None:
                    self.ends[tokens.rid] = tokens
        return result

    def serve(self, most: int = 1000) -> None:
        """Plans and applies until nothing is left."""
        while self.plan():
            assert len(self.sizes) < most, "steps without an end"
            self.apply()


def expected(rid: int, prompt: list[int], num: int) -> list[int]:
    return expected_output(prompt, num, 100, rid, True)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_requests_get_the_same_tokens_in_smaller_steps(depth: int) -> None:
    engine = Engine(depth=depth)
    for rid, prompt in enumerate(PROMPTS):
        engine.scheduler.add(enqueue(rid, prompt, max_tokens=30, seed=rid, ignore_eos=True))
    for _ in range(8):
        engine.plan()
        engine.apply()
    engine.max_positions = 3  # a step with all four rows is too large now
    engine.serve()
    assert engine.output == {rid: expected(rid, prompt, 30) for rid, prompt in enumerate(PROMPTS)}
    assert engine.scheduler.counters.num_out_of_memory > 0
    assert engine.scheduler.pool.num_free == 64


def test_steps_are_halved_and_grow_again() -> None:
    engine = Engine(depth=1, max_positions=5)
    engine.scheduler.add(enqueue(0, list(range(1, 80)), max_tokens=1, ignore_eos=True))
    engine.serve()
    assert engine.sizes[:4] == [32, 16, 8, 4]
    assert engine.sizes[4:7] == [5, 6, 3], "a token more after each good step, and half after a bad one"
    engine.max_positions = 1000
    engine.scheduler.add(enqueue(1, list(range(100, 199)), max_tokens=1, ignore_eos=True))
    engine.serve()
    assert engine.sizes[-6:-1] == [10, 11, 12, 13, 14]


def test_only_the_request_that_does_not_fit_alone_fails() -> None:
    engine = Engine(max_positions=0)
    engine.scheduler.add(enqueue(0, [1, 2, 3], seed=0, ignore_eos=True))
    engine.scheduler.add(enqueue(1, [4, 5, 6], max_tokens=4, seed=1, ignore_eos=True))
    while 0 not in engine.ends:
        engine.plan()
        engine.apply()
    engine.max_positions = 1000
    engine.serve()
    failed = engine.ends[0]
    assert isinstance(failed, Failed) and failed.kind == "unavailable" and "no memory" in failed.detail
    assert engine.output == {1: expected(1, [4, 5, 6], 4)}
    assert engine.scheduler.pool.num_free == 64 and len(engine.scheduler.table.free_rows) == 8


def test_a_single_decode_row_is_retried_when_memory_is_short_for_a_moment() -> None:
    engine = Engine(depth=1)
    engine.scheduler.add(enqueue(0, [1, 2, 3], max_tokens=6, ignore_eos=True))
    for _ in range(2):
        engine.plan()
        engine.apply()
    engine.max_positions = 0
    for _ in range(2):
        engine.plan()
        assert engine.apply().fault is not None
    engine.max_positions = 1000
    engine.serve()
    assert engine.output == {0: expected(0, [1, 2, 3], 6)}


def test_the_texts_of_an_encoder_are_retried_one_by_one() -> None:
    """Its texts cannot be chunked, so the smaller budget does not bind the first text of a step."""
    engine = Engine(max_positions=20, is_chunked=False, prefix_caching=False)
    for rid, length in enumerate([12, 13, 18, 25]):
        engine.scheduler.add(enqueue(rid, list(range(1, length + 1)), pooling=Pooling("mean")))
    engine.serve()
    assert [isinstance(engine.ends[rid], Tokens) for rid in range(4)] == [True, True, True, False]


def test_plans_in_flight_behind_a_step_without_memory_are_not_counted() -> None:
    engine = Engine(depth=3)
    for rid, prompt in enumerate(PROMPTS):
        engine.scheduler.add(enqueue(rid, prompt, max_tokens=20, seed=rid, ignore_eos=True))
    engine.plan()
    engine.apply()
    engine.max_positions = 1
    engine.plan()
    engine.max_positions = 1000
    for _ in range(2):  # planned before the step without memory; the plans made meanwhile build on that step
        assert engine.apply().fault is None
        engine.plan()
    assert [engine.apply().fault for _ in range(3)] == ["out_of_memory"] * 3
    assert engine.scheduler.counters.num_out_of_memory == 1
    engine.serve()
    assert engine.output == {rid: expected(rid, prompt, 20) for rid, prompt in enumerate(PROMPTS)}


# A dropped step spoils the states of its requests, which go on from the last states that were kept.
HYBRIDS = [
    Groups([GroupShape("full", 0, 1), GroupShape("state", 0, 1)], interval=400),
    Groups([GroupShape("full", 0, 1), GroupShape("window", 6, 1), GroupShape("state", 0, 2)], interval=400),
    Groups([GroupShape("state", 0, 1)], interval=400),
]


def serve_with_faults(groups: Groups, depth: int) -> None:
    engine = Engine(depth=depth, fault_every=3 * depth, groups=groups)
    prompt = list(range(1, 80))
    engine.scheduler.add(enqueue(0, prompt, max_tokens=8, ignore_eos=True))
    engine.serve(most=200)
    assert engine.output == {0: expected_output(prompt, 8, 100, 0, True, groups=groups)}
    assert engine.scheduler.counters.num_out_of_memory >= 3
    assert sum(engine.sizes) < 4 * (len(prompt) + 8), "most positions are computed once"
    assert engine.scheduler.pool.num_free == 64


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("groups", HYBRIDS, ids=["full", "window", "states only"])
def test_a_hybrid_goes_on_after_each_chunk_while_steps_are_short_of_memory(groups: Groups, depth: int) -> None:
    """Far from the interval at which a prompt leaves states behind: every chunk leaves one while memory is short."""
    serve_with_faults(groups, depth)


@pytest.mark.parametrize("groups", HYBRIDS, ids=["full", "window", "states only"])
def test_a_hybrid_without_these_states_would_begin_again_for_ever(groups: Groups) -> None:
    keep_positions = Request.keep_positions

    def without_end(self: Request, start: int, end: int, interval: int, *, with_end: bool) -> list[int]:
        return keep_positions(self, start, end, interval, with_end=False)

    with patch.object(Request, "keep_positions", without_end), pytest.raises(AssertionError, match="without an end"):
        serve_with_faults(groups, 1)


class OneBlock:
    """A connector that stores the third block of one prompt and loads it once."""

    def __init__(self, prompt: list[int]) -> None:
        self.prompt = prompt
        self.loading: list[int] = []
        self.finished: list[tuple[int, int]] = []  # rid, how many positions were computed

    def get_num_new_matched_tokens(self, request: KvRequest, num_computed_tokens: int) -> tuple[int | None, bool]:
        has = request.rid == 1 and num_computed_tokens == 8 and not self.loading
        return (SIZE if has else 0), True

    def update_state_after_alloc(self, request: KvRequest, block_ids: Sequence[int], num_external_tokens: int) -> None:
        self.loading.append(request.rid)

    def build_connector_meta(self) -> bytes:
        return b""

    def request_finished(self, request: KvRequest, block_ids: Sequence[int]) -> bool:
        self.finished.append((request.rid, request.num_computed))
        return False

    def blocks_evicted(self, evicted: Sequence[Evicted]) -> None:
        pass

    def update_connector_output(self, output: Transferred) -> None:
        pass

    def take_events(self) -> list[KvEvent]:
        return []

    def tiers(self) -> tuple[TierSnapshot, ...]:
        return ()

    def reset(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.mark.parametrize("load", ["loading", "loaded", "cancelled"])
def test_a_request_computes_cached_blocks_that_a_step_without_memory_left_empty(load: str) -> None:
    """A request has two cached blocks that a step without memory was to fill, and loads a third."""
    prompt = list(range(30, 46))
    connector = OneBlock(prompt)
    engine = Engine(depth=2, max_positions=0, connector=OneGroup(connector, block_size=4))
    scheduler = engine.scheduler
    scheduler.add(enqueue(0, [*prompt[:8], 7, 8], max_tokens=5, seed=0, ignore_eos=True))
    scheduler.add(enqueue(1, prompt, max_tokens=5, seed=1, ignore_eos=True))
    engine.plan()
    late = scheduler.table.requests[1]
    assert late.state is State.LOADING and connector.loading == [1], "it was admitted behind the plans in flight"
    engine.worker.write_block(late.blocks[2], kv_of(prompt)[8 * 4 : 12 * 4])
    if load == "loaded":
        scheduler.transferred(Transferred((1,), b"", ()))
    if load == "cancelled":
        scheduler.cancel(1)
    while engine.results:
        assert engine.apply().fault is not None
    if load != "loaded":
        scheduler.transferred(Transferred((1,), b"", ()))
    engine.max_positions = 1000
    engine.serve()
    assert engine.output.pop(0) == expected(0, [*prompt[:8], 7, 8], 5)
    if load == "cancelled":
        assert connector.finished[0] == (1, 0), "none of its positions is offered to the connector"
    else:
        assert engine.output == {1: expected(1, prompt, 5)}
