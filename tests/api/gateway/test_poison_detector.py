"""Requests that were in a process when it died resume one by one, and only the one that kills it again fails."""

import pytest
from harness import run

from pagewire.errors import RequestError
from pagewire.ipc.messages import TextPrompt, ids_to_bytes

from .test_journal import Engine, make_submit


def test_suspects_resume_one_by_one_and_only_the_killer_fails() -> None:
    async def work() -> None:
        engine = Engine()
        streams = {name: engine.gateway.submit([make_submit(name)]) for name in ("good", "poison", "later")}
        for submit in engine.take():
            engine.accept(submit)
            engine.emit(submit.rid, "x", [1])
        engine.die("worker")
        (first,) = engine.take()
        assert first.prompt == TextPrompt("good")
        newcomer = engine.gateway.submit([make_submit("new")])  # does not run beside suspects
        engine.emit(first.rid, "xyz", [2, 3, 4])
        assert engine.take() == []
        engine.emit(first.rid, "!", [5])
        (second,) = engine.take()
        assert second.prompt == TextPrompt("poison")
        engine.die("worker")
        [(_, delivered)] = await anext(streams["poison"])
        assert delivered.text == "x" and delivered.ids == ids_to_bytes([1])
        with pytest.raises(RequestError, match="died twice"):
            await anext(streams["poison"])
        turns = [engine.take() for _ in range(3)]
        assert [s.prompt for s in turns[0]] == [TextPrompt("good")] and turns[1] == []
        engine.emit(streams["good"].request.sequences[0].rid, "", [6, 7, 8, 9], "length")
        assert [s.prompt for s in engine.take()] == [TextPrompt("later")]
        engine.emit(streams["later"].request.sequences[0].rid, "", [6, 7, 8, 9])
        assert [s.rid for s in engine.take()] == [newcomer.request.number]
        with pytest.raises(RequestError, match="died twice"):  # the same prompt would kill it again
            engine.gateway.submit([make_submit("poison")])
        assert engine.gateway.stats.errors["internal"] == 1

    run(work())


def test_only_requests_in_the_dead_process_are_suspects() -> None:
    async def work() -> None:
        engine = Engine()
        running = engine.gateway.submit([make_submit("running")])
        (submit,) = engine.take()
        engine.accept(submit)
        for _ in range(3):
            engine.gateway.submit([make_submit("being tokenized")])
        engine.take()
        engine.die("tokenizer")
        assert [s.prompt for s in engine.take()] == [TextPrompt("being tokenized")]
        assert running.request.num_deaths == 0

    run(work())


def test_many_suspects_resume_in_groups_and_singly_the_second_time() -> None:
    async def work() -> None:
        engine = Engine()
        num = 100
        streams = [engine.gateway.submit([make_submit(str(i))]) for i in range(num)]
        engine.take()
        engine.die("core")
        turn = engine.take()
        assert 1 < len(turn) <= 13
        engine.die("core")  # one of these requests killed it; which one is unknown
        assert all(not isinstance(stream.request.buffer.error, RequestError) for stream in streams)
        turn_sizes = []
        while any(stream.request.num_unanswered for stream in streams):
            turn = engine.take()
            turn_sizes.append(len(turn))
            for submit in turn:
                engine.emit(submit.rid, "x", [1] * 64)
        assert turn_sizes[:13] == [1] * 13 and sum(turn_sizes) == num

    run(work())
