"""Rows whose numbers are not finite fail alone, with every way of serving them."""

import not_finite
import pytest
from engine_loop import Loop


@pytest.mark.parametrize(
    "flags",
    [
        {"dtype": "float32"},
        {"dtype": "bfloat16"},
        {"dtype": "float32", "speculative": "ngram,tokens=3"},
        {"dtype": "float32", "max_num_batched_tokens": 7},
        {"dtype": "float32", "quantization": "int8"},
    ],
)
def test_rows_that_are_not_finite_fail_alone(flags, checkpoint, tmp_path):
    loop = Loop(not_finite.poisoned(checkpoint("qwen3", tie_word_embeddings=False), tmp_path / "model"), **flags)
    not_finite.check(loop, 30 if "speculative" in flags else 8)
    assert (loop.scheduler.counters.num_accepted_tokens > 0) == ("speculative" in flags)
