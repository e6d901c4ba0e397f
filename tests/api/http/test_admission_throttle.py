"""The admission throttle: a burst enters a few requests a turn, in order, and a cancelled one takes no slot."""

import asyncio

from pagewire.api.http.admission_throttle import MAX_PER_TURN, AdmissionThrottle


async def _burst(num: int, leaving: frozenset[int] = frozenset()) -> list[tuple[int, int]]:
    """(turn of the loop, request) of each request that entered. Those `leaving` are cancelled in the first turn."""
    loop, throttle, turn, entered = asyncio.get_running_loop(), AdmissionThrottle(), 0, list[tuple[int, int]]()

    def count() -> None:
        nonlocal turn
        turn += 1
        loop.call_soon(count)

    async def enter(i: int) -> None:
        await throttle.enter()
        entered.append((turn, i))

    requests = [asyncio.create_task(enter(i)) for i in range(num)]
    loop.call_soon(count)
    await asyncio.sleep(0)
    for i in leaving:
        requests[i].cancel()
    await asyncio.wait_for(asyncio.gather(*requests, return_exceptions=True), 10)
    await asyncio.wait_for(throttle.enter(), 10)  # later requests enter, too
    return entered


def test_a_single_request_does_not_wait() -> None:
    assert asyncio.run(_burst(1)) == [(0, 0)]


def test_a_burst_enters_a_few_at_a_time_and_in_order() -> None:
    entered = asyncio.run(_burst(10 * MAX_PER_TURN + 1))
    assert [i for _, i in entered] == list(range(10 * MAX_PER_TURN + 1))
    turns = [turn for turn, _ in entered]
    assert max(map(turns.count, turns)) == MAX_PER_TURN
    assert turns[-1] - turns[0] <= 12


def test_cancelled_requests_take_no_slot() -> None:
    leaving = frozenset(range(MAX_PER_TURN, 9 * MAX_PER_TURN))
    entered = asyncio.run(_burst(10 * MAX_PER_TURN, leaving))
    assert [i for _, i in entered] == [i for i in range(10 * MAX_PER_TURN) if i not in leaving]
    turns = [turn for turn, _ in entered]
    assert turns[-1] - turns[0] <= 3
