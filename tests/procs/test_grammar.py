"""The core and the grammar process, each alone: the messages between them, and requests that wait for a grammar."""

import asyncio
import multiprocessing
from array import array
from concurrent.futures import ProcessPoolExecutor
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


def received(engine: Engine, receiver: str) -> list[Message]:
    """Messages that `receiver` was sent since the last call."""
    messages = [message for name, message in engine.sent if name == receiver]
    engine.sent = [(name, message) for name, message in engine.sent if name != receiver]
    return messages


def test_a_request_is_held_until_its_grammar_is_compiled(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Engine(address_in(tmp_path)) as engine:
            engine.handle(enqueue(1, [1, 2, 3], max_tokens=3, n=2, constraint=SOME))
            assert received(engine, "grammar") == [Constrain(1, 2, SOME, ids_to_bytes([1, 2, 3]))]
            engine.handle(enqueue(5, [1] * 400, max_tokens=3, constraint=SOME))
            (constrain,) = received(engine, "grammar")
            assert isinstance(constrain, Constrain) and len(constrain.tail_ids) == 4 * 64
            assert received(engine, "api") == [] and engine.num_open == 0
            engine.handle(Constrained(5, "invalid_request", "It is not a grammar."))
            assert received(engine, "api") == [Failed(5, "invalid_request", "It is not a grammar.")]
            engine.handle(Constrained(1), Masks(rids(1, 2), bits_of([4]) + bits_of([6])))
            assert received(engine, "api") == [Accepted(1, 3), Accepted(2, 3)]
            await until_async(lambda: len(sampled(engine)) == 2, "both requests have sampled a token")
            assert sampled(engine) == {1: 4, 2: 6}
            engine.handle(Masks(b"", b"", complete=rids(1), failed=((2, "internal", "It broke."),)))
            assert engine.num_open == 0
            messages = received(engine, "detokenizer")
            assert Failed(2, "internal", "It broke.") in messages
            ended = [t for batch in messages if isinstance(batch, TokenBatch) for t in batch.tokens]
            assert [(t.rid, t.finish, t.ids, t.usage and t.usage.num_output) for t in ended] == [(1, "stop", b"", 1)]
            assert bytes(b"".join(m.ended for m in received(engine, "grammar") if isinstance(m, Sampled))) == rids(1, 2)

    def sampled(engine: Engine) -> dict[int, int]:
        found: dict[Any, Any] = {}
        for name, message in engine.sent:
            if name == "grammar" and isinstance(message, Sampled):
                found |= dict(zip(memoryview(message.rids).cast("q"), bytes_to_ids(message.ids), strict=True))
        return found

    asyncio.run(scenario())


def test_requests_that_wait_for_a_grammar_can_be_cancelled_and_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Engine(address_in(tmp_path), max_queued_requests=4) as engine:
            engine.handle(enqueue(1, [1, 2], n=3, constraint=SOME))
            engine.handle(enqueue(2, [1, 2], constraint=SOME))  # its request id is in use
            engine.handle(enqueue(10, [1, 2], n=2, constraint=SOME))  # too many
            engine.handle(enqueue(20, [], constraint=SOME))
            kinds = [(m.rid, m.kind) for m in received(engine, "api") if isinstance(m, Failed)]
            assert kinds == [(2, "internal"), (10, "queue_full"), (11, "queue_full"), (20, "invalid_request")]
            engine.handle(Cancel((2,)))
            engine.handle(Constrained(1))
            assert received(engine, "api") == [Accepted(rid, 2) for rid in (1, 2, 3)]
            assert set(engine.core.scheduler.requests) == {1, 3}
            engine.handle(Cancel((1, 3)))
            assert engine.num_open == 0
            received(engine, "grammar")
            engine.handle(enqueue(30, [1, 2], constraint=SOME))
            engine.handle(*(enqueue(rid, [1, 2], max_tokens=200) for rid in range(40, 44)))
            engine.held = True
            engine.handle(*(enqueue(rid, [1, 2], max_tokens=200) for rid in range(50, 66)))
            received(engine, "api")
            engine.handle(Constrained(30))  # the queue has filled meanwhile
            (answer,) = received(engine, "api")
            assert isinstance(answer, Failed) and answer.kind == "queue_full"
            assert received(engine, "grammar")[-1] == Sampled(b"", b"", rids(30))

    asyncio.run(scenario())


def test_a_cached_grammar_is_answered_within_the_same_call(tmp_path: Path) -> None:
    async def scenario() -> None:
        actor = grammar.GrammarActor(config_in(tmp_path), grammars.load)
        posted: list[tuple[str, Message]] = []
        actor.start(lambda receiver, message: posted.append((receiver, message)))
        try:
            constraint = cycle([1, 2], [3], free=2, length=4)
            actor.handle([Constrain(7, 2, constraint, b"")])
            await until_async(lambda: len(posted) == 2, "the grammar is compiled", 60)
            assert posted == [("core", Constrained(7)), ("core", Masks(b"", b"", rids(7, 8)))]
            posted.clear()
            actor.handle([Constrain(9, 1, constraint, b"", ids_to_bytes([5, 5]))])  # its outcome is cached by now
            assert posted == [("core", Constrained(9)), ("core", Masks(rids(9), bits_of([1, 2])))]
            posted.clear()
            actor.handle([Sampled(rids(9, 8), ids_to_bytes([1, 40]), rids(7))])
            assert posted == [("core", Masks(rids(9), bits_of([3]), rids(8)))]
            posted.clear()
            actor.handle([Sampled(rids(9), ids_to_bytes([3]), rids(8))])
            assert posted == [("core", Masks(b"", b"", complete=rids(9)))]
        finally:
            await actor.stop(0)

    asyncio.run(scenario())


def test_running_requests_get_their_masks_between_two_compilations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar, "_TURN_S", 0.0)

    async def scenario() -> None:
        actor = grammar.GrammarActor(config_in(tmp_path), grammars.load)
        posted: list[Message] = []
        actor.start(lambda receiver, message: posted.append(message))
        try:
            constraint = cycle([1, 2], [3])
            # Cache the outcome, so that no grammar has to be tried in the sandbox.
            actor._sandbox._remember(msgspec.msgpack.encode(constraint), grammar_sandbox.Outcome())
            actor.handle([Constrain(rid, 1, constraint, b"") for rid in range(1, 5)])
            assert posted == [Constrained(1), Masks(rids(1), bits_of([1, 2]))]
            actor.handle([Sampled(rids(1), ids_to_bytes([1]), b"")])
            assert posted[2:4] == [Masks(rids(1), bits_of([3])), Constrained(2)]
            await until_async(lambda: len(posted) == 9, "all four grammars are compiled")
            assert actor.num_pending == 0
        finally:
            await actor.stop(0)

    asyncio.run(scenario())


