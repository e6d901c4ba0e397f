"""Nothing that a request with non-finite numbers has computed is found again, in any group."""

import pytest
from fakes import FakeWorker, enqueue

from pagewire.engine.core.block_pool import BlockPool
from pagewire.engine.core.groups import Groups
from pagewire.ipc.messages import GroupShape

from .test_scheduler import BLOCK_SIZE, drain, make

FULL, WINDOW, STATE = GroupShape("full", 0, 1), GroupShape("window", 6, 2), GroupShape("state", 0, 3)


@pytest.mark.parametrize("shapes", [[FULL], [WINDOW], [FULL, WINDOW], [FULL, STATE], [STATE], [FULL, WINDOW, STATE]])
def test_nothing_of_a_poisoned_request_is_found(shapes: list[GroupShape]) -> None:
    """Its prompt takes several steps, in which blocks are released behind the window and states are kept."""
    groups = Groups(shapes, interval=8)
    scheduler = make(pool=BlockPool(num_pages=100, groups=groups), budget=8)
    worker = FakeWorker(num_blocks=100, block_size=BLOCK_SIZE, max_num_seqs=8, max_num_batched_tokens=8, groups=groups)
    worker.fail_seeds.add(1)
    scheduler.add(enqueue(1, list(range(30)), seed=1, marks=(5, 17)))
    for _ in range(3):
        plan = scheduler.plan()
        assert plan is not None
        scheduler.apply(worker.run(plan))
    assert len(scheduler.pool._by_name) > 4 and scheduler.num_running == 1
    drain(scheduler, worker)
    assert not scheduler.pool._by_name and not scheduler.pool.standing
    assert scheduler.pool.num_held == 0
