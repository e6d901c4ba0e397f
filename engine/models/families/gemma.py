"""Gemma 1 to 3: norms multiply by 1 + weight, and embeddings are scaled by the root of their size. Gemma 2 and 3 norm
what a sublayer adds, and some of their layers have windows."""

import math
from collections.abc import Callable

from ..description import Attention, Block, Decoder, Norm, Rope
from ..fields import Fields, NotDescribedError
from ..pieces import (
    FULL,
    TOWERS,
    activation,
    attention,
    decoder,
    heads_of,
    layer_types,
    mlp,
    prenorm,
    qkvo,
    rms,
    rope,
    sandwich,
    window_of,
)
from ..registry import family

_PREFIXES = ("model.", "language_model.model.", "model.language_model.", "")


def _norms(c: Fields) -> Callable[..., Norm]:
    eps = c.number("rms_norm_eps", 1e-6)

    def norm(name: str, size: int) -> Norm:
        return rms(name, size, eps, map="plus_one")

    return norm


def _check(c: Fields) -> None:
    if c.flag("use_bidirectional_attention", False):
        raise NotDescribedError("bidirectional attention")


@family("GemmaForCausalLM")
def gemma(c: Fields) -> Decoder:
    _check(c)
    h, norm, width = c.size("hidden_size"), _norms(c), c.size("intermediate_size")
    sizes, bias = heads_of(c, dim=256), c.flag("attention_bias", False)
    turn, act = rope(c, sizes[2]), activation(c, "gelu_pytorch_tanh")
    act = "gelu_tanh" if act == "gelu" else act  # the first files say gelu and mean its approximation

    def block(layer: int) -> Block:
        at = f"layers.{layer}."
        return prenorm(
            (norm(at + "input_layernorm", h), attention(sizes, qkvo(at + "self_attn.", h, *sizes, bias), rope=turn)),
            (norm(at + "post_attention_layernorm", h), mlp(at + "mlp.", h, width, act)),
        )

    return decoder(c, block, norm("norm", h), tied=True, scale=math.sqrt(h))


@family("Gemma2ForCausalLM")
def gemma2(c: Fields) -> Decoder:
    _check(c)
    turn = rope(c, heads_of(c, dim=256)[2])
    kinds = layer_types(c, lambda layer: "full_attention" if layer % 2 else "sliding_attention")
    softcap = 0.0 if _is_null(c, "attn_logit_softcapping") else c.number("attn_logit_softcapping", 50.0)
    last = 0.0 if _is_null(c, "final_logit_softcapping") else c.number("final_logit_softcapping", 30.0)
    return _sandwiched(c, kinds, lambda kind: turn, softcap, last, has_norms=False)


@family("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")
def gemma3(c: Fields) -> Decoder:
    _check(c)
    dim, every = heads_of(c, dim=256)[2], c.size("sliding_window_pattern", default=6)
    kinds = layer_types(c, lambda layer: "sliding_attention" if (layer + 1) % every else "full_attention")
    is_old = c.part("rope_parameters") is None  # then `rope_scaling` is that of full layers
    near = {"rope_theta": c.number("rope_local_base_freq", 10_000.0)}
    fields = {
        "full_attention": c,
        "sliding_attention": Fields({**c.raw, "rope_scaling": None, **near}, c.file) if is_old else c,
    }
    turns = {
        kind: rope(fields[kind], dim, kind=kind, theta=1e6 if kind == "full_attention" else 10_000.0) for kind in fields
    }
    last = c.number("final_logit_softcapping", 0.0)
    # Scores have no softcap, whatever attn_logit_softcapping says, as in transformers.
    return _sandwiched(c, kinds, lambda kind: turns[kind], 0.0, last, has_norms=True)


def _is_null(c: Fields, name: str) -> bool:
    return name in c.raw and c.raw[name] is None


def _sandwiched(
    c: Fields,
    kinds: tuple[str, ...],
    turn: Callable[[str], Rope],
    softcap: float,
    last: float,
    *,
    has_norms: bool,
) -> Decoder:
    h, norm, width = c.size("hidden_size"), _norms(c), c.size("intermediate_size")
    heads, kv_heads, dim = heads_of(c, dim=256)
    bias, act = c.flag("attention_bias", False), activation(c, "gelu_pytorch_tanh", "hidden_activation", "hidden_act")
    scale = c.number("query_pre_attn_scalar", 256.0) ** -0.5

    def mixer(at: str, kind: str) -> Attention:
        return Attention(
            heads,
            kv_heads,
            dim,
            dim,
            scale,
            **qkvo(at, h, heads, kv_heads, dim, bias),
            rope=turn(kind),
            reach=window_of(c) if kind == "sliding_attention" else FULL,
            softcap=softcap,
            q_norm=norm(at + "q_norm", dim) if has_norms else None,
            k_norm=norm(at + "k_norm", dim) if has_norms else None,
        )

    def block(layer: int) -> Block:
        at = f"layers.{layer}."
        return sandwich(
            (
                norm(at + "input_layernorm", h),
                mixer(at + "self_attn.", kinds[layer]),
                norm(at + "post_attention_layernorm", h),
            ),
            (
                norm(at + "pre_feedforward_layernorm", h),
                mlp(at + "mlp.", h, width, act),
                norm(at + "post_feedforward_layernorm", h),
            ),
        )

    return decoder(
        c,
        block,
        norm("norm", h),
        tied=True,
        scale=math.sqrt(h),
        softcap=last,
        prefixes=_PREFIXES,
        ignored=TOWERS,
    )
