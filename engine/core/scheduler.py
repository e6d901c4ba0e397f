"""Which requests compute what in the next step: continuous batching, chunked prefill, preemption.

Plain Python without I/O, clock or randomness, so that histories can be simulated and replayed. The core process calls
`add`, `plan`, `apply`, `transferred`, `cancel` and the others, and sends on what `take_outputs` returns.

Several plans may be in flight: a sampled token stays on the worker, so the next plan does not wait for it.

`RequestTable` holds the requests, `Planner` fills a plan; this file sends plans and applies their results.
"""

import sys
from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from msgspec.structs import replace

from ...config.latency_classes import LatencyClass
from ...ipc.messages import (
    Accepted,
    Enqueue,
    Failed,
    FinishReason,
    GroupSnapshot,
    LateMasks,
    Masks,
    RowFailure,
    RowLogprobs,
    StepPlan,
    StepResult,
    TierSnapshot,
    Tokens,
    Transferred,
    bytes_to_ids,
)
from . import decode_rows
from .admission import Admission, Queued
from .block_hash import args_key, block_key, root_key
from .block_pool import BlockPool
from .constraints import Constraints
from .cost import NO_WORK, CostModel, with_chunk, with_draft_tokens
from .deadlines import Deadlines
from .extension import PlanExtension
from .kv_connector import ChunkConnector, DomainTier, TierConnector, item_name
from .kv_events import KvCacheEvent, event_of_tier
from .loads import Loads
from .micro_batches import MicroBatches, Turn
from .oom_recovery import OomRecovery
from .output_buffer import Item, OutputBuffer
from .plan_builder import InFlight, PlanBuilder
from .planner import Lateness, Planner
from .poison import poison
from .policy import Expected, Policy, PolicyName, make_policy
from .prefix import PrefixCache
from .request import Request, State
from .request_table import RequestTable
from .speculation import num_sampled, num_until_end
from .stats import Counters

_BEFORE_ALL = 2**40  # resumed requests stand before all others, among themselves as they came
_LONG = 1024  # positions of a prompt whose price per token is told
_FEW_ROWS = 32  # of which a plan always counts what it reads
_LEARN_EVERY = 8  # steps; the cost model learns from each step with prefill


class _Extras(NamedTuple):
    """What a step reports of a row besides its tokens."""

    logprobs: RowLogprobs | None = None
    prompt_logprobs: RowLogprobs | None = None
    vector: bytes = b""


_NO_EXTRAS = _Extras()


