"""Tokenizers of GGUF files encode and decode as those do from which the files were made."""

import json
from pathlib import Path
from typing import Any

import gguf
import gguf_files
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers.tokenization_utils_base import generate_merges

from pagewire.engine.text.chat_template import load_chat_template
from pagewire.engine.text.template_files import read_templates
from pagewire.engine.text.tokenizer import Tokenizer, load_tokenizer
from pagewire.errors import CheckpointError, ConfigError

from .tokenizers_for_tests import CHATML, SPECIALS, TEXTS

HOSTILE = [
    *TEXTS,
    "",
    " ",
    "   \n\n  \t x\r\n\r\n",
    "I'll they'RE we've don't 'S",
    "1 12 123 1234 12345 ١٢٣ ½ ²³",
    "<|im_start|>user\nhi<|im_end|>\n<|bos|>",
    "<|im_start|<|im_end|>|>",
    "<think>plain added</think>",
    "e\u0301 \u212b Å ﬁ",
    "\0\x01\x7f\x80\ufffd\U0010ffff",
    "▁▁a ▁ b",
    "<0x41><0xFF>",
    "a" * 300 + " " * 300 + "!?" * 150,
    "naïve—“quoted”…  –$+=^~|<>`",
    "ÅÄÖ ǅ ʰ ͅ ก็ ൠ",
]

# As in the models' own tokenizer.json.
_LLAMA3 = (
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*"
    "|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
)
_QWEN2 = _LLAMA3.replace("{1,3}", "")


def byte_level(pre: str) -> tokenizers.Tokenizer:
    """A tokenizer of this family, trained on a few sentences."""
    backend = tokenizers.Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    # Trained on whole texts, so that there are tokens across words, which only the way of splitting excludes.
    backend.pre_tokenizer = level
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=level.alphabet(), show_progress=False)
    backend.train_from_iterator([*TEXTS, *HOSTILE[8:12], "1234 hello I'll hello", " they're!?\n\nthey're"] * 3, trainer)
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
        backend.pre_tokenizer = pre_tokenizers.Sequence([_cut(_QWEN2), level])
    elif pre == "llama-bpe":
        backend.pre_tokenizer = pre_tokenizers.Sequence([_cut(_LLAMA3), level])
    elif pre == "smollm":
        with_words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), with_words])
    else:
        assert pre == "gpt-2"
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    backend.add_tokens([tokenizers.AddedToken("<think>", special=False, normalized=False)])
    return backend


def _cut(words: str) -> pre_tokenizers.Split:
    return pre_tokenizers.Split(tokenizers.Regex(words), "isolated")


