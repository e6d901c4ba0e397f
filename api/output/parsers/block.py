"""Parts of readers: the values and calls that a family's reader reads out of a model's output, character by character.

A reader is a generator that is sent one character at a time and returns when its block ends. Its parts are generators
too: each takes the first character that it needs and returns the first that it did not use, or "" if it used the last
one. `Broken` says that the character just sent does not fit. Nothing here recurses or looks back, so time is linear.
The lexer keeps a bounded number of characters that may have to become text again.
"""

import string
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Literal, NamedTuple, TypeVar

import msgspec

from .events import CallArguments, CallStart, Event

T = TypeVar("T")
Reads = Generator[None, str, T]
Kind = Literal["text", "reasoning", "answer"]  # "answer": text between tags, which are dropped
Give = Callable[[str], object]
Schemas = Mapping[str, object]
"""The schema of each tool's arguments by the tool's name, as the client sent it."""

SPACE = " \t\r\n"
MAX_DEPTH = 64
MAX_NAME = 256  # characters
_NAME_CHARS = frozenset(string.ascii_letters + string.digits + "_.:/-")
_MAX_NUMBER = 512
_MAX_CLOSING = 64  # characters between a call and the end of the tag that closes it
_CLOSES = {"{": "}", "[": "]"}
_HEX = frozenset("0123456789abcdefABCDEF")


class Broken(Exception):
    """The output does not follow the grammar."""


class Block:
    """What a reader has found in one block."""

    def __init__(self, before: str, kind: Kind, schemas: Schemas) -> None:
        """`before`: the block's tag and the spaces before it, which become text again if the block cannot be read.
        `schemas`: see `Grammar`."""
        self.schemas = schemas
        self.raw = [before]  # read, and in no event yet
        self.kind: Kind = kind  # of the text after the block
        self.quiet = False  # if the output ends here, `raw` is dropped
        self._events: list[Event] = []
        self._pieces: list[str] = []

    def start(self, name: str) -> None:
        """A call begins, and cannot be taken back. Raises Broken if no function can have that name."""
        if not is_call_name(name):
            raise Broken
        self._close()
        self._events.append(CallStart(name))
        self.settle()

    def argue(self, text: str) -> None:
        """More of the arguments of the call that began last."""
        self._pieces.append(text)
        self.raw.clear()

    def settle(self) -> None:
        """All that was read so far needs not become text again."""
        self.raw.clear()
        self.quiet = True

    def take(self) -> list[Event]:
        """The events since the last call."""
        self._close()
        events, self._events = self._events, []
        return events

    def _close(self) -> None:
        if self._pieces:
            self._events.append(CallArguments("".join(self._pieces)))
            self._pieces.clear()


