"""Answers of POST /v1/messages: Anthropic's message object, plain or streamed as typed events.

Both are built from the same blocks in the same steps; a plain answer drops the events.
"""

from collections.abc import Iterable, Sequence
from typing import assert_never

import msgspec

from ...ipc.messages import Chunk, Usage
from ..http.http_error import HttpError, anthropic_error_body
from ..output.parsers.events import CallArguments, CallStart, Reasoning, Text
from ..output.reply import EMPTY_OBJECT, Reply, json_object, new_id
from ..output.resumable import part_id
from ..output.turn import Turn
from .types import ContentBlock, MessageBody, MessageUsage, StopReason, TextBlock, ThinkingBlock, ToolUseBlock

_encode = msgspec.json.Encoder().encode
_TEXT_HEAD = (
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":'
)
_TEXT_TAIL = b"}}\n\n"

_Event = dict[str, object]


class MessagesReply(Reply):
    def __init__(self, *, model: str, turn: Turn, id: str | None = None) -> None:
        """`id`: of a resumed message."""
        self._turn = turn
        self._message = MessageBody(id or new_id("msg_"), model, [], MessageUsage(0, 0))
        self._blocks: list[ContentBlock] = []  # complete
        self._open: ContentBlock | None = None
        self._pieces: list[str] = []  # of the open block: text, or the JSON of its input

    def admitted(self, nums_prompt: Sequence[int]) -> None:
        # The number of cached tokens is known at the end.
        self._message = msgspec.structs.replace(self._message, usage=MessageUsage(nums_prompt[0], 0))

    # ── streamed ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def opening(self) -> list[bytes]:
        return [_event({"type": "message_start", "message": self._message})]

    def take(self, index: int, chunk: Chunk) -> Iterable[bytes]:
        """The events are encoded as they are sent, so a plain answer does not pay for them."""
        if self._turn.is_verbatim and self._open is not None and chunk.finish is None:
            # Fast path: most chunks only append text to the one block.
            if not chunk.text:
                return []
            self._pieces.append(chunk.text)
            return [_TEXT_HEAD + _encode(chunk.text) + _TEXT_TAIL]
        return map(_event, self._read(chunk))

    def closing(self) -> list[bytes]:
        message = self._message
        delta = {"stop_reason": message.stop_reason, "stop_sequence": message.stop_sequence}
        return [
            _event({"type": "message_delta", "delta": delta, "usage": message.usage}),
            _event({"type": "message_stop"}),
        ]

    def ending(self) -> bytes:
        return b""  # message_stop is the last event

    def failure(self, error: HttpError) -> bytes:
        return b"event: error\ndata: " + anthropic_error_body(error) + b"\n\n"

    # ── plain ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def body(self) -> bytes:
        return _encode(self._message)

    # ── both ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _read(self, chunk: Chunk) -> list[_Event]:
        chunks: list[_Event] = []
        for event in self._turn.read(chunk):
            match event:
                case Text(text=text):
                    if not isinstance(self._open, TextBlock):
                        self._begin(TextBlock(""), chunks)
                    self._grow({"type": "text_delta", "text": text}, text, chunks)
                case Reasoning(text=text):
                    if not isinstance(self._open, ThinkingBlock):
                        self._begin(ThinkingBlock(""), chunks)
                    self._grow({"type": "thinking_delta", "thinking": text}, text, chunks)
                case CallStart(name=name):
                    self._begin(ToolUseBlock(self._call_id(), name, EMPTY_OBJECT), chunks)
                case CallArguments(text=text):
                    self._grow({"type": "input_json_delta", "partial_json": text}, text, chunks)
                case _:
                    assert_never(event)
        if chunk.finish is not None:
            self._end_block(chunks)
            reason = self._stop_reason(chunk)
            self._message = msgspec.structs.replace(
                self._message,
                content=self._blocks,
                usage=_usage(chunk.usage),
                stop_reason=reason,
                stop_sequence=chunk.stop_reason if reason == "stop_sequence" else None,
            )
        return chunks

    def _call_id(self) -> str:
        return part_id("toolu_", self._message.id, len(self._blocks) + (self._open is not None))

    def _begin(self, block: ContentBlock, chunks: list[_Event]) -> None:
        self._end_block(chunks)
        self._open = block
        chunks.append({"type": "content_block_start", "index": len(self._blocks), "content_block": block})

    def _grow(self, delta: dict[str, str], piece: str, chunks: list[_Event]) -> None:
        self._pieces.append(piece)
        chunks.append({"type": "content_block_delta", "index": len(self._blocks), "delta": delta})

    def _end_block(self, chunks: list[_Event]) -> None:
        if self._open is None:
            return
        if isinstance(self._open, ThinkingBlock):  # last in its block, as with Anthropic
            delta = {"type": "signature_delta", "signature": self._open.signature}
            chunks.append({"type": "content_block_delta", "index": len(self._blocks), "delta": delta})
        chunks.append({"type": "content_block_stop", "index": len(self._blocks)})
        whole = "".join(self._pieces)
        match self._open:
            case TextBlock():
                self._blocks.append(TextBlock(whole))
            case ThinkingBlock():
                self._blocks.append(ThinkingBlock(whole))
            case ToolUseBlock(id=id, name=name):
                self._blocks.append(ToolUseBlock(id, name, json_object(whole)))
        self._open = None
        self._pieces.clear()

    def _stop_reason(self, last: Chunk) -> StopReason:
        assert last.finish != "abort", "the gateway turns an abort into an error"
        if last.finish == "length":
            return "max_tokens"
        if self._turn.num_calls:
            return "tool_use"
        return "stop_sequence" if isinstance(last.stop_reason, str) else "end_turn"


def _event(event: _Event) -> bytes:
    return b"event: " + str(event["type"]).encode() + b"\ndata: " + _encode(event) + b"\n\n"


def _usage(usage: Usage | None) -> MessageUsage:
    assert usage is not None, "a sequence ended without its usage"
    return MessageUsage(usage.num_prompt - usage.num_cached, usage.num_output, cache_read_input_tokens=usage.num_cached)