def with_bos(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    bos = "<|bos|>"
    ids = [(bos, backend.token_to_id(bos))]
    backend.post_processor = processors.TemplateProcessing([bos, "$A"], [bos, "$A", f"{bos}:1", "$B:1"], ids)
    return backend


def sentence_piece() -> tuple[tokenizers.Tokenizer, dict[str, float]]:
    """Llama 2's kind, with merges made from scores as transformers makes them, and the scores."""
    trained = tokenizers.Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=200, show_progress=False)
    trained.train_from_iterator([f"▁{text.replace(' ', '▁')}" for text in TEXTS[:3]], trainer)
    learned = json.loads(trained.to_str())["model"]["merges"]
    specials = ["<unk>", *SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces = ["".join(merge) for merge in learned]
    letters = [text for text in trained.get_vocab() if len(text) == 1]
    vocab = {text: id for id, text in enumerate(dict.fromkeys([*specials, *pieces, *letters]))}
    scores = {text: float(-id) if text not in specials else 0.0 for text, id in vocab.items()}
    merges = generate_merges(vocab, scores)
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(
        [tokenizers.AddedToken(text, special=True, normalized=False) for text in ("<unk>", *SPECIALS)]
    )
    return with_bos(backend), scores


def write(
    path: Path,
    backend: tokenizers.Tokenizer,
    pre: str,
    scores: dict[str, float] | None = None,
    more: dict[str, Any] | None = None,
) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    gguf_files.add_vocabulary(writer, json.loads(backend.to_str()), pre=pre, scores=scores)
    ids = backend.get_vocab()
    writer.add_bos_token_id(ids["<|bos|>"])
    writer.add_eos_token_id(ids["<|im_end|>"])
    if scores is not None:
        writer.add_unk_token_id(ids["<unk>"])
    for key, value in (more or {}).items():
        writer.kv_data[0].pop(key, None)
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


NAMED = {"bos_token": "<|bos|>", "eos_token": "<|im_end|>"}


@pytest.fixture(scope="module", params=["gpt-2", "llama-bpe", "qwen2", "smollm", "spm"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Tokenizer]:
    """A file's tokenizer, and the one that the file was made from."""
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    if request.param == "spm":
        backend, scores = sentence_piece()
        write(path, backend, "default", scores)
        named = NAMED | {"unk_token": "<unk>"}
    else:
        backend, named = byte_level(request.param), NAMED
        write(path, backend, request.param)
        if request.param == "llama-bpe":
            with_bos(backend)  # as Llama 3's; the name implies it
    return load_tokenizer(path), Tokenizer(backend, named)


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_hostile_texts(number: int, pair: tuple[Tokenizer, Tokenizer]) -> None:
    same(*pair, HOSTILE[number])


@settings(max_examples=150, deadline=None)
@given(
    text=st.lists(st.text(max_size=6) | st.sampled_from([*SPECIALS, "<think>", "'ll", " ", "\n", "12"])).map("".join)
)
def test_any_text(text: str, pair: tuple[Tokenizer, Tokenizer]) -> None:
    same(*pair, text)


def same(ours: Tokenizer, theirs: Tokenizer, text: str) -> None:
    for adds in (True, False):
        ids = ours.encode(text, adds)
        assert ids == theirs.encode(text, adds)
    assert ours.encode_pair(text, "b")[0] == theirs.encode_pair(text, "b")[0]
    assert ours.encode_rendered(ours.neutralize(text)) == theirs.encode_rendered(theirs.neutralize(text))
    for skips in (True, False):
        assert ours.decode(ids, skips) == theirs.decode(ids, skips)
    assert [ours.token_bytes(id) for id in ids] == [theirs.token_bytes(id) for id in ids]


def test_what_else_is_known(pair: tuple[Tokenizer, Tokenizer]) -> None:
    ours, theirs = pair
    for name in ("special_tokens", "special_ids", "vocab_size", "bos_token_id", "eos_token_id", "is_byte_exact",
                 "leading_space"):  # fmt: skip
        assert getattr(ours, name) == getattr(theirs, name), name


def test_what_a_file_says_of_bos_and_eos(tmp_path: Path) -> None:
    backend = byte_level("gpt-2")
    bos, eos = (backend.token_to_id(text) for text in ("<|bos|>", "<|im_end|>"))
    plain = backend.encode("hello").ids
    for adds_bos, adds_eos, expected in (
        (None, None, plain),
        (True, None, [bos, *plain]),
        (False, True, [*plain, eos]),
        (True, True, [bos, *plain, eos]),
    ):
        says = {"add_bos_token": adds_bos, "add_eos_token": adds_eos}
        more = {f"tokenizer.ggml.{name}": value for name, value in says.items() if value is not None}
        assert load_tokenizer(write(tmp_path / "m.gguf", backend, "gpt-2", more=more)).encode("hello") == expected


def test_without_a_space_before_every_text(tmp_path: Path) -> None:
    backend, scores = sentence_piece()
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    path = write(tmp_path / "m.gguf", backend, "default", scores, {"tokenizer.ggml.add_space_prefix": False})
    ours, theirs = load_tokenizer(path), Tokenizer(backend, NAMED)
    for text in HOSTILE:
        same(ours, theirs, text)


def test_entries_without_a_use_are_no_tokens(tmp_path: Path) -> None:
    """Converters fill a vocabulary up to the embedding's rows."""
    backend = byte_level("qwen2")
    described = json.loads(backend.to_str())
    for token in described["added_tokens"]:
        token["id"] += 5
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    gguf_files.add_vocabulary(writer, described, pre="qwen2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tokenizer = load_tokenizer(tmp_path / "m.gguf")
    first = min(token["id"] for token in described["added_tokens"])
    assert tokenizer.encode("<|bos|>") == [first] and tokenizer.token_bytes(first - 1) == b""
    assert len(tokenizer.encode(f"[PAD{first - 1}]")) > 1


def test_chat_templates(tmp_path: Path) -> None:
    more = {"tokenizer.chat_template": CHATML, "tokenizer.chat_template.tool_use": "tools"}
    path = write(tmp_path / "m.gguf", byte_level("qwen2"), "qwen2", more=more)
    assert read_templates(path) == {"default": CHATML, "tool_use": "tools"}
    tokenizer = load_tokenizer(path)
    template = load_chat_template(path, tokenizer)
    ids = template.encode(tokenizer, messages=b'[{"role":"user","content":"Hi"}]')
    assert tokenizer.decode(ids, False) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert read_templates(write(tmp_path / "m.gguf", byte_level("qwen2"), "qwen2")) == {}


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        ({"tokenizer.ggml.model": "t5"}, "a tokenizer of the kind t5; of GGUF files pagewire reads gpt2"),
        ({"tokenizer.ggml.pre": "bloom"}, "splits texts into words by the rules bloom, which pagewire does not know"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "tokenizer.ggml.tokens = a list of 2, which should be a list of texts"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "tokens, but the types of 2"),
        ({"tokenizer.ggml.merges": ["nonsense"]}, "has a damaged tokenizer"),
        ({"tokenizer.ggml.merges": ["no such"]}, "has a damaged tokenizer"),
        ({"tokenizer.ggml.model": "llama"}, "tokens, but the scores of 0"),
        ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["a" * 40000], "tokenizer.ggml.token_type": [1],
          "tokenizer.ggml.scores": [0.5]}, "its tokens are too long for a SentencePiece vocabulary"),
        ({"tokenizer.ggml.bos_token_id": "x"}, "bos_token_id = 'x', which should be a whole number"),
    ],
)  # fmt: skip
def test_damaged_vocabularies(more: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", byte_level("gpt-2"), "gpt-2", more=more)
    with pytest.raises(ConfigError) as raised:
        load_tokenizer(path)
    assert str(path) in str(raised.value) and complaint in str(raised.value)


def test_a_damaged_file(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match="is not a GGUF file"):
        load_tokenizer(tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match="is not a GGUF file"):
        read_templates(tmp_path / "m.gguf")
