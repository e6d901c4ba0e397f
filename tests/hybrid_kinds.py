"""Families with recurrent layers: variants of each, with and without biases, norms, groups, …"""

from typing import Any

from family_kinds import Kind, ids_of

_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_expand": 2}
_DELTA = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_WIDE = {**_DELTA, "linear_num_value_heads": 6, "linear_value_head_dim": 24, "linear_conv_kernel_dim": 3}
# transformers writes the convolution's channels in three equal parts, whatever the widths of queries, keys and values.
_EQUAL = {**_DELTA, "linear_key_head_dim": 32}
_EQUAL_WIDE = {**_WIDE, "linear_key_head_dim": 24, "linear_value_head_dim": 8}
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
    ("OlmoHybridConfig", _EQUAL),
    (
        "OlmoHybridConfig",
        {
            **_EQUAL_WIDE,
            "linear_allow_neg_eigval": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": None},
            "attention_bias": True,
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
RECURRENT: dict[str, Kind] = dict(zip(ids_of(FAMILIES), FAMILIES, strict=True))

# That three ranks can divide.
_SIX = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}
_TWELVE = {**_SIX, "mamba_n_heads": 12, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_expand": 2}
_BY_THREE: list[Kind] = [
    ("BambaConfig", {**_TWELVE, "mamba_n_groups": 1, "attn_layer_indices": [1]}),
    ("BambaConfig", {**_TWELVE, "mamba_n_groups": 6, "attn_layer_indices": [1]}),
    ("FalconH1Config", {**_TWELVE, "mamba_n_groups": 1, "mamba_d_ssm": 192, "mamba_rms_norm": True}),
    ("FalconMambaConfig", {"hidden_size": 96, "use_bias": True}),
    (
        "GraniteMoeHybridConfig",
        {**_TWELVE, **_ENDS, "mamba_n_groups": 3, "num_local_experts": 4, "shared_intermediate_size": 48},
    ),
    ("JambaConfig", {**_SIX, "attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 4, "mamba_d_state": 8}),
    ("Lfm2Config", {**_SIX, **_CONV, "block_auto_adjust_ff_dim": False}),
    ("Mamba2Config", {"hidden_size": 96, "num_heads": 12, "head_dim": 16, "n_groups": 1, "state_size": 16}),
    ("MambaConfig", {"hidden_size": 96}),
    ("MiniMaxConfig", {**_SIX, **_ENDS, "num_local_experts": 4}),
    (
        "NemotronHConfig",
        {
            **_HYBRID, **_SIX, "mamba_num_heads": 12, "n_groups": 1, "moe_shared_expert_intermediate_size": 48,
            "moe_intermediate_size": 48, "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        },
    ),
]  # fmt: skip
BY_THREE: dict[str, Kind] = {f"{name}-by-three": kind for name, kind in zip(ids_of(_BY_THREE), _BY_THREE, strict=True)}
