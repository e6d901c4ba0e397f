"""Fills the plan of the next step: who computes how many positions, who gets blocks, who is preempted or admitted.

Every running request has positions to compute up to the tokens it has, and one budget covers all rows. Rows that need a
single position go first, so that a long prompt delays no stream by more than its chunk. The first running request, in
the policy's order, has a position in every plan and is not preempted while another can be; `docs/scheduling.md` derives
a bound on waiting from it.
"""

import sys
from collections.abc import Iterable
from typing import Literal

from . import decode_rows
from .block_pool import BlockPool
from .cost import CAUTIOUS, NO_WORK, CostModel, Work, with_chunk
from .loads import Loads
from .micro_batches import MicroBatches, Turn
from .output_buffer import OutputBuffer
from .plan_builder import Kept, PlanBuilder
from .policy import Policy, Stake
from .preemption import choose_interrupted, choose_victim, order
from .prefix import Found, PrefixCache, key_at, state_name
from .request import Request, State, Table
from .request_table import RequestTable
from .stats import Counters

_MIN_CHUNK = 16  # positions of a prompt that a step computes whatever the latency target
_MIN_CHUNKS = 4  # of a prompt, for each stage; fewer if its chunks would get too short
_ROUNDING = 1 + 1e-9  # sums in another order
_MAX_CONSTANT = 0.1  # of a step's time: the part that does not depend on its chunk, from which on chunks get too short

Lateness = Literal["never", "alone", "always"]
"""When a plan may sample from a constrained request before its mask has come: in no step; in steps while all running
requests are constrained, which delay nobody else; in any step."""


