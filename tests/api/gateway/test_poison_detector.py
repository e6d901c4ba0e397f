"""Requests that were with a process when it died come back one by one, and the one that kills it is failed alone."""

import pytest
from harness import run

from pagewire.errors import RequestError
from pagewire.ipc.messages import (
    TextPrompt,
)

from .test_journal import Engine, order


def test_suspects_come_back_one_by_one_and_the_killer_is_failed_alone() -> None:
    async def work() -> None:
        engine = Engine()
        streams = {name: engine.gateway.submit([order(name)]) for name in ("good", "poison", "later")}
        for submit in engine.take():
            engine.accept(submit)
            engine.say(submit.rid, "x", [1])
        engine.die("worker")
        (first,) = engine.take()
        assert first.prompt == TextPrompt("good")
        newcomer = engine.gateway.submit([order("new")])  # shares no fate with suspects
        engine.say(first.rid, "xyz", [2, 3, 4])
        assert engine.take() == []
        engine.say(first.rid, "!", [5])
        (second,) = engine.take()
        assert second.prompt == TextPrompt("poison")
        engine.die("worker")
        with pytest.raises(RequestError, match="died twice"):
            await anext(streams["poison"])
            await anext(streams["poison"])
        turns = [engine.take() for _ in range(3)]
        assert [s.prompt for s in turns[0]] == [TextPrompt("good")] and turns[1] == []
        engine.say(streams["good"].request.sequences[0].rid, "", [6, 7, 8, 9], "length")
        assert [s.prompt for s in engine.take()] == [TextPrompt("later")]
        engine.say(streams["later"].request.sequences[0].rid, "", [6, 7, 8, 9])
        assert [s.rid for s in engine.take()] == [newcomer.request.number]
        with pytest.raises(RequestError, match="died twice"):  # the same again would do the same
            engine.gateway.submit([order("poison")])
        assert engine.gateway.stats.errors["internal"] == 1

    run(work())


def test_only_who_was_with_the_process_is_suspected() -> None:
    async def work() -> None:
        engine = Engine()
        running = engine.gateway.submit([order("running")])
        (submit,) = engine.take()
        engine.accept(submit)
        for _ in range(3):
            engine.gateway.submit([order("being tokenized")])
        engine.take()
        engine.die("tokenizer")
        assert [s.prompt for s in engine.take()] == [TextPrompt("being tokenized")]
        assert running.request.num_deaths == 0

    run(work())


def test_many_suspects_come_back_in_turns_and_singly_the_second_time() -> None:
    async def work() -> None:
        engine = Engine()
        num = 100
        streams = [engine.gateway.submit([order(str(i))]) for i in range(num)]
        engine.take()
        engine.die("core")
        turn = engine.take()
        assert 1 < len(turn) <= 13
        engine.die("core")  # one of these, nobody knows which
        assert all(not isinstance(stream.request.buffer.error, RequestError) for stream in streams)
        seen = []
        while any(stream.request.num_unanswered for stream in streams):
            turn = engine.take()
            seen.append(len(turn))
            for submit in turn:
                engine.say(submit.rid, "x", [1] * 64)
        assert seen[:13] == [1] * 13 and sum(seen) == num

    run(work())
