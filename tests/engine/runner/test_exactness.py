"""The runner against transformers: the same tokens, for any chunks and any batch."""

import random

import checkpoints
import numpy as np
import pytest
import torch

from pagewire.engine.checkpoint.spec import is_native, read_spec

LENGTHS = (1, 2, 15, 16, 17, 40, 63, 130, 257, 600)


def _prompts(seed):
    rng = random.Random(seed)
    return [[rng.randrange(3, checkpoints.VOCAB_SIZE) for _ in range(n)] for n in LENGTHS]


@pytest.mark.parametrize("kind", list(checkpoints.KINDS))
def test_greedy_tokens_are_those_of_transformers(kind, checkpoint, driver, make_request):
    folder = checkpoint(kind)
    prompts = _prompts(kind)
    expected = checkpoints.reference_greedy(folder, prompts, 10)
    assert len({tuple(output) for output in expected}) == len(expected), "the outputs should differ by prompt"
    served = driver(folder)
    for chunk, budget, rows in ((16, 50, 3), (64, 300, 8), (2048, 2048, 8)):
        requests = [make_request(prompt, max_new=10) for prompt in prompts]
        served.run(requests, chunk=chunk, budget=budget, rows=rows, seed=chunk)
        assert [request.output for request in requests] == expected, f"chunk {chunk}"


def test_one_kind_runs_through_the_fallback(checkpoint):
    others = [kind for kind in checkpoints.KINDS if not is_native(read_spec(checkpoint(kind)))]
    assert others == ["persimmon"]


@pytest.mark.parametrize("rope", ["linear", "dynamic", "yarn"])
def test_scaled_rotary_embeddings_give_the_tokens_of_transformers(rope, checkpoint, driver, make_request):
    parameters = {"rope_type": rope, "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 256}
    if rope != "yarn":
        del parameters["original_max_position_embeddings"]
    folder = checkpoint("llama", rope_parameters=parameters)
    prompts = _prompts(rope)[-3:]
    requests = [make_request(prompt) for prompt in prompts]
    driver(folder).run(requests)
    assert [request.output for request in requests] == checkpoints.reference_greedy(folder, prompts, 8)


@pytest.mark.parametrize("kind", ["llama", "qwen2-sliding", "qwen3_moe", "gemma2"])
def test_unwritten_memory_is_never_read(kind, checkpoint, driver, make_request):
    folder = checkpoint(kind)
    prompts = _prompts(3)[:8]
    served = driver(folder)
    cache = served.runner._cache
    poisoned = 0

    def run():
        nonlocal poisoned
        for keys, values in cache.pages:
            keys[served.free_blocks] = float("nan")
            values[served.free_blocks] = float("nan")
        poisoned += len(served.free_blocks)
        requests = [make_request(prompt, max_new=20) for prompt in prompts]
        served.run(requests, chunk=23)
        return [request.output for request in requests]

    assert run() == run() == checkpoints.reference_greedy(folder, prompts, 20)
    assert poisoned == 2 * cache.num_pages


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_moe", "mixtral", "phi3"])
def test_bfloat16_logprobs_are_close_to_those_of_transformers(
    kind, kernels, checkpoint, driver, make_request, logprob_arrays, tmp_path
):
    """Both round to bfloat16, at different places. Our mean error against float32 may be 1.25 times theirs."""
    folder = checkpoints.make_checkpoint(tmp_path, kind, dtype=torch.bfloat16, initializer_range=0.1)
    prompt = _prompts(9)[-3]
    requests = [make_request(prompt, max_new=1, sampling=_scoring())]
    served = driver(folder, dtype="bfloat16", cpu_kernels=kernels)
    served.run(requests)
    _, values = logprob_arrays(requests[0].prompt_logprobs)

    def reference(dtype):
        with torch.inference_mode():
            logits = checkpoints.load_reference(folder, dtype)(torch.tensor([prompt])).logits[0, :-1].float()
        return logits.log_softmax(-1).gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].numpy()

    exact, theirs, ours = reference(torch.float32), reference(torch.bfloat16), values[:, 0]
    assert np.abs(ours - exact).mean() < 1.25 * np.abs(theirs - exact).mean()
    assert np.abs(ours - exact).max() < 2 * np.abs(theirs - exact).max()


def _scoring():
    from pagewire.ipc.messages import Sampling

    return Sampling(temperature=0, prompt_logprobs=0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_checkpoints_of_16_bits_give_the_tokens_of_float32(dtype, checkpoint, driver, make_request, tmp_path):
    folder = checkpoints.make_checkpoint(tmp_path, "llama", dtype=getattr(torch, dtype))
    prompts = _prompts(4)[:4]
    requests = [make_request(prompt) for prompt in prompts]
    driver(folder, dtype="float32").run(requests)
    assert [request.output for request in requests] == checkpoints.reference_greedy(folder, prompts, 8)


def test_a_sharded_checkpoint_gives_the_tokens_of_transformers(checkpoint, driver, make_request, tmp_path):
    folder = checkpoints.make_checkpoint(tmp_path, "qwen2", shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    prompts = _prompts(5)[:4]
    requests = [make_request(prompt) for prompt in prompts]
    driver(folder).run(requests)
    assert [request.output for request in requests] == checkpoints.reference_greedy(folder, prompts, 8)
