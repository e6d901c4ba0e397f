"""POST /v1/chat/completions: the answer's shape, plain and streamed, with reasoning and tool calls.

Both shapes come from the same events of the same parser, so they cannot disagree.
"""

from collections.abc import Sequence

import msgspec

from ...ipc.messages import Chunk
from ..gateway.timeline import Timeline
from ..output.parsers.events import CallArguments, CallStart, Event, Reasoning, Text
from ..output.parsers.lexer import Grammar
from ..output.reply import Reply, UsageCount, chat_logprobs, id_list, json_text, new_id, prompt_logprobs, timings_body
from ..output.shapes import FinishReason, PromptLogprobs, TimingsBody, TokenLogprobBody, UsageBody
from ..output.sse import as_event
from ..output.turn import Turn
from .types import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    FunctionBody,
    ToolCallBody,
)

_encode = msgspec.json.Encoder().encode


class ChatReply(Reply):
    """The answer to one chat request."""

    def __init__(
        self,
        *,
        model: str,
        created: int,
        n: int,
        include_usage: bool = False,
        continuous_usage: bool = False,
        has_logprobs: bool = False,
        has_prompt_logprobs: bool = False,
        names_ids: bool = False,
        has_token_ids: bool = False,
        prefix: str = "",
        has_timings: bool = False,
        grammar: Grammar | None = None,
        parallel_tool_calls: bool = True,
        include_reasoning: bool = True,
    ) -> None:
        """`grammar`: what to read the output with; None if it is words only. `prefix`: what the answer begins with.
        `names_ids`: log-probabilities name tokens by their ids."""
        self._id = new_id("chatcmpl-")
        self._model = model
        self._created = created
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage
        self._has_logprobs = has_logprobs
        self._has_prompt_logprobs = has_prompt_logprobs
        self._prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
        self._names_ids = names_ids
        self._has_token_ids = has_token_ids
        self._prefix = prefix
        self._has_timings = has_timings
        self._timings: TimingsBody | msgspec.UnsetType = msgspec.UNSET  # until the request has ended
        self._usage = UsageCount(n)
        self._prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET  # for the next event, or the body
        self._prompt_was_sent = False
        self._choices = [
            _Choice(Turn(grammar, parallel_tool_calls=parallel_tool_calls, include_reasoning=include_reasoning))
            for _ in range(n)
        ]
        # Most events carry a piece of text and nothing else: two constants around an encoded string.
        self._is_simple = not (has_logprobs or has_token_ids or continuous_usage)
        self._is_plain = self._is_simple and grammar is None
        head = f'"id":{json_text(self._id)},"object":"chat.completion.chunk"'
        head += f',"created":{created},"model":{json_text(model)}'
        usage = ',"usage":null' if include_usage else ""
        self._heads = [f'data: {{{head},"choices":[{{"index":{i},"delta":{{"content":'.encode() for i in range(n)]
        self._tail = f'}},"logprobs":null,"finish_reason":null}}]{usage}}}\n\n'.encode()

    def admitted(self, nums_prompt: Sequence[int]) -> None:
        """For the usage."""
        self._usage.begin(nums_prompt)

    def ended(self, timeline: Timeline) -> None:
        """See `Reply`."""
        if self._has_timings:
            self._timings = timings_body(timeline)

    # ── streamed ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def opening(self) -> list[bytes]:
        """The role, once for each choice."""
        delta = ChatDelta(role="assistant", content=self._prefix)
        return [self._event([ChatChunkChoice(i, delta)]) for i in range(len(self._choices))]

    def events(self, index: int, chunk: Chunk) -> list[bytes]:
        """The news of one choice; the last has an empty delta and the finish reason."""
        if self._is_plain and chunk.finish is None:
            return [self._heads[index] + _encode(chunk.text) + self._tail] if chunk.text else []
        events: list[bytes] = []
        if self._is_simple:
            for event in self._choices[index].read(chunk):
                if isinstance(event, Text):
                    events.append(self._heads[index] + _encode(event.text) + self._tail)
                else:
                    events.append(self._event([ChatChunkChoice(index, self._choices[index].delta(event))]))
        else:
            events.extend(self._full_events(index, chunk))
        if chunk.finish is not None:
            self._add_usage(index, chunk)
            last = ChatChunkChoice(
                index,
                ChatDelta(),
                finish_reason=self._choices[index].finish_reason(chunk),
                stop_reason=chunk.stop_reason,
            )
            events.append(self._event([last]))
        return events

    def closing(self) -> list[bytes]:
        """The usage and the timings, if they were asked for."""
        return [self._event([], self._usage.body())] if self._include_usage or self._has_timings else []

    def _full_events(self, index: int, chunk: Chunk) -> list[bytes]:
        choice = self._choices[index]
        self._usage.draw(index, chunk)
        deltas = [choice.delta(event) for event in choice.read(chunk)]
        logprobs = None
        if self._has_logprobs and chunk.logprobs:
            logprobs = ChatLogprobs(chat_logprobs(chunk, as_ids=self._names_ids))
        ids: list[int] | msgspec.UnsetType = msgspec.UNSET
        if self._has_token_ids:
            if chunk.ids:
                ids = id_list(chunk.ids)
            if chunk.prompt is not None and not self._prompt_was_sent:
                self._prompt_token_ids = id_list(chunk.prompt.ids)
                self._prompt_was_sent = True
        if not deltas and (logprobs is not None or ids is not msgspec.UNSET):
            deltas = [ChatDelta(content="")]  # what gave no text yet still has its ids and log-probabilities
        events: list[bytes] = []
        for delta in deltas:
            events.append(self._event([ChatChunkChoice(index, delta, logprobs, token_ids=ids)]))
            logprobs, ids = None, msgspec.UNSET  # once
        return events

    def _add_usage(self, index: int, last: Chunk) -> None:
        self._usage.add(index, last.usage)
        self._usage.add_reasoning(self._choices[index].turn.num_reasoning)

    def _event(self, choices: list[ChatChunkChoice], usage: UsageBody | None = None) -> bytes:
        prompt_ids, self._prompt_token_ids = self._prompt_token_ids, msgspec.UNSET
        if self._continuous_usage and choices:
            usage = self._usage.so_far(choices[0].index)
        chunk = ChatChunk(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=usage if self._include_usage else msgspec.UNSET,
            prompt_token_ids=prompt_ids,
            timings=self._timings,
        )
        return as_event(_encode(chunk))

    # ── plain ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def add(self, index: int, chunk: Chunk) -> None:
        """Takes one choice's news."""
        choice = self._choices[index]
        for event in choice.read(chunk):
            choice.collect(event)
        if self._has_logprobs:
            choice.logprobs.extend(chat_logprobs(chunk, as_ids=self._names_ids))
        if self._has_prompt_logprobs and chunk.prompt is not None:
            self._prompt_logprobs = prompt_logprobs(chunk.prompt)
        if self._has_token_ids:
            choice.token_ids.extend(id_list(chunk.ids))
            if chunk.prompt is not None:
                self._prompt_token_ids = id_list(chunk.prompt.ids)
        if chunk.finish is not None:
            self._add_usage(index, chunk)
            choice.last = chunk

    def body(self) -> bytes:
        """The chat.completion object."""
        return _encode(
            ChatCompletion(
                id=self._id,
                created=self._created,
                model=self._model,
                choices=[self._plain_choice(i, choice) for i, choice in enumerate(self._choices)],
                usage=self._usage.body(),
                prompt_token_ids=self._prompt_token_ids,
                prompt_logprobs=self._prompt_logprobs,
                timings=self._timings,
            )
        )

    def _plain_choice(self, index: int, choice: "_Choice") -> ChatChoice:
        assert choice.last is not None, f"choice {index} has not ended"
        calls = choice.calls()
        content = self._prefix + "".join(choice.texts)
        reasoning = "".join(choice.reasoning) or msgspec.UNSET
        return ChatChoice(
            index=index,
            message=ChatMessage(
                content=None if calls and not content else content,
                tool_calls=calls if calls else msgspec.UNSET,
                reasoning=reasoning,
                reasoning_content=reasoning,
            ),
            logprobs=ChatLogprobs(choice.logprobs) if self._has_logprobs else None,
            finish_reason=choice.finish_reason(choice.last),
            stop_reason=choice.last.stop_reason,
            token_ids=choice.token_ids if self._has_token_ids else msgspec.UNSET,
        )


