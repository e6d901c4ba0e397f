"""LFM2: most layers mix tokens by a short, gated convolution; the others attend. LFM2-MoE has experts."""

from collections.abc import Callable

from ..description import Block, Decoder, Mlp, Moe, Part, Router, ShortConv
from ..fields import Fields
from ..pieces import (
    attention,
    conv,
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
)
from ..registry import family

_NAMES = "w1", "w3", "w2"


@family("Lfm2ForCausalLM")
def lfm2(c: Fields) -> Decoder:
    h, width = c.size("hidden_size"), _width(c)
    return _decoder(c, lambda at, layer: mlp(at, h, width, names=_NAMES))


def _width(c: Fields) -> int:
    width = c.size("block_ff_dim", "intermediate_size", default=12288)
    if not c.flag("block_auto_adjust_ff_dim", True):
        return width
    multiple = c.size("block_multiple_of", default=256)
    width = int(c.number("block_ffn_dim_multiplier", 1.0) * int(2 * width / 3))
    return -(-width // multiple) * multiple


@family("Lfm2MoeForCausalLM")
def lfm2_moe(c: Fields) -> Decoder:
    h, dense = c.size("hidden_size"), c.count("num_dense_layers", 2)
    num_experts, top_k = experts_of(c, "num_experts", default=32, top_k=4)
    width = c.size("moe_intermediate_size", default=1792)

    def feed_forward(at: str, layer: int) -> Mlp | Moe:
        if layer < dense:
            return mlp(at, h, c.size("intermediate_size"), names=_NAMES)
        router = Router(
            matrix(at + "gate", num_experts, h),
            top_k,
            "sigmoid",
            correction=Part(at + "expert_bias", num_experts) if c.flag("use_expert_bias", True) else None,
            renorm=c.flag("norm_topk_prob", True),
            floor=1e-6,
            scale=c.number("routed_scaling_factor", 1.0),
        )
        experts = mlp(at + "experts.{e}.", h, width, names=_NAMES, experts=num_experts)
        return Moe(num_experts, router, experts)

    return _decoder(c, feed_forward)


def _decoder(c: Fields, feed_forward: Callable[[str, int], Mlp | Moe]) -> Decoder:
    h, eps, taps = c.size("hidden_size"), c.number("norm_eps", 1e-5), c.size("conv_L_cache", default=3)
    sizes, bias = heads_of(c), c.flag("conv_bias", False)
    heads, kv_heads, dim = sizes
    turn = rope(c, dim, theta=1e6)
    attending = c.integers("full_attn_idxs") or range(num_layers(c))
    kinds = layer_types(c, lambda layer: "full_attention" if layer in attending else "conv")

    def block(layer: int) -> Block:
        at = f"layers.{layer}."
        a, short = at + "self_attn.", at + "conv."
        mixer = (
            ShortConv(
                bcx=matrix(short + "in_proj", 3 * h, h, bias),
                conv=conv(short + "conv", h, taps, bias=bias, act=""),
                out=matrix(short + "out_proj", h, h, bias),
            )
            if kinds[layer] == "conv"
            else attention(
                sizes,
                qkvo(a, h, heads, kv_heads, dim, out="out_proj"),
                rope=turn,
                q_norm=rms(a + "q_layernorm", dim, eps),
                k_norm=rms(a + "k_layernorm", dim, eps),
            )
        )
        return prenorm(
            (rms(at + "operator_norm", h, eps), mixer),
            (rms(at + "ffn_norm", h, eps), feed_forward(at + "feed_forward.", layer)),
        )

    tied = c.flag("tie_embedding", True)  # of older files
    return decoder(c, block, rms("embedding_norm", h, eps), tied=tied)
