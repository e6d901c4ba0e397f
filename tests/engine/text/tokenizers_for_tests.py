"""Tiny tokenizers of every kind that matters, trained in milliseconds on a few sentences."""

import functools
import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from pagewire.engine.text.tokenizer import Tokenizer

TEXTS = (
    "Hello world, how are you today? I am fine, thank you.",
    "def main():\n    return {'a': 1}\n\n\tprint(x)  # done",
    "Grüße aus Köln! Ça va très bien, naïve café.",
    "你好，世界。今天天气很好。日本語のテキストです。",
    "Emoji: 🙂🙃 👩‍👩‍👧‍👦 🇩🇪 done 🌶️",
    "  leading and   many    spaces  ",
    "a\u0301 combining, \U0001d54f math, \u0e20\u0e32\u0e29\u0e32\u0e44\u0e17\u0e22",
)
SPECIALS = ["<|bos|>", "<|im_start|>", "<|im_end|>"]

CHATML = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)


def train_byte_level() -> tokenizers.Tokenizer:
    """GPT-2's kind: characters of several bytes are split between tokens."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=360,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS, trainer)
    return backend


def train_byte_fallback() -> tokenizers.Tokenizer:
    """Llama 2's kind: sentencepiece BPE with a space before every text and bytes for characters that it lacks."""
    backend = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=480,
        special_tokens=["<unk>", *SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    backend.train_from_iterator([text.replace(" ", "▁") for text in TEXTS[:3]], trainer)
    # The trainer has made the byte tokens special; a real vocabulary has them as ordinary entries.
    described = json.loads(backend.to_str())
    described["added_tokens"] = [token for token in described["added_tokens"] if not token["content"].startswith("<0x")]
    return tokenizers.Tokenizer.from_str(json.dumps(described))


def train_metaspace() -> tokenizers.Tokenizer:
    """T5's kind: unigram pieces, ▁ for spaces, no bytes."""
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=["<unk>", *SPECIALS], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(TEXTS, trainer)
    return backend


def train_word_piece() -> tokenizers.Tokenizer:
    """BERT's kind: the decoded text of a token depends on its neighbours."""
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]", *SPECIALS], show_progress=False)
    backend.train_from_iterator(TEXTS[:3], trainer)
    return backend


KINDS = {
    "byte_level": train_byte_level,
    "byte_fallback": train_byte_fallback,
    "metaspace": train_metaspace,
    "word_piece": train_word_piece,
}


@functools.cache
def trained(kind: str) -> str:
    """tokenizer.json of this kind."""
    return KINDS[kind]().to_str()


def make(kind: str, **settings: object) -> Tokenizer:
    return Tokenizer(tokenizers.Tokenizer.from_str(trained(kind)), {"bos_token": "<|bos|>", **settings})


def write_folder(folder: Path, kind: str = "byte_level", *, adds_bos: bool = False, **settings: object) -> Path:
    """Writes the tokenizer files of a model's folder."""
    backend = tokenizers.Tokenizer.from_str(trained(kind))
    if adds_bos:
        bos = backend.token_to_id("<|bos|>")
        backend.post_processor = processors.TemplateProcessing(
            single=["<|bos|>", "$A"], special_tokens=[("<|bos|>", bos)]
        )
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|im_end|>",
        "chat_template": CHATML,
        **settings,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
