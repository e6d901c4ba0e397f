"""Architectures of transformers, and whether pagewire serves each: one line per family.

`make_family` writes a tiny random checkpoint. Fields common to most config classes get small values wherever a class
has them. A line adds further fields that a family needs.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import checkpoints
import torch
import transformers
import vocabulary
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

SERVED = ""

_SIZES: dict[str, Any] = {
    **checkpoints.COMMON,
    "sliding_window": 24,
    # mixtures of experts
    **{"num_experts": 4, "n_routed_experts": 4, "num_local_experts": 4, "moe_num_experts": 4, "n_shared_experts": 1},
    **{"num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_k": 2, "n_group": 1, "topk_group": 1},
    **{"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "first_k_dense_replace": 1},
    # latent and sparse attention
    **{"q_lora_rank": 8, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12},
    **{"index_topk": 4, "index_n_heads": 2, "index_head_dim": 16},
}
_ALWAYS = {"vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range"}

_RECURRENT = r"it has layers with a recurrent state{}, and pagewire does not describe this family"
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_d_ssm": 128}
_DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
_KIMI = {
    "linear_num_heads": 4, "linear_head_dim": 16, "num_key_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
_NEMOTRON = {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2}
_MLA = r"multi-head latent attention \(MLA\)"
_SINKS = "attention sinks"
_OWN_CODE = "computes attention in code of its own"
_NOT_DESCRIBED = ", and pagewire does not describe this family"
_ENCODER_DECODER = r"has an encoder beside its decoder \(encoder-decoder model\)" + _NOT_DESCRIBED
_BOTH_WAYS = r"tokens see those that follow them \(bidirectional attention\)"
_IMAGES = r"has inputs other than text \(images\)" + _NOT_DESCRIBED

# model_type → (further fields of its config, SERVED or a pattern of the reason why it is refused).
FAMILIES: dict[str, tuple[dict[str, Any], str]] = {
    **{
        kind: ({}, SERVED)
        for kind in (
            "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe",  # native
            
                "afmoe",
                "apertus",
                "arcee",
                "aria_text",
                "beam",
                "bitnet",
                "cohere",
                "cohere2",
                "cohere2_moe",
                "ctrl",
                "cwm",
                "dots1",
            "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe", "flex_olmo", "gemma", "gemma2", "gemma3_text",
            "glm", "glm4", "glm4_moe", "gpt2", "gpt_bigcode", "gpt_neox", "granite", "granitemoe",
            "granitemoeshared", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "hyperclovax", "jais2", "jetmoe",
            
                "hy_v3",
                "kolibri1",
                "laguna",
                "mellum",
                "minimax_m2",
                "ministral",
                "ministral3",
                "modernbert-decoder",
                "nanochat",
                "olmo",
                "olmo2",
            "olmo3", "olmoe", "opt", "persimmon", "phi", "phi3", "qwen2_moe", "seed_oss", "smollm3",
            "solar_open", "starcoder2", "vaultgemma",
        )
    },
    "phimoe": ({"sliding_window": 1024}, SERVED),  # its attention does not get the window, which is the whole context
    "granitemoehybrid": ({**_MAMBA, "layer_types": ["mamba", "attention", "mamba"]}, SERVED),
    "lfm2": ({"layer_types": ["conv", "full_attention", "conv"]}, SERVED),
    "lfm2_moe": ({"layer_types": ["conv", "full_attention", "conv"]}, SERVED),
    "diffllama": ({}, "calls attention more than once in layer 0, and pagewire caches one set of keys and values"),
    "hrm_text": ({}, "calls attention more than once in layer 0"),
    "doge": ({}, r"scores with terms that pagewire does not support \(attention_mask\)"),
    "bert": ({}, _BOTH_WAYS),
    "roberta": (
        {"is_decoder": True},
        r"in a trial of 64 random positions \d+ tokens differ from those of its own forward pass",
    ),
    **{
        kind: ({}, _OWN_CODE)
        for kind in ("biogpt", "openai-gpt", "xglm", "xlm")
    },
    "codegen": ({}, r"does not run with another attention than transformers' own"),
    "gpt_neo": ({"num_hidden_layers": 2, "attention_types": [[["global", "local"], 1]]}, _OWN_CODE),
    "gpt_oss": ({}, SERVED),
    "granite_swa": ({}, SERVED),
    "granitemoe_swa": ({}, _SINKS),
    **{kind: ({"num_key_value_heads": 4}, SERVED) for kind in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")},
    **{kind: ({"num_key_value_heads": 4}, SERVED) for kind in ("minicpm3", "youtu")},
    "minimax_m3_vl_text": (
        {"layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"], "index_n_heads": 2},
        "has sparse attention",
    ),
    "mimo_v2_flash": ({"head_dim": 48, "v_head_dim": 32}, SERVED),
    "longcat_flash": ({"num_layers": 2, "zero_expert_num": 2, "head_dim": 8, "num_key_value_heads": 4}, SERVED),
    **{kind: ({}, _MLA + ".*sparse attention") for kind in ("deepseek_v32", "glm_moe_dsa")},
    "bamba": ({**_MAMBA, "attn_layer_indices": [1]}, SERVED),
    "falcon_h1": (_MAMBA, SERVED),
    "jamba": ({"attn_layer_period": 3, "attn_layer_offset": 1}, SERVED),
    **{kind: ({}, SERVED) for kind in ("mamba", "falcon_mamba", "minimax")},
    "mamba2": ({"num_heads": 8, "head_dim": 16}, SERVED),
    "nemotron_h": ({**_NEMOTRON, "layers_block_type": ["mamba", "moe", "attention", "mlp"]}, SERVED),
    "kimi_linear": (_KIMI, SERVED),
    **{
        kind: ({**_DELTA, "num_hidden_layers": 4}, SERVED)
        for kind in ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
    },
    "olmo_hybrid": ({**_DELTA, "linear_value_head_dim": 8}, SERVED),  # transformers writes equal parts
    "lfm3": ({}, _RECURRENT.format(r" \(short convolutions\)")),
    "recurrent_gemma": ({}, _RECURRENT.format(r" \(linear attention\)")),
    **{kind: ({}, _RECURRENT.format("")) for kind in ("rwkv", "xlstm")},
    "llama4_text": (
        {"intermediate_size_mlp": 80, "attention_chunk_size": 32, "no_rope_layer_interval": 2}, SERVED,
    ),
    "zamba2": (
        {
            "layers_block_type": ["linear_attention", "hybrid", "hybrid", "linear_attention", "hybrid"],
            **{"num_hidden_layers": 5, "num_mem_blocks": 2, "n_mamba_heads": 8, "mamba_d_state": 16},
            **{"mamba_ngroups": 2, "adapter_rank": 8, "use_shared_attention_adapter": True, "use_mem_rope": True},
            **{"head_dim": 32, "num_key_value_heads": 4},
            "time_step_min": 1e-9,  # transformers has this limit in prompts, but not in single steps
        },
        SERVED,
    ),
    **{kind: ({}, SERVED) for kind in ("bloom", "falcon", "nemotron", "stablelm")},
    "gptj": ({"rotary_dim": 8}, SERVED),
    "mpt": ({"d_model": 64, "n_heads": 4, "n_layers": 3}, SERVED),
    "gemma3n_text": (
        {
            **{"num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3},
            **{"num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.75, 0.5, 0.0, 0.0, 0.0, 0.0]},
            **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 300, "laurel_rank": 8},
        },
        SERVED,
    ),
    "gemma4_text": (
        {
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": checkpoints.VOCAB_SIZE,
        },
        SERVED,
    ),
    **{kind: ({}, "has the decoder of an encoder-decoder model") for kind in ("bart", "marian", "pegasus")},
}  # fmt: skip

# Families that are refused by their config alone: model_type → (architecture, pattern of the reason).
BY_CONFIG: dict[str, tuple[str, str]] = {
    "paligemma": ("PaliGemmaForConditionalGeneration", _IMAGES),
    "m2m_100": ("M2M100ForConditionalGeneration", _ENCODER_DECODER),
    "whisper": ("WhisperForConditionalGeneration", _ENCODER_DECODER),
}

# Served by descriptions only: the fallback has no attention of their kind.
ONLY_DESCRIBED = {
    "gpt_oss", "llama4_text", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "gemma4_text", "bloom", "falcon",
    "mpt", "nemotron", "stablelm", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear",
    "lfm2", "lfm2_moe", "mamba", "mamba2", "minimax", "nemotron_h", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next",
    "granite_swa", "minicpm3", "youtu", "gemma3n_text", "longcat_flash", "mimo_v2_flash",
    "zamba2", "olmo_hybrid",
}  # fmt: skip

# For these, only the comparison with transformers after loading shows the reason.
ONLY_WEIGHTS_TELL = {"roberta"}


def tiny(model_type: str) -> Any:
    """transformers' config of a small model."""
    config_class: Any = transformers.CONFIG_MAPPING[model_type]
    names = {field.name for field in dataclasses.fields(config_class)} | {*config_class.attribute_map} | _ALWAYS
    fields = {name: value for name, value in _SIZES.items() if name in names}
    return config_class(**fields | FAMILIES.get(model_type, ({}, ""))[0])


def tiny_config(model_type: str) -> dict[str, Any]:
    """The fields of config.json of a small model, without a file."""
    found: dict[str, Any] = json.loads(tiny(model_type).to_json_string(use_diff=False))
    return found


def make_family(folder: Path, model_type: str) -> Path:
    """Writes a checkpoint with a tokenizer into `folder`; for families of `BY_CONFIG`, only the config."""
    config_class: Any = transformers.CONFIG_MAPPING[model_type]
    if model_type in BY_CONFIG:
        config = config_class()
        config.architectures = [BY_CONFIG[model_type][0]]
        config.save_pretrained(folder)
        return folder
    config = tiny(model_type)
    state = torch.get_rng_state()
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    torch.set_rng_state(state)
    model.save_pretrained(folder)
    named = json.loads((folder / "config.json").read_text())["architectures"]
    assert named == [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]]
    vocabulary.add_tokenizer(folder)
    return folder
