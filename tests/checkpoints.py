"""Makes tiny checkpoints with random weights, and generates reference tokens with transformers.

The weights have a large variance, so that the best token leads clearly and outputs differ between prompts.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB_SIZE = 320
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "initializer_range": 0.25,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

# Of models with an encoder, in T5's and BART's words; fields of the other are of no account.
_ENCODER_DECODER: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 96,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "relative_attention_num_buckets": 12,
    "relative_attention_max_distance": 40,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 80,
    "max_position_embeddings": 1024,
    "n_positions": 1024,
    "init_std": 0.25,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
    "forced_eos_token_id": None,
}

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"rope_parameters": _LLAMA3_ROPE}),
    "llama-biased": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {"sliding_window": 40}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2-sliding": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", {"tie_word_embeddings": True}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3_moe-sparse": (
        "Qwen3MoeConfig",
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "decoder_sparse_step": 2,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 24,
        },
    ),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 40}),
    "gemma2": ("Gemma2Config", {"sliding_window": 24, "query_pre_attn_scalar": 16, "tie_word_embeddings": False}),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "sliding_window": 40,
            "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gpt_neox": ("GPTNeoXConfig", {"rotary_pct": 0.5}),
    "phi3": ("Phi3Config", {"sliding_window": None}),
    "granite": ("GraniteConfig", {"attention_multiplier": 0.2, "logits_scaling": 2.0, "residual_multiplier": 0.5}),
    "persimmon": ("PersimmonConfig", {}),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 4}),
    "qwen3_5": (
        "Qwen3_5TextConfig",
        {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
    ),
    "bamba": (
        "BambaConfig",
        {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_expand": 2},
    ),
    "jamba": (
        "JambaConfig",
        {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4, "mamba_d_state": 8},
    ),
    "minimax": (
        "MiniMaxConfig",
        {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "t5": ("T5Config", {}),
    "t5-gated": ("T5Config", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "mt5": ("MT5Config", {"feed_forward_proj": "gated-gelu"}),
    "umt5": ("UMT5Config", {"feed_forward_proj": "gated-gelu"}),
    "bart": ("BartConfig", {"forced_bos_token_id": 1, "decoder_start_token_id": 2}),
    "plbart": ("PLBartConfig", {}),
    "mbart": ("MBartConfig", {"scale_embedding": True}),
    "blenderbot": ("BlenderbotConfig", {"activation_function": "relu"}),
    "mamba2": ("Mamba2Config", {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2}),
    "zamba2": (
        "Zamba2Config",
        {
            "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
            "num_hidden_layers": 4,
            "n_mamba_heads": 8,
            "mamba_d_state": 16,
            "mamba_ngroups": 2,
            "adapter_rank": 8,
            "head_dim": 32,
            "use_mem_rope": True,
            "time_step_min": 1e-9,  # transformers has this limit in prompts, but not in single steps
        },
    ),
}
"""Kind → its config class and the fields that differ from COMMON, or from _ENCODER_DECODER."""
ENCODER_DECODERS = ("t5", "t5-gated", "mt5", "umt5", "bart", "plbart", "mbart", "blenderbot")


def common(kind: str) -> dict[str, Any]:
    """The fields of the config that kinds like this one share."""
    return _ENCODER_DECODER if kind in ENCODER_DECODERS else COMMON


def own_spread(kind: str) -> float:
    """Of matrices of models with an encoder: norms behind each part keep what a part adds small."""
    return 0.5 if "bart" in kind or kind == "blenderbot" else 0.25


def make_checkpoint(
    folder: Path, kind: str, *, dtype: torch.dtype = torch.float32, shard_size: str = "1GB", **changes: Any
) -> Path:
    """Writes config.json and safetensors of a random model of this kind into `folder`."""
    config_class, own = KINDS[kind]
    config = getattr(transformers, config_class)(**{**common(kind), **own, **changes})
    generator_state = torch.get_rng_state()
    torch.manual_seed(len(kind))
    model_class = _class_of(config)
    model = model_class.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # zero by default, which would hide a bias in the wrong place
                parameter.normal_(std=0.2)
            if kind in ENCODER_DECODERS and parameter.dim() > 1:  # their own spreads would make all outputs alike
                spreads = {"relative": 1.0, "embed_positions": 0.3, "shared": 0.1}
                parameter.normal_(std=next((x for part, x in spreads.items() if part in name), own_spread(kind)))
            if "norm" in name and name.endswith("weight"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    torch.set_rng_state(generator_state)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard_size)
    return folder


def damage(folder: Path, *, is_noticed: bool = False) -> None:
    """Overwrites all tensors: whoever reads them gets other tokens. is_noticed: the fingerprint differs afterwards."""
    for file in folder.glob("*.safetensors"):
        status, data = file.stat(), bytearray(file.read_bytes())
        first = 8 + int.from_bytes(data[:8], "little")
        data[first:] = bytes(len(data) - first)
        file.write_bytes(data)
        if not is_noticed:
            os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def load_reference(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' model of this folder, with eager attention."""
    model_class = _class_of(transformers.AutoConfig.from_pretrained(folder))
    return model_class.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


def _class_of(config: Any) -> Any:
    return transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM


def reference_greedy(
    folder: Path, prompts: list[list[int]], max_new_tokens: int, change: Callable[[Any], None] | None = None
) -> list[list[int]]:
    """What transformers' `generate` gives for each prompt, one at a time, in float32; without stopping at eos. change:
    called with the model before."""
    model = load_reference(folder)
    if change is not None:
        change(model)
    model.generation_config.eos_token_id = None
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            do_sample=False,
        )
        num_before = len(prompt)
        if model.config.is_encoder_decoder:
            num_before = 1 + (model.generation_config.forced_bos_token_id is not None)
        outputs.append(out[0, num_before:].tolist())
    return outputs
