"""The gateway: chunks reach their streams, every rid ends once, a client that leaves is cancelled once."""

import asyncio
from typing import Any

import pytest
from harness import run
from msgspec.structs import replace

from pagewire.api.gateway.gateway import Gateway
from pagewire.api.gateway.output_buffer import MAX_UNREAD_BYTES
from pagewire.api.http.exchange import ClientGone
from pagewire.api.http.http_error import HttpError
from pagewire.errors import RequestError
from pagewire.ipc.messages import (
    Accepted,
    Cancel,
    Chunk,
    Describe,
    Detokenize,
    Failed,
    GroupSnapshot,
    Limits,
    PromptEcho,
    Reset,
    Restored,
    Sampling,
    Snapshot,
    Submit,
    TextBatch,
    TextPrompt,
    TextSpec,
    Times,
    Tokenize,
    TokenLogprob,
    TopLogprob,
    Usage,
)

USAGE = Usage(1, 1, 0)


def make_submit(n: int = 1) -> Submit:
    return Submit(0, n, TextPrompt("x"), Sampling(), Limits(), TextSpec())


def chunk(rid: int, text: str = "x", finish: str | None = None, **more: Any) -> Chunk:
    usage = USAGE if finish else None
    return Chunk(rid, text, b"\1\0\0\0", finish=finish, usage=usage, **more)  # type: ignore[arg-type]


class Box:
    """A gateway and the messages that it posted."""

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
    box.gateway.submit([make_submit(2), make_submit(1)])
    box.gateway.submit([make_submit()])
    assert [m.rid for m in box.posted if isinstance(m, Submit)] == [BASE, BASE + 2, BASE + 3]
    assert box.gateway.num_open == 4


def test_one_wake_up_for_all_chunks_of_a_step() -> None:
    async def work() -> None:
        box = Box()
        stream = box.gateway.submit([make_submit(2)])
        reader = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        box.gateway.handle([TextBatch((chunk(BASE, "a"), chunk(BASE + 1, "b"))), TextBatch((chunk(BASE, "c"),))])
        assert [(index, c.text) for index, c in await reader] == [(0, "a"), (1, "b"), (0, "c")]

    run(work())


class Taker:
    """A consumer that takes chunks while it is open."""

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


def test_a_consumer_gets_chunks_while_the_reader_waits() -> None:
    async def work() -> None:
        box, taker = Box(), Taker()
        stream = box.gateway.submit([make_submit(2)])
        stream.consumer = taker
        box.gateway.handle([Accepted(BASE, 1), Accepted(BASE + 1, 1), TextBatch((chunk(BASE, "a"),))])
        assert [c.text for _, c in await anext(stream)] == ["a"] and not taker.taken
        reader = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        box.gateway.handle([TextBatch((chunk(BASE, "b"), chunk(BASE + 1, "c"))), TextBatch((chunk(BASE, "d"),))])
        assert taker.taken == ["b", "c", "d"] and taker.num_flushes == 1 and not reader.done()
        taker.is_open = False
        box.gateway.handle([TextBatch((chunk(BASE, "e"),))])
        taker.is_open = True  # too late: later chunks must not overtake the buffered one
        box.gateway.handle([TextBatch((chunk(BASE, "f"),))])
        assert [c.text for _, c in await reader] == ["e", "f"] and taker.num_flushes == 1

    run(work())


def test_chunks_for_a_slow_reader_are_merged() -> None:
    logprob = TokenLogprob(TopLogprob(1, "x", b"x", -0.5), ())
    echo, times = PromptEcho(b"", "hi"), Times(1.0, 2.0, 3.0)

    async def work() -> None:
        box = Box()
        stream = box.gateway.submit([make_submit(2)])
        box.gateway.handle([Accepted(BASE, 1), Accepted(BASE + 1, 1)])
        first = chunk(BASE, "a", logprobs=(logprob,), prompt=echo, times=times, prompt_end="p")
        box.gateway.handle([TextBatch((first, chunk(BASE + 1, "1")))])
        box.gateway.handle([TextBatch((chunk(BASE, "b", logprobs=(logprob,)), chunk(BASE + 1, "2", "length")))])
        box.gateway.handle([TextBatch((chunk(BASE, "c", "stop", stop_reason="."),))])
        assert not stream.finished
        (zero, one), (index, other) = await anext(stream)
        assert (zero, one.text, one.ids, one.logprobs) == (0, "abc", b"\1\0\0\0" * 3, (logprob,) * 2)
        assert (one.prompt, one.prompt_end, one.times) == (echo, "p", times)
        assert (one.finish, one.stop_reason, one.usage) == ("stop", ".", USAGE)
        assert (index, other.text, other.finish) == (1, "12", "length") and stream.finished

    run(work())


