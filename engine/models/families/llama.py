"""Llama 1 to 3, and models with the same layers, which differ in biases, windows, rotations and factors."""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from ..description import Attention, Block, Body, Branch, Decoder, Part, Reach, Rope, Sublayer, Temperature
from ..fields import Fields
from ..pieces import (
    FULL,
    TOWERS,
    activation,
    attention,
    decoder,
    heads_of,
    layer_types,
    mlp,
    num_layers,
    plain_mlp,
    prenorm,
    qkvo,
    rms,
    rope,
    temperature,
    window_of,
)
from ..registry import family

_PREFIXES = ("model.", "language_model.model.", "model.language_model.", "")


@family("LlamaForCausalLM", "MistralForCausalLM", "Ministral3ForCausalLM")
def llama(c: Fields) -> Decoder:
    kind = c.text("model_type", "")
    sizes = heads_of(c, dim=128) if kind == "ministral3" else heads_of(c)
    reach = window_of(c) if kind in ("mistral", "ministral3") else FULL
    bias = c.flag("attention_bias", False)
    return _layers(
        c, sizes, lambda _: rope(c, sizes[2]), lambda _: reach, bias=bias, out_bias=bias,
        mlp_bias=c.flag("mlp_bias", False), heat=temperature(c) if kind == "ministral3" else None,
    )  # fmt: skip


@family("MinistralForCausalLM")
def ministral(c: Fields) -> Decoder:
    sizes = heads_of(c)
    kinds = layer_types(c, lambda _: "sliding_attention" if "sliding_window" in c else "full_attention")
    return _layers(
        c, sizes, lambda _: rope(c, sizes[2]), lambda i: window_of(c) if kinds[i] == "sliding_attention" else FULL
    )


@family("SeedOssForCausalLM")
def seed_oss(c: Fields) -> Decoder:
    sizes = heads_of(c, dim=128)
    return _layers(
        c, sizes, lambda _: rope(c, sizes[2]), bias=c.flag("attention_bias", True),
        out_bias=c.flag("attention_out_bias", False), mlp_bias=c.flag("mlp_bias", False),
    )  # fmt: skip


@family("HeliumForCausalLM")
def helium(c: Fields) -> Decoder:
    sizes = heads_of(c, dim=128)
    return _layers(
        c, sizes, lambda _: rope(c, sizes[2], theta=100_000.0, pairs="adjacent"), eps=1e-8,
        bias=c.flag("attention_bias", False), mlp_bias=c.flag("mlp_bias", False),
    )  # fmt: skip


@family("Ernie4_5ForCausalLM")
def ernie(c: Fields) -> Decoder:
    sizes, bias = heads_of(c, dim=128), c.flag("use_bias", False)
    turn = rope(c, sizes[2], theta=500_000.0, pairs="adjacent")
    return _layers(c, sizes, lambda _: turn, eps=1e-5, bias=bias, out_bias=bias, mlp_bias=bias, tied=True)


@family("SmolLM3ForCausalLM")
def smollm3(c: Fields) -> Decoder:
    sizes, bias = heads_of(c), c.flag("attention_bias", False)
    every = c.size("no_rope_layer_interval", default=4)
    turns = c.integers("no_rope_layers") or tuple(int((i + 1) % every != 0) for i in range(num_layers(c)))
    has_windows = c.flag("use_sliding_window", False) and "sliding_window" in c
    kinds = layer_types(c, lambda i: "sliding_attention" if has_windows and not turns[i] else "full_attention")
    return _layers(
        c,
        sizes,
        lambda i: rope(c, sizes[2], theta=2e6) if turns[i] else None,
        lambda i: window_of(c) if has_windows and kinds[i] == "sliding_attention" else FULL,
        bias=bias,
        out_bias=bias,
        mlp_bias=c.flag("mlp_bias", False),
        tied=True,
    )


@family("ArceeForCausalLM")
def arcee(c: Fields) -> Decoder:
    sizes, bias = heads_of(c), c.flag("attention_bias", False)
    return _layers(
        c, sizes, lambda _: rope(c, sizes[2]), eps=1e-5, bias=bias, out_bias=bias, mlp_bias=c.flag("mlp_bias", False),
        form="plain",
    )  # fmt: skip


@family("HunYuanDenseV1ForCausalLM")
def hunyuan(c: Fields) -> Decoder:
    sizes, bias = heads_of(c), c.flag("attention_bias", False)
    return _layers(c, sizes, lambda _: rope(c, sizes[2]), eps=1e-5, bias=bias, out_bias=bias, has_late_norms=True)


@family("GraniteForCausalLM")
def granite(c: Fields) -> Decoder:
    return _scaled(c, c.number("attention_multiplier", 1.0), 1.0 / c.number("logits_scaling", 1.0), is_sandwich=False)


