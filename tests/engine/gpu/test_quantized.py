"""Quantized checkpoints with the Triton kernels: tokens that transformers, with the dequantized weights, finds best or
as good. The kernels round activations to 16 bits, so the tokens are not always equal."""

import random

import checkpoints
import msgspec
import pytest
import quantized_checkpoints
import torch
from runner_driver import Driver, Request, engine_config

from pagewire.engine.device.queue import EagerQueue
from pagewire.engine.gpu.products import MAX_NARROW_ROWS, QuantizedProduct
from pagewire.engine.runner.runner import Runner

NUM_BLOCKS = 96
AS_GOOD = 0.05  # times the standard deviation of the logits


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [
        ("fp8-block", "qwen3"),
        ("fp8-tensor", "qwen2"),
        ("awq", "qwen3"),
        ("gptq-v2-ordered", "llama-biased"),
        ("int8", "qwen3"),
        ("mxfp4", "qwen3"),
        ("nvfp4", "qwen2"),
        ("nvfp4-modelopt", "qwen3"),
    ],
)
def test_greedy_tokens_are_the_best_of_the_dequantized_weights(kind, architecture, tmp_path):
    source = checkpoints.make_checkpoint(tmp_path / "float", architecture, num_hidden_layers=1)
    quantized, widened = quantized_checkpoints.quantize_checkpoint(source, tmp_path, kind)
    rng = random.Random(kind)
    prompts = [[rng.randrange(3, checkpoints.VOCAB_SIZE) for _ in range(n)] for n in (1, 20)]
    # Few tokens and rows, since the interpreter is slow. float16, which `resolve` would refuse for a CPU.
    check(quantized, widened, prompts, max_num_batched_tokens=32)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["awq", "gptq-v2-ordered", "fp8-tensor"])
def test_steps_of_many_tokens_take_widened_weights(kind, tmp_path):
    """Or products of 8 bits, where the checkpoint has scales for them and torch has a product."""
    sizes = {"num_hidden_layers": 1, "vocab_size": checkpoints.VOCAB_SIZE}
    source = checkpoints.make_checkpoint(tmp_path / "float", "llama", **sizes)
    quantized, widened = quantized_checkpoints.quantize_checkpoint(source, tmp_path, kind)
    rng = random.Random(kind)
    prompt = [rng.randrange(3, checkpoints.VOCAB_SIZE) for _ in range(MAX_NARROW_ROWS + 20)]
    check(quantized, widened, [prompt], max_num_batched_tokens=512)


def check(quantized, widened, prompts, *, max_num_batched_tokens):
    config = engine_config(quantized, max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=4)
    config = msgspec.structs.replace(config, dtype="float16", kv_cache_dtype="float16")
    queue = None if torch.cuda.is_available() else EagerQueue(torch.device("cpu"))
    runner = Runner.load(config, queue=queue)
    runner.open_cache(NUM_BLOCKS)
    requests = [Request(prompt, max_new=4) for prompt in prompts]
    Driver(runner, NUM_BLOCKS).run(
        requests, chunk=5 * max_num_batched_tokens // 8, budget=max_num_batched_tokens, rows=3
    )
    reference = checkpoints.load_reference(widened)
    for request in requests:
        with torch.inference_mode():
            logits = reference(torch.tensor([request.prompt + request.output])).logits[0, len(request.prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(request.output)[:, None])[:, 0]
        assert (logits.amax(dim=1) - chosen).max() < AS_GOOD * logits.std()
    products = runner._model.decoder._walk._products
    assert len(products) == 4 and all(isinstance(product, QuantizedProduct) for product in products.values())
    assert "widened" not in runner.notes[0] and "a checkpoint of" in runner.notes[0]
