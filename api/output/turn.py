"""One output of the model as events: text, reasoning and tool calls. The answers of chat, responses and messages are
all made of these, so that they cannot read the same output differently.
"""

from collections.abc import Sequence

import msgspec

from ...ipc.messages import Chunk, bytes_to_ids
from .parsers.events import CallArguments, CallStart, Event, Reasoning, Text
from .parsers.lexer import Grammar, Lexer

_ID_BYTES = 4  # int32


class _CustomArguments(msgspec.Struct, frozen=True):
    input: str


class Turn:
    """Reads one output, chunk by chunk."""

    def __init__(
        self,
        grammar: Grammar | None,
        *,
        parallel_tool_calls: bool = True,
        include_reasoning: bool = True,
        must_call: bool = False,
        custom: frozenset[str] = frozenset(),
    ) -> None:
        """`grammar` None: the output is only text. `parallel_tool_calls` False: calls after the first are dropped.
        `must_call`: the output is calls and nothing else, so text is a part of a call that a length limit cut off.
        `custom`: tools whose arguments are given as one text, the argument `input`, when the call is complete."""
        self._grammar = grammar
        self._lexer: Lexer | None = None  # until the first chunk
        self._parallel = parallel_tool_calls
        self._include_reasoning = include_reasoning
        self._must_call = must_call
        self.custom = custom
        self._custom_pieces: list[str] | None = None  # of the arguments of an open call of a custom tool
        self._is_custom_kept = False  # the client gets that call
        self.num_calls = 0
        self.num_reasoning = 0  # tokens

    @property
    def is_verbatim(self) -> bool:
        """Whether the events of a chunk are just its text."""
        return self._grammar is None

    def read(self, chunk: Chunk) -> Sequence[Event]:
        """The events that the chunk completes."""
        if self._grammar is None:
            return (Text(chunk.text),) if chunk.text else ()
        if self._lexer is None:
            self._lexer = Lexer(self._grammar, chunk.prompt_end or "")
        if chunk.lengths:  # resumed tokens are counted one by one, as they came first
            events, start = [], 0
            for length in bytes_to_ids(chunk.lengths):
                events += self._push(self._lexer, chunk.text[start : start + length], 1)
                start += length
        else:
            events = self._push(self._lexer, chunk.text, len(chunk.ids) // _ID_BYTES)
        if chunk.finish is not None:
            events += self._lexer.flush()
        kept: list[Event] = []
        for event in events:
            self._keep(event, kept)
        if chunk.finish is not None and self._custom_pieces is not None:
            self._end_custom(kept)
        return kept

    def _keep(self, event: Event, kept: list[Event]) -> None:
        """Appends the event to those that the client gets, if it does."""
        if isinstance(event, CallStart):
            self.num_calls += 1
        if self._custom_pieces is not None:
            if isinstance(event, CallArguments):
                self._custom_pieces.append(event.text)
                return
            self._end_custom(kept)
        match event:
            case Text():
                is_kept = not self._must_call
            case Reasoning():
                is_kept = self._include_reasoning
            case CallStart(name=name):
                is_kept = self._parallel or self.num_calls == 1
                if name in self.custom:
                    self._custom_pieces, self._is_custom_kept = [], is_kept
            case CallArguments():
                is_kept = self._parallel or self.num_calls == 1
        if is_kept:
            kept.append(event)

    def _end_custom(self, kept: list[Event]) -> None:
        assert self._custom_pieces is not None
        text = custom_input("".join(self._custom_pieces))
        self._custom_pieces = None
        if text and self._is_custom_kept:
            kept.append(CallArguments(text))

    def _push(self, lexer: Lexer, text: str, num_ids: int) -> list[Event]:
        reasoned = lexer.reasons
        events = lexer.push(text)
        if reasoned or lexer.reasons or any(isinstance(event, Reasoning) for event in events):
            # Tags count as reasoning, as at OpenAI. Of a step that sampled several tokens, all count or none.
            self.num_reasoning += num_ids
        return events


def custom_input(arguments: str) -> str:
    """The input of a custom tool in the arguments of its function. What is no such object is the input itself."""
    for end in ("", '"}', "}"):  # a length limit may have cut it off
        try:
            return msgspec.json.decode(arguments + end, type=_CustomArguments).input
        except (msgspec.MsgspecError, RecursionError):
            continue
    return arguments
