"""The schedulers of several KV domains: random histories with a fake worker and KV tiers for each domain, which share
only the numbers of their steps; a mutant for each rule, which some history must notice; and how requests get their
domain."""

from array import array
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from unittest.mock import patch

import pytest
from fakes import EOS, VOCAB, FakeWorker, all_tokens, enqueue, expected_output
from invariants import check
from kv_instance import Running
from msgspec.structs import replace
from sim.oracle import Oracle
from sim.stores import Address, TierOptions, WorkerHalf, core_half, facts_of

from pagewire.config.config import EngineConfig, MachineFacts, ModelFacts
from pagewire.config.flags import make_config
from pagewire.config.resolve import resolve
from pagewire.engine.core import trace
from pagewire.engine.core.block_hash import root_key
from pagewire.engine.core.block_pool import BlockPool
from pagewire.engine.core.domains import Domains, Plans
from pagewire.engine.core.groups import PLAIN
from pagewire.engine.core.kv_connector import Evicted, Held, Item, TierConnector
from pagewire.engine.core.policy import PolicyName
from pagewire.engine.core.scheduler import Scheduler
from pagewire.engine.kv_connector.block_storage import HEADER_BYTES
from pagewire.engine.kv_connector.chain import ChainCore
from pagewire.engine.kv_connector.registry import core_connector, of_domain
from pagewire.ipc.messages import (
    Accepted,
    Cancel,
    Enqueue,
    Failed,
    GroupSnapshot,
    Opened,
    StepPlan,
    StepResult,
    TierSnapshot,
    TokenBatch,
    Transferred,
    bytes_to_ids,
    ids_to_bytes,
)

BLOCK_SIZE = 4
MAX_LEN = 60
NUM_HISTORIES = 60
HOST = TierOptions(("host",), (20,), True, True, False, 0.0, "lru", 0.0, 0.0, 0.0)


def make(
    num_domains: int = 2, *, num_blocks: int = 64, connectors: Sequence[TierConnector] = (), **more: object
) -> Domains:
    options = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "max_queued_requests": 100,
        "max_queued_tokens": 10**6,
        "depth": 1,
        **more,
    }

    def scheduler(domain: int, beside: Scheduler | None) -> Scheduler:
        return Scheduler(
            pool=BlockPool(num_pages=num_blocks), block_size=BLOCK_SIZE, max_model_len=MAX_LEN, eos_token_ids=(EOS,),
            beside=beside, connector=connectors[domain] if connectors else None,
            **options,  # type: ignore[arg-type]
        )  # fmt: skip

    return Domains(scheduler, num_domains)


class Rank:
    """A domain's worker. It takes part in every step, and sees how many tokens the others have."""

    def __init__(
        self, number: int, num_blocks: int, max_num_seqs: int, budget: int,
        tiers: Callable[[FakeWorker], WorkerHalf] | None = None,
    ) -> None:  # fmt: skip
        """tiers: behind this domain."""
        self._number = number
        self._worker = FakeWorker(
            num_blocks=num_blocks, block_size=BLOCK_SIZE, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget,
            carry_out=self._carry_out,
        )  # fmt: skip
        self._tiers = None if tiers is None else tiers(self._worker)
        self.plans: deque[StepPlan] = deque()
        self.num_idle = 0

    def run(self) -> StepResult:
        plan = self.plans.popleft()
        assert plan.domain_tokens[self._number] == sum(bytes_to_ids(plan.counts)), "the domains exchange other sizes"
        if plan.rows or plan.kv:
            return replace(self._worker.run(plan), domain=self._number)
        assert not (plan.open or plan.grow_rows or plan.copies), plan
        assert self._worker.last_step in (None, plan.step - 1), "the rank misses a step"
        self._worker.last_step = plan.step
        self.num_idle += 1
        return StepResult(plan.step, b"", {}, {}, 1.0, domain=self._number)

    def take_transferred(self) -> Transferred | None:
        found = None if self._tiers is None else self._tiers.take_finished()
        return None if found is None else replace(found, rank=self._number)

    def _carry_out(self, metadata: bytes) -> None:
        assert self._tiers is not None, "metadata without a connector"
        self._tiers.carry_out(metadata)


