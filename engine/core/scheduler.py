"""Who computes what in the next step: continuous batching, chunked prefill, preemption by recomputation.

Plain Python without I/O, clock or randomness, so that histories can be simulated and replayed. The core process calls
`add`, `cancel`, `stop_hit`, `plan` and `apply`, and sends on what `take_news` returns.

Prefill and decode are not kinds of step. Every running request has positions to compute up to the tokens it has, one
budget covers all rows, and rows that need a single position go first, so that a long prompt delays no stream by more
than its chunk. Several plans may be in flight: a sampled token stays on the worker, so the next plan does not wait for
it. The in-flight rule follows from that: a request's row and blocks return to their pools only once it has ended or
been preempted *and* no plan in flight touches it.
"""

from bisect import bisect_left, insort
from collections import deque
from heapq import heappop, heappush
from operator import attrgetter
from struct import Struct as Pack

from ...ipc.messages import (
    Accepted,
    Enqueue,
    Failed,
    FinishReason,
    Opened,
    RowLogprobs,
    StepPlan,
    StepResult,
    TokenBatch,
    Tokens,
    bytes_to_ids,
    ids_to_bytes,
)
from .block_hash import root_key
from .block_pool import BlockPool
from .cost import MIN_OBSERVED, CostModel, Work, with_chunk
from .draft import Draft, InFlight
from .policy import PolicyName, make_policy
from .preemption import choose_interrupted, choose_victim, order
from .request import Request, State
from .stats import Counters
from .waiting import Waiting

News = Opened | TokenBatch | Failed
"""What the detokenizer is told, in order."""

