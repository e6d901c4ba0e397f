"""Cohere 1 and 2: attention and feed-forward read the same norm. In Cohere 2, layers without windows have no position
embedding."""

from collections.abc import Callable

from ..description import Block, Decoder, Norm, Weight
from ..fields import Fields
from ..pieces import (
    FULL,
    activation,
    attention,
    decoder,
    heads_of,
    layer_norm,
    layer_types,
    mlp,
    parallel,
    qkvo,
    rope,
    vector,
    window_of,
)
from ..registry import family


@family("CohereForCausalLM")
def cohere(c: Fields) -> Decoder:
    return _cohere(c, lambda _: "full_attention", has_norms=c.flag("use_qk_norm", False), is_nope=False)


@family("Cohere2ForCausalLM")
def cohere2(c: Fields) -> Decoder:
    every = c.size("sliding_window_pattern", default=4)
    kinds = layer_types(c, lambda layer: "sliding_attention" if (layer + 1) % every else "full_attention")
    return _cohere(c, lambda layer: kinds[layer], has_norms=False, is_nope=True)


def _cohere(c: Fields, kind: Callable[[int], str], *, has_norms: bool, is_nope: bool) -> Decoder:
    """is_nope: layers without windows have no position embedding."""
    h, eps, sizes = c.size("hidden_size"), c.number("layer_norm_eps", 1e-5), heads_of(c)
    act, width, bias = activation(c, "silu"), c.size("intermediate_size"), c.flag("attention_bias", False)
    heads, kv_heads, dim = sizes
    turn = rope(c, dim, theta=500_000.0 if not is_nope else 10_000.0, pairs="adjacent")

    def norm(name: str, num: int) -> Norm | None:
        weight: Weight = vector(name + ".weight", num * dim)  # a row for each head
        return Norm(dim, weight, kind="layer", eps=eps) if has_norms else None

    def block(layer: int) -> Block:
        at = f"layers.{layer}."
        is_near = kind(layer) == "sliding_attention"
        mixer = attention(
            sizes,
            qkvo(at + "self_attn.", h, *sizes, bias),
            rope=turn if is_near or not is_nope else None,
            reach=window_of(c) if is_near else FULL,
            q_norm=norm(at + "self_attn.q_norm", heads),
            k_norm=norm(at + "self_attn.k_norm", kv_heads),
        )
        return parallel(layer_norm(at + "input_layernorm", h, eps, bias=False), mixer, mlp(at + "mlp.", h, width, act))

    last = layer_norm("norm", h, eps, bias=False)
    return decoder(c, block, last, tied=True, head_scale=c.number("logit_scale", 0.0625))