def overlap(text: str, tag: str) -> int:
    """Length of the longest proper prefix of `tag` that ends `text`."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0


# ── values ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Syntax(NamedTuple):
    """How a language writes values."""

    quotes: str
    words: Mapping[str, str]  # as written, by JSON's word
    string: Callable[[str, Give], Reads[None]]  # after the opening quote, to the closing one
    has_trailing_comma: bool
    has_bare_keys: bool = False  # keys are written without quotes


def skip_space(give: Give | None = None) -> Reads[str]:
    """The next character that is not a space. The spaces go to `give`."""
    while (char := (yield)) in SPACE:
        if give is not None:
            give(char)
    return char


def value(char: str, give: Give, syntax: Syntax) -> Reads[str]:
    """One value that begins with `char`, given as JSON. All that was given is valid JSON so far."""
    stack: list[str] = []
    while True:
        if char in syntax.quotes:
            give('"')
            yield from syntax.string(char, give)
            give('"')
            char = ""
        elif char in _CLOSES:
            if len(stack) == MAX_DEPTH:
                raise Broken
            give(char)
            stack.append(char)
            char = yield from skip_space(give)
            if char != _CLOSES[stack[-1]]:
                if stack[-1] == "{":
                    char = yield from _key(char, give, syntax)
                continue
        elif char in _NUMBER["start"]:
            char = yield from _number(char, give)
        else:
            yield from _word(char, give, syntax.words)
            char = ""
        while stack:  # a value has ended
            if char in SPACE:  # or not read yet
                give(char)
                char = yield from skip_space(give)
            if char == _CLOSES[stack[-1]]:
                give(char)
                stack.pop()
                char = ""
                continue
            if char != ",":
                raise Broken
            spaces = [","]
            char = yield from skip_space(spaces.append)
            if char == _CLOSES[stack[-1]] and syntax.has_trailing_comma:
                give("".join(spaces[1:]))
                give(char)
                stack.pop()
                char = ""
                continue
            give("".join(spaces))
            if stack[-1] == "{":
                char = yield from _key(char, give, syntax)
            break
        else:
            return char


def _key(char: str, give: Give, syntax: Syntax) -> Reads[str]:
    """A key and its colon; returns the first character of the value."""
    if char in syntax.quotes:
        give('"')
        yield from syntax.string(char, give)
        give('"')
        char = yield from skip_space(give)
    elif syntax.has_bare_keys:
        give(f'"{(yield from _bare_key(char))}"')
        char = ":"
    if char != ":":
        raise Broken
    give(":")
    return (yield from skip_space(give))


def _bare_key(char: str) -> Reads[str]:
    """A key without quotes, and its colon."""
    name = char + (yield from until(":", MAX_NAME))
    if not _NAME_CHARS.issuperset(name):
        raise Broken
    return name


_DIGITS = "0123456789"
_NUMBER: dict[str, dict[str, str]] = {
    "start": {"-": "minus", "0": "zero", **dict.fromkeys("123456789", "whole")},
    "minus": {"0": "zero", **dict.fromkeys("123456789", "whole")},
    "zero": {".": "point", "e": "e", "E": "e"},
    "whole": {".": "point", "e": "e", "E": "e", **dict.fromkeys(_DIGITS, "whole")},
    "point": dict.fromkeys(_DIGITS, "fraction"),
    "fraction": {"e": "e", "E": "e", **dict.fromkeys(_DIGITS, "fraction")},
    "e": {"+": "sign", "-": "sign", **dict.fromkeys(_DIGITS, "exponent")},
    "sign": dict.fromkeys(_DIGITS, "exponent"),
    "exponent": dict.fromkeys(_DIGITS, "exponent"),
}


def _number(char: str, give: Give) -> Reads[str]:
    state = "start"
    for _ in range(_MAX_NUMBER):
        following = _NUMBER[state].get(char)
        if following is None:
            break
        give(char)
        state = following
        char = yield
    if state not in ("zero", "whole", "fraction", "exponent") or char in _NUMBER[state]:
        raise Broken
    return char


def _word(char: str, give: Give, words: Mapping[str, str]) -> Reads[None]:
    for word in words:
        if word.startswith(char):
            for wanted in word[1:]:
                if (yield) != wanted:
                    raise Broken
            give(words[word])
            return
    raise Broken


def _hex(num_digits: int) -> Reads[int]:
    digits = ""
    for _ in range(num_digits):
        char = yield
        if char not in _HEX:
            raise Broken
        digits += char
    return int(digits, 16)


def escaped(char: str) -> str:
    """A character as it may stand in a JSON string."""
    if char >= " " and char not in '"\\' and not "\ud800" <= char <= "\udfff":
        return char
    return msgspec.json.encode(char).decode()[1:-1] if char < "\ud800" else f"\\u{ord(char):04x}"


def _json_string(quote: str, give: Give) -> Reads[None]:
    r"""A JSON string. Models also write bare control characters and `\'`, which are given as valid JSON."""
    while (char := (yield)) != '"':
        if char != "\\":
            give(char if char >= " " else escaped(char))
            continue
        char = yield
        if char == "u":
            give(f"\\u{(yield from _hex(4)):04x}")
        elif char == "'":
            give(char)
        elif char in '"\\/bfnrt':
            give("\\" + char)
        else:
            raise Broken


_PYTHON_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0"}


def _python_string(quote: str, give: Give) -> Reads[None]:
    while (char := (yield)) != quote:
        if char != "\\":
            give(escaped(char))
            continue
        char = yield
        if char in "xuU":
            code = yield from _hex({"x": 2, "u": 4, "U": 8}[char])
            if code > 0x10FFFF:
                raise Broken
            give(escaped(chr(code)))
        elif char in "\\'\"":
            give(escaped(char))
        elif char in _PYTHON_ESCAPES:
            give(escaped(_PYTHON_ESCAPES[char]))
        else:  # Python keeps a backslash that means nothing
            give("\\\\" + escaped(char))


_JSON_WORDS = {"true": "true", "false": "false", "null": "null"}
JSON = Syntax('"', _JSON_WORDS, _json_string, has_trailing_comma=False)
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null", **_JSON_WORDS}
PYTHON = Syntax("'\"", _PYTHON_WORDS, _python_string, has_trailing_comma=True)


def _either_string(quote: str, give: Give) -> Reads[None]:
    yield from (_json_string if quote == '"' else _python_string)(quote, give)


# For families whose templates write some values as JSON and others as Python's str() does.
JSON_OR_PYTHON = Syntax("'\"", _PYTHON_WORDS, _either_string, has_trailing_comma=True)


# ── parts of calls ───────────────────────────────────────────────────────────────────────────────────────────────────


def is_call_name(name: str) -> bool:
    """Whether a function can have this name."""
    return 0 < len(name) <= MAX_NAME and _NAME_CHARS.issuperset(name)


def call_name(char: str) -> Reads[tuple[str, str]]:
    """A name, perhaps empty, that begins with `char`, and the first character after it."""
    name = ""
    while char in _NAME_CHARS:
        name += char
        if len(name) > MAX_NAME:
            raise Broken
        char = yield
    return name, char


def one_tag(char: str, tags: Sequence[str]) -> Reads[str]:
    """Which of the tags comes, of which `char` is the first character."""
    text = char
    while text not in tags:
        if not any(tag.startswith(text) for tag in tags):
            raise Broken
        text += yield
    return text


def until(tag: str, limit: int) -> Reads[str]:
    """The text before `tag`. Raises Broken after `limit` characters, the tag's included."""
    text = ""
    while not text.endswith(tag):
        if len(text) == limit:
            raise Broken
        text += yield
    return text[: -len(tag)]