@family("GraniteSWAForCausalLM")
def granite_swa(c: Fields) -> Decoder:
    """With windows, sinks and a base of its own for each layer, 0 for a layer without a rotary embedding."""
    kinds = layer_types(c, lambda layer: "sliding_attention" if layer % 4 else "full_attention")
    given = c.raw.get("layer_rope_theta")
    bases = given if isinstance(given, list) and len(given) == len(kinds) else [None] * len(kinds)
    c = Fields({"sliding_window": 128, "tie_word_embeddings": True, "rms_norm_eps": 1e-5} | c.raw, c.file)
    found = _scaled(c, c.number("attention_multiplier", 1.0), 1.0 / c.number("logits_scaling", 1.0), is_sandwich=False)

    def changed(block: Block, layer: int) -> Block:
        first, second = block.sublayers
        body, base = first.branches[0].body, bases[layer]
        assert isinstance(body, Attention) and body.rope is not None
        turn = body.rope if not isinstance(base, int | float) else replace(body.rope, theta=float(base))
        body = replace(
            body,
            rope=None if base == 0 else turn,
            reach=window_of(c) if kinds[layer] == "sliding_attention" else FULL,
            sinks=Part(f"layers.{layer}.self_attn.sinks", body.heads),
        )
        return replace(block, sublayers=(replace(first, branches=(Branch(body),)), second))

    return replace(found, blocks=tuple(changed(block, layer) for layer, block in enumerate(found.blocks)))


@family("CwmForCausalLM")
def cwm(c: Fields) -> Decoder:
    sizes = heads_of(c, dim=128)
    kinds = layer_types(c, lambda layer: "sliding_attention" if layer % 4 else "full_attention")
    c = Fields({"sliding_window": 8192, "rms_norm_eps": 1e-5} | c.raw, c.file)
    turn = rope(c, sizes[2], theta=1e6)
    return _layers(c, sizes, lambda _: turn, lambda i: window_of(c) if kinds[i] == "sliding_attention" else FULL)


@family("HyperCLOVAXForCausalLM")
def hyperclovax(c: Fields) -> Decoder:
    scale = c.number("attention_multiplier", heads_of(c)[2] ** -0.5)
    return _scaled(c, scale, c.number("logits_scaling", 1.0), is_sandwich=c.flag("use_post_norm", True))


def _scaled(c: Fields, scale: float, head_scale: float, *, is_sandwich: bool) -> Decoder:
    """With factors of embeddings, scores, what is added to the stream, and logits."""
    h, eps, sizes, beta = (
        c.size("hidden_size"),
        c.number("rms_norm_eps", 1e-6),
        heads_of(c),
        c.number("residual_multiplier", 1.0),
    )
    turn, act, width = rope(c, sizes[2]), activation(c, "silu"), c.size("intermediate_size")
    bias, mlp_bias = c.flag("attention_bias", False), c.flag("mlp_bias", False)

    def block(layer: int) -> Block:
        at = f"layers.{layer}."
        bodies: tuple[tuple[str, Body], ...] = (
            ("input_layernorm", attention(sizes, qkvo(at + "self_attn.", h, *sizes, bias), scale=scale, rope=turn)),
            ("post_attention_layernorm", mlp(at + "mlp.", h, width, act, bias=mlp_bias)),
        )
        return Block(
            tuple(
                Sublayer(
                    (Branch(body),),
                    rms(at + name, h, eps),
                    rms(f"{at}post_norm{number}", h, eps) if is_sandwich else None,
                    beta=beta,
                )
                for number, (name, body) in enumerate(bodies, 1)
            )
        )

    factor = c.number("embedding_multiplier", 1.0)
    return decoder(c, block, rms("norm", h, eps), scale=factor, head_scale=head_scale)


def _layers(
    c: Fields,
    sizes: tuple[int, int, int],
    turn: Callable[[int], Rope | None],
    reach: Callable[[int], Reach] = lambda _: FULL,
    *,
    eps: float = 1e-6,
    bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    tied: bool = False,
    heat: Temperature | None = None,
    has_late_norms: bool = False,
    form: Literal["gated", "plain"] = "gated",
) -> Decoder:
    """eps: the default of rms_norm_eps. has_late_norms: of queries and keys, after the rotation."""
    h, eps = c.size("hidden_size"), c.number("rms_norm_eps", eps)
    heads, kv_heads, dim = sizes
    act, width = activation(c, "silu" if form == "gated" else "relu2"), c.size("intermediate_size", default=4 * h)

    def mixer(at: str, layer: int) -> Attention:
        return Attention(
            heads,
            kv_heads,
            dim,
            dim,
            dim**-0.5,
            **qkvo(at, h, heads, kv_heads, dim, bias, out_bias=out_bias),
            rope=turn(layer),
            reach=reach(layer),
            temperature=heat,
            q_norm=rms(at + "query_layernorm", dim, eps) if has_late_norms else None,
            k_norm=rms(at + "key_layernorm", dim, eps) if has_late_norms else None,
            norm_after_rope=has_late_norms,
        )

    def block(layer: int) -> Block:
        at = f"layers.{layer}."
        build = mlp if form == "gated" else plain_mlp
        return prenorm(
            (rms(at + "input_layernorm", h, eps), mixer(at + "self_attn.", layer)),
            (rms(at + "post_attention_layernorm", h, eps), build(at + "mlp.", h, width, act, bias=mlp_bias)),
        )

    return decoder(c, block, rms("norm", h, eps), tied=tied, prefixes=_PREFIXES, ignored=TOWERS)
