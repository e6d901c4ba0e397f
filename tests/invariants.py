"""The invariants of the scheduler and its pool, for tests and simulation. Each is a function of linear time.

They hold between any two calls of the scheduler.
"""

from collections import Counter
from collections.abc import Iterable

from pagewire.engine.core.request import Request, State
from pagewire.engine.core.scheduler import Scheduler


class Touched:
    """The work of the plans and loads in flight, by request."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.requests: dict[int, Request] = {}  # by id(): an ended request's rid may be in use again
        self.num_steps: dict[int, int] = {}
        self.num_positions: dict[int, int] = {}
        self.num_sampled: dict[int, int] = {}
        self.num_draft_tokens: dict[int, int] = {}
        for flight in scheduler._in_flight:
            for i, request in enumerate(flight.decodes):
                most = 1 + flight.speculate * (i < flight.num_speculative)
                self._add(request, most, most)
                self.num_draft_tokens[id(request)] = self.num_draft_tokens.get(id(request), 0) + most - 1
            for request, count, sample in zip(flight.others, flight.counts, flight.sample, strict=True):
                self._add(request, count, sample)
        self.loading = {} if scheduler._loads is None else {id(r): r for r, _ in scheduler._loads._requests.values()}
        table = scheduler.table
        all_requests = (*table.requests.values(), *table.running, *self.requests.values(), *self.loading.values())
        self.all_requests = {id(r): r for r in all_requests}.values()

    def _add(self, request: Request, count: int, sample: int) -> None:
        key = id(request)
        self.requests[key] = request
        self.num_steps[key] = self.num_steps.get(key, 0) + 1
        self.num_positions[key] = self.num_positions.get(key, 0) + count
        self.num_sampled[key] = self.num_sampled.get(key, 0) + sample


def check(scheduler: Scheduler, num_rows: int | None = None) -> None:
    """Asserts every invariant. `num_rows`: the number of rows, if the caller knows it."""
    touched = Touched(scheduler)
    holder_counts_match_block_tables(scheduler, touched)
    rows_are_owned(scheduler, touched, num_rows)
    states_have_one_holder(scheduler, touched)
    prompts_have_room_for_what_is_read(scheduler, touched)
    in_flight_counts_match(touched)
    late_masks_are_due(scheduler, touched)
    rows_and_blocks_stay_while_in_flight(scheduler, touched)
    states_match_what_requests_hold(scheduler, touched)
    positions_are_in_order(scheduler, touched)
    tokens_in_flight_are_counted(touched)
    keys_of_blocks_match_block_tables(scheduler, touched)
    waiting_requests_are_queued(scheduler)
    micro_batches_hold_each_row_once(scheduler)


def holder_counts_match_block_tables(scheduler: Scheduler, touched: Touched) -> None:
    """Each block is held, idle or empty, and its count is the number of block tables that it is in."""
    tables = [r.held for r in touched.all_requests if r.row >= 0]
    scheduler.pool.check([*tables, *scheduler.table.held.values()])
    assert not any(r.tables for r in touched.all_requests if r.row < 0), "blocks without a row"


def states_have_one_holder(scheduler: Scheduler, touched: Touched) -> None:
    """Each row of a model with recurrent states has one of its own, which no other request finds."""
    pool = scheduler.pool
    for request in touched.all_requests:
        assert (request.slot >= 0) == (request.row >= 0 and pool.groups.state is not None), "a row without a state"
        if request.slot >= 0:
            assert pool._holders[request.slot] == 1 and pool._group[request.slot] == pool.groups.state, "a shared state"
            assert pool._key[request.slot] is None, "a state is found while it is written"


def prompts_have_room_for_what_is_read(scheduler: Scheduler, touched: Touched) -> None:
    """Each row of a model with an encoder has blocks for all of the prompt, and neither more nor fewer."""
    pool = scheduler.pool
    for request in touched.all_requests:
        num = pool.groups.cross_blocks(len(request.encoded), scheduler.block_size) if request.row >= 0 else 0
        assert len(request.encoded.blocks) == num, "the encoder's result has another size than the prompt"
        assert all(pool._group[block] == pool.groups.cross for block in request.encoded.blocks), "of another group"


def rows_are_owned(scheduler: Scheduler, touched: Touched, num_rows: int | None) -> None:
    """Each row is free or has one owner."""
    free = scheduler.table.free_rows
    rows = sorted([*free, *(r.row for r in touched.all_requests if r.row >= 0)])
    assert rows == list(range(len(rows) if num_rows is None else num_rows)), "a row is lost or held twice"


def in_flight_counts_match(touched: Touched) -> None:
    """The in-flight count of a request is the number of plans and loads in flight that touch it."""
    for request in touched.all_requests:
        expected = touched.num_steps.get(id(request), 0) + (id(request) in touched.loading)
        assert request.num_in_flight == expected, (
            f"in-flight count of {request.rid} is {request.num_in_flight}, not {expected}"
        )


def late_masks_are_due(scheduler: Scheduler, touched: Touched) -> None:
    """A plan in flight waits for the masks of those requests alone of which it samples a token that counts."""
    steps = {
        (id(request), flight.step)
        for flight in scheduler._in_flight
        for request, sample in zip(flight.others, flight.sample, strict=True)
        if sample
    }
    for request in touched.all_requests:
        assert all((id(request), step) in steps for step in request.late), "a mask is due for no plan in flight"
        assert request.late == sorted(set(request.late)), "masks are due in another order than the steps"
        has_ended = request.state is State.ENDED or request.starts_again
        assert not (request.late and has_ended), "a plan waits for the mask of a token that does not count"


def rows_and_blocks_stay_while_in_flight(scheduler: Scheduler, touched: Touched) -> None:
    """Row and blocks stay while something in flight touches them."""
    for request in touched.all_requests:
        assert request.num_in_flight == 0 or request.row >= 0, "a row was freed while in flight"
        needed = request.num_computed + touched.num_positions.get(id(request), 0)
        assert request.num_in_flight == 0 or request.num_blocks * scheduler.block_size >= needed, "blocks were freed"


def states_match_what_requests_hold(scheduler: Scheduler, touched: Touched) -> None:
    """Waiting requests hold nothing; running, loading and leaving ones hold a row; ended ones are not in the table."""
    table = scheduler.table
    for request in touched.all_requests:
        assert (table.requests.get(request.rid) is request) == (request.state is not State.ENDED), "wrong in the table"
        if request.state is State.WAITING:
            assert request.row < 0 and not request.tables, "a waiting request holds something"
        elif request.state is not State.ENDED:
            assert request.row >= 0, f"a {request.state.value} request has no row"
        if request.state is State.LOADING:
            assert id(request) in touched.loading, "a loading request has no load in flight"
            assert id(request) not in touched.requests, "a request is computed while it is loaded"
    assert table.num_leaving == sum(r.state is State.LEAVING for r in touched.all_requests), "num_leaving is wrong"


def positions_are_in_order(scheduler: Scheduler, touched: Touched) -> None:
    """computed ≤ planned ≤ total ≤ requested, and blocks for all planned positions, draft tokens included."""
    for r in touched.all_requests:
        if r.state in (State.WAITING, State.ENDED):
            continue
        assert 0 <= r.num_computed <= r.num_planned <= r.num_total <= scheduler.max_model_len, r.rid
        assert r.num_planned - r.num_computed == touched.num_positions.get(id(r), 0), "a position is in no plan"
        assert all(t.first + len(t.blocks) == r.num_blocks for t in r.tables), "block tables end at different positions"
        assert r.num_blocks * scheduler.block_size >= r.num_planned, "positions without blocks"
        assert r.state in (State.LEAVING, State.LOADING) or not r.has_dropped(scheduler.pool.groups), (
            "a block is missing that is read"
        )
        assert r.num_planned <= r.num_due, "a position is planned that is never needed"
        assert r.num_total <= r.max_len, "too many tokens sampled"
        assert r.starts_again or r.num_total - len(r.late) <= r.num_allowed, (
            "a token is sampled for which no mask will come"
        )
        if r.state is State.RUNNING and r.is_open and r.generates:
            expected = -1 if r.is_constrained else min(r.num_due, r.num_blocks * scheduler.block_size)
            assert r.fast_limit == expected, "its fast_limit is out of date"


def tokens_in_flight_are_counted(touched: Touched) -> None:
    """A token that is still on the device was sampled by exactly one plan in flight."""
    for r in touched.all_requests:
        if r.state is not State.ENDED:
            sampled = touched.num_sampled.get(id(r), 0)
            assert r.num_total - len(r.ids) == sampled, (
                f"{r.rid}: {r.num_total} ids, {len(r.ids)} here, {sampled} in flight"
            )


def keys_of_blocks_match_block_tables(scheduler: Scheduler, touched: Touched) -> None:
    """The key of a block is the key of its position in each block table, so no request reads another prefix."""
    size, key_of, is_full = scheduler.block_size, scheduler.pool._key, scheduler.pool._place
    for r in touched.all_requests:
        for table in r.tables:
            for i, block in enumerate(table.blocks, start=table.first):
                key = key_of[block]
                if key is not None and is_full[block] >= 0 and (i + 1) * size <= len(r.ids):
                    own = r.keys[i] if i < len(r.keys) else r.block_keys(i + 1, size)[i]
                    assert key == own, f"block {i} of {r.rid} has the key of another prefix"


def waiting_requests_are_queued(scheduler: Scheduler) -> None:
    """Every waiting request is in the queue, and the tokens of the queue are counted."""
    waiting, requests = scheduler.table.waiting, scheduler.table.requests.values()
    assert {r.rid for r in waiting} == {r.rid for r in requests if r.state is State.WAITING}, "lost in the queue"
    assert len(waiting) == sum(1 for _ in waiting), "the length of the queue is wrong"
    assert waiting.num_tokens == sum(r.max_len + len(r.encoded) for r in waiting), (
        "the number of waiting tokens is wrong"
    )


def micro_batches_hold_each_row_once(scheduler: Scheduler) -> None:
    """With several stages each running row waits in one place for its next plan, the longest wait first."""
    batches = scheduler.micro_batches
    known = [*batches._queue, *batches._masked, *batches._prompts]
    if batches.num_stages == 1:
        assert not known, "micro-batches with one stage"
        return
    assert len(set(map(id, known))) == len(known), "a row is in two micro-batches"
    due = {id(r) for r in scheduler.table.running if r.state in (State.RUNNING, State.LOADING)}
    assert set(map(id, known)) == due, "a running row is in no micro-batch"
    assert batches._context == sum(num for _, num in (*batches._queue.values(), *batches._masked.values())), (
        "wrong context"
    )
    assert all(r.num_total >= r.num_allowed for r in batches._masked), "a row with a mask waits for one"


def writes_are_exclusive(scheduler: Scheduler, copied_to: Iterable[int]) -> None:
    """No block that the newest plan writes is in a second block table or is a full block of the prefix cache.

    `copied_to`: the blocks that the plan copies to, each by its first page.
    """
    pool, size = scheduler.pool, scheduler.block_size
    flight = scheduler._in_flight[-1]
    rows = [(request, 1) for request in flight.decodes] + list(zip(flight.others, flight.counts, strict=True))
    known = Touched(scheduler)
    written: list[int] = []
    for request, count in rows:
        # All draft tokens of plans in flight may be rejected: each plan writes at least one position.
        draft_tokens = known.num_draft_tokens.get(id(request), 0)
        first = (request.num_planned - count - draft_tokens) // size
        after = set(request.blocks_from((request.num_planned - 1) // size + 1))
        written += [block for block in request.blocks_from(first) if block not in after]
    assert len(set(written)) == len(written), "two rows write one block"
    # A leaving or ended request whose row is closed on the worker reads no more.
    closed = [r for r in known.all_requests if r.state in (State.LEAVING, State.ENDED) and not r.is_open]
    # A request that loads copies the beginning of its source later; what is written now is behind that beginning.
    sources = Counter(block for r in known.all_requests if r.state is State.LOADING for _, block in r.sources)
    for block in [*written, *copied_to]:
        num = pool._holders[block] - sum(block in r.held for r in closed) - (sources[block] if block in written else 0)
        assert num == 1, f"block {block} is written and has {num} holders"
