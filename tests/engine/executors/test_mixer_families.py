"""Families with recurrent layers against transformers' own classes: tiny random models, chunked and batched."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import VOCAB_SIZE
from family_models import check_log_probabilities, make_model
from runner_driver import Driver, Request, arrays, engine_config

from pagewire.engine.runner.runner import Runner
from pagewire.ipc.messages import Sampling

_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_expand": 2}
_DELTA = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_WIDE = {**_DELTA, "linear_num_value_heads": 6, "linear_value_head_dim": 24, "linear_conv_kernel_dim": 3}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SHARED = {**_EXPERTS, "shared_expert_intermediate_size": 48}
_ENDS = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_CONV = {"layer_types": ["conv", "full_attention", "conv"]}
_BIASED = {"mamba_proj_bias": True, "mamba_conv_bias": False, "attention_bias": True}
_HYBRID = {
    "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2, "n_routed_experts": 4,
    "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 48,
}  # fmt: skip
_KIMI = {
    **_ENDS, "mlp_layer_types": ["dense", "sparse", "sparse"], "linear_num_heads": 4, "linear_head_dim": 16,
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12, "num_local_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_key_value_heads": 4,
}  # fmt: skip

_SHARED_BLOCKS = {
    "layers_block_type": ["linear_attention", "hybrid", "hybrid", "linear_attention", "hybrid"], "num_hidden_layers": 5,
    "n_mamba_heads": 8, "mamba_d_state": 16, "mamba_ngroups": 2, "adapter_rank": 8, "head_dim": 32,
}  # fmt: skip

# (config class, changes of COMMON), sorted by name.
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("BambaConfig", {**_MAMBA, "attn_layer_indices": [1]}),
    (
        "BambaConfig",
        {
            **_MAMBA,
            **_BIASED,
            "attn_layer_indices": [0, 2],
            "mamba_n_groups": 1,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    ("FalconH1Config", {**_MAMBA, "mamba_d_ssm": 128}),
    (
        "FalconH1Config",
        {
            **_MAMBA,
            **_BIASED,
            "mamba_d_ssm": 96,
            "mamba_d_head": 12,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "projectors_bias": True,
            "ssm_multipliers": [0.5, 0.7, 1.2, 0.9, 1.1],
            "ssm_in_multiplier": 1.3,
            "ssm_out_multiplier": 0.6,
            "attention_in_multiplier": 0.9,
            "attention_out_multiplier": 1.4,
            "key_multiplier": 0.5,
            "mlp_multipliers": [0.7, 1.4],
            "embedding_multiplier": 2.0,
            "lm_head_multiplier": 0.4,
        },
    ),
    ("FalconMambaConfig", {"state_size": 8}),
    ("FalconMambaConfig", {"use_bias": True, "use_conv_bias": False, "time_step_rank": 6, "mixer_rms_eps": 0.1}),
    ("GraniteMoeHybridConfig", {**_MAMBA, **_ENDS, "num_local_experts": 4, "shared_intermediate_size": 48}),
    (
        "GraniteMoeHybridConfig",
        {
            **_MAMBA,
            **_ENDS,
            **_BIASED,
            "num_local_experts": 0,
            "shared_intermediate_size": 80,
            "position_embedding_type": "rope",
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.5,
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "time_step_limit": [0.2, 1.1],
        },
    ),
    ("JambaConfig", {"attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 4, "mamba_d_state": 8}),
    ("JambaConfig", {"attn_layer_offset": 0, "num_experts": 1, "mamba_proj_bias": True, "mamba_dt_rank": 5}),
    ("KimiLinearConfig", _KIMI),
    ("KimiLinearConfig", {**_KIMI, "q_lora_rank": 8, "linear_conv_kernel_dim": 3, "routed_scaling_factor": 1.5}),
    ("Lfm2Config", _CONV),
    ("Lfm2Config", {**_CONV, "conv_bias": True, "conv_L_cache": 4, "block_auto_adjust_ff_dim": False}),
    ("Lfm2MoeConfig", {**_CONV, **_EXPERTS, "num_dense_layers": 1}),
    ("Lfm2MoeConfig", {**_CONV, **_EXPERTS, "num_dense_layers": 0, "use_expert_bias": False, "norm_topk_prob": False}),
    ("Mamba2Config", {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 16}),
    (
        "Mamba2Config",
        {"num_heads": 8, "head_dim": 16, "n_groups": 1, "state_size": 24, "use_bias": True, "use_conv_bias": False},
    ),
    ("MambaConfig", {"state_size": 8}),
    ("MambaConfig", {"hidden_size": 40, "use_bias": True, "use_conv_bias": False, "tie_word_embeddings": False}),
    ("MiniMaxConfig", {"num_local_experts": 4, "full_attn_alpha_factor": 1.3, "linear_attn_beta_factor": 0.8}),
    ("MiniMaxConfig", {**_ENDS, "num_local_experts": 3, "mlp_alpha_factor": 1.1, "mlp_beta_factor": 0.9}),
    ("NemotronHConfig", {**_HYBRID, "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]}),
    (
        "NemotronHConfig",
        {
            **_HYBRID,
            "layers_block_type": ["linear_attention", "full_attention", "linear_attention", "moe"],
            "time_step_min": 0.4,
            "use_bias": True,
            "use_conv_bias": False,
            "mlp_bias": True,
            "moe_latent_size": 24,
        },
    ),
    ("Qwen3NextConfig", {**_DELTA, **_SHARED}),
    ("Qwen3NextConfig", {**_WIDE, **_SHARED, "mlp_only_layers": [1], "attention_bias": True}),
    ("Qwen3_5MoeTextConfig", {**_DELTA, **_SHARED}),
    ("Qwen3_5MoeTextConfig", {**_WIDE, **_SHARED, "norm_topk_prob": True, "tie_word_embeddings": True}),
    ("Qwen3_5TextConfig", _DELTA),
    ("Qwen3_5TextConfig", {**_WIDE, "tie_word_embeddings": True, "attention_bias": True}),
    ("Zamba2Config", {**_SHARED_BLOCKS, "num_mem_blocks": 2}),
    (
        "Zamba2Config",
        {
            **_SHARED_BLOCKS,
            "layers_block_type": ["hybrid", "linear_attention", "hybrid"],
            "num_hidden_layers": 3,
            "mamba_ngroups": 1,
            "num_key_value_heads": 4,
            "use_shared_attention_adapter": True,
            "use_mem_rope": True,
            "add_bias_linear": True,
            "tie_word_embeddings": False,
        },
    ),
]
_EVERY_TIME = ("FalconH1Config", "JambaConfig", "Lfm2Config", "Mamba2Config", "Qwen3_5TextConfig")


def variants(kernels: tuple[str, ...]) -> list[Any]:
    """The first variant of some families with C kernels in each run, and the others in long runs."""
    found, seen = [], set()
    for number, (name, changes) in enumerate(FAMILIES):
        for kind in kernels:
            is_quick = kind == "auto" and name in _EVERY_TIME and name not in seen
            marks = () if is_quick else pytest.mark.long
            found.append(
                pytest.param(name, changes, kind, id=f"{name.removesuffix('Config')}-{number}-{kind}", marks=marks)
            )
        seen.add(name)
    return found


@pytest.mark.parametrize(("config_class", "changes", "kernels"), variants(("auto", "torch")))
def test_log_probabilities_equal_those_of_transformers(
    config_class: str, changes: dict[str, Any], kernels: str, tmp_path: Path
) -> None:
    check_log_probabilities(config_class, changes, kernels, tmp_path)


@pytest.mark.parametrize(("config_class", "changes", "kernels"), variants(("auto",)))
def test_bits_do_not_depend_on_how_a_prompt_is_cut(
    config_class: str, changes: dict[str, Any], kernels: str, tmp_path: Path
) -> None:
    if config_class == "KimiLinearConfig":
        pytest.skip("torch computes its latent attention, whose sums depend on the number of queries")
    make_model(tmp_path, config_class, changes)
    rng = random.Random(config_class)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(num)] for num in (61, 30)]
    runner = Runner.load(engine_config(tmp_path, cpu_kernels=kernels))
    runner.open_cache(64)
    found = []
    for chunk, budget in ((100, 200), (1, 1), (7, 11), (64, 40)):
        scoring = Sampling(temperature=0, prompt_logprobs=0)
        requests = [Request(prompt, sampling=scoring, max_new=3) for prompt in prompts]
        Driver(runner, 64).run(requests, chunk=chunk, budget=budget, rows=3, seed=chunk)
        found.append([(request.output, arrays(request.prompt_logprobs)[1]) for request in requests])
    for other in found[1:]:
        for (tokens, values), (expected_tokens, expected) in zip(other, found[0], strict=True):
            assert tokens == expected_tokens and np.array_equal(values, expected)