class Planner:
    """Fills plans; the scheduler sends them and applies their results."""

    def __init__(
        self,
        *,
        table: RequestTable,
        pool: BlockPool,
        prefix: PrefixCache,
        policy: Policy,
        loads: Loads | None,
        cost: CostModel,
        micro_batches: MicroBatches,
        outputs: OutputBuffer,
        counters: Counters,
        block_size: int,
        max_num_batched_tokens: int,
        itl_target_ms: float | None,
        speculate: int,
        is_chunked: bool,
    ) -> None:
        """`speculate`: draft tokens that the worker may compute of a row in a step; 0: none. Less than a block, so that
        a row never needs two blocks for one step. `is_chunked`: a prompt may be computed in chunks; if not, the budget
        of a step must have room for the longest prompt."""
        assert 0 <= speculate < block_size, (speculate, block_size)
        self._table = table
        self._pool = pool
        self._prefix = prefix
        self._policy = policy
        self._loads = loads
        self._cost = cost
        self._micro_batches = micro_batches
        self._outputs = outputs
        self._counters = counters
        self._groups = pool.groups
        self._unit = pool.groups.unit
        self.block_size = block_size
        self.max_budget = max_num_batched_tokens
        self.budget = max_num_batched_tokens  # of a step; `OomRecovery` makes it smaller for a while
        self._itl_target_ms = itl_target_ms
        self._speculate = speculate
        self.is_chunked = is_chunked
        self.break_even = CAUTIOUS  # see `StepPlan`; the scheduler sets it as it learns what steps cost
        self.lateness: Lateness = "never"  # the scheduler sets it

    def change(self, policy: Policy, max_num_batched_tokens: int, itl_target_ms: float | None, speculate: int) -> None:
        """Fills the plans from now on by these."""
        assert 0 <= speculate < self.block_size, (speculate, self.block_size)
        self._policy, self._itl_target_ms, self._speculate = policy, itl_target_ms, speculate
        is_short = self.budget < self.max_budget  # of memory; it grows again step by step
        self.max_budget = max_num_batched_tokens
        self.budget = min(self.budget, max_num_batched_tokens) if is_short else max_num_batched_tokens

    def build(self, turn: Turn) -> PlanBuilder:
        """The next step, possibly empty."""
        table = self._table
        table.sweep()
        if table.num_constrained:
            self._let_be_late()
        builder = PlanBuilder(self.budget)
        rest = self._plan_decodes(builder, self._micro_batches.take(table.running, turn))
        builder.work = Work(len(builder.decodes), sum([r.num_planned for r in builder.decodes]), 0, 0)
        if self._loads is not None:
            self._loads.asks_again = False
        first = table.waiting.first()
        if first is not None and self._policy.may_interrupt and any(self._goes_before(first, r) for r in rest):
            rest.sort(key=order(self._policy))  # it must not overtake requests that stand before it
        for request in rest:
            self._admit(builder, ahead_of=request)
            if builder.budget == 0:
                break
            self._plan_rest(builder, request)
        self._admit(builder)
        self._pool.release(builder.pinned)
        return builder

    def _let_be_late(self) -> None:
        """Decides which running requests are planned before their masks have come. With several stages none is: another
        micro-batch is computed meanwhile."""
        running = self._table.running
        may_be_late = self._micro_batches.num_stages == 1 and (
            self.lateness == "always"
            or (self.lateness == "alone" and all(request.is_constrained for request in running))
        )
        for request in running:
            if request.is_constrained:
                request.let_be_late(may_be_late)

    def account(self, builder: PlanBuilder) -> None:
        """The plan is sent: the prefix cache may find what it computes, and its positions count for their tenants."""
        for request in builder.chunked:  # the id of a single position is known only when its result is applied
            self._prefix.commit(request)
            if request.num_planned >= len(request.ids):
                self._prefix.commit_beginning(request, len(request.ids) - 1)
        for kept in builder.kept:
            self._prefix.commit_state(kept.request, kept.slot, kept.position)
            self._pool.release([kept.slot], is_cold=kept.is_grid)
            if (last := kept.request.kept(kept.key, kept.is_grid)) is not None and self._groups.state is not None:
                self._pool.drop_unused(last, self._groups.state)
        if self._policy.counts_tokens:
            for request in builder.decodes:
                self._policy.serve(request.queue_key, 1)
            for request, count in zip(builder.others, builder.counts, strict=True):
                self._policy.serve(request.queue_key, count)

    def _plan_decodes(self, builder: PlanBuilder, running: list[Request]) -> list[Request]:
        """Plans the rows of `running` that need one position, with the blocks for it. Returns the others that have
        positions to compute: the first in the policy's order, if it must be served now, then those with one position.
        """
        table = self._table
        limit = builder.budget
        front: Request | None = None
        if self._pool.num_free < self._unit * len(running) or limit < len(running) + (len(table.waiting) > 0):
            first = min(self._micro_batches.ready(), key=order(self._policy), default=None)
            if first is not None and first not in running:
                running = [*running, first]
            front = self._make_room(builder, running)
            running = sorted(running, key=order(self._policy))
            if front is not None and (front.num_planned >= front.fast_limit or front.num_total - front.num_planned > 1):
                limit -= 1  # it is not among the rows below and must have a position
            elif (first := table.waiting.first()) is not None and running and self._goes_before(first, running[-1]):
                limit -= 1
        elif (
            self._speculate
            and len(running) * (1 + self._speculate) + (len(table.waiting) > 0) <= limit
            and all(request.num_total - request.num_planned <= 1 for request in running)  # else every position counts
        ):
            running = self._plan_speculative(builder, running)
        rest = self._plan_single(builder, running, limit)
        builder.budget -= len(builder.decodes) + builder.num_speculative * builder.speculate
        if front is not None and front in rest:
            rest.remove(front)
            rest.insert(0, front)
        return rest

    def _plan_single(self, builder: PlanBuilder, running: list[Request], limit: int) -> list[Request]:
        """Plans the rows of `running` that need one position, up to `limit` decode rows. Returns the other requests
        that have positions to compute, those with one position first."""
        planned, others = decode_rows.plan(running, limit - len(builder.decodes))
        builder.decodes += planned
        growing: list[Request] = []
        single: list[Request] = []
        long: list[Request] = []
        over: list[Request] = []
        for request in others:
            position = request.num_planned
            if not request.has_work:
                continue
            if request.num_total - position > 1:
                long.append(request)
            elif position > request.fast_limit:
                single.append(request)
            elif position == request.fast_limit:
                growing.append(request)
            elif len(builder.decodes) < limit:
                request.plan(1, 1)
                builder.decodes.append(request)
            else:
                over.append(request)
        self._release_behind(growing)
        num_grown = min(len(growing), limit - len(builder.decodes), self._num_blocks_free)
        grown = growing[:num_grown]
        if grown:
            self._grow(builder, grown)
            Request.plan_each(grown)
            builder.decodes += grown
        long.sort(key=order(self._policy))
        return single + growing[num_grown:] + long + over

    def _plan_speculative(self, builder: PlanBuilder, running: list[Request]) -> list[Request]:
        """Plans the rows that need one position and may compute draft tokens after it, with the blocks for them. There
        are blocks and budget for all `running`. Returns the others.

        The upper bound of a row stays within `num_due`: a row that is nearer to it waits for its results, or goes on
        without draft tokens.
        """
        num = 1 + self._speculate
        others: list[Request] = []
        growing: list[Request] = []
        for request in running:
            last = request.num_planned + num
            is_single = request.num_planned + 1 == request.num_total
            if is_single and request.may_speculate and last <= request.num_due and request.fast_limit >= 0:
                if last > request.fast_limit:
                    growing.append(request)
                builder.decodes.append(request)
            else:
                others.append(request)
        self._release_behind(growing)
        Request.plan_each(builder.decodes, num)
        self._grow(builder, growing)
        builder.num_speculative = len(builder.decodes)
        builder.speculate = self._speculate if builder.decodes else 0
        builder.break_even = self.break_even
        return others

    def _make_room(self, builder: PlanBuilder, running: list[Request]) -> Request | None:
        """When blocks are short: preempts until the first of `running` can have its chunk and each of them that needs
        one position its block, as far as that is possible. Returns the first in the policy's order."""
        table, pool = self._table, self._pool
        self._release_behind(table.running)
        working = [r for r in running if r.has_work]
        front = min(working, key=order(self._policy), default=None)

        def need(request: Request) -> int:
            num = request.num_computable - request.num_planned
            if num > 1 and request is not front:
                return 0  # its chunk is as long as the blocks that are left allow
            num_blocks = self._num_blocks(request.num_planned + min(num, builder.budget)) - request.num_blocks
            return max(0, num_blocks) * self._unit

        total = sum(map(need, working))
        candidates = sorted((r for r in table.running if r.state is State.RUNNING), key=order(self._policy))
        num_coming = sum(pool.num_in(r.held) for r in table.running if r.state is State.LEAVING)
        while pool.num_free < total:
            if num_coming and pool.num_free + num_coming >= total:
                break  # they return when the steps in flight are applied
            victim = choose_victim(candidates, total, pool=pool, price=self._price)
            if victim is None:
                break
            candidates.remove(victim)
            if victim in working:
                total -= need(victim)
            table.preempt(victim)
            num_coming += pool.num_in(victim.held)  # none, if they have returned already
            builder.preempted = True
        return front

    def _price(self, request: Request) -> float:
        """Milliseconds to bring the KV of a preempted request back: to compute it again or, if cheaper, to load it. Its
        positions while nothing is known of the cost."""
        if not self._cost.is_ready:
            return request.num_planned
        price = self._cost.predict_more(with_chunk(NO_WORK, 0, request.num_planned))
        load_ms = self._loads.ms_to_load(self._pool.num_in(request.held)) if self._loads is not None else None
        return price if load_ms is None else min(price, load_ms)

    def _plan_rest(self, builder: PlanBuilder, request: Request) -> None:
        """Plans a running request that was left by `_plan_decodes`, as far as blocks allow."""
        if not request.has_work or not builder.may_encode(request.num_to_encode):
            return
        self._release_behind((request,))
        have = (request.num_blocks + self._num_blocks_free) * self.block_size - request.num_planned
        num = self._chunk(
            builder, request.num_planned, min(request.num_computable - request.num_planned, have), request.num_restored
        )
        if num <= 0:
            return
        need = self._num_blocks(request.num_planned + num) - request.num_blocks
        if need > 0:
            blocks = [self._pool.allocate(need, group) for group in range(self._groups.num_tables)]
            request.grow(need, blocks)
            if request.is_open:
                for group, new in enumerate(blocks):
                    builder.grow([request.row] * need, group, self._pool.pages(new))
        self._take(builder, request, num)

    def _grow(self, builder: PlanBuilder, requests: list[Request]) -> None:
        """Appends a block to each table of these requests, whose rows the worker knows. There are pages for it."""
        rows, num = [request.row for request in requests], len(requests)
        blocks = [self._pool.allocate(num, group) for group in range(self._groups.num_tables)]
        for group, new in enumerate(blocks):
            builder.grow(rows, group, self._pool.pages(new))
        Request.grow_each(requests, blocks)

    def _release_behind(self, requests: Iterable[Request]) -> None:
        """Releases the blocks behind the windows and chunks of these requests; others may find them."""
        if not self._groups.moving:
            return
        for request in requests:
            if request.state is State.RUNNING:
                self._prefix.commit(request)
                self._pool.release(request.drop_behind(self._groups))

    @property
    def _num_blocks_free(self) -> int:
        """How many blocks of positions, with what each group keeps of them, there are pages for."""
        return self._pool.num_free // self._unit if self._unit else sys.maxsize

    def _take(self, builder: PlanBuilder, request: Request, num: int) -> None:
        """Puts `num` positions of a request that has the blocks for them into the plan."""
        if not request.is_open:
            self._open(builder, request)
        if num == 1:
            work = builder.work
            builder.work = work._replace(rows=work.rows + 1, context=work.context + request.num_planned)
        else:
            builder.work = with_chunk(builder.work, request.num_planned, num)
        samples = request.num_planned + num == request.num_total and request.generates
        if samples and not request.is_masked:
            builder.late.append(request)
        elif samples and request.mask:
            builder.masks.append((request.row, request.mask))
        request.plan(num, int(samples))
        if request.slot >= 0:
            self._keep(builder, request, request.num_planned - num)
        if num > 1:
            builder.chunked.append(request)
            builder.fresh.update(self._prefix.upcoming(request))
        builder.budget -= num
        builder.others.append(request)
        builder.counts.append(num)
        builder.sample.append(int(samples))

    def _keep(self, builder: PlanBuilder, request: Request, start: int) -> None:
        """Has the plan keep the recurrent states of a request that others are likely to need, while there is room.

        While steps are short of memory, also the one that a chunk of a prompt ends with: a pass that is dropped spoils
        the state, and the request would begin again."""
        groups, pool = self._groups, self._pool
        if groups.state is None or not self._prefix.enabled:
            return
        interval = groups.interval(self.block_size)
        is_short = self.budget < self.max_budget
        for position in request.keep_positions(start, request.num_planned, interval, with_end=is_short):
            key = key_at(request, position)
            reserve = self._unit * len(self._table.running)
            if pool.find(key, groups.state) is not None or pool.num_free < groups.state_pages + reserve:
                continue
            (slot,) = pool.allocate(1, groups.state)
            is_grid = (is_short or position % interval == 0) and position != request.junction
            builder.keep(Kept(request, position, key, slot, is_grid), pool.pages([slot]))
            builder.fresh.add(state_name(key))

    def _chunk(self, builder: PlanBuilder, past: int, num: int, start: int) -> int:
        """How many of a request's next `num` positions, after `past` computed ones, go into this plan. `start`: how
        many it had when it got its row.

        Beside decode rows, as many as keep the step within the latency target, but at least `_MIN_CHUNK` for the first
        prompt of a step, so that prompts make progress. Otherwise as many as the budget allows; with several stages,
        as many as keep them busy.
        """
        if not self.is_chunked:
            return num if num <= builder.budget or not builder.num_rows else 0
        end, num = past + num, min(num, builder.budget)
        target_ms = self._target_ms(builder, start, end)
        if target_ms is None or num <= 1:
            return num
        if not self._cost.is_ready:
            chunk = min(num, _MIN_CHUNK)
        else:
            chunk = self._cost.longest_chunk(builder.work, past, target_ms, num)
        if builder.work.prefill == 0:
            chunk = max(chunk, min(num, _MIN_CHUNK))
        if chunk < num:
            builder.budget = chunk  # nothing more fits this step
        return chunk

    def _target_ms(self, builder: PlanBuilder, start: int, end: int) -> float | None:
        """The longest that a step with a chunk of a prompt from `start` to `end` may take; None: no limit.

        A row is in every P-th plan of P stages at most, so each of these plans may take a P-th of the latency target.
        Stages that compute chunks of one prompt wait for the longest, so all chunks take the same time, whatever rows
        are beside them: that of a first chunk which uses all of the budget, or less, so that there are enough chunks.
        """
        num_stages, target = self._micro_batches.num_stages, self._itl_target(builder)
        if num_stages == 1:
            return target if builder.work.rows else None
        share = None if target is None or not self._micro_batches.num_rows else target / num_stages
        if not self._cost.is_ready:
            return share
        cost = self._cost
        constant = cost.predict(NO_WORK)
        whole = cost.predict_more(with_chunk(NO_WORK, start, end - start))
        even = max(constant + whole / (_MIN_CHUNKS * num_stages), constant / _MAX_CONSTANT)
        even = min(even, cost.predict(with_chunk(NO_WORK, 0, self.budget)) * _ROUNDING)
        even += cost.predict_more(builder.work._replace(prefill=0, pairs=0))
        return even if share is None else min(even, share)

    def _itl_target(self, builder: PlanBuilder) -> float | None:
        """How long the next tokens of the streams in this plan may take, in ms: the least of the operator's target and
        those of their classes."""
        targets = self._policy.itl_targets
        own = [targets[key] for key in {row.queue_key for row in builder.decodes} & targets.keys()] if targets else []
        return min([*own, *([] if self._itl_target_ms is None else [self._itl_target_ms])], default=None)

    def _goes_before(self, waiting: Request, running: Request) -> bool:
        return self._policy.may_interrupt and self._policy.interrupts(waiting, running, Stake(len(waiting.ids)))

    def _stake(self, waiting: Request, running: Request) -> Stake:
        """What it means to preempt one for the other."""
        left = self._cost.of_request(len(running.ids), running.max_len - len(running.ids))
        return Stake(len(waiting.ids), self._price(running), left[1])

    def _admit(self, builder: PlanBuilder, ahead_of: Request | None = None) -> None:
        """Admits waiting requests, strictly in their order, while rows, blocks and budget last; with `ahead_of`, only
        those that may interrupt that running request."""
        table, loads, size = self._table, self._loads, self.block_size
        while builder.budget > 0 and (request := table.waiting.first()) is not None:
            if builder.preempted or table.num_leaving:
                return  # preempted requests go before it, or their blocks are not free yet
            if ahead_of is not None and not self._goes_before(request, ahead_of):
                return
            if not table.has_free_row and not self._policy.may_interrupt:
                return
            found = self._prefix.find(request)
            if not builder.fresh.isdisjoint(found.missing) or (loads and not loads.keys.isdisjoint(found.missing)):
                return  # its next block is being computed or loaded: a later plan finds it
            short = self._short(request, found)
            if found.pinned and short + self._pool.num_idle(found.pinned) > 0:
                found = self._prefix.find(request, copies=False)  # no room to copy from it
                short = self._short(request, found)
            if short > 0 or not table.has_free_row:
                self._interrupt_for(request, short)  # a later plan admits it
                return
            better = found
            if loads is not None and not request.wants_all:
                asked = loads.match(request, found)
                if asked is None:
                    return
                better = asked
            if request.misses(len(request.encoded) if better.cross else better.num):
                self._outputs.add_item(request.as_opened())
                table.end(request, request.terminal("cache_threshold"))
                continue
            if loads is not None and not request.wants_all:
                short = self._short(request, better) + self._pool.num_idle(better.pinned)
                if better.wanted and short <= 0:
                    self._start(request, better, 0)
                    loads.start(request, better.wanted)
                    continue
            num_to_encode = 0 if found.cross else len(request.encoded)
            if not builder.may_encode(num_to_encode):
                return
            have = (found.num // size + self._num_blocks_beside(found, num_to_encode)) * size - found.num
            num = self._chunk(builder, found.num, min(request.num_computable - found.num, have), found.num)
            if num <= 0:
                return  # no budget, or its mask has not come
            self._start(request, found, num)
            self._take(builder, request, num)

    def _interrupt_for(self, request: Request, short: int) -> None:
        """Preempts running requests for a waiting one that has no row or `short` pages too few, if it may and that is
        enough."""
        table = self._table
        if self._policy.may_interrupt:
            has_row = table.has_free_row
            for victim in choose_interrupted(
                table.running,
                request,
                short,
                has_row,
                pool=self._pool,
                policy=self._policy,
                stake=self._stake,
            ):
                table.preempt(victim)

    def _start(self, request: Request, found: Found, num: int) -> None:
        """Gives a waiting request a row, what was found, and blocks for `num` positions more and for what is wanted."""
        pool = self._pool
        pool.hold(found.hits + found.pinned)  # before others are allocated in their place
        num_hits, num_blocks = found.num // self.block_size, self._num_blocks(found.num + num)
        tables = []
        for group, hit in enumerate(found.tables):
            blocks = iter(pool.allocate(num_blocks - num_hits + hit.blocks.count(-1), group))
            known = [next(blocks) if block < 0 else block for block in hit.blocks]
            tables.append(Table([*known, *blocks], hit.first))
        sources = [(group, source) for group, source in enumerate(found.sources) if source is not None]
        num_held = found.num if not found.wanted else self._num_leading(found) * self.block_size
        self._table.admit(request, tables, num_blocks, num_held, len(found.wanted), found.num, sources)
        if self._groups.state is not None:
            (slot,) = pool.allocate(1, self._groups.state)
            is_loaded = bool(found.state_key) and found.state is None
            slot_from = slot if is_loaded else -1 if found.state is None else found.state
            request.give_state(slot, slot_from, found.state_key, found.junction)
        if self._groups.cross is not None:
            num_cross = self._groups.cross_blocks(len(request.encoded), self.block_size)
            cross = [*found.cross] or pool.allocate(num_cross, self._groups.cross)
            request.encoded.give(cross, is_there=bool(found.cross))
        self._counters.found(found)

    def _num_leading(self, found: Found) -> int:
        """How many leading blocks the device has in every group."""
        places = [item.place for item in found.wanted]
        return min(places) if not any(table.first for table in found.tables) and self._groups.state is None else 0

    def _short(self, request: Request, found: Found) -> int:
        """How many pages are missing to admit a request with this prefix. Beside others there must be pages for all of
        its prompt, and every running row may need its next block soon; alone it may wait for those behind a window."""
        running, pool = self._table.running, self._pool
        step = self.budget if running else 1
        need = self._groups.num_pages(found.num, len(request.ids), step, self.block_size) - pool.num_in(found.hits)
        need += self._groups.cross_pages(len(request.encoded), self.block_size)
        return need + self._unit * len(running) - (pool.num_free - pool.num_idle(found.hits))

    def _num_blocks_beside(self, found: Found, num_to_encode: int) -> int:
        """How many blocks of positions there are pages for behind this prefix, and beside the encoder's result."""
        pool = self._pool
        num_pages = pool.num_free - pool.num_idle(found.hits + found.pinned) - self._groups.state_pages
        num_pages -= self._groups.cross_pages(num_to_encode, self.block_size)
        return num_pages // self._unit if self._unit else sys.maxsize

    def _open(self, builder: PlanBuilder, request: Request) -> None:
        """Tells the worker of its row and, with its first step, the detokenizer of the request."""
        builder.open.append(request.as_row(self._pool))
        if request.num_to_encode:
            builder.encode(request.num_to_encode)
            self._prefix.commit_cross(request)
        for group, source in request.sources:
            entry = request.tables[group]
            target = entry.blocks[request.num_restored // self.block_size - entry.first]
            builder.copy(self._pool.pages([source]), self._pool.pages([target]))
        builder.pinned += request.pinned
        if request.open():
            self._counters.num_prompt_tokens += request.num_asked
            self._counters.num_cached_tokens += request.num_cached if request.encoded else request.num_found
            self._outputs.add_item(request.as_opened())

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
