"""What the client of a stream has, so that another engine's answer to the same request goes on behind it.

A journal reads every event of the stream. In the first engine's answer it only takes note, and hides what the router
asked for and the client did not. An engine that goes on begins from the start and repeats what the client has, in
fewer and larger pieces; then the journal lets through what is new: characters of each text, of reasoning and of the
arguments of calls, token ids, the end. Pieces may be cut anywhere, because an engine reads an output the same way
however it is cut. `ChatJournal` is for chat and completions; `typed_journal` for streams of typed events.
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
    """Nothing but a piece of text and its ids, as most events are."""

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
Fields = dict[str, Any]  # JSON of an event, of which only a part is known here


class StreamDiffers(Exception):
    """The engine that was to go on says something else than what the client has."""


class EngineLeaves(Exception):
    """The engine says that it breaks the stream off."""

    def __init__(self, code: str) -> None:
        self.may_be_why = code != "shutting_down"  # the request may be why


def check_error(code: str | None) -> None:
    """Raises EngineLeaves if it is not the request's own error."""
    if code in _GONE_CODES:
        raise EngineLeaves(code)


class Journal(Protocol):
    """One stream."""

    num_prompt: int  # tokens
    has_ended: bool  # the last event has come

    @property
    def id(self) -> str:
        """By which its client knows the answer, once it does."""

    @property
    def num_ids(self) -> int:
        """Tokens of all choices so far."""

    def take(self, event: bytes) -> bytes | None:
        """What the client gets of an event or a comment, if anything; without and with the empty line behind it.
        Raises StreamDiffers, EngineLeaves."""

    def restart(self) -> int:
        """Another engine goes on, and is told of so many tokens."""

    def resumption(self, num_choices: int) -> dict[str, object]:
        """What that engine has to be told, as fields of the request."""


class Told:
    """What was told of one output, and how much of that the present engine has repeated."""

    def __init__(self) -> None:
        self.ids: array[int] = array("i")
        self.num_sure = 0  # of `ids`: without those of the last event, whose text or end may have been lost
        self._num_ids_seen = 0
        self._told: dict[Key, int] = {}  # characters
        self._seen: dict[Key, int] = {}

    def sure_ids(self) -> list[int]:
        """Those that the client has all that came of them of."""
        return self.ids[: self.num_sure].tolist()

    def restart(self) -> None:
        """Another engine begins."""
        self._num_ids_seen = 0
        self._seen.clear()

    def new_text(self, key: Key, text: str) -> str:
        """What the client does not have of a piece."""
        start = self._seen.get(key, 0)
        told = self._told.get(key, 0)
        self._seen[key] = end = start + len(text)
        if end <= told:
            return ""
        self._told[key] = end
        return text[told - start :] if told > start else text

    def new_ids(self, ids: list[int]) -> list[int]:
        """The same for token ids. Raises StreamDiffers."""
        start, told = self._num_ids_seen, len(self.ids)
        self._num_ids_seen = start + len(ids)
        if start >= told:
            if ids:
                self.num_sure = told
            self.ids.extend(ids)
            return ids
        overlap = min(told - start, len(ids))
        if self.ids[start : start + overlap].tolist() != ids[:overlap]:
            raise StreamDiffers
        if overlap < len(ids):
            self.num_sure = told
        self.ids.extend(ids[overlap:])
        return ids[overlap:]


