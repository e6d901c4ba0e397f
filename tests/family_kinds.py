"""Tiny random checkpoints of every described family: variants of each, with and without biases, windows, groups, …"""

from pathlib import Path
from typing import Any

import torch
import transformers
from checkpoints import COMMON, VOCAB_SIZE

Kind = tuple[str, dict[str, Any]]  # the config class, and fields that differ from COMMON; None: the field is left out

WINDOW = {"sliding_window": 24}

LONGROPE: dict[str, Any] = {
    "max_position_embeddings": 1024,
    "original_max_position_embeddings": 256,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0, 2.5],
        "long_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0],
    },
}

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
# Of sizes that the Triton kernels have.
LATENT_ON_GPU: dict[str, Any] = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "head_dim": 16,
    "num_key_value_heads": 4,
}
FEW_EXPERTS: dict[str, Any] = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}
_GEMMA4 = {
    "sliding_window": 24,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}
_GROUPS = {"n_group": 4, "topk_group": 2}

# Sorted by name.
DENSE: list[Kind] = [
    ("ApertusConfig", {}),
    ("ApertusConfig", {"attention_bias": True, "tie_word_embeddings": True, "hidden_act": "relu2"}),
    ("ArceeConfig", {}),
    ("ArceeConfig", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("Ernie4_5Config", {}),
    ("Ernie4_5Config", {"use_bias": True, "tie_word_embeddings": False}),
    ("FalconConfig", {}),
    ("FalconConfig", {"multi_query": False, "parallel_attn": False, "bias": True}),
    ("FalconConfig", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    ("FalconConfig", {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}),
    ("FalconConfig", {"alibi": True, "multi_query": False, "bias": True, "tie_word_embeddings": False}),
    ("GPT2Config", {}),
    ("GPT2Config", {"scale_attn_by_inverse_layer_idx": True, "tie_word_embeddings": False, "n_inner": 100}),
    ("GPTBigCodeConfig", {}),
    ("GPTBigCodeConfig", {"multi_query": False, "n_head": 4, "num_key_value_heads": 4}),
    ("GPTJConfig", {"rotary_dim": 8}),
    ("GPTJConfig", {"rotary_dim": 16, "n_inner": 100}),
    ("GPTNeoXConfig", {}),
    ("GPTNeoXConfig", {"use_parallel_residual": False, "attention_bias": False, "rotary_pct": 1.0}),
    ("Gemma2Config", {**WINDOW, "query_pre_attn_scalar": 16}),
    (
        "Gemma2Config",
        {**WINDOW, "attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True},
    ),
    ("Gemma3TextConfig", {**WINDOW, "num_hidden_layers": 7, "tie_word_embeddings": False}),
    (
        "Gemma3TextConfig",
        {
            **WINDOW,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 32,
            "final_logit_softcapping": 20.0,
            "attn_logit_softcapping": 5.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    (
        "Gemma4TextConfig",
        {
            **WINDOW,
            "num_hidden_layers": 6,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "final_logit_softcapping": 30.0,
        },
    ),
    (
        "Gemma4TextConfig",
        {
            **WINDOW,
            "num_hidden_layers": 3,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "attention_bias": True,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        },
    ),
    (
        "Gemma3nTextConfig",
        {
            **WINDOW,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_kv_shared_layers": 2,
            "activation_sparsity_pattern": [0.75, 0.5, 0.0, 0.0, 0.25, 0.0],
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB_SIZE - 20,
            "laurel_rank": 8,
        },
    ),
    (
        "Gemma3nTextConfig",
        {
            **WINDOW,
            "num_hidden_layers": 5,
            "num_kv_shared_layers": 0,
            "intermediate_size": [96, 64, 128, 96, 64],
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "altup_num_inputs": 3,
            "altup_active_idx": 1,
            "altup_correct_scale": False,
            "laurel_rank": 12,
            "final_logit_softcapping": 5.0,
        },
    ),
    ("GemmaConfig", {}),
    ("GemmaConfig", {"attention_bias": True, "head_dim": 32, "num_key_value_heads": 1}),
    ("GraniteConfig", {"attention_multiplier": 0.2, "logits_scaling": 2.0, "residual_multiplier": 0.5}),
    ("GraniteConfig", {"embedding_multiplier": 12.0, "attention_bias": True, "mlp_bias": True}),
    ("GraniteSWAConfig", {**WINDOW, "num_hidden_layers": 5, "attention_multiplier": 0.2, "logits_scaling": 2.0}),
    (
        "GraniteSWAConfig",
        {**WINDOW, "layer_rope_theta": [0, 1e4, 5e5], "residual_multiplier": 0.5, "tie_word_embeddings": False},
    ),
    ("HeliumConfig", {}),
    ("HeliumConfig", {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
    ("HunYuanDenseV1Config", {}),
    (
        "HunYuanDenseV1Config",
        {"rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 1e4}},
    ),
    ("HyperCLOVAXConfig", {"residual_multiplier": 0.5, "logits_scaling": 0.5}),
    ("HyperCLOVAXConfig", {"use_post_norm": False, "attention_multiplier": 0.1, "attention_bias": True}),
    ("Ministral3Config", {}),
    ("MinistralConfig", {**WINDOW, "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}),
    ("BloomConfig", {"n_layer": 3, "n_head": 4}),
    ("BloomConfig", {"n_layer": 2, "n_head": 6, "hidden_size": 96, "apply_residual_connection_post_layernorm": True}),
    ("Cohere2Config", {**WINDOW, "num_hidden_layers": 5}),
    ("Cohere2Config", {**WINDOW, "attention_bias": True, "tie_word_embeddings": False, "logit_scale": 0.5}),
    ("CohereConfig", {"use_qk_norm": True}),
    ("CohereConfig", {"attention_bias": True, "logit_scale": 2.0}),
    ("CwmConfig", {**WINDOW, "num_hidden_layers": 5}),
    ("CwmConfig", {**WINDOW, "layer_types": ["sliding_attention", "full_attention", "full_attention"]}),
    ("Exaone4Config", {**WINDOW, "num_hidden_layers": 5}),
    ("Exaone4Config", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    ("Glm4Config", {}),
    ("Glm4Config", {"attention_bias": False, "tie_word_embeddings": True, "partial_rotary_factor": 1.0}),
    ("GlmConfig", {}),
    ("GlmConfig", {"attention_bias": False}),
    ("NemotronConfig", {}),
    ("NemotronConfig", {"attention_bias": True, "mlp_bias": True, "partial_rotary_factor": 0.25}),
    ("Olmo2Config", {}),
    ("Olmo2Config", {"attention_bias": True, "num_key_value_heads": 4, "tie_word_embeddings": True}),
    ("Olmo3Config", {**WINDOW, "num_hidden_layers": 5}),
    (
        "Olmo3Config",
        {
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "sliding_window": 40,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "factor": 8.0,
                    "rope_theta": 5e5,
                    "original_max_position_embeddings": 64,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
            },
        },
    ),
    ("OlmoConfig", {}),
    ("OlmoConfig", {"clip_qkv": 0.5, "attention_bias": True, "tie_word_embeddings": True}),
    ("MptConfig", {"d_model": 64, "n_heads": 4, "n_layers": 3}),
    ("MptConfig", {"d_model": 96, "n_heads": 6, "n_layers": 2, "attn_config": {"clip_qkv": 0.5}}),
    ("OPTConfig", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    ("OPTConfig", {"ffn_dim": 96, "word_embed_proj_dim": 32, "do_layer_norm_before": False}),
    ("OPTConfig", {"ffn_dim": 96, "enable_bias": False, "layer_norm_elementwise_affine": False}),
    ("Phi3Config", {"sliding_window": None}),
    ("Phi3Config", {"sliding_window": 24, "partial_rotary_factor": 0.5, "tie_word_embeddings": True}),
    ("Phi3Config", LONGROPE),
    ("PhiConfig", {}),
    ("PhiConfig", {"partial_rotary_factor": 0.25, "num_key_value_heads": 4}),
    ("StableLmConfig", {}),
    ("StableLmConfig", {"use_qkv_bias": True, "qk_layernorm": True}),
    ("StableLmConfig", {"use_parallel_residual": True, "num_key_value_heads": 4}),
    ("Starcoder2Config", {}),
    ("Starcoder2Config", {"sliding_window": 24, "use_bias": False, "tie_word_embeddings": False}),
    (
        "Ministral3Config",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 16.0,
                "original_max_position_embeddings": 32,
                "max_position_embeddings": 512,
                "llama_4_scaling_beta": 0.3,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
    ),
    ("SeedOssConfig", {}),
    ("SeedOssConfig", {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True}),
    ("SmolLM3Config", {"num_hidden_layers": 5}),
    ("SmolLM3Config", {**WINDOW, "use_sliding_window": True, "attention_bias": True, "no_rope_layers": [1, 0, 1]}),
]

EXPERTS: list[Kind] = [
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
    ("Dots1Config", {**_EXPERTS, "first_k_dense_replace": 1}),
    (
        "Dots1Config",
        {**_EXPERTS, **_GROUPS, "norm_topk_prob": True, "attention_bias": True, "sliding_window": 24,
         "max_window_layers": 1, "n_shared_experts": 2, "routed_scaling_factor": 2.5},
    ),
    ("Ernie4_5_MoeConfig", {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 32}),
    (
        "Ernie4_5_MoeConfig",
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 0,
         "moe_layer_interval": 2, "moe_layer_start_index": 0, "tie_word_embeddings": False},
    ),
    (
        "Ernie4_5_MoeConfig",
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "use_bias": True,
         "tie_word_embeddings": False},
    ),
    ("Ernie4_5_MoeConfig", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "use_bias": True}),
    ("ExaoneMoeConfig", {**WINDOW, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}),
    (
        "ExaoneMoeConfig",
        {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "sliding_window": 40, **_GROUPS,
         "layer_types": ["full_attention"] * 3, "num_shared_experts": 2, "norm_topk_prob": False},
    ),
    (
        "Gemma4TextConfig",
        {**_GEMMA4, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    ),
    (
        "Gemma4TextConfig",
        {**_GEMMA4, "enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 48,
         "attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0},
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
    (
        "LongcatFlashConfig",
        {**_LATENT, "num_layers": 2, "q_lora_rank": 24, "n_routed_experts": 4,
         "zero_expert_num": 3, "moe_topk": 3, "expert_ffn_hidden_size": 32},
    ),
    (
        "LongcatFlashConfig",
        {**_LATENT, "num_layers": 1, "q_lora_rank": 16, "n_routed_experts": 8,
         "zero_expert_num": 0, "moe_topk": 2, "expert_ffn_hidden_size": 48, "routed_scaling_factor": 1.5,
         "attention_bias": True, "rope_parameters": _YARN},
    ),
    ("MiMoV2FlashConfig", {**_EXPERTS, **WINDOW, "head_dim": 48, "v_head_dim": 32, "num_key_value_heads": 1}),
    (
        "MiMoV2FlashConfig",
        {**_EXPERTS, **_GROUPS, **WINDOW, "head_dim": 24, "v_head_dim": 40, "attention_bias": True,
         "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
         "mlp_layer_types": ["sparse", "sparse", "dense"], "attention_value_scale": None, "norm_topk_prob": False,
         "rope_parameters": {
             "full_attention": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
             "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
         }},
    ),
    ("MiniMaxM2Config", {"num_local_experts": 8, "num_experts_per_tok": 3}),
    ("MiniMaxM2Config", {"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 8}),
    ("MiniCPM3Config", {**_LATENT, "q_lora_rank": 24, "scale_depth": 0.7, "dim_model_base": 16, "head_dim": None}),
    ("MiniCPM3Config", {**_LATENT, "q_lora_rank": None, "attention_bias": True, "scale_emb": 3, "head_dim": None}),
    ("Mistral4Config", {**_EXPERTS, **_LATENT, "q_lora_rank": 24, "first_k_dense_replace": 1, "head_dim": None}),
    (
        "Mistral4Config",
        {**_EXPERTS, **_LATENT, **_GROUPS, "q_lora_rank": None, "rope_interleave": False, "norm_topk_prob": False,
         "routed_scaling_factor": 2.0, "attention_bias": True, "head_dim": None,
         "rope_parameters": {**_YARN, "original_max_position_embeddings": 32, "llama_4_scaling_beta": 0.3}},
    ),
    ("OlmoeConfig", {"num_experts": 8, "num_experts_per_tok": 3, "head_dim": None}),
    ("OlmoeConfig", {"num_experts": 4, "norm_topk_prob": True, "attention_bias": True, "num_experts_per_tok": 2}),
    ("PhimoeConfig", {"num_local_experts": 4, "head_dim": None, "lm_head_bias": True}),
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
    ("SolarOpenConfig", {**_EXPERTS}),
    ("SolarOpenConfig", {**_EXPERTS, **_GROUPS, "attention_bias": True, "routed_scaling_factor": 2.0}),
    ("YoutuConfig", {**_LATENT, "q_lora_rank": 24}),
    ("YoutuConfig", {**_LATENT, "q_lora_rank": None, "rope_interleave": False, "tie_word_embeddings": False}),
]  # fmt: skip


def ids_of(kinds: list[Kind]) -> list[str]:
    """A name for each: the family and its number there."""
    names = [name.removesuffix("Config") for name, _ in kinds]
    return [f"{name}-{names[:i].count(name)}" for i, name in enumerate(names)]


KINDS: dict[str, Kind] = dict(zip(ids_of(DENSE + EXPERTS), DENSE + EXPERTS, strict=True))


def make_kind(folder: Path, config_class: str, changes: dict[str, Any]) -> Path:
    """Writes a random model. What begins as zeros or ones, or too small to matter, gets other values, so that no
    mistake is hidden."""
    made: Any = getattr(transformers, config_class)
    names = {*made.__dataclass_fields__, *made.attribute_map, "initializer_range"}
    common = {name: value for name, value in COMMON.items() if name in names}
    fields = {name: value for name, value in (common | changes).items() if value is not None or name != "head_dim"}
    state = torch.get_rng_state()
    torch.manual_seed(len(config_class) + len(changes))
    model = _class_of(config_class).from_config(made(**fields), dtype=torch.float32)
    with torch.no_grad():
        for name, values in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("inv_freq") or not values.is_floating_point():
                continue
            if "bias" in name or name.endswith(("sinks", "gate.weight", "router.weight", "wg.weight")):
                values.normal_(std=0.2)
            elif "experts" in name:
                values.normal_(std=0.25)
            elif values.ndim == 1:
                values.add_(torch.randn_like(values) * 0.2)
    torch.set_rng_state(state)
    model.save_pretrained(folder)
    return folder


def load_kind(folder: Path, config_class: str, changes: dict[str, Any]) -> Any:
    """transformers' model of a folder."""
    # Falcon's eager attention adds the position biases twice: as part of the mask, and to the scores.
    kind = "sdpa" if changes.get("alibi") else "eager"
    auto = _class_of(config_class)
    return auto.from_pretrained(folder, dtype=torch.float32, attn_implementation=kind).eval()


def _class_of(config_class: str) -> Any:
    """Mistral 4 is not among transformers' causal models."""
    is_wrapped = config_class == "Mistral4Config"
    return transformers.AutoModelForImageTextToText if is_wrapped else transformers.AutoModelForCausalLM
