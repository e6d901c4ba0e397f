"""Samples tokens uniformly from those that a matcher allows."""

import random
from collections.abc import Sequence

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from pagewire.engine.text.grammar import Grammars, Matcher
from pagewire.engine.text.tokenizer import Tokenizer

PADDING = 13  # a model often has more logits than its vocabulary has tokens


def grammars_of(tokenizer: Tokenizer) -> Grammars:
    assert tokenizer.eos_token_id is not None
    return Grammars(tokenizer, tokenizer.vocab_size + PADDING, [tokenizer.eos_token_id])


def json_tokenizer(tags: Sequence[str], *, special: bool) -> Tokenizer:
    """A tokenizer with tokens that span several terminals of a grammar: `"}}`, `": {"`, `}\\n`."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(
        ['>\n{"name": "f", "arguments": {"a": 1}}\n</', '[{"x": [1, 2]}, {"x": []}]'] * 3, trainer
    )
    backend.add_tokens([tokenizers.AddedToken(tag, special=special) for tag in tags])
    return Tokenizer(backend, {"eos_token": "</s>"})


def allowed(matcher: Matcher, tokenizer: Tokenizer) -> list[int] | None:
    """The allowed ids; None: all."""
    num = tokenizer.vocab_size + PADDING
    mask = np.full((num + 31) // 32, 0x5A5A5A5A, np.int32)
    before = mask.copy()
    if not matcher.fill(mask):
        assert (mask == before).all()
        return None
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return [int(id) for id in np.flatnonzero(bits) if id < num]


def draw(matcher: Matcher, tokenizer: Tokenizer, seed: int, most: int = 2000, end: str = "") -> list[int]:
    """Samples ids until the matcher has ended or the eos comes. After `most` ids, prefers those that close brackets, or
    that spell `end`."""
    rng = random.Random(seed)
    out: list[int] = []
    closing = [id for id in range(tokenizer.vocab_size) if tokenizer.token_bytes(id) in (b'"', b"}", b"]")]
    while not matcher.is_ended:
        candidates = allowed(matcher, tokenizer)
        if candidates is None:
            candidates = list(range(tokenizer.vocab_size))
        assert candidates and max(candidates) < tokenizer.vocab_size, "a token without a text is allowed"
        if len(out) > most:
            spelling = _spelling(tokenizer, out, end) if end else []
            wanted = (tokenizer.eos_token_id, *spelling, *closing)
            candidates = [id for id in wanted if id in candidates][:1] or candidates
        assert len(out) < 3 * most, tokenizer.decode(out, False)
        id = rng.choice(candidates)
        if id == tokenizer.eos_token_id:
            break
        out.append(id)
        matcher.accept([id])
    return out


def _spelling(tokenizer: Tokenizer, out: list[int], end: str) -> list[int]:
    """The ids of `end` itself, and of its next character after those that `out` ends with. None right after it: it may
    stand in a string, which has to be closed."""
    text = tokenizer.decode(out[-len(end) :], False)
    if text.endswith(end.strip()):
        return []
    following = next(end[length] for length in range(len(end) - 1, -1, -1) if text.endswith(end[:length]))
    texts = (end.strip(), following)
    return [id for text in texts for id in range(tokenizer.vocab_size) if tokenizer.token_text(id) == text]
