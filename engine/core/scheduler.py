"""Who computes what in the next step: continuous batching, chunked prefill, preemption.

Plain Python without I/O, clock or randomness, so that histories can be simulated and replayed. The core process calls
`add`, `cancel`, `stop_hit`, `plan`, `apply` and `transferred`, and sends on what `take_outputs` returns.

Several plans may be in flight: a sampled token stays on the worker, so the next plan does not wait for it.

Who comes and goes is the roster's, who is in a step the planner's; here plans are sent and their results applied.
"""

from array import array
from collections import deque
from operator import attrgetter

from msgspec.structs import replace

from ...ipc.messages import (
    Accepted,
    Enqueue,
    Failed,
    FinishReason,
    Masks,
    RowLogprobs,
    StepPlan,
    StepResult,
    Tokens,
    Transferred,
    bytes_to_ids,
)
from .admission import Admission
from .block_hash import root_key
from .block_pool import BlockPool
from .cost import CostModel, with_draft_tokens
from .deadlines import Deadlines
from .draft import Draft, InFlight
from .extension import PlanExtension
from .kv_connector import CoreConnector
from .kv_events import KvCacheEvent, event_of_tier
from .loads import Loads
from .oom_recovery import OomRecovery
from .output_buffer import Item, OutputBuffer
from .planner import Planner
from .poison import poison
from .policy import PolicyName, make_policy
from .prefix import PrefixCache
from .request import COMMIT_BLOCKS, Request, State
from .request_table import RequestTable
from .speculation import num_sampled, num_until_end
from .stats import Counters