_NUM_CONTEXT_IDS = 16  # prompt ids that the detokenizer gets as context for the first output token
_MIN_CHUNK = 16  # positions of a prompt that a step computes whatever the latency target
_arrival = attrgetter("arrival")
_pack_id = Pack("<i").pack


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
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        # Any admitted request fits the pool alone.
        self.max_model_len = min(max_model_len, pool.num_blocks * block_size)
        self.max_queued_requests = max_queued_requests
        self.max_queued_tokens = max_queued_tokens
        self.depth = depth
        self.eos_token_ids = frozenset(eos_token_ids)
        self.prefix_caching = prefix_caching
        self.model_key = model_key
        self.itl_target_ms = itl_target_ms
        self._cost = CostModel()
        self.counters = Counters()
        self.step = 0  # of the last plan
        self._num_arrived = 0
        self._requests: dict[int, Request] = {}  # every request that has not ended
        self._policy = make_policy(policy)
        self._waiting = Waiting(self._policy)
        self._running: list[Request] = []  # by arrival: RUNNING, LEAVING, and the ended ones not yet swept
        self.deadlines: list[tuple[float, int]] = []  # a heap: when a request stops waiting, and its rid
        self._has_ended = False  # somebody in _running
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._in_flight: deque[InFlight] = deque()
        self._news: list[News] = []
        self._tokens: list[Tokens] = []  # what comes after _news

    # ── requests come and go ─────────────────────────────────────────────────────────────────────────────────────────

    @property
    def num_waiting(self) -> int:
        """Requests that hold no row."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that have not ended and hold a row."""
        return len(self._requests) - len(self._waiting)

    @property
    def num_in_flight(self) -> int:
        """Plans sent and not yet applied."""
        return len(self._in_flight)

    def add(self, message: Enqueue, now: float = 0.0) -> Accepted | Failed:
        """Takes a request in, or refuses it. `Accepted` is a promise of exactly one terminal message in the news.

        `now`: seconds on the clock that `expire` is asked with.
        """
        rid, num_prompt = message.rid, len(message.prompt_ids) // 4
        if rid in self._requests:
            return Failed(rid, "internal", "Two requests have the same number.")
        if num_prompt == 0:
            return Failed(rid, "invalid_request", "The prompt is empty.")
        waiting = self._waiting
        if len(waiting) >= self.max_queued_requests or waiting.num_tokens + num_prompt > self.max_queued_tokens:
            detail = f"{len(waiting)} requests with {waiting.num_tokens} tokens are waiting already; try again later."
            return Failed(rid, "queue_full", detail)
        self._num_arrived += 1
        request = Request(
            message,
            arrival=self._num_arrived,
            line=self._policy.join(message),
            max_model_len=self.max_model_len,
            root=root_key(self.model_key, message.salt),
            eos_token_ids=self.eos_token_ids,
        )
        if request.max_tokens < 0 or (request.max_tokens == 0 and message.limits.max_tokens != 0):
            self._policy.leave(request.line)
            return Failed(
                rid,
                "context_length_exceeded",
                f"This model's maximum context length is {self.max_model_len} tokens. However, the prompt alone has "
                f"{num_prompt}. Shorten it, or start the server with more --max-model-len or --kv-cache-memory.",
            )
        self._requests[rid] = request
        self._waiting.add(request)
        if message.limits.queue_timeout_s is not None:
            heappush(self.deadlines, (now + message.limits.queue_timeout_s, rid))
        return Accepted(rid, num_prompt)

    def cancel(self, rid: int) -> None:
        """Its client is gone. Unknown rids have ended already."""
        if (request := self._requests.get(rid)) is not None:
            self._end(request, request.terminal("abort"))

    def stop_hit(self, rid: int) -> None:
        """The detokenizer found a stop string in its text."""
        if (request := self._requests.get(rid)) is not None:
            self._end(request, request.terminal("stop"))

    def expire(self, now: float) -> None:
        """Fails the requests that have waited for their first step longer than they were willing to."""
        while self.deadlines and self.deadlines[0][0] <= now:
            request = self._requests.get(heappop(self.deadlines)[1])
            if request is not None and not request.opened:
                seconds = request.limits.queue_timeout_s
                detail = f"The request has waited {seconds:g} s without being started; try again later."
                self._end(request, Failed(request.rid, "unavailable", detail))

    def take_news(self) -> list[News]:
        """What happened since the last call, in order; consecutive tokens in one batch."""
        self._close_batch()
        news, self._news = self._news, []
        return news

    def _close_batch(self) -> None:
        if self._tokens:
            self._news.append(TokenBatch(tuple(self._tokens)))
            self._tokens.clear()

    # ── plan ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def plan(self) -> StepPlan | None:
        """The next step, or None if there is nothing to compute or `depth` plans are in flight already."""
        if len(self._in_flight) >= self.depth:
            return None
        if self._has_ended:
            self._running = [r for r in self._running if r.state is not State.ENDED]
            self._has_ended = False
        draft = Draft(self.max_num_batched_tokens)
        long: list[Request] = []
        context = 0
        for request in tuple(self._running):
            position = request.num_planned
            if request.state is not State.RUNNING or position == request.end:
                continue  # leaving, perhaps since this loop began; or all of its tokens are drawn
            if request.num_total - position > 1:
                long.append(request)
            elif draft.budget == 0:
                break
            elif position == len(request.blocks) * self.block_size or not request.max_tokens:
                self._plan_row(draft, request, 1)
            else:  # nearly every row of nearly every step: `_take` of one position, written out
                request.num_planned = position + 1
                request.num_total += 1
                request.num_in_flight += 1
                context += position
                draft.budget -= 1
                draft.requests.append(request)
                draft.rows.append(request.row)
                draft.counts.append(1)
                draft.sample.append(1)
        draft.work = Work(len(draft.requests), context, 0, 0)
        if len(long) > 1:
            long.sort(key=order(self._policy))
        for request in long:
            if draft.budget == 0:
                break
            if request.state is State.RUNNING:  # it may have been preempted for an earlier one
                num = min(request.num_total, request.end) - request.num_planned
                if (chunk := self._chunk(draft, request.num_planned, num)) > 0:
                    self._plan_row(draft, request, chunk)
        if not draft.preempted:
            self._admit(draft)
        if not draft.requests:
            return None
        for request in draft.chunked:
            self._commit(request)  # a single position fills a block only when its result is applied
        if self._policy.counts_tokens:
            for request, count in zip(draft.requests, draft.counts, strict=True):
                self._policy.serve(request.line, count)
        self.step += 1
        self._in_flight.append(InFlight(self.step, draft.requests, draft.counts, draft.sample, draft.work))
        return StepPlan(
            step=self.step,
            open=tuple(draft.open),
            grow_rows=draft.grow_rows.tobytes(),
            grow_blocks=draft.grow_blocks.tobytes(),
            rows=draft.rows.tobytes(),
            counts=ids_to_bytes(draft.counts),
            sample=bytes(draft.sample),
        )

    def _plan_row(self, draft: Draft, request: Request, num: int) -> None:
        """Plans `num` positions of a running request, if there are blocks for them or someone can be preempted."""
        need = self._num_blocks(request.num_planned + num) - len(request.blocks)
        if need > 0:
            if not self._make_room(draft, request, need):
                return
            blocks = self.pool.allocate(need)
            request.blocks += blocks
            draft.grow_blocks.extend(blocks)
            draft.grow_rows.extend([request.row] * need)
        self._take(draft, request, num)

    def _take(self, draft: Draft, request: Request, num: int) -> None:
        """Puts `num` positions of a request that has the blocks for them into the plan."""
        draft.work = with_chunk(draft.work, request.num_planned, num)
        request.num_planned += num
        if num > 1 and self.prefix_caching:
            full = min(request.num_planned, len(request.ids)) // self.block_size
            draft.chunked.append(request)
            draft.fresh.update(request.block_keys(full, self.block_size)[request.num_committed :])
        request.num_in_flight += 1
        draws = request.num_planned == request.num_total and request.max_tokens > 0
        if draws:
            request.num_total += 1
        draft.budget -= num
        draft.requests.append(request)
        draft.rows.append(request.row)
        draft.counts.append(num)
        draft.sample.append(int(draws))

    def _chunk(self, draft: Draft, past: int, num: int) -> int:
        """How many of a prompt's next `num` positions, after `past` computed ones, go into this plan.

        Beside streams that wait for their next token, as many as keep the step within the latency target; at least
        `_MIN_CHUNK` for the first prompt of a step, so that every prompt gets on. Otherwise what the budget allows.
        """
        num = min(num, draft.budget)
        if self.itl_target_ms is None or draft.work.rows == 0:
            return num
        if self._cost.num_prefill_steps < MIN_OBSERVED:
            chunk = min(num, _MIN_CHUNK)
        else:
            chunk = self._cost.longest_chunk(draft.work, past, self.itl_target_ms, num)
        if draft.work.prefill == 0:
            chunk = max(chunk, min(num, _MIN_CHUNK))
        if chunk < num:
            draft.budget = chunk  # nothing more fits this step
        return chunk

    def _make_room(self, draft: Draft, request: Request, need: int) -> bool:
        """Preempts from the back of the line until `need` blocks are free. False: not in this step."""
        while self.pool.num_free < need:
            coming = sum(len(r.blocks) for r in self._running if r.state is State.LEAVING)
            if self.pool.num_free + coming >= need:
                return False  # they return when the steps in flight are applied
            victim = choose_victim(self._running, draft.requests, need, pool=self.pool, policy=self._policy)
            self._preempt(victim)
            draft.preempted = True
            if victim is request:
                return False
        return True

    def _admit(self, draft: Draft) -> None:
        """Takes waiting requests in, strictly in their order, while rows, blocks and budget last."""
        if any(r.state is State.LEAVING for r in self._running):
            return  # they come first
        while draft.budget > 0 and (request := self._waiting.first()) is not None:
            hits = self._hits(request)
            if request.keys[len(hits) : len(hits) + 1] and request.keys[len(hits)] in draft.fresh:
                return  # what it lacks is computed in this very plan: the next one finds it
            num_cached = len(hits) * self.block_size
            need = self._num_blocks(len(request.ids)) - len(hits)
            reserve = len(self._running)  # every running row may want its next block soon
            short = need + reserve - (self.pool.num_free - self.pool.num_idle(hits))
            if short > 0 or not self._free_rows:
                victims = choose_interrupted(
                    self._running, request, short, bool(self._free_rows), self.pool, self._policy
                )
                for victim in victims:  # they give up what is missing; the next plan admits the request
                    self._preempt(victim)
                return
            num = self._chunk(draft, num_cached, min(request.num_total, request.end) - num_cached)
            if num == 0:
                return
            self._waiting.remove(request)
            self.pool.hold(hits)
            request.blocks = hits + self.pool.allocate(self._num_blocks(num_cached + num) - len(hits))
            request.row = self._free_rows.pop()
            request.state = State.RUNNING
            request.num_computed = request.num_planned = num_cached
            request.num_committed = len(hits)
            insort(self._running, request, key=_arrival)
            draft.open.append(request.as_row())
            if not request.opened:
                self._open(request, num_cached)
            self._take(draft, request, num)

    def _hits(self, request: Request) -> list[int]:
        """Blocks of its longest known prefix, leaving at least one position to compute."""
        if not self.prefix_caching or request.sampling.prompt_logprobs is not None:
            return []  # log-probabilities of the prompt need a pass over all of it
        num = (len(request.ids) - 1) // self.block_size
        return self.pool.match(request.block_keys(num, self.block_size))

    def _open(self, request: Request, num_cached: int) -> None:
        """Its first step: tells the detokenizer."""
        request.opened = True
        request.num_cached = num_cached
        self.counters.num_prompt_tokens += request.num_prompt
        self.counters.num_cached_tokens += num_cached
        first = 0 if request.text.prompt else max(0, request.num_prompt - _NUM_CONTEXT_IDS)
        prompt_ids = request.ids[first : request.num_prompt].tobytes()
        self._close_batch()
        self._news.append(Opened(request.rid, request.num_prompt, num_cached, prompt_ids, request.text))

    def _commit(self, request: Request) -> None:
        """Offers its full blocks to the prefix index.

        Those of the plan being made count as well: plans run in order, so whoever hits them is computed after them.
        """
        if not self.prefix_caching:
            return
        full = min(request.num_planned, len(request.ids)) // self.block_size
        if full > request.num_committed:
            keys = request.block_keys(full, self.block_size)
            for i in range(request.num_committed, full):
                self.pool.register(request.blocks[i], keys[i])
            request.num_committed = full

    # ── apply ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def apply(self, result: StepResult) -> None:
        """Takes in what the oldest plan in flight gave. Raises ValueError if the result is not that plan's."""
        if not self._in_flight or self._in_flight[0].step != result.step:
            expected = self._in_flight[0].step if self._in_flight else None
            raise ValueError(f"the worker answered step {result.step} where step {expected} was due")
        flight = self._in_flight.popleft()
        drawn = bytes_to_ids(result.ids)
        if len(drawn) != sum(flight.sample):
            raise ValueError(f"step {result.step} drew {len(drawn)} tokens where {sum(flight.sample)} were due")
        if self.itl_target_ms is not None:
            self._cost.observe(flight.work, result.device_ms)
        next_drawn = iter(drawn)
        num_plain = 0
        plain = not result.logprobs and not result.prompt_logprobs
        for i, request in enumerate(flight.requests):
            request.num_in_flight -= 1
            token = next(next_drawn) if flight.sample[i] else -1
            ids = request.ids
            if (
                plain
                and token >= 0
                and token not in request.stops
                and len(ids) + 1 < request.max_len
                and request.state is State.RUNNING
            ):  # nearly every row of nearly every step: `_apply_row` of a token that ends nothing, written out
                num_plain += 1
                ids.append(token)
                request.num_computed += flight.counts[i]
                if request.num_computed % self.block_size == 0:
                    self._commit(request)
                self._tokens.append(Tokens(request.rid, _pack_id(token)))
                continue
            if request.state is not State.ENDED:
                drew = token if flight.sample[i] else None
                self._apply_row(request, flight.counts[i], drew, result.logprobs.get(i), result.prompt_logprobs.get(i))
            if request.num_in_flight == 0 and request.state is not State.RUNNING:
                self._release(request)
        self.counters.num_output_tokens += num_plain

    def _apply_row(
        self,
        request: Request,
        count: int,
        token: int | None,
        logprobs: RowLogprobs | None,
        prompt_logprobs: RowLogprobs | None,
    ) -> None:
        start = request.num_computed
        request.num_computed += count
        if prompt_logprobs is not None:
            prompt_logprobs = request.take_undelivered(start, prompt_logprobs)
        if token is None:
            if request.max_tokens == 0 and request.num_computed == request.end:
                self._end(request, request.terminal("length", prompt_logprobs=prompt_logprobs))
            elif prompt_logprobs is not None:
                self._tokens.append(Tokens(request.rid, b"", prompt_logprobs=prompt_logprobs))
            return
        if token < 0:
            self.pool.forget(request.blocks)  # whoever found them would fail as well
            detail = "The model gave numbers that are not finite for this request."
            self._end(request, Failed(request.rid, "internal", detail))
            return
        request.ids.append(token)
        self.counters.num_output_tokens += 1
        if request.num_computed % self.block_size == 0:
            self._commit(request)
        stop_token_id = token if token in request.limits.stop_token_ids else None
        finish: FinishReason | None = None
        if token in request.stops:
            finish = "stop"
        elif len(request.ids) >= request.max_len:
            finish = "length"
        if finish is None:
            self._tokens.append(Tokens(request.rid, _pack_id(token), logprobs, prompt_logprobs))
        else:
            self._end(request, request.terminal(finish, _pack_id(token), logprobs, prompt_logprobs, stop_token_id))

    # ── leave ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _end(self, request: Request, terminal: Tokens | Failed) -> None:
        """The one way out: finished, cancelled or failed."""
        assert request.state is not State.ENDED, request.rid
        if request.state is State.WAITING:
            self._waiting.remove(request)
        else:
            self._has_ended = True
        self._policy.leave(request.line)
        request.state = State.ENDED
        del self._requests[request.rid]
        if isinstance(terminal, Tokens):
            self._tokens.append(terminal)
        else:
            self._close_batch()
            self._news.append(terminal)
        if request.num_in_flight == 0:
            self._release(request)

    def _preempt(self, request: Request) -> None:
        """Its blocks go to others; it waits again in its old place with its output as part of the prompt."""
        self.counters.num_preemptions += 1
        request.state = State.LEAVING
        if request.num_in_flight == 0:
            self._release(request)

    def _release(self, request: Request) -> None:
        """Gives row and blocks back, and a preempted request its place in the line. No plan in flight touches it."""
        assert request.num_in_flight == 0, request.rid
        if request.row >= 0:
            self.pool.release(request.blocks)
            self._free_rows.append(request.row)
            request.blocks = []
            request.row = -1
        if request.state is State.LEAVING:
            request.state = State.WAITING
            request.num_computed = request.num_planned = 0
            request.num_total = len(request.ids)
            del self._running[bisect_left(self._running, request.arrival, key=_arrival)]
            self._waiting.add(request)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
