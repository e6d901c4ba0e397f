"""Rotary tables against those of transformers."""

import msgspec
import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from pagewire.engine.checkpoint import spec as spec_module
from pagewire.engine.layers.rotary import RotaryTable
from pagewire.kernels.reference import norm_rotary

VARIANTS = {
    "default": {"rope_type": "default", "rope_theta": 500_000.0},
    "linear": {"rope_type": "linear", "factor": 3.0, "rope_theta": 10_000.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 10_000.0,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 10_000.0},
    "yarn, all fields": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 1_000_000.0,
        "beta_fast": 20.0,
        "beta_slow": 2.0,
        "mscale": 0.8,
        "mscale_all_dim": 0.5,
        "truncate": False,
    },
    "yarn, attention factor": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 10_000.0,
        "attention_factor": 1.3,
    },
}


@pytest.mark.parametrize("old_style", [False, True])
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_tables_rotate_as_transformers_does(variant, old_style, tmp_path):
    parameters = VARIANTS[variant]
    config = transformers.LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        rope_parameters=dict(parameters),
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(tmp_path)
    if old_style:
        file = tmp_path / "config.json"
        fields = msgspec.json.decode(file.read_bytes())
        scaling = fields.pop("rope_parameters")
        fields["rope_theta"] = scaling.pop("rope_theta")
        fields["rope_scaling"] = None if scaling["rope_type"] == "default" else scaling
        file.write_bytes(msgspec.json.encode(fields))
    rope = spec_module.read_spec(tmp_path).rope
    table = RotaryTable(rope, dim=32, max_len=512, dtype=torch.float32, device=torch.device("cpu"))

    positions = torch.arange(0, 512, 7)
    query = torch.randn(len(positions), 2, 32)
    cos, sin = LlamaRotaryEmbedding(config)(query, positions[None])
    expected, _ = apply_rotary_pos_emb(query[None], query[None], cos, sin, unsqueeze_dim=2)
    torch.testing.assert_close(
        norm_rotary(query, query.shape[1], None, None, 0.0, *table.at(positions)), expected[0], atol=1e-5, rtol=1e-5
    )
