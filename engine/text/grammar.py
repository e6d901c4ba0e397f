"""Which tokens may come next in an output that has to keep to something: a grammar, a thinking budget, bad words.

Owns the vocabulary as the grammar library sees it, and one matcher for each output. A matcher is told every token of
its output and fills a mask of those that may come next. Knows nothing of requests, rows or steps; the grammar process
does.

The library is llguidance: it compiles in milliseconds, bounds the work of every mask by itself, and needs no torch. It
is imported when the first `Grammars` is made. Reasoning before the answer is part of the grammar (`grammar_text`), so
the library finds its end, also where that is in the middle of a token.
"""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from ...errors import RequestError
from ...ipc.messages import Constraint
from .bad_words import BadWords
from .grammar_text import (
    alone,
    are_own_rules,
    complaint,
    refusal,
    what_it_is,
    with_replaced,
    write_grammar,
)
from .thinking_budget import ThinkingBudget
from .tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    import llguidance

Mask = NDArray[np.int32]
"""One bit for each token of the vocabulary, int32 [ceil(vocabulary / 32)]; 1: it may come."""

_MAX_COMPILED = 64  # grammars that are kept
_ONE_TOKEN = "\x02"  # stands before a text that is spelled, so that it is spelled as in the middle of another


class Matcher(Protocol):
    """Follows one output."""

    def accept(self, ids: Sequence[int]) -> None:
        """These came next. Raises RequestError if the output cannot be followed any longer."""

    def fill(self, mask: Mask) -> bool:
        """Writes what may come next; False, with `mask` as it was: anything. Raises RequestError if nothing can."""

    @property
    def is_ended(self) -> bool:
        """Nothing but an eos may come."""


class Grammars:
    """One model's vocabulary, and what compiles constraints for it."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Takes about a second for a large vocabulary. `tokenizer` None: one that only transformers can load.
        `vocab_size`: the width of the model's logits."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = [id for id in eos_token_ids if id < vocab_size]
        self._vocabulary: llguidance.LLTokenizer | None = None  # None: there can be no grammars
        # A grammar's text → its matcher before the first token, to be copied; the one asked for last at the end.
        self._compiled: dict[str, llguidance.LLMatcher] = {}
        if tokenizer is not None and tokenizer.is_byte_exact:
            self._vocabulary = _make_vocabulary(tokenizer, vocab_size, self._eos_token_ids)

    def compile(self, constraint: Constraint, prompt_tail: str) -> Matcher:
        """A matcher for a new output. `prompt_tail`: the text of the prompt's last tokens, special ones included, in
        which the model may have been made to reason. Raises RequestError."""
        grammar = budget = bad_words = None
        if constraint.kind != "none":
            grammar = self._compile_grammar(constraint, prompt_tail)
        if constraint.thinking_budget is not None:
            budget = ThinkingBudget(self._readable_tokenizer("thinking_budget"), constraint, prompt_tail)
        if constraint.bad_words:
            bad_words = BadWords(constraint.bad_words, self._vocab_size)
        return _Matcher(grammar, budget, bad_words)

    def _readable_tokenizer(self, what: str) -> Tokenizer:
        if self._tokenizer is None:
            raise RequestError("invalid_request", f"{what}: this model has no tokenizer.json, which this needs.")
        return self._tokenizer

    def _compile_grammar(self, constraint: Constraint, prompt_tail: str) -> "_Grammar":
        what = what_it_is(constraint)
        tokenizer = self._readable_tokenizer(what)
        if self._vocabulary is None:
            raise RequestError("invalid_request", f"{what}: this model's tokens do not spell texts byte by byte.")
        text = write_grammar(constraint, prompt_tail, tokenizer)
        matcher = self._compiled.pop(text, None)
        if matcher is None:
            try:
                matcher = self._start(constraint, text, prompt_tail, tokenizer)
            except RequestError:
                replaced = self._without_bad_schemas(constraint)
                if replaced == constraint:
                    raise
                others = write_grammar(replaced, prompt_tail, tokenizer)
                matcher = self._start(replaced, others, prompt_tail, tokenizer)
        self._compiled[text] = matcher
        if len(self._compiled) > _MAX_COMPILED:
            del self._compiled[next(iter(self._compiled))]
        return _Grammar(matcher.deep_copy(), what, frozenset(self._eos_token_ids))

    def _start(
        self, constraint: Constraint, text: str, prompt_tail: str, tokenizer: Tokenizer
    ) -> "llguidance.LLMatcher":
        """A matcher before the first token. Raises RequestError."""
        parts = [text]
        if constraint.reasoning_ends:
            answer_alone = replace(constraint, reasoning_starts=(), reasoning_ends=())
            parts.insert(0, write_grammar(answer_alone, prompt_tail, tokenizer))
        for part in dict.fromkeys(parts):
            matcher = self._matcher(part)
            if matcher.is_error():
                raise complaint(constraint, matcher.get_error())
            # Whether any text follows the answer's grammar shows in its first mask: `start: start` compiles, too.
            matcher.compute_bitmask()
            if matcher.is_error():
                raise refusal(constraint, "allows no text at all")
        return matcher

    def _without_bad_schemas(self, constraint: Constraint) -> Constraint:
        """With what stands instead of each schema that cannot be enforced. Raises RequestError, with the field that
        such a schema is from, where nothing does."""
        if not are_own_rules(constraint):
            return constraint
        bad: list[int] = []
        for place, (text, source) in enumerate(zip(alone(constraint), constraint.sources, strict=False)):
            matcher = self._matcher(text)
            if not matcher.is_error():
                matcher.compute_bitmask()
            if matcher.is_error():
                if not source.instead:
                    raise complaint(constraint, matcher.get_error(), source)
                bad.append(place)
        return with_replaced(constraint, bad or range(len(constraint.sources)))  # together they may be too much

    def _matcher(self, text: str) -> "llguidance.LLMatcher":
        import llguidance  # not before it is needed

        assert self._vocabulary is not None
        limits = llguidance.LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
        return llguidance.LLMatcher(self._vocabulary, text, log_level=0, limits=limits)

    def forget(self) -> None:
        """Frees what is kept in case that it is asked for again."""
        self._compiled.clear()


def load_grammars(folder: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> Grammars:
    """For the checkpoint in `folder`. Raises ConfigError if its tokenizer is damaged; imports no transformers."""
    tokenizer = load_tokenizer(folder) if (folder / "tokenizer.json").is_file() else None
    return Grammars(tokenizer, vocab_size, eos_token_ids)


# ── what follows an output ───────────────────────────────────────────────────────────────────────────────────────────


class _Matcher:
    """All of a constraint's parts."""

    def __init__(self, grammar: "_Grammar | None", budget: ThinkingBudget | None, bad_words: BadWords | None) -> None:
        self._grammar = grammar
        self._budget = budget
        self._bad_words = bad_words

    def accept(self, ids: Sequence[int]) -> None:
        for part in (self._grammar, self._budget, self._bad_words):
            if part is not None:
                part.accept(ids)

    def fill(self, mask: Mask) -> bool:
        banned = self._bad_words.banned() if self._bad_words is not None else ()
        forced = self._budget.forced_id if self._budget is not None else None
        if self._grammar is not None:
            self._grammar.fill(mask)
        elif banned or forced is not None:
            mask.fill(-1)
        else:
            return False
        # A grammar may first need the rest of a character; whatever is forced comes before what is banned.
        if forced is not None and mask[forced >> 5] >> (forced & 31) & 1:
            mask.fill(0)
            _set(mask, (forced,))
        else:
            _clear(mask, banned)
        if not mask.any():
            raise RequestError("invalid_request", "bad_words leaves no token that the grammar allows.")
        return True

    @property
    def is_ended(self) -> bool:
        return self._grammar is not None and self._grammar.is_ended


