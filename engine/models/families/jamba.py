"""Jamba (arXiv 2403.19887): Mamba in most layers, attention without positions in the others, and experts in some."""

from ..description import Block, Decoder, Mlp, Moe, Router
from ..fields import Fields
from ..pieces import (
    activation,
    attention,
    decoder,
    experts_of,
    heads_of,
    mamba1,
    matrix,
    mixer_activation,
    mlp,
    prenorm,
    qkvo,
    rms,
)
from ..registry import family


@family("JambaForCausalLM")
def jamba(c: Fields) -> Decoder:
    h, eps, width = c.size("hidden_size"), c.number("rms_norm_eps", 1e-6), c.size("intermediate_size", default=14336)
    sizes, act = heads_of(c), activation(c, "silu")
    mixer_activation(c)
    names = "num_experts", "num_local_experts"
    has_experts = c.size(*names, default=16) > 1
    num_experts, top_k = experts_of(c, *names, default=16, top_k=2) if has_experts else (1, 1)
    attends = c.size("attn_layer_period", default=8), c.count("attn_layer_offset", 4)
    chooses = c.size("expert_layer_period", default=2), c.count("expert_layer_offset", 1)
    n = c.size("mamba_d_state", default=16)
    rank = c.size("mamba_dt_rank") if c.raw.get("mamba_dt_rank") not in (None, "auto") else -(-h // 16)
    channels, taps = c.size("mamba_expand", default=2) * h, c.size("mamba_d_conv", default=4)
    bias, conv_bias = c.flag("mamba_proj_bias", False), c.flag("mamba_conv_bias", True)

    def feed_forward(at: str, layer: int) -> Mlp | Moe:
        if layer % chooses[0] != chooses[1] or not has_experts:
            return mlp(at, h, width, act)
        router = Router(matrix(at + "router", num_experts, h), top_k)
        return Moe(num_experts, router, mlp(at + "experts.{e}.", h, width, act, experts=num_experts))

    def block(layer: int) -> Block:
        at = f"layers.{layer}."
        inner = at + "mamba."
        norms = tuple(rms(f"{inner}{name}_layernorm", size, eps) for name, size in (("dt", rank), ("b", n), ("c", n)))
        mixer = (
            attention(sizes, qkvo(at + "self_attn.", h, *sizes))
            if layer % attends[0] == attends[1]
            else mamba1(inner, h, channels, n, rank, taps, norms=norms, bias=bias, conv_bias=conv_bias)
        )
        return prenorm(
            (rms(at + "input_layernorm", h, eps), mixer),
            (rms(at + "pre_ff_layernorm", h, eps), feed_forward(at + "feed_forward.", layer)),
        )

    return decoder(c, block, rms("final_layernorm", h, eps))
