"""Builds a tokenizer from the vocabulary in a GGUF file's metadata.

Two of llama.cpp's kinds: "gpt2" is byte-level BPE with merges, whose way of splitting a text into words is a name
(`tokenizer.ggml.pre`); "llama" is SentencePiece BPE with scores and bytes for unknown characters. The result encodes
and decodes as the Hugging Face tokenizer does from which llama.cpp's converter wrote the file, as far as the metadata
says it: an added token's `lstrip` and `rstrip` are not in a file, and a SentencePiece vocabulary puts a space before
every piece of text between special tokens, as llama.cpp does.
"""

from dataclasses import dataclass
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from ...errors import ConfigError
from ..checkpoint.gguf import Metadata, read_gguf

_MAX_TOKENS = 2**24
_MAX_SPLITTING = 2**30  # characters copied while tokens are split in two in all ways
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5  # token types; others are plain entries
_NAMED = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}

_GPT4_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class _Split:
    """How a byte-level vocabulary prepares a text."""

    words: tuple[str, ...]  # patterns that each cut what the ones before left whole
    ignores_merges: bool = False  # a word that is an entry is that entry, whatever its merges give
    adds_bos: bool = False  # unless the file says otherwise
    is_composed: bool = False  # NFC


_LLAMA3 = _Split((_GPT4_WORDS % "{1,3}",), ignores_merges=True, adds_bos=True)
_QWEN2 = _Split((_GPT4_WORDS % "",), is_composed=True)
_DIGITS = _Split((r"\p{N}", _GPT2_WORDS))
_SPLITS = {
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "smaug-bpe": _Split((_GPT4_WORDS % "{1,3}",)),
    "dbrx": _Split((_GPT4_WORDS % "{1,3}",)),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "gpt-2": _Split((_GPT2_WORDS,)),
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "tekken": _Split((_TEKKEN_WORDS,), ignores_merges=True, adds_bos=True),
    # llama.cpp's own, for files that were written before there were names.
    "default": _Split((r"[\p{P}$+<=>^~|]+", _GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]")),
}


def gguf_tokenizer(path: Path) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """The tokenizer of a GGUF file, and the named tokens as in tokenizer_config.json. Raises ConfigError,
    CheckpointError for a damaged file, and any Exception for a vocabulary that the library refuses."""
    metadata = read_gguf(path).metadata
    kind = metadata.text("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise ConfigError(
            f"{path} has a tokenizer of the kind {kind}; of GGUF files pagewire reads gpt2 (byte-level BPE) and llama "
            "(SentencePiece BPE)."
        )
    vocabulary = _Vocabulary(metadata)
    backend = _byte_level(metadata, vocabulary) if kind == "gpt2" else _sentence_piece(metadata, vocabulary)
    return backend, vocabulary.named


class _Vocabulary:
    """The entries of a file's vocabulary by what they are for."""

    def __init__(self, metadata: Metadata) -> None:
        path = metadata.path
        tokens = metadata.texts("tokenizer.ggml.tokens")
        if tokens is None or len(tokens) > _MAX_TOKENS:
            raise ConfigError(f"{path} has {len(tokens or ())} tokens; 1 to {_MAX_TOKENS} are possible.")
        types = metadata.numbers("tokenizer.ggml.token_type") or [1] * len(tokens)
        if len(types) != len(tokens):
            raise ConfigError(f"{path} has {len(tokens)} tokens, but the types of {len(types)}.")
        self.tokens = tokens
        self.types = types
        self.ids: dict[str, int] = {}  # without unused entries, which no text gives
        for id, (token, kind) in enumerate(zip(tokens, types, strict=True)):
            if kind != _UNUSED:
                self.ids.setdefault(token, id)
        self.named: dict[str, str] = {}
        for ours, name in _NAMED.items():
            named = metadata.integer(f"tokenizer.ggml.{ours}_token_id")
            if named is not None and 0 <= named < len(tokens):
                self.named[name] = tokens[named]

    def added(self, specials: tuple[int, ...]) -> list[tokenizers.AddedToken]:
        """The tokens that are searched for in a text before it is split. specials: types of special ones."""
        return [
            tokenizers.AddedToken(token, special=kind in specials, normalized=False)
            for token, kind in zip(self.tokens, self.types, strict=True)
            if (kind in specials or kind == _USER_DEFINED) and token
        ]


def _byte_level(metadata: Metadata, vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    name = metadata.text("tokenizer.ggml.pre") or "default"
    split = _SPLITS.get(name)
    if split is None:
        raise ConfigError(
            f"{metadata.path} splits texts into words by the rules {name}, which pagewire does not know; it knows "
            f"{', '.join(_SPLITS)}."
        )
    merges: list[tuple[str, str]] = []
    for merge in metadata.texts("tokenizer.ggml.merges") or []:
        left, _, right = merge.partition(" ")
        merges.append((left, right))  # llama.cpp's converter writes a space within them as another character
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary.ids, merges=merges, ignore_merges=split.ignores_merges))
    if split.is_composed:
        backend.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(tokenizers.Regex(words), "isolated") for words in split.words]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return _finish(backend, metadata, vocabulary, (_CONTROL,), adds_bos=split.adds_bos)


