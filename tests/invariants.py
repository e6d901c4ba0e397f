"""Every invariant of the scheduler and its pool, for tests and simulation. Linear in everything."""

from pagewire.engine.core.request import Request, State
from pagewire.engine.core.scheduler import Scheduler


def check(scheduler: Scheduler) -> None:
    """Asserts every invariant that holds between calls. Linear in everything; for tests and simulation."""
    in_flight: dict[int, list[Request]] = {}
    for flight in scheduler._in_flight:
        for request in flight.requests:
            in_flight.setdefault(id(request), []).append(request)
    touched = [group[0] for group in in_flight.values()]
    everyone = {id(r): r for r in [*scheduler._requests.values(), *scheduler._running, *touched]}.values()
    holding = [r for r in everyone if r.row >= 0]
    scheduler.pool.check([r.blocks for r in holding])
    rows = [r.row for r in holding]
    assert sorted(rows + scheduler._free_rows) == list(range(scheduler.max_num_seqs)), "a row is lost or held twice"
    for request in everyone:
        assert request.num_in_flight == len(in_flight.get(id(request), [])), "in-flight count is wrong"
        assert request.num_in_flight == 0 or request.row >= 0, "a row was given back while in flight"
        assert (request.rid in scheduler._requests) == (request.state is not State.ENDED), "ended but kept, or lost"
        if request.state is State.WAITING:
            assert request.row < 0 and not request.blocks, "a waiting request holds something"
            assert request.num_total == len(request.ids), "a waiting request has tokens in flight"
        elif request.state is not State.ENDED:
            assert request.row >= 0, "a running request has no row"
            assert len(request.blocks) * scheduler.block_size >= request.num_planned, "positions without blocks"
            assert 0 <= request.num_computed <= request.num_planned <= request.num_total
            assert request.num_total <= request.num_prompt + request.max_tokens, "too many tokens drawn"
    assert {r.rid for r in scheduler._waiting} == {r.rid for r in scheduler._requests.values() if r.row < 0}
    assert scheduler._waiting.num_tokens == sum(len(r.ids) for r in scheduler._waiting), "waiting tokens are miscounted"
