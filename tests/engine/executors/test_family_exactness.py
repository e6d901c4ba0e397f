"""Logits of every family's page against transformers' own class: tiny random models, chunked and batched."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import COMMON, VOCAB_SIZE
from family_models import check_log_probabilities, make_model
from runner_driver import Driver, Request, engine_config

from pagewire.engine.runner.runner import Runner
from pagewire.errors import ConfigError

_WINDOW = {"sliding_window": 24}
_ALL_HEADS = {"num_key_value_heads": 4}

_LONGROPE = {
    "max_position_embeddings": 1024,
    "original_max_position_embeddings": 256,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0, 2.5],
        "long_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0],
    },
}

# (config class, changes of COMMON), sorted by name.
FAMILIES: list[tuple[str, dict[str, Any]]] = [
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
    ("Gemma2Config", {**_WINDOW, "query_pre_attn_scalar": 16}),
    (
        "Gemma2Config",
        {**_WINDOW, "attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True},
    ),
    ("Gemma3TextConfig", {**_WINDOW, "num_hidden_layers": 7, "tie_word_embeddings": False}),
    (
        "Gemma3TextConfig",
        {
            **_WINDOW,
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
            **_WINDOW,
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
            **_WINDOW,
            "num_hidden_layers": 3,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "attention_bias": True,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        },
    ),
    ("GemmaConfig", {}),
    ("GemmaConfig", {"attention_bias": True, "head_dim": 32, "num_key_value_heads": 1}),
    ("GraniteConfig", {"attention_multiplier": 0.2, "logits_scaling": 2.0, "residual_multiplier": 0.5}),
    ("GraniteConfig", {"embedding_multiplier": 12.0, "attention_bias": True, "mlp_bias": True}),
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
    ("MinistralConfig", {**_WINDOW, "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}),
    ("BloomConfig", {"n_layer": 3, "n_head": 4}),
    ("BloomConfig", {"n_layer": 2, "n_head": 6, "hidden_size": 96, "apply_residual_connection_post_layernorm": True}),
    ("Cohere2Config", {**_WINDOW, "num_hidden_layers": 5}),
    ("Cohere2Config", {**_WINDOW, "attention_bias": True, "tie_word_embeddings": False, "logit_scale": 0.5}),
    ("CohereConfig", {"use_qk_norm": True}),
    ("CohereConfig", {"attention_bias": True, "logit_scale": 2.0}),
    ("Exaone4Config", {**_WINDOW, "num_hidden_layers": 5}),
    ("Exaone4Config", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    ("Glm4Config", {}),
    ("Glm4Config", {"attention_bias": False, "tie_word_embeddings": True, "partial_rotary_factor": 1.0}),
    ("GlmConfig", {}),
    ("GlmConfig", {"attention_bias": False}),
    ("NemotronConfig", {}),
    ("NemotronConfig", {"attention_bias": True, "mlp_bias": True, "partial_rotary_factor": 0.25}),
    ("Olmo2Config", {}),
    ("Olmo2Config", {"attention_bias": True, "num_key_value_heads": 4, "tie_word_embeddings": True}),
    ("Olmo3Config", {**_WINDOW, "num_hidden_layers": 5}),
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
    ("Phi3Config", _LONGROPE),
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
    ("SmolLM3Config", {**_WINDOW, "use_sliding_window": True, "attention_bias": True, "no_rope_layers": [1, 0, 1]}),
]


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize(
    ("config_class", "changes"),
    FAMILIES,
    ids=[f"{name.removesuffix('Config')}-{number}" for number, (name, _) in enumerate(FAMILIES)],
)
def test_log_probabilities_equal_those_of_transformers(
    config_class: str, changes: dict[str, Any], kernels: str, tmp_path: Path
) -> None:
    check_log_probabilities(config_class, changes, kernels, tmp_path)


def test_longrope_beyond_the_original_length_is_refused(tmp_path: Path) -> None:
    make_model(tmp_path, "Phi3Config", {**_LONGROPE, "sliding_window": None})
    with pytest.raises(ConfigError, match=r"--max-model-len 257 is more than the 256 tokens"):
        Runner.load(engine_config(tmp_path, max_model_len=257))


_VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
WRAPPERS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "Gemma3": (
        {**_WINDOW, "num_hidden_layers": 7},
        {**_VISION, "image_size": 28, "patch_size": 14, "vision_use_head": False},
        {"mm_tokens_per_image": 4},
    ),
    "Gemma4": (
        {
            **_WINDOW,
            "num_hidden_layers": 6,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "num_kv_shared_layers": 3,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
        },
        {**_VISION, "num_key_value_heads": 4, "head_dim": 8, "patch_size": 14},
        {"audio_config": None},
    ),
    "Qwen3_5": (
        {
            "num_hidden_layers": 4,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
        {"depth": 1, "hidden_size": 32, "num_heads": 4, "intermediate_size": 64, "out_hidden_size": 64},
        {},
    ),
    "Mistral3": ({}, {**_VISION, "image_size": 28, "patch_size": 14, "head_dim": 8}, {}),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapper_serves_its_text(name: str, tmp_path: Path) -> None:
    """The tensors of its vision tower are not read, and the start says how many they are."""
    text, vision, rest = WRAPPERS[name]
    text = {**COMMON, "head_dim": 16, **text}
    torch.manual_seed(3)
    config: Any = getattr(transformers, f"{name}Config")
    made: Any = getattr(transformers, f"{name}ForConditionalGeneration")
    model = made(config(text_config=text, vision_config=vision, **rest))
    model.eval().save_pretrained(tmp_path)
    runner = Runner.load(engine_config(tmp_path))
    assert "tensors that are not for text" in "\n".join(runner.notes)
    runner.open_cache(64)
    prompt = list(range(5, 75))
    request = Request(prompt, max_new=6)
    Driver(runner, 64).run([request], chunk=32)
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([prompt + request.output])).logits[0, len(prompt) - 1 : -1]
    assert logits.argmax(-1).tolist() == request.output
