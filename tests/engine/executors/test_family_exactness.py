"""Logits of every family's page against transformers' own class: tiny random models, chunked and batched."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from checkpoints import COMMON, VOCAB_SIZE
from runner_driver import Driver, Request, arrays, engine_config

from pagewire.engine.checkpoint.spec import is_native, read_spec
from pagewire.engine.runner.runner import Runner
from pagewire.ipc.messages import Sampling

LENGTHS = (2, 17, 40, 100)
_WINDOW = {"sliding_window": 24}
_ALL_HEADS = {"num_key_value_heads": 4}

# (config class, changes of COMMON), sorted by name.
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("ArceeConfig", {}),
    ("ArceeConfig", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("Ernie4_5Config", {}),
    ("Ernie4_5Config", {"use_bias": True, "tie_word_embeddings": False}),
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
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
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
    ("SeedOssConfig", {}),
    ("SeedOssConfig", {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True}),
    ("SmolLM3Config", {"num_hidden_layers": 5}),
    ("SmolLM3Config", {**_WINDOW, "use_sliding_window": True, "attention_bias": True, "no_rope_layers": [1, 0, 1]}),
]


def make_model(folder: Path, config_class: str, changes: dict[str, Any]) -> Any:
    """Writes a random model; returns transformers' model of it, as read from the file."""
    config: Any = getattr(transformers, config_class)(**{**COMMON, **changes})
    torch.manual_seed(3)
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:  # norms and biases are ones and zeros by default, which would hide mistakes
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize(
    ("config_class", "changes"),
    FAMILIES,
    ids=[f"{name.removesuffix('Config')}-{number}" for number, (name, _) in enumerate(FAMILIES)],
)
def test_log_probabilities_equal_those_of_transformers(
    config_class: str, changes: dict[str, Any], kernels: str, tmp_path: Path
) -> None:
    model = make_model(tmp_path, config_class, changes)
    spec = read_spec(tmp_path)
    assert is_native(spec), f"{json.loads((tmp_path / 'config.json').read_text())}: {spec.why_not_described}"
    rng = random.Random(config_class)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(num)] for num in LENGTHS]
    runner = Runner.load(engine_config(tmp_path, cpu_kernels=kernels))
    runner.open_cache(64)
    scoring = Sampling(temperature=0, prompt_logprobs=0)
    requests = [Request(prompt, sampling=scoring, max_new=1) for prompt in prompts]
    Driver(runner, 64).run(requests, chunk=16, budget=50, rows=3, seed=2)
    for request in requests:
        with torch.inference_mode():
            logits = model(torch.tensor([request.prompt])).logits[0]
        expected = logits[:-1].log_softmax(-1).gather(1, torch.tensor(request.prompt[1:])[:, None])[:, 0].numpy()
        _, values = arrays(request.prompt_logprobs)
        assert np.abs(values[:, 0] - expected).max() < 2e-3
        assert request.output == [int(logits[-1].argmax())]