def test_the_unread_output_of_a_slow_client_is_bounded() -> None:
    async def work() -> None:
        box = Box()
        slow, other = box.gateway.submit([make_submit()]), box.gateway.submit([make_submit()])
        text = "x" * 1000
        for _ in range(MAX_UNREAD_BYTES // 1004):
            box.gateway.handle([TextBatch((chunk(BASE, text),))])
        assert not box.cancelled
        box.gateway.handle([TextBatch((chunk(BASE, text), chunk(BASE + 1)))])
        assert box.cancelled == [(BASE,)] and box.gateway.stats.aborts["client_too_slow"] == 1
        with pytest.raises(HttpError) as error:
            await anext(slow)
        assert (error.value.status, error.value.code) == (408, "client_too_slow")
        assert len(await anext(other)) == 1

    run(work())


def test_a_waiting_reader_may_get_any_amount_at_once() -> None:
    async def work() -> None:
        box = Box()
        stream = box.gateway.submit([make_submit()])
        reader = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        box.gateway.handle([TextBatch(tuple(chunk(BASE, "x" * MAX_UNREAD_BYTES) for _ in range(3)))])
        assert len(await reader) == 3 and not box.cancelled

    run(work())


def test_requests_beyond_max_open_are_refused_without_a_submit() -> None:
    posted: list[object] = []
    gateway = Gateway(posted.append, max_open=4)
    gateway.submit([make_submit(5)])  # the engine decides whether it accepts so large a request
    gateway = Gateway(posted.append, max_open=4)
    gateway.submit([make_submit(3)])
    with pytest.raises(RequestError, match="3 sequences") as error:
        gateway.submit([make_submit(), make_submit()])
    assert error.value.kind == "queue_full" and len(posted) == 2 and gateway.stats.errors["queue_full"] == 2
    gateway.submit([make_submit()])


def test_retry_after_is_how_long_the_open_requests_take() -> None:
    box = Box()
    box.gateway.submit([make_submit(30)])
    assert box.gateway.retry_after_s == 1
    for i in range(10):
        box.now += 0.5
        box.gateway.handle([TextBatch((chunk(BASE + i, finish="stop"),))])
    assert box.gateway.retry_after_s == 10, "twenty are left, two a second"
    box.gateway.handle([Snapshot(1, 10, 50, 0, 0, 0, 0, 0, 0, 0.0)])
    assert box.gateway.retry_after_s == 30, "all requests in the engine count, too"


def test_a_refused_choice_cancels_the_others() -> None:
    async def work() -> None:
        box = Box()
        stream = box.gateway.submit([make_submit(3)])
        box.gateway.handle([Accepted(BASE, 1), Failed(BASE + 1, "queue_full", "Full.")])
        with pytest.raises(RequestError, match="Full") as error:
            await stream.admitted()
        assert error.value.kind == "queue_full"
        assert box.cancelled == [(BASE, BASE + 2)] and box.gateway.num_open == 0
        stream.cancel()
        assert len(box.cancelled) == 1

    run(work())


def test_a_cancel_names_the_open_sequences_once() -> None:
    async def work() -> None:
        box = Box()
        stream = box.gateway.submit([make_submit(2)])
        box.gateway.handle([TextBatch((chunk(BASE, finish="stop"),))])
        stream.cancel()
        stream.cancel()
        assert box.cancelled == [(BASE + 1,)]
        with pytest.raises(ClientGone):
            await anext(stream)
        box.gateway.handle([TextBatch((chunk(BASE + 1),)), Failed(BASE + 1, "internal", "late"), Accepted(BASE + 1, 1)])

    run(work())


def test_a_finished_stream_cancels_nothing() -> None:
    async def work() -> None:
        box = Box()
        stream = box.gateway.submit([make_submit()])
        box.gateway.handle([TextBatch((chunk(BASE, finish="length"),))])
        assert not stream.finished
        assert len(await anext(stream)) == 1 and stream.finished
        stream.cancel()
        assert box.cancelled == []

    run(work())


def test_chunks_before_an_error_are_read_first() -> None:
    async def work() -> None:
        box = Box()
        stream = box.gateway.submit([make_submit()])
        box.gateway.handle([TextBatch((chunk(BASE),)), Failed(BASE, "internal", "Broken.")])
        assert len(await anext(stream)) == 1
        with pytest.raises(RequestError, match="Broken"):
            await anext(stream)

    run(work())


def test_an_unrequested_abort_is_an_error() -> None:
    async def work() -> None:
        box = Box()
        stream = box.gateway.submit([make_submit()])
        box.gateway.handle([TextBatch((chunk(BASE, finish="abort"),))])
        with pytest.raises(RequestError):
            await anext(stream)

    run(work())


def test_close_ends_all_streams_and_refuses_new_ones() -> None:
    async def work() -> None:
        box = Box()
        streams = [box.gateway.submit([make_submit(2)]) for _ in range(3)]
        box.gateway.close("The server is shutting down.")
        for stream in streams:
            with pytest.raises(RequestError, match="shutting down"):
                await anext(stream)
        assert box.cancelled == [(BASE, BASE + 1), (BASE + 2, BASE + 3), (BASE + 4, BASE + 5)]
        with pytest.raises(RequestError, match="shutting down"):
            box.gateway.submit([make_submit()])

    run(work())


def test_draining_lets_open_requests_finish() -> None:
    async def work() -> None:
        box = Box()
        stream = box.gateway.submit([make_submit()])
        box.gateway.refuse("The server is shutting down.")
        with pytest.raises(RequestError):
            box.gateway.submit([make_submit()])
        drained = asyncio.create_task(box.gateway.drained())
        await asyncio.sleep(0)
        assert not drained.done()
        box.gateway.handle([TextBatch((chunk(BASE, finish="stop"),))])
        await drained
        assert len(await anext(stream)) == 1

    run(work())


def test_admission_waits_for_every_sequence() -> None:
    async def work() -> None:
        box = Box()
        stream = box.gateway.submit([make_submit(3)])
        admitted = asyncio.create_task(stream.admitted())
        box.gateway.handle([Accepted(BASE, 1), TextBatch((chunk(BASE + 2),))])
        await asyncio.sleep(0)
        assert not admitted.done()
        box.gateway.handle([TextBatch((chunk(BASE + 1, finish="stop"),))])
        await admitted

    run(work())


def test_the_last_report_of_an_engine_that_is_away_does_not_count() -> None:
    gateway = Gateway(lambda message: None, lambda message: None, clock=lambda: 0.0)
    groups = (GroupSnapshot("full", 60, 30, 7, 2),)
    full = Snapshot(9, 3, 4, 100, 60, 0, 70, 20, 50, 2.5, is_asleep=True, groups=groups)
    gateway.handle([full, replace(full, engine=1)])
    gateway.handle([Reset(2, 2, ("tokenizer",), "It died.", 0)])
    assert len(gateway.snapshots) == 2, "its core goes on"
    gateway.handle([Reset(3, 3, (), "It has ended.", 0)])
    assert gateway.snapshots == [replace(full, engine=1)]
    left = gateway.engines[0].snapshot
    assert left is not None, "/metrics shows its totals"
    assert (left.num_running, left.num_waiting, left.num_blocks_used, left.step_age_s) == (0, 0, 0, 0.0)
    assert left.groups == (GroupSnapshot("full", 0, 0, 7, 2),)
    assert (left.num_prompt_tokens, left.num_output_tokens, left.num_blocks) == (70, 50, 100) and not left.is_asleep
    gateway.handle([Restored(3, 0), replace(full, num_running=1)])
    assert [core.num_running for core in gateway.snapshots] == [1, 3]
