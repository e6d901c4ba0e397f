"""The core and the grammar process, each alone: what they say to each other, and what is held until an answer comes."""

import asyncio
from array import array
from pathlib import Path
from typing import Any

import grammars
import msgspec
import numpy as np
import pytest
from engine_clients import Engine, address_in
from fakes import EOS, VOCAB, bits_of, enqueue
from grammars import cycle
from waiting import until, until_async

from pagewire.config.config import Config, EngineConfig, MachineFacts, ModelFacts
from pagewire.config.resolve import resolve
from pagewire.ipc.messages import (
    Accepted,
    Cancel,
    Constrain,
    Constrained,
    Constraint,
    Failed,
    Masks,
    Message,
    Sampled,
    TokenBatch,
    bytes_to_ids,
    ids_to_bytes,
)
from pagewire.procs import grammar, grammar_sandbox

SOME = Constraint("regex", "a")


def rids(*numbers: int) -> bytes:
    return array("q", numbers).tobytes()


def config_in(folder: Path) -> EngineConfig:
    model = ModelFacts(
        path=str(folder), name="m", max_position=64, vocab_size=VOCAB, eos_token_ids=(EOS,), checkpoint_dtype="float32"
    )
    return resolve(Config(), model, MachineFacts(num_cores=1))


def told(engine: Engine, receiver: str) -> list[Message]:
    """What this one was told since the last call."""
    found = [message for name, message in engine.told if name == receiver]
    engine.told = [(name, message) for name, message in engine.told if name != receiver]
    return found


def test_a_request_is_held_until_its_grammar_is_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Engine(address_in(tmp_path)) as engine:
            engine.handle(enqueue(1, [1, 2, 3], max_tokens=3, n=2, constraint=SOME))
            assert told(engine, "grammar") == [Constrain(1, 2, SOME, ids_to_bytes([1, 2, 3]))]
            engine.handle(enqueue(5, [1] * 400, max_tokens=3, constraint=SOME))
            (asked,) = told(engine, "grammar")
            assert isinstance(asked, Constrain) and len(asked.tail_ids) == 4 * 64
            assert told(engine, "api") == [] and engine.num_open == 0
            engine.handle(Constrained(5, "invalid_request", "It is none."))
            assert told(engine, "api") == [Failed(5, "invalid_request", "It is none.")]
            engine.handle(Constrained(1), Masks(rids(1, 2), bits_of([4]) + bits_of([6])))
            assert told(engine, "api") == [Accepted(1, 3), Accepted(2, 3)]
            await until_async(lambda: len(sampled(engine)) == 2, "both drew")
            assert sampled(engine) == {1: 4, 2: 6}
            engine.handle(Masks(b"", b"", complete=rids(1), failed=((2, "internal", "It broke."),)))
            assert engine.num_open == 0
            news = told(engine, "detokenizer")
            assert Failed(2, "internal", "It broke.") in news
            ends = [t for batch in news if isinstance(batch, TokenBatch) for t in batch.tokens]
            assert [(t.rid, t.finish, t.ids, t.usage and t.usage.num_output) for t in ends] == [(1, "stop", b"", 1)]
            assert bytes(b"".join(m.ended for m in told(engine, "grammar") if isinstance(m, Sampled))) == rids(1, 2)

    def sampled(engine: Engine) -> dict[int, int]:
        found: dict[Any, Any] = {}
        for name, message in engine.told:
            if name == "grammar" and isinstance(message, Sampled):
                found |= dict(zip(memoryview(message.rids).cast("q"), bytes_to_ids(message.ids), strict=True))
        return found

    asyncio.run(scenario())


