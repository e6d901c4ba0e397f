"""The whole worker through the Triton kernels, against transformers: the same tokens, whatever chunks and company."""

import random

import checkpoints
import pytest
from runner_driver import Request

LENGTHS = (1, 15, 16, 17, 45)
SMALL = {"max_num_batched_tokens": 32, "max_num_seqs": 4}  # each is a program to interpret


def _prompts(seed):
    rng = random.Random(seed)
    return [[rng.randrange(3, checkpoints.VOCAB_SIZE) for _ in range(n)] for n in LENGTHS]


@pytest.mark.parametrize("kind", ["qwen2-sliding", "qwen3", "qwen3_moe-sparse"])
def test_greedy_tokens_are_those_of_transformers(kind, checkpoint, driver):
    """Prompts in pieces beside rows that decode, rows that are taken by one request after another."""
    folder = checkpoint(kind, num_hidden_layers=2)
    prompts = _prompts(kind)
    expected = checkpoints.reference_greedy(folder, prompts, 4)
    assert len({tuple(output) for output in expected}) == len(expected), "the outputs should differ by prompt"
    served = driver(folder, **SMALL)
    requests = [Request(prompt, max_new=4) for prompt in prompts]
    served.run(requests, chunk=20, budget=32, rows=3)
    assert [request.output for request in requests] == expected
