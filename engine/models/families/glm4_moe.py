"""GLM-4.5, 4.6 and 4.7 (arXiv 2508.06471), dots.llm1 and Solar Open: experts as in DeepSeek-V3. In GLM half of a head
turns."""

from dataclasses import replace

from ..description import Attention, Block, Decoder, Mlp, Moe, Reach
from ..fields import Fields
from ..pieces import (
    FULL,
    TOWERS,
    WRAPPED,
    activation,
    decoder,
    experts_of,
    heads_of,
    later_layers,
    layer_types,
    mlp,
    prenorm,
    qkvo,
    rms,
    rope,
    sigmoid_router,
    window_of,
)
from ..registry import family


@family("Glm4MoeForCausalLM")
def glm4_moe(c: Fields) -> Decoder:
    c = Fields({"partial_rotary_factor": 0.5, "first_k_dense_replace": 1} | c.raw, c.file)
    return _moe(c, heads_of(c), has_norms=c.flag("use_qk_norm", False))


@family("SolarOpenForCausalLM")
def solar_open(c: Fields) -> Decoder:
    """All layers have experts."""
    defaults = {"moe_intermediate_size": 1280}
    c = Fields(defaults | c.raw | {"first_k_dense_replace": 0}, c.file)
    return _moe(c, heads_of(c, dim=128), has_norms=False)


@family("Dots1ForCausalLM")
def dots1(c: Fields) -> Decoder:
    """Norms of queries and keys, and windows in the last layers."""
    window, first = c.raw.get("sliding_window", 4096), c.size("max_window_layers", default=62)
    kinds = layer_types(c, lambda layer: "sliding_attention" if window and layer >= first else "full_attention")
    near = window_of(Fields({"sliding_window": window}, c.file))
    reaches = tuple(near if kind == "sliding_attention" else FULL for kind in kinds)
    c = Fields({"rms_norm_eps": 1e-6, "norm_topk_prob": False} | c.raw, c.file)
    bias = c.flag("attention_bias", False)
    return _moe(c, heads_of(c), has_norms=True, out_bias=bias, reaches=reaches)


def _moe(
    c: Fields, sizes: tuple[int, int, int], *, has_norms: bool, out_bias: bool = False, reaches: tuple[Reach, ...] = ()
) -> Decoder:
    """sizes: of `heads_of`. reaches: of the layers; none: all positions."""
    h, eps = c.size("hidden_size"), c.number("rms_norm_eps", 1e-5)
    heads, kv_heads, dim = sizes
    num_experts, top_k = experts_of(c, "n_routed_experts", "num_local_experts", default=128, top_k=8)
    turn, act, bias = rope(c, dim), activation(c, "silu"), c.flag("attention_bias", False)
    width, num_shared = c.size("moe_intermediate_size", default=1408), c.count("n_shared_experts", 1)
    first = c.count("first_k_dense_replace")

    def feed_forward(at: str, layer: int) -> Mlp | Moe:
        if layer < first:
            return mlp(at, h, c.size("intermediate_size"), act)
        return Moe(
            num_experts,
            sigmoid_router(c, at, num_experts, top_k),
            mlp(at + "experts.{e}.", h, width, act, experts=num_experts),
            mlp(at + "shared_experts.", h, width * num_shared, act) if num_shared else None,
        )

    def block(layer: int) -> Block:
        at = f"layers.{layer}."
        attention = at + "self_attn."
        return prenorm(
            (
                rms(at + "input_layernorm", h, eps),
                Attention(
                    heads, kv_heads, dim, dim, dim**-0.5,
                    **qkvo(attention, h, heads, kv_heads, dim, bias, out_bias=out_bias), rope=turn,
                    reach=reaches[layer] if reaches else FULL,
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
