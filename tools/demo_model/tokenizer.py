"""The tokenizer of the demo model: byte-level BPE with single digits.

Trained on the synthetic chats themselves. A space sticks to the word after it;
digits are single tokens, so that sums are done digit by digit.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from .conversations import training_chat
from .template import CHAT_TEMPLATE, END_OF_TEXT, TURN_END, TURN_START, render

SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
PATTERN = r"\p{N}|'s|'t| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s"


def train_tokenizer(rng: random.Random, entries: int, chats: int = 6000) -> Tokenizer:
    """A BPE tokenizer with that many entries, trained on newly sampled chats."""

    def texts() -> Iterator[str]:
        for _ in range(chats):
            chat = training_chat(rng)
            text = render(chat.messages, chat.tools)
            yield text.replace(TURN_START, "").replace(TURN_END, "")

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=entries,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    return tokenizer


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that must exist."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise ValueError(f"the tokenizer has no {token}")
    return int(found)


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """`tokenizer.json` and `tokenizer_config.json`, the latter with the chat template."""
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [TURN_START, TURN_END],
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
