"""Qwen2 and Qwen3: Qwen2's projections of queries, keys and values have biases, Qwen3's query and key heads are
normed; Qwen2-MoE and Qwen3-MoE have experts."""

from collections.abc import Callable
from dataclasses import replace

from ..description import Attention, Block, Decoder, Mlp, Moe, Reach, Router
from ..fields import Fields
from ..pieces import (
    TOWERS,
    WRAPPED,
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
    window_of,
)
from ..registry import family


@family("Qwen2ForCausalLM")
def qwen2(c: Fields) -> Decoder:
    _, _, dim = heads_of(c)
    return _dense(c, dim, bias=True, out_bias=False, has_norms=False)


@family("Qwen3ForCausalLM")
def qwen3(c: Fields) -> Decoder:
    _, _, dim = heads_of(c, dim=128)
    bias = c.flag("attention_bias", False)
    return _dense(c, dim, bias=bias, out_bias=bias, has_norms=True)


def _dense(c: Fields, dim: int, *, bias: bool, out_bias: bool, has_norms: bool) -> Decoder:
    h, act, width = c.size("hidden_size"), activation(c, "silu"), c.size("intermediate_size")

    def feed_forward(at: str, layer: int) -> Mlp:
        return mlp(at + "mlp.", h, width, act)

    return _decoder(c, dim, feed_forward, _reaches(c), bias=bias, out_bias=out_bias, has_norms=has_norms)


@family("Qwen2MoeForCausalLM")
def qwen2_moe(c: Fields) -> Decoder:
    """Every second of the first `max_window_layers` layers may have a window; one more expert serves all tokens."""
    _, _, dim = heads_of(c)
    count, most = num_layers(c), c.count("max_window_layers", 28)
    reaches = (Reach(),) * count
    if c.flag("use_sliding_window", False):
        kinds = layer_types(c, lambda layer: "full_attention" if layer % 2 or layer >= most else "sliding_attention")
        reaches = tuple(window_of(c) if kind == "sliding_attention" else Reach() for kind in kinds)
    feed_forward = _experts(c, num_experts=60, top_k=4, width=1408, shared=5632)
    return _decoder(c, dim, feed_forward, reaches, bias=c.flag("qkv_bias", True), out_bias=False, has_norms=False)


@family("Qwen3MoeForCausalLM")
def qwen3_moe(c: Fields) -> Decoder:
    _, _, dim = heads_of(c)
    reaches = (window_of(c) if c.flag("use_sliding_window", False) else Reach(),) * num_layers(c)
    bias = c.flag("attention_bias", False)
    feed_forward = _experts(c, num_experts=128, top_k=8, width=768)
    return _decoder(c, dim, feed_forward, reaches, bias=bias, out_bias=bias, has_norms=True)


@family("Qwen3VLMoeForConditionalGeneration")
def qwen3_vl_moe(c: Fields) -> Decoder:
    """The text part."""
    c = Fields({"rope_theta": 500_000.0, "norm_topk_prob": True, "tie_word_embeddings": True} | c.raw, c.file)
    _, _, dim = heads_of(c)
    feed_forward = _experts(c, num_experts=60, top_k=4, width=1408, is_stacked=True)
    bias, reaches = c.flag("attention_bias", False), (Reach(),) * num_layers(c)
    found = _decoder(c, dim, feed_forward, reaches, bias=bias, out_bias=bias, has_norms=True)
    return replace(found, prefixes=WRAPPED, ignored=TOWERS)


def _experts(
    c: Fields, *, num_experts: int, top_k: int, width: int, shared: int | None = None, is_stacked: bool = False
) -> Callable[[str, int], Mlp | Moe]:
    """The feed-forward part of each layer. The numbers are defaults. shared: the width of the expert of all tokens;
    None: there is none. is_stacked: a tensor holds the transposed weights of all experts."""
    h, act = c.size("hidden_size"), activation(c, "silu")
    num_experts, top_k = experts_of(c, "num_experts", "num_local_experts", default=num_experts, top_k=top_k)
    step, dense = c.size("decoder_sparse_step", default=1), c.integers("mlp_only_layers") or ()
    renorm = c.flag("norm_topk_prob", False)

    def feed_forward(at: str, layer: int) -> Mlp | Moe:
        at += "mlp."
        if layer in dense or (layer + 1) % step:
            return mlp(at, h, c.size("intermediate_size"), act)
        router = Router(matrix(at + "gate", num_experts, h), top_k, renorm=renorm)
        inner = c.size("moe_intermediate_size", default=width)
        if is_stacked:
            names = at + "experts.gate_up_proj", at + "experts.down_proj"
            experts = stacked_experts(*names, h, inner, num_experts, act, is_transposed=True)
        else:
            experts = mlp(at + "experts.{e}.", h, inner, act, experts=num_experts)
        if shared is None:
            return Moe(num_experts, router, experts)
        common = mlp(at + "shared_expert.", h, c.size("shared_expert_intermediate_size", default=shared), act)
        return Moe(num_experts, router, experts, common, matrix(at + "shared_expert_gate", 1, h))

    return feed_forward


def _reaches(c: Fields) -> tuple[Reach, ...]:
    """Without layer_types, the layers from `max_window_layers` on have windows."""
    count = num_layers(c)
    if not c.flag("use_sliding_window", False) or "sliding_window" not in c:
        return (Reach(),) * count
    window = window_of(c)
    first = c.size("max_window_layers", default=28)
    kinds = layer_types(c, lambda layer: "sliding_attention" if layer >= first else "full_attention")
    return tuple(window if kind == "sliding_attention" else Reach() for kind in kinds)


def _decoder(
    c: Fields,
    dim: int,
    feed_forward: Callable[[str, int], Mlp | Moe],
    reaches: tuple[Reach, ...],
    *,
    bias: bool,
    out_bias: bool,
    has_norms: bool,
) -> Decoder:
    h, eps, turn = c.size("hidden_size"), c.number("rms_norm_eps", 1e-6), rope(c, dim)
    heads, kv_heads, _ = heads_of(c, dim=dim)

    def block(layer: int) -> Block:
        at = f"layers.{layer}."
        attention = at + "self_attn."
        return prenorm(
            (
                rms(at + "input_layernorm", h, eps),
                Attention(
                    heads,
                    kv_heads,
                    dim,
                    dim,
                    dim**-0.5,
                    **qkvo(attention, h, heads, kv_heads, dim, bias, out_bias=out_bias),
                    rope=turn,
                    reach=reaches[layer],
                    q_norm=rms(attention + "q_norm", dim, eps) if has_norms else None,
                    k_norm=rms(attention + "k_norm", dim, eps) if has_norms else None,
                ),
            ),
            (rms(at + "post_attention_layernorm", h, eps), feed_forward(at, layer)),
        )

    return decoder(c, block, rms("norm", h, eps))
