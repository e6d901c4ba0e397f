"""Granite 3 with experts, and with one more for all tokens."""

from dataclasses import replace

from ..description import Attention, Block, Branch, Decoder, Mlp, Moe, Router, Sublayer
from ..fields import Fields
from ..pieces import (
    activation,
    decoder,
    experts_of,
    heads_of,
    matrix,
    qkvo,
    rms,
    rope,
    rows_of,
    stacked_experts,
)
from ..registry import family


@family("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM")
def granite_moe(c: Fields) -> Decoder:
    h, eps = c.size("hidden_size"), c.number("rms_norm_eps", 1e-6)
    heads, kv_heads, dim = heads_of(c)
    num_experts, top_k = experts_of(c, "num_local_experts", default=8, top_k=2)
    turn, act, bias = rope(c, dim), activation(c, "silu"), c.flag("attention_bias", False)
    width, wide = c.size("intermediate_size", default=11008), c.count("shared_intermediate_size")
    residual, scale = c.number("residual_multiplier", 1.0), c.number("attention_multiplier", 1.0)

    def moe(at: str) -> Moe:
        inner = at + "block_sparse_moe."
        router = Router(matrix(inner + "router.layer", num_experts, h), top_k, "softmax_of_chosen")
        first, last = inner + "input_linear.weight", inner + "output_linear.weight"
        experts = stacked_experts(first, last, h, width, num_experts, act)
        if not wide:
            return Moe(num_experts, router, experts)
        fused = at + "shared_mlp.input_linear"
        shared = Mlp(
            wide,
            gate=rows_of(fused, wide, h),
            up=rows_of(fused, wide, h, first=wide),
            down=matrix(at + "shared_mlp.output_linear", h, wide),
            act=act,
        )
        return Moe(num_experts, router, experts, shared)

    def block(layer: int) -> Block:
        at = f"layers.{layer}."
        attention = Attention(
            heads, kv_heads, dim, dim, scale, **qkvo(at + "self_attn.", h, heads, kv_heads, dim, bias), rope=turn
        )
        return Block(
            (
                Sublayer((Branch(attention),), rms(at + "input_layernorm", h, eps), beta=residual),
                Sublayer((Branch(moe(at)),), rms(at + "post_attention_layernorm", h, eps), beta=residual),
            )
        )

    found = decoder(c, block, rms("norm", h, eps), scale=c.number("embedding_multiplier", 1.0))
    return replace(found, head=replace(found.head, scale=1 / c.number("logits_scaling", 1.0)))