class _Grammar:
    """llguidance's matcher. What is wrong with it is an error of its own, never an exception."""

    def __init__(self, matcher: "llguidance.LLMatcher", what: str, eos_token_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._what = what
        self._eos_token_ids = eos_token_ids
        self.is_ended = self._has_ended()

    def accept(self, ids: Sequence[int]) -> None:
        for id in ids:
            if self.is_ended:
                return  # an eos, or what was drawn in vain after the end
            if not self._matcher.consume_token(id):
                raise self._lost()
            self.is_ended = id in self._eos_token_ids or self._has_ended()

    def fill(self, mask: Mask) -> None:
        assert mask.flags.c_contiguous, "the mask must be one piece of memory"
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._matcher.is_error():
            raise self._lost()
        if self.is_ended:
            _set(mask, self._eos_token_ids)

    def _has_ended(self) -> bool:
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def _lost(self) -> RequestError:
        reason = (self._matcher.get_error() or self._matcher.stop_reason()).partition("\n")[0][:200]
        return RequestError("invalid_request", f"{self._what} could not be followed to its end: {reason}.")


def _set(mask: Mask, ids: Collection[int]) -> None:
    words = mask.view(np.uint32)
    for id in ids:
        words[id >> 5] |= np.uint32(1 << (id & 31))


def _clear(mask: Mask, ids: Collection[int]) -> None:
    words = mask.view(np.uint32)
    for id in ids:
        words[id >> 5] &= ~np.uint32(1 << (id & 31))


# ── the vocabulary ───────────────────────────────────────────────────────────────────────────────────────────────────


def _make_vocabulary(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> "llguidance.LLTokenizer":
    import llguidance

    spelling = _Spelling(tokenizer, vocab_size, eos_token_ids)
    return llguidance.LLTokenizer(
        llguidance.TokenizerWrapper(spelling),
        n_vocab=vocab_size,
        eos_token=list(eos_token_ids) or None,
        slices=llguidance.LLTokenizer.json_slices(),
    )


class _Spelling:
    """Our tokenizer as llguidance's wrapper wants it: the bytes of each token, and how a text is spelled.

    Special tokens stand for no text, so that no string that a grammar allows can contain one."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self.tokens = [tokenizer.token_bytes(id) for id in range(vocab_size)]
        special = {id for id in (*tokenizer.special_ids, *eos_token_ids) if id < vocab_size}
        for id in special:
            self.tokens[id] = self.tokens[id] or b"<%d>" % id
        self.special_token_ids = sorted(special)
        self.eos_token_id = next(iter(eos_token_ids), None)
        self.bos_token_id = None
        self._id_of_byte = {token: id for id, token in reversed([*enumerate(self.tokens)]) if len(token) == 1}

    def __call__(self, text: str) -> list[int]:
        """The ids that spell `text` in the middle of another. Raises TypeError for bytes, as the wrapper expects."""
        if not isinstance(text, str):
            raise TypeError("a text is wanted")
        wanted = text.encode()
        for before in ("", _ONE_TOKEN):  # some vocabularies put a space before every text
            ids = self._tokenizer.encode_rendered(self._tokenizer.neutralize(before + text))
            pieces = [self.tokens[id] if id < len(self.tokens) else b"" for id in ids]
            for start in range(min(len(ids), 3) + 1):
                if b"".join(pieces[start:]) == wanted:
                    return ids[start:]
        return [id for byte in wanted if (id := self._id_of_byte.get(bytes([byte]))) is not None]
