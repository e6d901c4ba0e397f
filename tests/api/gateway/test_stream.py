"""A stream: its news reach their reader in order, and a reader that does not keep up gets more at once."""

import asyncio

import pytest
from harness import run

from pagewire.api.gateway.stream_backlog import MAX_BACKLOG_BYTES
from pagewire.errors import RequestError
from pagewire.ipc.messages import (
    Accepted,
    Failed,
    PromptEcho,
    TextBatch,
    Times,
    TokenLogprob,
    TopLogprob,
)

from .test_gateway import BASE, USAGE, Box, Way, chunk, order


def test_one_wake_up_for_all_news_of_a_step() -> None:
    async def work() -> None:
        box = Box()
        stream = box.gateway.submit([order(2)])
        reader = asyncio.create_task(stream.chunks())
        await asyncio.sleep(0)
        box.gateway.handle([TextBatch((chunk(BASE, "a"), chunk(BASE + 1, "b"))), TextBatch((chunk(BASE, "c"),))])
        assert [(index, c.text) for index, c in await reader] == [(0, "a"), (1, "b"), (0, "c")]

    run(work())


def test_the_short_way_is_for_news_while_the_reader_waits() -> None:
    async def work() -> None:
        box, way = Box(), Way()
        stream = box.gateway.submit([order(2)])
        box.gateway.handle([Accepted(BASE, 1), Accepted(BASE + 1, 1), TextBatch((chunk(BASE, "a"),))])
        assert [c.text for _, c in await stream.chunks(way)] == ["a"] and not way.taken
        reader = asyncio.create_task(stream.chunks(way))
        await asyncio.sleep(0)
        box.gateway.handle([TextBatch((chunk(BASE, "b"), chunk(BASE + 1, "c"))), TextBatch((chunk(BASE, "d"),))])
        assert way.taken == ["b", "c", "d"] and way.num_flushes == 1 and not reader.done()
        way.is_open = False
        box.gateway.handle([TextBatch((chunk(BASE, "e"),))])
        way.is_open = True  # too late: what follows must not overtake it
        box.gateway.handle([TextBatch((chunk(BASE, "f"),))])
        assert [c.text for _, c in await reader] == ["e", "f"] and way.num_flushes == 1

    run(work())


def test_news_for_a_client_that_does_not_keep_up_are_put_together() -> None:
    logprob = TokenLogprob(TopLogprob(1, "x", b"x", -0.5), ())
    echo, times = PromptEcho(b"", "hi"), Times(1.0, 2.0, 3.0)

    async def work() -> None:
        box = Box()
        stream = box.gateway.submit([order(2)])
        box.gateway.handle([Accepted(BASE, 1), Accepted(BASE + 1, 1)])
        first = chunk(BASE, "a", logprobs=(logprob,), prompt=echo, times=times, prompt_end="p")
        box.gateway.handle([TextBatch((first, chunk(BASE + 1, "1")))])
        box.gateway.handle([TextBatch((chunk(BASE, "b", logprobs=(logprob,)), chunk(BASE + 1, "2", "length")))])
        box.gateway.handle([TextBatch((chunk(BASE, "c", "stop", stop_reason="."),))])
        assert not stream.finished
        (zero, one), (index, other) = await stream.chunks()
        assert (zero, one.text, one.ids, one.logprobs) == (0, "abc", b"\1\0\0\0" * 3, (logprob,) * 2)
        assert (one.prompt, one.prompt_end, one.times) == (echo, "p", times)
        assert (one.finish, one.stop_reason, one.usage) == ("stop", ".", USAGE)
        assert (index, other.text, other.finish) == (1, "12", "length") and stream.finished

    run(work())


def test_much_at_once_is_no_fault_of_a_reader_that_waits() -> None:
    async def work() -> None:
        box = Box()
        stream = box.gateway.submit([order()])
        reader = asyncio.create_task(stream.chunks())
        await asyncio.sleep(0)
        box.gateway.handle([TextBatch(tuple(chunk(BASE, "x" * MAX_BACKLOG_BYTES) for _ in range(3)))])
        assert len(await reader) == 3 and not box.cancelled

    run(work())


def test_admission_waits_for_every_sequence() -> None:
    async def work() -> None:
        box = Box()
        stream = box.gateway.submit([order(3)])
        admitted = asyncio.create_task(stream.admitted())
        box.gateway.handle([Accepted(BASE, 1), TextBatch((chunk(BASE + 2),))])
        await asyncio.sleep(0)
        assert not admitted.done()
        box.gateway.handle([TextBatch((chunk(BASE + 1, finish="stop"),))])
        await admitted

    run(work())


def test_news_before_an_error_are_read_first() -> None:
    async def work() -> None:
        box = Box()
        stream = box.gateway.submit([order()])
        box.gateway.handle([TextBatch((chunk(BASE),)), Failed(BASE, "internal", "Broken.")])
        assert len(await stream.chunks()) == 1
        with pytest.raises(RequestError, match="Broken"):
            await stream.chunks()

    run(work())
