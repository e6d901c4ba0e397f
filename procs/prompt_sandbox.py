"""Prompts that could hold up all others are made aside, in a process that may be killed (`killable.py`).

A chat template is a program, and it or the text that it is given may keep a tokenizer busy for ever or take all memory.
Templates that requests bring, very long texts, and what may have killed a tokenizer before are made aside at once; and
everything, once a prompt has run out of time or memory here. What comes to no end there costs its own request an error.

The process runs a tokenizer actor of its own, whose answers are sent on as if they had been made here.
`python -m pagewire.procs.prompt_child` is its main program.
"""

import asyncio
import logging
from typing import assert_never

import msgspec

from ..config.config import EngineConfig
from ..errors import ErrorKind
from ..ipc.actor import Post
from ..ipc.messages import (
    Cancel,
    ChatPrompt,
    Enqueue,
    Failed,
    IdsPrompt,
    PairPrompt,
    Submit,
    TextPrompt,
    Tokenize,
    Tokenized,
)
from .killable import Lost, Pool, Work

CPU_S = 2.0  # that a prompt may take
CPU_S_PER_CHAR = 2e-6  # and as much more for its length: twice what slow machines need
MEMORY_BYTES = 1 << 30  # that prompts may take, besides what the tokenizer has when it has started
_LONG = 1 << 18  # characters; making ids of more takes long enough for others to notice
_LOOK_S = 0.001  # between looks at prompts under way

_encode = msgspec.msgpack.Encoder().encode
_answers = msgspec.msgpack.Decoder(list[tuple[str, Enqueue | Tokenized | Failed]])

log = logging.getLogger("pagewire.tokenizer")


def num_chars(prompt: TextPrompt | ChatPrompt | IdsPrompt | PairPrompt) -> int:
    """Of a prompt as it was sent."""
    match prompt:
        case TextPrompt():
            return len(prompt.text)
        case ChatPrompt():
            return len(prompt.messages) + len(prompt.tools) + len(prompt.template_kwargs)
        case PairPrompt():
            return len(prompt.first) + len(prompt.second)
        case IdsPrompt():
            return 0
        case _:
            assert_never(prompt)


def cpu_s(prompt: TextPrompt | ChatPrompt | IdsPrompt | PairPrompt) -> float:
    """Seconds of the CPU that a prompt may take."""
    return CPU_S + CPU_S_PER_CHAR * num_chars(prompt)


def too_slow(prompt: TextPrompt | ChatPrompt | IdsPrompt | PairPrompt) -> str:
    """What is said of a prompt that took more."""
    what = "The chat template takes" if isinstance(prompt, ChatPrompt) else "The prompt's tokens take"
    return f"{what} more than {cpu_s(prompt):.0f} s for this prompt: shorten it."


TOO_LARGE = "The prompt takes more memory than it may: shorten it."


class PromptSandbox:
    """The prompts that are made aside, and what waits for them."""

    def __init__(self, config: EngineConfig, post: Post, *, is_wary: bool = False) -> None:
        """is_wary: a tokenizer has died, and those that were with it come again."""
        self._pool = Pool(config, [f"{__package__}.prompt_child"])
        self._post = post
        self._held: dict[int, Submit | Tokenize] = {}  # by rid
        self._cancelled: dict[int, list[int]] = {}  # of the held, those sequences that were cancelled
        self._is_watching = False
        self._is_wary = is_wary
        self._takes_all = False  # a prompt that was not made aside has run out of time or memory

    def wants(self, question: Submit | Tokenize) -> bool:
        """Whether this is better made aside."""
        prompt = question.prompt
        if isinstance(prompt, IdsPrompt):
            return False
        is_suspect = self._is_wary and isinstance(question, Submit) and question.attempt > 0
        return self._takes_all or is_suspect or _has_own_template(question) or num_chars(prompt) > _LONG

    def begin(self, question: Submit | Tokenize) -> None:
        """Posts its answers when they are there."""
        self._held[question.rid] = question
        self._pool.begin(question.rid, Work(_encode(question), cpu_s(question.prompt) + 1))
        self.poll()

    def hold_back(self, cancel: Cancel) -> Cancel:
        """What others are to hear of it now. The rest follows what it cancels, which it must not overtake."""
        now: list[int] = []
        for rid in cancel.rids:
            held = next((first for first, asked in self._held.items() if first <= rid < first + _num(asked)), None)
            (now if held is None else self._cancelled.setdefault(held, [])).append(rid)
        for held in list(self._cancelled):
            if len(self._cancelled[held]) == _num(self._held[held]) and self._pool.forget(held):
                del self._held[held], self._cancelled[held]  # nobody has heard of it yet
        return Cancel(tuple(now))

    def poll(self) -> None:
        """Goes on with what is under way."""
        for rid, said in self._pool.collect():
            question = self._held.pop(rid)
            if isinstance(said, str):
                self._fail(question, said)
            else:
                for receiver, message in _answers.decode(said):
                    self._post(receiver, message)
            if (cancelled := self._cancelled.pop(rid, None)) is not None:
                self._post("core", Cancel(tuple(cancelled)))
        if self._held and not self._is_watching:
            asyncio.get_running_loop().call_later(_LOOK_S, self._look)
            self._is_watching = True

    def close(self) -> None:
        """Ends the processes. What is held is forgotten."""
        self._pool.close()
        self._held.clear()
        self._cancelled.clear()

    def _look(self) -> None:
        self._is_watching = False
        self.poll()

    def _fail(self, question: Submit | Tokenize, why: Lost) -> None:
        kind: ErrorKind = "invalid_request"
        match why:
            case "late":
                text = too_slow(question.prompt)
            case "dead":
                text = TOO_LARGE
            case "unstartable":
                kind, text = "unavailable", "The process that makes such prompts cannot be started."
            case _:
                assert_never(why)
        if kind == "invalid_request" and not _has_own_template(question):
            self.beware()
        for i in range(_num(question)):
            self._post("api", Failed(question.rid + i, kind, text))

    def beware(self) -> None:
        """From now on every prompt is made aside."""
        if not self._takes_all:
            log.warning("a prompt ran out of time or memory: from now on all are made in a process that may be killed")
        self._takes_all = True


def _num(question: Submit | Tokenize) -> int:
    return question.n if isinstance(question, Submit) else 1


def _has_own_template(question: Submit | Tokenize) -> bool:
    return isinstance(question.prompt, ChatPrompt) and bool(question.prompt.template)
