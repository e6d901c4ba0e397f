"""Granite 3 with experts, and with one more for all tokens; Granite 4, whose hybrids have Mamba 2 in most layers."""

from collections.abc import Callable
from dataclasses import replace

from ..description import Attention, Block, Body, Branch, Decoder, Mlp, Moe, Rope, Router, Sublayer
from ..fields import Fields
from ..pieces import (
    activation,
    decoder,
    experts_of,
    heads_of,
    layer_types,
    limits,
    mamba2,
    mamba2_sizes,
    matrix,
    mixer_activation,
    qkvo,
    rms,
    rope,
    rows_of,
    stacked_experts,
)
from ..registry import family


@family("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM")
def granite_moe(c: Fields) -> Decoder:
    attention = _attention(c, rope(c, heads_of(c)[2]))
    feed_forward = _experts(c, shared=0)
    return _decoder(c, lambda at, layer: attention(at + "self_attn."), feed_forward)


@family("GraniteMoeHybridForCausalLM")
def granite_moe_hybrid(c: Fields) -> Decoder:
    """Without position_embedding_type = "rope", attention has no positions."""
    h, eps, inner = (
        c.size("hidden_size"),
        c.number("rms_norm_eps", 1e-6),
        c.size("mamba_expand", default=2) * c.size("hidden_size"),
    )
    attention = _attention(c, rope(c, heads_of(c)[2]) if c.text("position_embedding_type", "") == "rope" else None)
    kinds = layer_types(c, lambda layer: "mamba")
    mixer_activation(c)

    def mixer(at: str, layer: int) -> Body:
        if kinds[layer] not in ("mamba", "linear_attention"):
            return attention(at + "self_attn.")
        sizes, at = mamba2_sizes(c, inner), at + "mamba."
        return mamba2(
            at, h, *sizes, norm=rms(at + "norm", inner // sizes[3], eps, total=inner), limits=limits(c),
            bias=c.flag("mamba_proj_bias", False), conv_bias=c.flag("mamba_conv_bias", True),
        )  # fmt: skip

    shared = c.size("shared_intermediate_size", default=1024)
    has_experts = "num_local_experts" not in c or c.count("num_local_experts") > 0
    return _decoder(c, mixer, _experts(c, shared=shared) if has_experts else lambda at: _shared(c, at, shared))


def _attention(c: Fields, turn: Rope | None) -> Callable[[str], Attention]:
    h, bias, scale = c.size("hidden_size"), c.flag("attention_bias", False), c.number("attention_multiplier", 1.0)
    heads, kv_heads, dim = heads_of(c)

    def attention(at: str) -> Attention:
        return Attention(heads, kv_heads, dim, dim, scale, **qkvo(at, h, heads, kv_heads, dim, bias), rope=turn)

    return attention


def _shared(c: Fields, at: str, width: int) -> Mlp:
    fused, h = at + "shared_mlp.input_linear", c.size("hidden_size")
    return Mlp(
        width,
        gate=rows_of(fused, width, h),
        up=rows_of(fused, width, h, first=width),
        down=matrix(at + "shared_mlp.output_linear", h, width),
        act=activation(c, "silu"),
    )


def _experts(c: Fields, *, shared: int) -> Callable[[str], Moe]:
    """shared: the default width of the expert of all tokens; 0: there is none."""
    num_experts, top_k = experts_of(c, "num_local_experts", default=8, top_k=2)
    h, act = c.size("hidden_size"), activation(c, "silu")
    width, wide = c.size("intermediate_size", default=11008), c.count("shared_intermediate_size", shared)

    def moe(at: str) -> Moe:
        inner = at + "block_sparse_moe."
        router = Router(matrix(inner + "router.layer", num_experts, h), top_k, "softmax_of_chosen")
        first, last = inner + "input_linear.weight", inner + "output_linear.weight"
        experts = stacked_experts(first, last, h, width, num_experts, act)
        return Moe(num_experts, router, experts, _shared(c, at, wide) if wide else None)

    return moe


def _decoder(c: Fields, mixer: Callable[[str, int], Body], feed_forward: Callable[[str], Mlp | Moe]) -> Decoder:
    h, eps, residual = c.size("hidden_size"), c.number("rms_norm_eps", 1e-6), c.number("residual_multiplier", 1.0)

    def block(layer: int) -> Block:
        at = f"layers.{layer}."
        return Block(
            (
                Sublayer((Branch(mixer(at, layer)),), rms(at + "input_layernorm", h, eps), beta=residual),
                Sublayer((Branch(feed_forward(at)),), rms(at + "post_attention_layernorm", h, eps), beta=residual),
            )
        )

    found = decoder(c, block, rms("norm", h, eps), scale=c.number("embedding_multiplier", 1.0))
    return replace(found, head=replace(found.head, scale=1 / c.number("logits_scaling", 1.0)))