_BEFORE_ALL = 2**40  # resumed requests stand before all others, among themselves as they came
_LEARN_EVERY = 8  # steps; from those with prefill the cost model always learns
_rid = attrgetter("rid")


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
        prefix_caching: bool = True,
        policy: PolicyName = "fcfs",
        itl_target_ms: float | None = None,
        model_key: bytes = b"",
        connector: CoreConnector | None = None,
        extension: PlanExtension | None = None,
        kv_events: bool = False,
        speculate: int = 0,
        is_chunked: bool = True,
    ) -> None:
        """`speculate`: guessed tokens that the worker may compute of a row in a step. `is_chunked`: see `Planner`."""
        assert extension is None or not speculate, "an extension is told every position of a plan"
        self.pool = pool
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        # Any admitted request fits the pool alone.
        self.max_model_len = min(max_model_len, pool.num_blocks * block_size)
        self._admission = Admission(self.max_model_len, max_queued_requests, max_queued_tokens)
        self.depth = depth
        self.eos_token_ids = frozenset(eos_token_ids)
        self.model_key = model_key
        self.connector = connector
        self._tells_kv_events = kv_events
        self.counters = Counters()
        self.prefix = PrefixCache(pool, block_size=block_size, enabled=prefix_caching, kv_events=kv_events)
        self.step = 0  # of the last plan
        self.is_paused = False  # plans tell the KV connector what it has to know, and compute nothing
        self.deadlines = Deadlines()
        self._extension = extension
        self._outputs = OutputBuffer()
        self._policy = make_policy(policy)
        self._cost = CostModel()
        self._loads = Loads(connector, self._cost, block_size) if connector is not None and prefix_caching else None
        self._num_arrived = 0
        self._in_flight: deque[InFlight] = deque()
        self.table = RequestTable(
            pool=pool,
            prefix=self.prefix,
            policy=self._policy,
            outputs=self._outputs,
            counters=self.counters,
            connector=connector if prefix_caching else None,
            num_rows=max_num_seqs,
        )
        self.constraints = self.table.constraints
        self._planner = Planner(
            table=self.table,
            pool=pool,
            prefix=self.prefix,
            policy=self._policy,
            loads=self._loads,
            cost=self._cost,
            outputs=self._outputs,
            counters=self.counters,
            block_size=block_size,
            max_num_batched_tokens=max_num_batched_tokens,
            itl_target_ms=itl_target_ms,
            speculate=speculate,
            is_chunked=is_chunked,
        )
        self._oom_recovery = OomRecovery(self._planner, self.table, pool, self._loads, self.counters)

    # ── requests come and go ─────────────────────────────────────────────────────────────────────────────────────────

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
        """The connector has not made up its mind about a waiting request: `plan` is worth another call soon."""
        return self._loads is not None and self._loads.asks_again and not self.is_paused

    def add(self, message: Enqueue, now: float = 0.0) -> list[Accepted | Failed]:
        """Takes its sequences in, or refuses them all. `Accepted` is a promise of exactly one terminal message in the
        news. `now`: seconds on the clock that `expire` is asked with."""
        rids, num_prompt = range(message.rid, message.rid + message.n), len(message.prompt_ids) // 4
        if (refusal := self.refusal(message)) is not None:
            return [replace(refusal, rid=rid) for rid in rids]
        root = root_key(self.model_key, message.salt)
        keys: list[bytes] = []
        for choice in range(message.n):
            self._num_arrived += 1
            request = Request(
                message,
                choice=choice,
                arrival=self._num_arrived - (_BEFORE_ALL if message.attempt else 0),
                queue_key=self._policy.join(message),
                max_model_len=self.max_model_len,
                block_size=self.block_size,
                root=root,
                eos_token_ids=self.eos_token_ids,
            )
            if message.n > 1 and self.prefix.enabled:  # one prompt is hashed once
                keys = keys or request.block_keys(num_prompt // self.block_size, self.block_size)
                request.keys = keys.copy()
            self.table.join(request)
            if message.limits.queue_timeout_s is not None:
                self.deadlines.put(now + message.limits.queue_timeout_s, request.rid, self.table.requests)
            if message.resume_ids and (finish := request.finish_of(request.ids[-1])) is not None:
                # Only the word that it has ended was lost; who is told everything again gets it with the last token.
                again = message.resume_chars < 0
                self._outputs.add_item(request.as_opened(request.num_resumed - again))
                self._end_with(request, finish, request.ids[-1:], is_news=again)
        return [Accepted(rid, num_prompt) for rid in rids]

    def refusal(self, message: Enqueue) -> Failed | None:
        """Why a request is not taken in."""
        return self._admission.refusal(message, self.table.requests, self.table.waiting)

    def cancel(self, rid: int) -> None:
        """Its client is gone. Unknown rids have ended already."""
        self._end_early(rid, "abort")

    def stop_hit(self, rid: int) -> None:
        """The detokenizer found a stop string in its text."""
        self._end_early(rid, "stop")

    def _end_early(self, rid: int, finish: FinishReason) -> None:
        if (request := self.table.requests.get(rid)) is not None:
            self._outputs.close_batch()  # the last step may have news of it
            self.table.end(request, request.terminal(finish))

    def allow(self, message: Masks) -> None:
        """Takes in what constrained requests may draw next. Ends those to which nothing can be added."""
        self.table.allow(message)

    def expire(self, now: float) -> None:
        """Fails the requests that have waited for their first step longer than they were willing to."""
        for rid in self.deadlines.take_due(now):
            request = self.table.requests.get(rid)
            if request is not None and not request.opened:
                seconds = request.limits.queue_timeout_s
                detail = f"The request has waited {seconds:g} s without being started; try again later."
                self.table.end(request, Failed(request.rid, "unavailable", detail))

    def take_outputs(self) -> list[Item]:
        """What the detokenizer is told of everything since the last call, in order."""
        return self._outputs.take()

    def take_kv_events(self) -> list[KvCacheEvent]:
        """What became findable, on the device and behind it, and what no longer is, since the last call."""
        events = self.prefix.take_events()
        if self.connector is not None:
            events += [event_of_tier(self.block_size, event) for event in self.connector.take_events()]
        return events

    # ── plan ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def plan(self) -> StepPlan | None:
        """The next step, or None if there is nothing to do or `depth` plans are in flight already."""
        if len(self._in_flight) >= self.depth:
            return None
        return self._send(Draft(0) if self.is_paused else self._planner.draft())

    def _send(self, draft: Draft) -> StepPlan | None:
        """The plan, if there is anything in it, and what follows from its being sent."""
        evicted, self.pool.evicted = self.pool.evicted, []
        kv = b""
        if self.connector is not None:
            if evicted and self._loads is not None and self._loads.keeps:
                self.connector.blocks_evicted(evicted)
            kv = self.connector.build_connector_meta()
            if not self._tells_kv_events:
                self.connector.take_events()  # nobody else does
        if not draft.num_rows and not kv:
            return None
        self._planner.account(draft)
        self.step += 1
        self.counters.planned(len(draft.decodes), sum(draft.counts))
        learns = draft.work.prefill > 0 or self.step % _LEARN_EVERY == 0
        self._in_flight.append(draft.sent(self.step, learns))
        extension = b""
        if self._extension is not None:
            requests, counts = draft.decodes + draft.others, [1] * len(draft.decodes) + draft.counts
            starts = [r.num_planned - count for r, count in zip(requests, counts, strict=True)]
            extension = self._extension.extend(self.step, list(map(_rid, requests)), counts, starts)
        after_fault, self._oom_recovery.is_untold = self._oom_recovery.is_untold, False
        return draft.finish(self.step, kv, extension, after_fault)

    # ── apply ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def apply(self, result: StepResult) -> None:
        """Takes in what the oldest plan in flight gave. Raises ValueError if the result is not that plan's."""
        if not self._in_flight or self._in_flight[0].step != result.step:
            expected = self._in_flight[0].step if self._in_flight else None
            raise ValueError(f"the worker answered step {result.step} where step {expected} was due")
        flight = self._in_flight.popleft()
        self._outputs.close_batch()
        if result.fault is not None:
            self._oom_recovery.take_back(flight, self._in_flight)
            return
        self._oom_recovery.passed(flight)
        decodes, first = flight.decodes, flight.num_speculative
        sampled = bytes_to_ids(result.ids)
        nums = num_sampled(flight, result, len(sampled))
        if flight.work is not None and flight.work.rows + flight.work.prefill:
            self._cost.observe(with_draft_tokens(flight.work, result.num_draft_tokens), result.device_ms)
            if first:
                self._planner.break_even = self._cost.break_even(flight.work)
        drafted_rids, drafted_ids = array("q"), array("i")
        if first:
            self._apply_speculative(flight, nums, sampled, drafted_rids, drafted_ids)
            self.counters.num_drafts += result.num_drafts
            self.counters.num_draft_tokens += result.num_draft_tokens
            decodes, sampled = decodes[first:], sampled[sum(nums) :]
        logprobs, prompt_logprobs = result.logprobs, result.prompt_logprobs
        odd: set[int] = set()  # rids of decodes whose news is no plain token
        if logprobs or (sampled and min(sampled) < 0):
            for i, request in enumerate(decodes):
                if not self._apply_row(request, 1, sampled[i : i + 1], logprobs.get(first + i), None):
                    odd.add(request.rid)
        else:
            for request, token in zip(decodes, sampled):  # noqa: B905  # the others' tokens come after theirs
                computed = request.num_computed + 1
                if computed < request.next_check and token not in request.stops:
                    request.num_computed = computed
                    request.num_in_flight -= 1
                    request.ids.append(token)
                elif not self._apply_mark(request, array("i", [token])):
                    odd.add(request.rid)
        rids, ids = array("q", map(_rid, decodes)), sampled[: len(decodes)]
        if odd:
            plain = [i for i, rid in enumerate(rids) if rid not in odd]
            rids, ids = array("q", [rids[i] for i in plain]), array("i", [ids[i] for i in plain])
        if first:
            rids, ids = drafted_rids + rids, drafted_ids + ids
        at = len(decodes)
        for i, request in enumerate(flight.others):
            tokens = sampled[at : at + flight.sample[i]]
            at += len(tokens)
            row = len(flight.decodes) + i
            told, vector = prompt_logprobs.get(row), result.vectors.get(row, b"")
            if self._apply_row(request, flight.counts[i], tokens, logprobs.get(row), told, vector):
                rids.append(request.rid)
                ids.append(request.ids[-1])
        if rids:
            self._outputs.set_columns(rids, ids)
            self.counters.num_output_tokens += len(rids)

    def _apply_speculative(
        self, flight: InFlight, nums: "array[int]", sampled: "array[int]", rids: "array[int]", ids: "array[int]"
    ) -> None:
        """The first rows of a step, each of which drew the next `nums` of the tokens `sampled`. What was planned of
        guesses that did not come true is taken back. Plain news goes to the columns."""
        speculate, end, num_accepted = flight.speculate, 0, 0
        for request, num in zip(flight.decodes, nums):  # noqa: B905  # the other decodes drew one each
            start, end = end, end + num
            wrong = speculate + 1 - num
            request.num_planned -= wrong
            request.num_total -= wrong
            token = sampled[end - 1]
            if num > 1:
                num_accepted += num - 1
                tokens = sampled[start:end]
                if request.stops.isdisjoint(tokens):
                    computed = request.num_computed + num
                    if computed < request.next_check and token >= 0:
                        request.num_computed = computed
                        request.num_in_flight -= 1
                        request.ids += tokens
                        rids.extend((request.rid,) * num)
                        ids += tokens
                        continue
                else:
                    num = num_until_end(tokens, request.stops)
                    request.num_planned -= len(tokens) - num
                    request.num_total -= len(tokens) - num
                    del tokens[num:]  # what comes after its end is nothing
                    if token < 0 and not request.is_poisoned:
                        poison(request, self.pool, self._loads, self.table)
            else:
                computed = request.num_computed + 1
                if computed < request.next_check and token not in request.stops and token >= 0:
                    request.num_computed = computed
                    request.num_in_flight -= 1
                    request.ids.append(token)
                    rids.append(request.rid)
                    ids.append(token)
                    continue
                tokens = array("i", [token])
            if self._apply_mark(request, tokens):
                rids.extend((request.rid,) * num)
                ids += tokens
        self.counters.num_accepted_tokens += num_accepted
        if self._policy.counts_tokens and num_accepted:
            for request, num in zip(flight.decodes, nums):  # noqa: B905
                if request.state is not State.ENDED:
                    self._policy.serve(request.queue_key, num - 1)

    def _apply_mark(self, request: Request, tokens: "array[int]") -> bool:
        """A decode row's tokens with which it may end, or has output to offer. See `_apply_row`."""
        ids, token = request.ids, tokens[-1]
        is_last = token < 0 or token in request.stops or len(ids) + len(tokens) >= request.max_len
        if request.state is not State.RUNNING or is_last:
            return self._apply_row(request, len(tokens), tokens, None, None)
        ids += tokens
        request.num_computed += len(tokens)
        request.num_in_flight -= 1
        self.prefix.commit(request)
        request.next_check = min(request.next_check + COMMIT_BLOCKS * self.block_size, request.end)
        return True

    def _apply_row(
        self,
        request: Request,
        count: int,
        tokens: "array[int]",
        logprobs: RowLogprobs | None,
        prompt_logprobs: RowLogprobs | None,
        vector: bytes = b"",
    ) -> bool:
        """One row of a step, which drew `tokens`, none of which but the last may end it. True: its news is the tokens
        and nothing else, which the caller tells."""
        request.num_in_flight -= 1
        is_plain, is_finite = False, not tokens or tokens[-1] >= 0
        if not is_finite and not request.is_poisoned:
            poison(request, self.pool, self._loads, self.table)
        if request.starts_again:  # what was in flight then is nothing
            request.num_planned -= count
            request.num_total -= len(tokens)
        elif request.state is not State.ENDED:
            start = request.num_computed
            request.num_computed += count
            if prompt_logprobs is not None:
                prompt_logprobs = request.take_undelivered(start, prompt_logprobs)
            if not tokens:
                if request.max_tokens == 0 and request.num_computed == request.end:
                    word = request.last_word(prompt_logprobs, vector)
                    if isinstance(word, Failed):
                        poison(request, self.pool, self._loads, self.table)
                    if not request.starts_again:
                        self.table.end(request, word)
                elif prompt_logprobs is not None:
                    self._outputs.add(Tokens(request.rid, b"", prompt_logprobs=prompt_logprobs))
            elif is_finite:
                is_plain = self._apply_tokens(request, tokens, logprobs, prompt_logprobs)
            else:
                if len(tokens) > 1:
                    self._outputs.add(Tokens(request.rid, tokens[:-1].tobytes()))
                    self.counters.num_output_tokens += len(tokens) - 1
                self.table.end(request, request.failure())
            request.settle()
        if request.num_in_flight == 0 and request.state in (State.ENDED, State.LEAVING):
            self.table.release(request)
        return is_plain

    def _apply_tokens(
        self,
        request: Request,
        tokens: "array[int]",
        logprobs: RowLogprobs | None,
        prompt_logprobs: RowLogprobs | None,
    ) -> bool:
        """See `_apply_row`."""
        request.ids += tokens
        token = tokens[-1]
        finish = request.finish_of(token)
        if finish is None and request.is_constrained:
            self.constraints.draw(request.rid, token)
        if finish is None and logprobs is None and prompt_logprobs is None:
            return True
        self.counters.num_output_tokens += len(tokens)
        if finish is None:
            self._outputs.add(Tokens(request.rid, tokens.tobytes(), logprobs, prompt_logprobs))
        else:
            self._end_with(request, finish, tokens, logprobs, prompt_logprobs)
        return False

    def _end_with(
        self,
        request: Request,
        finish: FinishReason,
        tokens: "array[int]",
        logprobs: RowLogprobs | None = None,
        prompt_logprobs: RowLogprobs | None = None,
        *,
        is_news: bool = True,
    ) -> None:
        """Its last tokens end it. `is_news`: they were not told before."""
        stop_token_id = tokens[-1] if tokens[-1] in request.limits.stop_token_ids else None
        ids = tokens.tobytes() if is_news else b""
        self.table.end(request, request.terminal(finish, ids, logprobs, prompt_logprobs, stop_token_id))

    def transferred(self, message: Transferred) -> None:
        """Takes in what the worker half of the KV connector reports."""
        assert self._loads is not None and self.connector is not None, message
        self.connector.update_connector_output(message)
        for request, num_good in self._loads.finish(message):
            self.table.loaded(request, num_good)
        self.table.sent(message.sent)

    def reset(self) -> None:
        """The worker was replaced: its rows, its KV and everything in flight are gone. Who ran waits again."""
        touched = [r for flight in self._in_flight for r in flight.requests()]
        if self._loads is not None:
            touched += self._loads.forget()
        self._in_flight.clear()
        self.table.reset(touched)
        self.pool.forget_all()
        if self.connector is not None:
            self.connector.reset()

    def empty(self) -> None:
        """The memory of the KV is given to others while nothing is under way. Who ran waits again."""
        assert not self.is_busy, "something is under way"
        self.table.reset(())
        self.pool.forget_all()

    def mend(self) -> str | None:
        """Whether rows and blocks add up, while nobody is served; else what was wrong, and they do from now on."""
        return self.table.mend() if not self.table.requests and not self.is_busy else None
