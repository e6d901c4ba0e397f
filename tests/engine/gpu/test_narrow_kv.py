"""An fp8 KV cache in the GPU runner."""

import random

import checkpoints
import numpy as np
import pytest
import torch
from runner_driver import Request, arrays

from pagewire.ipc.messages import Sampling

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="the type is one of sm_89"
)
PROMPT = [random.Random(3).randrange(3, checkpoints.VOCAB_SIZE) for _ in range(21)]


def test_an_fp8_kv_cache_takes_a_quarter_of_the_memory_and_errs_little(checkpoint, driver):
    folder = checkpoint("llama", num_hidden_layers=1, initializer_range=0.1)

    def logprobs_and_block_bytes(**flags):
        served = driver(folder, max_num_batched_tokens=32, max_num_seqs=4, **flags)
        request = Request(PROMPT, max_new=2, sampling=Sampling(temperature=0, prompt_logprobs=0))
        served.run([request], chunk=16, budget=32, rows=4)
        return arrays(request.prompt_logprobs)[1][:, 0], served.runner.block_bytes

    exact, exact_bytes = logprobs_and_block_bytes(dtype="float32")
    narrow, narrow_bytes = logprobs_and_block_bytes(dtype="bfloat16", kv_cache_dtype="fp8")
    assert narrow_bytes * 4 == exact_bytes
    error = np.abs(narrow - exact).mean()
    assert 0 < error < 0.1, error
