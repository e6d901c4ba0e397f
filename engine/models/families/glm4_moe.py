"""GLM-4.5, 4.6 and 4.7 (arXiv 2508.06471): half of a head turns, and experts as in DeepSeek-V3."""

from dataclasses import replace

from ..description import Attention, Block, Decoder, Mlp, Moe
from ..fields import Fields
from ..pieces import (
    TOWERS,
    WRAPPED,
    activation,
    decoder,
    experts_of,
    heads_of,
    later_layers,
    mlp,
    prenorm,
    qkvo,
    rms,
    rope,
    sigmoid_router,
)
from ..registry import family


@family("Glm4MoeForCausalLM")
def glm4_moe(c: Fields) -> Decoder:
    h, eps = c.size("hidden_size"), c.number("rms_norm_eps", 1e-5)
    heads, kv_heads, dim = heads_of(c)
    num_experts, top_k = experts_of(c, "n_routed_experts", "num_local_experts", default=128, top_k=8)
    turn, act = rope(Fields({"partial_rotary_factor": 0.5} | c.raw, c.file), dim), activation(c, "silu")
    bias, has_norms = c.flag("attention_bias", False), c.flag("use_qk_norm", False)
    width, num_shared = c.size("moe_intermediate_size", default=1408), c.size("n_shared_experts", default=1)
    first = c.count("first_k_dense_replace", 1)

    def feed_forward(at: str, layer: int) -> Mlp | Moe:
        if layer < first:
            return mlp(at, h, c.size("intermediate_size"), act)
        return Moe(
            num_experts,
            sigmoid_router(c, at, num_experts, top_k),
            mlp(at + "experts.{e}.", h, width, act, experts=num_experts),
            mlp(at + "shared_experts.", h, width * num_shared, act),
        )

    def block(layer: int) -> Block:
        at = f"layers.{layer}."
        attention = at + "self_attn."
        return prenorm(
            (
                rms(at + "input_layernorm", h, eps),
                Attention(
                    heads, kv_heads, dim, dim, dim**-0.5,
                    **qkvo(attention, h, heads, kv_heads, dim, bias, out_bias=False), rope=turn,
                    q_norm=rms(attention + "q_norm", dim, eps) if has_norms else None,
                    k_norm=rms(attention + "k_norm", dim, eps) if has_norms else None,
                ),
            ),
            (rms(at + "post_attention_layernorm", h, eps), feed_forward(at + "mlp.", layer)),
        )  # fmt: skip

    return decoder(c, block, rms("norm", h, eps), ignored=(later_layers(c),))


@family("Glm4vMoeForConditionalGeneration")
def glm4v_moe(c: Fields) -> Decoder:
    """The text part."""
    found = glm4_moe(Fields({"attention_bias": True} | c.raw, c.file))
    return replace(found, prefixes=WRAPPED, ignored=(*found.ignored, *TOWERS))
