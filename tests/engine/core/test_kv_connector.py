"""What a `ChunkConnector` is told: each block that a plan fills before the plan is sent, and that it is good once the
result is applied."""

import random
from collections.abc import Mapping, Sequence

import pytest
from fakes import enqueue
from msgspec.structs import replace

from pagewire.engine.core.kv_connector import Evicted, Held, Item, KvEvent, KvRequest
from pagewire.engine.core.request import State
from pagewire.ipc.messages import RowFailure, TierSnapshot, Transferred

from .test_oom_recovery import SIZE, Engine


class Chunks:
    """A `TierConnector` and `ChunkConnector` that has nothing and notes what it is told."""

    wants_chunks = True

    def __init__(self) -> None:
        self.told: dict[int, list[Held]] = {}  # rid → what plans fill
        self.good: dict[int, dict[bytes, tuple[int, ...]]] = {}  # rid → name → pages
        self.spoilt: list[int] = []
        self.is_open = False  # a plan with blocks that were told of is to be sent

    def filling(self, request: KvRequest, held: Sequence[Held]) -> None:
        assert held
        self.told.setdefault(request.rid, []).extend(held)
        self.is_open = True

    def filled(self, request: KvRequest, held: Sequence[Held]) -> None:
        self.good.setdefault(request.rid, {}).update((one.item.name, one.pages) for one in held)

    def spoiled(self, request: KvRequest) -> None:
        self.spoilt.append(request.rid)

    def ended(self, request: KvRequest, held: Sequence[Held]) -> bool:
        self.filled(request, held)
        return False

    def build_connector_meta(self) -> bytes:
        is_open, self.is_open = self.is_open, False
        return b"x" if is_open else b""

    def available(self, request: KvRequest, items: Sequence[Item]) -> Sequence[bool]:
        return ()

    def standing(self, request: KvRequest, behind: bytes, place: int) -> Mapping[bytes, int]:
        return {}

    def load(self, request: KvRequest, held: Sequence[Held]) -> None:
        raise AssertionError("it has nothing")

    def blocks_evicted(self, evicted: Sequence[Evicted]) -> None: ...

    def update_connector_output(self, output: Transferred) -> None: ...

    def take_events(self) -> list[KvEvent]:
        return []

    def tiers(self) -> tuple[TierSnapshot, ...]:
        return ()

    def reset(self) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("fault_every", [0, 4])
def test_each_block_of_a_prompt_is_told_of_before_the_plan_that_fills_it(depth: int, fault_every: int) -> None:
    """What is good was told of before, with the same pages; of a step without memory it is told again."""
    rng, chunks = random.Random(depth), Chunks()
    engine = Engine(depth=depth, fault_every=fault_every, connector=chunks)
    prompts = {rid: [rng.randrange(50) for _ in range(rng.randrange(3, 60))] for rid in range(1, 6)}
    for rid, prompt in prompts.items():
        engine.scheduler.add(enqueue(rid, prompt, max_tokens=rng.randrange(1, 6), seed=rid, ignore_eos=True))
    engine.serve()
    assert len(engine.ends) == 5
    for rid, prompt in prompts.items():
        told = {one.item.name: one.pages for one in chunks.told.get(rid, [])}
        places = [one.item.place for one in chunks.told.get(rid, [])]
        num = len(prompt) // SIZE
        assert set(places) >= set(range(num - 1)) and (fault_every or len({*places}) == len(places))
        assert told.items() <= chunks.good.get(rid, {}).items()
    assert not chunks.spoilt


@pytest.mark.parametrize("has_run", [False, True])
def test_a_request_that_ends_while_it_waits_is_spoiled(has_run: bool) -> None:
    """It has been asked about, and a chunk of it may have been told of, but `ended` is not called without a row."""
    chunks = Chunks()
    engine = Engine(depth=1, connector=chunks)
    engine.scheduler.add(enqueue(1, list(range(50)), max_tokens=4, seed=1, ignore_eos=True))
    engine.scheduler.add(enqueue(2, list(range(50, 63)), max_tokens=4, seed=2, ignore_eos=True))
    if has_run:
        assert engine.plan() and 1 in chunks.told
        request = engine.scheduler.requests[1]
        engine.scheduler.table.preempt(request)
        states = [request.state]
        engine.apply()
        assert [*states, request.state] == [State.LEAVING, State.WAITING] and not chunks.spoilt
    engine.scheduler.cancel(1)
    assert chunks.spoilt == [1]
    engine.serve()
    assert chunks.spoilt == [1] and chunks.good[2] and 2 in engine.ends


@pytest.mark.parametrize("by", ["numbers", "plugin"])
def test_a_request_that_is_bad_is_spoiled_and_not_good(by: str) -> None:
    chunks = Chunks()
    engine = Engine(connector=chunks)
    if by == "numbers":
        engine.worker.fail_seeds.add(1)
    engine.scheduler.add(enqueue(1, list(range(9)), max_tokens=4, seed=1, ignore_eos=True))
    engine.scheduler.add(enqueue(2, list(range(20, 29)), max_tokens=4, seed=2, ignore_eos=True))
    while engine.plan():
        result = engine.results[0]
        if by == "plugin" and result.step == 1:
            engine.results[0] = replace(result, failed={0: RowFailure("internal", "It has failed.")})
        engine.apply()
    assert chunks.spoilt == [1] and 1 in chunks.told and 1 not in chunks.good and chunks.good[2]