def test_what_is_held_can_be_cancelled_and_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Engine(address_in(tmp_path), max_queued_requests=4) as engine:
            engine.handle(enqueue(1, [1, 2], n=3, constraint=SOME))
            engine.handle(enqueue(2, [1, 2], constraint=SOME))  # a number that is taken
            engine.handle(enqueue(10, [1, 2], n=2, constraint=SOME))  # too many
            engine.handle(enqueue(20, [], constraint=SOME))
            kinds = [(m.rid, m.kind) for m in told(engine, "api") if isinstance(m, Failed)]
            assert kinds == [(2, "internal"), (10, "queue_full"), (11, "queue_full"), (20, "invalid_request")]
            engine.handle(Cancel((2,)))
            engine.handle(Constrained(1))
            assert told(engine, "api") == [Accepted(rid, 2) for rid in (1, 2, 3)]
            assert set(engine.core.scheduler.table.requests) == {1, 3}
            engine.handle(Cancel((1, 3)))
            assert engine.num_open == 0
            told(engine, "grammar")
            engine.handle(enqueue(30, [1, 2], constraint=SOME))
            engine.handle(*(enqueue(rid, [1, 2], max_tokens=200) for rid in range(40, 44)))
            engine.held = True
            engine.handle(*(enqueue(rid, [1, 2], max_tokens=200) for rid in range(50, 66)))
            told(engine, "api")
            engine.handle(Constrained(30))  # meanwhile there is no place left
            (answer,) = told(engine, "api")
            assert isinstance(answer, Failed) and answer.kind == "queue_full"
            assert told(engine, "grammar")[-1] == Sampled(b"", b"", rids(30))

    asyncio.run(scenario())


def test_the_process_answers_on_its_loop(tmp_path: Path) -> None:
    async def scenario() -> None:
        actor = grammar.GrammarActor(config_in(tmp_path), grammars.load)
        said: list[tuple[str, Message]] = []
        actor.start(lambda receiver, message: said.append((receiver, message)))
        try:
            some = cycle([1, 2], [3], free=2, length=4)
            actor.handle([Constrain(7, 2, some, b"")])
            await until_async(lambda: len(said) == 2, "the grammar is compiled", 60)
            assert said == [("core", Constrained(7)), ("core", Masks(b"", b"", rids(7, 8)))]
            said.clear()
            started = asyncio.get_running_loop().time()
            actor.handle([Constrain(9, 1, some, b"", ids_to_bytes([5, 5]))])  # it is known by now
            assert said == [("core", Constrained(9)), ("core", Masks(rids(9), bits_of([1, 2])))]
            assert asyncio.get_running_loop().time() - started < 1
            said.clear()
            actor.handle([Sampled(rids(9, 8), ids_to_bytes([1, 40]), rids(7))])
            assert said == [("core", Masks(rids(9), bits_of([3]), rids(8)))]
            said.clear()
            actor.handle([Sampled(rids(9), ids_to_bytes([3]), rids(8))])
            assert said == [("core", Masks(b"", b"", complete=rids(9)))]
        finally:
            await actor.stop(0)

    asyncio.run(scenario())


def test_streams_have_their_turn_between_two_grammars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "_TURN_S", 0.0)

    async def scenario() -> None:
        actor = grammar.GrammarActor(config_in(tmp_path), grammars.load)
        said: list[Message] = []
        actor.start(lambda receiver, message: said.append(message))
        try:
            some = cycle([1, 2], [3])
            actor._sandbox._remember(
                msgspec.msgpack.encode(some), grammar_sandbox.Outcome()
            )  # all are known to be grammars
            actor.handle([Constrain(rid, 1, some, b"") for rid in range(1, 5)])
            assert said == [Constrained(1), Masks(rids(1), bits_of([1, 2]))]
            actor.handle([Sampled(rids(1), ids_to_bytes([1]), b"")])
            assert said[2:4] == [Masks(rids(1), bits_of([3])), Constrained(2)]
            await until_async(lambda: len(said) == 9, "all are compiled")
            assert actor.num_pending == 0
        finally:
            await actor.stop(0)

    asyncio.run(scenario())


