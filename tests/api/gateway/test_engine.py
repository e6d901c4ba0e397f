"""A gateway with two engines: which one gets a request, and what becomes of the requests of one that has died."""

import asyncio
from dataclasses import dataclass, field

import pytest
from harness import run

from pagewire.api.gateway.engine import beginning
from pagewire.api.gateway.gateway import Gateway
from pagewire.api.gateway.stream import Stream
from pagewire.api.http.http_error import EngineFailed
from pagewire.errors import RequestError
from pagewire.ipc.messages import (
    Cancel,
    ChatPrompt,
    Chunk,
    IdsPrompt,
    Limits,
    PairPrompt,
    Reset,
    Restored,
    Sampling,
    Snapshot,
    Submit,
    TextBatch,
    TextPrompt,
    TextSpec,
    Tokenize,
    Tokenized,
    Usage,
    ids_to_bytes,
)


def make_submit(text: str = "x", n: int = 1) -> Submit:
    return Submit(0, n, TextPrompt(text), Sampling(seed=5), Limits(), TextSpec())


@dataclass
class Pair:
    """A gateway, and the messages that it has posted to each of two engines."""

    posted: tuple[list[object], list[object]] = field(default_factory=lambda: ([], []))
    epochs: list[int] = field(default_factory=lambda: [1, 1])

    def __post_init__(self) -> None:
        self.gateway = Gateway(
            self.posted[0].append, self.posted[1].append, outage_wait_s=0.05, max_held=3, clock=lambda: 1000.0
        )

    def submit(self, *texts: str) -> list[Stream]:
        return [self.gateway.submit([make_submit(text)]) for text in texts]

    def take(self, engine: int) -> list[Submit]:
        """The submissions to an engine since the last call."""
        taken = [message for message in self.posted[engine] if isinstance(message, Submit)]
        self.posted[engine].clear()
        return taken

    def prompts(self, engine: int) -> list[str]:
        return [submit.prompt.text for submit in self.take(engine) if isinstance(submit.prompt, TextPrompt)]

    def emit(self, rid: int, ids: list[int], finish: str | None = None) -> None:
        usage = Usage(3, 9, 2) if finish else None
        chunk = Chunk(rid, "a" * len(ids), ids_to_bytes(ids), finish=finish, usage=usage)  # type: ignore[arg-type]
        self.gateway.handle([TextBatch((chunk,))])

    def die(self, engine: int, *lost: str) -> None:
        self.epochs[engine] += 1
        self.gateway.handle([Reset(self.epochs[engine], 1, lost, "It died.", engine)])

    def restore(self, engine: int) -> None:
        self.gateway.handle([Restored(self.epochs[engine], engine)])


def test_requests_go_to_the_less_busy_engine() -> None:
    pair = Pair()
    pair.submit("a", "b", "c", "d")
    assert [len(pair.take(0)), len(pair.take(1))] == [2, 2]


def test_a_prompt_goes_where_its_beginning_is() -> None:
    pair, tale = Pair(), "Once upon a time there was a king. " * 40
    pair.submit("a")
    first = 0 if pair.take(0) else 1
    pair.submit(tale)
    assert len(pair.take(1 - first)) == 1
    for stream in pair.submit(tale + "He had", tale + "She had"):
        stream.cancel()
    assert len(pair.take(1 - first)) == 2 and not pair.take(first)


def test_a_death_moves_what_is_open_and_leaves_the_other_engine_alone() -> None:
    async def work() -> None:
        pair = Pair()
        streams = pair.submit("a", "b")
        (here,), (there,) = pair.take(0), pair.take(1)
        pair.emit(here.rid, [7])
        pair.emit(there.rid, [8])
        pair.die(0, "worker")
        (moved,) = pair.take(1)
        assert moved.resume_ids == ids_to_bytes([7]) and moved.rid > there.rid and not pair.take(0)
        assert pair.gateway.outage is None and pair.gateway.num_resumed == 1
        pair.emit(here.rid, [99])  # of the old rid: it is dropped
        pair.emit(there.rid, [9], "length")
        pair.emit(moved.rid, [9], "length")
        outputs = [
            b"".join([chunk.ids for chunks in [await anext(stream)] for _, chunk in chunks]) for stream in streams
        ]
        assert sorted(outputs) == [ids_to_bytes([7, 9]), ids_to_bytes([8, 9])]
        pair.submit("c", "d")
        assert len(pair.take(1)) == 2, "the other engine is not whole"
        pair.restore(0)
        pair.submit("e")
        assert len(pair.take(0)) == 1

    run(work())


