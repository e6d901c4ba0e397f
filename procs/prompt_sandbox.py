"""The prompt sandbox: tokenizes prompts that could make all others wait, in a process that may be killed.

A chat template is a program: it, or a text, may keep a tokenizer busy for ever or take all memory. The sandbox gets
templates of requests, very long texts, and prompts that may have killed a tokenizer before. Once a prompt outside of it
has run out of time or memory, it gets all prompts. A prompt that never ends there fails its own request.

Prompts that take milliseconds go there, too, so that short ones do not wait for them; but neither before a process has
started, nor behind a prompt that may never end.

The process runs a tokenizer actor of its own, whose messages are passed on. Its main program is
`python -m pagewire.procs.prompt_child`; `killable.py` starts and kills it.
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

CPU_S = 2.0  # for a prompt
CPU_S_PER_CHAR = 2e-6  # in addition; twice what slow machines need
MEMORY_BYTES = 1 << 30  # for prompts, besides what the tokenizer has allocated at its start
_LONG = 1 << 18  # characters; a prompt of more is never tokenized outside
_NOTICEABLE = 1 << 14  # characters; tokenizing more takes milliseconds, in which others would wait
_LOOK_S = 0.001  # between polls of the processes

_encode = msgspec.msgpack.Encoder().encode
_answers = msgspec.msgpack.Decoder(list[tuple[str, Enqueue | Tokenized | Failed]])

log = logging.getLogger("pagewire.tokenizer")


def num_chars(prompt: TextPrompt | ChatPrompt | IdsPrompt | PairPrompt) -> int:
    """The length of a prompt as it was sent; 0 for ids."""
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
    """The CPU time that a prompt may take, in seconds."""
    return CPU_S + CPU_S_PER_CHAR * num_chars(prompt)


def too_slow(prompt: TextPrompt | ChatPrompt | IdsPrompt | PairPrompt) -> str:
    """The error message for a prompt that took more."""
    what = "The chat template takes" if isinstance(prompt, ChatPrompt) else "The prompt's tokens take"
    return f"{what} more than {cpu_s(prompt):.0f} s for this prompt: shorten it."


TOO_LARGE = "The prompt takes more memory than it may: shorten it."


class PromptSandbox:
    """The requests whose prompts are tokenized in the sandbox."""

    def __init__(self, config: EngineConfig, post: Post, *, is_wary: bool = False) -> None:
        """is_wary: a tokenizer has died, and its requests come again, so they go to the sandbox."""
        self._pool = Pool(config, [f"{__package__}.prompt_child"])
        self._post = post
        self._held: dict[int, Submit | Tokenize] = {}  # by rid
        self._cancelled: dict[int, list[int]] = {}  # rid of a held request → its cancelled sequences
        self._risky: set[int] = set()  # rids of held requests that may take seconds
        self._retried: set[int] = set()  # rids of held requests whose process was killed
        self._is_watching = False
        self._is_wary = is_wary
        self._takes_all = False  # a prompt outside the sandbox has run out of time or memory

    def wants(self, question: Submit | Tokenize) -> bool:
        """Whether this request belongs into the sandbox."""
        if isinstance(question.prompt, IdsPrompt):
            return False
        return self._takes_all or self._is_risky(question) or (_is_noticeable(question) and self._is_free)

    def take(self, question: Submit | Tokenize) -> bool:
        """Queues a request that belongs into the sandbox; `poll` posts the messages that its process answers with.
        False: the caller tokenizes it."""
        if not self.wants(question):
            if _is_noticeable(question):
                self._pool.prepare()  # for the next one
                self.poll()
            return False
        self._held[question.rid] = question
        if self._is_risky(question):
            self._risky.add(question.rid)
        self._begin(question)
        self.poll()
        return True

    def hold_back(self, cancel: Cancel) -> Cancel:
        """The part of a cancel that can be sent on now. The rest must not overtake the `Enqueue` that it cancels, so
        it is sent after that."""
        now: list[int] = []
        for rid in cancel.rids:
            held = next((first for first, asked in self._held.items() if first <= rid < first + _num(asked)), None)
            (now if held is None else self._cancelled.setdefault(held, [])).append(rid)
        for held in list(self._cancelled):
            if len(self._cancelled[held]) == _num(self._held[held]) and self._pool.forget(held):
                del self._held[held], self._cancelled[held]  # no process has it
                self._risky.discard(held)
                self._retried.discard(held)
        return Cancel(tuple(now))

    def poll(self) -> None:
        """Posts finished work, and begins waiting work."""
        for rid, said in self._pool.collect():
            if said == "killed" and rid not in self._retried:
                log.warning("a process that tokenizes prompts was killed: request %d is tokenized again", rid)
                self._retried.add(rid)
                self._risky.add(rid)  # it may be the cause
                self._begin(self._held[rid])
                continue
            question = self._held.pop(rid)
            self._risky.discard(rid)
            self._retried.discard(rid)
            if isinstance(said, str):
                self._fail(question, said)
            else:
                for receiver, message in _answers.decode(said):
                    self._post(receiver, message)
            if (cancelled := self._cancelled.pop(rid, None)) is not None:
                self._post("core", Cancel(tuple(cancelled)))
        if (self._held or self._pool.num_started < self._pool.num_processes) and not self._is_watching:
            asyncio.get_running_loop().call_later(_LOOK_S, self._look)
            self._is_watching = True

    def close(self) -> None:
        """Ends the processes and drops all held requests."""
        self._pool.close()
        self._held.clear()
        self._risky.clear()
        self._retried.clear()
        self._cancelled.clear()

    def _begin(self, question: Submit | Tokenize) -> None:
        self._pool.begin(question.rid, Work(_encode(question), cpu_s(question.prompt) + 1))

    def _is_risky(self, question: Submit | Tokenize) -> bool:
        is_suspect = self._is_wary and isinstance(question, Submit) and question.attempt > 0
        return is_suspect or _has_own_template(question) or num_chars(question.prompt) > _LONG

    @property
    def _is_free(self) -> bool:
        """Whether a prompt waits here for milliseconds at most: no process has to start, none may be stuck."""
        return self._pool.num_started > 0 and not self._risky

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
            case "killed":
                kind, text = "unavailable", "The process that tokenizes the prompt was killed twice: try again later."
            case "unstartable":
                kind, text = "unavailable", "The process that tokenizes such prompts cannot be started."
            case _:
                assert_never(why)
        if kind == "invalid_request" and not _has_own_template(question):
            self.beware()
        for i in range(_num(question)):
            self._post("api", Failed(question.rid + i, kind, text))

    def beware(self) -> None:
        """Sends every prompt to the sandbox from now on."""
        if not self._takes_all:
            log.warning("a prompt ran out of time or memory: from now on all are tokenized in the sandbox")
        self._takes_all = True


def _is_noticeable(question: Submit | Tokenize) -> bool:
    return num_chars(question.prompt) > _NOTICEABLE


def _num(question: Submit | Tokenize) -> int:
    return question.n if isinstance(question, Submit) else 1


def _has_own_template(question: Submit | Tokenize) -> bool:
    return isinstance(question.prompt, ChatPrompt) and bool(question.prompt.template)
