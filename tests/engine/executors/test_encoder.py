"""How the encoder divides texts into batches."""

import random

import pytest

from pagewire.engine.executors.encoder import batches


@pytest.mark.parametrize("seed", range(50))
def test_every_text_is_in_one_batch_with_little_padding(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.randint(1, rng.choice([8, 300])) for _ in range(rng.randint(0, 60))]
    groups = batches(lengths, pads=True)
    assert sorted(i for batch in groups for i in batch) == list(range(len(lengths)))
    for batch in groups:
        padded = len(batch) * lengths[batch[0]]
        assert padded - sum(lengths[i] for i in batch) <= max(0.1 * padded, 64)


def test_short_texts_share_a_batch_and_a_long_one_has_its_own() -> None:
    assert batches([5, 300, 9, 7], pads=True) == [[1], [2, 3, 0]]


def test_without_padding_a_batch_has_one_length() -> None:
    assert batches([4, 7, 4, 5], pads=False) == [[1], [3], [0, 2]]
