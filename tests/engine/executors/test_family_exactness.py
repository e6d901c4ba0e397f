"""Logits of every family's page against transformers' own class: tiny random models, chunked and batched."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import COMMON, VOCAB_SIZE
from family_kinds import DENSE, LONGROPE, WINDOW, ids_of, make_kind
from family_models import check_log_probabilities
from runner_driver import Driver, Request, engine_config

from pagewire.engine.runner.runner import Runner
from pagewire.errors import ConfigError


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize(
    ("config_class", "changes"),
    DENSE,
    ids=ids_of(DENSE),
)
def test_log_probabilities_equal_those_of_transformers(
    config_class: str, changes: dict[str, Any], kernels: str, tmp_path: Path
) -> None:
    check_log_probabilities(config_class, changes, kernels, tmp_path)


def test_longrope_beyond_the_original_length_is_refused_but_for_phi_3(tmp_path: Path) -> None:
    """transformers' Phi-3.5-MoE keeps the short factors, and other classes mix both in one sequence."""
    scales: dict[str, Any] = {"short_mscale": 1.2, "long_mscale": 1.2}
    changes: dict[str, Any] = {**LONGROPE, "rope_parameters": {**LONGROPE["rope_parameters"], **scales}}
    make_kind(tmp_path, "PhimoeConfig", {**changes, "num_local_experts": 4, "head_dim": None})
    with pytest.raises(ConfigError, match=r"--max-model-len 257 is more than the 256 tokens"):
        Runner.load(engine_config(tmp_path, max_model_len=257))


_VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
WRAPPERS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "Gemma3": (
        {**WINDOW, "num_hidden_layers": 7},
        {**_VISION, "image_size": 28, "patch_size": 14, "vision_use_head": False},
        {"mm_tokens_per_image": 4},
    ),
    "Gemma4": (
        {
            **WINDOW,
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
