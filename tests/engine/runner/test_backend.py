"""Which kernels run: the results of the C kernels and of torch's, and the notes about them."""

import pytest
import torch
import vocabulary
from defaults import TORCH, machine

from pagewire import LLM, SamplingParams
from pagewire.engine.runner.runner import Runner
from pagewire.errors import ConfigError
from pagewire.kernels.cpu import build, levels

pytestmark = pytest.mark.usefixtures("c_kernels")
PROMPTS = [[5, 6, 7, 8] * 9, [9, 4], [11] * 40]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def _tokens(folder, **options):
    llm = LLM(str(folder), kv_cache_memory="4M", **{"dtype": "float32"} | options)
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


@pytest.fixture
def checkpoint(checkpoint):
    """The shared fixture, with a tokenizer added."""

    def make(kind, **changes):
        folder = checkpoint(kind, **changes)
        vocabulary.add_tokenizer(folder)
        return folder

    return make


@pytest.fixture
def no_compiler(monkeypatch):
    def find(_):
        raise build.BuildError("there is no C compiler (cc, gcc or clang)")

    monkeypatch.setattr(build, "find", find)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_without_a_compiler_torch_gives_the_same_tokens(kind, dtype, checkpoint, request):
    folder = checkpoint(kind, dtype=dtype)
    expected = _tokens(folder)
    request.getfixturevalue("no_compiler")
    assert _tokens(folder) == expected


def test_a_note_says_why_torch_kernels_are_used(checkpoint, resolved, no_compiler):
    runner = Runner.load(resolved(checkpoint("llama"), dtype="float32"))
    note = runner.notes[0]
    assert note.startswith("kernels of torch, because there is no C compiler (cc, gcc or clang); tokens may depend on")


def test_the_operator_is_told_which_level_computes(checkpoint, resolved):
    for name in ("auto", "portable", "amx-emulated"):
        runner = Runner.load(resolved(checkpoint("llama"), dtype="float32", cpu_kernels=name))
        level = levels.levels_here()[0].name if name == "auto" else name
        assert runner.notes[0].startswith(f"C kernels for {level}, compiled ")


def test_the_operator_is_told_what_is_missing(checkpoint, resolved):
    with machine(TORCH):
        runner = Runner.load(resolved(checkpoint("llama"), dtype="float32"))
    assert runner.notes[0].startswith("kernels of torch, which are slower, because the installation has no compiled")


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_bfloat16_weights_are_not_widened(kind, checkpoint, resolved):
    folder = checkpoint(kind, dtype=torch.bfloat16)
    runner = Runner.load(resolved(folder, dtype="float32"))
    assert "bfloat16 weights, float32 arithmetic" in runner.notes[0]
    wide = Runner.load(resolved(checkpoint(kind), dtype="float32"))
    assert runner._memory.weights < 0.55 * wide._memory.weights


@pytest.mark.parametrize(("quantization", "most"), [("int8", 0.1), ("int4", 1.5)])
@pytest.mark.parametrize("kind", ["qwen3", "mixtral"])
def test_8_and_4_bits_are_near_and_need_a_native_architecture(kind, quantization, most, checkpoint):
    folder = checkpoint(kind)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    found = []
    for options in ({}, {"quantization": quantization}):
        llm = LLM(str(folder), kv_cache_memory="4M", dtype="float32", **options)
        entries = llm.generate(PROMPTS[0], params, use_tqdm=False)[0].prompt_logprobs[1:]
        found.append([entry[token].logprob for entry, token in zip(entries, PROMPTS[0][1:], strict=True)])
    distances = [abs(exact - rounded) for exact, rounded in zip(*found, strict=True)]
    assert 0 < sum(distances) / len(distances) < most
    with pytest.raises(
        ConfigError, match="--quantization needs a model that pagewire describes; transformers runs Persimmon"
    ):
        LLM(str(checkpoint("persimmon")), quantization=quantization)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("kind", ["qwen3", "mixtral"])
def test_8_and_4_bits_without_a_compiler_give_the_same_tokens(kind, quantization, checkpoint, no_compiler, monkeypatch):
    folder = checkpoint(kind)
    with_torch = _tokens(folder, quantization=quantization)
    monkeypatch.undo()
    assert _tokens(folder, quantization=quantization) == with_torch


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_logprobs_with_a_bfloat16_kv_cache_are_close_with_either_kernels(kind, checkpoint, request):
    """The KV cache may be narrower than activations, with the C kernels and with torch's."""
    folder = checkpoint(kind)

    def logprobs(**options):
        llm = LLM(str(folder), kv_cache_memory="4M", **options)
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        entries = llm.generate(PROMPTS[0], params, use_tqdm=False)[0].prompt_logprobs[1:]
        return [entry[token].logprob for entry, token in zip(entries, PROMPTS[0][1:], strict=True)]

    exact, ours = logprobs(), logprobs(kv_cache_dtype="bfloat16")
    request.getfixturevalue("no_compiler")
    theirs = logprobs(kv_cache_dtype="bfloat16")
    assert exact != ours
    assert ours == pytest.approx(theirs, abs=1e-3) and ours == pytest.approx(exact, abs=1e-1)


def test_dtype_bfloat16_on_a_cpu_is_of_weights_kv_and_products(checkpoint, resolved):
    folder = checkpoint("llama")
    runner = Runner.load(resolved(folder, dtype="bfloat16"))
    assert "bfloat16 weights, bfloat16 arithmetic" in runner.notes[0]
    wide = Runner.load(resolved(folder))
    assert runner._memory.weights < 0.55 * wide._memory.weights
    assert 2 * runner._memory.page_bytes == wide._memory.page_bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cpu_kernels_torch_selects_the_torch_kernels(dtype, checkpoint, resolved):
    runner = Runner.load(resolved(checkpoint("llama"), dtype=dtype, cpu_kernels="torch"))
    assert runner.notes[0] == "kernels of torch"