def closing(tag: str) -> Reads[None]:
    """Up to the tag that closes a call. A few characters before it, such as a superfluous brace, are dropped."""
    yield from until(tag, _MAX_CLOSING)


def arguments(block: Block, char: str) -> Reads[None]:
    """The arguments, an object that begins with `char`, of the call that has begun."""
    if char != "{":
        raise Broken
    yield from value(char, block.argue, JSON)
    block.settle()


def call_object(block: Block, char: str, *, needs_arguments: bool = False) -> Reads[None]:
    """One call as an object: `{"name": …, "arguments": {…}}`, with its keys in any order and others among them. The key
    may also be `parameters`, and its value null or a string that holds the object. `needs_arguments`: without them it
    is not a call, because no tag marks it as one."""
    if char != "{":
        raise Broken
    block.quiet = False
    name: str | None = None
    held: list[str] | None = None  # arguments that came before the name
    has_started = False
    char = yield from skip_space()
    while char != "}":
        if char != '"':
            raise Broken
        text: list[str] = []
        char = yield from _key_of(char, text)
        key = _decode(text)
        if key == "name" and name is None:
            char, name = yield from _name_of(char)
        elif key in ("arguments", "parameters") and held is None and not has_started:
            if name is not None and char == "{":
                block.start(name)
                has_started = True
                char = yield from value(char, block.argue, JSON)
            else:
                held = []
                char = yield from value(char, held.append, JSON)
                held = [_object_text(held)]
        else:
            char = yield from value(char, _ignore, JSON)
        if name is not None and held is not None and not has_started:
            block.start(name)
            has_started = True
            block.argue(held[0])
        if char in SPACE:  # or not read yet
            char = yield from skip_space()
        if char == ",":
            char = yield from skip_space()
            if char != '"':
                raise Broken
        elif char != "}":
            raise Broken
    if name is None or (needs_arguments and not has_started):
        raise Broken
    if not has_started:
        block.start(name)
        block.argue("{}")
    block.settle()


def _name_of(char: str) -> Reads[tuple[str, str]]:
    """(the character after it, the name) of a function."""
    text: list[str] = []
    char = yield from value(char, text.append, JSON)
    name = _decode(text)
    if not isinstance(name, str) or not name:
        raise Broken
    return char, name


def _key_of(char: str, text: list[str]) -> Reads[str]:
    text.append('"')
    yield from _json_string(char, text.append)
    text.append('"')
    if (yield from skip_space()) != ":":
        raise Broken
    return (yield from skip_space())


def _object_text(pieces: list[str]) -> str:
    found = _decode(pieces)
    if found is None:
        return "{}"
    if isinstance(found, dict):
        return "".join(pieces)
    if isinstance(found, str) and isinstance(_decode([found]), dict):
        return found
    raise Broken


def _decode(pieces: list[str]) -> object:
    """The value; False, which no caller accepts, if it cannot be decoded (half a surrogate pair, for instance)."""
    try:
        return msgspec.json.decode("".join(pieces))
    except (msgspec.DecodeError, RecursionError):
        return False


def _ignore(text: str) -> None:
    pass