class Adjustable(NamedTuple):
    """What may change between two steps; as the arguments of `Scheduler`, which say what there is room for."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_queued_requests: int
    max_queued_tokens: int
    policy: PolicyName
    latency_classes: Mapping[str, LatencyClass]
    itl_target_ms: float | None
    speculate: int


def _by_what(policy: PolicyName, classes: Mapping[str, LatencyClass]) -> tuple[PolicyName, Mapping[str, LatencyClass]]:
    """What a policy orders requests by."""
    return policy, classes if policy == "slo" else {}


class Scheduler:
    """All requests of one engine core."""

    def __init__(
        self,
        *,
        pool: BlockPool,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        max_queued_requests: int,
        max_queued_tokens: int,
        depth: int,
        eos_token_ids: tuple[int, ...],
        num_stages: int = 1,
        prefix_caching: bool = True,
        policy: PolicyName = "fcfs",
        latency_classes: Mapping[str, LatencyClass] = {},
        itl_target_ms: float | None = None,
        model_key: bytes = b"",
        connector: TierConnector | None = None,
        extension: PlanExtension | None = None,
        kv_events: bool = False,
        keys_by_args: bool = False,
        speculate: int = 0,
        is_chunked: bool = True,
        regime_limit: int | None = None,
        decoder_start_ids: tuple[int, ...] = (),
        beside: "Scheduler | None" = None,
    ) -> None:
        """`depth`: plans in flight with one stage; each stage more of `num_stages` allows one more. `speculate`: draft
        tokens that the worker may compute of a row in a step. `is_chunked`: see `Planner`.
        `keys_by_args`: only requests with equal `extra_args` share cached KV. `regime_limit`: see `Request`; None: all
        sequences are in one regime. `decoder_start_ids`: see `Request`. `beside`: the scheduler of another KV
        domain, whose policy, counters and queues of output are also this one's (`domains.py`)."""
        assert extension is None or not speculate, "an extension is told every position of a plan"
        self.pool = pool
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        # Any admitted request fits the pool alone.
        self.max_model_len = pool.groups.longest(pool.num_pages, max_model_len, block_size)
        self.decoder_start_ids = decoder_start_ids
        num_start = len(decoder_start_ids) or None
        self.admission = Admission(self.max_model_len, max_queued_requests, max_queued_tokens, num_start)
        self.max_in_flight = num_stages + depth - 1
        self.eos_token_ids = frozenset(eos_token_ids)
        self.regime_limit = sys.maxsize if regime_limit is None else regime_limit
        self.model_key = model_key
        self._keys_by_args = keys_by_args
        self.connector = connector
        self._reports_kv_events = kv_events
        self.counters: Counters = Counters() if beside is None else beside.counters
        self.prefix = PrefixCache(pool, block_size=block_size, enabled=prefix_caching, kv_events=kv_events)
        self.step = 0  # of the last plan
        self.is_paused = False  # plans compute nothing, and carry only what the KV connector has for its worker half
        self.deadlines = Deadlines()  # of their queue timeouts
        self.latest_starts = Deadlines()  # of the targets of their latency classes
        self._extension = extension
        self._outputs: OutputBuffer = OutputBuffer() if beside is None else beside._outputs
        self._policy: Policy = make_policy(policy, latency_classes) if beside is None else beside._policy
        self._policy_of = _by_what(policy, latency_classes)
        self.constraints: Constraints = Constraints() if beside is None else beside.constraints
        self._cost = CostModel()
        self.micro_batches = MicroBatches(num_stages, depth, self._cost)
        # Rows of one micro-batch share the remainder of their steps by the number of stages, so it changes each time.
        self._learn_every = _LEARN_EVERY * num_stages + (num_stages > 1)
        # That a step reads for a row. Walking many rows is a tenth of making a plan, so they are counted when the cost
        # model learns.
        self._pages_of_row = 0.0
        self._loads: Loads | None = None
        if connector is not None and prefix_caching:
            self._loads = Loads(connector, self.prefix, pool, self._cost, block_size)
        self._num_arrived = 0
        self._in_flight: deque[InFlight] = deque()
        self.table = RequestTable(
            pool=pool,
            prefix=self.prefix,
            policy=self._policy,
            outputs=self._outputs,
            counters=self.counters,
            connector=connector if prefix_caching else None,
            micro_batches=self.micro_batches,
            constraints=self.constraints,
            num_rows=max_num_seqs,
        )
        self._planner = Planner(
            table=self.table,
            pool=pool,
            prefix=self.prefix,
            policy=self._policy,
            loads=self._loads,
            cost=self._cost,
            micro_batches=self.micro_batches,
            outputs=self._outputs,
            counters=self.counters,
            block_size=block_size,
            max_num_batched_tokens=max_num_batched_tokens,
            itl_target_ms=itl_target_ms,
            speculate=speculate,
            is_chunked=is_chunked,
        )
        self._oom_recovery = OomRecovery(self._planner, self.table, pool, self._loads, self.counters)

    def change(self, asked: Adjustable, beside: "Scheduler | None" = None) -> None:
        """Holds for the plans from now on, and for requests that arrive. What runs goes on, also if it is more than may
        run now. `beside`: as of `Scheduler`; it has changed already."""
        assert asked.max_num_seqs <= self.max_num_seqs and asked.max_num_batched_tokens <= self.max_num_batched_tokens
        queue = asked.max_queued_requests, asked.max_queued_tokens
        self.admission = Admission(self.max_model_len, *queue, self.admission.num_start)
        self.table.max_rows = asked.max_num_seqs
        if (by := _by_what(asked.policy, asked.latency_classes)) != self._policy_of:
            self._policy_of = by
            self._policy = make_policy(*by) if beside is None else beside._policy
            self._follow()
        self._planner.change(self._policy, asked.max_num_batched_tokens, asked.itl_target_ms, asked.speculate)

    def _follow(self) -> None:
        """The policy is another one. It orders the open requests as if they had arrived under it."""
        expected = {}
        for request in self.table.requests.values():
            num = request.num_prompt + request.num_resumed
            expected[request.rid] = Expected(*self._cost.of_request(num, max(0, request.max_len - num)))
        self.table.follow(self._policy, lambda one: self._policy.place(one.asked, one.arrived_ms, expected[one.rid]))
        self.latest_starts = Deadlines()
        for request in self.table.waiting:
            if not request.opened:
                self._watch_start(request, expected[request.rid])

    def _watch_start(self, request: Request, expected: Expected) -> None:
        """Notes when it must begin to meet the target of its class, if it has one."""
        latest = self._policy.latest_start_ms(request, expected)
        if latest < float("inf"):
            self.latest_starts.put(latest / 1e3, request.rid, self.table.requests)

    # ── a request's life ─────────────────────────────────────────────────────────────────────────────────────────────

    def refusal(self, message: Enqueue) -> Failed | None:
        """Why a request is not taken in; None: it is."""
        waiting = self.table.waiting
        return self.admission.refusal(message, self.table.requests, Queued(len(waiting), waiting.num_tokens))

    def add(self, message: Enqueue, now: float = 0.0) -> list[Accepted | Failed]:
        """Takes its sequences in, or refuses them all. Each `Accepted` sequence gets exactly one terminal message in
        `take_outputs`. `now`: seconds on the clock that `expire` is called with."""
        rids, num_prompt = range(message.rid, message.rid + message.n), len(message.prompt_ids) // 4
        if (refusal := self.refusal(message)) is not None:
            return [replace(refusal, rid=rid) for rid in rids]
        root = self.root_of(message)
        expected = self._expected(message)
        place = self._policy.place(message, 1e3 * now, expected)
        keys: list[bytes] = []
        for choice in range(message.n):
            self._num_arrived += 1
            request = Request(
                message,
                choice=choice,
                arrival=self._num_arrived - (_BEFORE_ALL if message.attempt else 0),
                arrived_ms=1e3 * now,
                queue_key=self._policy.join(message),
                place=place,
                max_model_len=self.max_model_len,
                block_size=self.block_size,
                root=root,
                eos_token_ids=self.eos_token_ids,
                keys=keys,
                regime_limit=self.regime_limit,
                decoder_start_ids=self.decoder_start_ids,
            )
            if message.n > 1 and not keys and self.prefix.enabled:  # one prompt is hashed once
                keys = request.block_keys(request.num_prompt // self.block_size, self.block_size)
            self.table.join(request)
            self._watch_start(request, expected)
            if message.limits.queue_timeout_s is not None:
                self.deadlines.put(now + message.limits.queue_timeout_s, request.rid, self.table.requests)
            if message.resume_ids and (finish := request.finish_of(request.ids[-1])) is not None:
                # It had ended and only its terminal message was lost. A client that is sent everything again gets the
                # last token with that message.
                is_resent = message.resume_chars < 0
                self._outputs.add_item(request.as_opened(request.num_resumed - is_resent))
                self._finish(request, finish, request.ids[-1:], is_new=is_resent)
        return [Accepted(rid, num_prompt) for rid in rids]

    def _expected(self, message: Enqueue) -> Expected:
        """Of one of its sequences. What caches have of the prompt is found only when it is admitted."""
        num = (len(message.prompt_ids) + len(message.resume_ids)) // 4
        room, asked = self.max_model_len - num, message.limits.max_tokens
        num_output = room if asked is None else min(room, asked - len(message.resume_ids) // 4)
        return Expected(*self._cost.of_request(num, max(0, num_output)))

    def root_of(self, message: Enqueue) -> bytes:
        """The parent key of its first block, in the first regime. What the encoder reads changes all of the decoder's
        KV."""
        root = root_key(self.model_key, message.salt)
        if self.decoder_start_ids:
            root = block_key(root, message.prompt_ids)
        return args_key(root, message.sampling.extra_args) if self._keys_by_args else root

    def allow(self, message: Masks) -> None:
        """Takes in what constrained requests may sample next. Ends those to which nothing can be added."""
        self.table.allow(message)

    @property
    def lateness(self) -> Lateness:
        """When plans sample from constrained requests before their masks have come."""
        return self._planner.lateness

    def set_lateness(self, lateness: Lateness) -> None:
        """Holds for the plans from now on."""
        self._planner.lateness = lateness

    def take_late_masks(self) -> list[LateMasks]:
        """What the worker must be told of late rows since the last call."""
        return self.constraints.take_late()

    def late(self) -> list[int]:
        """The requests for whose masks plans in flight wait."""
        if not self.table.num_constrained:
            return []
        return [request.rid for request in self.table.running if request.late]

    def take_back(self, rids: Iterable[int]) -> None:
        """The masks of these requests take too long: plans in flight do not wait for them any longer, and what these
        compute of the requests does not count."""
        for rid in rids:
            if (request := self.table.requests.get(rid)) is not None and request.late:
                self.table.take_back(request)

    def plan(self) -> StepPlan | None:
        """The next step, or None if there is nothing to do or `max_in_flight` plans are in flight already."""
        num = len(self._in_flight)
        if num >= self.max_in_flight:
            return None
        if self.is_paused:
            return self._send(PlanBuilder(0))
        applied = self._in_flight[0].step - 1 if num else self.step
        return self._send(self._planner.build(Turn(self.step + 1, applied, num)))

    def skip(self) -> None:
        """The step after the last one is planned in other KV domains only."""
        self.step += 1

    def apply(self, result: StepResult) -> None:
        """Takes in the result of the oldest plan in flight. Raises ValueError if it is another plan's."""
        if not self._in_flight or self._in_flight[0].step != result.step:
            expected = self._in_flight[0].step if self._in_flight else None
            raise ValueError(f"the worker answered step {result.step} where step {expected} was due")
        flight = self._in_flight.popleft()
        self._outputs.close_batch()
        if result.fault is not None:
            self._oom_recovery.take_back(flight, self._in_flight)
            return
        self._oom_recovery.passed(flight)
        self.counters.num_failed_calls += result.num_failed_calls
        self.counters.num_slow_calls += result.num_slow_calls
        if result.failed:
            self._fail(flight, result.failed)
        tokens = bytes_to_ids(result.ids)
        nums = num_sampled(flight, result, len(tokens))
        self._learn(flight, result)
        if flight.decodes or flight.others:
            self.counters.passed(len(flight.decodes) + result.num_draft_tokens + sum(flight.counts), flight.pages_read)
        odd: set[int] = set()  # rids of decode rows whose output is not just tokens
        single = tokens  # of the rows without draft tokens
        if nums:
            odd, single = self._apply_drafted(flight, nums, tokens), tokens[sum(nums) :]
        if result.logprobs or (single and min(single) < 0):
            odd |= self._apply_odd_decodes(flight, single, result.logprobs)
        else:
            odd |= self._apply_decodes(flight, single)
        rids, ids = decode_rows.columns(flight.decodes, nums, tokens, odd)
        if flight.others:
            self._apply_others(flight, tokens[len(tokens) - sum(flight.sample) :], result, rids, ids)
        if rids:
            self._outputs.set_columns(rids, ids)
            self.counters.num_output_tokens += len(rids)

    def transferred(self, message: Transferred) -> None:
        """Takes in what the worker half of the KV connector reports."""
        assert self._loads is not None and self.connector is not None, message
        self.connector.update_connector_output(message)
        for request, loaded, failed in self._loads.finish(message):
            self.table.loaded(request, loaded, failed)
        self.table.sent(message.sent)

    def take_outputs(self) -> list[Item]:
        """The detokenizer's messages since the last call, in order."""
        return self._outputs.take()

    def cancel(self, rid: int) -> None:
        """Its client has disconnected. Unknown rids have ended already."""
        self._end_early(rid, "abort")

    def stop_hit(self, rid: int) -> None:
        """The detokenizer found a stop string in its text."""
        self._end_early(rid, "stop")

    def expire(self, now: float) -> None:
        """Fails the requests that have waited for their first step longer than their `queue_timeout_s`. Those that
        cannot meet the target of their class any more step behind. Tells the policy the time."""
        self._policy.tell_time(1e3 * now)
        for rid in self.latest_starts.take_due(now):
            late = self.table.requests.get(rid)
            if late is not None and late.state is State.WAITING and not late.opened:
                self.table.be_late(late, self._policy.late_place(late))
        for rid in self.deadlines.take_due(now):
            request = self.table.requests.get(rid)
            if request is not None and not request.opened:
                seconds = request.asked.limits.queue_timeout_s
                detail = f"The request has waited {seconds:g} s without being started; try again later."
                self.table.end(request, Failed(request.rid, "unavailable", detail))

    # ── the engine around it ─────────────────────────────────────────────────────────────────────────────────────────

    num_domains = 1

    @property
    def schedulers(self) -> Sequence["Scheduler"]:
        """Of the KV domains: this one."""
        return (self,)

    @property
    def requests(self) -> Mapping[int, Request]:
        """Every request that has not ended, by rid."""
        return self.table.requests

    @property
    def num_constrained(self) -> int:
        """Of `requests`."""
        return self.table.num_constrained

    @property
    def has_deadlines(self) -> bool:
        """`expire` may have something to do."""
        return bool(self.deadlines or self.latest_starts or (self._policy.watches_time and self.table.requests))

    @property
    def num_pages(self) -> int:
        """Of the cache."""
        return self.pool.num_pages

    @property
    def num_pages_held(self) -> int:
        """Of them, those in block tables."""
        return self.pool.num_held

    @property
    def backlog(self) -> int:
        """Positions that its requests are to compute, as far as ids are known, and one more for each request, which has
        a next token."""
        requests = self.table.requests
        return len(requests) + sum([request.num_total - request.num_planned for request in requests.values()])

    @property
    def has_prompts(self) -> bool:
        """A request waits until its prompt is computed."""
        return any(request.num_computed < request.num_prompt for request in self.table.requests.values())

    @property
    def num_waiting(self) -> int:
        """Requests that hold no row."""
        return len(self.table.waiting)

    @property
    def num_running(self) -> int:
        """Requests that have not ended and hold a row."""
        return len(self.table.requests) - len(self.table.waiting)

    @property
    def num_in_flight(self) -> int:
        """Plans sent and not yet applied."""
        return len(self._in_flight)

    @property
    def is_busy(self) -> bool:
        """A plan, a load or a send is under way."""
        return bool(self._in_flight or self.table.held or self._loads)

    @property
    def asks_again(self) -> bool:
        """The connector has not decided about a waiting request: `plan` should be called again soon."""
        return self._loads is not None and self._loads.asks_again and not self.is_paused

    def take_kv_events(self) -> list[KvCacheEvent]:
        """Blocks that can be found or no longer be found, on the device and behind it, since the last call."""
        events = self.prefix.take_events()
        if self.connector is not None:
            for event in self.connector.take_events():
                groups = self.pool.groups
                told, shape = groups.told(event.group), groups.shape_told(event.group)
                events.append(event_of_tier(self.block_size, event, told, shape))
        return events

    def num_found(self, keys: Sequence[bytes]) -> int:
        """Positions of the longest run of leading blocks with these keys on the device, and behind it in tiers that
        other KV domains do not read. A request may find fewer."""
        num, group = self.prefix.num_found(keys), self.pool.groups.full or 0
        behind: object = self.connector  # of which mypy does not know that it can be both
        if isinstance(behind, DomainTier):
            names = [item_name(key, group) for key in keys[num // self.block_size :]]
            num += behind.num_kept(names) * self.block_size
        return num

    def of_rank(self, rank: int) -> "Scheduler":
        """The one that plans for this rank."""
        return self

    def pages(self) -> tuple[int, int]:
        """Pages of each rank that sequences hold, and pages that are only kept for others to find."""
        return self.pool.num_held, sum(idle for _, idle in self.pool.pages_by_group())

    def tiers(self) -> tuple[TierSnapshot, ...]:
        """Those behind the device, nearest first. For metrics."""
        return () if self.connector is None else self.connector.tiers()

    def groups(self) -> tuple[GroupSnapshot, ...]:
        """For metrics."""
        hits, lost = self.counters.hits_by_group, self.counters.lost_by_group
        pages = self.pool.pages_by_group()
        each = [
            GroupSnapshot(shape.kind, *pages[group], hits[group], lost[group])
            for group, shape in enumerate(self.pool.groups.shapes)
        ]
        return (*each, GroupSnapshot("none", 0, 0, hits[-1], lost[-1]))

    def prices(self) -> tuple[float, float]:
        """Milliseconds to compute a prompt's token, and to load its KV from behind the device; 0.0: unknown."""
        compute = self._cost.predict_more(with_chunk(NO_WORK, 0, _LONG)) / _LONG if self._cost.is_ready else 0.0
        num_pages = self.pool.groups.num_pages(0, _LONG, 1, self.block_size)
        load = self._loads.ms_to_load(num_pages) if self._loads is not None else None
        return compute, (load or 0.0) / _LONG

    def reset(self) -> None:
        """The worker was replaced: its rows, its KV and everything in flight are lost. Requests that ran wait again."""
        touched = [r for flight in self._in_flight for r in flight.requests()]
        if self._loads is not None:
            touched += self._loads.forget()
        self._in_flight.clear()
        self.table.reset(touched)
        self.pool.forget_all()
        if self.connector is not None:
            self.connector.reset()

    def empty(self) -> None:
        """The memory of the KV cache is freed while nothing is under way. Requests that ran wait again."""
        assert not self.is_busy, "something is under way"
        self.table.reset(())
        self.pool.forget_all()

    def mend(self) -> str | None:
        """While no request is open: what is wrong with the counts of rows and blocks, which are then rebuilt."""
        return self.table.mend() if not self.table.requests and not self.is_busy else None

    # ── how plans are sent ───────────────────────────────────────────────────────────────────────────────────────────

    def _send(self, builder: PlanBuilder) -> StepPlan | None:
        """The plan, if there is anything in it, and what follows from its being sent."""
        evicted, self.pool.evicted = self.pool.evicted, []
        if unsure := {slot for flight in self._in_flight for slot, _ in flight.kept}:
            evicted = [one for one in evicted if one.block not in unsure]  # the worker may drop the plan that keeps it
        kv = b""
        if self.connector is not None:
            if evicted and self._loads is not None and self._loads.keeps:
                self.connector.blocks_evicted(evicted)
            if self.table.chunks is not None and builder.chunked:
                self._tell_chunks(builder, self.table.chunks)
            kv = self.connector.build_connector_meta()
            if not self._reports_kv_events:
                self.connector.take_events()  # or they would pile up
        if not builder.num_rows and not kv:
            return None
        self._planner.account(builder)
        self.step += 1
        for request in builder.late:
            request.plan_late(self.step)
        self.micro_batches.sent(self.step, builder)
        self.counters.planned(len(builder.decodes), sum(builder.counts))
        learns = builder.work.prefill > 0 or self.step % self._learn_every == 0
        num_rows = len(builder.decodes) + len(builder.others)
        if learns or num_rows <= _FEW_ROWS:
            ends = [request.num_planned for request in chain(builder.decodes, builder.others)]
            self._pages_of_row = self.pool.groups.pages_read(ends, self.block_size) / max(1, num_rows)
        pages_read = self._pages_of_row * num_rows
        self._in_flight.append(builder.sent(self.step, learns, pages_read))
        extension = b""
        if self._extension is not None:
            requests, counts = builder.decodes + builder.others, [1] * len(builder.decodes) + builder.counts
            starts = [r.num_planned - count for r, count in zip(requests, counts, strict=True)]
            extension = self._extension.extend(self.step, [r.rid for r in requests], counts, starts)
        after_fault, self._oom_recovery.is_untold = self._oom_recovery.is_untold, False
        return builder.finish(self.step, kv, extension, after_fault)

    def _tell_chunks(self, builder: PlanBuilder, chunks: ChunkConnector) -> None:
        """Which blocks the plan's chunks fill."""
        size = self.block_size
        for request, count in zip(builder.others, builder.counts, strict=True):
            last = min(request.num_planned, len(request.ids)) // size
            if count > 1 and last > (first := (request.num_planned - count) // size):
                chunks.filling(request, self.prefix.blocks_of(request, first, last))

    # ── how results are applied ──────────────────────────────────────────────────────────────────────────────────────

    def _learn(self, flight: InFlight, result: StepResult) -> None:
        """What the step says about the cost of steps and of draft tokens."""
        self.counters.num_drafts += result.num_drafts
        self.counters.num_draft_tokens += result.num_draft_tokens
        if flight.work is not None and flight.work.rows + flight.work.prefill:
            self._cost.observe(with_draft_tokens(flight.work, result.num_draft_tokens), result.device_ms)
            if flight.num_speculative:
                self._planner.break_even = self._cost.break_even(flight.work)

    def _fail(self, flight: InFlight, failed: Mapping[int, RowFailure]) -> None:
        """Ends the requests that the runner plugin has failed. Nobody may find what it has computed for them."""
        requests = [*flight.requests()]
        for row, why in failed.items():
            if (request := requests[row]).state is not State.ENDED:
                self.table.end(request, Failed(request.rid, why.kind, why.detail))
                poison(request, self.pool, self._loads, self.table)

    def _apply_drafted(self, flight: InFlight, nums: "array[int]", tokens: "array[int]") -> set[int]:
        """The first rows of a step, which may have had draft tokens and sampled `nums` of `tokens`. Rolls back what was
        planned for rejected draft tokens. Returns the rids of rows whose output is not just tokens."""
        requests = flight.decodes[: len(nums)]
        left = decode_rows.apply_drafted(requests, nums, 1 + flight.speculate, tokens)
        odd = {request.rid for request, own in left if not self._apply_decode(request, own)}
        num_accepted = sum(nums) - len(nums)
        self.counters.num_accepted_tokens += num_accepted
        if self._policy.counts_tokens and num_accepted:
            for request, num in zip(requests, nums, strict=True):
                if request.state is not State.ENDED:
                    self._policy.serve(request.queue_key, num - 1)
        return odd

    def _apply_decodes(self, flight: InFlight, tokens: "array[int]") -> set[int]:
        """The other rows of one position and one token each. Returns the rids of rows whose output is not just it."""
        left = decode_rows.apply(flight.decodes[flight.num_speculative :], tokens)
        return {request.rid for request, own in left if not self._apply_decode(request, own)}

    def _apply_odd_decodes(
        self, flight: InFlight, tokens: "array[int]", logprobs: Mapping[int, RowLogprobs]
    ) -> set[int]:
        """The same in a step with log-probabilities, or with a row whose numbers are not finite: a later step offers
        what these rows have computed to the prefix cache."""
        first = flight.num_speculative
        return {
            request.rid
            for i, request in enumerate(flight.decodes[first:])
            if not self._apply_row(request, 1, tokens[i : i + 1], _Extras(logprobs.get(first + i)))
        }

    def _apply_others(
        self, flight: InFlight, tokens: "array[int]", result: StepResult, rids: "array[int]", ids: "array[int]"
    ) -> None:
        """The rows after the decode rows. Output that is a token and nothing else goes to the columns."""
        rows = zip(flight.others, flight.counts, flight.sample, strict=True)
        for row, (request, count, num) in enumerate(rows, start=len(flight.decodes)):
            own, tokens = tokens[:num], tokens[num:]
            extras = _Extras(result.logprobs.get(row), result.prompt_logprobs.get(row), result.vectors.get(row, b""))
            if self._apply_row(request, count, own, extras):
                rids.append(request.rid)
                ids.append(request.ids[-1])
            chunks = self.table.chunks
            if chunks is not None and count > 1 and request.state is State.RUNNING and not request.is_poisoned:
                num = min(request.num_computed, len(request.ids)) // self.block_size
                chunks.filled(request, self.prefix.blocks_of(request, 0, num))

    def _apply_decode(self, request: Request, tokens: "array[int]") -> bool:
        """A decode row by itself: as `_apply_row`, and it offers its output to the prefix cache now and then."""
        has_ended = request.state is State.ENDED and request.slot >= 0
        num = len(tokens) if has_ended else num_until_end(tokens, request.stops)
        if num < len(tokens):  # what comes after its end does not count
            request.roll_back(len(tokens) - num)
            request.run_on(len(tokens) - num, tokens[num:])
            if tokens[-1] < 0 and not request.is_poisoned:
                poison(request, self.pool, self._loads, self.table)
        is_due = request.num_computed + num >= request.next_check
        is_plain = self._apply_row(request, num, tokens[:num])
        if is_plain and is_due and request.state is State.RUNNING:
            self.prefix.commit(request)
        return is_plain

    def _apply_row(self, request: Request, count: int, tokens: "array[int]", extras: _Extras = _NO_EXTRAS) -> bool:
        """One row of a step: `count` positions were computed and `tokens` sampled, of which only the last may end the
        request. True: its output is these tokens and nothing else, and the caller delivers them."""
        is_plain, is_finite = False, not tokens or tokens[-1] >= 0
        if not is_finite and not request.is_poisoned:
            poison(request, self.pool, self._loads, self.table)
        if request.starts_again:
            request.discard(count, len(tokens))
        elif request.state is State.ENDED:
            request.discard()
            request.run_on(count, tokens)
        else:
            start = request.num_computed
            request.apply(count, tokens if is_finite else tokens[:0])
            if extras.prompt_logprobs is not None:
                extras = extras._replace(prompt_logprobs=request.take_undelivered(start, extras.prompt_logprobs))
            if not tokens:
                self._deliver_prompt(request, extras)
            elif is_finite:
                is_plain = self._deliver(request, tokens, extras)
            else:
                if len(tokens) > 1:
                    self._add_tokens(request, tokens[:-1])
                self.table.end(request, request.failure())
        if request.changes_regime and request.state is State.RUNNING:
            self.table.change_regime(request)
        self.table.release_if_idle(request)
        return is_plain

    def _deliver_prompt(self, request: Request, extras: _Extras) -> None:
        """A part of its prompt was computed."""
        if not request.generates and request.num_computed == request.num_needed:
            terminal = request.last_word(extras.prompt_logprobs, extras.vector)
            if isinstance(terminal, Failed):
                poison(request, self.pool, self._loads, self.table)
            if not request.starts_again:
                self.table.end(request, terminal)
        elif extras.prompt_logprobs is not None:
            self._outputs.add(Tokens(request.rid, b"", prompt_logprobs=extras.prompt_logprobs))

    def _deliver(self, request: Request, tokens: "array[int]", extras: _Extras) -> bool:
        """Tokens of it were applied. True: see `_apply_row`."""
        finish = request.finish_of(tokens[-1])
        if finish is not None:
            self.counters.num_output_tokens += len(tokens)
            self._finish(request, finish, tokens, extras)
            return False
        if request.is_constrained:
            self.constraints.sampled(request.rid, tokens[-1])
        if extras.logprobs is None and extras.prompt_logprobs is None:
            return True
        self._add_tokens(request, tokens, extras)
        return False

    def _add_tokens(self, request: Request, tokens: "array[int]", extras: _Extras = _NO_EXTRAS) -> None:
        self._outputs.add(Tokens(request.rid, tokens.tobytes(), extras.logprobs, extras.prompt_logprobs))
        self.counters.num_output_tokens += len(tokens)

    def _finish(
        self,
        request: Request,
        finish: FinishReason,
        tokens: "array[int]",
        extras: _Extras = _NO_EXTRAS,
        *,
        is_new: bool = True,
    ) -> None:
        """Its last tokens end it. `is_new`: they were not delivered before."""
        stop_token_id = tokens[-1] if tokens[-1] in request.asked.limits.stop_token_ids else None
        ids = tokens.tobytes() if is_new else b""
        self.table.end(request, request.terminal(finish, ids, extras.logprobs, extras.prompt_logprobs, stop_token_id))

    def _end_early(self, rid: int, finish: FinishReason) -> None:
        if (request := self.table.requests.get(rid)) is not None:
            self._outputs.close_batch()  # the last step may have output of it
            self.table.end(request, request.terminal(finish))
