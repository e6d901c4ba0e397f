"""The gateway: news reach their streams, every rid ends once, the engine hears of a leaving client once."""

import asyncio
from typing import Any

import pytest
from harness import run

from pagewire.api.gateway.gateway import Gateway
from pagewire.api.http.exchange import ClientGone
from pagewire.errors import RequestError
from pagewire.ipc.messages import (
    Accepted,
    Cancel,
    Chunk,
    Describe,
    Detokenize,
    Failed,
    Limits,
    Sampling,
    Snapshot,
    Submit,
    TextBatch,
    TextPrompt,
    TextSpec,
    Tokenize,
    Usage,
)

USAGE = Usage(1, 1, 0)


def order(n: int = 1) -> Submit:
    return Submit(0, n, TextPrompt("x"), Sampling(), Limits(), TextSpec())


def chunk(rid: int, text: str = "x", finish: str | None = None, **more: Any) -> Chunk:
    usage = USAGE if finish else None
    return Chunk(rid, text, b"\1\0\0\0", finish=finish, usage=usage, **more)  # type: ignore[arg-type]


class Box:
    """A gateway and what it posted."""

    def __init__(self) -> None:
        self.posted: list[Submit | Cancel | Tokenize | Detokenize | Describe] = []
        self.now = 0.0
        self.gateway = Gateway(self.posted.append, api_index=2, clock=lambda: self.now)

    @property
    def cancelled(self) -> list[tuple[int, ...]]:
        return [message.rids for message in self.posted if isinstance(message, Cancel)]


BASE = 2 << 40


def test_rids_hold_the_api_index() -> None:
    box = Box()
    box.gateway.submit([order(2), order(1)])
    box.gateway.submit([order()])
    assert [m.rid for m in box.posted if isinstance(m, Submit)] == [BASE, BASE + 2, BASE + 3]
    assert box.gateway.num_open == 4


class Way:
    """A short way that takes news while it is open."""

    def __init__(self) -> None:
        self.is_open = True
        self.taken: list[str] = []
        self.num_flushes = 0

    def take(self, index: int, chunk: Chunk) -> bool:
        if self.is_open:
            self.taken.append(chunk.text)
        return self.is_open

    def flush(self) -> None:
        self.num_flushes += 1


def test_what_the_engine_would_refuse_is_not_sent_there() -> None:
    posted: list[object] = []
    gateway = Gateway(posted.append, most_open=4)
    gateway.submit([order(5)])  # alone, it is the engine's to say
    gateway = Gateway(posted.append, most_open=4)
    gateway.submit([order(3)])
    with pytest.raises(RequestError, match="3 sequences") as error:
        gateway.submit([order(), order()])
    assert error.value.kind == "queue_full" and len(posted) == 2 and gateway.stats.errors["queue_full"] == 2
    gateway.submit([order()])


def test_when_to_come_again_is_how_long_the_others_take() -> None:
    box = Box()
    box.gateway.submit([order(30)])
    assert box.gateway.retry_after_s == 1
    for i in range(10):
        box.now += 0.5
        box.gateway.handle([TextBatch((chunk(BASE + i, finish="stop"),))])
    assert box.gateway.retry_after_s == 10, "twenty are left, two a second"
    box.gateway.handle([Snapshot(1, 10, 50, 0, 0, 0, 0, 0, 0, 0.0)])
    assert box.gateway.retry_after_s == 30, "other clients' requests are before us, too"


def test_a_refusal_ends_the_others() -> None:
    async def work() -> None:
        box = Box()
        stream = box.gateway.submit([order(3)])
        box.gateway.handle([Accepted(BASE, 1), Failed(BASE + 1, "queue_full", "Full.")])
        with pytest.raises(RequestError, match="Full") as error:
            await stream.admitted()
        assert error.value.kind == "queue_full"
        assert box.cancelled == [(BASE, BASE + 2)] and box.gateway.num_open == 0
        stream.cancel()
        assert len(box.cancelled) == 1

    run(work())


def test_cancel_names_what_is_open_once() -> None:
    async def work() -> None:
        box = Box()
        stream = box.gateway.submit([order(2)])
        box.gateway.handle([TextBatch((chunk(BASE, finish="stop"),))])
        stream.cancel()
        stream.cancel()
        assert box.cancelled == [(BASE + 1,)]
        with pytest.raises(ClientGone):
            await stream.chunks()
        box.gateway.handle([TextBatch((chunk(BASE + 1),)), Failed(BASE + 1, "internal", "late"), Accepted(BASE + 1, 1)])

    run(work())


def test_a_finished_stream_cancels_nothing() -> None:
    async def work() -> None:
        box = Box()
        stream = box.gateway.submit([order()])
        box.gateway.handle([TextBatch((chunk(BASE, finish="length"),))])
        assert not stream.finished
        assert len(await stream.chunks()) == 1 and stream.finished
        stream.cancel()
        assert box.cancelled == []

    run(work())


def test_an_abort_that_nobody_asked_for_is_no_success() -> None:
    async def work() -> None:
        box = Box()
        stream = box.gateway.submit([order()])
        box.gateway.handle([TextBatch((chunk(BASE, finish="abort"),))])
        with pytest.raises(RequestError):
            await stream.chunks()

    run(work())


def test_close_ends_everything_and_refuses_more() -> None:
    async def work() -> None:
        box = Box()
        streams = [box.gateway.submit([order(2)]) for _ in range(3)]
        box.gateway.close("The server is shutting down.")
        for stream in streams:
            with pytest.raises(RequestError, match="shutting down"):
                await stream.chunks()
        assert box.cancelled == [(BASE, BASE + 1), (BASE + 2, BASE + 3), (BASE + 4, BASE + 5)]
        with pytest.raises(RequestError, match="shutting down"):
            box.gateway.submit([order()])

    run(work())


def test_draining_lets_open_requests_go_on() -> None:
    async def work() -> None:
        box = Box()
        stream = box.gateway.submit([order()])
        box.gateway.refuse("The server is shutting down.")
        with pytest.raises(RequestError):
            box.gateway.submit([order()])
        drained = asyncio.create_task(box.gateway.drained())
        await asyncio.sleep(0)
        assert not drained.done()
        box.gateway.handle([TextBatch((chunk(BASE, finish="stop"),))])
        await drained
        assert len(await stream.chunks()) == 1

    run(work())
