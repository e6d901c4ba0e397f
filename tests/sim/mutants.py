"""Possible faults of the engine: each is a small change to the real classes that must make some history fail."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

from fakes import FakeRow, FakeWorker, next_token
from msgspec.structs import replace

from pagewire.config.latency_classes import LatencyClass
from pagewire.engine.core import kv_connector, kv_events, planner, policy, scheduler
from pagewire.engine.core import request as request_module
from pagewire.engine.core.block_hash import block_key, root_key
from pagewire.engine.core.block_pool import BlockPool
from pagewire.engine.core.constraints import Constraints
from pagewire.engine.core.encoded import Encoded
from pagewire.engine.core.groups import Groups
from pagewire.engine.core.kv_connector import Held, Item
from pagewire.engine.core.loads import Loads
from pagewire.engine.core.micro_batches import MicroBatches, Turn
from pagewire.engine.core.plan_builder import InFlight, PlanBuilder
from pagewire.engine.core.planner import Planner
from pagewire.engine.core.policy import Expected, Ranked, Shortest, Slo, Stake
from pagewire.engine.core.prefix import PrefixCache, _Lookup, key_at
from pagewire.engine.core.request import Request, State, Table
from pagewire.engine.core.request_table import RequestTable
from pagewire.engine.core.scheduler import Scheduler
from pagewire.engine.core.waiting import Waiting
from pagewire.engine.kv_connector.chain import ChainWorker
from pagewire.engine.kv_connector.host import HostCore
from pagewire.ipc.messages import Enqueue, Failed, RowOpen, StepPlan, Tokens, bytes_to_ids, ids_to_bytes

from .stages import Hidden, Sampled, Stage
from .stores import Copy, StoreWorker

_pool_release = BlockPool.release
_table_end = RequestTable.end
_table_start_again = RequestTable.start_again
_table_preempt = RequestTable.preempt
_table_release = RequestTable.release
_request_init = Request.__init__
_request_plan = Request.plan
_request_apply = Request.apply
_request_admit = Request.admit
_request_set_back = Request.set_back
_request_preempt = Request.preempt
_request_loaded = Request.loaded
_request_open = Request.open
_request_forget = Request._forget
_request_as_row = Request.as_row
_apply_each = Request.apply_each
_apply_drafted = Request.apply_drafted
_builder_init = PlanBuilder.__init__
_builder_finish = PlanBuilder.finish
_builder_copy = PlanBuilder.copy
_builder_grow = PlanBuilder.grow
_need_from = Groups.need_from
_planner_keep = Planner._keep
_give_state = Request.give_state
_forget_all = BlockPool.forget_all
_drop_key = BlockPool._drop_key
_poison = scheduler.poison
_restores = _Lookup.restores
_drop_behind = Request.drop_behind
_prefix_find = PrefixCache.find
_prefix_events = PrefixCache.take_events
_loads_start = Loads.start
_loads_finish = Loads.finish
_refusal = Scheduler.refusal
_plan_speculative = Planner._plan_speculative
_speculate = FakeWorker._speculate
_host_meta = HostCore.build_connector_meta
_store_save = StoreWorker._save
_store_load = StoreWorker._load
_lacks = _Lookup._lacks
_held_by = PrefixCache.held_by
_restorable = PrefixCache.restorable
_send = Scheduler._send
_num_batches = MicroBatches._num_batches
_hear = Stage.hear
_encoded_give = Encoded.give


def _leak_a_block(self: BlockPool, blocks: list[int]) -> None:
    _pool_release(self, blocks[1:])


def _hold_nothing(self: BlockPool, blocks: list[int]) -> None:
    """A hit does not count its reference."""


def _release_in_flight(self: RequestTable, request: Request, terminal: Tokens | Failed) -> None:
    _table_end(self, request, terminal)
    if request.row >= 0:
        self._pool.release(request.held)
        self.free_rows.append(request.row)
        request._forget()


def _preempt_in_flight(self: RequestTable, request: Request) -> None:
    self._pool.release(request.held)
    request.tables = [Table([], request.num_blocks) for _ in request.tables]
    _table_preempt(self, request)


def _keep_the_row(self: RequestTable, request: Request) -> None:
    had_row = request.row >= 0
    _table_release(self, request)
    if had_row and request.state is State.ENDED:
        self.free_rows.pop()


def _release_what_is_read(self: RequestTable, request: Request) -> None:
    _table_release(self, request)
    if (blocks := self.held.get(request.rid)) is not None:
        self._pool.release(blocks)
        self.held[request.rid] = []


def _terminal_twice(self: RequestTable, request: Request, terminal: Tokens | Failed) -> None:
    _table_end(self, request, terminal)
    (self._outputs.add if isinstance(terminal, Tokens) else self._outputs.add_item)(terminal)  # type: ignore[operator]


def _terminal_never(self: RequestTable, request: Request, terminal: Tokens | Failed) -> None:
    _table_end(self, request, terminal)
    (self._outputs._tokens if isinstance(terminal, Tokens) else self._outputs._items).pop()


def _key_without_parent(parent: bytes, ids: bytes) -> bytes:
    return block_key(b"", ids)


def _commit_too_early(self: PrefixCache, request: Request) -> None:
    full = len(request.ids) // self._block_size if self.enabled else 0
    for i, key in enumerate(request.block_keys(full, self._block_size)[: request.num_blocks]):
        for table in request.tables:
            if i >= table.first:
                self._pool.register(table.blocks[i - table.first], key, i)


def _copy_one_too_many(self: PrefixCache, request: Request, **more):
    found = _prefix_find(self, request, **more)
    is_last = found.num + 1 >= len(request.ids)
    return found if not found.pinned or is_last else found._replace(num=found.num + 1)


def _forget_copies(self: PlanBuilder, *more) -> StepPlan:
    return replace(_builder_finish(self, *more), copies=b"")


def _know_every_fault(self: PlanBuilder, *more) -> StepPlan:
    return replace(_builder_finish(self, *more), after_fault=True)


def _more_budget(self: PlanBuilder, budget: int) -> None:
    _builder_init(self, budget + 1)


def _trust_failed_loads(self: Loads, message):
    return [(request, [*good, *failed], []) for request, good, failed in _loads_finish(self, message)]


def _compute_while_loading(self: Loads, request: Request, wanted: Sequence[Item]) -> None:
    _loads_start(self, request, wanted)
    request.state = State.RUNNING
    request.num_computed = request.num_planned = request.num_wanted


def _read_too_late(self: HostCore) -> bytes:
    """Saved blocks are read one plan later than the plan in which the pool gives them away."""
    saves, self._saves = self._saves, getattr(self, "late", {})
    self.late = saves  # type: ignore[attr-defined]
    return _host_meta(self)


def _name_without_group(key: bytes, group: int) -> bytes:
    return key


def _store_the_first_page(self: StoreWorker, saves: Iterable[Copy]) -> None:
    """Of a block with several pages, only one is stored; the others are lost without notice."""
    saves = list(saves)
    _store_save(self, saves)
    for copy in saves:
        for address in copy.addresses[1:]:
            if address in self._store and copy.item is not None:
                self._store[address] = self._store[copy.addresses[0]]


def _load_the_first_page(self: StoreWorker, rid: int, copies: list[Copy]) -> None:
    _store_load(self, rid, [c._replace(pages=c.pages[:1], addresses=c.addresses[:1]) for c in copies])


def _hit_without_window(self: _Lookup, group: int, first: int, place: int) -> bool:
    """A block behind the start of a window is not there, and it counts as a hit."""
    return _lacks(self, group, min(first + 1, place), place)


def _load_states_late(self: Loads, request: Request, wanted: Sequence[Item]) -> None:
    """The states are not loaded before the request goes on."""
    _loads_start(self, request, [item for item in wanted if item.group != self._pool.groups.state] or wanted)


def _read_another_state(self: Request, slot: int, slot_from: int, key: bytes, junction: int) -> None:
    """A state was loaded, and the first pass begins with zeros."""
    _give_state(self, slot, -1 if slot_from == slot else slot_from, key, junction)


def _state_moved_on(self: PrefixCache, request: Request) -> list[Held]:
    """The state at the end is stored as that before the last position."""
    held = _held_by(self, request)
    if held and held[-1].item.group == self._pool.groups.state and request.num_computed > 1:
        num = min(request.num_computed, len(request.ids)) - 1
        place, rest = divmod(num, request.block_size)
        behind = request.block_keys(place, request.block_size)[-1] if place else request.root
        item = held[-1].item._replace(key=key_at(request, num), place=place, parent=behind, num=rest)
        held[-1] = held[-1]._replace(item=item)
    return held


def _save_while_it_is_computed(self: Scheduler, builder: PlanBuilder) -> StepPlan | None:
    """A state that a plan in flight keeps is stored, though the worker may have dropped that plan."""
    kept = [(flight.kept, list(flight.kept)) for flight in self._in_flight]
    for slots, _ in kept:
        slots.clear()
    plan = _send(self, builder)
    for slots, old in kept:
        slots.extend(old)
    return plan


def _forget_the_rest_of_a_failed_load(self: PrefixCache, request: Request, failed: Collection[Item]) -> int | None:
    """Something could not be loaded, and the request goes on as if only the blocks from there on were missing."""
    num = _restorable(self, request, failed)
    return min(item.place for item in failed) * self._block_size if num is None else num


def _any_failure_of_a_chain(self: ChainWorker) -> set[int]:
    self._failed_of_named = set()
    return set()


def _resume_as_prompt(self: Request, message, **more) -> None:
    _request_init(self, message, **more)
    self.num_prompt += self.num_resumed
    self.max_len += self.num_resumed
    self.num_needed += self.num_resumed


def _same_sampling_for_all_choices(self: Request, message, **more) -> None:
    _request_init(self, message, **more)
    self.asked = replace(self.asked, sampling=message.sampling)


def _one_token_more(self: Request, message, **more) -> None:
    _request_init(self, message, **more)
    self.num_needed += self.generates
    self.max_len += 1


def _ignore_stops(self: Request, message, **more) -> None:
    _request_init(self, message, **more)
    self.stops = self.stops - set(self.asked.limits.stop_token_ids)


def _preempt_the_first(candidates: list[Request], need: int, **more: object) -> Request | None:
    return candidates[0] if candidates else None


def _last_comes_first(self: Waiting) -> Request | None:
    return max(self, key=lambda r: r.arrival, default=None)


def _by_arrival(self: Waiting) -> Request | None:
    return min(self, key=lambda r: r.arrival, default=None)


def _without_ageing(self: Shortest, message: Enqueue, now_ms: float, expected: Expected) -> float:
    return sum(expected)


def _as_patient_as_it_is_long(expected: Expected) -> float:
    return policy.PATIENCE * sum(expected)


def _late_ones_do_not_age(self: Slo, waiting: Ranked) -> float:
    return waiting.place + 1e9


def _held_for_longer(place: float, one: LatencyClass) -> float:
    return place + 3 * policy.AGEING_MS / one.weight


def _by_target(self: Slo, message: Enqueue, now_ms: float, expected: Expected) -> float:
    return self._classes[self.join(message)].ttft_ms or policy.AGEING_MS


def _interrupt_each_other(self: Shortest, waiting: Ranked, running: Ranked, stake: Stake) -> bool:
    return waiting.place != running.place


def _take_every_request(self: Scheduler, message):
    refusal = _refusal(self, message)
    return None if refusal is not None and refusal.kind == "queue_full" else refusal


def _no_limit_in_flight(self: Scheduler) -> StepPlan | None:
    in_flight = self._in_flight
    applied = in_flight[0].step - 1 if in_flight else self.step
    return self._send(self._planner.build(Turn(self.step + 1, applied, len(in_flight))))


def _never_removed(self: PrefixCache):
    return [event for event in _prefix_events(self) if not isinstance(event, kv_events.Removed)]


def _accept_one_too_many(self: FakeWorker, state: FakeRow, draft_tokens: list[int]) -> list[int]:
    tokens = _speculate(self, state, draft_tokens)
    if len(tokens) <= len(draft_tokens):
        state.num_computed += 1
        state.ids.append(next_token(self._reads(state, len(state.ids)), state.sampling.seed))
        tokens.append(state.ids[-1])
    return tokens


def _keep_the_bound(requests, nums, most: int, tokens):
    left = _apply_drafted(requests, nums, most, tokens)
    for request, num in zip(requests, nums, strict=True):
        if request.state is State.RUNNING:
            request.roll_back(num - most)
    return left


def _plan_uncounted(self: Request, num: int, num_sampled: int) -> None:
    _request_plan(self, num, num_sampled)
    self.num_in_flight -= 1


def _plan_each_without_tokens(requests, num: int = 1) -> None:
    for request in requests:
        request.plan(num, num - 1)


def _apply_each_and_more(requests, tokens):
    left = _apply_each(requests, tokens)
    for request in requests:
        request.num_computed += 1
    return left


def _apply_without_check(self: Request, num: int, tokens) -> None:
    _request_apply(self, num, tokens)
    self.next_check = self.num_needed + 1  # the request never ends


def _discard_nothing(self: Request, num: int = 0, num_sampled: int = 0) -> None:
    self.num_in_flight -= 1


def _admit_further(self: Request, row: int, tables: list[Table], num_blocks: int, **more: int) -> None:
    _request_admit(self, row, tables, num_blocks, **more)
    if self.num_computed + 1 < len(self.ids) and self.num_computed < num_blocks * self.block_size:
        self.num_computed += 1
        self.num_planned += 1


def _grow_unnoticed(self: Request, num: int, blocks) -> None:
    for table, new in zip(self.tables, blocks, strict=True):
        table.blocks += new
    self.num_blocks += num


def _set_back_but_open(self: Request, num: int) -> None:
    is_open = self.is_open
    _request_set_back(self, num)
    self.is_open = is_open


def _preempt_but_run(self: Request) -> None:
    """A preempted request is still planned."""
    _request_preempt(self)
    self.state = State.RUNNING


def _end_unnoticed(self: Request) -> None:
    self.state = State.ENDED  # its row keeps the values that `_settle` computed


def _forget_but_row(self: Request) -> None:
    row = self.row
    _request_forget(self)
    self.row = row


def _reset_but_flights(self: Request) -> None:
    self._forget()


def _loaded_but_in_flight(self: Request, num_good: int) -> None:
    _request_loaded(self, num_good)
    self.num_in_flight += 1


def _open_again(self: Request) -> bool:
    is_first = _request_open(self)
    self.is_open = False
    return is_first


def _offer_draft_tokens(self: RequestTable, request: Request) -> None:
    if request.row >= 0 and request.num_computed < min(len(request.ids), request.num_blocks * request.block_size):
        request.num_computed += 1  # its last id has no KV, but a rejected draft token may have some
        request.num_planned = max(request.num_planned, request.num_computed)
    _table_release(self, request)


def _speculate_for_free(self: Planner, builder: PlanBuilder, running: list[Request]) -> list[Request]:
    others = _plan_speculative(self, builder, running)
    builder.budget += builder.num_speculative * builder.speculate
    return others


def _speculate_without_blocks(self: Planner, builder: PlanBuilder, running: list[Request]) -> list[Request]:
    others = _plan_speculative(self, builder, running)
    del builder.grow_rows[:], builder.grow_blocks[:]
    return others


def _speculate_for_all(self: Request, message, **more) -> None:
    _request_init(self, message, **more)
    self.may_speculate = True


def _sample_without_a_mask(self: Request, message, **more) -> None:
    _request_init(self, message, **more)
    self.num_allowed = 10**9


def _any_mask_for_any_token(self: Request, mask: bytes) -> None:
    self.num_allowed = 10**9  # one mask holds for all later tokens
    self.mask = mask


def _last_late_step_first(self: Request) -> int | None:
    return self.late.pop() if self.late else None


def _expect_no_more_masks(self: Request, may_be_late: bool) -> None:
    self.may_be_late = may_be_late
    if may_be_late:
        self.num_allowed = 10**9


def _forget_late_rows(self: PlanBuilder, *more) -> StepPlan:
    return replace(_builder_finish(self, *more), late_rows=b"")


def _start_again_late(self: RequestTable, request: Request) -> None:
    late, request.late = request.late, []
    _table_start_again(self, request)
    request.late = late


def _drop_late_unspoiled(self: Request) -> list[int]:
    steps, self.late = self.late, []
    return steps


def _wait_for_dropped_plans(self: Request, num: int) -> None:
    late = self.late
    _request_set_back(self, num)
    self.late = late


def _drop_a_block_early(self: Request, groups: Groups) -> list[int]:
    computed, self.num_computed = self.num_computed, self.num_computed + self.block_size
    dropped = _drop_behind(self, groups)
    self.num_computed = computed
    return dropped


def _drop_by_planned_positions(self: Request, groups: Groups) -> list[int]:
    computed, self.num_computed = self.num_computed, self.num_planned
    dropped = _drop_behind(self, groups)
    self.num_computed = computed
    return dropped


def _restores_the_longest(self: _Lookup, num: int) -> bool:
    """A prefix is found if one of the groups has it."""
    self._present = {group: list(range(self.run + 1)) for group in self._present}
    return _restores(self, num)


def _chunk_one_too_late(self: Groups, group: int, position: int) -> int:
    first = _need_from(self, group, position)
    return min(position, first + 1) if self.shapes[group].kind == "chunk" else first


def _copy_in_one_group(self: PlanBuilder, source: list[int], target: list[int]) -> None:
    if not self.copies:
        _builder_copy(self, source, target)


def _grow_only_one_group(self: PlanBuilder, rows: list[int], group: int, pages: list[int]) -> None:
    if not group:
        _builder_grow(self, rows, group, pages)


def _free_the_first_page(self: BlockPool, block: int) -> None:
    self._empty.append(block)


def _free_all_but_one_page(self: BlockPool, block: int) -> None:
    self._empty += [block, *self._rest.pop(block, ())][:1]


def _find_behind_the_state(self: PrefixCache, request: Request, **more):
    found = _prefix_find(self, request, **more)
    may_move = found.state is not None and found.num % self._block_size and found.num + 1 < len(request.ids)
    return found._replace(num=found.num + 1) if may_move else found


def _any_state_behind_the_block(self: _Lookup, behind: bytes, place: int, rest: int) -> bytes:
    return next(key for key, own in self._pool.standing[behind].items() if own == rest)


def _find_without_state(self: _Lookup) -> tuple[int, bytes]:
    return self.longest(copies=False), b""


def _commit_while_planning(self: Planner, builder: PlanBuilder, request: Request, start: int) -> None:
    num = len(builder.kept)
    _planner_keep(self, builder, request, start)
    for kept in builder.kept[num:]:
        self._prefix.commit_state(request, kept.slot, kept.position)


def _commit_the_state_in_flight(self: RequestTable, request: Request, terminal: Tokens | Failed) -> None:
    if request.slot >= 0 and not request.is_spoiled:
        self._prefix.commit_state(request, request.slot, request.num_computed)
    _table_end(self, request, terminal)


def _write_where_it_was_found(self: Request, slot: int, slot_from: int, key: bytes, junction: int) -> None:
    _give_state(self, slot if slot_from < 0 else slot_from, slot_from, key, junction)


def _start_from_zero(self: Request, slot: int, slot_from: int, key: bytes, junction: int) -> None:
    _give_state(self, slot, -1, key, junction)


def _forget_all_but_states(self: BlockPool) -> None:
    names = {name: b for name, b in self._by_name.items() if self._group[b] == self.groups.state and b in self._idle}
    self._by_name = {name: block for name, block in self._by_name.items() if name not in names}
    standing, self.standing = self.standing, {k: dict(v) for k, v in self.standing.items()}
    idle = {block: self._idle.pop(block) for block in names.values()}
    _forget_all(self)
    self._idle.update(idle)
    self._num_idle_pages = self.num_in(idle)
    self._by_name.update(names)
    self.standing = standing


def _advance_over_all_draft_tokens(self: FakeWorker, state: FakeRow, draft_tokens: list[int]) -> list[int]:
    tokens = _speculate(self, state, draft_tokens)
    self._write_state(state.state, state.states[-1])
    return tokens


def _keep_too_far(self: Request, start: int, end: int, interval: int, *, with_end: bool) -> list[int]:
    return [end + 1] if end < len(self.ids) else []


def _drop_the_block_alone(self: BlockPool, block: int, *, with_states: bool = True) -> None:
    _drop_key(self, block, with_states=False)


def _poison_blocks_only(request: Request, pool: BlockPool, loads: Loads | None, table: RequestTable) -> None:
    snapshots, request.snapshots = request.snapshots, []
    _poison(request, pool, loads, table)
    request.snapshots = snapshots


def _open_in_the_first_regime(self: Request, pool: BlockPool) -> RowOpen:
    return replace(_request_as_row(self, pool), regime=0)


def _one_plan_too_early(self: MicroBatches, has_prompt: bool) -> int:
    return max(1, _num_batches(self, has_prompt) - 1)


def _run_without_input(self: Stage, plan: StepPlan, hidden: Hidden | None) -> bool:
    return self.is_faulted and not plan.after_fault


def _hear_no_fault(self: Stage, sampled: Sampled) -> None:
    if not sampled.fault:
        _hear(self, sampled)


def _compute_again_in_no_plan(self: RequestTable, request: Request, num: int) -> None:
    request.set_back(num)


def _nothing(*_: object) -> None:
    """Replaces a method by nothing."""


Patch = tuple[object, str, object]

MUTANTS: dict[str, Patch] = {
    "a block leaks": (BlockPool, "release", _leak_a_block),
    "a block is owned twice": (BlockPool, "hold", _hold_nothing),
    "row and blocks are reused in flight": (RequestTable, "end", _release_in_flight),
    "blocks of a preempted request are reused in flight": (RequestTable, "preempt", _preempt_in_flight),
    "more rows are held than may be": (RequestTable, "has_free_row", property(lambda self: bool(self.free_rows))),
    "requests keep their place under another policy": (RequestTable, "follow", _nothing),
    "steps do not follow changed settings": (Planner, "change", _nothing),
    "a row leaks": (RequestTable, "release", _keep_the_row),
    "blocks are reused while the connector reads them": (RequestTable, "release", _release_what_is_read),
    "two terminal messages": (RequestTable, "end", _terminal_twice),
    "no terminal message": (RequestTable, "end", _terminal_never),
    "a key does not name the whole prefix": (request_module, "block_key", _key_without_parent),
    "a key does not name the owner": (scheduler, "root_key", lambda model, salt: root_key(model, b"")),
    "a block of another regime is found": (request_module, "regime_key", lambda root, regime: root),
    "a request does not leave its regime": (RequestTable, "change_regime", _nothing),
    "a row is opened in another regime": (Request, "as_row", _open_in_the_first_regime),
    "a block is found before it is computed": (PrefixCache, "commit", _commit_too_early),
    "a block is copied too far": (PrefixCache, "find", _copy_one_too_many),
    "a block is not copied": (PlanBuilder, "finish", _forget_copies),
    "the token budget is exceeded": (PlanBuilder, "__init__", _more_budget),
    "more plans are in flight than the depth": (Scheduler, "plan", _no_limit_in_flight),
    "a failed load is trusted": (Loads, "finish", _trust_failed_loads),
    "a request is computed while it is loaded": (Loads, "start", _compute_while_loading),
    "a tier reads a block too late": (HostCore, "build_connector_meta", _read_too_late),
    "a chain forgets failures": (ChainWorker, "get_block_ids_with_load_errors", _any_failure_of_a_chain),
    "groups share the names of their blocks": (kv_connector, "item_name", _name_without_group),
    "a block of several pages is stored in part": (StoreWorker, "_save", _store_the_first_page),
    "a block of several pages is loaded in part": (StoreWorker, "_load", _load_the_first_page),
    "a missing block of a window counts as found": (_Lookup, "_lacks", _hit_without_window),
    "a state is loaded too late": (Loads, "start", _load_states_late),
    "a loaded state is not read": (Request, "give_state", _read_another_state),
    "a tier saves a state after it moved on": (PrefixCache, "held_by", _state_moved_on),
    "a tier saves a state that a dropped plan keeps": (Scheduler, "_send", _save_while_it_is_computed),
    "a request goes on without what was not loaded": (PrefixCache, "restorable", _forget_the_rest_of_a_failed_load),
    "the prefix cache outlives its worker": (BlockPool, "forget_all", _nothing),
    "the host tier outlives its worker": (HostCore, "reset", _nothing),
    "resumed output becomes prompt": (Request, "__init__", _resume_as_prompt),
    "all choices are the same": (Request, "__init__", _same_sampling_for_all_choices),
    "one token too many": (Request, "__init__", _one_token_more),
    "a stop token is ignored": (Request, "__init__", _ignore_stops),
    "prompt log-probabilities come twice": (Request, "take_undelivered", lambda self, start, logprobs: logprobs),
    "the first of the queue is preempted": (planner, "choose_victim", _preempt_the_first),
    "the last of the queue is admitted first": (Waiting, "first", _last_comes_first),
    "tenants are served in the order of arrival": (Waiting, "first", _by_arrival),
    "a long request does not age": (Shortest, "place", _without_ageing),
    "a long request ages too slowly": (policy, "patience_ms", _as_patient_as_it_is_long),
    "requests interrupt each other in turns": (Shortest, "interrupts", _interrupt_each_other),
    "a late request does not age": (Slo, "late_place", _late_ones_do_not_age),
    "a share holds a request back for ever": (policy, "held_until_ms", lambda place, one: place + 1e9),
    "a share holds a request back too long": (policy, "held_until_ms", _held_for_longer),
    "the class alone decides": (Slo, "place", _by_target),
    "the queue has no bound": (Scheduler, "refusal", _take_every_request),
    "a router is not told of removed blocks": (PrefixCache, "take_events", _never_removed),
    "a wrong draft token is accepted": (FakeWorker, "_speculate", _accept_one_too_many),
    "the bound of rejected draft tokens stays": (Request, "apply_drafted", staticmethod(_keep_the_bound)),
    "a plan in flight is not counted": (Request, "plan", _plan_uncounted),
    "a decode row samples no token": (Request, "plan_each", staticmethod(_plan_each_without_tokens)),
    "a decode row gets further than it was planned": (Request, "apply_each", staticmethod(_apply_each_and_more)),
    "a decode row misses its end": (Request, "apply", _apply_without_check),
    "a discarded step stays planned": (Request, "discard", _discard_nothing),
    "a position is skipped at admission": (Request, "admit", _admit_further),
    "a new block does not count": (Request, "grow", _grow_unnoticed),
    "a row is not opened again after a step without memory": (Request, "set_back", _set_back_but_open),
    "a preempted request is planned": (Request, "preempt", _preempt_but_run),
    "an ended request is planned": (Request, "end", _end_unnoticed),
    "a waiting request keeps its row": (Request, "_forget", _forget_but_row),
    "plans of a lost worker stay in flight": (Request, "reset", _reset_but_flights),
    "a finished load stays in flight": (Request, "loaded", _loaded_but_in_flight),
    "a row is opened with every chunk": (Request, "open", _open_again),
    "tokens after the end are delivered": (scheduler, "num_until_end", lambda tokens, stops: len(tokens)),
    "the KV of a rejected draft token is cached": (RequestTable, "release", _offer_draft_tokens),
    "draft tokens cost no budget": (Planner, "_plan_speculative", _speculate_for_free),
    "draft tokens have no blocks": (Planner, "_plan_speculative", _speculate_without_blocks),
    "a constrained request samples while it is in flight": (Request, "__init__", _sample_without_a_mask),
    "a mask holds for more than one token": (Request, "allow", _any_mask_for_any_token),
    "a late row gets the mask of another position": (Request, "take_late", _last_late_step_first),
    "a late row samples with the mask before": (Request, "let_be_late", _expect_no_more_masks),
    "a late row samples without its mask": (PlanBuilder, "finish", _forget_late_rows),
    "a plan waits for a row that was cancelled": (Constraints, "free", _nothing),
    "a plan waits for a row that starts again": (RequestTable, "start_again", _start_again_late),
    "a plan waits for a plan that was dropped": (Request, "set_back", _wait_for_dropped_plans),
    "a token without its mask counts": (Request, "take_back", _nothing),
    "a state moves on over tokens without masks": (Request, "drop_late", _drop_late_unspoiled),
    "a grammar is not told what was sampled": (Constraints, "sampled", _nothing),
    "a grammar is followed after the end": (Constraints, "end", _nothing),
    "blocks of a step without memory are found": (BlockPool, "forget", _nothing),
    "a step without memory counts as computed": (InFlight, "emptied", lambda self: self),
    "plans continue after a step without memory": (PlanBuilder, "finish", _know_every_fault),
    "a row with log-probabilities gets draft tokens": (Request, "__init__", _speculate_for_all),
    "a block of a window is released early": (Request, "drop_behind", _drop_a_block_early),
    "a window is released by planned positions": (Request, "drop_behind", _drop_by_planned_positions),
    "a row goes on behind a released block": (Request, "has_dropped", lambda self, groups: False),
    "a prefix is found that one group lacks": (_Lookup, "restores", _restores_the_longest),
    "a chunk begins one position late": (Groups, "need_from", _chunk_one_too_late),
    "a block is copied in one group only": (PlanBuilder, "copy", _copy_in_one_group),
    "a table grows in one group only": (PlanBuilder, "grow", _grow_only_one_group),
    "a block is freed in part": (BlockPool, "_empty_out", _free_the_first_page),
    "pages of a block leak": (BlockPool, "_empty_out", _free_all_but_one_page),
    "a state is found at the next position": (PrefixCache, "find", _find_behind_the_state),
    "a state of other tokens is found": (_Lookup, "_key_behind", _any_state_behind_the_block),
    "a prefix is found without its state": (_Lookup, "longest_state", _find_without_state),
    "a state is found before its pass": (Planner, "_keep", _commit_while_planning),
    "a state is named by the applied position": (Request, "settle_end", _nothing),
    "a state is found while it is written": (RequestTable, "end", _commit_the_state_in_flight),
    "a state is written where it was found": (Request, "give_state", _write_where_it_was_found),
    "a state that was found is not read": (Request, "give_state", _start_from_zero),
    "a state outlives a dropped pass": (Request, "spoil", _nothing),
    "a state outlives its worker": (BlockPool, "forget_all", _forget_all_but_states),
    "a state moves on over rejected draft tokens": (FakeWorker, "_speculate", _advance_over_all_draft_tokens),
    "tokens behind the end are not noted": (Request, "run_on", _nothing),
    "a state is kept where nothing was computed": (Request, "keep_positions", _keep_too_far),
    "a state outlives the block before it": (BlockPool, "_drop_key", _drop_the_block_alone),
    "a poisoned state is found": (scheduler, "poison", _poison_blocks_only),
}


MUTANTS_OF_STAGES: dict[str, Patch] = {
    "the first stage does not wait for ids": (Stage, "knows", lambda self, plan: True),
    "ids of an earlier owner of a row count": (Stage, "_is_of", lambda self, row, step: True),
    "a later stage runs a plan without memory": (Stage, "is_dropped", _run_without_input),
    "the first stage waits for ids of a dropped plan": (Stage, "hear", _hear_no_fault),
    "a row is in two micro-batches": (MicroBatches, "leave", _nothing),
    "a row is planned too early": (MicroBatches, "_num_batches", _one_plan_too_early),
    "a mask comes and its row stays where it is": (MicroBatches, "allow", _nothing),
    "a row of a dropped plan is in no other": (RequestTable, "compute_again", _compute_again_in_no_plan),
    "row and blocks return before the last stage": (RequestTable, "end", _release_in_flight),
    "more plans are in flight than the depth": MUTANTS["more plans are in flight than the depth"],
    "a step without memory counts as computed": MUTANTS["a step without memory counts as computed"],
}
"""Faults that histories with several stages must find."""


def _find_a_part(self: PrefixCache, request: Request) -> tuple[int, ...]:
    assert self._pool.groups.cross is not None
    return tuple(self._pool.match(request.encoded.keys(request.root, self._block_size), self._pool.groups.cross))


def _trust_what_was_given(self: Encoded, blocks: list[int], *, is_there: bool) -> None:
    _encoded_give(self, blocks, is_there=True)


def _pages_of_other_blocks(self: Request, pool: BlockPool) -> RowOpen:
    row = _request_as_row(self, pool)
    pages = bytes_to_ids(row.cross)
    return replace(row, cross=ids_to_bytes(pages[::-1]))


def _root_without_prompt(self: Scheduler, message: Enqueue) -> bytes:
    return root_key(self.model_key, message.salt)


MUTANTS_OF_ENCODERS: dict[str, Patch] = {
    "a part of an encoder's result counts as found": (PrefixCache, "_find_cross", _find_a_part),
    "an encoder's result counts as found": (Encoded, "give", _trust_what_was_given),
    "an encoder's result of a dropped plan counts": (Encoded, "lose", _nothing),
    "a preempted request keeps its encoder's result": (Encoded, "leave", _nothing),
    "the pages of an encoder's result are out of order": (Request, "as_row", _pages_of_other_blocks),
    "a key of the decoder does not name what the encoder reads": (Scheduler, "root_of", _root_without_prompt),
    "an encoder's result needs no pages": (Groups, "cross_pages", lambda self, num, size: 0),
    "blocks of a step without memory are found": MUTANTS["blocks of a step without memory are found"],
    "a block leaks": MUTANTS["a block leaks"],
    "a block is owned twice": MUTANTS["a block is owned twice"],
}
"""Faults that histories of models with an encoder must find."""


@contextmanager
def mutated(name: str) -> Iterator[None]:
    """Runs the block with this fault in the engine."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(*({**MUTANTS, **MUTANTS_OF_STAGES, **MUTANTS_OF_ENCODERS}[name])))
        yield
