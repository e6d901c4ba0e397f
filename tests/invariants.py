"""Every invariant of the scheduler and its pool, for tests and simulation: a function each, linear in what it looks at.

They hold between any two calls of the scheduler, whatever the calls were.
"""

from collections.abc import Iterable

from pagewire.engine.core.request import Request, State
from pagewire.engine.core.scheduler import Scheduler


class Touched:
    """What the plans and loads in flight do, request by request."""

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
        everyone = (*table.requests.values(), *table.running, *self.requests.values(), *self.loading.values())
        self.everyone = {id(r): r for r in everyone}.values()

    def _add(self, request: Request, count: int, sample: int) -> None:
        key = id(request)
        self.requests[key] = request
        self.num_steps[key] = self.num_steps.get(key, 0) + 1
        self.num_positions[key] = self.num_positions.get(key, 0) + count
        self.num_sampled[key] = self.num_sampled.get(key, 0) + sample


def check(scheduler: Scheduler, num_rows: int | None = None) -> None:
    """All of them. `num_rows`: how many there are, if the caller knows."""
    touched = Touched(scheduler)
    blocks_have_their_holders(scheduler, touched)
    rows_are_owned(scheduler, touched, num_rows)
    only_what_is_in_flight_is_counted(touched)
    nothing_is_let_go_in_flight(scheduler, touched)
    states_hold_what_they_may(scheduler, touched)
    positions_are_in_order(scheduler, touched)
    tokens_in_flight_have_a_place(touched)
    blocks_are_named_as_their_table(scheduler, touched)
    lines_hold_who_waits(scheduler)


def blocks_have_their_holders(scheduler: Scheduler, touched: Touched) -> None:
    """Each block is held, idle or empty, and its count is the number of tables that it is in."""
    tables = [r.blocks for r in touched.everyone if r.row >= 0]
    scheduler.pool.check([*tables, *scheduler.table.held.values()])
    assert not any(r.blocks for r in touched.everyone if r.row < 0), "blocks without a row"


def rows_are_owned(scheduler: Scheduler, touched: Touched, num_rows: int | None) -> None:
    """Each row is free or has one owner."""
    free = scheduler.table.free_rows
    rows = sorted([*free, *(r.row for r in touched.everyone if r.row >= 0)])
    assert rows == list(range(len(rows) if num_rows is None else num_rows)), "a row is lost or held twice"


def only_what_is_in_flight_is_counted(touched: Touched) -> None:
    """A request counts the plans and loads in flight that touch it."""
    for request in touched.everyone:
        due = touched.num_steps.get(id(request), 0) + (id(request) in touched.loading)
        assert request.num_in_flight == due, f"in-flight count of {request.rid} is {request.num_in_flight}, not {due}"


def nothing_is_let_go_in_flight(scheduler: Scheduler, touched: Touched) -> None:
    """Row and blocks stay while something in flight touches them."""
    for request in touched.everyone:
        assert request.num_in_flight == 0 or request.row >= 0, "a row was given back while in flight"
        needed = request.num_computed + touched.num_positions.get(id(request), 0)
        assert request.num_in_flight == 0 or len(request.blocks) * scheduler.block_size >= needed, "blocks were too"


def states_hold_what_they_may(scheduler: Scheduler, touched: Touched) -> None:
    """Waiting requests hold nothing; running, loading and leaving ones hold a row; ended ones are forgotten."""
    table = scheduler.table
    for request in touched.everyone:
        assert (table.requests.get(request.rid) is request) == (request.state is not State.ENDED), "ended but kept"
        if request.state is State.WAITING:
            assert request.row < 0 and not request.blocks, "a waiting request holds something"
        elif request.state is not State.ENDED:
            assert request.row >= 0, f"a {request.state.value} request has no row"
        if request.state is State.LOADING:
            assert id(request) in touched.loading, "no load is under way for it"
            assert id(request) not in touched.requests, "a request is computed while it is loaded"
    assert table.num_leaving == sum(r.state is State.LEAVING for r in touched.everyone), "who leaves is miscounted"


