"""Which prompts are encoded in the sandbox, and in which order the core gets them."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import vocabulary
from msgspec.structs import replace
from waiting import until_async

from pagewire.config.config import Config, EngineConfig, MachineFacts, ModelFacts
from pagewire.config.resolve import resolve
from pagewire.ipc import messages as m
from pagewire.procs.prompt_sandbox import PromptSandbox
from pagewire.procs.tokenizer import TokenizerActor

TEXT = m.TextPrompt("hello")
TEMPLATE = m.ChatPrompt(b'[{"role": "user", "content": "hi"}]', template="{{ messages[0].content }}")
NOTICEABLE = m.TextPrompt("x" * ((1 << 14) + 1))
STUCK = replace(TEMPLATE, template="{% for i in range(99999) %}{% for i in range(99999) %}{% endfor %}{% endfor %}")


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    facts = ModelFacts(path=str(vocabulary.add_tokenizer(tmp_path)), name="m", max_position=1 << 16, vocab_size=320,
                       eos_token_ids=(2,), checkpoint_dtype="float32")  # fmt: skip
    return resolve(Config(), facts, MachineFacts(num_cores=1))


def submit(rid: int, prompt: m.TextPrompt | m.ChatPrompt | m.IdsPrompt, n: int = 1, attempt: int = 0) -> m.Submit:
    return m.Submit(rid, n, prompt, m.Sampling(), m.Limits(4), m.TextSpec(), attempt=attempt)


def test_which_prompts_go_to_the_sandbox(config: EngineConfig) -> None:
    prompt_sandbox = PromptSandbox(config, lambda receiver, message: None)
    long = m.TextPrompt("x" * (1 << 19))
    assert [prompt_sandbox.wants(submit(1, prompt)) for prompt in (TEXT, TEMPLATE, long)] == [False, True, True]
    assert prompt_sandbox.wants(m.Tokenize(1, TEMPLATE)) and not prompt_sandbox.wants(submit(1, TEXT, attempt=1))
    wary = PromptSandbox(config, lambda receiver, message: None, is_wary=True)
    assert wary.wants(submit(1, TEXT, attempt=1)) and not wary.wants(submit(1, TEXT))
    prompt_sandbox.beware()
    assert prompt_sandbox.wants(submit(1, TEXT)) and prompt_sandbox.wants(m.Tokenize(1, TEXT))
    assert not prompt_sandbox.wants(submit(1, m.IdsPrompt(m.ids_to_bytes([5])))), "a prompt of ids needs no encoding"


def play(config: EngineConfig, scenario: Callable[[TokenizerActor, list[m.Message]], Awaitable[None]]) -> None:
    """Runs `scenario` with an actor and the list of messages that it posts to the core and the API."""

    async def run() -> None:
        actor = TokenizerActor(config, has_prompt_sandbox=True)
        posted: list[m.Message] = []
        actor.start(lambda receiver, message: posted.append(message))
        try:
            await scenario(actor, posted)
        finally:
            await actor.stop(0)

    asyncio.run(run())


def test_a_prompt_that_takes_milliseconds_goes_to_a_process_that_is_ready(config: EngineConfig) -> None:
    async def scenario(actor: TokenizerActor, posted: list[m.Message]) -> None:
        sandbox = actor._prompt_sandbox
        assert sandbox is not None and not sandbox.wants(submit(1, NOTICEABLE))
        actor.handle([submit(1, NOTICEABLE), submit(2, TEXT)])
        assert rids(posted) == [1, 2], "no request waits for the start of a process"
        await until_async(lambda: sandbox.wants(submit(3, NOTICEABLE)), "a process has started", 60)
        actor.handle([submit(3, NOTICEABLE, n=2), m.Cancel((4,)), submit(5, TEXT)])
        assert rids(posted) == [1, 2, 5], "a short prompt does not wait for a long one"
        await until_async(lambda: len(posted) == 5, "the long prompt is encoded", 60)
        first, long, cancel = posted[0], *posted[3:]
        assert isinstance(first, m.Enqueue) and isinstance(long, m.Enqueue) and cancel == m.Cancel((4,))
        assert long.prompt_ids == first.prompt_ids and (long.rid, long.n) == (3, 2)

    play(config, scenario)


def test_a_prompt_that_takes_milliseconds_does_not_wait_behind_one_that_may_never_end(config: EngineConfig) -> None:
    async def scenario(actor: TokenizerActor, posted: list[m.Message]) -> None:
        sandbox = actor._prompt_sandbox
        assert sandbox is not None
        actor.handle([submit(1, TEMPLATE)])
        await until_async(lambda: rids(posted) == [1], "a process has started", 60)
        actor.handle([submit(2, STUCK), submit(3, TEXT), submit(5, NOTICEABLE)])
        assert rids(posted) == [1, 3, 5]
        actor.handle([m.Cancel((2,))])  # a process has it, so it runs on
        assert not sandbox.wants(submit(6, NOTICEABLE))
        await until_async(lambda: 2 in rids(posted), "the stuck prompt has failed", 60)
        actor.handle([submit(7, TEMPLATE)])
        await until_async(lambda: rids(posted)[-1] == 7, "a process has started again", 60)
        assert sandbox.wants(submit(8, NOTICEABLE))

    play(config, scenario)


def rids(posted: list[m.Message]) -> list[int]:
    """Of the requests that were answered, in order."""
    return [message.rid for message in posted if isinstance(message, m.Enqueue | m.Failed)]


def test_the_sandbox_answers_as_the_tokenizer_process_does(config: EngineConfig) -> None:
    async def scenario(actor: TokenizerActor, posted: list[m.Message]) -> None:
        direct_messages: list[m.Message] = []
        direct = TokenizerActor(config)
        direct.start(lambda receiver, message: direct_messages.append(message))
        requests: list[Any] = [
            submit(1, TEMPLATE, n=2),
            m.Tokenize(5, TEMPLATE, pieces=True),
            submit(6, replace(TEMPLATE, template="{{")),
        ]
        direct.handle(list(requests))
        actor.handle([*requests, m.Cancel((2, 77))])
        assert posted == [m.Cancel((77,))], "a cancel of a request in the sandbox waits for that request"
        await until_async(lambda: len(posted) == 5, "all requests are answered", 60)
        index = next(i for i, message in enumerate(posted) if isinstance(message, m.Enqueue))
        enqueue, expected = posted[index], direct_messages[0]
        assert isinstance(enqueue, m.Enqueue) and isinstance(expected, m.Enqueue)
        assert replace(enqueue, times=expected.times) == expected and posted[index + 1] == m.Cancel((2,))
        others = [message for message in posted[1:] if isinstance(message, m.Tokenized | m.Failed)]
        assert sorted(others, key=lambda message: message.rid) == direct_messages[1:]  # the order may differ

    play(config, scenario)


def test_a_request_that_is_cancelled_in_time_is_not_encoded(config: EngineConfig) -> None:
    async def scenario(actor: TokenizerActor, posted: list[m.Message]) -> None:
        actor.handle([submit(rid, STUCK, n=2) for rid in (10, 20, 30, 40)])
        actor.handle([m.Cancel((30,)), m.Cancel((31, 40, 41))])  # none of these has been posted yet
        actor.handle([submit(50, TEMPLATE), m.Cancel(())])
        await until_async(
            lambda: any(isinstance(message, m.Enqueue) for message in posted), "the last prompt is encoded", 60
        )
        failed = [message for message in posted if isinstance(message, m.Failed)]
        assert {message.rid for message in failed} <= {10, 11, 20, 21} and len(failed) >= 2
        assert all("takes more than 2 s" in message.detail for message in failed)
        assert not any(isinstance(message, m.Cancel) for message in posted)
        # A reset starts the sandbox again.
        actor.handle([submit(60, STUCK), m.Reset(2, 2, ("core",), "It died."), submit(60, TEMPLATE)])
        await until_async(
            lambda: any(getattr(message, "rid", 0) == 60 for message in posted), "the prompt is encoded", 60
        )
        assert isinstance(posted[-1], m.Enqueue)

    play(config, scenario)


def processes_of(actor: TokenizerActor) -> list[int]:
    """The pids of the sandbox's processes."""
    assert actor._prompt_sandbox is not None
    return [process._process.pid for process in actor._prompt_sandbox._pool._processes]