class History:
    """Requests that arrive and are cancelled, domains that answer when they like, and workers that are lost."""

    def __init__(self, seed: int, record: Callable[[trace.Event], None] = lambda _: None) -> None:
        """record: called with what a trace of the history holds."""
        self._rng = rng = Random(seed)
        self._record = record
        self.counts: Counter[str] = Counter()
        self._num_domains = rng.choice([2, 2, 3, 4])
        self._num_blocks = rng.randint(MAX_LEN // BLOCK_SIZE, 22)
        self._max_num_seqs, self._budget = rng.randint(1, 6), rng.choice([4, 16, 64])
        self._depth = rng.randint(1, 3)
        kinds = rng.choice([(), (), ("host",), ("disk",), ("host", "disk")])
        capacities = tuple(rng.choice([3, 12, 60]) for _ in kinds)
        self._tiers = TierOptions(kinds, capacities, True, True, False, 0.0, "lru", rng.choice([0.0, 0.2]), 0.0, 0.0)
        self._facts, self._oracle = facts_of(PLAIN, BLOCK_SIZE), Oracle(PLAIN, BLOCK_SIZE)
        self._stores: list[list[dict[Address, bytes]]] = [[{} for _ in kinds] for _ in range(self._num_domains)]
        self._connectors = [core_half(self._tiers, own, self._facts, rng) for own in self._stores if kinds]
        self._moves: list[Callable[[], None]] = []  # parts of transfers that are due
        policy: PolicyName = rng.choice(["fcfs", "priority", "fair"])
        self._core = make(
            self._num_domains, num_blocks=self._num_blocks, max_num_seqs=self._max_num_seqs, depth=self._depth,
            max_num_batched_tokens=self._budget, policy=policy,
            connectors=[trace.TracedConnector(connector, record) for connector in self._connectors],
        )  # fmt: skip
        record(trace.Opened(self._config(policy, kinds), self._num_blocks))
        self._new_workers()
        self._stem = [rng.randrange(VOCAB) for _ in range(20)]
        self._asked = [self._request(rid) for rid in range(rng.randint(1, 25))]
        self._expected: dict[int, list[int]] = {}
        self._output: dict[int, list[int]] = {}
        self._ends: dict[int, str] = {}

    def _config(self, policy: PolicyName, kinds: Sequence[str]) -> EngineConfig:
        """The configuration that a trace of this history begins with."""
        model = ModelFacts(
            path="", name="m", max_position=MAX_LEN, vocab_size=VOCAB, eos_token_ids=(EOS,), checkpoint_dtype="float32"
        )
        asked = make_config(
            tensor_parallel_size=self._num_domains, kv_domains=self._num_domains, pipeline_depth=self._depth,
            max_num_seqs=self._max_num_seqs, max_num_batched_tokens=self._budget, scheduling_policy=policy,
            kv_connector=tuple(f"{kind},size=1" for kind in kinds),
        )  # fmt: skip
        return replace(resolve(asked, model, MachineFacts(num_cores=1)), block_size=BLOCK_SIZE)

    def _new_workers(self) -> None:
        sizes = self._num_blocks, self._max_num_seqs, self._budget
        self._moves.clear()
        tiers = [partial(self._worker_half, own) if self._connectors else None for own in self._stores]
        self._ranks = [Rank(number, *sizes, tiers[number]) for number in range(self._num_domains)]

    def _worker_half(self, stores: list[dict[Address, bytes]], worker: FakeWorker) -> WorkerHalf:
        for kind, store in zip(self._tiers.kinds, stores, strict=True):
            if kind == "host":  # new memory
                store.update((place, self._rng.randbytes(len(content))) for place, content in store.items())
        return WorkerHalf(
            self._tiers, stores, facts=self._facts, worker=worker, oracle=self._oracle, rng=self._rng,
            schedule=lambda _, move: self._moves.append(move), count=self._count,
        )  # fmt: skip

    def _count(self, event: str, number: int) -> None:
        self.counts[event] += number

    def _request(self, rid: int) -> Enqueue:
        rng = self._rng
        prompt = self._stem[: rng.choice([0, 0, 12, 20])] + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 25))]
        return enqueue(
            rid, prompt, max_tokens=rng.randint(1, 14), seed=rid, priority=rng.randint(0, 2), tenant=rng.choice("ab")
        )

    def run(self) -> Counter[str]:
        core, rng = self._core, self._rng
        for _ in range(20_000):
            due = [rank for rank in self._ranks if rank.plans]
            if not due and not self._asked and not core.requests and not core.is_busy:
                break
            draw = rng.random()
            if self._asked and (draw < 0.2 or not due):
                self._arrive(self._asked.pop())
            elif draw < 0.22:
                self._lose_workers()
            elif draw < 0.25 and core.requests:
                rid = rng.choice(list(core.requests))
                self._record(Cancel((rid,)))
                core.cancel(rid)
                self.counts["cancelled"] += 1
            elif self._moves and (draw < 0.5 or not due):
                self._moves.pop(0)()
            elif due:
                self._record(result := rng.choice(due).run())
                core.apply(result)
            for rank in self._ranks:
                if (transferred := rank.take_transferred()) is not None:
                    self._record(transferred)
                    core.transferred(transferred)
            self._plan()
            for item in core.take_outputs():
                self._take(item)
            for scheduler in core.schedulers:
                check(scheduler, self._max_num_seqs)
        else:
            raise AssertionError("the history never ends")
        self._check_the_end()
        return self.counts

    def _arrive(self, request: Enqueue) -> None:
        self._record(trace.Arrived(request, 0.0))
        (reply,) = self._core.add(request)
        assert isinstance(reply, Accepted)
        ids, limits = list(bytes_to_ids(request.prompt_ids)), request.limits
        self._expected[request.rid] = expected_output(ids, limits.max_tokens or 0, MAX_LEN, request.rid, False)
        self._oracle.learn(ids + self._expected[request.rid], request.salt)
        self._output[request.rid] = []

    def _plan(self) -> None:
        while True:
            plans = self._core.plan()
            self._record(trace.Planned.of(plans))
            if plans is None:
                return
            assert len(plans) == self._num_domains and len({plan.step for plan in plans}) == 1, plans
            for rank, plan in zip(self._ranks, plans, strict=True):
                rank.plans.append(plan)
                assert len(rank.plans) <= self._depth, "more plans than the depth in flight"
            self.counts["steps with an idle domain"] += any(not plan.rows for plan in plans)
            self.counts["steps of all domains"] += all(plan.rows for plan in plans)
            self.counts["steps that only move KV"] += not any(plan.rows for plan in plans)

    def _lose_workers(self) -> None:
        self.counts["workers lost"] += 1
        self._new_workers()
        self._record(trace.WorkerLost())
        self._core.reset()

    def _take(self, item: Opened | TokenBatch | Failed) -> None:
        assert not isinstance(item, Failed), item
        for tokens in all_tokens(item) if isinstance(item, TokenBatch) else ():
            self._output[tokens.rid].extend(bytes_to_ids(tokens.ids))
            if tokens.finish is not None:
                assert tokens.rid not in self._ends, "it ends twice"
                self._ends[tokens.rid] = tokens.finish

    def _check_the_end(self) -> None:
        core = self._core
        assert self._ends.keys() == self._expected.keys(), "a request was not answered"
        for rid, output in self._output.items():
            expected = self._expected[rid]
            assert output == (expected[: len(output)] if self._ends[rid] == "abort" else expected), rid
        assert not core.is_busy and core.num_pages_held == core.num_running == core.num_waiting == 0
        assert core.mend() is None
        for scheduler in core.schedulers:
            assert scheduler.pool.num_free == self._num_blocks and len(scheduler.table.free_rows) == self._max_num_seqs
        self.counts["preempted"] += core.counters.num_preemptions
        self.counts["cached tokens"] += core.counters.num_cached_tokens


