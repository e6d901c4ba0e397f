"""One random history of an engine, run event by event under a virtual clock.

The core is driven as its process drives it: it takes the messages of its mailbox, plans as long as there is something
to plan, and sends the outputs. Results and transfers come back late and in order. Requests arrive, are cancelled, and
are ended by stop strings. Workers and cores are replaced. After each event every invariant is asserted. When no event
is left, every request must have been answered, and every block and row must be free.

Longer than 500 lines, because all kinds of events share one state and one clock.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import compress
from random import Random
from unittest.mock import patch

from fakes import EOS, VOCAB, Content, FakeRow, FakeWorker, allowed_by_row, next_token
from invariants import check, writes_are_exclusive

from pagewire.engine.core import policy
from pagewire.engine.core.block_pool import BlockPool
from pagewire.engine.core.kv_events import Cleared, Stored
from pagewire.engine.core.plan_builder import InFlight
from pagewire.engine.core.request import Request, State
from pagewire.engine.core.scheduler import Adjustable, Scheduler
from pagewire.ipc.messages import (
    Cancel,
    Constraint,
    Enqueue,
    Masks,
    StepPlan,
    StepResult,
    StopHit,
    Transferred,
    bytes_to_ids,
)

from .clients import Ask, Client, Journal
from .grammar import FakeGrammar
from .oracle import Oracle
from .patience import Ageing, Fairness, FirstInQueue, Patience
from .setting import BLOCK_SIZE, Setting
from .stages import Pipeline, Stage
from .stores import Address, WorkerHalf, core_half, facts_of, keys_of, resize_tiers

MAX_EVENTS = 20_000
_PARTIAL = -1


def _sampling(flight: InFlight) -> list[Request]:
    """The rows of a plan that sample a token."""
    return [*flight.decodes, *compress(flight.others, flight.sample)]


Mail = Enqueue | Cancel | StopHit | StepResult | Transferred | Masks


class History:
    """A setting, and the events in it."""

    def __init__(
        self,
        seed: int,
        log: Callable[[str], None] | None = None,
        num_stages: int = 1,
        *,
        has_encoder: bool = False,
    ) -> None:
        """`log`: gets a line for each event. `num_stages`: of the model's layers, each with a worker of its own.
        `has_encoder`: of the model, beside its decoder."""
        self.rng = Random(seed)
        self.now = 0.0
        self.counts: Counter[str] = Counter()
        self._log = log
        self._setting = Setting(self.rng, num_stages, has_encoder=has_encoder)
        self._passed: dict[Request, int] = {}  # see `FirstInQueue`
        self._oracle = Oracle(self._setting.groups, BLOCK_SIZE, self._setting.regime_limit)
        self._journal = Journal(self._oracle)
        self._facts = facts_of(self._setting.groups, BLOCK_SIZE)
        self._events: list[tuple[float, int, Callable[[], None]]] = []  # a heap: (time, number of the event, call)
        self._num_events = 0
        self._stores: list[dict[Address, bytes]] = [
            {} for _ in (self._setting.tier.kinds if self._setting.tier else ())
        ]
        self._mail: list[Mail] = []
        self._plans: deque[StepPlan] = deque()  # sent and not run: the first waits for masks of late rows
        self._late: dict[int, dict[int, Sequence[int] | None]] = {}  # step → late row → the tokens that it may sample
        self._is_awake = False  # a wake-up of the core is scheduled
        self._routed: set[tuple[str, int | None, bytes]] = (
            set()
        )  # (tier, group, key) that a router believes to be cached
        self._fail_seeds: set[int] = set()
        self._faults: set[int] = set()  # steps without memory whose results the core has not had
        self._shortage_left = 0  # steps until the shortage of memory ends
        self._shortage_positions = 0  # the most positions of a step during the shortage
        self._grammar_fails_at: dict[int, int] = {}  # rid → output length at which its grammar fails
        setting = self._setting
        stem = [self.rng.randrange(VOCAB) for _ in range(30)]
        self._stems = [stem, stem[:BLOCK_SIZE] + stem[2 * BLOCK_SIZE :]]  # equal blocks after unequal prefixes
        # Draws of their own, so that what else happens does not depend on them. Few histories show what shares promise.
        self._changes, self._changed = Random(-1 - seed), self._as_set()
        self._new_core()
        has_shares = setting.policy == "slo" and setting.has_shares
        if self._changes.random() < 0.15 and not has_shares:
            for _ in range(self._changes.randint(1, 4)):
                self._later(self._changes.random() * 0.1, self._change)
        for i in range(setting.num_prompts):
            self._later(self.rng.random() * setting.arrival_span_s, lambda rid=i * 8 + 1: self._arrive(rid))
        for _ in range(setting.worker_losses):
            self._later(self.rng.random() * 0.1, self._lose_worker)
        for _ in range(setting.num_sleeps):
            self._later(self.rng.random() * 0.1, self._request_sleep)
        for _ in range(setting.core_losses):
            self._later(self.rng.random() * 0.1, self._lose_core)

    def run(self) -> Counter[str]:
        """Runs the history to its end. Returns the number of each event. Raises AssertionError if a check fails."""
        self._say(f"{vars(self._setting)}")
        setting = self._setting
        with patch.multiple(
            policy,
            FAIR_QUANTUM=setting.quantum,
            PATIENCE=setting.patience,
            MAX_PATIENCE_MS=setting.max_patience_ms,
            AGEING_MS=setting.ageing_ms,
            SHARE_WINDOW=setting.quantum,
        ):
            while self._events:
                assert self._num_events < MAX_EVENTS, "the history never ends"
                self.now, _, happen = heappop(self._events)
                happen()
        self._check_the_end()
        return self.counts

    # ── time ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _later(self, delay_s: float, call: Callable[[], None]) -> None:
        self._num_events += 1
        heappush(self._events, (self.now + delay_s, self._num_events, call))

    def _on_worker(self, delay_s: float, call: Callable[[], None]) -> None:
        """Schedules a call, unless the worker has been replaced by then."""
        workers = self._workers
        self._later(delay_s, lambda: call() if workers is self._workers else None)

    def _say(self, text: str) -> None:
        if self._log is not None:
            self._log(f"{self.now * 1000:9.3f} ms  {text}")

    # ── clients ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _arrive(self, rid: int) -> None:
        rng, setting = self.rng, self._setting
        prompt = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 2, 6, 12, 12, 60]))]
        if rng.random() < setting.stem_share:
            prompt = rng.choice(self._stems)[: rng.randint(0, 24)] + prompt[: rng.choice([1, 2, 60])]
        salt = rng.choice([b"", b"", b"", b"other"])
        if rng.random() < setting.turn_share and self._journal.clients:  # the next turn of a conversation
            earlier = rng.choice(list(self._journal.clients.values()))
            salt = earlier.ask.salt
            prompt = (earlier.ask.prompt + earlier.expected + prompt)[: setting.max_len - rng.randint(1, 8)] or prompt
        if setting.starts and self._journal.clients and rng.random() < 0.5:  # a prompt that was read before
            earlier = rng.choice(list(self._journal.clients.values()))
            prompt, salt = earlier.ask.prompt, rng.choice([earlier.ask.salt, salt])
        is_constrained = rng.random() < setting.constrained_share
        ask = Ask(
            prompt[: setting.max_len - 1],
            max_tokens=rng.choice([None, 0, 1, 2, 5, 20, 20]),
            priority=rng.randint(0, 2),
            tenant=(tenant := rng.choice("ab")),
            latency_class=tenant if rid % 3 else "",
            salt=salt,
            ignore_eos=rng.random() < 0.5,
            stop_token_ids=rng.choice([(), (), (3, 11)]),
            logprobs=0 if rng.random() < 0.1 else None,
            prompt_logprobs=0 if rng.random() < 0.1 and not setting.starts else None,
            queue_timeout_s=rng.choice([None, None, None, 0.01]),
            min_tokens=0 if is_constrained or rid % 5 else 6,
            constraint=Constraint() if is_constrained else None,
            marks=tuple(rng.sample(range(80), rng.choice([0, 1, 2]))),
            starts=setting.starts,
        )
        n = rng.choice([1, 1, 1, 2, 3])
        for choice in range(n):
            fails = rng.random() < 0.03
            stop_after = rng.randint(1, 6) if rng.random() < setting.stop_rate else None
            grammar_fails = ask.constraint is not None and rng.random() < 0.1
            client = Client(
                rid + choice,
                ask,
                max_len=setting.max_len,
                fails=fails,
                stop_after=stop_after,
                grammar_fails=grammar_fails,
                may_be_too_large=setting.shortage_rate > 0,
                groups=setting.groups,
                regime_limit=setting.regime_limit,
            )
            if grammar_fails:
                self._grammar_fails_at[client.rid] = rng.randint(0, 10)
            if fails:
                self._fail_seeds.add(client.rid)
            self._journal.add(client)
            if rng.random() < setting.cancel_rate:
                self._later(rng.random() * 0.05, lambda client=client: self._cancel(client))
        self.counts["several choices"] += n > 1
        self.counts["constrained"] += n * (ask.constraint is not None)
        self._post(ask.message(rid, n))

    def _cancel(self, client: Client) -> None:
        if client.is_open and not client.has_left:
            client.has_left = True
            request = self._scheduler.table.requests.get(client.rid)
            self.counts["cancelled"] += request is not None
            self.counts["cancelled while loading"] += request is not None and request.state is State.LOADING
            self.counts["cancelled in flight"] += request is not None and request.num_in_flight > 0
            self._post(Cancel((client.rid,)))

    # ── the core ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _new_core(self) -> None:
        setting = self._setting
        self._connector = None
        if setting.tier is not None:
            self._connector = core_half(setting.tier, self._stores, self._facts, self.rng)
        self._scheduler = Scheduler(
            pool=BlockPool(num_pages=setting.num_pages, groups=setting.groups, eviction=setting.eviction),
            block_size=BLOCK_SIZE,
            max_num_seqs=setting.max_num_seqs,
            max_num_batched_tokens=setting.budget,
            max_model_len=setting.max_len,
            max_queued_requests=setting.max_queued_requests,
            max_queued_tokens=setting.max_queued_tokens,
            depth=setting.depth,
            num_stages=setting.num_stages,
            eos_token_ids=(EOS,),
            prefix_caching=setting.prefix_caching,
            policy=setting.policy,
            latency_classes=setting.classes,
            itl_target_ms=setting.itl_target_ms,
            connector=self._connector,
            kv_events=setting.kv_events,
            speculate=setting.speculate,
            regime_limit=setting.regime_limit,
            decoder_start_ids=setting.starts,
        )
        self._scheduler.change(self._changed)
        is_ranked = setting.policy != "fair" and not (setting.policy == "slo" and setting.has_shares)
        self._patience = Patience(self._scheduler, is_ranked)
        self._ageing = Ageing(self._scheduler, setting.longest_patience_s)
        self._fairness = Fairness(self._scheduler, setting.quantum) if setting.policy == "fair" else None
        self._routed.clear()
        self._grammar = FakeGrammar(self._grammar_fails_at)
        self._masked_until = self.now
        self._new_worker()

    def _post(self, message: Mail) -> None:
        """Puts a message into the core's mailbox and wakes the core soon, when there may be more messages."""
        self._mail.append(message)
        self._wake(self.rng.choice([0.0, 0.0, 0.0005, 0.002]))

    def _wake(self, delay_s: float) -> None:
        if not self._is_awake:
            self._is_awake = True
            self._later(delay_s, self._work)

    def _work(self) -> None:
        """Does what the core's process does when it has messages."""
        self._is_awake = False
        scheduler = self._scheduler
        mail, self._mail = self._mail, []
        for message in mail:
            self._handle(message)
        if scheduler.has_deadlines:
            scheduler.expire(self.now)
            self.counts["late"] += self._patience.step_back()
        self._tell_late()
        if scheduler.lateness not in self._setting.latenesses or self.rng.random() < 0.1:
            scheduler.set_lateness(self.rng.choice(self._setting.latenesses))
        if (sampled := scheduler.constraints.take()) is not None:
            self._ask_grammar(lambda: self._grammar.hear(sampled))
        while self._plan():
            if self.rng.random() < self._setting.pause_rate:
                self._wake(0.001)
                break
        else:
            if scheduler.is_paused and not scheduler.is_busy:
                self._sleep()
        check(scheduler, self._setting.max_num_seqs)
        self._check_content()
        self._take_outputs()
        if scheduler.deadlines:
            self._later(max(0.0, scheduler.deadlines.next - self.now), lambda: self._wake(0.0))
        if scheduler.asks_again:
            self._wake(0.0005)

    def _handle(self, message: Mail) -> None:
        scheduler = self._scheduler
        match message:
            case Enqueue():
                before = scheduler.num_waiting
                answers = scheduler.add(message, self.now)
                self._say(f"{message.rid} arrives, {len(message.prompt_ids) // 4} ids, n = {message.n}: {answers}")
                self._journal.hear_answers(answers)
                if scheduler.num_waiting > before and not message.attempt:
                    assert scheduler.num_waiting <= self._changed.max_queued_requests, "too many requests wait"
                    assert scheduler.table.waiting.num_tokens <= self._changed.max_queued_tokens, "too many tokens wait"
                for answer in answers:
                    client = self._journal.clients[answer.rid]
                    self.counts["refused"] += not client.is_open
                    if client.is_open:
                        self._patience.arrive(client)
                        self._ageing.arrive(client.rid, self.now)
                if message.constraint is not None and scheduler.num_waiting > before:
                    rids, resumed = range(message.rid, message.rid + message.n), bytes_to_ids(message.resume_ids)
                    self._ask_grammar(lambda: self._grammar.open(rids, resumed))
            case Cancel():
                self._say(f"{message.rids} cancelled")
                for rid in message.rids:
                    scheduler.cancel(rid)
            case StopHit():
                self._say(f"{message.rids} hit a stop string")
                for rid in message.rids:
                    scheduler.stop_hit(rid)
            case StepResult():
                self._say(
                    f"step {message.step} is over: {list(bytes_to_ids(message.ids))} {list(message.num_sampled[::4])}"
                )
                self._apply(message)
                if message.step in self._faults:
                    self._faults.remove(message.step)
                    self._patience.start_again()
                    if self._fairness is not None:
                        self._fairness.start_again()
            case Masks():
                nums = [len(part) // 8 for part in (message.rids, message.free, message.complete)]
                self._say(f"{nums} may sample some, any and no token, {message.failed} failed")
                self.counts["masks"] += len(message.rids) // 8
                self.counts["completed grammars"] += len(message.complete) // 8
                scheduler.allow(message)
            case Transferred():
                self._say(
                    f"loaded {message.loaded}, failed {list(bytes_to_ids(message.failed_blocks))}, {message.sent} sent"
                )
                scheduler.transferred(message)

    def _apply(self, message: StepResult) -> None:
        scheduler = self._scheduler
        healthy = [request for request in scheduler._in_flight[0].requests() if not request.is_poisoned]
        num_changes = scheduler.counters.num_regime_changes
        scheduler.apply(message)
        self._sources.pop(message.step, None)
        for _ in range(scheduler.counters.num_regime_changes - num_changes):
            self._patience.change_regime()
        if (group := scheduler.pool.groups.state) is not None:
            keys = [key for request in healthy if request.is_poisoned for key in request.snapshots]
            assert all(scheduler.pool.find(key, group) is None for key in keys), "a poisoned state is found"
            self.counts["poisoned states"] += len(keys)

    def _ask_grammar(self, ask: Callable[[], Masks]) -> None:
        """The grammar process answers later, one query after another, and not to a core that was replaced."""
        scheduler = self._scheduler
        self._masked_until = max(self._masked_until, self.now) + self.rng.random() * self._setting.mask_s

        def answer() -> None:
            if scheduler is self._scheduler:
                masks = ask()
                if masks != Masks(b"", b""):
                    self._post(masks)

        self._later(self._masked_until - self.now, answer)
        if self.rng.random() < self._setting.take_back_rate:
            self._later(self.rng.random() * 0.01, lambda: self._take_back(scheduler))

    def _take_back(self, scheduler: Scheduler) -> None:
        """The masks for which plans wait take too long."""
        rids = scheduler.late() if scheduler is self._scheduler else []
        if rids:
            self.counts["taken back"] += len(rids)
            self._say(f"{rids} are taken back")
            scheduler.take_back(rids)
            for _ in rids:
                self._patience.change_regime()
            if self._fairness is not None:
                self._fairness.start_again()
            check(scheduler, self._setting.max_num_seqs)
            self._wake(0.0)

    def _tell_late(self) -> None:
        for message in self._scheduler.take_late_masks():
            self._say(
                f"late rows of step {message.step}: {list(bytes_to_ids(message.rows))} masked, free: "
                f"{list(bytes_to_ids(message.free))}"
            )
            late = self._late.setdefault(message.step, {})
            answers: dict[int, Sequence[int] | None] = {
                **allowed_by_row(bytes_to_ids(message.rows), message.bits),
                **dict.fromkeys(bytes_to_ids(message.free)),
            }
            assert not late.keys() & answers.keys(), "two answers for a late row"
            late |= answers
        self._run_plans()

    def _plan(self) -> bool:
        """Makes the next plan, runs it on the worker and schedules its result. False: there is no plan."""
        scheduler = self._scheduler
        if scheduler.num_in_flight == scheduler.max_in_flight:
            assert scheduler.plan() is None, "more plans than may be in flight"
            return False
        first = FirstInQueue(scheduler, self._passed)
        self._ageing.look()
        before, num_before = scheduler.counters.num_preemptions, scheduler.num_running
        distance = max(1, min(self._setting.num_stages, scheduler.micro_batches.num_rows))
        plan = scheduler.plan()
        if self._log is not None and (plan is not None or scheduler.counters.num_preemptions > before):
            self._say(self._describe(plan))
        if not scheduler.is_paused:
            first.check(plan is not None)
            self._ageing.check()
        if plan is None:
            return False
        asked = self._changed
        assert scheduler.num_running <= max(num_before, asked.max_num_seqs), "more rows than may be held"
        num = sum(memoryview(plan.counts).cast("i")) + plan.num_speculative * plan.speculate
        assert num <= asked.max_num_batched_tokens and plan.speculate <= asked.speculate, "more than a step may have"
        self._check_distance(distance)
        copies = bytes_to_ids(plan.copies)
        others = set().union(*scheduler.pool._rest.values())
        writes_are_exclusive(scheduler, [page for page in copies[1::2] if page not in others])
        self.counts["late rows"] += len(plan.late_rows) // 4
        self._plans.append(plan)
        self._run_plans()
        check(scheduler, self._setting.max_num_seqs)
        self._check_content()
        self.counts["copies"] += len(copies) // 2
        self.counts["states kept"] += len(plan.keep_rows) // 4
        self.counts["prompts read"] += sum(bool(row.encoder_ids) for row in plan.open)
        self.counts["prompts found"] += sum(row.num_encoded > 0 and not row.encoder_ids for row in plan.open)
        self.counts["states found"] += sum(bool(row.state_from) for row in plan.open)
        if plan.rows:
            self._patience.plan()
            if self._fairness is not None:
                self._fairness.plan()
        else:
            self.counts["plans without rows"] += 1
        for request in scheduler.table.running:
            if request.state is State.LOADING and self.rng.random() < self._setting.cancel_loading_rate:
                client = self._journal.clients[request.rid]
                self._later(self.rng.random() * 0.01, lambda client=client: self._cancel(client))
                if self.rng.random() < 0.3:
                    self._later(self.rng.random() * 0.01, self._lose_worker)
        return True

    def _run_plans(self) -> None:
        """Runs the plans that the worker was sent, up to one whose late rows have no masks yet."""
        while self._plans and not self._waits(self._plans[0]):
            result = self._run(self._plans.popleft())
            if result is not None:
                self._busy_until = max(self._busy_until, self.now)
                self._busy_until += result.device_ms / 1000 * self.rng.uniform(0.5, 2.0)
                self._on_worker(self._busy_until - self.now, lambda result=result: self._finish(result))

    def _waits(self, plan: StepPlan) -> bool:
        return self._pipeline is None and self._workers[0].waits(plan, self._late.get(plan.step, ()))

    def _run(self, plan: StepPlan) -> StepResult | None:
        """Runs a plan at once, if there is one stage. Several stages run it in their own time."""
        if self._pipeline is not None:
            states = [page for opened in plan.open for page in bytes_to_ids(opened.state_from)]
            self._sources[plan.step] = {*bytes_to_ids(plan.copies)[::2], *states}
            self._pipeline.run(plan)
            return None
        (worker,) = self._workers
        core_knew = not worker.is_faulted or plan.after_fault
        result = worker.run(plan, self._late.pop(plan.step, {}))
        if worker.is_faulted:
            self.counts["steps without memory" if core_knew else "steps after one without memory"] += 1
            if core_knew:
                self._faults.add(plan.step)
        return result

    def _check_distance(self, least: int) -> None:
        """Asserts that no row of the newest plan is in one of the plans just before it, unless that one is applied."""
        *before, newest = self._scheduler._in_flight
        near = {id(r) for flight in before if flight.step > newest.step - least for r in _sampling(flight)}
        assert near.isdisjoint(map(id, _sampling(newest))), "a row is planned too soon after its last plan"

    def _describe(self, plan: StepPlan | None) -> str:
        scheduler = self._scheduler
        requests = " ".join(
            f"{r.rid}{'' if r.state.value == 'running' else '(' + r.state.value + ')'}:{r.num_computed}/{r.num_planned}"
            f"/{r.num_total}{r.held}"
            for r in scheduler.table.running
        )
        summary = "no plan"
        if plan is not None:
            flight = scheduler._in_flight[-1]
            rows = [f"{r.rid}+1" for r in flight.decodes]
            rows[: flight.num_speculative] = [f"{row}?{flight.speculate}" for row in rows[: flight.num_speculative]]
            rows += [f"{r.rid}+{count}" for r, count in zip(flight.others, flight.counts, strict=True)]
            copies = list(bytes_to_ids(plan.copies))
            summary = f"plan {plan.step} computes {' '.join(rows)} copies {copies} tells the tier {len(plan.kv)} bytes"
        return f"{summary} | {requests} | {scheduler.pool.num_free} blocks free, {scheduler.num_waiting} wait"

    def _take_outputs(self) -> None:
        journal = self._journal
        for item in self._scheduler.take_outputs():
            for rid in journal.hear(item):
                client = journal.clients[rid]
                if client.is_open and not client.has_left and len(client.output) >= (client.stop_after or 1000):
                    client.has_left = True
                    self.counts["stop strings"] += 1
                    self._later(self.rng.random() * 0.01, lambda rid=rid: self._post(StopHit((rid,))))
        for rid, client in journal.clients.items():
            if not client.is_open:
                self._patience.leave(rid)
        if self._setting.kv_events:
            self._take_kv_events()

    def _take_kv_events(self) -> None:
        """Asserts that a router that follows every event knows exactly the blocks that can be found."""
        routed = self._routed
        for event in self._scheduler.take_kv_events():
            if isinstance(event, Cleared):
                routed.clear()
            elif isinstance(event, Stored):
                routed.update((event.tier, event.group, key) for key in event.keys)
            else:
                routed.difference_update((event.tier, event.group, key) for key in event.keys)
        pool = self._scheduler.pool
        known: set[tuple[str, int | None, bytes | None]] = {
            ("device", pool.groups.told(pool._group[block]), pool._key[block])
            for block in pool._by_name.values()
            if pool._place[block] != _PARTIAL
        }
        if self._connector is not None:
            for tier, group, key in keys_of(self._connector, self._facts):
                known.add((tier, pool.groups.told(group), key))
        assert routed <= known, "a router believes that a block is cached which is not"
        assert routed == known, "a router does not know of a cached block"

    # ── the worker ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _new_worker(self) -> None:
        setting = self._setting
        options: dict[str, object] = {
            "num_blocks": setting.num_pages,
            "block_size": BLOCK_SIZE,
            "max_num_seqs": setting.max_num_seqs,
            "max_num_batched_tokens": setting.budget,
            "carry_out": self._carry_out,
            "draft": self._draft,
            "fits": self._fits,
            "groups": setting.groups,
        }
        num, self._pipeline = setting.num_stages, None
        if num == 1:
            self._workers = [FakeWorker(**options)]  # type: ignore[arg-type]
        else:
            stages = [Stage(place, num, setting.speculate, **options) for place in range(num)]
            self._workers = [*stages]
            self._pipeline = Pipeline(stages, rng=self.rng, later=self._on_worker, answer=self._answer)
        for worker in self._workers:
            worker.memory[:] = self.rng.randbytes(len(worker.memory))
            worker.fail_seeds = self._fail_seeds
        self._faults.clear()
        self._plans.clear()
        self._late.clear()
        self._sources: dict[int, set[int]] = {}  # step of a plan in flight → pages that it copies or begins from
        self._worker_half: WorkerHalf | None = None
        if setting.tier is not None:
            for kind, store in zip(setting.tier.kinds, self._stores, strict=True):
                if kind == "host":  # new memory holds any bytes, and reading it gives no error
                    store.update((place, self.rng.randbytes(len(content))) for place, content in store.items())
                elif kind != "disk":
                    store.clear()
            self._worker_half = WorkerHalf(
                setting.tier,
                self._stores,
                facts=self._facts,
                worker=self._workers[0],
                oracle=self._oracle,
                rng=self.rng,
                schedule=self._transfer,
                count=self._count,
            )
        self._busy_until = self.now

    def _fits(self, num: int) -> bool:
        """At random, there is memory for only a few positions or none for some steps."""
        rng = self.rng
        if self._shortage_left:
            self._shortage_left -= 1
        elif rng.random() < self._setting.shortage_rate:
            self._shortage_left, self._shortage_positions = rng.randint(0, 8), rng.choice([0, 1, 2, 5, 9])
        else:
            return True
        return num <= self._shortage_positions

    def _draft(self, row: FakeRow, num: int) -> list[int]:
        """Draft tokens of a row, each right with probability `draft_accuracy`."""
        rng, ids = self.rng, list(row.ids)
        for _ in range(rng.randint(0, num)):
            regime = self._workers[0].regime_of(row)
            ids.append(next_token(Content(self._setting.groups, ids, regime).reads(), row.sampling.seed))
            if rng.random() >= self._setting.draft_accuracy:
                ids[-1] = rng.randrange(VOCAB)
        return ids[len(row.ids) :]

    def _carry_out(self, metadata: bytes) -> None:
        assert self._worker_half is not None, "metadata without a connector"
        self._worker_half.carry_out(metadata)

    def _count(self, event: str, number: int) -> None:
        self.counts[event] += number

    def _answer(self, result: StepResult) -> None:
        """The last stage answers."""
        if result.fault is not None:
            self.counts["steps of stages without memory"] += 1
            self._faults.add(result.step)
        self._post(result)

    def _finish(self, result: StepResult) -> None:
        self._post(result)
        self._poll()

    def _transfer(self, delay_s: float, call: Callable[[], None]) -> None:
        """Schedules a part of a transfer, which goes on while the worker does other work."""
        self._on_worker(delay_s, call)
        self._on_worker(delay_s + 0.001, self._poll)

    def _poll(self) -> None:
        """The worker reports its finished transfers, after each step and while it is idle."""
        if self._worker_half is not None and (message := self._worker_half.take_finished()) is not None:
            self._post(message)

    def _as_set(self) -> Adjustable:
        """What the core starts with."""
        setting = self._setting
        return Adjustable(
            max_num_seqs=setting.max_num_seqs,
            max_num_batched_tokens=setting.budget,
            max_queued_requests=setting.max_queued_requests,
            max_queued_tokens=setting.max_queued_tokens,
            policy=setting.policy,
            latency_classes=setting.classes,
            itl_target_ms=setting.itl_target_ms,
            speculate=setting.speculate,
        )

    def _change(self) -> None:
        """An operator changes settings. What a policy promises is checked of one policy only, so no other takes its
        place but for fcfs and priority."""
        rng, setting, start = self._changes, self._setting, self._as_set()
        policies: list[policy.PolicyName] = ["fcfs", "priority"]
        self._changed = start._replace(
            max_num_seqs=rng.randint(1, start.max_num_seqs),
            max_num_batched_tokens=rng.choice(
                [start.max_num_batched_tokens, rng.randint(1, start.max_num_batched_tokens)]
            ),
            max_queued_requests=rng.choice([start.max_queued_requests, 3, 1000]),
            policy=rng.choice(policies) if setting.policy in policies else setting.policy,
            itl_target_ms=rng.choice([None, 1.1, 5.0]),
            speculate=rng.choice([0, start.speculate, start.speculate]),
        )
        self._say(f"{self._changed}")
        self.counts["settings changed"] += 1
        self._scheduler.change(self._changed)
        self._patience.change()
        if self._connector is not None:
            assert setting.tier is not None
            resize_tiers(self._connector, setting.tier, rng)
        check(self._scheduler, setting.max_num_seqs)
        self._wake(0.0)

    def _request_sleep(self) -> None:
        """A request for sleep arrives."""
        self._say("sleep is requested")
        self._scheduler.is_paused = True
        self._wake(0.0)

    def _sleep(self) -> None:
        """Nothing is in flight: the memory is given back, and holds any bytes afterwards."""
        scheduler = self._scheduler
        self.counts["sleeps"] += 1
        self.counts["sleeps with running requests"] += scheduler.num_running > 0
        self._say("the engine sleeps")
        scheduler.empty()
        for worker in self._workers:
            worker.memory[:] = self.rng.randbytes(len(worker.memory))
            worker.rows = [None] * self._setting.max_num_seqs
        self._patience.start_again()
        if self._fairness is not None:
            self._fairness.start_again()
        check(scheduler, self._setting.max_num_seqs)
        scheduler.is_paused = False
        self._wake(self.rng.random() * 0.01)

    def _lose_worker(self) -> None:
        """The worker dies and is replaced, with all its memory. The messages that it sent are dropped."""
        self.counts["workers lost"] += 1
        loads = self._scheduler._loads
        self.counts["workers lost while loading"] += loads is not None and len(loads) > 0
        self.counts["workers lost at work"] += self._scheduler.num_in_flight > 0
        self._say("the worker is lost")
        self._mail = [m for m in self._mail if not isinstance(m, StepResult | Transferred)]
        self._new_worker()
        self._scheduler.reset()
        self._patience.start_again()
        check(self._scheduler, self._setting.max_num_seqs)
        self._check_content()
        self._wake(0.0)

    def _lose_core(self) -> None:
        """The core dies with its worker and its messages. The journal resumes all open requests on the new core."""
        self.counts["cores lost"] += 1
        self._say("the core is lost")
        self._mail.clear()
        self._new_core()
        for message in self._journal.resume():
            self.counts["resumed with output"] += bool(message.resume_ids)
            self._post(message)

    # ── invariants ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _check_content(self) -> None:
        """Every block with a key has the content that its key names. Not checked after a step without memory, nor while
        plans wait for masks or stages run plans in their own time."""
        if self._plans:
            return
        pool = self._scheduler.pool
        if not self._setting.tier:  # a tier may read blocks with the next plan
            # A plan reads what it copies before any later plan can write there, so it does not hold it.
            read = set().union(*self._sources.values())
            for worker in self._workers:
                for page in pool._empty:
                    if page not in read:
                        worker.write_block(page, b"\xdd" * worker.block_bytes)
        if self._faults or (self._pipeline is not None and self._scheduler.num_in_flight):
            return
        for block in pool._by_name.values():
            key, group = pool._key[block], pool._group[block]
            assert key is not None
            for stage, worker in enumerate(self._workers):
                self._oracle.expect(key, *map(worker.read_block, pool.pages([block])), group=group, stage=stage)

    def _check_the_end(self) -> None:
        scheduler, setting = self._scheduler, self._setting
        unanswered = [rid for rid, client in self._journal.clients.items() if client.is_open]
        assert not unanswered, f"no event is left and {unanswered} were not answered"
        assert scheduler.num_in_flight == scheduler.num_running == scheduler.num_waiting == 0
        assert not scheduler.table.held, "blocks are held for no request"
        assert not self._grammar.outputs, "grammars are open for no request"
        assert scheduler.pool.num_free == setting.num_pages, "pages leaked"
        assert len(scheduler.table.free_rows) == setting.max_num_seqs, "rows leaked"
        assert scheduler.mend() is None, "the check for leaks finds one"
        if self._fairness is not None:
            self.counts["tenants far ahead"] += self._fairness.num_ahead
        self.counts["overtaken"] += self._ageing.num_overtaken
        self.counts["patience ended"] += self._ageing.num_ended
        counters = scheduler.counters
        self.counts["preempted"] += counters.num_preemptions
        self.counts["cached tokens"] += counters.num_cached_tokens
        self.counts["regime changes"] += counters.num_regime_changes
        self.counts["regimes, cached tokens"] += counters.num_cached_tokens * (setting.regime_limit is not None)
        if len(setting.groups.shapes) > 1:
            self.counts["several groups"] += 1
            self.counts["several groups, cached tokens"] += counters.num_cached_tokens
        self.counts["draft tokens"] += counters.num_draft_tokens
        self.counts["draft tokens accepted"] += counters.num_accepted_tokens
        for client in self._journal.clients.values():
            self.counts[f"ended by {client.end}"] += 1
