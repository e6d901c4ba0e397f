"""Cutting a text where special tokens stand, and keeping the ids of its pieces, changes no id."""

import random
import string
from collections.abc import Callable, Sequence

import pytest
import tokenizers
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, processors

from pagewire.engine.text import piece_cache
from pagewire.engine.text.piece_cache import SHORTEST, Cuts, PieceCache
from pagewire.engine.text.tokenizer import Tokenizer, any_of

from .tokenizers_for_tests import KINDS, SPECIALS, TEXTS, make, trained

_MORE = (  # as vocabularies have them, and worse: they overlap, and take spaces and words around them along
    AddedToken("<tool_call>", special=False, normalized=False),
    AddedToken("<|im_start|>s", special=False, normalized=False),
    AddedToken("a<|im_end|>", special=False, normalized=False),
    AddedToken("</s>", special=True, normalized=False),
    AddedToken("<mask>", special=True, normalized=False, lstrip=True),
    AddedToken("<left>", special=False, normalized=False, rstrip=True),
    AddedToken("Human", special=False, normalized=False, single_word=True),
    AddedToken("word", special=False, normalized=False),
    AddedToken("_x_", special=True, normalized=False),
    AddedToken("<|NORM|>", special=False, normalized=True),
    AddedToken("\n\n", special=False, normalized=False),
)
_NORMALIZERS: tuple[Callable[[], normalizers.Normalizer] | None, ...] = (
    None,
    normalizers.NFKC,
    normalizers.Lowercase,
    normalizers.Strip,
    normalizers.BertNormalizer,
    lambda: normalizers.Prepend("▁"),
    lambda: normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()]),
)
_PRE_TOKENIZERS: tuple[Callable[[], pre_tokenizers.PreTokenizer] | None, ...] = (
    None,
    lambda: pre_tokenizers.ByteLevel(add_prefix_space=True),
    lambda: pre_tokenizers.Metaspace(prepend_scheme="first"),
    lambda: pre_tokenizers.Metaspace(prepend_scheme="always"),
    lambda: pre_tokenizers.Metaspace(prepend_scheme="never", split=False),
    lambda: pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace("▁", "first")]),
    pre_tokenizers.BertPreTokenizer,
    lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.Punctuation()]),
)


def random_tokenizer(rng: random.Random) -> Tokenizer:
    """A trained vocabulary with any normalizer, pre-tokenizer, post-processor and added tokens."""
    backend = tokenizers.Tokenizer.from_str(trained(rng.choice(list(KINDS))))
    if rng.random() < 0.7:
        make_normalizer, make_pre_tokenizer = rng.choice(_NORMALIZERS), rng.choice(_PRE_TOKENIZERS)
        backend.normalizer = make_normalizer and make_normalizer()
        backend.pre_tokenizer = make_pre_tokenizer and make_pre_tokenizer()
    backend.add_tokens(rng.sample(_MORE, rng.randrange(len(_MORE) + 1)))
    bos, eos = ((text, backend.token_to_id(text)) for text in (SPECIALS[0], SPECIALS[2]))
    single = rng.choice([["$A"], [bos[0], "$A"], [bos[0], "$A", eos[0]], [bos[0], "$A", eos[0], "$A"]])
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=[bos, eos])
    return Tokenizer(backend, {"bos_token": "<|bos|>"})


def random_text(rng: random.Random, tokenizer: Tokenizer) -> str:
    """Characters of all planes, spaces, added tokens with and without their neighbours, and texts from clients."""
    added = [token.content for token in tokenizer.added_tokens]
    client = tokenizer.neutralize("".join(rng.choices([*SPECIALS, *TEXTS], k=2)))
    parts: tuple[Callable[[], str], ...] = (
        lambda: chr(rng.choice([rng.randrange(0x20, 0x250), rng.randrange(0xE000), rng.randrange(0x10000, 0x110000)])),
        lambda: rng.choice(" \n\t\u3000\u0301\u200d▁") * rng.randrange(1, 4),
        lambda: rng.choice(["a", "s", "1", "_", "Human", "word", "<|", "<|im_"]),
        lambda: rng.choice(TEXTS),
        lambda: rng.choice(added),
        lambda: rng.choice(SPECIALS),
        lambda: client,
    )
    text = "".join(rng.choice(parts)() for _ in range(rng.randrange(30)))
    return text.encode("utf-8", "ignore").decode()


def check_random_texts(num_tokenizers: int, num_texts: int = 30) -> int:
    """Asserts that a cache gives the ids that its tokenizer gives, at first and again. Returns the number of cuts."""
    num_cuts = 0
    for seed in range(num_tokenizers):
        rng = random.Random(seed)
        tokenizer = random_tokenizer(rng)
        cache = PieceCache(tokenizer, max_bytes=rng.choice([500, 5000, 1 << 20]))
        texts = [random_text(rng, tokenizer) for _ in range(num_texts)]
        texts += ["".join(rng.choices(texts, k=2)) for _ in texts]  # their pieces are known, but not these texts
        for text in texts:
            is_special = rng.random() < 0.5
            expected = tokenizer.encode(text, is_special)
            assert list(cache.encode(text, is_special, owner=b"")) == expected, (seed, text)
            num_cuts += len(cache._cuts.pieces(text)) - 1
    return num_cuts


