"""Llama 4, its text part: attention in chunks with a rotary embedding in three of four layers, over all positions
without one in the fourth, and experts that read weighted inputs."""

from ..description import Attention, Block, Decoder, Mlp, Moe, Norm, Reach, Router, Temperature
from ..fields import MAX_POSITIONS, Fields
from ..pieces import (
    TOWERS,
    activation,
    decoder,
    experts_of,
    heads_of,
    layer_types,
    matrix,
    mlp,
    num_layers,
    prenorm,
    qkvo,
    rms,
    rope,
    stacked_experts,
)
from ..registry import family


@family("Llama4ForCausalLM", "Llama4ForConditionalGeneration")
def llama4(c: Fields) -> Decoder:
    h, eps = c.size("hidden_size", default=5120), c.number("rms_norm_eps", 1e-5)
    heads, kv_heads, dim = heads_of(c, dim=128)
    num_experts, top_k = experts_of(c, "num_local_experts", default=16, top_k=1)
    turn, act, bias = (
        rope(c, dim, theta=500_000.0, pairs="adjacent"),
        activation(c, "silu"),
        c.flag("attention_bias", False),
    )
    width, wide = c.size("intermediate_size", default=8192), c.size("intermediate_size_mlp", default=16384)
    interval, step = c.size("no_rope_layer_interval", default=4), c.size("interleave_moe_layer_step", default=1)
    count = num_layers(c)
    turns = c.integers("no_rope_layers") or tuple(int((layer + 1) % interval != 0) for layer in range(count))
    with_experts = c.integers("moe_layers")
    if with_experts is None:
        with_experts = tuple(range(step - 1, count, step))
    kinds = layer_types(c, lambda layer: "chunked_attention" if turns[layer] else "full_attention")
    chunk = Reach("chunk", c.size("attention_chunk_size", default=8192, most=MAX_POSITIONS))
    # Files of the first release have a number here.
    heat = Temperature(c.number("attn_scale", 0.1), c.size("floor_scale", default=8192), 1)
    is_heated, is_normed = bool(c.raw.get("attn_temperature_tuning", True)), c.flag("use_qk_norm", True)

    def feed_forward(at: str, layer: int) -> Mlp | Moe:
        if layer not in with_experts:
            return mlp(at, h, wide, act)
        return Moe(
            num_experts,
            Router(matrix(at + "router", num_experts, h), top_k, "sigmoid", on="input"),
            stacked_experts(
                at + "experts.gate_up_proj", at + "experts.down_proj", h, width, num_experts, act, is_transposed=True
            ),
            mlp(at + "shared_expert.", h, width, act),
        )

    def block(layer: int) -> Block:
        at, does_turn = f"layers.{layer}.", bool(turns[layer])
        norm = Norm(dim, eps=eps) if does_turn and is_normed else None
        return prenorm(
            (
                rms(at + "input_layernorm", h, eps),
                Attention(
                    heads, kv_heads, dim, dim, dim**-0.5, **qkvo(at + "self_attn.", h, heads, kv_heads, dim, bias),
                    rope=turn if does_turn else None,
                    reach=chunk if kinds[layer] == "chunked_attention" else Reach(),
                    q_norm=norm, k_norm=norm, norm_after_rope=True,
                    temperature=heat if is_heated and not does_turn else None,
                ),
            ),
            (rms(at + "post_attention_layernorm", h, eps), feed_forward(at + "feed_forward.", layer)),
        )  # fmt: skip

    prefixes = ("model.", "language_model.model.", "model.language_model.", "")
    return decoder(c, block, rms("norm", h, eps), prefixes=prefixes, ignored=TOWERS)
