"""Answers of POST /v1/responses: the response object, plain or streamed as typed events.

Both are built from the same items in the same steps; a plain answer drops the events. Clients check the order strictly:
an item is added, its parts grow, it is done, and only then the next one begins.
"""

import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import starmap
from typing import assert_never

import msgspec
from msgspec.structs import replace

from ...ipc.messages import Chunk, Usage
from ..http.http_error import HttpError
from ..openai.conversation import Conversation
from ..openai.plain_tools import INPUT
from ..output.parsers.events import CallArguments, CallStart, Reasoning, Text
from ..output.reply import Reply, chat_logprobs, new_id
from ..output.resumable import part_id
from ..output.shapes import TextFormat, TokenLogprobBody
from ..output.turn import Turn
from .request import functions
from .types import (
    ConversationName,
    CustomCallItem,
    FunctionCallItem,
    IncompleteDetails,
    InputTokensDetails,
    ItemStatus,
    MessageItem,
    OutputItem,
    OutputText,
    OutputTokensDetails,
    ReasoningConfig,
    ReasoningItem,
    ReasoningText,
    ResponseBody,
    ResponseFailure,
    ResponsesRequest,
    ResponseUsage,
    TextConfig,
)

_encode = msgspec.json.Encoder().encode

_Event = tuple[str, dict[str, object]]  # type, and all fields but the sequence number


def new_response(
    request: ResponsesRequest, *, model: str, temperature: float, top_p: float, conversation: str | None = None
) -> ResponseBody:
    """The response before any output. `conversation`: the id of the one that it belongs to."""
    text = request.text or TextConfig()
    return ResponseBody(
        id=request.resume_id or new_id("resp_"),
        created_at=int(time.time()),
        model=model,
        instructions=request.instructions,
        metadata=request.metadata or {},
        parallel_tool_calls=request.parallel_tool_calls is not False,
        temperature=temperature,
        top_p=top_p,
        top_logprobs=request.top_logprobs or 0,
        tool_choice="auto" if request.tool_choice is None else request.tool_choice,
        tools=functions(request),
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        previous_response_id=request.previous_response_id,
        prompt_cache_key=request.prompt_cache_key,
        reasoning=request.reasoning or ReasoningConfig(),
        safety_identifier=request.safety_identifier,
        store=request.store is not False,
        text=replace(text, format=text.format or TextFormat()),
        user=request.user,
        truncation=request.truncation or "disabled",
        status="queued" if request.background else "in_progress",
        background=bool(request.background),
        conversation=None if conversation is None else ConversationName(conversation),
    )


