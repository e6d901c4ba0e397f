"""Which requests to preempt: when blocks run out, and when a request of a better rank waits.

Pure choices over the running requests; the planner carries them out.
"""

from collections.abc import Callable, Sequence

from .block_pool import BlockPool
from .policy import Policy, Stake
from .request import Request

_NUM_CANDIDATES = 8  # running requests whose preemption is priced when blocks run out


def order(policy: Policy) -> Callable[[Request], tuple[int, float, int]]:
    """A sort key for requests: the policy's order, then arrival."""
    return lambda request: (policy.rank(request), request.place, request.arrival)


def choose_victim(
    candidates: Sequence[Request], need: int, *, pool: BlockPool, price: Callable[[Request], float]
) -> Request | None:
    """The request that is cheapest to preempt so that `need` pages become free, among the last few `candidates`.

    The cost is the `price` of bringing its KV back, per page that is needed and freed. `candidates` are in the
    policy's order; the first is never taken, so that one request always makes progress. None if it is alone.
    """

    def cost(request: Request) -> float:
        freed = pool.num_only_held(request.held)
        return price(request) / min(freed, need) if freed else float("inf")

    return min(reversed(candidates[1:][-_NUM_CANDIDATES:]), key=cost, default=None)


def choose_interrupted(
    running: Sequence[Request],
    request: Request,
    short: int,
    has_row: bool,
    *,
    pool: BlockPool,
    policy: Policy,
    stake: Callable[[Request, Request], Stake],
) -> list[Request]:
    """Running requests that the policy allows the waiting `request` to interrupt, enough to make room for it.

    `short`: pages that are missing; `has_row`: whether a row is free; `stake`: of a waiting and a running request.
    Empty if they would not make enough room.
    """
    free = Stake(len(request.ids))  # what interrupting means if it costs nothing
    candidates = [other for other in running if policy.interrupts(request, other, free)]
    victims: list[Request] = []
    for candidate in sorted(candidates, key=order(policy), reverse=True):
        if short <= 0 and (victims or has_row):
            break
        if not policy.interrupts(request, candidate, stake(request, candidate)):
            continue
        victims.append(candidate)
        short -= pool.num_only_held(candidate.held) + pool.groups.unit  # and what was reserved for its next block
    return victims if short <= 0 else []
