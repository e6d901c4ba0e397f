"""Described families against transformers' own classes: log-probabilities and greedy tokens in float32, of tiny random
checkpoints of two kinds for each, chunked and batched by the runner."""

import asyncio
import json
import random
import shutil
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
import transformers
import vocabulary
from safetensors.torch import load_file, save_file

from pagewire import AsyncLLM, SamplingParams
from pagewire.engine.checkpoint.spec import is_native, read_spec
from pagewire.ipc.messages import Sampling

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 256,
}
_EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_shared_experts": 1}
_LATENT = {
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "head_dim": 8,
    "num_key_value_heads": 4,
}
_GROUPS = {"n_group": 4, "topk_group": 2}

# (config class, fields that differ from checkpoints.COMMON), sorted by name. None: the field is left out.
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("DeepseekV2Config", {**_EXPERTS, **_LATENT, "q_lora_rank": 24, "first_k_dense_replace": 1}),
    (
        "DeepseekV2Config",
        {**_EXPERTS, **_LATENT, **_GROUPS, "q_lora_rank": None, "topk_method": "group_limited_greedy",
         "routed_scaling_factor": 4.0, "attention_bias": True, "rope_parameters": _YARN},
    ),
    ("DeepseekV3Config", {**_EXPERTS, **_LATENT, **_GROUPS, "q_lora_rank": 24, "first_k_dense_replace": 1}),
    (
        "DeepseekV3Config",
        {**_EXPERTS, **_LATENT, "n_group": 1, "topk_group": 1, "q_lora_rank": None, "first_k_dense_replace": 0,
         "rope_interleave": False, "attention_bias": True, "rope_parameters": _YARN, "norm_topk_prob": False},
    ),
    ("Ernie4_5_MoeConfig", {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 32}),
    (
        "Ernie4_5_MoeConfig",
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 0,
         "moe_layer_interval": 2, "moe_layer_start_index": 0, "tie_word_embeddings": False},
    ),
    ("Glm4MoeConfig", {**_EXPERTS, "first_k_dense_replace": 1}),
    (
        "Glm4MoeConfig",
        {**_EXPERTS, **_GROUPS, "first_k_dense_replace": 0, "attention_bias": True, "use_qk_norm": True,
         "routed_scaling_factor": 2.5},
    ),
    ("Glm4MoeLiteConfig", {**_EXPERTS, **_LATENT, "q_lora_rank": 24}),
    ("Glm4MoeLiteConfig", {**_EXPERTS, **_LATENT, "q_lora_rank": None, "mlp_layer_types": ["sparse"] * 3}),
    ("GptOssConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24}),
    (
        "GptOssConfig",
        {"num_local_experts": 8, "num_experts_per_tok": 3, "attention_bias": False,
         "layer_types": ["full_attention"] * 3, "swiglu_limit": 2.0, "swiglu_alpha": 1.5,
         "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
    (
        "GraniteMoeConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "embedding_multiplier": 3.0, "logits_scaling": 2.0,
         "residual_multiplier": 0.5, "attention_multiplier": 0.2, "tie_word_embeddings": True},
    ),
    ("GraniteMoeConfig", {"num_local_experts": 8, "num_experts_per_tok": 3, "attention_bias": True}),
    ("GraniteMoeSharedConfig", {"num_local_experts": 4, "shared_intermediate_size": 48, "residual_multiplier": 0.5}),
    ("GraniteMoeSharedConfig", {"num_local_experts": 4, "shared_intermediate_size": 0}),
    ("HunYuanMoEV1Config", {"num_experts": 8, "moe_topk": 3}),
    (
        "HunYuanMoEV1Config",
        {"num_experts": 4, "moe_topk": [1, 2, 3], "attention_bias": True,
         "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 1.0, "alpha": 50.0}},
    ),
    (
        "Llama4TextConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size_mlp": 80, "attention_chunk_size": 32,
         "no_rope_layer_interval": 2, "floor_scale": 16},
    ),
    (
        "Llama4TextConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 80, "attention_chunk_size": 48,
         "interleave_moe_layer_step": 2, "use_qk_norm": False, "attn_temperature_tuning": False,
         "no_rope_layer_interval": 3},
    ),
    ("MiniMaxM2Config", {"num_local_experts": 8, "num_experts_per_tok": 3}),
    ("MiniMaxM2Config", {"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 8}),
    ("OlmoeConfig", {"num_experts": 8, "num_experts_per_tok": 3, "head_dim": None}),
    ("OlmoeConfig", {"num_experts": 4, "norm_topk_prob": True, "attention_bias": True, "num_experts_per_tok": 2}),
    ("PhimoeConfig", {"num_local_experts": 4, "head_dim": None}),
    (
        "PhimoeConfig",
        {"num_local_experts": 8, "attention_bias": True, "sliding_window": 24, "router_jitter_noise": 0.1},
    ),
    (
        "Qwen2MoeConfig",
        {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "head_dim": None,
         "shared_expert_intermediate_size": 48},
    ),
    (
        "Qwen2MoeConfig",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True,
         "shared_expert_intermediate_size": 32, "mlp_only_layers": [1], "qkv_bias": False, "use_sliding_window": True,
         "sliding_window": 24, "tie_word_embeddings": True},
    ),
]  # fmt: skip
_IDS = [f"{name.removesuffix('Config')}-{sum(each[0] == name for each in FAMILIES[:i])}" for i, (name, _) in enumerate(FAMILIES)]  # fmt: skip  # noqa: E501
_LENGTHS = (1, 2, 15, 16, 17, 40, 63, 100)
_NUM_NEW = 6


def _make(folder: Path, config_class: str, changes: dict[str, Any]) -> Path:
    fields = {**checkpoints.COMMON, **changes}
    if changes.get("head_dim", 0) is None:
        del fields["head_dim"]
    state = torch.get_rng_state()
    torch.manual_seed(len(config_class) + len(changes))
    model_class: Any = transformers.AutoModelForCausalLM
    model = model_class.from_config(getattr(transformers, config_class)(**fields), dtype=torch.float32)
    with torch.no_grad():
        for name, values in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("inv_freq"):
                continue
            # Those that begin as zeros or ones would hide a mistake.
            if "norm" in name and name.endswith("weight"):
                values.add_(torch.randn_like(values) * 0.2)
            elif "bias" in name or name.endswith(("sinks", "gate.weight", "router.weight", "wg.weight")):
                values.normal_(std=0.2)
            elif "experts" in name:
                values.normal_(std=0.25)
    torch.set_rng_state(state)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("config_class", "changes"), FAMILIES, ids=_IDS)
