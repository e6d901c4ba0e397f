"""One request's output: ids in, text out, ended by stop strings.

Joins the incremental detokenizer and the stop strings for the detokenizer process, and renders log-probabilities. Knows
no messages: the values here are plain tuples with the messages' fields in their order.
"""

from array import array
from collections.abc import Collection, Sequence
from typing import NamedTuple

from .detokenize import IncrementalDetokenizer
from .stop_strings import StopStrings
from .tokenizer import Tokenizer

LOWEST_LOGPROB = -9999.0  # what -inf becomes: JSON has no infinity


class Piece(NamedTuple):
    """The result of a push."""

    text: str
    num_ids: int  # how many of the pushed ids belong to the output; fewer than all only after a stop string
    stop: str | None  # the stop string that ended the output here


class OutputText:
    """The text of one output. After a piece with `stop`, nothing more may be pushed."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        context_ids: Sequence[int],
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        detokenize: bool = True,
        marks: Collection[str] = (),
        min_ids: int = 0,
    ) -> None:
        """`detokenize` False: ids are only counted and the text stays empty. `min_ids`: a stop string that is complete
        within the first `min_ids` ids does not end the output."""
        self._detokenize = detokenize
        self._has_stop = bool(stop)
        self._detokenizer = IncrementalDetokenizer(tokenizer, context_ids, skip_special_tokens, marks)
        self._stop_strings = StopStrings(stop, include_stop)
        self._min_ids = min_ids
        self.num_ids = 0

    def push_one(self, id: int) -> str | None:
        """The fast path for the most frequent case: the text of a token that is whole characters after whole
        characters. None: nothing was changed, and the token must be pushed."""
        text = self._detokenizer.push_one(id)
        if text is None or (self._has_stop and not self._stop_strings.passes(text)):
            return None
        self.num_ids += 1
        return text

    def push(self, ids: Sequence[int], last: bool = False) -> Piece:
        """The text that `ids` complete; all text that was held back, too, if they are the `last`.

        The id that completes a stop string is the output's last one, so with stop strings ids are read one by one."""
        if not self._detokenize:
            self.num_ids += len(ids)
            return Piece("", len(ids), None)
        shown: list[str] = []
        groups = [ids[i : i + 1] for i in range(len(ids))] if self._has_stop else [ids]
        for i, group in enumerate(groups, start=1):
            may_stop = self.num_ids + i > self._min_ids
            text, hit = self._stop_strings.push(self._detokenizer.push(group), may_stop=may_stop)
            shown.append(text)
            if hit is not None:
                self.num_ids += i
                return Piece("".join(shown), i, hit)
        self.num_ids += len(ids)
        hit = None
        if last:
            may_stop = self.num_ids > self._min_ids
            text, hit = self._stop_strings.push(self._detokenizer.flush(), may_stop=may_stop)
            shown.append(text)
            if hit is None:
                shown.append(self._stop_strings.flush())
        return Piece("".join(shown), len(ids), hit)


class Candidate(NamedTuple):
    """A candidate for a position; fields as in `messages.TopLogprob`."""

    id: int
    token: str
    bytes: bytes
    logprob: float


class Position(NamedTuple):
    """The chosen token and the best ones, best first; fields as in `messages.TokenLogprob`."""

    chosen: Candidate
    top: tuple[Candidate, ...]


def render_logprobs(tokenizer: Tokenizer, width: int, ids: bytes, values: bytes) -> list[Position]:
    """The positions of a `messages.RowLogprobs`: `width` entries each, int32 ids, float32 values, the chosen first."""
    all_ids, all_values = array("i"), array("f")
    all_ids.frombytes(ids)
    all_values.frombytes(values)
    entries = [
        Candidate(id, tokenizer.token_text(id), tokenizer.token_bytes(id), max(value, LOWEST_LOGPROB))
        for id, value in zip(all_ids, all_values, strict=True)
    ]
    return [Position(entries[i], tuple(entries[i + 1 : i + width])) for i in range(0, len(entries), width)]
