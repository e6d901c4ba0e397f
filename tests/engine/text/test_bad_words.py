"""Sequences that must not appear in an output."""

import random

import pytest

from pagewire.engine.text.bad_words import BadWords
from pagewire.errors import RequestError
from pagewire.ipc.messages import ids_to_bytes


def test_the_last_token_of_a_sequence_is_banned_after_its_other_tokens() -> None:
    words = BadWords([ids_to_bytes([1, 2, 3]), ids_to_bytes([2, 4]), ids_to_bytes([9])], vocab_size=10)
    assert set(words.banned()) == {9}
    words.accept([1, 2])
    assert set(words.banned()) == {3, 4, 9}
    words.accept([5])
    assert set(words.banned()) == {9}


def test_random_outputs_agree_with_a_plain_search() -> None:
    rng = random.Random(0)
    for _ in range(100):
        banned = [[rng.randrange(3) for _ in range(rng.randint(1, 4))] for _ in range(rng.randint(1, 4))]
        words, output = BadWords([ids_to_bytes(word) for word in banned], vocab_size=3), list[int]()
        for _ in range(30):
            expected = {word[-1] for word in banned if len(word) == 1 or output[1 - len(word) :] == word[:-1]}
            assert set(words.banned()) == expected, (banned, output)
            output.append(rng.randrange(3))
            words.accept(output[-1:])


@pytest.mark.parametrize("word", [b"", b"\1\0\0", ids_to_bytes([10]), ids_to_bytes([-1])])
def test_bytes_that_are_not_a_sequence_of_tokens_are_refused(word: bytes) -> None:
    with pytest.raises(RequestError, match="bad_words must hold"):
        BadWords([word], vocab_size=10)
