"""What the client of a stream has received, so that another engine can continue the stream from there.

A journal reads every event of the stream. In the first engine's answer it counts, and removes the token ids that the
router asked for and the client did not. An engine that continues a stream begins from the start and repeats what the
client has, in fewer and larger pieces; the journal lets only the rest through: characters of each text, of reasoning
and of tool-call arguments, token ids, the end. It may cut pieces anywhere, because an engine parses an output the same
way however it is cut. `ChatJournal` is for chat and completions, `TypedJournal` for streams of typed events.
"""

import contextlib
from array import array
from typing import Any, Protocol, cast

import msgspec
from msgspec import Struct

from ..api.output.sse import as_event

_DONE = b"data: [DONE]"
_GONE_CODES = ("engine_unavailable", "engine_failed", "shutting_down")


class _PlainDelta(Struct, forbid_unknown_fields=True):
    content: str


class _PlainChoice(Struct):
    """A choice with only a piece of text and its ids, as in most events."""

    index: int
    token_ids: list[int]
    finish_reason: None
    logprobs: None
    delta: _PlainDelta | None = None
    text: str = ""


class _PlainEvent(Struct):
    choices: tuple[_PlainChoice]
    usage: None = None


_decode_plain = msgspec.json.Decoder(_PlainEvent).decode
_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode

Key = str | tuple[str, int]
Fields = dict[str, Any]  # JSON of an event; the router knows only some of the fields


class StreamDiffers(Exception):
    """The engine that was to continue the stream sampled other tokens than those the client has."""


class EngineLeaves(Exception):
    """The engine reports that it ends the stream early."""

    def __init__(self, code: str) -> None:
        self.may_be_cause = code != "shutting_down"  # the request may have made the engine fail


def check_error(code: str | None) -> None:
    """Raises EngineLeaves unless the error is the request's own."""
    if code in _GONE_CODES:
        raise EngineLeaves(code)


class Journal(Protocol):
    """The journal of one stream."""

    num_prompt: int  # prompt tokens
    has_ended: bool  # the last event was taken

    @property
    def id(self) -> str:
        """The answer's id that the client has; empty before its first event."""

    @property
    def num_ids(self) -> int:
        """Output tokens of all choices so far."""

    def take(self, event: bytes) -> bytes | None:
        """What the client gets for an event or comment; None: nothing. `event` comes without the empty line that ends
        it, the result has it. Raises StreamDiffers, EngineLeaves."""

    def restart(self) -> int:
        """Another engine continues. Returns the number of tokens that `resumption` gives it."""

    def resumption(self, num_choices: int) -> dict[str, object]:
        """The fields of the request that make an engine continue the stream."""


class Delivered:
    """What the client has of one output, and how much of it the present engine has repeated."""

    def __init__(self) -> None:
        self.ids: array[int] = array("i")
        self.num_resumable = 0  # of `ids`: all but the last event's, whose text or end the client may not have
        self._num_ids_seen = 0
        self._num_delivered: dict[Key, int] = {}  # characters
        self._num_seen: dict[Key, int] = {}  # characters from the present engine

    def resumable_ids(self) -> list[int]:
        """The tokens whose whole text the client has."""
        return self.ids[: self.num_resumable].tolist()

    def restart(self) -> None:
        """Another engine begins."""
        self._num_ids_seen = 0
        self._num_seen.clear()

    def new_text(self, key: Key, text: str) -> str:
        """The part of a piece that the client does not have."""
        start = self._num_seen.get(key, 0)
        delivered = self._num_delivered.get(key, 0)
        self._num_seen[key] = end = start + len(text)
        if end <= delivered:
            return ""
        self._num_delivered[key] = end
        return text[delivered - start :] if delivered > start else text

    def new_ids(self, ids: list[int]) -> list[int]:
        """The token ids that the client does not have. Raises StreamDiffers."""
        start, delivered = self._num_ids_seen, len(self.ids)
        self._num_ids_seen = start + len(ids)
        overlap = min(max(0, delivered - start), len(ids))
        if self.ids[start : start + overlap].tolist() != ids[:overlap]:
            raise StreamDiffers
        if overlap < len(ids):
            self.num_resumable = delivered
        self.ids.extend(ids[overlap:])
        return ids[overlap:]


class _Choice(Delivered):
    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0  # tool calls whose beginning the client has
        self.has_role = False
        self.has_prompt_ids = False
        self.is_over = False
        self.next_offset: int | None = None  # `text_offset` of the next token's log-probability


class _ErrorFields(Struct):
    code: str | None = None


class _ErrorBody(Struct):
    error: _ErrorFields