def test_what_both_engines_have_lost_waits_for_the_first_that_is_whole() -> None:
    async def work() -> None:
        pair = Pair()
        pair.submit("a", "b")
        pair.take(0), pair.take(1)
        pair.die(0, "core")
        assert len(pair.take(1)) == 1
        pair.die(1, "core")
        assert pair.gateway.outage is not None and not pair.take(0) and not pair.take(1)
        (late,) = pair.submit("late")
        pair.restore(0)
        assert "late" in pair.prompts(0) and not pair.take(1)
        late.cancel()
        assert any(isinstance(message, Cancel) for message in pair.posted[0])

    run(work())


def test_a_request_that_was_in_two_deaths_kills_no_third_process() -> None:
    async def work() -> None:
        pair = Pair()
        pair.submit("poison", "good")
        victim = 0 if pair.prompts(0) == ["poison"] else 1
        pair.take(0), pair.take(1)
        pair.die(victim, "worker")
        assert pair.prompts(1 - victim) == ["poison"]
        pair.restore(victim)
        pair.die(1 - victim, "worker")
        assert pair.prompts(victim) == ["good"], "it was in one death, and the other stays with its engine"
        pair.restore(1 - victim)
        assert pair.prompts(1 - victim) == ["poison"], "alone"
        pair.submit("new")
        assert pair.prompts(victim) == ["new"], "not beside a suspect"
        pair.die(1 - victim, "worker")
        assert not pair.prompts(victim) and pair.gateway.num_open == 2
        with pytest.raises(RequestError, match="died twice"):
            pair.submit("poison")

    run(work())


def two_suspects(pair: Pair) -> tuple[list[Stream], list[Stream]]:
    """Two admitted requests that were in two deaths and wait for engine 1, and two others, which engine 0 has."""
    streams = dict(zip("abcd", pair.submit(*"abcd"), strict=True))
    first = pair.take(0)
    for submit in (*first, *pair.take(1)):
        pair.emit(submit.rid, [7])
    pair.die(0, "worker")
    pair.restore(0)
    pair.die(1, "worker")
    suspects = [submit.prompt.text for submit in first if isinstance(submit.prompt, TextPrompt)]
    assert len(suspects) == 2 and not set(suspects) & set(pair.prompts(0))
    pair.take(1)
    return [streams.pop(text) for text in suspects], list(streams.values())


def test_a_request_that_was_in_two_deaths_ends_with_its_engine() -> None:
    async def work() -> None:
        pair = Pair()
        suspects, others = two_suspects(pair)
        pair.die(1)  # it is given up
        for stream in suspects:
            assert len(await anext(stream)) == 1
            with pytest.raises(EngineFailed, match=r"two deaths .* It died\."):
                await anext(stream)
        assert not pair.take(0) and pair.gateway.num_open == len(others)

    run(work())


def test_a_request_that_was_in_two_deaths_goes_on_with_its_engine() -> None:
    async def work() -> None:
        pair = Pair()
        _, others = two_suspects(pair)
        others[0].cancel()
        pair.die(1)
        pair.restore(1)
        assert len(pair.take(1)) == 1, "the other waits for its turn"
        pair.die(0)
        (late,) = pair.submit("late")
        with pytest.raises(RequestError, match="try again later"):
            await late.admitted()
        assert pair.gateway.num_open == 3, "those that were there wait on"

    run(work())


def test_after_the_death_of_an_api_process_requests_stay_where_they_were() -> None:
    async def work() -> None:
        pair = Pair()
        pair.submit("a", "b")
        first, second = pair.prompts(0), pair.prompts(1)
        pair.die(0, "api-1")
        pair.die(1, "api-1")
        assert not pair.take(0) and not pair.take(1)
        pair.restore(1)
        assert pair.prompts(1) == second and not pair.take(0)
        pair.restore(0)
        assert pair.prompts(0) == first

    run(work())


def test_an_engine_that_is_vacated_gets_nothing_new() -> None:
    async def work() -> None:
        pair = Pair()
        pair.submit("a", "b")
        (own,) = pair.take(0)
        vacated = asyncio.create_task(pair.gateway.vacated(0))
        await asyncio.sleep(0)
        pair.submit("c", "d", "e")
        assert len(pair.take(1)) == 4 and not vacated.done()
        pair.emit(own.rid, [1], "length")
        await vacated
        pair.die(0)
        pair.restore(0)
        pair.submit("f")
        assert len(pair.take(0)) == 1

    run(work())


