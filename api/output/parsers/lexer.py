"""The lexer of model outputs: text in pieces of any size goes in, events come out.

The joined texts of the events do not depend on where the pieces are cut, so a stream and a plain answer cannot
disagree. A `Grammar` says which tags end the text and how to read what follows them. What begins like a call but is not
one comes out as text. A call that has begun cannot be taken back: an error in its arguments ends it, and the rest is
text. Time is linear, and at most `MAX_HELD` characters are held back.
"""

from collections.abc import Callable
from types import MappingProxyType
from typing import NamedTuple, Protocol

from .block import SPACE, Block, Broken, Kind, Reads, Schemas, overlap
from .events import CallStart, Event, Reasoning, Text, joined

MAX_HELD = 1 << 16  # characters that may yet turn out to be a call
_MAX_SPACES = 1 << 12  # a longer run of spaces is text, even before a block


class Reader(Protocol):
    """Reads the block that begins with `tag`, which was just read, into `block`. Returns the last character it was sent
    if that is not part of the block, else ""."""

    def __call__(self, tag: str, block: Block) -> Reads[str]: ...


class Grammar(NamedTuple):
    """What a model writes besides text. No tag may contain another."""

    read: Reader
    leads: tuple[str, ...] = ()  # begin a block at the start of an answer only
    tags: tuple[str, ...] = ()  # begin a block anywhere in an answer
    reasoning_tags: tuple[str, ...] = ()  # begin a block anywhere in reasoning
    marks: tuple[str, ...] = ()  # further tags, inside blocks
    reasons: Callable[[str], bool] = lambda prompt: False  # whether the output of a prompt with this end is reasoning
    answer_tags: tuple[str, ...] = ()  # begin a block only in text of the kind "answer", as `tags` do there, too
    needs_schemas: bool = False  # whether the reader needs `schemas` to know the types of arguments
    schemas: Schemas = MappingProxyType({})  # of the request's tools

    @property
    def all_marks(self) -> tuple[str, ...]:
        """All tags. Those that are special tokens have to be kept when the output is detokenized."""
        return tuple(dict.fromkeys((*self.leads, *self.tags, *self.reasoning_tags, *self.answer_tags, *self.marks)))

    def tags_in(self, kind: Kind) -> tuple[str, ...]:
        """The tags that begin a block in text of this kind."""
        if kind == "reasoning":
            return self.reasoning_tags
        return self.tags if kind == "text" else (*self.tags, *self.answer_tags)


class Lexer:
    """Reads one output."""

    def __init__(self, grammar: Grammar, prompt: str = "") -> None:
        """`prompt`: the end of its text; the chat template may have begun the reasoning there."""
        self._grammar = grammar
        self._kind: Kind = "reasoning" if grammar.reasons(prompt) else "text"
        self._at_start = True  # only spaces were read of this part of the output
        self._trims = self._kind == "reasoning"  # those spaces are dropped
        self._held = ""  # a possible beginning of a tag
        self._spaces: list[str] = []  # before `_held`; dropped if a block follows
        self._num_spaces = 0  # of the whole run of spaces, including those already given out
        self._block: Block | None = None
        self._reads: Reads[str] | None = None
        self._num_calls = 0

    @property
    def reasons(self) -> bool:
        """Whether the output is in its reasoning."""
        return self._kind == "reasoning"

    def push(self, text: str) -> list[Event]:
        """The events that are certain once `text` is read."""
        events: list[Event] = []
        while text:
            if self._block is not None:
                text = self._push_block(self._block, text, events)
            elif self._at_start:
                text = self._push_start(text, events)
            else:
                text = self._push_words(text, events)
        return joined(events)

    def flush(self) -> list[Event]:
        """The output has ended: the remaining events."""
        events: list[Event] = []
        if self._block is not None:
            self._take(self._block, events)
            if not self._block.quiet:
                self._say("".join(self._block.raw), events)
        elif self._held or not (self._num_calls or self.reasons):
            self._say("".join(self._spaces) + self._held, events)
        self._block = self._reads = None
        self._held = ""
        self._spaces.clear()
        return joined(events)

    # ── words ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _push_start(self, text: str, events: list[Event]) -> str:
        text = self._held + text
        self._held = ""
        rest = text.lstrip(SPACE)
        self._hold(text[: len(text) - len(rest)], events)
        if not rest:
            return ""
        for lead in self._grammar.leads if self._kind == "text" else ():
            if rest.startswith(lead):
                self._enter(lead, events)
                return rest[len(lead) :]
            if lead.startswith(rest):
                self._held = rest
                return ""
        self._at_start = False
        return rest

    def _push_words(self, text: str, events: list[Event]) -> str:
        text = self._held + text
        self._held = ""
        tags = self._grammar.tags_in(self._kind)
        if not any(tag[0] in text for tag in tags):  # nearly always
            self._give(text, events)
            return ""
        found = [(at, tag) for tag in tags if (at := text.find(tag)) >= 0]
        if found:
            at, tag = min(found)
            self._give(text[:at], events)
            self._enter(tag, events)
            return text[at + len(tag) :]
        num_words = len(text) - max((overlap(text, tag) for tag in tags), default=0)
        self._held = text[num_words:]
        self._give(text[:num_words], events)
        return ""

    def _give(self, text: str, events: list[Event]) -> None:
        """Gives `text` out, without the spaces at its end."""
        words = text.rstrip(SPACE)
        if words:
            self._say("".join(self._spaces) + words, events)
            self._forget_spaces()
            self._trims = False
        self._hold(text[len(words) :], events)

    def _hold(self, spaces: str, events: list[Event]) -> None:
        if self._trims or not spaces:
            return
        self._spaces.append(spaces)
        self._num_spaces += len(spaces)
        if self._num_spaces > _MAX_SPACES:
            self._say("".join(self._spaces), events)
            self._spaces.clear()

    def _forget_spaces(self) -> None:
        self._spaces.clear()
        self._num_spaces = 0

    def _say(self, text: str, events: list[Event]) -> None:
        if text:
            events.append(Reasoning(text) if self.reasons else Text(text))

    # ── blocks ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _enter(self, tag: str, events: list[Event]) -> None:
        self._block = Block("".join(self._spaces) + tag, self._kind, self._grammar.schemas)
        self._forget_spaces()
        self._reads = self._grammar.read(tag, self._block)
        try:
            next(self._reads)
        except StopIteration:
            self._leave(self._block, events)

    def _push_block(self, block: Block, text: str, events: list[Event]) -> str:
        assert self._reads is not None
        send, raw = self._reads.send, block.raw
        for at, char in enumerate(text):
            if len(raw) >= MAX_HELD:
                return self._break(block, text[at:], events)
            raw.append(char)
            try:
                send(char)
            except StopIteration as end:
                self._leave(block, events)
                return f"{end.value}{text[at + 1 :]}"
            except Broken:
                if raw:
                    raw.pop()
                return self._break(block, text[at:], events)
        self._take(block, events)
        return ""

    def _break(self, block: Block, rest: str, events: list[Event]) -> str:
        """The block cannot be read further: `rest` is text, or another block."""
        self._take(block, events)
        self._say("".join(block.raw), events)
        self._block = self._reads = None
        self._at_start = self._trims = False
        return rest

    def _leave(self, block: Block, events: list[Event]) -> None:
        self._take(block, events)
        self._block = self._reads = None
        self._at_start = self._trims = block.kind != self._kind
        self._kind = block.kind

    def _take(self, block: Block, events: list[Event]) -> None:
        chunks = block.take()
        self._num_calls += sum(isinstance(event, CallStart) for event in chunks)
        events += chunks
