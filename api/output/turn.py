"""One output of the model as events: text, reasoning and tool calls. The answers of chat, responses and messages are
all made of these, so that they cannot read the same output differently.
"""

from collections.abc import Sequence

from ...ipc.messages import Chunk, bytes_to_ids
from .parsers.events import CallArguments, CallStart, Event, Reasoning, Text
from .parsers.lexer import Grammar, Lexer

_ID_BYTES = 4  # int32


class Turn:
    """Reads one output, chunk by chunk."""

    def __init__(
        self, grammar: Grammar | None, *, parallel_tool_calls: bool = True, include_reasoning: bool = True
    ) -> None:
        """`grammar` None: the output is only text. `parallel_tool_calls` False: calls after the first are dropped."""
        self._grammar = grammar
        self._lexer: Lexer | None = None  # until the first chunk
        self._parallel = parallel_tool_calls
        self._include_reasoning = include_reasoning
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
            if isinstance(event, CallStart):
                self.num_calls += 1
            match event:
                case Text():
                    kept.append(event)
                case Reasoning():
                    if self._include_reasoning:
                        kept.append(event)
                case CallStart() | CallArguments():
                    if self._parallel or self.num_calls == 1:
                        kept.append(event)
        return kept

    def _push(self, lexer: Lexer, text: str, num_ids: int) -> list[Event]:
        reasoned = lexer.reasons
        events = lexer.push(text)
        if reasoned or lexer.reasons or any(isinstance(event, Reasoning) for event in events):
            # Tags count as reasoning, as at OpenAI. Of a step that sampled several tokens, all count or none.
            self.num_reasoning += num_ids
        return events