def test_the_only_engine_gets_nothing_new_either() -> None:
    """It is one of several models that is unloaded: what comes meanwhile waits until it is loaded again."""

    async def work() -> None:
        posted: list[object] = []
        gateway = Gateway(posted.append, outage_wait_s=60.0)
        first = gateway.submit([make_submit("a")])
        vacated = asyncio.create_task(gateway.vacated(0))
        await asyncio.sleep(0)
        second = gateway.submit([make_submit("b")])
        assert len(posted) == 1
        first.cancel()
        await vacated
        gateway.handle([Reset(2, 2, (), "It is not loaded.")])
        assert len(posted) == 2 and isinstance(posted[1], Cancel)
        gateway.handle([Restored(2)])
        (submit,) = posted[2:]
        assert isinstance(submit, Submit) and submit.prompt == TextPrompt("b")
        second.cancel()

    run(work())


def test_what_another_version_takes_the_place_of_is_not_continued() -> None:
    """An answer is of one version: what an engine has had ends, and what waits for its first engine goes on waiting."""

    async def work() -> None:
        posted: list[object] = []
        gateway = Gateway(posted.append, outage_wait_s=60.0, max_open=2)
        begun = gateway.submit([make_submit("a")])
        gateway.handle([Reset(2, 2, (), "It is not loaded.")])
        waiting = gateway.submit([make_submit("b")])
        gateway.change({"outage_wait_s": 60.0, "max_held": 1, "max_open": 1, "latency_classes": {}})
        gateway.replaced("Another version has taken its place.")
        with pytest.raises(EngineFailed, match="Another version"):
            await begun.admitted()
        gateway.handle([Restored(2)])
        (submit,) = (each for each in posted[1:] if isinstance(each, Submit))
        assert submit.prompt == TextPrompt("b")
        with pytest.raises(RequestError, match="open already"):
            gateway.submit([make_submit("c")])
        waiting.cancel()

    run(work())


def test_an_engine_that_has_healed_gets_its_share_at_once() -> None:
    async def work() -> None:
        pair = Pair()
        pair.die(0, "core")
        pair.restore(0)
        pair.submit("a", "b", "c", "d")
        assert [len(pair.take(0)), len(pair.take(1))] == [2, 2]

    run(work())


def test_a_restart_moves_what_is_left_without_suspicion() -> None:
    async def work() -> None:
        pair = Pair()
        pair.submit("a", "b")
        pair.take(0), pair.take(1)
        pair.die(0)
        pair.die(1)
        assert [request.num_deaths for request in pair.gateway._held] == [0, 0]

    run(work())


def test_a_question_is_asked_again_elsewhere() -> None:
    async def work() -> None:
        pair = Pair()
        asking = asyncio.create_task(pair.gateway.tokenize(TextPrompt("x")))
        await asyncio.sleep(0)
        (question,) = pair.posted[0]
        assert isinstance(question, Tokenize)
        pair.die(0, "tokenizer")
        assert pair.posted[1] == [question]
        pair.gateway.handle([Tokenized(question.rid, b"")])
        assert (await asking).ids == b""

    run(work())


def test_the_load_of_other_api_processes_counts() -> None:
    posted: tuple[list[object], list[object]] = ([], [])
    gateway = Gateway(posted[0].append, posted[1].append, has_siblings=True)
    gateway.handle(
        [Snapshot(1, 30, 0, 0, 0, 0, 0, 0, 0, 0.0, engine=0), Snapshot(1, 0, 0, 0, 0, 0, 0, 0, 0, 0.0, engine=1)]
    )
    for _ in range(4):
        gateway.submit([make_submit()])
    assert not posted[0] and len(posted[1]) == 4


def test_prompts_of_different_owners_have_no_common_beginning() -> None:
    text = b'[{"role":"user","content":"' + b"x" * 600 + b'"}]'
    chat = Submit(0, 1, ChatPrompt(text), Sampling(), Limits(), TextSpec(), salt=b"one")
    blocks, conversation, key_of = beginning(chat)
    assert len(blocks) == 2 and conversation is not None and conversation.root == 2
    others = Submit(0, 1, ChatPrompt(text), Sampling(), Limits(), TextSpec(), salt=b"two")
    assert not set(beginning(others)[0]) & set(blocks)
    other_key_of = beginning(others).key_of
    assert key_of is not None and other_key_of is not None and key_of(1) != other_key_of(1)
    ids = Submit(0, 1, IdsPrompt(bytes(512)), Sampling(), Limits(), TextSpec())
    assert len(beginning(ids)[0]) == 2
    assert beginning(Submit(0, 1, PairPrompt("a", "b"), Sampling(), Limits(), TextSpec())) == ((), None, None)
