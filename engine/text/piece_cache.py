"""Token ids of pieces of text that come again: system prompts, lists of tools, the earlier turns of a conversation.

A prompt is cut where the library cuts it, too: in front of added tokens that it finds before anything else looks at the
text. What stands on both sides of such a token is normalized and encoded independently. Every piece but a prompt's
first begins with such a token, so rules for the beginning of a text hold for the same pieces as in the whole text.
`Cuts` decides which tokens are of this kind, and tries each of them on some texts.

Ids are kept for each owner apart: the time that a prompt takes must not tell what others have asked.
"""

import string
import sys
from array import array
from collections import OrderedDict
from collections.abc import Hashable

from tokenizers import AddedToken

from .tokenizer import SENTINEL, Tokenizer, any_of

MAX_BYTES = 32 << 20
"""Of the pieces and their ids in one cache."""

SHORTEST = 64
"""Characters of a piece that is kept. Encoding a shorter one takes hardly longer than finding it."""

_ENTRY_BYTES = 300  # of an entry besides its text and ids
_OPENERS = frozenset(string.punctuation) - {"_"}
_PROBES = ("", "a", " a", "a ", "A b\n", "\n\n a", "▁a", "é\u0301", "\U0001f642 1", "- don't  ")
_MOST_PROBED = 32  # tokens that are tried on all pairs of probes; more of them are alike, and tried on some


class Cuts:
    """Where a text may be cut so that its pieces, encoded one by one, give the ids of the whole text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        first_pass = {token.content: token for token in tokenizer.added_tokens if not token.normalized}
        openers = [text for text, token in first_pass.items() if _opens_a_piece(token)]
        self._openers = frozenset() if tokenizer.is_random else frozenset(_proved(tokenizer, openers))
        self._first_pass = any_of(first_pass or [SENTINEL])

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._openers)

    def pieces(self, text: str) -> list[str]:
        """`text` in pieces of at least `SHORTEST` characters but the last. What follows a cut is cut at the same places
        whatever stands before it."""
        pieces, start = [], 0
        if self._openers and len(text) > SHORTEST:
            for match in self._first_pass.finditer(text):  # all of them, because tokens may overlap
                if match.start() - start >= SHORTEST and match[0] in self._openers:
                    pieces.append(text[start : match.start()])
                    start = match.start()
        pieces.append(text[start:])
        return pieces


class PieceCache:
    """The ids of pieces, the least recently used first. For one thread."""

    def __init__(self, tokenizer: Tokenizer, max_bytes: int = MAX_BYTES) -> None:
        self._tokenizer = tokenizer
        self._cuts = Cuts(tokenizer)
        self._around = _around(tokenizer)
        self._max_bytes = max_bytes
        self._ids: OrderedDict[tuple[Hashable, str], array[int]] = OrderedDict()
        self._num_bytes = 0
        self.num_chars = 0  # of all texts so far
        self.num_cached_chars = 0  # of pieces whose ids were cached

    @property
    def num_bytes(self) -> int:
        """Of the texts and ids that are kept, about."""
        return self._num_bytes

    def encode(self, text: str, add_special_tokens: bool = True, *, owner: Hashable = None) -> "array[int]":
        """The ids that `Tokenizer.encode` gives. Only texts of the same `owner` share pieces."""
        self.num_chars += len(text)
        if not self._cuts or (add_special_tokens and self._around is None):
            return array("i", self._tokenizer.encode(text, add_special_tokens))
        found = [(piece, self._find(owner, piece)) for piece in self._cuts.pieces(text)]
        fresh = iter(self._tokenizer.encode_pieces([piece for piece, known in found if known is None]))
        before, after = self._around if add_special_tokens and self._around is not None else ((), ())
        ids = array("i", before)
        for piece, known in found:
            if known is None:
                known = array("i", next(fresh))
                self._keep(owner, piece, known)
            ids += known
        ids.extend(after)
        return ids

    def forget(self) -> None:
        """Drops everything. To be called if `encode` was interrupted, or if memory is short."""
        self._ids.clear()
        self._num_bytes = 0

    def _find(self, owner: Hashable, piece: str) -> "array[int] | None":
        if len(piece) < SHORTEST or (known := self._ids.get((owner, piece))) is None:
            return None
        self._ids.move_to_end((owner, piece))
        self.num_cached_chars += len(piece)
        return known

    def _keep(self, owner: Hashable, piece: str, ids: "array[int]") -> None:
        num_bytes = _num_bytes(piece, ids)
        if len(piece) < SHORTEST or num_bytes > self._max_bytes or (owner, piece) in self._ids:
            return
        self._ids[owner, piece] = ids
        self._num_bytes += num_bytes
        while self._num_bytes > self._max_bytes:
            (_, oldest), dropped = self._ids.popitem(last=False)
            self._num_bytes -= _num_bytes(oldest, dropped)


def _num_bytes(piece: str, ids: "array[int]") -> int:
    return sys.getsizeof(piece) + ids.itemsize * len(ids) + _ENTRY_BYTES


def _opens_a_piece(token: AddedToken) -> bool:
    """Whether the library finds this token whatever stands before it. Spaces before it must not belong to it, nor to
    the token before it, and that it follows must not change whether the one before it is a word."""
    return token.content[:1] in _OPENERS and not (token.lstrip or token.rstrip or token.single_word)


def _proved(tokenizer: Tokenizer, openers: list[str]) -> list[str]:
    """Those of `openers` before which cutting changes no ids of some texts."""
    proved = []
    for i, opener in enumerate(openers):
        probes = _PROBES if i < _MOST_PROBED else _PROBES[:3]
        whole = tokenizer.encode_pieces([left + opener + right for left in probes for right in probes])
        starts = tokenizer.encode_pieces(list(probes))
        ends = tokenizer.encode_pieces([opener + right for right in probes])
        if whole == [start + end for start in starts for end in ends]:
            proved.append(opener)
    return proved


def _around(tokenizer: Tokenizer) -> tuple[list[int], list[int]] | None:
    """The special tokens that the tokenizer puts before and behind every text; None if it does anything else."""
    plain, whole = tokenizer.encode("a", add_special_tokens=False), tokenizer.encode("a")
    for num_before in range(len(whole) - len(plain) + 1):
        before, after = whole[:num_before], whole[num_before + len(plain) :]
        if all(
            tokenizer.encode(text) == before + tokenizer.encode(text, add_special_tokens=False) + after
            for text in _PROBES
        ):
            return before, after
    return None
