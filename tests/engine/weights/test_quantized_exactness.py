"""Quantized checkpoints in the engine give the tokens of transformers with the dequantized weights."""

import random

import checkpoints
import pytest
import quantized_checkpoints
import vocabulary

from pagewire import LLM, SamplingParams
from pagewire.errors import ConfigError

PARAMS = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


def _prompts():
    rng = random.Random(1)
    return [[rng.randrange(3, checkpoints.VOCAB_SIZE) for _ in range(n)] for n in (1, 7, 40, 130)]


def _tokens(folder, **options):
    llm = LLM(str(folder), threads=1, kv_cache_memory="16M", max_num_batched_tokens=64, **options)
    return [output.outputs[0].token_ids for output in llm.generate(_prompts(), PARAMS, use_tqdm=False)]


@pytest.fixture
def make(tmp_path):
    def make(architecture, kind):
        source = checkpoints.make_checkpoint(tmp_path / "float", architecture)
        vocabulary.add_tokenizer(source)
        return quantized_checkpoints.quantize_checkpoint(source, tmp_path, kind)

    return make


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [
        ("fp8-block", "qwen3"),
        ("fp8-tensor", "llama"),
        ("fp8-channel", "qwen2"),
        ("awq", "llama-biased"),
        ("gptq", "qwen3"),
        ("gptq-v2-ordered", "llama"),
        ("fp8-tensor", "qwen3_moe"),
    ],
)
def test_greedy_tokens_are_those_of_the_dequantized_weights(kind, architecture, make):
    quantized, widened = make(architecture, kind)
    expected = checkpoints.reference_greedy(widened, _prompts(), 10)
    assert len({tuple(output) for output in expected}) == len(expected), "the outputs should differ by prompt"
    assert _tokens(quantized, dtype="float32") == expected


def test_int8_requantizes_a_quantized_checkpoint(make):
    """`--quantization int8` quantizes the dequantized weights."""
    quantized, widened = make("llama", "awq")
    assert _tokens(quantized, quantization="int8") == _tokens(widened, quantization="int8")


def test_the_fallback_refuses_quantized_checkpoints(make):
    quantized, _ = make("phi3", "fp8-tensor")
    with pytest.raises(ConfigError, match=r"A quantized checkpoint needs one of LlamaFor.*; this is Phi3ForCausalLM"):
        _tokens(quantized)
