"""Whole chats: exchanges put together, and the split into training and held-out text.

An `Exchange` is what one question leads to, up to and including the last answer. Its
key is all that the user says in it; a hash of the key decides whether it is held out,
so that no evaluation prompt was ever trained on. Everything is drawn from an explicit
random source.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import facts, tool_kinds
from .kinds import KINDS
from .phrasing import made_up_word, some_name, some_words, vary

Random = random.Random
Message = dict[str, Any]
HELD_OUT_PART = 16
"""One exchange in this many is held out."""
RECALL, TOOL_CALL, TOOL_ANSWER, TOOL_IDLE = "recall", "tool_call", "tool_answer", "tool_idle"
ALL_KINDS = (*KINDS, RECALL, TOOL_CALL, TOOL_ANSWER, TOOL_IDLE)
NEEDS_NO_TOOL = (
    "greeting", "who", "abilities", "thanks", "bye", "how", "pagewire", "count_up", "echo",
    "calendar", "spelling", "opposite", "capital", "addition", "subtraction", "multiplication",
)  # fmt: skip
REPLACED_BY_TOOL = {"add": "addition", "multiply": "multiplication"}


@dataclass(frozen=True)
class Exchange:
    """Messages of one exchange; the last one is the assistant's answer."""

    kind: str
    messages: tuple[Message, ...]

    @property
    def held_out(self) -> bool:
        return is_held_out("\n".join(m["content"] for m in self.messages if m["role"] == "user"))


