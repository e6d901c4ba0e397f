"""Tool calls as Hermes and Qwen models write them: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.

One lexer for streams and plain answers: text in any pieces, events out, and the events' texts joined do not depend on
where the pieces are cut. Time is linear; there are no regular expressions on what a model wrote. A block that is no
tool call is given back as text.
"""

from typing import Literal, NamedTuple

import msgspec

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"
_SPACE = " \t\r\n"


class Text(NamedTuple):
    """Words for the reader."""

    text: str


class CallStart(NamedTuple):
    """A call begins; its arguments follow."""

    name: str


class CallArguments(NamedTuple):
    """More of the arguments' JSON of the call that began last."""

    text: str


Event = Text | CallStart | CallArguments

_State = Literal["text", "call", "skip"]
_Part = Literal["begin", "key", "colon", "value", "next"]


class HermesParser:
    """The lexer of one output."""

    def __init__(self) -> None:
        self._state: _State = "text"
        self._held = ""  # what may be the beginning of a tag
        self._spaces: list[str] = []  # whitespace before it, which is nobody's if a call follows
        self._call = _Call("")
        self._num_calls = 0

    def push(self, text: str) -> list[Event]:
        """The events that became certain with `text`."""
        events: list[Event] = []
        while text:
            match self._state:
                case "text":
                    text = self._push_text(text, events)
                case "call":
                    text = self._push_call(text, events)
                case "skip":
                    text = self._push_skip(text)
        return _merge(events)

    def flush(self) -> list[Event]:
        """The output has ended."""
        events: list[Event] = []
        if self._state == "call":
            if not self._call.started:
                events.append(Text(self._call.raw))
        elif self._state == "text" and (self._held or not self._num_calls):
            rest = "".join(self._spaces) + self._held
            if rest:
                events.append(Text(rest))
        self._held = ""
        self._spaces.clear()
        return events

    def _push_text(self, text: str, events: list[Event]) -> str:
        text = self._held + text
        self._held = ""
        at = text.find(_OPEN)
        if at >= 0:
            self._give_words(text[:at], events)
            self._state, self._call = "call", _Call("".join(self._spaces) + _OPEN)
            self._spaces.clear()
            return text[at + len(_OPEN) :]
        num_words = len(text) - _overlap(text, _OPEN)
        self._held = text[num_words:]
        self._give_words(text[:num_words], events)
        return ""

    def _give_words(self, text: str, events: list[Event]) -> None:
        """Gives `text` out but for the whitespace that ends it."""
        words = text.rstrip(_SPACE)
        if words:
            events.append(Text("".join(self._spaces) + words))
            self._spaces.clear()
        if len(words) < len(text):
            self._spaces.append(text[len(words) :])

    def _push_call(self, text: str, events: list[Event]) -> str:
        call = self._call
        for at, char in enumerate(text):
            outcome = call.step(char)
            if outcome == "more":
                continue
            call.take(events)
            if outcome == "done" or call.started:
                # What stands between the object and the closing tag, or after a slip inside it, is nobody's.
                self._num_calls += 1
                self._state = "skip"
            else:
                self._state = "text"
                events.append(Text(call.raw))
            return text[at + 1 :]
        call.take(events)
        return ""

    def _push_skip(self, text: str) -> str:
        text = self._held + text
        at = text.find(_CLOSE)
        if at >= 0:
            self._held, self._state = "", "text"
            return text[at + len(_CLOSE) :]
        self._held = text[len(text) - _overlap(text, _CLOSE) :]
        return ""


