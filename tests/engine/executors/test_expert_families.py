"""Described families against transformers' own classes: log-probabilities and greedy tokens in float32, of tiny random
checkpoints of two kinds for each, chunked and batched by the runner."""

import asyncio
import json
import random
import shutil
from typing import Any

import checkpoints
import pytest
import torch
import transformers
import vocabulary
from family_kinds import EXPERTS, KINDS, ids_of, load_kind, make_kind
from safetensors.torch import load_file, save_file
from ties import first_tie, margins

from pagewire import AsyncLLM, SamplingParams
from pagewire.engine.checkpoint.spec import is_native, read_spec
from pagewire.ipc.messages import Sampling

_LENGTHS = (1, 2, 15, 16, 17, 40, 63, 100)
_NUM_NEW = 6


@pytest.mark.parametrize(("config_class", "changes"), EXPERTS, ids=ids_of(EXPERTS))
def test_logprobs_and_tokens_are_those_of_transformers(config_class, changes, tmp_path, driver, make_request):
    folder = make_kind(tmp_path, config_class, changes)
    spec = read_spec(folder)
    assert is_native(spec), spec.why_not_described
    rng = random.Random(config_class)
    prompts = [[rng.randrange(3, checkpoints.VOCAB_SIZE) for _ in range(num)] for num in _LENGTHS]
    served, model = driver(folder, num_blocks=96), load_kind(folder, config_class, changes)
    num_compared = num_in_all = 0
    for chunk, budget, rows in ((16, 50, 3), (2048, 2048, 8)):
        sampling = Sampling(temperature=0, prompt_logprobs=0, logprobs=0)
        requests = [make_request(prompt, sampling=sampling, max_new=_NUM_NEW) for prompt in prompts]
        served.run(requests, chunk=chunk, budget=budget, rows=rows, seed=chunk)
        for request in requests:
            ids = torch.tensor([request.prompt + request.output])
            end = first_tie(model, ids[0].tolist())  # behind it rounding decides
            num_compared += min(end, ids.shape[1] - 1)
            num_in_all += ids.shape[1] - 1
            with torch.no_grad():
                expected = torch.log_softmax(model(ids, use_cache=False).logits[0, :-1].float(), dim=-1)
            last = len(request.prompt) - 1
            assert expected[last:end].argmax(-1).tolist() == request.output[: max(0, end - last)]
            parts = [*request.prompt_logprobs, *request.logprobs]
            got = torch.cat([torch.frombuffer(bytearray(part.values), dtype=torch.float32) for part in parts])
            chosen = expected.gather(1, ids[0, 1:, None])[:, 0]
            found = got.view(len(chosen), -1)[:, 0]
            torch.testing.assert_close(found[:end], chosen[:end], atol=2e-3, rtol=1e-4)
    assert num_compared == num_in_all or ("Phimoe" in config_class and num_compared > 0.8 * num_in_all)


def test_ties_of_a_router_are_found():
    """With a jitter of 0.1 experts count that are within 0.2 of the best, relative."""
    scores = torch.tensor([[1.0, 0.5, 0.3, 0.2], [1.0, 0.8, 0.3, 0.2], [1.0, 0.5, 0.5, 0.2], [1.0, 0.5, 0.4, 0.2]])
    found = margins(scores, 0.1, 2)
    assert (found < 1e-6).tolist() == [False, True, True, True]