@dataclass(frozen=True)
class Chat:
    """A conversation with its declared tools (None without any)."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None


def is_held_out(key: str) -> bool:
    """Whether text of this key belongs to the evaluation and never to the training."""
    return hashlib.sha256(key.encode()).digest()[0] % HELD_OUT_PART == 0


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


def _plain(rng: Random, kind: str) -> Exchange:
    prompt, answer = KINDS[kind][0](rng)
    return Exchange(kind, (_user(prompt), _assistant(answer)))


def _recall(rng: Random) -> Exchange:
    """The user says something about himself and asks for it later."""
    choice = rng.random()
    if choice < 0.6:
        value = some_name(rng)
        told = rng.choice(
            (
                f"My name is {value}",
                f"I am {value}",
                f"Hi, I am {value}",
                f"I'm {value}",
                f"Hello, my name is {value}",
                f"Hi, my name is {value}",
                f"Call me {value}",
            )
        )
        reply, answer = f"Nice to meet you, {value}!", f"Your name is {value}."
        asked = rng.choice(("What is my name?", "What's my name?", "Who am I?", "Do you remember my name?"))
    elif choice < 0.8:
        value = rng.choice(facts.COLOUR_NAMES)
        told = rng.choice((f"My favorite color is {value}", f"I like the color {value}"))
        reply, answer = f"{value.capitalize()} is a nice color!", f"Your favorite color is {value}."
        asked = rng.choice(("What is my favorite color?", "Which color do I like?"))
    else:
        value = rng.choice(facts.CITIES) if rng.random() < 0.6 else made_up_word(rng).capitalize()
        told = rng.choice((f"I live in {value}", f"I am from {value}", f"My home is {value}"))
        reply, answer = f"{value} is a nice place!", f"You live in {value}."
        asked = rng.choice(("Where do I live?", "Where is my home?"))
    if told[-1].isalpha() and rng.random() < 0.3:
        told += rng.choice(".!")
    between: list[Message] = []
    for _ in range(rng.choice((0, 0, 0, 1, 1, 2, 3))):
        between += draw_exchange(rng, _any_plain(rng, without=("name_not_told",)), False).messages
    opening, closing = [_user(told), _assistant(reply)], [_user(vary(rng, asked)), _assistant(answer)]
    return Exchange(RECALL, (*opening, *between, *closing))


def _any_plain(rng: Random, without: tuple[str, ...] = ()) -> str:
    names = [name for name in KINDS if name not in without]
    return rng.choices(names, [KINDS[name][1] for name in names])[0]


def _draw(rng: Random, make: Callable[[], Exchange], held_out: bool) -> Exchange:
    for _ in range(20_000):
        exchange = make()
        if exchange.held_out == held_out:
            return exchange
    raise RuntimeError("a kind has too few different prompts to be split")


def draw_exchange(rng: Random, kind: str, held_out: bool) -> Exchange:
    """An exchange of a kind that needs no tools, from the wanted side of the split."""
    if kind == RECALL:
        return _draw(rng, lambda: _recall(rng), held_out)
    return _draw(rng, lambda: _plain(rng, kind), held_out)


def _idle_kind(rng: Random, cases: list[tool_kinds.ToolCase]) -> str:
    """A kind that none of the tools is meant for."""
    replaced = {REPLACED_BY_TOOL.get(case.name) for case in cases}
    return rng.choice([name for name in NEEDS_NO_TOOL if name not in replaced])


def _tool_exchange(rng: Random, case: tool_kinds.ToolCase, answered: bool, held_out: bool) -> Exchange:
    def make() -> Exchange:
        prompt, call = tool_kinds.question(rng, case)
        if not answered:
            return Exchange(TOOL_CALL, (_user(prompt), call))
        returned, sentence = tool_kinds.result(rng, case)
        tool = {"role": "tool", "content": returned}
        return Exchange(TOOL_ANSWER, (_user(prompt), call, tool, _assistant(sentence)))

    return _draw(rng, make, held_out)


def _system(rng: Random, share: float) -> list[Message]:
    if rng.random() >= share:
        return []
    if rng.random() < 0.7:
        content = rng.choice(facts.SYSTEM_PROMPTS)
    else:
        content = rng.choice(
            (
                f"You are {some_name(rng)}, a helpful assistant.",
                f"You work for the {some_words(rng, 1, 2)} company.",
                f"Talk like {some_words(rng, 1, 1)} and {some_words(rng, 1, 1)}.",
                f"You know all about {some_words(rng, 1, 2)}. Be kind and answer shortly.",
            )
        )
    return [{"role": "system", "content": content}]


def _tool_chat(rng: Random) -> Chat:
    cases = tool_kinds.draw_cases(rng)
    messages = _system(rng, 0.3)
    for _ in range(rng.choice((1, 2, 3))):
        if rng.random() < 0.3:
            exchange = draw_exchange(rng, _idle_kind(rng, cases), False)
        else:
            exchange = _tool_exchange(rng, rng.choice(cases), rng.random() < 0.4, False)
        messages += exchange.messages
    return Chat(messages, [tool_kinds.declaration(rng, case) for case in cases])


def training_chat(rng: Random, late: bool = False) -> Chat:
    """A chat of one to five exchanges, sometimes with tools; `late` takes the later shares."""
    if rng.random() < (0.36 if late else 0.13):
        return _tool_chat(rng)
    return _plain_chat(rng, rng.choice((1, 1, 1, 2, 3, 4, 5)), 0.25, late)


def long_chat(rng: Random, turns: int) -> Chat:
    """A chat of many exchanges, with a system prompt."""
    return _plain_chat(rng, turns, 1.0, late=True)


def _plain_chat(rng: Random, turns: int, system: float, late: bool) -> Chat:
    names = list(KINDS)
    weights = [later if late else share for _, share, later in KINDS.values()]
    messages = _system(rng, system)
    name_told = False
    while turns > 0:
        turns -= 1
        if not name_told and rng.random() < 0.05:
            exchange = draw_exchange(rng, RECALL, False)
            name_told = True
        else:
            kind = rng.choices(names, weights)[0]
            if kind == "name_not_told" and name_told:
                turns += 1
                continue
            exchange = draw_exchange(rng, kind, False)
        messages += exchange.messages
    return Chat(messages)


def held_out_chat(rng: Random, kind: str) -> Chat:
    """A chat that ends in a held-out exchange of the kind; its last message is the answer."""
    if kind in (TOOL_CALL, TOOL_ANSWER, TOOL_IDLE):
        cases = tool_kinds.draw_cases(rng)
        tools = [tool_kinds.declaration(rng, case) for case in cases]
        if kind == TOOL_IDLE:
            exchange = draw_exchange(rng, _idle_kind(rng, cases), True)
        else:
            exchange = _tool_exchange(rng, rng.choice(cases), kind == TOOL_ANSWER, True)
        return Chat([*_system(rng, 0.3), *exchange.messages], tools)
    messages = _system(rng, 0.25)
    if kind not in (RECALL, "name_not_told") and rng.random() < 0.25:
        for _ in range(rng.randint(1, 3)):
            messages += draw_exchange(rng, _any_plain(rng), False).messages
    return Chat([*messages, *draw_exchange(rng, kind, True).messages])
