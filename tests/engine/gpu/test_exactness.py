"""The GPU runner against transformers: the same tokens, in any chunks and beside any other rows."""

import random

import checkpoints
import numpy as np
import pytest
import torch
from family_kinds import LONGROPE, make_kind
from runner_driver import Request

from pagewire.ipc.messages import Pooling, RowOpen, Sampling, StepPlan, ids_to_bytes

LENGTHS = (1, 15, 16, 17, 45)
SMALL = {"max_num_batched_tokens": 32, "max_num_seqs": 4}  # since the interpreter is slow


def _prompts(seed):
    rng = random.Random(seed)
    return [[rng.randrange(3, checkpoints.VOCAB_SIZE) for _ in range(n)] for n in LENGTHS]


@pytest.mark.parametrize("kind", ["qwen2-sliding", "qwen3", "qwen3_moe-sparse"])
def test_greedy_tokens_are_those_of_transformers(kind, checkpoint, driver):
    """With prompts in chunks beside decode rows, and rows that several requests use one after another."""
    folder = checkpoint(kind, num_hidden_layers=2)
    prompts = _prompts(kind)
    expected = checkpoints.reference_greedy(folder, prompts, 4)
    assert len({tuple(output) for output in expected}) == len(expected), "the outputs should differ by prompt"
    served = driver(folder, **SMALL)
    requests = [Request(prompt, max_new=4) for prompt in prompts]
    served.run(requests, chunk=20, budget=32, rows=3)
    assert [request.output for request in requests] == expected


def test_blocks_may_have_the_64_positions_of_a_gpus(checkpoint, driver):
    folder = checkpoint("qwen3", num_hidden_layers=1)
    prompts = _prompts("blocks")[2:]
    served = driver(folder, block_size=64, max_model_len=64, **SMALL)
    requests = [Request(prompt, max_new=4) for prompt in prompts]
    served.run(requests, chunk=20, budget=32, rows=3)
    assert [request.output for request in requests] == checkpoints.reference_greedy(folder, prompts, 4)


def test_pooled_vectors_are_those_of_transformers(checkpoint, driver):
    """A prompt in two chunks with mean pooling beside a prompt with last-token pooling."""
    folder = checkpoint("qwen3", num_hidden_layers=2)
    runner = driver(folder, **SMALL).runner
    long, short = _prompts(7)[-1], _prompts(7)[2]
    opened = [
        RowOpen(i, ids_to_bytes(ids), len(ids), 0, ids_to_bytes(blocks), Sampling(), pooling=pooling)
        for i, (ids, blocks, pooling) in enumerate(
            [(long, [5, 2, 7], Pooling("mean")), (short, [4], Pooling("last", is_normalized=True, dimensions=8))]
        )
    ]
    plans = [
        StepPlan(1, tuple(opened), b"", b"", ids_to_bytes([0, 1]), ids_to_bytes([14, len(short)]), b"\0\0"),
        StepPlan(2, (), b"", b"", ids_to_bytes([0]), ids_to_bytes([len(long) - 14]), b"\0"),
    ]
    for plan in plans:
        runner.launch(plan)
    vectors = [runner.collect().vectors for _ in plans]
    assert [[*found] for found in vectors] == [[1], [0]]
    body = checkpoints.load_reference(folder).model
    with torch.inference_mode():
        states = [body(input_ids=torch.tensor([ids])).last_hidden_state[0] for ids in (long, short)]
    wanted = states[0].mean(0).numpy(), torch.nn.functional.normalize(states[1][-1, :8], dim=0).numpy()
    np.testing.assert_allclose(np.frombuffer(vectors[1][0], "<f4"), wanted[0], atol=1e-4)
    np.testing.assert_allclose(np.frombuffer(vectors[0][1], "<f4"), wanted[1], atol=1e-4)


def test_both_regimes_of_longrope_share_a_step(tmp_path, driver):
    """Prompts up to and beyond the original length, whose keys have other frequencies at all positions."""
    lengths = {"max_position_embeddings": 64, "original_max_position_embeddings": 16}
    changes = {**LONGROPE, **lengths, "num_hidden_layers": 1, "sliding_window": None}
    folder = make_kind(tmp_path / "model", "Phi3Config", changes)
    rng = random.Random(4)
    prompts = [[rng.randrange(3, checkpoints.VOCAB_SIZE) for _ in range(n)] for n in (12, 17, 33)]
    expected = checkpoints.reference_greedy(folder, prompts, 4)
    served = driver(folder, **SMALL)
    assert served.runner.notes[0].startswith("Triton kernels")
    requests = [Request(prompt, max_new=4) for prompt in prompts]
    served.run(requests, chunk=20, budget=32, rows=3)
    assert [request.output for request in requests] == expected
