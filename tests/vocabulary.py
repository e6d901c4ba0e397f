"""A byte-level tokenizer without merges for the tiny checkpoints: id = byte + 3, after three special tokens."""

import json
from pathlib import Path

SPECIAL = ["<pad>", "<s>", "</s>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<s>{{ message.role }}\n{{ message.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def add_tokenizer(folder: Path, *, vocab_size: int = 320) -> Path:
    """Writes tokenizer.json and tokenizer_config.json into a checkpoint's folder."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: 3 + i for i, letter in enumerate(letters)}
    vocab |= {f"<unused{i}>": i for i in range(3 + len(letters), vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab={**{s: i for i, s in enumerate(SPECIAL)}, **vocab}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(s, special=True) for s in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