def process_of(actor: TokenizerActor) -> int:
    """The pid of the only one."""
    (pid,) = processes_of(actor)
    return pid


def has_work(actor: TokenizerActor) -> bool:
    assert actor._prompt_sandbox is not None
    return actor._prompt_sandbox._pool._num_begun > 0


async def start_and_stop_a_process(actor: TokenizerActor, posted: list[m.Message]) -> int:
    """Returns the pid of a process that has started and stands still, so what it gets is never done."""
    actor.handle([submit(1, TEMPLATE)])
    await until_async(lambda: rids(posted) == [1], "a process has started", 60)
    pid = process_of(actor)
    os.kill(pid, signal.SIGSTOP)
    return pid


def test_a_prompt_whose_process_is_killed_is_encoded_by_the_next_one(config: EngineConfig) -> None:
    async def scenario(actor: TokenizerActor, posted: list[m.Message]) -> None:
        pid = await start_and_stop_a_process(actor, posted)
        actor.handle([submit(2, NOTICEABLE), submit(3, TEMPLATE, n=2), m.Cancel((4,))])
        await until_async(lambda: has_work(actor), "the process has a prompt", 60)
        os.kill(pid, signal.SIGKILL)
        await until_async(lambda: len(posted) == 4, "both prompts are encoded", 60)
        encoded = {message.rid: message for message in posted if isinstance(message, m.Enqueue)}
        assert set(encoded) == {1, 2, 3} and encoded[3].prompt_ids == encoded[1].prompt_ids
        assert posted[posted.index(encoded[3]) + 1] == m.Cancel((4,))
        direct = TokenizerActor(config)
        direct_messages: list[m.Message] = []
        direct.start(lambda receiver, message: direct_messages.append(message))
        direct.handle([submit(2, NOTICEABLE)])
        assert replace(encoded[2], times=m.Times()) == replace(direct_messages[0], times=m.Times())
        assert actor._prompt_sandbox is not None and not actor._prompt_sandbox._retried
        assert not actor._prompt_sandbox.wants(submit(5, TEXT)), "short prompts do not have to go to the sandbox"

    play(config, scenario)


def test_a_prompt_whose_process_is_killed_twice_fails(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagewire.procs.prompt_sandbox.CPU_S", 100.0)

    async def scenario(actor: TokenizerActor, posted: list[m.Message]) -> None:
        first = await start_and_stop_a_process(actor, posted)
        actor.handle([submit(2, STUCK, n=2)])
        await until_async(lambda: has_work(actor), "the process has the prompt", 60)
        os.kill(first, signal.SIGKILL)
        await until_async(
            lambda: has_work(actor) and first not in processes_of(actor), "another process has the prompt", 60
        )
        assert rids(posted) == [1], "nothing has failed yet"
        os.kill(process_of(actor), signal.SIGKILL)
        await until_async(lambda: len(posted) == 3, "the request has failed", 60)
        text = "The process that tokenizes the prompt was killed twice: try again later."
        assert posted[1:] == [m.Failed(rid, "unavailable", text) for rid in (2, 3)]
        actor.handle([submit(4, TEMPLATE)])
        await until_async(lambda: rids(posted)[-1] == 4, "the sandbox goes on", 60)

    play(config, scenario)
