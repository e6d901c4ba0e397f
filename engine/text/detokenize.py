"""Decodes ids to whole characters, a few ids at a time.

Owns the incomplete character at the end of one request's output. Knows no stop strings and no messages.
"""

import codecs
from collections.abc import Collection, Sequence

from .tokenizer import Tokenizer

_CONTEXT = 8  # ids of the prompt's end, for decoders that look at neighbouring tokens


class IncrementalDetokenizer:
    """The text of one output. All pushes and the flush together give `tokenizer.decode` of all ids, except that the
    leading space of sentencepiece vocabularies is kept if there is text before the output.

    If the prompt ends inside a character, the output's first bytes become U+FFFD instead of completing it, so no text
    of the prompt can appear in the output (vLLM #48853)."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        context_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        marks: Collection[str] = (),
    ) -> None:
        """`context_ids`: the last ids before the output; none at the start of a text. `marks`: special tokens that are
        never skipped."""
        self._tokenizer = tokenizer
        self._skipped: frozenset[int] = tokenizer.special_ids if skip_special_tokens else frozenset()
        if marks:
            self._skipped = frozenset(id for id in self._skipped if tokenizer.token_text(id) not in marks)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        context = [id for id in context_ids if id not in self._skipped][-_CONTEXT:]
        self._at_start = not context and tokenizer.leading_space != "keep"
        self._window = context  # if not byte exact: the ids from which the next text is decoded
        self._num_read = len(context)  # of the window, whose text was returned
        self._is_between = False  # the ids so far are known to be whole characters

    def push_one(self, id: int) -> str | None:
        """The fast path: the text of a token that is whole characters after whole characters. None: nothing was
        changed, and the token must be pushed."""
        return self._tokenizer.whole_text(id) if self._is_between else None

    def push(self, ids: Sequence[int]) -> str:
        """The characters that `ids` complete."""
        if not self._tokenizer.is_byte_exact:
            self._window.extend(id for id in ids if id not in self._skipped)
            return self._read_window(last=False)
        visible = [id for id in ids if id not in self._skipped]
        data = [self._tokenizer.token_bytes(id) for id in visible]
        if self._at_start and visible:
            self._at_start = False
            data[0] = self._tokenizer.strip_start(self._tokenizer.first_token_bytes(visible[0]))
        text = self._decoder.decode(b"".join(data))
        self._is_between = not self._at_start and not self._decoder.getstate()[0]
        return text

    def flush(self) -> str:
        """Ends the output: U+FFFD if a character was incomplete, else nothing."""
        if not self._tokenizer.is_byte_exact:
            return self._read_window(last=True)
        return self._decoder.decode(b"", final=True)

    def _read_window(self, last: bool) -> str:
        """Decodes the window with and without the ids that were not read yet; the difference is the new text."""
        before = self._tokenizer.decode_window(self._window[: self._num_read], skip_special_tokens=False)
        after = self._tokenizer.decode_window(self._window, skip_special_tokens=False)
        if len(after) <= len(before) or (after.endswith("\ufffd") and not last):
            return ""
        self._window = self._window[self._num_read :]
        self._num_read = len(self._window)
        return after[len(before) :]