class _Call:
    """Reads one JSON object character by character; knows its `name` and passes its `arguments` on as written."""

    def __init__(self, before: str) -> None:
        """`before`: what belongs to the text if this turns out to be no call."""
        self._raw = [before]  # everything so far, until the call has started
        self.started = False
        self._part: _Part = "begin"
        self._token: list[str] = []  # of the key or value being read
        self._key = ""
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._name: str | None = None
        self._arguments: list[str] = []  # known and not given out
        self._has_arguments = False
        self._done = False

    @property
    def raw(self) -> str:
        """What was read, as text."""
        return "".join(self._raw)

    def step(self, char: str) -> Literal["more", "done", "broken"]:
        """Takes a character: the object goes on, is complete, or is none that names a call."""
        if not self.started:
            self._raw.append(char)
        match self._part:
            case "begin":
                return self._expect(char, "{", "key")
            case "key":
                return self._read_key(char)
            case "colon":
                return self._expect(char, ":", "value")
            case "value":
                return self._read_value(char)
            case "next":
                return self._read_next(char)

    def take(self, events: list[Event]) -> None:
        """Moves what has become known into `events`."""
        if not self.started:
            if self._name is None:
                return
            self.started = True
            self._raw.clear()
            events.append(CallStart(self._name))
        if self._done and not self._has_arguments:
            self._arguments.append("{}")
            self._has_arguments = True
        if self._arguments:
            events.append(CallArguments("".join(self._arguments)))
            self._arguments.clear()

    def _expect(self, char: str, wanted: str, then: _Part) -> Literal["more", "broken"]:
        if char == wanted:
            self._part = then
            return "more"
        return "more" if char in _SPACE else "broken"

    def _read_key(self, char: str) -> Literal["more", "done", "broken"]:
        if not self._token:
            if char == '"':
                self._token.append(char)
                self._in_string = True
                return "more"
            if char == "}":
                return self._finish()
            return "more" if char in _SPACE else "broken"
        self._token.append(char)
        if self._ends_string(char):
            key = _decode("".join(self._token))
            self._token.clear()
            if not isinstance(key, str):
                return "broken"
            self._key = "arguments" if key == "parameters" else key
            if self._key == "arguments" and self._has_arguments:
                self._key = ""  # a second time: the first stands
            self._part = "colon"
        return "more"

    def _read_value(self, char: str) -> Literal["more", "done", "broken"]:
        streams = self._key == "arguments" and bool(self._token) and self._token[0] in "{["
        if self._in_string:
            self._token_append(char, streams)
            if self._ends_string(char) and self._depth == 0:
                return self._end_value()
            return "more"
        if not self._token:
            if char in _SPACE:
                return "more"
            if char in ",:}]":
                return "broken"
            streams = self._key == "arguments" and char in "{["
        elif self._depth == 0 and char in ",}" + _SPACE:  # a number or a word has ended before this character
            outcome = self._end_value()
            return self._read_next(char) if outcome == "more" else outcome
        self._token_append(char, streams)
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            if self._depth == 0:
                return self._end_value()
        return "more"

    def _token_append(self, char: str, streams: bool) -> None:
        """The first character tells the kind of a value; arguments need not be kept once they are passed on."""
        if streams:
            self._has_arguments = True
            self._arguments.append(char)
            if not self._token:
                self._token.append(char)
        else:
            self._token.append(char)

    def _end_value(self) -> Literal["more", "broken"]:
        text = "".join(self._token)
        self._token.clear()
        self._part = "next"
        if self._key == "arguments" and not self._has_arguments:
            value = _decode(text)
            self._has_arguments = True
            # Some models write the arguments as a string of JSON, as OpenAI sends them.
            self._arguments.append(value if isinstance(value, str) else "{}" if value is None else text)
        elif self._key == "name" and self._name is None:
            name = _decode(text)
            if not isinstance(name, str) or not name:
                return "broken"
            self._name = name
        return "more"

    def _read_next(self, char: str) -> Literal["more", "done", "broken"]:
        if char == ",":
            self._part = "key"
            return "more"
        if char == "}":
            return self._finish()
        return "more" if char in _SPACE else "broken"

    def _finish(self) -> Literal["done", "broken"]:
        self._done = self._name is not None
        return "done" if self._done else "broken"

    def _ends_string(self, char: str) -> bool:
        """Whether `char`, read inside a string, is its closing quote."""
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False
            return True
        return False


def _decode(text: str) -> object:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None


def _overlap(text: str, tag: str) -> int:
    """Length of the longest proper prefix of `tag` that ends `text`."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0


def _merge(events: list[Event]) -> list[Event]:
    """Neighbouring texts as one."""
    merged: list[Event] = []
    for event in events:
        if merged and isinstance(event, Text) and isinstance(merged[-1], Text):
            merged[-1] = Text(merged[-1].text + event.text)
        else:
            merged.append(event)
    return merged
