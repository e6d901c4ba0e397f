"""The reference of MLA against transformers' modules, which expand keys and values instead."""

from importlib import import_module

import pytest
import torch

from pagewire.kernels import reference_latent as latent

HIDDEN, HEADS, NOPE, ROPE, RANK, VALUE, TOKENS = 24, 3, 8, 6, 20, 10, 30
FIELDS = {
    "hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "kv_lora_rank": RANK,
    "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE, "v_head_dim": VALUE, "num_hidden_layers": 1,
    "attn_implementation": "eager",
}  # fmt: skip
MODULES = {
    "DeepSeek-V3": ("deepseek_v3", "DeepseekV3", {"q_lora_rank": 12}),
    "DeepSeek-V3, one product": ("deepseek_v3", "DeepseekV3", {"q_lora_rank": None, "rope_interleave": False}),
    "Kimi-Linear": (
        "kimi_linear", "KimiLinear",
        {"layer_types": ["full_attention"], "mlp_layer_types": ["dense"], "num_local_experts": 4},
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", MODULES)
def test_the_absorbed_form_equals_the_expanded_one(family):
    torch.manual_seed(0)
    path, prefix, fields = MODULES[family]
    modeling = import_module(f"transformers.models.{path}.modeling_{path}")
    configs = import_module(f"transformers.models.{path}.configuration_{path}")
    config = getattr(configs, f"{prefix}Config")(**FIELDS | fields)
    module = getattr(modeling, f"{prefix}Attention")(config, 0).eval()
    turn = None
    if path == "deepseek_v3":
        angles = torch.rand(1, TOKENS, ROPE // 2).repeat(1, 1, 2) * 6
        cos, sin = angles.cos(), angles.sin()
        name = "apply_rotary_pos_emb" + ("_interleave" if config.rope_interleave else "")
        turn = getattr(modeling, name)
    x = torch.randn(1, TOKENS, HIDDEN)
    mask = torch.full((TOKENS, TOKENS), -torch.inf).triu(1)[None, None]
    with torch.inference_mode():
        expected = module(x, *([] if turn is None else [(cos, sin)]), attention_mask=mask)[0][0]
        low = (
            module.q_proj(x)
            if module.q_lora_rank is None
            else module.q_b_proj(module.q_a_layernorm(module.q_a_proj(x)))
        )
        q = low.view(1, TOKENS, HEADS, NOPE + ROPE).transpose(1, 2)
        compressed, key = module.kv_a_proj_with_mqa(x).split([RANK, ROPE], dim=-1)
        if turn is not None:
            turned, key = turn(q[..., NOPE:], key[:, None], cos, sin)
            q, key = torch.cat((q[..., :NOPE], turned), dim=-1), key[:, 0]
        keys, values = latent.split_kv_b(module.kv_b_proj.weight, HEADS, NOPE)
        pages = torch.full((9, 4, latent.cache_width(RANK, ROPE)), 7.0)
        table = torch.randperm(9)[None, :8]
        at = torch.arange(TOKENS)
        slots = table[0, at // 4] * 4 + at % 4
        latent.write_latent(module.kv_a_layernorm(compressed)[0], key[0], pages, slots)
        query, outs = latent.absorb(q[0].transpose(0, 1), keys), []
        for first, end in ((0, 17), (17, 18), (18, TOKENS)):
            step = torch.tensor([end]), torch.tensor([end - first])
            outs.append(latent.attend_latent(query[first:end], pages, table, *step, module.scaling))
        result = module.o_proj(latent.expand(torch.cat(outs), values).flatten(1))
    assert expected.abs().max() > 0.05
    torch.testing.assert_close(result, expected, atol=1e-6, rtol=1e-5)


def test_a_position_has_a_multiple_of_16_numbers():
    assert [latent.cache_width(rank, rope) for rank, rope in ((512, 64), (20, 6), (16, 0))] == [576, 32, 16]
