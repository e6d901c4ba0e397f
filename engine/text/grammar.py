"""Which tokens may come next in a constrained output: one with a grammar, a thinking budget or bad words.

Owns the vocabulary as the grammar library sees it, and a matcher for each output. A matcher takes every sampled token
of its output and fills a mask of the tokens that may come next. Knows nothing of requests, rows or steps; the grammar
process does.

The library is llguidance: it compiles in milliseconds, bounds the work of every mask, and needs no torch. It is
imported when the first `Grammars` is made. Reasoning before the answer is part of the grammar (`grammar_text`), so the
library finds its end, even in the middle of a token.
"""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from ...errors import RequestError
from ...ipc.messages import Constraint
from ..checkpoint.gguf import is_gguf
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
"""One bit for each token of the vocabulary, int32 [ceil(vocab_size / 32)]; 1: it may come next."""

_MAX_COMPILED = 64  # compiled grammars in the cache
_ONE_TOKEN = "\x02"  # put before a text, so that it is tokenized as in the middle of another


class Matcher(Protocol):
    """The state of one constrained output."""

    def accept(self, ids: Sequence[int]) -> None:
        """Appends sampled tokens to the output. Raises RequestError if the grammar cannot follow them."""

    def fill(self, mask: Mask) -> bool:
        """Writes the tokens that may come next. Returns False, and leaves `mask` alone, if any may. Raises RequestError
        if none may."""

    @property
    def is_ended(self) -> bool:
        """Whether only an eos may come next."""


class Grammars:
    """Compiles constraints for one model's vocabulary."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Takes about a second for a large vocabulary. `tokenizer`: None if only transformers can load the model's.
        `vocab_size`: the width of the model's logits."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = [id for id in eos_token_ids if id < vocab_size]
        self._vocabulary: llguidance.LLTokenizer | None = None  # None: grammars are refused
        # Grammar text → matcher before the first token, which is copied for each output. Least recently used first.
        self._compiled: dict[str, llguidance.LLMatcher] = {}
        if tokenizer is not None and tokenizer.is_byte_exact:
            self._vocabulary = _make_vocabulary(tokenizer, vocab_size, self._eos_token_ids)

    def compile(self, constraint: Constraint, prompt_tail: str) -> Matcher:
        """A matcher for a new output. `prompt_tail`: the text of the prompt's last tokens, special ones included, where
        the chat template may have begun the reasoning. Raises RequestError."""
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
        """A matcher before the first token. Raises RequestError if the grammar cannot be enforced."""
        parts = [text]
        if constraint.reasoning_ends:
            answer_alone = replace(constraint, reasoning_starts=(), reasoning_ends=())
            parts.insert(0, write_grammar(answer_alone, prompt_tail, tokenizer))
        for part in dict.fromkeys(parts):
            matcher = self._matcher(part)
            if matcher.is_error():
                raise complaint(constraint, matcher.get_error())
            # The first mask shows whether the grammar allows any text: `start: start` compiles, too.
            matcher.compute_bitmask()
            if matcher.is_error():
                raise refusal(constraint, "allows no text at all")
        return matcher

    def _without_bad_schemas(self, constraint: Constraint) -> Constraint:
        """The constraint with each schema that cannot be enforced replaced by its source's `instead`. Raises
        RequestError, which names the schema's field, if there is none."""
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
        # If none is bad alone, all of them together are too much.
        return with_replaced(constraint, bad or range(len(constraint.sources)))

    def _matcher(self, text: str) -> "llguidance.LLMatcher":
        import llguidance

        assert self._vocabulary is not None
        limits = llguidance.LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
        return llguidance.LLMatcher(self._vocabulary, text, log_level=0, limits=limits)

    def forget(self) -> None:
        """Empties the cache of compiled grammars."""
        self._compiled.clear()


def load_grammars(folder: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> Grammars:
    """The Grammars of the checkpoint in `folder`. Does not import transformers. Raises ConfigError if its tokenizer is
    damaged."""
    has_own = is_gguf(folder) or (folder / "tokenizer.json").is_file()
    tokenizer = load_tokenizer(folder) if has_own else None
    return Grammars(tokenizer, vocab_size, eos_token_ids)


# ── matchers ───────────────────────────────────────────────────────────────────────────────────────────


class _Matcher:
    """All parts of a constraint together."""

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
        # The grammar may have to complete a character first. A forced token outranks banned ones.
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
    """llguidance's matcher. It raises nothing; it has an error state instead."""

    def __init__(self, matcher: "llguidance.LLMatcher", what: str, eos_token_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._what = what
        self._eos_token_ids = eos_token_ids
        self.is_ended = self._has_ended()

    def accept(self, ids: Sequence[int]) -> None:
        for id in ids:
            if self.is_ended:
                return  # an eos, or tokens that were sampled after the end and are dropped
            if not self._matcher.consume_token(id):
                raise self._failure()
            self.is_ended = id in self._eos_token_ids or self._has_ended()

    def fill(self, mask: Mask) -> None:
        assert mask.flags.c_contiguous, "the mask must be one piece of memory"
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._matcher.is_error():
            raise self._failure()
        if self.is_ended:
            _set(mask, self._eos_token_ids)

    def _has_ended(self) -> bool:
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def _failure(self) -> RequestError:
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
    """Our tokenizer with the interface that llguidance's wrapper needs: the bytes of each token, and text to ids.

    Special tokens have no text here, so that no string in a grammar can contain one."""

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
        """The ids of `text` within another text. Raises TypeError for bytes, as the wrapper expects."""
        if not isinstance(text, str):
            raise TypeError("text must be a str")
        wanted = text.encode()
        for before in ("", _ONE_TOKEN):  # some vocabularies put a space before every text
            ids = self._tokenizer.encode_rendered(self._tokenizer.neutralize(before + text))
            pieces = [self.tokens[id] if id < len(self.tokens) else b"" for id in ids]
            for start in range(min(len(ids), 3) + 1):
                if b"".join(pieces[start:]) == wanted:
                    return ids[start:]
        return [id for byte in wanted if (id := self._id_of_byte.get(bytes([byte]))) is not None]