class ResponsesReply(Reply):
    def __init__(
        self,
        response: ResponseBody,
        *,
        turn: Turn,
        has_logprobs: bool,
        on_end: Callable[[ResponseBody], Awaitable[None]],
        first: int = 0,
    ) -> None:
        """`on_end` is awaited with the complete response before its end is sent, unless it fails. `first`: the first
        event's number."""
        self._response = response
        self._turn = turn
        self._has_logprobs = has_logprobs
        self._is_simple = turn.is_verbatim and not has_logprobs
        self._on_end = on_end
        self._next_sequence_number = first
        self._created = response  # as it was before the engine took it
        self._items: list[OutputItem] = []  # complete
        self._open: _Message | _Reasoning | _Call | _CustomCall | None = None
        self._logprobs: list[TokenLogprobBody] = []  # of tokens whose text is still held back

    def admitted(self, nums_prompt: Sequence[int]) -> None:
        self._created = self._response
        self._response = replace(self._response, status="in_progress")

    # ── streamed ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def opening(self) -> list[bytes]:
        created = self._event("response.created", {"response": self._created})
        return [created, self._event("response.in_progress", {"response": self._response})]

    def take(self, index: int, chunk: Chunk) -> Iterable[bytes]:
        """The events are encoded as they are sent, so a plain answer does not pay for them."""
        if self._is_simple and isinstance(self._open, _Message) and chunk.finish is None:
            # Fast path: most chunks only append text.
            if not chunk.text:
                return []
            self._next_sequence_number += 1
            return [self._open.grow_simply(chunk.text, self._next_sequence_number - 1)]
        return starmap(self._event, self._read(chunk))

    async def settle(self) -> None:
        await self._on_end(self._response)

    def closing(self) -> list[bytes]:
        return [self._event(f"response.{self._response.status}", {"response": self._response})]

    def ending(self) -> bytes:
        return b""  # the event of `closing` is the last

    def failure(self, error: HttpError) -> bytes:
        """An event with the output so far and the error."""
        items = [*self._items, *([self._open.item("incomplete")] if self._open is not None else [])]
        failure = ResponseFailure("server_error", str(error))
        self._response = replace(self._response, status="failed", error=failure, output=items)
        return self._event("response.failed", {"response": self._response})

    @property
    def response(self) -> ResponseBody:
        """The response as it is now; its output comes at the end."""
        return self._response

    def cancel(self) -> None:
        """The client wants no more of it."""
        items = [*self._items, *([self._open.item("incomplete")] if self._open is not None else [])]
        self._response = replace(self._response, status="cancelled", output=items)

    def _event(self, type: str, fields: dict[str, object]) -> bytes:
        data = _encode({"type": type, "sequence_number": self._next_sequence_number, **fields})
        self._next_sequence_number += 1
        return b"event: " + type.encode() + b"\ndata: " + data + b"\n\n"

    # ── plain ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def body(self) -> bytes:
        return _encode(self._response)

    # ── both ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _read(self, chunk: Chunk) -> list[_Event]:
        chunks: list[_Event] = []
        if self._has_logprobs:
            self._logprobs += chat_logprobs(chunk)
        for event in self._turn.read(chunk):
            match event:
                case Text(text=text):
                    if not isinstance(self._open, _Message):
                        self._begin(_Message(self._response.id, self._next_index), chunks)
                    assert isinstance(self._open, _Message)
                    chunks.append(self._open.grow(text, self._logprobs))
                    self._logprobs = []
                case Reasoning(text=text):
                    if not isinstance(self._open, _Reasoning):
                        self._begin(_Reasoning(self._response.id, self._next_index), chunks)
                    assert isinstance(self._open, _Reasoning)
                    chunks.append(self._open.grow(text))
                    self._logprobs = []  # reasoning items have no log-probabilities
                case CallStart(name=name):
                    kind = _CustomCall if name in self._turn.custom else _Call
                    self._begin(kind(self._response.id, self._next_index, name), chunks)
                    self._logprobs = []  # nor have calls
                case CallArguments(text=text):
                    assert isinstance(self._open, _Call | _CustomCall), "arguments without a call"
                    chunks.append(self._open.grow(text))
                    self._logprobs = []
                case _:
                    assert_never(event)
        if chunk.finish is not None:
            assert chunk.finish != "abort", "the gateway turns an abort into an error"
            if self._open is None and not self._items:
                self._begin(_Message(self._response.id, 0), chunks)  # an empty answer is a message, too
            if isinstance(self._open, _Message):
                self._open.logprobs += self._logprobs  # of tokens without text, such as the eos
            is_complete = chunk.finish == "stop"
            self._end_item("completed" if is_complete else "incomplete", chunks)
            self._response = replace(
                self._response,
                status="completed" if is_complete else "incomplete",
                incomplete_details=None if is_complete else IncompleteDetails("max_output_tokens"),
                completed_at=int(time.time()) if is_complete else None,
                output=self._items,
                usage=_usage(chunk.usage, self._turn.num_reasoning),
            )
        return chunks

    @property
    def _next_index(self) -> int:
        return len(self._items) + (self._open is not None)

    def _begin(self, item: "_Message | _Reasoning | _Call | _CustomCall", chunks: list[_Event]) -> None:
        self._end_item("completed", chunks)
        self._open = item
        chunks.extend(item.begin())

    def _end_item(self, status: ItemStatus, chunks: list[_Event]) -> None:
        if self._open is not None:
            chunks.extend(self._open.end(status))
            self._items.append(self._open.item(status))
            self._open = None


class _Message:
    def __init__(self, response_id: str, index: int) -> None:
        self._id = part_id("msg_", response_id, index)
        self._index = index
        self._texts: list[str] = []
        self.logprobs: list[TokenLogprobBody] = []
        # A delta without log-probabilities is constant but for its sequence number and text.
        kind = "response.output_text.delta"
        fields = _encode({"type": kind, **self._place, "logprobs": []})
        self._head = f"event: {kind}\ndata: ".encode() + fields[:-1] + b',"sequence_number":'

    @property
    def _place(self) -> dict[str, object]:
        return {"item_id": self._id, "output_index": self._index, "content_index": 0}

    def item(self, status: ItemStatus) -> MessageItem:
        return MessageItem(self._id, status, [self._part()])

    def begin(self) -> list[_Event]:
        item = MessageItem(self._id, "in_progress", [])
        return [
            ("response.output_item.added", {"output_index": self._index, "item": item}),
            ("response.content_part.added", {**self._place, "part": OutputText("")}),
        ]

    def grow(self, text: str, logprobs: Sequence[TokenLogprobBody]) -> _Event:
        self._texts.append(text)
        self.logprobs += logprobs
        return "response.output_text.delta", {**self._place, "delta": text, "logprobs": logprobs}

    def grow_simply(self, text: str, sequence_number: int) -> bytes:
        """The event of `grow`, encoded."""
        self._texts.append(text)
        return self._head + str(sequence_number).encode() + b',"delta":' + _encode(text) + b"}\n\n"

    def end(self, status: ItemStatus) -> list[_Event]:
        part = self._part()
        return [
            ("response.output_text.done", {**self._place, "text": part.text, "logprobs": part.logprobs}),
            ("response.content_part.done", {**self._place, "part": part}),
            ("response.output_item.done", {"output_index": self._index, "item": self.item(status)}),
        ]

    def _part(self) -> OutputText:
        return OutputText("".join(self._texts), logprobs=self.logprobs)