COVERED = {
    "steps with an idle domain": 500, "steps of all domains": 500, "workers lost": 30, "cancelled": 30, "preempted": 20,
    "cached tokens": 500, "steps that only move KV": 100, "stored blocks": 500, "loads": 50, "failed loads": 10,
}  # fmt: skip


def test_every_history_keeps_every_invariant() -> None:
    counts: Counter[str] = Counter()
    for seed in range(NUM_HISTORIES):
        try:
            counts += History(seed).run()
        except Exception as error:
            raise AssertionError(f"history {seed}: {error}") from error
    assert not {event: counts[event] for event, num in COVERED.items() if counts[event] < num}


_plan, _apply, _reset, _transferred = Domains.plan, Domains.apply, Domains.reset, Domains.transferred


def _swap(self: Domains) -> Plans | None:
    plans = _plan(self)
    return None if plans is None else (plans[1], plans[0], *plans[2:])


def _forget_the_idle(self: Domains) -> Plans | None:
    plans = _plan(self)
    return plans and tuple(plan for plan in plans if plan.rows)


def _end_with_the_first_answer(self: Domains, result: StepResult) -> None:
    _apply(self, result)
    self._unanswered.pop(result.step, None)
    self._pending.pop(result.step, None)


def _keep_what_was_in_flight(self: Domains) -> None:
    pending, unanswered = dict(self._pending), dict(self._unanswered)
    _reset(self)
    self._pending.update(pending)
    self._unanswered.update(unanswered)