def _sentence_piece(metadata: Metadata, vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    scores = metadata.numbers("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(vocabulary.tokens):
        raise ConfigError(
            f"{metadata.path} has {len(vocabulary.tokens)} tokens, but the scores of {len(scores or ())}."
        )
    unknown = next((t for t, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if kind == _UNKNOWN), None)
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocabulary.ids,
            merges=_merges(vocabulary, scores),
            unk_token=vocabulary.named.get("unk_token", unknown),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    has_prefix = metadata.flag("tokenizer.ggml.add_space_prefix") is not False
    to_marks = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), to_marks] if has_prefix else [to_marks])
    ends = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *ends])
    return _finish(backend, metadata, vocabulary, (_CONTROL, _UNKNOWN), adds_bos=True)


def _finish(
    backend: tokenizers.Tokenizer,
    metadata: Metadata,
    vocabulary: _Vocabulary,
    specials: tuple[int, ...],
    *,
    adds_bos: bool,
) -> tokenizers.Tokenizer:
    """Adds the tokens that are not split, and what stands around a text. specials: the types of special tokens.
    adds_bos: where the file does not say."""
    backend.add_tokens(vocabulary.added(specials))
    says_bos, says_eos = (metadata.flag(f"tokenizer.ggml.add_{name}_token") for name in ("bos", "eos"))
    bos, eos = vocabulary.named.get("bos_token"), vocabulary.named.get("eos_token")
    before = [bos] if bos is not None and (adds_bos if says_bos is None else says_bos) else []
    after = [eos] if eos is not None and says_eos else []
    if before or after:
        backend.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", *after, *(f"{token}:1" for token in before), "$B:1", *(f"{t}:1" for t in after)],
            special_tokens=[(token, vocabulary.ids[token]) for token in dict.fromkeys(before + after)],
        )
    return backend


def _merges(vocabulary: _Vocabulary, scores: list[float]) -> list[tuple[str, str]]:
    """The merges whose order gives what SentencePiece gives by scores: of each token every way to make it of two
    others, the greatest score first, and of equal ones as transformers' `generate_merges` orders them."""
    ids = vocabulary.ids
    if sum(len(token) ** 2 for token in ids) > _MAX_SPLITTING:
        raise ValueError("its tokens are too long for a SentencePiece vocabulary")
    merges: list[tuple[float, int, int, str, str]] = []
    for token, id in ids.items():
        splits = [(token[:i], token[i:]) for i in range(1, len(token))]
        found = sorted((ids[left], ids[right], left, right) for left, right in splits if left in ids and right in ids)
        merges += [(scores[id], len(left), len(right), left, right) for _, _, left, right in found]
    merges.sort(key=lambda merge: merge[:3], reverse=True)
    return [(left, right) for *_, left, right in merges]