class _Reasoning:
    def __init__(self, response_id: str, index: int) -> None:
        self._id = part_id("rs_", response_id, index)
        self._index = index
        self._texts: list[str] = []

    @property
    def _place(self) -> dict[str, object]:
        return {"item_id": self._id, "output_index": self._index, "content_index": 0}

    def item(self, status: ItemStatus) -> ReasoningItem:
        return ReasoningItem(self._id, status, [self._part()])

    def begin(self) -> list[_Event]:
        item = ReasoningItem(self._id, "in_progress", [])
        return [
            ("response.output_item.added", {"output_index": self._index, "item": item}),
            ("response.content_part.added", {**self._place, "part": ReasoningText("")}),
        ]

    def grow(self, text: str) -> _Event:
        self._texts.append(text)
        return "response.reasoning_text.delta", {**self._place, "delta": text}

    def end(self, status: ItemStatus) -> list[_Event]:
        part = self._part()
        return [
            ("response.reasoning_text.done", {**self._place, "text": part.text}),
            ("response.content_part.done", {**self._place, "part": part}),
            ("response.output_item.done", {"output_index": self._index, "item": self.item(status)}),
        ]

    def _part(self) -> ReasoningText:
        return ReasoningText("".join(self._texts))


class _Call:
    def __init__(self, response_id: str, index: int, name: str) -> None:
        self._id = part_id("fc_", response_id, index)
        self._call_id = part_id("call_", response_id, index)
        self._index = index
        self._name = name
        self._pieces: list[str] = []

    @property
    def _place(self) -> dict[str, object]:
        return {"item_id": self._id, "output_index": self._index}

    def item(self, status: ItemStatus) -> FunctionCallItem:
        return FunctionCallItem(self._id, self._call_id, self._name, "".join(self._pieces), status)

    def begin(self) -> list[_Event]:
        return [("response.output_item.added", {"output_index": self._index, "item": self.item("in_progress")})]

    def grow(self, arguments: str) -> _Event:
        self._pieces.append(arguments)
        return "response.function_call_arguments.delta", {**self._place, "delta": arguments}

    def end(self, status: ItemStatus) -> list[_Event]:
        item = self.item(status)
        return [
            (
                "response.function_call_arguments.done",
                {**self._place, "name": item.name, "arguments": item.arguments},
            ),
            ("response.output_item.done", {"output_index": self._index, "item": item}),
        ]


class _CustomCall:
    """A call of a custom tool, whose input comes as a whole."""

    def __init__(self, response_id: str, index: int, name: str) -> None:
        self._id = part_id("ctc_", response_id, index)
        self._call_id = part_id("call_", response_id, index)
        self._index = index
        self._name = name
        self._input = ""

    @property
    def _place(self) -> dict[str, object]:
        return {"item_id": self._id, "output_index": self._index}

    def item(self, status: ItemStatus) -> CustomCallItem:
        return CustomCallItem(self._id, self._call_id, self._name, self._input, status)

    def begin(self) -> list[_Event]:
        return [("response.output_item.added", {"output_index": self._index, "item": self.item("in_progress")})]

    def grow(self, text: str) -> _Event:
        self._input += text
        return "response.custom_tool_call_input.delta", {**self._place, "delta": text}

    def end(self, status: ItemStatus) -> list[_Event]:
        return [
            ("response.custom_tool_call_input.done", {**self._place, "input": self._input}),
            ("response.output_item.done", {"output_index": self._index, "item": self.item(status)}),
        ]


def go_on(conversation: Conversation, response: ResponseBody) -> bytes:
    """The messages with this response's output added, for the next request."""
    for item in response.output:
        match item:
            case MessageItem(content=parts):
                conversation.add_text("assistant", [part.text for part in parts])
            case ReasoningItem(content=thoughts):
                for thought in thoughts:
                    conversation.add_reasoning(thought.text)
            case FunctionCallItem(call_id=call_id, name=name, arguments=arguments):
                conversation.add_call(call_id, name, arguments)
            case CustomCallItem(call_id=call_id, name=name, input=text):
                conversation.add_call(call_id, name, _encode({INPUT: text}).decode())
            case _:
                assert_never(item)
    return conversation.json()


def _usage(usage: Usage | None, num_reasoning: int) -> ResponseUsage:
    assert usage is not None, "a sequence ended without its usage"
    return ResponseUsage(
        input_tokens=usage.num_prompt,
        input_tokens_details=InputTokensDetails(usage.num_cached),
        output_tokens=usage.num_output,
        output_tokens_details=OutputTokensDetails(num_reasoning),
        total_tokens=usage.num_prompt + usage.num_output,
    )