def _wrong_tokens(self: Domains) -> Plans | None:
    plans = _plan(self)
    return plans and tuple(replace(plan, domain_tokens=plan.domain_tokens[::-1]) for plan in plans)


def _transferred_elsewhere(self: Domains, message: Transferred) -> None:
    _transferred(self, replace(message, rank=(message.rank + 1) % self.num_domains))


def _add_to_two(self: Domains, message: Enqueue) -> Scheduler:
    self._schedulers[-1].add(message)
    return self._schedulers[0]


MUTANTS: dict[str, Callable[[], object]] = {
    "a domain gets another one's plan": partial(patch.object, Domains, "plan", _swap),
    "an idle domain gets no plan": partial(patch.object, Domains, "plan", _forget_the_idle),
    "an idle domain does not count the step": partial(patch.object, Scheduler, "skip", lambda self: None),
    "a step ends with its first answer": partial(patch.object, Domains, "apply", _end_with_the_first_answer),
    "steps of lost workers stay in flight": partial(patch.object, Domains, "reset", _keep_what_was_in_flight),
    "the domains know wrong numbers of tokens": partial(patch.object, Domains, "plan", _wrong_tokens),
    "a domain hears of another one's transfers": partial(patch.object, Domains, "transferred", _transferred_elsewhere),
    "a request is in two domains": partial(patch.object, Domains, "_choose", _add_to_two),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_some_history_fails_for_each_mutant(name: str) -> None:
    with MUTANTS[name](), pytest.raises((AssertionError, KeyError, ValueError)):  # type: ignore[attr-defined]
        for seed in range(NUM_HISTORIES):
            History(seed).run()


def test_a_history_is_replayed_from_its_trace() -> None:
    """Also what tiers have answered of where a request belongs. A trace in which domains are exchanged is found out."""
    num_plans, num_answers = 0, 0
    for seed in range(NUM_HISTORIES // 3):
        events: list[trace.Event] = []
        History(seed, events.append).run()
        planned = {i: each.plans for i, each in enumerate(events) if isinstance(each, trace.Planned) and each.plans}
        assert trace.replay(events) == (len(planned), None), seed
        num_plans += len(planned)
        place = max(i for i, plans in planned.items() if plans[0].rows != plans[-1].rows)
        changed = [*events[:place], trace.Planned.of(planned[place][::-1]), *events[place + 1 :]]
        assert "differs" in (trace.replay(changed)[1] or ""), seed
        num_answers += sum(isinstance(event, trace.Counted) and event.num > 0 for event in events)
    assert num_plans > 1000 and num_answers > 10


def _add(core: Domains, rid: int, prompt: list[int], **more: object) -> int:
    """The domain that the request gets."""
    (reply, *_) = core.add(enqueue(rid, prompt, **more))  # type: ignore[arg-type]
    assert isinstance(reply, Accepted)
    (domain,) = [i for i, scheduler in enumerate(core.schedulers) if rid in scheduler.requests]
    return domain


def _run(core: Domains, ranks: list[Rank]) -> None:
    while (plans := core.plan()) is not None:
        for rank, plan in zip(ranks, plans, strict=True):
            rank.plans.append(plan)
            core.apply(rank.run())


def test_requests_go_where_least_is_to_compute() -> None:
    core = make(3)
    assert [_add(core, rid, [rid] * 10) for rid in range(3)] == [0, 1, 2]
    assert _add(core, 3, [3] * 30) == 0 and _add(core, 4, [4] * 5) == 1
    assert core.num_waiting == 5 and len(core.requests) == 5 and core.requests[4].num_prompt == 5


def test_a_request_follows_its_prefix_unless_that_domain_has_more_to_do() -> None:
    core, ranks = make(), [Rank(number, 64, 8, 32) for number in range(2)]
    prompt = list(range(24))
    assert _add(core, 1, [9] * 4, max_tokens=1) == 0 and _add(core, 2, prompt, max_tokens=1) == 1
    _run(core, ranks)
    assert _add(core, 3, [*prompt, 7], max_tokens=1) == 1, "its beginning is there"
    assert _add(core, 4, [*prompt, 8], max_tokens=1, salt=b"other") == 0, "of another owner"
    _run(core, ranks)
    assert core.counters.num_cached_tokens == 24
    assert _add(core, 5, [50] * 32) == 0 and _add(core, 6, [51] * 55) == 1
    assert _add(core, 7, [*prompt, 9]) == 1, "23 positions more wait there, and it has 24 of them"
    assert _add(core, 8, [*prompt, 5]) == 0


@pytest.mark.parametrize("num_ids", [15, 16, 17])
def test_a_request_follows_the_prefix_that_its_own_regime_has(num_ids: int) -> None:
    """Of 16 ids and of more, the same tokens have other KV, and neither is of use for the other."""
    core, ranks = make(regime_limit=16), [Rank(number, 64, 8, 32) for number in range(2)]
    prompt = list(range(24))
    assert _add(core, 1, [9] * 4, max_tokens=1) == 0 and _add(core, 2, prompt, max_tokens=1) == 1
    _run(core, ranks)
    assert _add(core, 3, [*prompt[: num_ids - 1], 60], max_tokens=1) == (num_ids > 16)
    _run(core, ranks)
    assert core.counters.num_cached_tokens == (16 if num_ids > 16 else 0)


def test_a_request_follows_its_prefix_to_the_tiers_of_a_domain(tmp_path: Path) -> None:
    """The blocks may be in several tiers. What is common is everywhere, so nobody follows it."""
    facts = facts_of(PLAIN, BLOCK_SIZE)
    specs = ("host,size=2K", f"disk,path={tmp_path}/disk,size=8K", f"shared,path={tmp_path}/shared,size=8K")
    halves = [core_connector(of_domain(specs, domain, 2), facts) for domain in range(2)]
    core = make(connectors=[half for half in halves if half is not None])
    prompt = list(range(24))
    keys = core._keys(ids_to_bytes(prompt), root_key(b"", b""))
    held = [Held(Item(key, i, keys[i - 1] if i else None), (i,)) for i, key in enumerate(keys)]
    chain = core.schedulers[1].connector
    assert isinstance(chain, ChainCore)
    host, disk, shared = chain.parts
    asked = Running(1, array("i", prompt))
    for tier, places in ((disk, (0, 3, 4)), (shared, (5,))):
        tier.ended(asked, [held[i] for i in places])
    host.blocks_evicted([Evicted(i, keys[i], i, keys[i - 1]) for i in (1, 2)])
    assert [scheduler.num_found(keys) for scheduler in core.schedulers] == [0, 20]
    assert [scheduler.num_found(keys[2:]) for scheduler in core.schedulers] == [0, 12]
    assert [scheduler.num_found([bytes(32), *keys]) for scheduler in core.schedulers] == [0, 0]
    assert _add(core, 1, [*prompt, 9], max_tokens=1) == 1 and _add(core, 2, [50] * 9) == 0


def test_what_is_behind_the_device_counts_with_what_is_on_it() -> None:
    core, ranks = (
        make(connectors=[core_half(HOST, [{}], facts_of(PLAIN, BLOCK_SIZE), Random(0)) for _ in range(2)]),
        [Rank(number, 64, 8, 32) for number in range(2)],
    )
    prompt = list(range(24))
    assert _add(core, 1, prompt[:9], max_tokens=1) == 0
    _run(core, ranks)
    keys = core._keys(ids_to_bytes(prompt), root_key(b"", b""))
    first, second = core.schedulers
    assert first.connector is not None and second.connector is not None
    first.connector.blocks_evicted([Evicted(i, keys[i], i, keys[i - 1]) for i in (0, 2, 3)])
    second.connector.blocks_evicted([Evicted(i, keys[i], i, keys[i - 1]) for i in (0, 1, 2)])
    assert [scheduler.num_found(keys) for scheduler in core.schedulers] == [16, 12]


def test_the_queue_of_all_domains_is_bounded() -> None:
    core = make(max_queued_requests=3)
    assert [_add(core, rid, [1]) for rid in range(3)] == [0, 1, 0]
    (reply,) = core.add(enqueue(3, [1]))
    assert isinstance(reply, Failed) and reply.kind == "queue_full"
    (reply,) = core.add(enqueue(2, [1]))
    assert isinstance(reply, Failed) and reply.kind == "internal", "the number is taken, in whichever domain"
    two = core.add(enqueue(5, [1], n=9))
    assert {reply.kind for reply in two if isinstance(reply, Failed)} == {"invalid_request"} and len(two) == 9


def test_an_answer_that_is_not_due_is_refused() -> None:
    core = make()
    _add(core, 1, [1, 2])
    plans = core.plan()
    assert plans is not None and core.num_in_flight == 1 and core.is_busy
    with pytest.raises(ValueError, match="domain 1 answered step 2, of which no answer was due"):
        core.apply(StepResult(2, b"", {}, {}, 0.0, domain=1))


def test_what_is_told_of_all_domains() -> None:
    core, ranks = make(num_blocks=20), [Rank(number, 20, 8, 32) for number in range(2)]
    assert core.num_pages == 20 and core.num_domains == 2 and core.max_model_len == MAX_LEN
    for rid in (1, 2):
        _add(core, rid, [rid] * 9, max_tokens=3, queue_timeout_s=5.0)
    assert core.has_deadlines
    (plans,) = [core.plan()]
    assert plans is not None and core.num_pages_held == 6 and core.num_running == 2
    assert [core.of_rank(rank).pages() for rank in (0, 1)] == [(3, 0)] * 2
    for rank, plan in zip(ranks, plans, strict=True):
        rank.plans.append(plan)
        core.apply(rank.run())
    _run(core, ranks)
    assert core.groups() == (GroupSnapshot("full", 0, 6, 0, 0), GroupSnapshot("none", 0, 0, 0, 0))
    assert [core.of_rank(rank).pages() for rank in (0, 1)] == [(0, 3)] * 2
    counters = core.counters
    assert counters.num_passes == 2 * 3 and counters.num_pages_read == 2 * (9 + 10 + 11) / BLOCK_SIZE
    core.is_paused = True
    _add(core, 3, [3])
    assert core.plan() is None and all(scheduler.is_paused for scheduler in core.schedulers)
    core.empty()
    assert core.groups()[0].num_idle == 0
    core.expire(1e9)
    core.cancel(3)
    assert not core.requests


def test_the_tiers_of_all_domains_are_told_together(tmp_path: Path) -> None:
    """Counts and the sizes of each domain's own tiers add up. What all use together has the size that one knows."""
    facts, specs = facts_of(PLAIN, BLOCK_SIZE), ("host,size=2000", f"shared,path={tmp_path},size=2000")
    halves = [core_connector(of_domain(specs, domain, 2), facts) for domain in range(2)]
    core = make(connectors=[half for half in halves if half is not None])
    for num, scheduler in enumerate(core.schedulers, start=1):
        assert scheduler.connector is not None
        scheduler.connector.blocks_evicted([Evicted(i, bytes([i]) * 32, 0) for i in range(num)])
    assert core.of_rank(1).tiers()[0].num_blocks == 2
    assert core.tiers() == (
        TierSnapshot("host", 3, 2 * (1000 // 96), 0, 3, 0, 0),
        TierSnapshot("shared", 0, 2000 // (96 + HEADER_BYTES), 0, 0, 0, 0, is_common=True),
    )
    assert make().tiers() == ()
