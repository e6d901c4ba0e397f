"""Pieces of text join to the full decode, in whole characters only."""

import random

import pytest

from pagewire.engine.text.detokenize import IncrementalDetokenizer
from pagewire.engine.text.tokenizer import Tokenizer

from .tokenizers_for_tests import KINDS, TEXTS, make


def pieces(tokenizer: Tokenizer, ids: list[int], rng: random.Random, skip: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, (), skip)
    shown = []
    at = 0
    while at < len(ids):
        size = rng.randint(1, 3)
        shown.append(detokenizer.push(ids[at : at + size]))
        at += size
    return [*shown, detokenizer.flush()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip", [True, False])
def test_pieces_of_real_text_join_to_the_decode(kind: str, skip: bool) -> None:
    tokenizer = make(kind)
    rng = random.Random(2)
    for text in (*TEXTS, "<|im_start|>user\nhi 🙂<|im_end|>"):
        ids = tokenizer.encode(text)
        shown = pieces(tokenizer, ids, rng, skip)
        assert "".join(shown) == tokenizer.decode(ids, skip)
        if kind in ("byte_level", "byte_fallback"):
            assert not any("\ufffd" in piece for piece in shown)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "metaspace"])
def test_pieces_of_random_ids_join_to_the_decode(kind: str) -> None:
    tokenizer = make(kind)
    for seed in range(300):
        rng = random.Random(seed)
        ids = rng.choices(range(tokenizer.vocab_size + 4), k=rng.randrange(16))
        skip = rng.random() < 0.5
        assert "".join(pieces(tokenizer, ids, rng, skip)) == tokenizer.decode(ids, skip), f"seed {seed}: {ids}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("marks", [(), ("<|im_end|>",)])
def test_the_fast_path_for_one_token_gives_the_same_text(kind: str, marks: tuple[str, ...]) -> None:
    tokenizer = make(kind)
    num_fast = 0
    for seed in range(100):
        rng = random.Random(seed)
        words = [*TEXTS, "<|im_start|>", "<|im_end|>", "<|unknown|>"]
        ids = [id for text in rng.choices(words, k=4) for id in tokenizer.encode(text, add_special_tokens=False)]
        ids += rng.choices(range(tokenizer.vocab_size + 4), k=8)
        slow, fast = (IncrementalDetokenizer(tokenizer, (), True, marks) for _ in range(2))
        for id in ids:
            text = fast.push_one(id)
            num_fast += text is not None
            assert (fast.push([id]) if text is None else text) == slow.push([id]), f"seed {seed}: {ids}"
        assert fast.flush() == slow.flush()
    assert (num_fast > 1000) == tokenizer.is_byte_exact, num_fast


def split_character(tokenizer: Tokenizer) -> list[int]:
    ids = tokenizer.encode("🦊", add_special_tokens=False)
    assert len(ids) > 1
    return ids


def test_a_trailing_half_character_is_shown_once_at_the_end() -> None:
    tokenizer = make("byte_level")
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert detokenizer.push([*tokenizer.encode("ok"), *split_character(tokenizer)[:-1]]) == "ok"
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_a_prompt_that_ends_inside_a_character_does_not_leak_into_the_output(kind: str) -> None:
    tokenizer = make(kind)
    fox = split_character(tokenizer)
    prompt = [*tokenizer.encode("Hello world "), *fox[:-1]]
    detokenizer = IncrementalDetokenizer(tokenizer, prompt)
    text = detokenizer.push(fox[-1:]) + detokenizer.push(tokenizer.encode("x")) + detokenizer.flush()
    assert text.replace("\ufffd", "").strip() == "x"


@pytest.mark.parametrize("kind", ["byte_fallback", "metaspace"])
def test_the_leading_space_is_dropped_only_at_the_start_of_a_text(kind: str) -> None:
    tokenizer = make(kind)
    ids = tokenizer.encode("you")
    assert IncrementalDetokenizer(tokenizer).push(ids) == "you"
    assert IncrementalDetokenizer(tokenizer, tokenizer.encode("how are")).push(ids) == " you"
    bos = tokenizer.bos_token_id
    assert bos is not None
    assert IncrementalDetokenizer(tokenizer, [bos]).push(ids) == "you"


def test_the_first_word_after_a_prompt_keeps_its_space() -> None:
    tokenizer = make("word_piece")
    detokenizer = IncrementalDetokenizer(tokenizer, tokenizer.encode("how are"))
    assert detokenizer.push(tokenizer.encode("you")) + detokenizer.flush() == " you"


def test_no_ids_give_no_text() -> None:
    for kind in KINDS:
        detokenizer = IncrementalDetokenizer(make(kind))
        assert detokenizer.push([]) == "" and detokenizer.flush() == ""


@pytest.mark.parametrize("kind", KINDS)
def test_marks_are_special_tokens_that_are_shown(kind: str) -> None:
    tokenizer = make(kind)
    ids = tokenizer.encode("<|im_start|>how<|im_end|>are", add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(tokenizer, (), True, ("<|im_end|>",))
    text = "".join([*(detokenizer.push([id]) for id in ids), detokenizer.flush()])
    assert "<|im_end|>" in text and "<|im_start|>" not in text and text.replace(" ", "") == "how<|im_end|>are"
