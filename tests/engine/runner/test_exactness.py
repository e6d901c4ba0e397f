"""The runner against transformers: the same tokens, for any chunks and any batch."""

import random

import checkpoints
import families
import numpy as np
import pytest
import torch
import transformers

from pagewire.engine.checkpoint.spec import is_native, read_spec

LENGTHS = (1, 2, 15, 16, 17, 40, 63, 130, 257, 600)


def _prompts(seed):
    rng = random.Random(seed)
    return [[rng.randrange(3, checkpoints.VOCAB_SIZE) for _ in range(n)] for n in LENGTHS]


@pytest.mark.parametrize("kind", [kind for kind in checkpoints.KINDS if kind not in checkpoints.ENCODER_DECODERS])
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
    folder = checkpoints.make_checkpoint(tmp_path, kind, dtype=torch.bfloat16, initializer_range=0.1)
    requests = [make_request(_prompts(9)[-3], max_new=1, sampling=_scoring())]
    driver(folder, dtype="bfloat16", cpu_kernels=kernels).run(requests)
    _check_bounds(folder, requests, logprob_arrays)


# Two families of each kind of layer, where two are described; the first with the C kernels in `make test`.
OF_KIND = {
    "full": ("olmo2", "stablelm"),
    "window": ("gemma3_text", "olmo3"),
    "chunk": ("llama4_text",),
    "latent": ("minicpm3", "deepseek_v3"),
    "sinks": ("gpt_oss", "granite_swa"),
    "ALiBi": ("bloom", "mpt"),
    "delta net": ("qwen3_5_text", "kimi_linear"),
    "Mamba 2": ("mamba2", "bamba"),
    "lightning": ("minimax",),
    "short convolution": ("lfm2", "lfm2_moe"),
}


@pytest.mark.parametrize(
    ("family", "kernels"),
    [
        pytest.param(family, kernels, marks=[] if number == 0 and kernels == "auto" else pytest.mark.long)
        for each in OF_KIND.values()
        for number, family in enumerate(each)
        for kernels in ("auto", "torch")
    ],
)
def test_bfloat16_logprobs_of_every_kind_of_layer(family, kernels, driver, make_request, logprob_arrays, tmp_path):
    folder = _family_of_16_bits(tmp_path, family)
    requests = [make_request(prompt, max_new=1, sampling=_scoring()) for prompt in _prompts(9)[-4:-1]]
    driver(folder, dtype="bfloat16", cpu_kernels=kernels).run(requests)
    _check_bounds(folder, requests, logprob_arrays)


def _family_of_16_bits(folder, family):
    config = families.tiny(family)
    config.initializer_range = 0.1
    # Which experts a token has is a choice that rounding can turn, in transformers too; here it has all of them.
    for name in ("num_experts_per_tok", "num_experts_per_token"):
        if hasattr(config, name):
            setattr(config, name, 4)
    state = torch.get_rng_state()
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases are ones and zeros by default
                parameter.add_(torch.randn_like(parameter) * 0.1)
    torch.set_rng_state(state)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def _check_bounds(folder, requests, logprob_arrays):
    """Both round to bfloat16, at different places. Our mean error against float32 may be 1.25 times theirs, and the
    greatest twice theirs."""
    ours = [logprob_arrays(request.prompt_logprobs)[1][:, 0] for request in requests]

    def reference(dtype):
        model, found = checkpoints.load_reference(folder, dtype), []
        for request in requests:
            with torch.inference_mode():
                logits = model(torch.tensor([request.prompt]), use_cache=False).logits[0, :-1].float()
            found.append(logits.log_softmax(-1).gather(1, torch.tensor(request.prompt[1:])[:, None])[:, 0].numpy())
        return np.concatenate(found)

    exact, theirs = reference(torch.float32), reference(torch.bfloat16)
    our_errors, their_errors = np.abs(np.concatenate(ours) - exact), np.abs(theirs - exact)
    assert our_errors.mean() <= 1.25 * their_errors.mean(), (our_errors.mean(), their_errors.mean())
    assert our_errors.max() <= 2 * their_errors.max(), (our_errors.max(), their_errors.max())


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