def test_a_wrapper_serves_its_text_part(tmp_path, driver, make_request):
    text = {
        **checkpoints.COMMON, "num_local_experts": 4, "intermediate_size_mlp": 80, "attention_chunk_size": 32,
        "no_rope_layer_interval": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    }  # fmt: skip
    vision = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 28,
        "vision_output_dim": 64, "projector_input_dim": 64, "projector_output_dim": 64,
    }  # fmt: skip
    torch.manual_seed(3)
    model: Any = transformers.Llama4ForConditionalGeneration(
        transformers.Llama4Config(text_config=text, vision_config=vision)
    )
    with torch.no_grad():
        for name, values in model.named_parameters():
            if "experts" in name:
                values.normal_(std=0.25)
    model.eval().save_pretrained(tmp_path)
    prompt = list(range(5, 75))
    request = make_request(prompt, max_new=_NUM_NEW)
    driver(tmp_path).run([request], chunk=32)
    with torch.no_grad():
        expected = model.language_model(torch.tensor([prompt + request.output])).logits[0, len(prompt) - 1 : -1]
    assert expected.argmax(-1).tolist() == request.output


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["DeepseekV3-1", "GptOss-0", "GraniteMoeShared-0", "Llama4Text-0"])
def test_two_ranks_give_the_tokens_of_transformers(kind, tmp_path):
    folder = make_kind(tmp_path, *KINDS[kind])
    vocabulary.add_tokenizer(folder)
    prompts = [list(range(5, 5 + num)) for num in (3, 40, 90)]
    params = SamplingParams(temperature=0, max_tokens=_NUM_NEW, ignore_eos=True)

    async def served() -> list[list[int]]:
        async with AsyncLLM(
            str(folder), dtype="float32", max_model_len=128, threads=1, tensor_parallel_size=2, kv_cache_memory="8M"
        ) as llm:
            streams = [[output async for output in llm.generate(prompt, params)] for prompt in prompts]
            return [list(stream[-1].outputs[0].token_ids) for stream in streams]

    expected = checkpoints.reference_greedy(folder, prompts, _NUM_NEW)
    assert asyncio.run(served()) == expected


_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@pytest.fixture
def mxfp4(tmp_path):
    """(a gpt-oss whose experts are MXFP4 as OpenAI stores them, the same as floats)."""
    changes = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24}
    widened, folder = make_kind(tmp_path / "floats", "GptOssConfig", changes), tmp_path / "mxfp4"
    floats = load_file(widened / "model.safetensors")
    stored = {name: tensor for name, tensor in floats.items() if not name.endswith("_proj")}
    generator = torch.Generator().manual_seed(4)
    for name in sorted(floats.keys() - stored.keys()):
        experts, columns, rows = floats[name].shape
        numbers = torch.randint(0, 16, (experts, rows, columns), generator=generator)
        exponents = torch.randint(122, 125, (experts, rows, columns // 32), generator=generator)
        table = torch.tensor((*_FP4, *(-each for each in _FP4)))
        weight = table[numbers] * (exponents - 127.0).exp2().repeat_interleave(32, dim=2)
        floats[name] = weight.transpose(1, 2).contiguous()
        pairs = numbers.view(experts, rows, columns // 32, 16, 2).to(torch.uint8)
        stored[name + "_blocks"] = pairs[..., 0] | pairs[..., 1] << 4
        stored[name + "_scales"] = exponents.to(torch.uint8)
    save_file(floats, widened / "model.safetensors", metadata={"format": "pt"})
    shutil.copytree(widened, folder)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))
    return folder, widened


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_experts_in_mxfp4_are_those_of_the_same_floats(kernels, mxfp4, driver, make_request):
    """Exactly where they are widened. The C kernels keep 4 bits and round activations to 8."""
    folder, widened = mxfp4
    prompt, sampling = list(range(3, 83)), Sampling(temperature=0, prompt_logprobs=0)
    request = make_request(prompt, sampling=sampling, max_new=1)
    served = driver(folder, cpu_kernels=kernels)
    served.run([request], chunk=32)
    model = checkpoints.load_reference(widened)
    with torch.no_grad():
        expected = torch.log_softmax(model(torch.tensor([prompt])).logits[0, :-1], dim=-1)
    chosen = expected.gather(1, torch.tensor(prompt)[1:, None])[:, 0]
    parts = [torch.frombuffer(bytearray(part.values), dtype=torch.float32) for part in request.prompt_logprobs]
    distance = (torch.cat(parts).view(len(chosen), -1)[:, 0] - chosen).abs()
    if kernels == "torch":
        assert distance.max() < 2e-3
    else:
        assert 1e-4 < distance.median() < 0.2