class ChatJournal(Journal):
    """The journal of a stream of chat or completions."""

    def __init__(self, *, shows_ids: bool) -> None:
        """`shows_ids`: the client asked for token ids."""
        self._shows_ids = shows_ids
        self._choices: dict[int, _Choice] = {}
        self._head: Fields | None = None  # the fields that are equal in all events of a stream
        self._is_first = True
        self._has_usage = False
        self.num_prompt = 0
        self.has_ended = False

    @property
    def id(self) -> str:
        return "" if self._head is None else str(self._head["id"])

    @property
    def num_ids(self) -> int:
        return sum(len(choice.ids) for choice in self._choices.values())

    def restart(self) -> int:
        self._is_first = False
        for choice in self._choices.values():
            choice.restart()
        return sum(choice.num_resumable for choice in self._choices.values())

    def resumption(self, num_choices: int) -> dict[str, object]:
        if not any(choice.num_resumable for choice in self._choices.values()):
            return {}
        return {"resume_token_ids": [self._choice(index).resumable_ids() for index in range(num_choices)]}

    def take(self, event: bytes) -> bytes | None:
        if event.startswith(b'data: {"error"'):
            with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
                check_error(msgspec.json.decode(event[6:], type=_ErrorBody).error.code)
            self.has_ended = True
        elif event == _DONE:
            self.has_ended = True
        elif event.startswith(b"data: "):
            fresh = self._take(event[6:])
            return None if fresh is None else as_event(fresh)
        return event + b"\n\n"  # an error, the end, or a keep-alive comment

    def _take(self, data: bytes) -> bytes | None:
        """`take` for an event's JSON."""
        if self._is_first and not self._shows_ids:
            try:
                return self._take_plain(data, _decode_plain(data).choices[0])
            except (msgspec.ValidationError, KeyError):  # not a plain event, or the first of a choice
                pass
        event = cast(Fields, _decode(data))
        if self._head is None:
            self._head = {"id": event["id"], "created": event["created"]}
        elif not self._is_first:
            event |= self._head
        prompt_ids = event.get("prompt_token_ids")
        if prompt_ids is not None:  # of chat; in completions each choice has them
            self._take_prompt(event, self._choice(0))
        choices = event["choices"]
        if not choices:  # the usage
            if self._has_usage:
                return None
            self._has_usage = True
            return _encode(event)
        if not any([self._keep_new(choice) for choice in choices]):
            return None
        return _encode(event)

    def _take_plain(self, data: bytes, plain: _PlainChoice) -> bytes | None:
        """Counts an event and cuts the ids out of its JSON, which costs a third of encoding it again."""
        choice = self._choices[plain.index]
        key, text = ("text", plain.text) if plain.delta is None else ("content", plain.delta.content)
        choice.new_text(key, text)
        choice.new_ids(plain.token_ids)
        if not text:
            return None
        start = data.rindex(b',"token_ids":[')  # never within a text, where quotes are escaped
        return data[:start] + data[data.index(b"]", start) + 1 :]

    def _choice(self, index: int) -> _Choice:
        if (choice := self._choices.get(index)) is None:
            choice = self._choices[index] = _Choice()
        return choice

    def _keep_new(self, fields: Fields) -> bool:
        """Removes from one choice of an event what the client has. False: nothing new is left."""
        choice = self._choice(fields["index"])
        given = fields.get("token_ids") or []
        ids = choice.new_ids(given)
        num_known = len(given) - len(ids)
        if not self._shows_ids:
            fields.pop("token_ids", None)
        elif "token_ids" in fields:
            fields["token_ids"] = ids
        if "prompt_token_ids" in fields:
            self._take_prompt(fields, choice)
        delta = fields.get("delta")
        is_new = self._new_completion(fields, choice) if delta is None else self._new_delta(delta, choice)
        if (logprobs := fields.get("logprobs")) is not None:
            if ids or self._is_first:
                is_new = True
                if num_known:
                    logprobs |= {name: rows[num_known:] for name, rows in logprobs.items() if rows is not None}
                self._shift_offsets(logprobs, choice)
            else:
                fields["logprobs"] = None
        if fields["finish_reason"] is not None:
            is_new = not choice.is_over
            choice.is_over = True
        return is_new or bool(ids and self._shows_ids)

    def _take_prompt(self, fields: Fields, choice: _Choice) -> None:
        if not choice.has_prompt_ids:
            self.num_prompt += len(fields["prompt_token_ids"])
        if choice.has_prompt_ids or not self._shows_ids:
            del fields["prompt_token_ids"]
        choice.has_prompt_ids = True

    @staticmethod
    def _new_completion(fields: Fields, choice: _Choice) -> bool:
        fields["text"] = text = choice.new_text("text", fields["text"])
        return bool(text)

    @staticmethod
    def _new_delta(delta: Fields, choice: _Choice) -> bool:
        is_new = False
        if "role" in delta:
            is_new = not choice.has_role
            if choice.has_role:
                del delta["role"]
            choice.has_role = True
        for name in ("content", "reasoning", "reasoning_content"):
            if text := delta.get(name):
                delta[name] = fresh = choice.new_text(name, text)
                is_new = is_new or bool(fresh)
        if call := delta.get("function_call"):
            if _is_new_call({"index": 0, "function": call}, choice):
                is_new = True
            else:
                del delta["function_call"]
        if calls := delta.get("tool_calls"):
            delta["tool_calls"] = [call for call in calls if _is_new_call(call, choice)]
            is_new = is_new or bool(delta["tool_calls"])
        return is_new

    @staticmethod
    def _shift_offsets(logprobs: Fields, choice: _Choice) -> None:
        """Makes `text_offset` continue: an engine that resumes counts from the first token that it computed."""
        offsets, tokens = logprobs.get("text_offset"), logprobs.get("tokens")
        if not offsets or not tokens:
            return
        if choice.next_offset is not None and (shift := choice.next_offset - offsets[0]):
            logprobs["text_offset"] = offsets = [offset + shift for offset in offsets]
        names_ids = tokens[-1].startswith("token_id:")  # then the length of its text is unknown
        choice.next_offset = None if names_ids else offsets[-1] + len(tokens[-1])


def _is_new_call(call: Fields, choice: _Choice) -> bool:
    """Removes from a piece of a tool call what the client has; only its first piece has a name. False: nothing new."""
    index, function = call["index"], call.get("function") or call["custom"]
    name = "arguments" if "arguments" in function else "input"
    function[name] = arguments = choice.new_text(("call", index), function[name])
    if "name" not in function:
        return bool(arguments)
    is_new: bool = index >= choice.num_calls
    choice.num_calls = max(choice.num_calls, index + 1)
    return is_new
