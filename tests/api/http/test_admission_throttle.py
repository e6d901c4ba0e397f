"""The admission throttle: a burst enters a few requests a turn, in order, and a client that left takes no place."""

import asyncio

from pagewire.api.http.admission_throttle import MAX_PER_TURN, AdmissionThrottle


async def _burst(num: int, leaving: frozenset[int] = frozenset()) -> list[tuple[int, int]]:
    """Who came in, and in which turn of the loop. Those that leave do so in the first."""
    loop, throttle, turn, came = asyncio.get_running_loop(), AdmissionThrottle(), 0, list[tuple[int, int]]()

    def count() -> None:
        nonlocal turn
        turn += 1
        loop.call_soon(count)

    async def enter(i: int) -> None:
        await throttle.enter()
        came.append((turn, i))

    people = [asyncio.create_task(enter(i)) for i in range(num)]
    loop.call_soon(count)
    await asyncio.sleep(0)
    for i in leaving:
        people[i].cancel()
    await asyncio.wait_for(asyncio.gather(*people, return_exceptions=True), 10)
    await asyncio.wait_for(throttle.enter(), 10)  # it turns for who comes later, too
    return came


def test_who_comes_alone_does_not_wait() -> None:
    assert asyncio.run(_burst(1)) == [(0, 0)]


def test_a_burst_enters_a_few_at_a_time_and_in_order() -> None:
    came = asyncio.run(_burst(10 * MAX_PER_TURN + 1))
    assert [i for _, i in came] == list(range(10 * MAX_PER_TURN + 1))
    turns = [turn for turn, _ in came]
    assert max(map(turns.count, turns)) == MAX_PER_TURN
    assert turns[-1] - turns[0] <= 12


def test_those_who_left_take_no_place() -> None:
    leaving = frozenset(range(MAX_PER_TURN, 9 * MAX_PER_TURN))
    came = asyncio.run(_burst(10 * MAX_PER_TURN, leaving))
    assert [i for _, i in came] == [i for i in range(10 * MAX_PER_TURN) if i not in leaving]
    turns = [turn for turn, _ in came]
    assert turns[-1] - turns[0] <= 3
