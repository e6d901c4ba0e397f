"""Calls of the server's own endpoints: how many at a time, and what an error ends."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from harness import run

from pagewire.api.output.inner_call import InnerCalls


async def _app(scope: object, receive: object, send: object) -> None:
    raise AssertionError("nothing is called")


async def _numbers(read: list[int]) -> AsyncIterator[int]:
    for number in range(100):
        read.append(number)
        yield number


def test_requests_are_read_as_others_end() -> None:
    async def work() -> None:
        read: list[int] = []
        done: list[int] = []

        async def do(number: int) -> None:
            assert len(read) - len(done) <= 4, "three at a time, and the one that waits for room"
            await asyncio.sleep(0)
            done.append(number)

        await InnerCalls(_app, most=3).for_each(_numbers(read), do)
        assert sorted(done) == read == list(range(100))

    run(work())


def test_the_first_error_ends_the_others() -> None:
    async def work() -> None:
        read: list[int] = []

        async def do(number: int) -> None:
            if number == 5:
                raise KeyError(number)
            await asyncio.sleep(0)

        with pytest.raises(KeyError):
            await InnerCalls(_app, most=2).for_each(_numbers(read), do)
        assert len(read) < 10

    run(work())