def test_a_grammar_whose_requests_are_cancelled_is_not_compiled(tmp_path: Path) -> None:
    """Otherwise a client that sends slow grammars and disconnects would delay the grammars of all other clients."""

    async def scenario() -> None:
        async with Engine(address_in(tmp_path)) as engine:
            actor = grammar.GrammarActor(engine.config, grammars.load)
            posted: list[Message] = []
            actor.start(lambda receiver, message: posted.append(message))
            slow = cycle([1], fault="hangs")
            engine.handle(*(enqueue(rid, [1, 2], n=2, constraint=slow) for rid in range(10, 50, 10)))
            actor.handle([message for message in received(engine, "grammar") if isinstance(message, Constrain)])
            try:
                engine.handle(Cancel((10, 20, 21)))
                engine.handle(Cancel((11, 30)))
                received(engine, "api")
                actor.handle([message for message in received(engine, "grammar") if isinstance(message, Sampled)])
                await until_async(lambda: len(posted) == 2, "two grammars of cancelled requests are answered", 30)
                assert sorted(m.rid for m in posted if isinstance(m, Constrained) and m.kind is None) == [10, 20]
                assert actor._sandbox.num_pending == 2
                engine.handle(*(message for message in posted if isinstance(message, Constrained)))
                ended = [
                    t
                    for batch in received(engine, "detokenizer")
                    if isinstance(batch, TokenBatch)
                    for t in batch.tokens
                ]
                assert [(t.rid, t.finish) for t in ended] == [(rid, "abort") for rid in (20, 21, 10, 11)]
                assert engine.num_open == 0
            finally:
                await actor.stop(0)

    asyncio.run(scenario())


def test_the_outcome_of_a_grammar_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert msgspec.msgpack.encode(SOME) in sandbox._outcomes  # it was the most recently used entry each time


def refuse_and_compile(folder: Path) -> None:
    async def scenario() -> None:
        actor = grammar.GrammarActor(config_in(folder), grammars.load, memory_bytes=48 << 20)
        posted: list[Message] = []
        actor.start(lambda receiver, message: posted.append(message))
        large = cycle([1], fault="large")
        actor._sandbox._remember(msgspec.msgpack.encode(large), grammar_sandbox.Outcome())
        actor.handle([Constrain(rid, 1, large, b"") for rid in range(6)])
        await until_async(lambda: actor.num_pending == 0, "all grammars are compiled or refused")
        answers = [message for message in posted if isinstance(message, Constrained)]
        refused = [answer for answer in answers if answer.kind == "queue_full"]
        assert len(answers) == 6 and 1 <= len(refused) <= 4 and "try again later" in refused[0].detail
        posted.clear()
        actor.handle([Sampled(b"", b"", rids(*range(6))), Constrain(9, 1, large, b"")])  # memory was freed
        await until_async(lambda: actor.num_pending == 0, "the next grammar is compiled")
        assert posted[0] == Constrained(9)

    asyncio.run(scenario())


def test_all_grammars_together_have_a_memory_limit(tmp_path: Path) -> None:
    # In a process of its own: the limit counts what the process allocates, and other tests leave memory behind.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        pool.submit(refuse_and_compile, tmp_path).result(120)


def test_an_idle_sandbox_process_that_was_killed_is_replaced() -> None:
    model = ModelFacts(
        path="", name="m", max_position=64, vocab_size=VOCAB, eos_token_ids=(EOS,), checkpoint_dtype="float32"
    )
    sandbox = grammar_sandbox.GrammarSandbox(resolve(Config(), model, MachineFacts(num_cores=1)), grammars.load)
    try:
        for i in range(2):
            sandbox.begin(i, cycle([i]))
            assert until(sandbox.collect, "the grammar is compiled", 60) == [(i, grammar_sandbox.Outcome())]
            (process,) = sandbox._pool._processes
            process._process.kill()
            process._process.wait()
    finally:
        sandbox.close()


def test_a_mask_has_a_bit_for_each_token() -> None:
    mask = np.zeros(2, np.int32)
    follower = grammars.Cycles().compile(cycle([0, 31, 33]), "")
    assert follower.fill(mask) and mask.tobytes() == bits_of([0, 31, 33])
