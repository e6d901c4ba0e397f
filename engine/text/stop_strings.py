"""Finds stop strings in a text that arrives in pieces, and holds back text that may be the beginning of one.

The match that is complete first wins; of several that end at the same character, the longest. The result does not
depend on where the pieces are cut. The time for each stop string is linear in the text (Knuth, Morris, Pratt).
"""

from collections.abc import Sequence


class StopStrings:
    """One request's stop strings. After a hit, nothing more may be pushed."""

    def __init__(self, stop: Sequence[str], include_stop: bool = False) -> None:
        """`include_stop`: the matched string stays in the text."""
        self._needles = [_Needle(text) for text in stop if text]
        self._first_chars = {needle.text[0] for needle in self._needles}
        self._include_stop = include_stop
        self._held = ""  # as long as the longest partial match

    def passes(self, text: str) -> bool:
        """Whether pushing `text` would return it as it is and change nothing."""
        return not self._held and not any(char in text for char in self._first_chars)

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """The text that can be shown now, and the stop string that was found, or None. `may_stop` False: a match that
        is complete in `text` does not count, but one may begin in it."""
        if self.passes(text):
            return text, None
        needles = self._needles
        for end, char in enumerate(text, start=1):
            hit: _Needle | None = None
            for needle in needles:
                if needle.step(char) and may_stop and (hit is None or len(needle.text) > len(hit.text)):
                    hit = needle
            if hit is not None:
                whole = self._held + text[:end]
                self._held = ""
                return whole if self._include_stop else whole[: len(whole) - len(hit.text)], hit.text
        whole = self._held + text
        num_shown = len(whole) - max(needle.num_open for needle in needles)
        self._held = whole[num_shown:]
        return whole[:num_shown], None

    def flush(self) -> str:
        """Ends the text: returns what was held back."""
        held, self._held = self._held, ""
        return held


class _Needle:
    """One stop string, and its longest prefix with which the text so far ends."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_matched = 0
        self._borders = [0] * (len(text) + 1)  # [n]: the longest proper prefix of text[:n] that is also its suffix
        length = 0
        for i in range(1, len(text)):
            while length and text[i] != text[length]:
                length = self._borders[length]
            if text[i] == text[length]:
                length += 1
            self._borders[i + 1] = length

    @property
    def num_open(self) -> int:
        """How many of the text's last characters may be the beginning of a later match."""
        return self._borders[-1] if self.num_matched == len(self.text) else self.num_matched

    def step(self, char: str) -> bool:
        """Takes the next character. Whether the text now ends with the whole string."""
        text, matched = self.text, self.num_matched
        if matched == len(text):
            matched = self._borders[matched]
        while matched and text[matched] != char:
            matched = self._borders[matched]
        if text[matched] == char:
            matched += 1
        self.num_matched = matched
        return matched == len(text)