def test_cutting_changes_no_ids_of_random_texts() -> None:
    assert check_random_texts(30) > 1500


@pytest.mark.parametrize("mutant", ["any token opens a piece", "words open pieces", "tokens do not overlap"])
def test_every_rule_for_cuts_is_needed(monkeypatch: pytest.MonkeyPatch, mutant: str) -> None:
    monkeypatch.setattr(piece_cache, "_proved", lambda tokenizer, openers: openers)
    match mutant:
        case "any token opens a piece":
            monkeypatch.setattr(piece_cache, "_opens_a_piece", lambda token: bool(token.content.strip()))
        case "words open pieces":
            monkeypatch.setattr(piece_cache, "_OPENERS", frozenset(string.printable) - {"\n"})
        case "tokens do not overlap":
            monkeypatch.setattr(Cuts, "__init__", _only_look_for_openers)
    with pytest.raises(AssertionError):
        check_random_texts(120)


def _only_look_for_openers(self: Cuts, tokenizer: Tokenizer) -> None:
    openers = [token.content for token in tokenizer.added_tokens if piece_cache._opens_a_piece(token)]
    self._openers = frozenset(text for text in openers if text in SPECIALS)
    self._first_pass = any_of(self._openers)


@pytest.mark.parametrize("kind", KINDS)
def test_turns_are_pieces(kind: str) -> None:
    cuts = Cuts(make(kind))
    text = "".join(f"<|im_start|>user\n{text * 3}<|im_end|>\n" for text in TEXTS)
    pieces = cuts.pieces(text)
    assert len(pieces) > len(TEXTS) and "".join(pieces) == text
    assert all(len(piece) >= SHORTEST for piece in pieces[:-1])
    assert all(piece.startswith(("<|im_start|>", "<|im_end|>")) for piece in pieces)


def test_a_conversation_finds_its_earlier_turns() -> None:
    tokenizer = make("byte_level")
    cache = PieceCache(tokenizer)
    text, num_turns = "", 20
    for i in range(num_turns):
        text += f"<|im_start|>user\n{i} {TEXTS[i % len(TEXTS)] * 5}<|im_end|>\n"
        before = cache.num_cached_chars
        prompt = text + "<|im_start|>assistant\n"
        assert list(cache.encode(prompt, False, owner=b"a")) == tokenizer.encode(prompt, False)
        assert cache.num_cached_chars - before >= (len(text) * 0.6 if i > 1 else 0), i
    assert cache.num_cached_chars > 0.8 * cache.num_chars
    cached = cache.num_cached_chars
    cache.encode(text, False, owner=b"b")
    assert cache.num_cached_chars == cached, "an owner was shown what another one has asked"
    cache.forget()
    cache.encode(text, False, owner=b"a")
    assert cache.num_cached_chars == cached and cache.num_bytes


def test_the_cache_is_bounded_and_forgets_what_was_not_used_for_longest() -> None:
    tokenizer, most = make("byte_level"), 60_000
    cache = PieceCache(tokenizer, max_bytes=most)
    system = "<|im_start|>system\n" + "x" * 200
    rng = random.Random(1)
    for i in range(200):
        text = f"<|im_start|>user\n{i} " + "".join(rng.choices(string.ascii_letters + "é🙂", k=rng.randrange(4000)))
        before = cache.num_cached_chars
        cache.encode(system + text, False)
        assert cache.num_cached_chars - before == (len(system) if i else 0), "what is used all the time stays"
        assert cache.num_bytes == sum(piece_cache._num_bytes(key[1], ids) for key, ids in cache._ids.items()) <= most
    cache.encode("y" * 50_000, False)
    assert len(cache._ids) > 1, "a piece that does not fit pushes nothing out"


def test_short_pieces_are_not_kept() -> None:
    cache = PieceCache(make("byte_level"))
    for _ in range(2):
        cache.encode("<|im_start|>" * 4 + "a", False)
    assert cache.num_cached_chars == cache.num_bytes == 0
    assert len("<|im_start|>" * 4 + "a") < SHORTEST


def test_a_tokenizer_that_draws_lots_is_not_cut() -> None:
    backend = tokenizers.Tokenizer.from_str(trained("byte_level"))
    backend.model = models.BPE(backend.get_vocab(), [], dropout=0.5)
    assert not Cuts(Tokenizer(backend, {}))


def test_a_cut_that_changes_ids_is_found_at_start() -> None:
    """The library has no such rule today; a newer one might."""

    class Joining(Tokenizer):
        def encode_pieces(self, texts: Sequence[str]) -> list[list[int]]:
            ids = super().encode_pieces(texts)
            return [one[:1] if "a" in text else one for text, one in zip(texts, ids, strict=True)]

    assert Cuts(make("byte_level")) and not Cuts(Joining(tokenizers.Tokenizer.from_str(trained("byte_level")), {}))
