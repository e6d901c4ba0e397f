"""Values between two tags that are written without quotes: `<parameter=city>Köln</parameter>`.

Whether `5` is a number or a string follows from the tool's schema. Where it allows only strings, the text is the
string as it is, and streams. Where it allows no strings, the text is JSON, or what Python's str() makes of the value;
text that is neither is given as a string. Where it allows both, text that is a value of an allowed type is that value,
and other text is a string; at most `MAX_UNDECIDED` characters are held back for that.
"""

from collections.abc import Sequence
from contextlib import suppress

import msgspec

from .block import JSON_OR_PYTHON, SPACE, Broken, Give, Reads, escaped, one_tag, overlap, skip_space, value
from .schema_types import type_of

MAX_UNDECIDED = 1 << 15  # characters; longer text is a string
_ONLY_STRING = frozenset({"string"})


class Ending:
    """Finds the end of a text, the first of `ends`, character by character."""

    def __init__(self, ends: Sequence[str]) -> None:
        self._ends = ends
        self._firsts = {end[0] for end in ends}
        self._tail = ""  # may be the beginning of an end

    def push(self, text: str) -> tuple[str, str | None]:
        """(what is certainly not part of the end, what comes after the end); None if the text has not ended."""
        if not self._tail and self._firsts.isdisjoint(text):  # nearly always
            return text, None
        text = self._tail + text
        if found := [(at, len(end)) for end in self._ends if (at := text.find(end)) >= 0]:
            at, length = min(found)
            return text[:at], text[at + length :]
        num_certain = len(text) - max(overlap(text, end) for end in self._ends)
        self._tail = text[num_certain:]
        return text[:num_certain], None


def bare_value(give: Give, types: frozenset[str], end: str, pad: str = "") -> Reads[None]:
    """One value and its end, given as JSON. `types`: which the schema allows. `pad`: what templates write around the
    value, a character or nothing."""
    ends = (pad + end, end) if pad else (end,)
    char = yield
    if char == pad:
        char = yield
    if types == _ONLY_STRING:
        yield from _string(char, ends, give)
    else:
        yield from _undecided(char, give, types, ends)


def bare_string(give: Give, end: str) -> Reads[None]:
    """The rest of a string whose opening quote was read, up to `end`, given without quotes."""
    ending = Ending((end,))
    rest: str | None = None
    while rest is None:
        certain, rest = ending.push((yield))
        give("".join(map(escaped, certain)))


def as_json(text: str, types: frozenset[str], end: str, pad: str = "") -> str | None:
    """The JSON that a written value is read as; None if its end is not read where it is."""
    pieces: list[str] = []
    reads = bare_value(pieces.append, types, end, pad)
    next(reads)
    left = pad + text + pad + end
    try:
        while left:
            char, left = left[0], left[1:]
            reads.send(char)
    except StopIteration:
        return None if left else "".join(pieces)
    except Broken:
        pass
    return None


def _string(text: str, ends: Sequence[str], give: Give) -> Reads[None]:
    """A string that begins with `text`, in which there is no end but perhaps the last characters."""
    give('"')
    ending = Ending(ends)
    closed = max((len(end) for end in ends if text.endswith(end)), default=0)
    num_certain = len(text) - (closed or max(overlap(text, end) for end in ends))
    give("".join(map(escaped, text[:num_certain])))
    _, rest = ending.push(text[num_certain:])
    while rest is None:
        certain, rest = ending.push((yield))
        if certain:
            give("".join(map(escaped, certain)))
    give('"')


def _undecided(char: str, give: Give, types: frozenset[str], ends: Sequence[str]) -> Reads[None]:
    held = [char]
    while char in SPACE and len(held) < MAX_UNDECIDED:
        char = yield
        held.append(char)
    if "string" not in types and char in "{[":  # nothing to decide
        yield from value(char, give, JSON_OR_PYTHON)
        yield from one_tag((yield from skip_space()), ends[-1:])
        return
    found: list[str] = []
    certain, rest, ending = char, None, Ending(ends)
    if char not in "'\"":  # quotes at the ends of a string are part of it
        with suppress(Broken):
            after = yield from _recorded(value(char, found.append, JSON_OR_PYTHON), held)
            if "string" not in types or _type_of_text(found) in types:
                certain, rest = ending.push(after)
    while rest is None and not certain.strip(SPACE) and len(held) < MAX_UNDECIDED:
        held.append((yield))  # only spaces may come between the value and its end
        certain, rest = ending.push(held[-1])
    if rest is not None and not certain.strip(SPACE):
        give("".join(found))
    else:
        yield from _string("".join(held), ends, give)


def _recorded(reads: Reads[str], held: list[str]) -> Reads[str]:
    """Sends `reads` its characters and appends them to `held`. Raises Broken if there are too many."""
    next(reads)
    while len(held) < MAX_UNDECIDED:
        held.append((yield))
        try:
            reads.send(held[-1])
        except StopIteration as end:
            return str(end.value)
    raise Broken


def _type_of_text(json: Sequence[str]) -> str:
    try:
        return type_of(msgspec.json.decode("".join(json)))
    except msgspec.DecodeError:  # half a surrogate pair, for instance
        return ""
