"""Phi-3.5-MoE (arXiv 2404.14219): layer norms, and experts chosen by sparsemixer."""

from dataclasses import replace

from ..description import Attention, Block, Decoder, Moe, Reach, Rope, Router
from ..fields import Fields, NotDescribedError
from ..pieces import activation, decoder, experts_of, heads_of, layer_norm, matrix, mlp, prenorm, qkvo, rope, window_of
from ..registry import family


@family("PhimoeForCausalLM", "PhiMoEForCausalLM")
def phimoe(c: Fields) -> Decoder:
    h, eps = c.size("hidden_size"), c.number("rms_norm_eps", 1e-5)
    heads, kv_heads, dim = heads_of(c)
    num_experts, top_k = experts_of(c, "num_local_experts", default=16, top_k=2)
    turn, act, bias = _rope(c, dim), activation(c, "silu"), c.flag("attention_bias", False)
    width, jitter = c.size("intermediate_size", default=6400), c.number("router_jitter_noise", 0.01)
    longest = c.size("max_position_embeddings", default=131072)
    window = window_of(c)
    reach = window if window.positions < longest else Reach()

    def block(layer: int) -> Block:
        at = f"layers.{layer}."
        moe = at + "block_sparse_moe."
        return prenorm(
            (
                layer_norm(at + "input_layernorm", h, eps),
                Attention(
                    heads, kv_heads, dim, dim, dim**-0.5, **qkvo(at + "self_attn.", h, heads, kv_heads, dim, bias),
                    rope=turn, reach=reach,
                ),
            ),
            (
                layer_norm(at + "post_attention_layernorm", h, eps),
                Moe(
                    num_experts,
                    Router(matrix(moe + "gate", num_experts, h), top_k, "sparsemixer", jitter=jitter),
                    mlp(moe + "experts.{e}.", h, width, act, names=("w1", "w3", "w2"), experts=num_experts),
                ),
            ),
        )  # fmt: skip

    return decoder(c, block, layer_norm("norm", h, eps), head_bias=c.flag("lm_head_bias", False))


def _rope(c: Fields, dim: int) -> Rope:
    """Cosines and sines have factors of their own."""
    found = rope(c, dim, theta=1e6)
    given = c.part("rope_parameters") or c.part("rope_scaling")
    if found.kind == "default" or given is None:
        return found
    short, long = given.number("short_mscale", found.cos_scale), given.number("long_mscale", found.cos_scale)
    if short != long:
        raise NotDescribedError(f"rotary embeddings with the factors {short:g} and {long:g} for short and long texts")
    return replace(found, cos_scale=short)
