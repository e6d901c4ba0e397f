"""MiMo-V2-Flash: windows in most layers, which have sinks and more key/value heads than the full layers. Values are
narrower than keys."""

from collections.abc import Callable

from ....errors import ConfigError
from ..description import Attention, Block, Branch, Decoder, Mlp, Moe, Part, Reach, Sublayer
from ..fields import Fields
from ..pieces import (
    FULL,
    activation,
    decoder,
    experts_of,
    heads_of,
    layer_types,
    matrix,
    mlp,
    num_layers,
    rms,
    rope,
    sigmoid_router,
)
from ..registry import family

_FULL, _NEAR = "full_attention", "sliding_attention"


@family("MiMoV2FlashForCausalLM")
def mimo_v2_flash(c: Fields) -> Decoder:
    h, act = c.size("hidden_size"), activation(c, "silu")
    eps = c.number("rms_norm_eps", c.number("layernorm_epsilon", 1e-5))
    heads, kv_heads, dim = heads_of(c, dim=192)
    kv_heads_of = {_FULL: kv_heads, _NEAR: c.size("swa_num_key_value_heads", default=2 * kv_heads)}
    c.divided("attention heads", heads, "key/value heads of windows", kv_heads_of[_NEAR])
    value_dim, bias = c.size("v_head_dim", default=128), c.flag("attention_bias", False)
    kind = _by(c, "hybrid_layer_pattern", _NEAR, _FULL, lambda layer: layer > 0 and (layer + 1) % 6 > 0)
    part = _by(c, "moe_layer_freq", "sparse", "dense", lambda layer: layer > 0)
    kinds, parts = layer_types(c, kind), layer_types(c, part, "mlp_layer_types")
    num_experts, top_k = experts_of(c, "n_routed_experts", "num_local_experts", default=256, top_k=8)
    width = c.size("moe_intermediate_size", default=2048)
    reaches = {_FULL: FULL, _NEAR: _window(c)}
    older = {} if "rope_parameters" in c else {"rope_theta": c.number("swa_rope_theta", 1e4)}
    turns = {
        _FULL: rope(c, dim, kind=_FULL, theta=5e6, share=0.334),
        _NEAR: rope(Fields({**c.raw, **older}, c.file), dim, kind=_NEAR, theta=1e4, share=0.334),
    }
    sinks = {
        _FULL: c.flag("add_full_attention_sink_bias", False),
        _NEAR: c.flag("add_swa_attention_sink_bias", True),
    }
    # Of values; null says that there is no factor. The products after attention are linear in them and have no bias.
    value_scale = c.number("attention_value_scale", 1.0 if "attention_value_scale" in c.raw else 0.707)

    def mixer(at: str, kind: str) -> Attention:
        own = kv_heads_of[kind]
        return Attention(
            heads,
            own,
            dim,
            value_dim,
            dim**-0.5,
            q=matrix(at + "q_proj", heads * dim, h, bias),
            k=matrix(at + "k_proj", own * dim, h, bias),
            v=matrix(at + "v_proj", own * value_dim, h, bias),
            o=matrix(at + "o_proj", h, heads * value_dim),
            rope=turns[kind],
            reach=reaches[kind],
            sinks=Part(at + "attention_sink_bias", heads) if sinks[kind] else None,
        )

    def feed_forward(at: str, part: str) -> Mlp | Moe:
        if part == "dense":
            return mlp(at, h, c.size("intermediate_size"), act)
        experts = mlp(at + "experts.{e}.", h, width, act, experts=num_experts)
        return Moe(num_experts, sigmoid_router(c, at, num_experts, top_k), experts)

    def block(layer: int) -> Block:
        at = f"layers.{layer}."
        attention = Branch(mixer(at + "self_attn.", kinds[layer]), out_scale=value_scale)
        other = Branch(feed_forward(at + "mlp.", parts[layer]))
        return Block(
            (
                Sublayer((attention,), rms(at + "input_layernorm", h, eps)),
                Sublayer((other,), rms(at + "post_attention_layernorm", h, eps)),
            )
        )

    return decoder(c, block, rms("norm", h, eps), ignored=(r"(.*\.)?mtp\..*",))


def _by(c: Fields, name: str, one: str, zero: str, default: Callable[[int], bool]) -> Callable[[int], str]:
    """The kind of a layer by a field with a 1 or 0 for each, which older files have, or else by a rule."""
    found, count = c.integers(name), num_layers(c)
    if found is not None and len(found) != count:
        raise ConfigError(f"{c.file} has {count} layers but {len(found)} numbers in {name}.")
    return lambda layer: one if (default(layer) if found is None else found[layer]) else zero


def _window(c: Fields) -> Reach:
    """The older field counts the positions before a query."""
    if "sliding_window_size" in c:
        return Reach("window", c.size("sliding_window_size", most=2**31 - 2) + 1)
    return Reach("window", c.size("sliding_window", default=129, most=2**31 - 1))
