"""An engine process dies: open requests resume once after the delivered tokens; one that kills it twice fails."""

import asyncio
from dataclasses import dataclass, field

import pytest
from harness import run

from pagewire.api.gateway.gateway import Gateway
from pagewire.errors import RequestError
from pagewire.ipc.messages import (
    Accepted,
    Cancel,
    Chunk,
    Detokenize,
    Detokenized,
    Limits,
    Reset,
    Restored,
    Sampling,
    Submit,
    TextBatch,
    TextPrompt,
    TextSpec,
    Times,
    Usage,
    ids_to_bytes,
)


def make_submit(text: str = "x", n: int = 1, **fields: object) -> Submit:
    spec = TextSpec(prompt=True, prompt_end=True)
    return Submit(0, n, TextPrompt(text), Sampling(seed=5, prompt_logprobs=1), Limits(), spec, **fields)  # type: ignore[arg-type]


@dataclass
class Engine:
    """A gateway, and the messages that it has posted to the engine."""

    now: float = 0.0
    posted: list[object] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gateway = Gateway(self.posted.append, outage_wait_s=0.05, max_held=3, clock=lambda: self.now)

    def take(self) -> list[Submit]:
        """The submissions since the last call."""
        taken = [message for message in self.posted if isinstance(message, Submit)]
        self.posted.clear()
        return taken

    def accept(self, *submits: Submit) -> None:
        self.gateway.handle([Accepted(s.rid + i, 3) for s in submits for i in range(s.n)])

    def emit(self, rid: int, text: str, ids: list[int], finish: str | None = None, **fields: object) -> None:
        usage = Usage(3, 9, 2) if finish else None
        chunk = Chunk(rid, text, ids_to_bytes(ids), finish=finish, usage=usage, **fields)  # type: ignore[arg-type]
        self.gateway.handle([TextBatch((chunk,))])

    def die(self, *lost: str, restored: bool = True) -> None:
        self.gateway.handle([Reset(2, 1, lost, "It died.")])
        if restored:
            self.restore()

    def restore(self) -> None:
        self.gateway.handle([Restored(2)])


def test_a_sequence_resumes_after_the_delivered_tokens() -> None:
    async def work() -> None:
        engine = Engine()
        stream = engine.gateway.submit([make_submit(n=2)])
        (first,) = engine.take()
        engine.accept(first)
        engine.emit(first.rid, "añb", [7, 8], times=Times(num_cached=1))
        engine.die("detokenizer", restored=False)
        assert engine.take() == []  # nothing is submitted before the engine is complete
        assert engine.gateway.outage is not None and engine.gateway.outage.lost == ("detokenizer",)
        engine.restore()
        resumed, fresh = engine.take()
        assert (resumed.n, resumed.resume_ids, resumed.resume_chars, resumed.attempt) == (1, ids_to_bytes([7, 8]), 3, 1)
        assert not resumed.text.prompt and not resumed.text.prompt_end and resumed.sampling.prompt_logprobs is None
        assert (fresh.resume_ids, fresh.text.prompt, fresh.sampling.prompt_logprobs) == (b"", True, 1)
        assert (resumed.sampling.seed, fresh.sampling.seed) == (5, 6)  # each choice has a seed of its own
        assert fresh.rid == resumed.rid + 1 > first.rid + 1
        engine.emit(first.rid, "from a dead process", [1])
        engine.emit(resumed.rid, "c", [9], "stop")
        engine.emit(fresh.rid, "d", [4], "length")
        chunks = await anext(stream)
        assert [(index, chunk.text) for index, chunk in chunks] == [(0, "añbc"), (1, "d")]
        assert chunks[0][1].usage == Usage(3, 9, 1)  # `num_cached` is that of the first attempt
        assert stream.finished and engine.gateway.num_open == 0 and engine.gateway.num_resumed == 2

    run(work())


def test_new_requests_wait_for_the_engine_and_are_sent_once() -> None:
    async def work() -> None:
        engine = Engine()
        engine.die("core", restored=False)
        stream = engine.gateway.submit([make_submit(n=2)])
        engine.gateway.submit([make_submit("y")])
        with pytest.raises(RequestError) as full:
            engine.gateway.submit([make_submit("z")])
        assert full.value.kind == "queue_full" and engine.take() == []
        engine.restore()
        both = engine.take()
        assert [(s.n, s.attempt, s.rid) for s in both] == [
            (2, 0, stream.request.number),
            (1, 0, stream.request.number + 2),
        ]

    run(work())


def test_waiting_for_the_engine_is_bounded() -> None:
    async def work() -> None:
        engine = Engine()
        old = engine.gateway.submit([make_submit("old")])
        (submit,) = engine.take()
        engine.accept(submit)
        engine.die("worker", restored=False)
        new = engine.gateway.submit([make_submit("new")])
        with pytest.raises(RequestError, match="being replaced") as outage:
            await new.admitted()
        assert outage.value.kind == "unavailable"
        with pytest.raises(RequestError, match="being replaced"):
            await engine.gateway.detokenize(b"")
        engine.restore()
        # an accepted request waits without a limit
        assert [s.rid for s in engine.take()] == [old.request.sequences[0].rid]

    run(work())


def test_a_request_cancelled_during_the_outage_is_not_resumed() -> None:
    async def work() -> None:
        engine = Engine()
        stream = engine.gateway.submit([make_submit()])
        engine.take()
        engine.die("core", restored=False)
        stream.cancel()
        engine.restore()
        assert engine.posted == [] and engine.gateway.num_open == 0

    run(work())


def test_a_detokenize_call_is_repeated_once() -> None:
    async def work() -> None:
        engine = Engine()
        detokenized = asyncio.create_task(engine.gateway.detokenize(b"\1\0\0\0"))
        await asyncio.sleep(0)
        engine.die("tokenizer")
        first, again = engine.posted
        assert first == again and isinstance(first, Detokenize)
        engine.gateway.handle([Detokenized(first.rid, "a")])
        assert await detokenized == "a"
        detokenized = asyncio.create_task(engine.gateway.detokenize(b"\2\0\0\0"))
        await asyncio.sleep(0)
        engine.die("tokenizer")
        engine.die("tokenizer")
        with pytest.raises(RequestError, match="died twice"):
            await detokenized

    run(work())


def test_a_cancel_after_the_restart_names_the_new_rid() -> None:
    async def work() -> None:
        engine = Engine()
        stream = engine.gateway.submit([make_submit()])
        engine.take()
        engine.die("core")
        (again,) = engine.take()
        stream.cancel()
        assert engine.posted == [Cancel((again.rid,))]

    run(work())