def test_a_grammar_that_nobody_waits_for_is_not_compiled(tmp_path: Path) -> None:
    """Else whoever sends slow ones and leaves would keep all others waiting."""

    async def scenario() -> None:
        async with Engine(address_in(tmp_path)) as engine:
            actor = grammar.GrammarActor(engine.config, grammars.load)
            said: list[Message] = []
            actor.start(lambda receiver, message: said.append(message))
            slow = cycle([1], fault="hangs")
            engine.handle(*(enqueue(rid, [1, 2], n=2, constraint=slow) for rid in range(10, 50, 10)))
            actor.handle([message for message in told(engine, "grammar") if isinstance(message, Constrain)])
            try:
                engine.handle(Cancel((10, 20, 21)))
                engine.handle(Cancel((11, 30)))
                told(engine, "api")
                actor.handle([message for message in told(engine, "grammar") if isinstance(message, Sampled)])
                await until_async(lambda: len(said) == 2, "those are answered at once", 1)
                assert sorted(m.rid for m in said if isinstance(m, Constrained) and m.kind is None) == [10, 20]
                assert actor._sandbox.num_pending == 2
                engine.handle(*(message for message in said if isinstance(message, Constrained)))
                ends = [
                    t for batch in told(engine, "detokenizer") if isinstance(batch, TokenBatch) for t in batch.tokens
                ]
                assert [(t.rid, t.finish) for t in ends] == [(rid, "abort") for rid in (20, 21, 10, 11)]
                assert engine.num_open == 0
            finally:
                await actor.stop(0)

    asyncio.run(scenario())


def test_what_came_of_a_grammar_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = grammar_sandbox.GrammarSandbox(config_in(Path()), grammars.load)
    bad = grammar_sandbox.Outcome("invalid_request", "no")
    sandbox._remember(msgspec.msgpack.encode(SOME), bad)
    sandbox.begin(1, SOME)
    assert sandbox.collect() == [(1, bad)] and sandbox.num_pending == 0
    monkeypatch.setattr(grammar_sandbox, "_MAX_CACHED_BYTES", 1000)
    for i in range(300):
        sandbox._remember(msgspec.msgpack.encode(Constraint("regex", str(i) * 20)), bad)
        sandbox._remember(msgspec.msgpack.encode(SOME), bad)
    assert sum(map(len, sandbox._outcomes)) == sandbox._num_bytes <= 1000
    assert msgspec.msgpack.encode(SOME) in sandbox._outcomes  # it was asked for again and again


def test_grammars_together_have_a_limit_of_memory(tmp_path: Path) -> None:
    async def scenario() -> None:
        actor = grammar.GrammarActor(config_in(tmp_path), grammars.load, memory_bytes=48 << 20)
        said: list[Message] = []
        actor.start(lambda receiver, message: said.append(message))
        large = cycle([1], fault="large")
        actor._sandbox._remember(msgspec.msgpack.encode(large), grammar_sandbox.Outcome())
        actor.handle([Constrain(rid, 1, large, b"") for rid in range(6)])
        await until_async(lambda: actor.num_pending == 0, "all are compiled or refused")
        answers = [message for message in said if isinstance(message, Constrained)]
        refused = [answer for answer in answers if answer.kind == "queue_full"]
        assert len(answers) == 6 and 1 <= len(refused) <= 4 and "try again later" in refused[0].detail
        said.clear()
        actor.handle([Sampled(b"", b"", rids(*range(6))), Constrain(9, 1, large, b"")])  # there is room again
        await until_async(lambda: actor.num_pending == 0, "it is compiled")
        assert said[0] == Constrained(9)

    asyncio.run(scenario())


def test_an_idle_process_that_was_killed_is_replaced() -> None:
    model = ModelFacts(
        path="", name="m", max_position=64, vocab_size=VOCAB, eos_token_ids=(EOS,), checkpoint_dtype="float32"
    )
    sandbox = grammar_sandbox.GrammarSandbox(resolve(Config(), model, MachineFacts(num_cores=1)), grammars.load)
    try:
        for i in range(2):
            sandbox.begin(i, cycle([i]))
            assert until(sandbox.collect, "it is compiled", 60) == [(i, grammar_sandbox.Outcome())]
            (process,) = sandbox._pool._processes
            process._process.kill()
            process._process.wait()
    finally:
        sandbox.close()


def test_a_mask_has_a_bit_for_each_token() -> None:
    mask = np.zeros(2, np.int32)
    follower = grammars.Cycles().compile(cycle([0, 31, 33]), "")
    assert follower.fill(mask) and mask.tobytes() == bits_of([0, 31, 33])
