"""Rotary tables against those of transformers."""

import msgspec
import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from pagewire.engine.checkpoint.spec import read_spec
from pagewire.engine.executors.rotary import RotaryTable, inverse_frequencies, places_of
from pagewire.engine.models.description import Attention, Rope

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
    attention = read_spec(tmp_path).decoder.blocks[0].sublayers[0].branches[0].body
    assert isinstance(attention, Attention) and attention.rope is not None
    table = RotaryTable(attention.rope, max_len=512, dtype=torch.float32, device=torch.device("cpu"))

    positions = torch.arange(0, 512, 7)
    query = torch.randn(len(positions), 2, 32)
    cos, sin = LlamaRotaryEmbedding(config)(query, positions[None])
    expected, _ = apply_rotary_pos_emb(query[None], query[None], cos, sin, unsqueeze_dim=2)
    ours_cos, ours_sin = table.at(positions)
    found = query * ours_cos + query.roll(16, -1) * ours_sin
    torch.testing.assert_close(found, expected[0], atol=1e-5, rtol=1e-5)


def test_longrope_divides_the_frequencies_by_its_short_factors():
    rope = Rope(8, 100.0, "longrope", divisors=(1.0, 2.0, 3.0, 4.0), long_divisors=(5.0,) * 4)
    torch.testing.assert_close(
        inverse_frequencies(rope), 100.0 ** -torch.tensor([0, 0.25, 0.5, 0.75]) / torch.arange(1, 5)
    )


def test_frequencies_of_a_proportional_rope_beyond_its_share_are_zero():
    """Gemma 4: the exponents are those of all dimensions."""
    rope = Rope(16, 100.0, "proportional", factor=2.0, high=0.25)
    expected = torch.tensor([1.0, 100.0 ** (-1 / 8), 0, 0, 0, 0, 0, 0]) / 2
    torch.testing.assert_close(inverse_frequencies(rope), expected)


def test_ntk_alpha_enlarges_the_base():
    """HunYuan: theta · alpha^(dims / (dims − 2))."""
    expected = inverse_frequencies(Rope(16, 100.0 * 50 ** (16 / 14)))
    torch.testing.assert_close(inverse_frequencies(Rope(16, 100.0, "ntk_alpha", 50.0)), expected)


def test_a_table_holds_both_regimes_of_longrope():
    rope = Rope(
        8, 100.0, "longrope", original=4, divisors=(1.0, 2.0, 3.0, 4.0), long_divisors=(5.0,) * 4, cos_scale=2.0
    )
    device = torch.device("cpu")
    table = RotaryTable(rope, max_len=9, dtype=torch.float32, device=device, regime_limit=4)
    positions, regimes = torch.tensor([3, 3, 8, 0]), torch.tensor([0, 1, 1, 1])
    cos, _ = table.at(places_of(positions, regimes, 4))
    frequencies = torch.stack([inverse_frequencies(rope, int(regime)) for regime in regimes])
    assert torch.equal(cos[:, 0, :4], (positions[:, None] * frequencies).cos() * 2)
    assert torch.equal(inverse_frequencies(rope, 1), inverse_frequencies(Rope(8, 100.0)) / 5)
    assert places_of(positions, None, 4) is positions
    short = RotaryTable(rope, max_len=4, dtype=torch.float32, device=device, regime_limit=4)
    assert short.tables[0].shape[0] == 4, "no sequence is long"
