"""Tokens drawn at random from what a matcher allows, as a model without any sense would draw them."""

import random
from collections.abc import Sequence

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from pagewire.engine.text.grammar import Grammars, Matcher
from pagewire.engine.text.tokenizer import Tokenizer

PADDING = 13  # logits of models are often wider than their vocabularies


def grammars_of(tokenizer: Tokenizer) -> Grammars:
    assert tokenizer.eos_token_id is not None
    return Grammars(tokenizer, tokenizer.vocab_size + PADDING, [tokenizer.eos_token_id])


def json_tokenizer(tags: Sequence[str], *, special: bool) -> Tokenizer:
    """Its tokens go across the borders of what a grammar tells apart: `"}}`, `": {"`, `}\\n`."""
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
    """The ids that may come; None: anything."""
    num = tokenizer.vocab_size + PADDING
    mask = np.full((num + 31) // 32, 0x5A5A5A5A, np.int32)
    before = mask.copy()
    if not matcher.fill(mask):
        assert (mask == before).all()
        return None
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return [int(id) for id in np.flatnonzero(bits) if id < num]


def draw(matcher: Matcher, tokenizer: Tokenizer, seed: int, most: int = 2000) -> list[int]:
    """Ids until the matcher has ended or the eos came. After `most`, rather those that end things."""
    rng = random.Random(seed)
    out: list[int] = []
    closing = [id for id in range(tokenizer.vocab_size) if tokenizer.token_bytes(id) in (b'"', b"}", b"]")]
    while not matcher.is_ended:
        may_come = allowed(matcher, tokenizer)
        if may_come is None:
            may_come = list(range(tokenizer.vocab_size))
        assert may_come and max(may_come) < tokenizer.vocab_size, "a token without a text may come"
        if len(out) > most:
            may_come = [id for id in (tokenizer.eos_token_id, *closing) if id in may_come][:1] or may_come
        assert len(out) < 3 * most, tokenizer.decode(out, False)
        id = rng.choice(may_come)
        if id == tokenizer.eos_token_id:
            break
        out.append(id)
        matcher.accept([id])
    return out
