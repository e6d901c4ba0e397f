"""Which prompts are made aside, and in which order the core hears of them."""

import asyncio
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
STUCK = replace(TEMPLATE, template="{% for i in range(99999) %}{% for i in range(99999) %}{% endfor %}{% endfor %}")


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    facts = ModelFacts(path=str(vocabulary.add_tokenizer(tmp_path)), name="m", max_position=64, vocab_size=320,
                       eos_token_ids=(2,), checkpoint_dtype="float32")  # fmt: skip
    return resolve(Config(), facts, MachineFacts(num_cores=1))


def submit(rid: int, prompt: m.TextPrompt | m.ChatPrompt | m.IdsPrompt, n: int = 1, attempt: int = 0) -> m.Submit:
    return m.Submit(rid, n, prompt, m.Sampling(), m.Limits(4), m.TextSpec(), attempt=attempt)


def test_what_is_made_aside(config: EngineConfig) -> None:
    prompt_sandbox = PromptSandbox(config, lambda receiver, message: None)
    long = m.TextPrompt("x" * (1 << 19))
    assert [prompt_sandbox.wants(submit(1, prompt)) for prompt in (TEXT, TEMPLATE, long)] == [False, True, True]
    assert prompt_sandbox.wants(m.Tokenize(1, TEMPLATE)) and not prompt_sandbox.wants(submit(1, TEXT, attempt=1))
    wary = PromptSandbox(config, lambda receiver, message: None, is_wary=True)
    assert wary.wants(submit(1, TEXT, attempt=1)) and not wary.wants(submit(1, TEXT))
    prompt_sandbox.beware()
    assert prompt_sandbox.wants(submit(1, TEXT)) and prompt_sandbox.wants(m.Tokenize(1, TEXT))
    assert not prompt_sandbox.wants(submit(1, m.IdsPrompt(m.ids_to_bytes([5])))), "there is nothing to be made of ids"


def play(config: EngineConfig, scenario: Callable[[TokenizerActor, list[m.Message]], Awaitable[None]]) -> None:
    """With an actor, and what it says to core and api."""

    async def run() -> None:
        actor = TokenizerActor(config, has_prompt_sandbox=True)
        said: list[m.Message] = []
        actor.start(lambda receiver, message: said.append(message))
        try:
            await scenario(actor, said)
        finally:
            await actor.stop(0)

    asyncio.run(run())


def test_answers_are_those_that_are_made_here(config: EngineConfig) -> None:
    async def scenario(actor: TokenizerActor, said: list[m.Message]) -> None:
        here: list[m.Message] = []
        plain = TokenizerActor(config)
        plain.start(lambda receiver, message: here.append(message))
        asked: list[Any] = [
            submit(1, TEMPLATE, n=2),
            m.Tokenize(5, TEMPLATE, pieces=True),
            submit(6, replace(TEMPLATE, template="{{")),
        ]
        plain.handle(list(asked))
        actor.handle([*asked, m.Cancel((2, 77))])
        assert said == [m.Cancel((77,))], "what is cancelled aside waits for what it cancels"
        await until_async(lambda: len(said) == 5, "all are answered", 60)
        at = next(i for i, message in enumerate(said) if isinstance(message, m.Enqueue))
        enqueue, as_here = said[at], here[0]
        assert isinstance(enqueue, m.Enqueue) and isinstance(as_here, m.Enqueue)
        assert replace(enqueue, times=as_here.times) == as_here and said[at + 1] == m.Cancel((2,))
        others = [message for message in said[1:] if isinstance(message, m.Tokenized | m.Failed)]
        assert sorted(others, key=lambda message: message.rid) == here[1:]  # two are made at a time

    play(config, scenario)


def test_who_is_given_up_in_time_is_not_made(config: EngineConfig) -> None:
    async def scenario(actor: TokenizerActor, said: list[m.Message]) -> None:
        actor.handle([submit(rid, STUCK, n=2) for rid in (10, 20, 30, 40)])
        actor.handle([m.Cancel((30,)), m.Cancel((31, 40, 41))])  # of which nobody has heard yet
        actor.handle([submit(50, TEMPLATE), m.Cancel(())])
        await until_async(lambda: any(isinstance(message, m.Enqueue) for message in said), "the last one is made", 60)
        failed = [message for message in said if isinstance(message, m.Failed)]
        assert {message.rid for message in failed} <= {10, 11, 20, 21} and len(failed) >= 2
        assert all("takes more than 2 s" in message.detail for message in failed)
        assert not any(isinstance(message, m.Cancel) for message in said)
        actor.handle([submit(60, STUCK), m.Reset(2, 2, ("core",), "It died."), submit(60, TEMPLATE)])  # begins anew
        await until_async(lambda: any(getattr(message, "rid", 0) == 60 for message in said), "it is made", 60)
        assert isinstance(said[-1], m.Enqueue)

    play(config, scenario)
