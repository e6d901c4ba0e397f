"""EXAONE 4 and its mixture of experts: norms of the heads of queries and keys, in EXAONE 4 also of what a sublayer
adds. Where some layers have windows, the others have no position embedding."""

from collections.abc import Callable
from dataclasses import replace

from ..description import Attention, Block, Decoder, Mlp, Moe, Part
from ..fields import Fields
from ..pieces import (
    FULL,
    activation,
    attention,
    decoder,
    experts_of,
    heads_of,
    later_layers,
    layer_types,
    mlp,
    postnorm,
    prenorm,
    qkvo,
    rms,
    rope,
    sigmoid_router,
    window_of,
)
from ..registry import family


@family("Exaone4ForCausalLM")
def exaone4(c: Fields) -> Decoder:
    h, eps = c.size("hidden_size"), c.number("rms_norm_eps", 1e-5)
    act, width = activation(c, "silu"), c.size("intermediate_size")
    mixer = _mixers(c)

    def block(layer: int) -> Block:
        at = f"layers.{layer}."
        return postnorm(
            (mixer(layer), rms(at + "post_attention_layernorm", h, eps)),
            (mlp(at + "mlp.", h, width, act), rms(at + "post_feedforward_layernorm", h, eps)),
        )

    return decoder(c, block, rms("norm", h, eps))


@family("ExaoneMoeForCausalLM")
def exaone_moe(c: Fields) -> Decoder:
    """Norms before sublayers, and experts as in DeepSeek-V3."""
    h, eps = c.size("hidden_size"), c.number("rms_norm_eps", 1e-5)
    act, width = activation(c, "silu"), c.size("intermediate_size")
    num_experts, top_k = experts_of(c, "num_experts", "num_local_experts", default=64, top_k=8)
    inner, num_shared = c.size("moe_intermediate_size", default=1024), c.count("num_shared_experts", 1)
    first, mixer = c.count("first_k_dense_replace", 1), _mixers(c)
    forms = layer_types(c, lambda layer: "sparse" if layer >= first else "dense", "mlp_layer_types")

    def feed_forward(at: str, layer: int) -> Mlp | Moe:
        if forms[layer] == "dense":
            return mlp(at, h, width, act)
        router = sigmoid_router(c, at, num_experts, top_k, scale=2.5)
        return Moe(
            num_experts,
            replace(router, correction=Part(at + "e_score_correction_bias", num_experts)),
            mlp(at + "experts.{e}.", h, inner, act, experts=num_experts),
            mlp(at + "shared_experts.", h, inner * num_shared, act) if num_shared else None,
        )

    def block(layer: int) -> Block:
        at = f"layers.{layer}."
        return prenorm(
            (rms(at + "input_layernorm", h, eps), mixer(layer)),
            (rms(at + "post_attention_layernorm", h, eps), feed_forward(at + "mlp.", layer)),
        )

    return decoder(c, block, rms("norm", h, eps), ignored=(later_layers(c), r"mtp\..*"))


def _mixers(c: Fields) -> Callable[[int], Attention]:
    """The attention of each layer."""
    h, eps, sizes = c.size("hidden_size"), c.number("rms_norm_eps", 1e-5), heads_of(c)
    dim, has_windows = sizes[2], "sliding_window" in c
    every = _pattern(c) if has_windows else 1
    kinds = layer_types(c, lambda layer: "sliding_attention" if (layer + 1) % every else "full_attention")

    def mixer(layer: int) -> Attention:
        at, is_near = f"layers.{layer}.self_attn.", kinds[layer] == "sliding_attention"
        return attention(
            sizes,
            qkvo(at, h, *sizes),
            rope=rope(c, dim) if is_near or not has_windows else None,
            reach=window_of(c) if is_near else FULL,
            q_norm=rms(at + "q_norm", dim, eps),
            k_norm=rms(at + "k_norm", dim, eps),
        )

    return mixer


def _pattern(c: Fields) -> int:
    """Each so manyth layer is full: a number, or a text such as LLLG."""
    given = c.raw.get("sliding_window_pattern")
    return len(given) if isinstance(given, str) and given else c.size("sliding_window_pattern", default=4)
