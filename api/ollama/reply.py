"""Answers of /api/chat and /api/generate: one JSON object, or one a line."""

from array import array
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import assert_never

import msgspec

from ...ipc.messages import Chunk, Usage
from ..gateway.timeline import Timeline
from ..http.http_error import HttpError, ollama_error_body
from ..output.parsers.events import CallArguments, CallStart, Reasoning, Text
from ..output.reply import Reply, chat_logprobs, json_object, new_id
from ..output.shapes import TokenLogprobBody
from ..output.turn import Turn
from .types import Answer, AnswerMessage, CallOfAnswer, DoneReason, EmbedAnswer, FunctionOfCall, OldEmbeddingsAnswer

_encode = msgspec.json.Encoder().encode


def now() -> str:
    """The time as Ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


class OllamaReply(Reply):
    """A call of a tool is sent whole, as Ollama does."""

    content_type = b"application/x-ndjson"
    keep_alive = b""  # clients read every line as an object

    def __init__(self, *, model: str, turn: Turn, is_chat: bool, has_logprobs: bool = False) -> None:
        self._model = model
        self._turn = turn
        self._is_chat = is_chat
        self._has_logprobs = has_logprobs
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[CallOfAnswer] = []
        self._logprobs: list[TokenLogprobBody] = []
        self._open_call: str | None = None  # the name of the call whose arguments are being read
        self._arguments: list[str] = []
        self._usage: Usage | None = None
        self._reason: DoneReason = "stop"
        self._timeline: Timeline | None = None

    def ended(self, timeline: Timeline) -> None:
        self._timeline = timeline

    def opening(self) -> list[bytes]:
        return []

    def take(self, index: int, chunk: Chunk) -> list[bytes]:
        """The line is encoded for a plain answer as well, whose pieces are collected here."""
        text, thought, calls = "", "", []
        for event in self._turn.read(chunk):
            if not isinstance(event, CallArguments):
                calls += self._end_call()
            match event:
                case Text(text=piece):
                    text += piece
                case Reasoning(text=piece):
                    thought += piece
                case CallStart(name=name):
                    self._open_call = name
                case CallArguments(text=piece):
                    self._arguments.append(piece)
                case _:
                    assert_never(event)
        logprobs = chat_logprobs(chunk) if self._has_logprobs else []
        if chunk.finish is not None:
            assert chunk.finish != "abort", "the gateway turns an abort into an error"
            calls += self._end_call()
            self._usage = chunk.usage
            self._reason = "length" if chunk.finish == "length" else "stop"
        self._texts.append(text)
        self._thoughts.append(thought)
        self._calls += calls
        self._logprobs += logprobs
        if not (text or thought or calls or logprobs):
            return []
        return [self._line(self._answer(text, thought, calls, logprobs))]

    def closing(self) -> list[bytes]:
        return [self._line(self._ended(self._answer("", "", [], [])))]

    def ending(self) -> bytes:
        return b""  # the line of `closing` is the last

    def failure(self, error: HttpError) -> bytes:
        return ollama_error_body(error) + b"\n"

    def body(self) -> bytes:
        whole = self._answer("".join(self._texts), "".join(self._thoughts), self._calls, self._logprobs)
        return _encode(self._ended(whole))

    def _end_call(self) -> list[CallOfAnswer]:
        if self._open_call is None:
            return []
        function = FunctionOfCall(len(self._calls), self._open_call, json_object("".join(self._arguments)))
        self._open_call = None
        self._arguments.clear()
        return [CallOfAnswer(new_id("call_"), function)]

    def _answer(
        self, text: str, thought: str, calls: Sequence[CallOfAnswer], logprobs: Sequence[TokenLogprobBody]
    ) -> Answer:
        thinking = thought or msgspec.UNSET
        answer = Answer(model=self._model, created_at=now(), logprobs=list(logprobs) or msgspec.UNSET)
        if self._is_chat:
            message = AnswerMessage(content=text, thinking=thinking, tool_calls=list(calls) or msgspec.UNSET)
            return msgspec.structs.replace(answer, message=message)
        return msgspec.structs.replace(answer, response=text, thinking=thinking)

    def _ended(self, answer: Answer) -> Answer:
        assert self._usage is not None and self._timeline is not None, "a sequence ended without its usage"
        parts = self._timeline.parts()
        return msgspec.structs.replace(
            answer,
            done=True,
            done_reason=self._reason,
            total_duration=_ns(self._timeline.total),
            load_duration=0,
            prompt_eval_count=self._usage.num_prompt,
            prompt_eval_duration=_ns(parts.get("prefill", 0.0)),
            eval_count=self._usage.num_output,
            eval_duration=_ns(parts.get("decode", 0.0)),
        )

    def _line(self, answer: Answer) -> bytes:
        return _encode(answer) + b"\n"


class EmbedReply(Reply):
    """Vectors in the order of the texts."""

    def __init__(self, model: str) -> None:
        self.model = model
        self._vectors: dict[int, list[float]] = {}
        self._num_prompt = 0
        self._total_ns = 0

    def ended(self, timeline: Timeline) -> None:
        self._total_ns = _ns(timeline.total)

    def opening(self) -> list[bytes]:
        raise AssertionError("vectors are not streamed")

    def take(self, index: int, chunk: Chunk) -> list[bytes]:
        assert chunk.vector and chunk.usage is not None, "a vector is an answer's only chunk"
        self._vectors[index] = array("f", chunk.vector).tolist()
        self._num_prompt += chunk.usage.num_prompt
        return []

    def closing(self) -> list[bytes]:
        raise AssertionError("vectors are not streamed")

    def body(self) -> bytes:
        return _encode(EmbedAnswer(self.model, self._in_order(), self._total_ns, self._num_prompt))

    def _in_order(self) -> list[list[float]]:
        return [vector for _, vector in sorted(self._vectors.items())]


class OldEmbedReply(EmbedReply):
    """The vector of one text."""

    def body(self) -> bytes:
        return _encode(OldEmbeddingsAnswer(self._in_order()[0]))


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
