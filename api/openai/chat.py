"""POST /v1/chat/completions: the answer's shape, plain and streamed, with reasoning and tool calls.

Both shapes are made of the same pieces, so they cannot disagree.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from ...ipc.messages import Chunk
from ..gateway.timeline import Timeline
from ..output.parsers.events import CallArguments, CallStart, Event, Reasoning, Text
from ..output.reply import Reply, UsageCount, chat_logprobs, id_list, json_text, new_id, prompt_logprobs, timings_body
from ..output.shapes import FinishReason, PromptLogprobs, TimingsBody, TokenLogprobBody, UsageBody
from ..output.sse import as_event
from ..output.turn import Turn
from .kv_transfer import Transfer, transferred
from .types import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    CustomBody,
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
        is_streamed: bool,
        include_usage: bool = False,
        continuous_usage: bool = False,
        has_logprobs: bool = False,
        has_prompt_logprobs: bool = False,
        names_ids: bool = False,
        has_token_ids: bool = False,
        prefix: str = "",
        has_timings: bool = False,
        new_turn: Callable[[], Turn] = lambda: Turn(None),
        has_functions: bool = False,
        transfer: Transfer | None = None,
        service_tier: str | UnsetType = UNSET,
    ) -> None:
        """`new_turn`: makes the reader of a choice's output. `prefix`: what the answer begins with. `names_ids`:
        log-probabilities name tokens by their ids. `has_functions`: the request has `functions`, so its calls are
        `function_call`."""
        self._id = new_id("chatcmpl-")
        self._transfer = transfer
        self._service_tier = service_tier
        self._model = model
        self._created = created
        self._is_streamed = is_streamed
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage
        self._has_logprobs = has_logprobs
        self._has_prompt_logprobs = has_prompt_logprobs
        self._prompt_logprobs: PromptLogprobs | None = None
        self._names_ids = names_ids
        self._has_token_ids = has_token_ids
        self._prefix = prefix
        self._has_timings = has_timings
        self._timings: TimingsBody | UnsetType = UNSET  # until the request has ended
        self._usage = UsageCount(n)
        self._prompt_token_ids: list[int] | UnsetType = UNSET  # for the next event, or the body
        self._has_prompt_ids = False  # they were taken from the first chunk that had them
        self._choices = [_Choice(new_turn()) for _ in range(n)]
        self._has_functions = has_functions
        # Most chunks are a piece of text and nothing else: their event is two constants around an encoded string.
        self._is_simple = is_streamed and not (has_logprobs or has_token_ids or continuous_usage)
        self._is_verbatim = self._is_simple and self._choices[0].turn.is_verbatim
        head = f'"id":{json_text(self._id)},"object":"chat.completion.chunk"'
        head += f',"created":{created},"model":{json_text(model)}'
        if service_tier is not UNSET:
            head += f',"service_tier":{json_text(service_tier)}'
        usage = ',"usage":null' if include_usage else ""
        self._heads = [f'data: {{{head},"choices":[{{"index":{i},"delta":{{"content":'.encode() for i in range(n)]
        self._tail = f'}},"logprobs":null,"finish_reason":null}}]{usage}}}\n\n'.encode()

    def admitted(self, nums_prompt: Sequence[int]) -> None:
        self._usage.begin(nums_prompt)

    def ended(self, timeline: Timeline) -> None:
        if self._has_timings:
            self._timings = timings_body(timeline)

    def opening(self) -> list[bytes]:
        """The role, once for each choice."""
        delta = ChatDelta(role="assistant", content=self._prefix)
        return [self._event([ChatChunkChoice(i, delta)]) for i in range(len(self._choices))]

    def take(self, index: int, chunk: Chunk) -> list[bytes]:
        if self._is_verbatim and chunk.finish is None:
            return [self._heads[index] + _encode(chunk.text) + self._tail] if chunk.text else []
        choice = self._choices[index]
        events = choice.turn.read(chunk)
        if self._is_simple and chunk.finish is None and len(events) == 1 and isinstance(events[0], Text):
            return [self._heads[index] + _encode(events[0].text) + self._tail]
        pieces = self._pieces(index, chunk, [choice.delta(event, self._has_functions) for event in events])
        if self._is_streamed:
            return [self._event([piece]) for piece in pieces]
        for piece in pieces:
            choice.collect(piece)
        return []

    def closing(self) -> list[bytes]:
        """The usage and the timings, if they were asked for."""
        return [self._event([], self._usage.body())] if self._include_usage or self._has_timings else []

    def body(self) -> bytes:
        """The chat.completion object."""
        return _encode(
            ChatCompletion(
                id=self._id,
                created=self._created,
                model=self._model,
                choices=[self._whole_choice(i, choice) for i, choice in enumerate(self._choices)],
                usage=self._usage.body(),
                prompt_token_ids=self._prompt_token_ids or None,
                prompt_logprobs=self._prompt_logprobs,
                timings=self._timings,
                service_tier=self._service_tier,
                kv_transfer_params=transferred(self._transfer, self._id, self._usage.body().prompt_tokens),
            )
        )

    def _pieces(self, index: int, chunk: Chunk, deltas: list[ChatDelta]) -> list[ChatChunkChoice]:
        """A chunk as it is streamed. The finish reason comes with the last text, or in a delta of its own if there is
        none."""
        self._usage.count(index, chunk)
        logprobs = None
        if self._has_logprobs and chunk.logprobs:
            logprobs = ChatLogprobs(chat_logprobs(chunk, as_ids=self._names_ids))
        ids = id_list(chunk.ids) if self._has_token_ids and chunk.ids else UNSET
        if chunk.prompt is not None:
            if self._has_token_ids and not self._has_prompt_ids:
                self._has_prompt_ids = True
                self._prompt_token_ids = id_list(chunk.prompt.ids)
            if self._has_prompt_logprobs:
                self._prompt_logprobs = prompt_logprobs(chunk.prompt)
        if not deltas and (logprobs is not None or ids is not UNSET):
            deltas = [ChatDelta(content="")]  # tokens without text yet still have ids and log-probabilities
        pieces: list[ChatChunkChoice] = []
        for delta in deltas:
            pieces.append(ChatChunkChoice(index, delta, logprobs, token_ids=ids))
            logprobs, ids = None, UNSET  # once
        if chunk.finish is not None:
            turn = self._choices[index].turn
            self._usage.add(index, chunk.usage)
            self._usage.add_reasoning(turn.num_reasoning)
            assert chunk.finish != "abort", "the gateway turns an abort into an error"
            finish: FinishReason = chunk.finish
            if turn.num_calls and chunk.finish == "stop":
                finish = "function_call" if self._has_functions else "tool_calls"
            ends_in_text = bool(pieces) and bool(pieces[-1].delta.content)
            last = pieces.pop() if ends_in_text else ChatChunkChoice(index, ChatDelta())
            pieces.append(msgspec.structs.replace(last, finish_reason=finish, stop_reason=chunk.stop_reason))
        return pieces

    def _event(self, choices: list[ChatChunkChoice], usage: UsageBody | None = None) -> bytes:
        prompt_ids, self._prompt_token_ids = self._prompt_token_ids, UNSET
        if self._continuous_usage and choices:
            usage = self._usage.so_far(choices[0].index)
        chunk = ChatChunk(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=usage if self._include_usage else UNSET,
            prompt_token_ids=prompt_ids,
            timings=self._timings,
            service_tier=self._service_tier,
        )
        return as_event(_encode(chunk))

    def _whole_choice(self, index: int, choice: "_Choice") -> ChatChoice:
        assert choice.finish_reason is not None, f"choice {index} has not ended"
        content = self._prefix + "".join(choice.texts)
        reasoning = "".join(choice.reasoning) or UNSET
        custom = choice.turn.custom
        calls = [_call("".join(given), name, name in custom, id=id) for id, name, given in choice.calls]
        function = FunctionBody("".join(choice.calls[0][2]), choice.calls[0][1]) if choice.calls else UNSET
        return ChatChoice(
            index=index,
            message=ChatMessage(
                content=None if calls and not content else content,
                tool_calls=calls if calls and not self._has_functions else UNSET,
                function_call=function if self._has_functions else UNSET,
                reasoning=reasoning,
                reasoning_content=reasoning,
            ),
            logprobs=ChatLogprobs(choice.logprobs) if self._has_logprobs else None,
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            token_ids=choice.token_ids if self._has_token_ids else None,
        )


class _Choice:
    """One choice: how its output is read, and for a plain answer what was read so far."""

    def __init__(self, turn: Turn) -> None:
        self.turn = turn
        self._num_calls = 0  # whose beginning `delta` has given
        self._is_custom = False  # the last of them
        self.texts: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[tuple[str, str, list[str]]] = []  # id, name, pieces of the arguments
        self.logprobs: list[TokenLogprobBody] = []
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None

    def delta(self, event: Event, is_function: bool) -> ChatDelta:
        """An event as OpenAI streams it: a call's id and name once, then pieces of its arguments. `is_function`: in the
        shape of the time before tools."""
        match event:
            case CallStart(name=name) if is_function:
                return ChatDelta(function_call=FunctionBody("", name))
            case CallArguments(text=text) if is_function:
                return ChatDelta(function_call=FunctionBody(text))
            case Text(text=text):
                return ChatDelta(content=text)
            case Reasoning(text=text):
                return ChatDelta(reasoning=text, reasoning_content=text)
            case CallStart(name=name):
                self._num_calls += 1
                self._is_custom = name in self.turn.custom
                call = _call("", name, self._is_custom, index=self._num_calls - 1, id=new_id("call_"))
                return ChatDelta(tool_calls=[call])
            case CallArguments(text=text):
                return ChatDelta(tool_calls=[_call(text, UNSET, self._is_custom, index=self._num_calls - 1)])

    def collect(self, piece: ChatChunkChoice) -> None:
        """Keeps a piece for the plain answer, which is put together as clients do it with a stream."""
        delta = piece.delta
        if delta.content is not UNSET:
            self.texts.append(delta.content)
        if delta.reasoning is not UNSET:
            self.reasoning.append(delta.reasoning)
        if delta.function_call is not UNSET:
            name = delta.function_call.name
            if name is not UNSET:
                self.calls.append(("", name, []))
            self.calls[-1][2].append(delta.function_call.arguments)
        for call in delta.tool_calls or ():
            of = call.function or call.custom
            assert of is not UNSET, call
            if call.id is not UNSET and of.name is not UNSET:
                self.calls.append((call.id, of.name, []))
            else:
                self.calls[-1][2].append(of.arguments if isinstance(of, FunctionBody) else of.input)
        if piece.logprobs is not None:
            self.logprobs += piece.logprobs.content
        self.token_ids += piece.token_ids or ()
        if piece.finish_reason is not None:
            self.finish_reason = piece.finish_reason
            self.stop_reason = None if piece.stop_reason is UNSET else piece.stop_reason


def _call(
    text: str, name: str | UnsetType, is_custom: bool, *, index: int | UnsetType = UNSET, id: str | UnsetType = UNSET
) -> ToolCallBody:
    """A call, or in a stream a piece of one. `text`: its arguments or input."""
    kind: Literal["function", "custom"] | UnsetType = UNSET
    if id is not UNSET:
        kind = "custom" if is_custom else "function"
    if is_custom:
        return ToolCallBody(index=index, id=id, type=kind, custom=CustomBody(text, name))
    return ToolCallBody(FunctionBody(text, name), index=index, id=id, type=kind)