def positions_are_in_order(scheduler: Scheduler, touched: Touched) -> None:
    """computed ≤ planned ≤ total ≤ what was asked for, and blocks for all that is planned, draft tokens included."""
    for r in touched.everyone:
        if r.state in (State.WAITING, State.ENDED):
            continue
        assert 0 <= r.num_computed <= r.num_planned <= r.num_total <= scheduler.max_model_len, r.rid
        assert r.num_planned - r.num_computed == touched.num_positions.get(id(r), 0), "a position is in no plan"
        assert len(r.blocks) * scheduler.block_size >= r.num_planned, "positions without blocks"
        assert r.num_planned <= r.num_needed, "a position is planned that is never needed"
        assert r.num_total <= r.max_len, "too many tokens sampled"
        assert r.num_total <= r.num_allowed, "a token was sampled before its grammar allowed one"
        if r.state is State.RUNNING and r.is_open and r.generates:
            due = -1 if r.is_constrained else min(r.num_needed, len(r.blocks) * scheduler.block_size)
            assert r.fast_limit == due, "its fast_limit is out of date"


def tokens_in_flight_have_a_place(touched: Touched) -> None:
    """A token that is still on the device was sampled by exactly one plan in flight."""
    for r in touched.everyone:
        if r.state is not State.ENDED:
            sampled = touched.num_sampled.get(id(r), 0)
            assert r.num_total - len(r.ids) == sampled, (
                f"{r.rid}: {r.num_total} ids, {len(r.ids)} here, {sampled} on the way"
            )


def blocks_are_named_as_their_table(scheduler: Scheduler, touched: Touched) -> None:
    """A key of a block in a table is the key of that place in that table, so it was never someone else's prefix."""
    size, key_of, is_full = scheduler.block_size, scheduler.pool._key, scheduler.pool._place
    for r in touched.everyone:
        for i, block in enumerate(r.blocks):
            key = key_of[block]
            if key is not None and is_full[block] >= 0 and (i + 1) * size <= len(r.ids):
                own = r.keys[i] if i < len(r.keys) else r.block_keys(i + 1, size)[i]
                assert key == own, f"block {i} of {r.rid} has a foreign key"


def lines_hold_who_waits(scheduler: Scheduler) -> None:
    """Every waiting request stands in a line, and their tokens are counted."""
    waiting, requests = scheduler.table.waiting, scheduler.table.requests.values()
    assert {r.rid for r in waiting} == {r.rid for r in requests if r.state is State.WAITING}, "lost in line"
    assert len(waiting) == sum(1 for _ in waiting), "the waiting are miscounted"
    assert waiting.num_tokens == sum(r.max_len for r in waiting), "waiting tokens are miscounted"


def writes_are_exclusive(scheduler: Scheduler, copied_to: Iterable[int]) -> None:
    """Nothing that the newest plan writes is in a second table, or holds a full block that can be found.

    `copied_to`: the blocks that the plan copies to.
    """
    pool, size = scheduler.pool, scheduler.block_size
    flight = scheduler._in_flight[-1]
    rows = [(request, 1) for request in flight.decodes] + list(zip(flight.others, flight.counts, strict=True))
    known = Touched(scheduler)
    written: list[int] = []
    for request, count in rows:
        # Guesses of plans in flight may all turn out wrong: each plan writes one position for certain.
        draft_tokens = known.num_draft_tokens.get(id(request), 0)
        written += request.blocks[
            (request.num_planned - count - draft_tokens) // size : (request.num_planned - 1) // size + 1
        ]
    assert len(set(written)) == len(written), "two rows write one block"
    # Whose row the worker has dropped, and who does not come back to it, reads no more.
    gone = [r for r in known.everyone if r.state in (State.LEAVING, State.ENDED) and not r.is_open]
    for block in [*written, *copied_to]:
        num = pool._holders[block] - sum(block in r.blocks for r in gone)
        assert num == 1, f"block {block} is written and has {num} holders"
