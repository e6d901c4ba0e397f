"""Fills a draft of the next step: who computes how many positions, who gets blocks, who is preempted, who is admitted.

Every running request has positions to compute up to the tokens it has, and one budget covers all rows. Rows that need a
single position go first, so that a long prompt delays no stream by more than its chunk. The first in line that runs has
a position in every plan and is never preempted while another can be; `docs/scheduling.md` draws a bound from it.
"""

from operator import attrgetter

from .block_pool import BlockPool
from .cost import CAUTIOUS, NO_WORK, CostModel, Work, with_chunk
from .draft import Draft
from .loads import Loads
from .output_buffer import OutputBuffer
from .policy import Policy
from .preemption import choose_interrupted, choose_victim, order
from .prefix import PrefixCache
from .request import Request, State
from .request_table import RequestTable
from .stats import Counters

_MIN_CHUNK = 16  # positions of a prompt that a step computes whatever the latency target
_num_planned = attrgetter("num_planned")


class Planner:
    """Decides; what becomes of the draft is the scheduler's."""

    def __init__(
        self,
        *,
        table: RequestTable,
        pool: BlockPool,
        prefix: PrefixCache,
        policy: Policy,
        loads: Loads | None,
        cost: CostModel,
        outputs: OutputBuffer,
        counters: Counters,
        block_size: int,
        max_num_batched_tokens: int,
        itl_target_ms: float | None,
        speculate: int,
        is_chunked: bool,
    ) -> None:
        """`speculate`: positions that the worker may compute of a row's guessed tokens in a step; 0: none. Less than a
        block, so that a row never needs two blocks at once for one token. `is_chunked`: a prompt may be computed in
        pieces; if not, the budget of a step has room for the longest."""
        assert 0 <= speculate < block_size, (speculate, block_size)
        self._table = table
        self._pool = pool
        self._prefix = prefix
        self._policy = policy
        self._loads = loads
        self._cost = cost
        self._outputs = outputs
        self._counters = counters
        self.block_size = block_size
        self.budget = max_num_batched_tokens  # of a step; `OomRecovery` makes it smaller for a while
        self._itl_target_ms = itl_target_ms
        self._speculate = speculate
        self.is_chunked = is_chunked
        self.break_even = CAUTIOUS  # see `StepPlan`; whoever learns what steps cost sets it

    def draft(self) -> Draft:
        """The next step, possibly empty."""
        table = self._table
        table.sweep()
        draft = Draft(self.budget)
        rest = self._plan_decodes(draft)
        draft.work = Work(len(draft.decodes), sum(map(_num_planned, draft.decodes)), 0, 0)
        if self._loads is not None:
            self._loads.asks_again = False
        first = table.waiting.first()
        if first is not None and self._policy.may_interrupt and any(self._goes_before(first, r) for r in rest):
            rest.sort(key=order(self._policy))  # it must not overtake those that stand before it as well
        for request in rest:
            self._admit(draft, ahead_of=request)
            if draft.budget == 0:
                break
            self._plan_rest(draft, request)
        self._admit(draft)
        self._pool.release(draft.pinned)
        return draft

    def account(self, draft: Draft) -> None:
        """The draft is sent: what it computes may be found, and who is served has got it."""
        for request in draft.chunked:  # a single position fills a block only when its result is applied
            self._prefix.commit(request)
            if request.num_planned >= len(request.ids):
                self._prefix.commit_beginning(request, len(request.ids) - 1)
        if self._policy.counts_tokens:
            for request in draft.decodes:
                self._policy.serve(request.queue_key, 1)
            for request, count in zip(draft.others, draft.counts, strict=True):
                self._policy.serve(request.queue_key, count)

    def _plan_decodes(self, draft: Draft) -> list[Request]:
        """Plans the rows that need one position and no block: nearly every row of nearly every step. Returns the others
        that have something to compute, the first in line first, then those with one position."""
        table = self._table
        running = table.running
        limit = draft.budget
        front: Request | None = None
        if self._pool.num_free < len(table.running) or limit < len(table.running) + (len(table.waiting) > 0):
            front = self._make_room(draft)
            running = sorted(table.running, key=order(self._policy))
            if front is not None and (front.num_planned >= front.fast_limit or front.num_total - front.num_planned > 1):
                limit -= 1  # it is none of the rows below, and must have a position all the same
            elif (first := table.waiting.first()) is not None and self._goes_before(first, running[-1]):
                limit -= 1
        elif (
            self._speculate
            and len(running) * (1 + self._speculate) + (len(table.waiting) > 0) <= limit
            and all(request.num_total - request.num_planned <= 1 for request in running)  # else positions are dear
        ):
            running = self._plan_speculative(draft, running)
        decodes = draft.decodes
        take = decodes.append
        growing: list[Request] = []
        single: list[Request] = []
        long: list[Request] = []
        for request in running:
            position = request.num_planned
            if position < request.fast_limit and position + 1 == request.num_total:
                request.num_planned = position + 1
                request.num_total = position + 2
                request.num_in_flight += 1
                take(request)
            elif request.has_work:
                if request.num_total - position > 1:
                    long.append(request)
                else:
                    (growing if position == request.fast_limit else single).append(request)
        over = decodes[limit:]
        for request in over:
            request.num_planned -= 1
            request.num_total -= 1
            request.num_in_flight -= 1
        del decodes[limit:]
        if growing:
            single += self._grow(draft, growing, limit - len(decodes))
        draft.budget -= len(decodes) + draft.num_speculative * draft.speculate
        if len(long) > 1:
            long.sort(key=order(self._policy))
        rest = single + long + over
        if front is not None and front in rest:
            rest.remove(front)
            rest.insert(0, front)
        return rest

    def _plan_speculative(self, draft: Draft, running: list[Request]) -> list[Request]:
        """Plans the rows that need one position and may compute guesses after it, with the blocks for them. There are
        blocks and budget for all `running`. Returns the others.

        The upper bound stays within `end`: who is nearer to it waits for its results, or goes on without guesses.
        """
        num = 1 + self._speculate
        take = draft.decodes.append
        others: list[Request] = []
        growing: list[Request] = []
        for request in running:
            position = request.num_planned
            if position + num > request.end or position + 1 != request.num_total or not request.may_speculate:
                others.append(request)
                continue
            if position + num > request.fast_limit:
                if request.fast_limit < 0:
                    others.append(request)
                    continue
                growing.append(request)
            request.num_planned = position + num
            request.num_total = position + num + 1
            request.num_in_flight += 1
            take(request)
        blocks = self._pool.allocate(len(growing))
        draft.grow_blocks.extend(blocks)
        for request, block in zip(growing, blocks, strict=True):
            request.blocks.append(block)
            request.fast_limit = min(request.end, request.fast_limit + self.block_size)
            draft.grow_rows.append(request.row)
        draft.num_speculative = len(draft.decodes)
        draft.speculate = self._speculate if draft.decodes else 0
        draft.break_even = self.break_even
        return others

    def _grow(self, draft: Draft, growing: list[Request], limit: int) -> list[Request]:
        """Plans rows that need one position and a block for it, as far as blocks and limit last. Returns the others."""
        num = min(len(growing), limit, self._pool.num_free)
        blocks = self._pool.allocate(num)
        draft.grow_blocks.extend(blocks)
        for request, block in zip(growing, blocks):  # noqa: B905  # those without a block are returned
            request.blocks.append(block)
            request.fast_limit = min(request.end, request.fast_limit + self.block_size)
            request.num_planned += 1
            request.num_total += 1
            request.num_in_flight += 1
            draft.grow_rows.append(request.row)
            draft.decodes.append(request)
        return growing[num:]

    def _make_room(self, draft: Draft) -> Request | None:
        """When blocks are short: preempts until the first in line can have its chunk and each row that needs one
        position its block, as far as that is possible. Returns the first in line."""
        table = self._table
        working = [r for r in table.running if r.has_work]
        front = min(working, key=order(self._policy), default=None)

        def need(request: Request) -> int:
            num = request.num_computable - request.num_planned
            if num > 1 and request is not front:
                return 0  # it takes what is left
            return max(0, self._num_blocks(request.num_planned + min(num, draft.budget)) - len(request.blocks))

        total = sum(map(need, working))
        candidates = sorted((r for r in table.running if r.state is State.RUNNING), key=order(self._policy))
        coming = sum(len(r.blocks) for r in table.running if r.state is State.LEAVING)
        while self._pool.num_free < total:
            if coming and self._pool.num_free + coming >= total:
                break  # they return when the steps in flight are applied
            victim = choose_victim(candidates, total, pool=self._pool, price=self._price)
            if victim is None:
                break
            candidates.remove(victim)
            if victim.has_work:
                total -= need(victim)
            table.preempt(victim)
            coming += len(victim.blocks)  # none, if they have returned already
            draft.preempted = True
        return front

    def _price(self, request: Request) -> float:
        """What it costs to bring the KV of a preempted request back: computed again or, if that is cheaper, loaded."""
        if not self._cost.is_ready:
            return request.num_planned
        price = self._cost.predict_more(with_chunk(NO_WORK, 0, request.num_planned))
        load_ms = self._loads.ms_to_load(len(request.blocks)) if self._loads is not None else None
        return price if load_ms is None else min(price, load_ms)

    def _plan_rest(self, draft: Draft, request: Request) -> None:
        """Plans a running request that needs a block or has more than one position, as far as blocks allow."""
        if not request.has_work:
            return
        have = (len(request.blocks) + self._pool.num_free) * self.block_size - request.num_planned
        num = self._chunk(draft, request.num_planned, min(request.num_computable - request.num_planned, have))
        if num <= 0:
            return
        need = self._num_blocks(request.num_planned + num) - len(request.blocks)
        if need > 0:
            blocks = self._pool.allocate(need)
            request.blocks += blocks
            if request.is_open:
                draft.grow_blocks.extend(blocks)
                draft.grow_rows.extend([request.row] * need)
        self._take(draft, request, num)

    def _take(self, draft: Draft, request: Request, num: int) -> None:
        """Puts `num` positions of a request that has the blocks for them into the plan."""
        if not request.is_open:
            self._open(draft, request)
        if num == 1:
            work = draft.work
            draft.work = work._replace(rows=work.rows + 1, context=work.context + request.num_planned)
        else:
            draft.work = with_chunk(draft.work, request.num_planned, num)
        request.num_planned += num
        if num > 1:
            draft.chunked.append(request)
            draft.fresh.update(self._prefix.upcoming(request))
        request.num_in_flight += 1
        samples = request.num_planned == request.num_total and request.max_tokens > 0
        if samples:
            request.num_total += 1
            if request.mask:
                draft.masks.append((request.row, request.mask))
        draft.budget -= num
        draft.others.append(request)
        draft.counts.append(num)
        draft.sample.append(int(samples))
        request.settle()

    def _chunk(self, draft: Draft, past: int, num: int) -> int:
        """How many of a prompt's next `num` positions, after `past` computed ones, go into this plan.

        Beside streams that wait for their next token, as many as keep the step within the latency target; at least
        `_MIN_CHUNK` for the first prompt of a step, so that every prompt gets on. Otherwise what the budget allows.
        """
        if not self.is_chunked:
            return num if num <= draft.budget or not draft.num_rows else 0
        num = min(num, draft.budget)
        if self._itl_target_ms is None or draft.work.rows == 0 or num <= 1:
            return num
        if not self._cost.is_ready:
            chunk = min(num, _MIN_CHUNK)
        else:
            chunk = self._cost.longest_chunk(draft.work, past, self._itl_target_ms, num)
        if draft.work.prefill == 0:
            chunk = max(chunk, min(num, _MIN_CHUNK))
        if chunk < num:
            draft.budget = chunk  # nothing more fits this step
        return chunk

    def _goes_before(self, waiting: Request, running: Request) -> bool:
        return self._policy.may_interrupt and self._policy.interrupts(
            waiting.queue_key, running.queue_key, len(waiting.ids)
        )

    def _admit(self, draft: Draft, ahead_of: Request | None = None) -> None:
        """Takes waiting requests in, strictly in their order, while rows, blocks and budget last; with `ahead_of`, only
        those that may interrupt that running one."""
        table, loads, size = self._table, self._loads, self.block_size
        while draft.budget > 0 and (request := table.waiting.first()) is not None:
            if draft.preempted or table.num_leaving:
                return  # those that leave come first
            if ahead_of is not None and not self._goes_before(request, ahead_of):
                return
            if not table.free_rows and not self._policy.may_interrupt:
                return
            found = self._prefix.find(request)
            if not draft.fresh.isdisjoint(found.missing) or (loads and not loads.keys.isdisjoint(found.missing)):
                return  # what it lacks is on its way: a later plan finds it
            hits = found.blocks
            num_cached = len(hits) * size
            pinned = [] if found.source is None else [found.source]
            need = self._num_blocks(len(request.ids)) - len(hits)
            reserve = len(table.running)  # every running row may want its next block soon
            short = need + reserve - (self._pool.num_free - self._pool.num_idle(hits))
            if pinned and short + self._pool.num_idle(pinned) > 0:
                found, pinned = found._replace(source=None, num_copied=0), []  # no room to copy from it
            if short > 0 or not table.free_rows:
                victims = []
                if self._policy.may_interrupt:
                    has_row = bool(table.free_rows)
                    victims = choose_interrupted(table.running, request, short, has_row, self._pool, self._policy)
                for victim in victims:  # they give up what is missing; the next plan admits the request
                    table.preempt(victim)
                return
            external = 0
            if loads is not None and self._prefix.enabled and not request.wants_all:
                asked = loads.match(request, num_cached)
                if asked is None:
                    return
                external = asked
            num = 0
            if not external:
                copied = found.num_copied
                num = self._chunk(draft, num_cached + copied, request.num_computable - num_cached - copied)
                if num == 0:
                    return  # or its mask is on its way
            self._pool.hold(hits)
            if not external and pinned:
                self._pool.hold(pinned)
                draft.pinned += pinned
            end = num_cached + (external or found.num_copied + num)
            blocks = hits + self._pool.allocate(self._num_blocks(end) - len(hits))
            table.admit(request, blocks, State.LOADING if external else State.RUNNING)
            request.num_committed = len(hits)
            request.num_computed = request.num_planned = num_cached
            request.num_found = num_cached + (0 if external else found.num_copied)
            if external:
                assert loads is not None
                loads.start(request, external)
                continue
            if pinned:
                draft.copies += (*pinned, blocks[len(hits)])
                request.num_computed = request.num_planned = num_cached + found.num_copied
            self._take(draft, request, num)

    def _open(self, draft: Draft, request: Request) -> None:
        """Tells the worker of its row and, with its first step, the detokenizer of the request."""
        draft.open.append(request.as_row())
        request.is_open = True
        if request.opened:
            return
        request.opened = True
        request.num_cached = min(request.num_computed, request.num_prompt)
        self._counters.num_prompt_tokens += request.num_prompt
        self._counters.num_cached_tokens += request.num_found
        self._outputs.add_item(request.as_opened())

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