class _Choice(Told):
    """One choice."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls_told = 0
        self.has_role = False
        self.has_prompt_ids = False
        self.is_over = False
        self.next_offset: int | None = None  # of the text, where log-probabilities count it


class _ErrorFields(Struct):
    code: str | None = None


class _ErrorBody(Struct):
    error: _ErrorFields


class ChatJournal(Journal):
    """Of chat or completions."""

    def __init__(self, *, shows_ids: bool) -> None:
        """`shows_ids`: the client asked for token ids."""
        self._shows_ids = shows_ids
        self._choices: dict[int, _Choice] = {}
        self._head: Fields | None = None  # what all events of a stream have in common
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
        return sum(choice.num_sure for choice in self._choices.values())

    def resumption(self, num_choices: int) -> dict[str, object]:
        if not any(choice.num_sure for choice in self._choices.values()):
            return {}
        return {"resume_token_ids": [self._choice(index).sure_ids() for index in range(num_choices)]}

    def take(self, event: bytes) -> bytes | None:
        if event.startswith(b'data: {"error"'):
            with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
                check_error(msgspec.json.decode(event[6:], type=_ErrorBody).error.code)
            self.has_ended = True
        elif event == _DONE:
            self.has_ended = True
        elif event.startswith(b"data: "):
            told = self._take(event[6:])
            return None if told is None else as_event(told)
        return event + b"\n\n"  # this, or a comment, which keeps the connection alive

    def _take(self, data: bytes) -> bytes | None:
        """What the client gets of an event's JSON."""
        if self._is_first and not self._shows_ids:
            try:
                return self._take_plain(data, _decode_plain(data).choices[0])
            except (msgspec.ValidationError, KeyError):  # there is more to it, or it is a choice's first
                pass
        event = cast(Fields, _decode(data))
        if self._head is None:
            self._head = {"id": event["id"], "created": event["created"]}
        elif not self._is_first:
            event |= self._head
        prompt_ids = event.get("prompt_token_ids")
        if prompt_ids is not None:  # of a chat; with completions they are a choice's
            self._take_prompt(event, self._choice(0))
        choices = event["choices"]
        if not choices:  # the usage
            if self._has_usage:
                return None
            self._has_usage = True
            return _encode(event)
        if not any([self._is_news(choice) for choice in choices]):
            return None
        return _encode(event)

    def _take_plain(self, data: bytes, plain: _PlainChoice) -> bytes | None:
        """Takes note of an event and cuts the ids out of its JSON: a third of what it costs to make it anew."""
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

    def _is_news(self, fields: Fields) -> bool:
        """Leaves of one choice what its client does not have. False: nothing is left."""
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
        is_news = self._new_completion(fields, choice) if delta is None else self._new_delta(delta, choice)
        if (logprobs := fields.get("logprobs")) is not None:
            if ids or self._is_first:
                is_news = True
                if num_known:
                    logprobs |= {name: rows[num_known:] for name, rows in logprobs.items() if rows is not None}
                self._shift_offsets(logprobs, choice)
            else:
                fields["logprobs"] = None
        if fields["finish_reason"] is not None:
            is_news = not choice.is_over
            choice.is_over = True
        return is_news or bool(ids and self._shows_ids)

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
        is_news = False
        if "role" in delta:
            is_news = not choice.has_role
            if choice.has_role:
                del delta["role"]
            choice.has_role = True
        for name in ("content", "reasoning", "reasoning_content"):
            if text := delta.get(name):
                delta[name] = fresh = choice.new_text(name, text)
                is_news = is_news or bool(fresh)
        if calls := delta.get("tool_calls"):
            delta["tool_calls"] = [call for call in calls if _is_new_call(call, choice)]
            is_news = is_news or bool(delta["tool_calls"])
        return is_news

    @staticmethod
    def _shift_offsets(logprobs: Fields, choice: _Choice) -> None:
        """An engine that goes on counts from where it began to compute: not the text's beginning."""
        offsets, tokens = logprobs.get("text_offset"), logprobs.get("tokens")
        if not offsets or not tokens:
            return
        if choice.next_offset is not None and (shift := choice.next_offset - offsets[0]):
            logprobs["text_offset"] = offsets = [offset + shift for offset in offsets]
        names_ids = tokens[-1].startswith("token_id:")  # then nothing tells how long it is
        choice.next_offset = None if names_ids else offsets[-1] + len(tokens[-1])


def _is_new_call(call: Fields, choice: _Choice) -> bool:
    """Leaves of a piece of a call what is new; its beginning has the name, and comes once."""
    index, function = call["index"], call["function"]
    function["arguments"] = arguments = choice.new_text(("call", index), function["arguments"])
    if "name" not in function:
        return bool(arguments)
    is_new: bool = index >= choice.num_calls_told
    choice.num_calls_told = max(choice.num_calls_told, index + 1)
    return is_new
