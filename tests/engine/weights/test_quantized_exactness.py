"""Quantized checkpoints in the engine give the tokens of transformers with the dequantized weights."""

import random

import checkpoints
import pytest
import quantized_checkpoints
import torch
import vocabulary

from pagewire import LLM, SamplingParams
from pagewire.engine.checkpoint.spec import read_spec
from pagewire.engine.weights.quantized import read_weight
from pagewire.engine.weights.reader import CheckpointReader
from pagewire.errors import ConfigError
from pagewire.kernels.grouped_weight import GroupedWeight

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
        sizes = {"moe_intermediate_size": 64} if architecture == "qwen3_moe" else {}
        source = checkpoints.make_checkpoint(tmp_path / "float", architecture, **sizes)
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
        ("fp8-block", "mixtral"),
        ("fp8-channel", "qwen3_moe"),
        ("packed-zeros", "qwen3"),
        ("int8", "llama"),
        ("mxfp4", "llama"),
        ("fp8-block", "bamba"),
        ("fp8-channel", "jamba"),
        ("fp8-tensor", "qwen3_5"),
        ("awq", "minimax"),
    ],
)
def test_greedy_tokens_are_those_of_the_same_weights_as_floats(kind, architecture, make):
    """With float8 in C too, where weights are unpacked exactly; integers are multiplied as integers there."""
    quantized, widened = make(architecture, kind)
    expected = checkpoints.reference_greedy(widened, _prompts(), 10)
    assert len({tuple(output) for output in expected}) == len(expected), "the outputs should differ by prompt"
    assert _tokens(quantized, dtype="float32", cpu_kernels="torch") == expected
    if kind.startswith("fp8"):
        assert _tokens(quantized, dtype="float32") == expected


INTEGERS = [kind for kind in quantized_checkpoints.CONFIGS if not kind.startswith("fp8")]


def _multiply_as_stored(folder):
    """A change to transformers' model: it multiplies as the C kernels do."""
    scheme = read_spec(folder).scheme

    def change(model):
        with CheckpointReader(folder) as reader:

            def read(name, n, k):
                weight = read_weight(scheme, reader, name, n, k, (0, n), (0, k))
                assert isinstance(weight, GroupedWeight)
                return weight

            quantized_checkpoints.multiply_as_stored(model, read)

    return change


@pytest.mark.usefixtures("c_kernels")
@pytest.mark.parametrize(("architecture", "kind"), [*(("llama", kind) for kind in INTEGERS), ("qwen3", "gptq")])
def test_integers_that_are_kept_give_the_tokens_of_their_specification(kind, architecture, make):
    """Those of transformers whose projections are `reference.TorchGroupedMatrix`, and nearly the probabilities of the
    weights as floats."""
    quantized, widened = make(architecture, kind)
    expected = checkpoints.reference_greedy(widened, _prompts(), 10, _multiply_as_stored(quantized))
    assert len({tuple(output) for output in expected}) == len(expected), "the outputs should differ by prompt"
    assert _tokens(quantized, dtype="float32") == expected
    kept, floats = _logprobs(quantized, dtype="float32"), _logprobs(widened, dtype="float32")
    distances = [abs(a - b) for a, b in zip(kept, floats, strict=True)]
    assert 0 < sum(distances) / len(distances) < 0.15


@pytest.mark.usefixtures("c_kernels")
@pytest.mark.parametrize(
    ("architecture", "kind"),
    [*(("qwen3_moe", kind) for kind in INTEGERS), *(("mixtral", kind) for kind in ("awq", "gptq-v2-ordered", "int8"))],
)
def test_experts_that_are_kept_give_the_logits_of_their_specification(kind, architecture, make):
    """As above, for the tokens of many short prompts: an activation that lies between two roundings, which the last bit
    of a sum decides, may send a few of them to other experts."""
    quantized, widened = make(architecture, kind)
    model = checkpoints.load_reference(widened)
    _multiply_as_stored(quantized)(model)
    prompts = torch.randint(3, checkpoints.VOCAB_SIZE, (24, 6), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        logprobs = model(prompts).logits.log_softmax(-1)[:, :-1].gather(2, prompts[:, 1:, None])[:, :, 0]
    llm = LLM(str(quantized), threads=1, kv_cache_memory="16M", dtype="float32")
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    rows = [output.prompt_logprobs[1:] for output in llm.generate(prompts.tolist(), params, use_tqdm=False)]
    found = [
        [entry[token].logprob for entry, token in zip(row, prompt[1:], strict=True)]
        for row, prompt in zip(rows, prompts.tolist(), strict=True)
    ]
    is_near = (torch.tensor(found) - logprobs).abs() < 1e-4
    assert is_near.float().mean() > 0.9, "rounding to 8 bits changes a logprob by about 1e-2"


RECURRENT = ("bamba", "jamba", "lfm2", "mamba2", "minimax", "qwen3_5")  # one of each mixer, and Mamba 2 alone


@pytest.mark.usefixtures("c_kernels")
@pytest.mark.parametrize(
    ("architecture", "kind"),
    [("bamba", "gptq"), ("jamba", "awq"), ("lfm2", "int8"), ("mamba2", "mxfp4"), ("minimax", "packed"),
     ("qwen3_5", "packed-zeros")],
)  # fmt: skip
def test_integers_of_recurrent_layers_are_kept(kind, architecture, make):
    """Nearly the probabilities of the weights as floats."""
    quantized, widened = make(architecture, kind)
    kept, floats = _logprobs(quantized, dtype="float32"), _logprobs(widened, dtype="float32")
    distances = [abs(a - b) for a, b in zip(kept, floats, strict=True)]
    assert 0 < sum(distances) / len(distances) < 0.15


@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("architecture", RECURRENT)
def test_products_of_recurrent_layers_are_rounded(architecture, kernels, tmp_path):
    folder = vocabulary.add_tokenizer(checkpoints.make_checkpoint(tmp_path, architecture))
    floats = _logprobs(folder, dtype="float32", cpu_kernels=kernels)
    for quantization, limit in (("int8", 0.1), ("int4", 1.0)):
        rounded = _logprobs(folder, quantization=quantization, cpu_kernels=kernels)
        distances = [abs(a - b) for a, b in zip(rounded, floats, strict=True)]
        assert 0 < sum(distances) / len(distances) < limit, quantization


def _logprobs(folder, **options):
    llm = LLM(str(folder), threads=1, kv_cache_memory="16M", **options)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    prompt = _prompts()[2]
    entries = llm.generate(prompt, params, use_tqdm=False)[0].prompt_logprobs[1:]
    return [entry[token].logprob for entry, token in zip(entries, prompt[1:], strict=True)]


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_two_ways_of_being_narrow_go_together(quantization, make):
    """`--quantization` sees the widened weights."""
    quantized, widened = make("llama", "awq")
    assert _tokens(quantized, quantization=quantization) == _tokens(widened, quantization=quantization)


def test_the_fallback_refuses_quantized_checkpoints(make):
    quantized, _ = make("persimmon", "fp8-tensor")
    with pytest.raises(
        ConfigError, match=r"A quantized checkpoint needs a model that pagewire describes; .* runs PersimmonForCausalLM"
    ):
        _tokens(quantized)