def test_logprobs_and_tokens_are_those_of_transformers(config_class, changes, tmp_path, driver, make_request):
    folder = _make(tmp_path, config_class, changes)
    spec = read_spec(folder)
    assert is_native(spec), spec.why_not_described
    rng = random.Random(config_class)
    prompts = [[rng.randrange(3, checkpoints.VOCAB_SIZE) for _ in range(num)] for num in _LENGTHS]
    served, model = driver(folder, num_blocks=96), checkpoints.load_reference(folder)
    for chunk, budget, rows in ((16, 50, 3), (2048, 2048, 8)):
        sampling = Sampling(temperature=0, prompt_logprobs=0, logprobs=0)
        requests = [make_request(prompt, sampling=sampling, max_new=_NUM_NEW) for prompt in prompts]
        served.run(requests, chunk=chunk, budget=budget, rows=rows, seed=chunk)
        for request in requests:
            ids = torch.tensor([request.prompt + request.output])
            with torch.no_grad():
                expected = torch.log_softmax(model(ids, use_cache=False).logits[0, :-1].float(), dim=-1)
            assert expected[len(request.prompt) - 1 :].argmax(-1).tolist() == request.output
            parts = [*request.prompt_logprobs, *request.logprobs]
            got = torch.cat([torch.frombuffer(bytearray(part.values), dtype=torch.float32) for part in parts])
            chosen = expected.gather(1, ids[0, 1:, None])[:, 0]
            torch.testing.assert_close(got.view(len(chosen), -1)[:, 0], chosen, atol=2e-3, rtol=1e-4)


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
        expected = model(input_ids=torch.tensor([prompt + request.output])).logits[0, len(prompt) - 1 : -1]
    assert expected.argmax(-1).tolist() == request.output


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["DeepseekV3-1", "GptOss-0", "GraniteMoeShared-0", "Llama4Text-0"])
def test_two_ranks_give_the_tokens_of_transformers(kind, tmp_path):
    folder = _make(tmp_path, *FAMILIES[_IDS.index(kind)])
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
    widened, folder = _make(tmp_path / "floats", "GptOssConfig", changes), tmp_path / "mxfp4"
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