class _Choice:
    """One choice on its way."""

    def __init__(self, turn: Turn) -> None:
        self.turn = turn
        self._num_streamed_calls = 0
        self.texts: list[str] = []
        self.reasoning: list[str] = []
        self.logprobs: list[TokenLogprobBody] = []
        self.token_ids: list[int] = []
        self.last: Chunk | None = None
        self._calls: list[tuple[str, str, list[str]]] = []  # id, name, pieces of the arguments

    def read(self, chunk: Chunk) -> Sequence[Event]:
        """What the chunk says."""
        return self.turn.read(chunk)

    def finish_reason(self, last: Chunk) -> FinishReason:
        """OpenAI's reason for the end."""
        assert last.finish in ("stop", "length"), f"a choice ended with {last.finish}"
        return "tool_calls" if self.turn.num_calls and last.finish == "stop" else last.finish

    def delta(self, event: Event) -> ChatDelta:
        """An event as OpenAI streams it: a call's id and name once, then pieces of its arguments."""
        index = self._num_streamed_calls - 1
        match event:
            case Text(text=text):
                return ChatDelta(content=text)
            case Reasoning(text=text):
                return ChatDelta(reasoning=text, reasoning_content=text)
            case CallStart(name=name):
                self._num_streamed_calls += 1
                call = ToolCallBody(FunctionBody("", name), index=index + 1, id=new_id("call_"), type="function")
                return ChatDelta(tool_calls=[call])
            case CallArguments(text=text):
                return ChatDelta(tool_calls=[ToolCallBody(FunctionBody(text), index=index)])

    def collect(self, event: Event) -> None:
        """An event into the plain answer."""
        match event:
            case Text(text=text):
                self.texts.append(text)
            case Reasoning(text=text):
                self.reasoning.append(text)
            case CallStart(name=name):
                self._calls.append((new_id("call_"), name, []))
            case CallArguments(text=text):
                self._calls[-1][2].append(text)

    def calls(self) -> list[ToolCallBody]:
        """The collected calls."""
        return [
            ToolCallBody(FunctionBody("".join(pieces), name), id=id, type="function")
            for id, name, pieces in self._calls
        ]
