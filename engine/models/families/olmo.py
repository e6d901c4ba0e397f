"""OLMo 1 to 3: OLMo 1 has norms without weights; 2 and 3 norm queries and keys over all heads, and what a sublayer
adds in place of what it reads; 3 has windows. In OLMo Hybrid three of four layers compute the gated delta rule."""

from dataclasses import replace

from ..description import Block, Conv, Decoder, DeltaNet, Norm, Part, Rope, Weight
from ..fields import Fields
from ..pieces import (
    FULL,
    activation,
    attention,
    decoder,
    heads_of,
    layer_types,
    matrix,
    mixer_activation,
    mlp,
    num_layers,
    postnorm,
    prenorm,
    qkvo,
    rms,
    rope,
    vector,
    window_of,
)
from ..registry import family


@family("OlmoForCausalLM")
def olmo(c: Fields) -> Decoder:
    h, sizes, bias = c.size("hidden_size"), heads_of(c), c.flag("attention_bias", False)
    act, width, turn = activation(c, "silu"), c.size("intermediate_size"), rope(c, sizes[2])
    norm, clip = Norm(h, kind="layer", eps=1e-5), c.number("clip_qkv", 0.0)

    def block(layer: int) -> Block:
        at = f"layers.{layer}."
        mixer = attention(sizes, qkvo(at + "self_attn.", h, *sizes, bias), rope=turn)
        return prenorm((norm, replace(mixer, clip=clip)), (norm, mlp(at + "mlp.", h, width, act)))

    return decoder(c, block, norm)


@family("Olmo2ForCausalLM")
def olmo2(c: Fields) -> Decoder:
    return _later(c, {"full_attention": rope(c, heads_of(c)[2])}, layer_types(c, lambda _: "full_attention", ""))


@family("Olmo3ForCausalLM")
def olmo3(c: Fields) -> Decoder:
    dim = heads_of(c)[2]
    kinds = layer_types(c, lambda layer: "sliding_attention" if (layer + 1) % 4 else "full_attention")
    # Without `rope_parameters`, `rope_scaling` is that of full layers.
    near = c if c.part("rope_parameters") else Fields({**c.raw, "rope_scaling": None}, c.file)
    turns = {
        kind: rope(each, dim, kind=kind, theta=500_000.0)
        for kind, each in (("full_attention", c), ("sliding_attention", near))
    }
    return _later(c, turns, kinds)


def _later(c: Fields, turns: dict[str, Rope], kinds: tuple[str, ...]) -> Decoder:
    h, eps, sizes = c.size("hidden_size"), c.number("rms_norm_eps", 1e-5), heads_of(c)
    act, width, bias = activation(c, "silu"), c.size("intermediate_size"), c.flag("attention_bias", False)
    heads, kv_heads, dim = sizes

    def block(layer: int) -> Block:
        at = f"layers.{layer}."
        mixer = attention(
            sizes,
            qkvo(at + "self_attn.", h, *sizes, bias),
            rope=turns[kinds[layer]],
            reach=window_of(c) if kinds[layer] == "sliding_attention" else FULL,
            q_norm=rms(at + "self_attn.q_norm", heads * dim, eps),
            k_norm=rms(at + "self_attn.k_norm", kv_heads * dim, eps),
        )
        return postnorm(
            (mixer, rms(at + "post_attention_layernorm", h, eps)),
            (mlp(at + "mlp.", h, width, act), rms(at + "post_feedforward_layernorm", h, eps)),
        )

    return decoder(c, block, rms("norm", h, eps))


@family("OlmoHybridForCausalLM")
def olmo_hybrid(c: Fields) -> Decoder:
    """Layers that attend are those of OLMo 3 without windows, and released files have no rotary embedding. The others
    norm what a sublayer reads."""
    h, eps, sizes = c.size("hidden_size"), c.number("rms_norm_eps", 1e-6), heads_of(c)
    act, width, bias = activation(c, "silu"), c.size("intermediate_size"), c.flag("attention_bias", False)
    heads, kv_heads, dim = sizes
    given = c.part("rope_scaling") or c.part("rope_parameters") or Fields({}, c.file)
    at_top = c.raw.get("rope_theta", 10_000.0)
    # The base that transformers takes; null: none, and no rotary embedding.
    turn = None if given.raw.get("rope_theta", at_top) is None else rope(c, dim)
    last = num_layers(c) - 1
    kinds = layer_types(c, lambda i: "full_attention" if i % 4 == 3 or i == last < 3 else "linear_attention")
    mixer_activation(c)

    def full(at: str) -> Block:
        mixer = attention(
            sizes,
            qkvo(at + "self_attn.", h, *sizes, bias),
            rope=turn,
            q_norm=rms(at + "self_attn.q_norm", heads * dim, eps),
            k_norm=rms(at + "self_attn.k_norm", kv_heads * dim, eps),
        )
        # transformers writes the first norm under the name that the other layers have.
        post = _either(rms(at + "post_attention_layernorm", h, eps), at + "feedforward_layer_norm")
        return postnorm(
            (mixer, post), (mlp(at + "mlp.", h, width, act), rms(at + "post_feedforward_layernorm", h, eps))
        )

    def linear(at: str) -> Block:
        first = _either(rms(at + "attention_layer_norm", h, eps), at + "input_layernorm")
        second = _either(rms(at + "feedforward_layer_norm", h, eps), at + "post_attention_layernorm")
        return prenorm((first, _delta(c, at + "linear_attn.")), (second, mlp(at + "mlp.", h, width, act)))

    def block(layer: int) -> Block:
        at = f"layers.{layer}."
        return full(at) if kinds[layer] == "full_attention" else linear(at)

    return decoder(c, block, rms("norm", h, eps))


def _either(norm: Norm, name: str) -> Norm:
    """Its weight may have another name."""
    assert norm.weight is not None
    return replace(norm, weight=replace(norm.weight, other=vector(name + ".weight", norm.size)))


def _delta(c: Fields, at: str) -> DeltaNet:
    h, taps, heads = c.size("hidden_size"), c.size("linear_conv_kernel_dim", default=4), heads_of(c)[0]
    key_heads = c.size("linear_num_key_heads", default=heads)
    value_heads = c.size("linear_num_value_heads", default=heads)
    c.divided("value heads", value_heads, "key heads", key_heads)
    key_dim = c.size("linear_key_head_dim", default=3 * h // (4 * key_heads))
    value_dim = c.size("linear_value_head_dim", default=2 * key_dim)
    keys, values = key_heads * key_dim, value_heads * value_dim

    def three(name: str, columns: int) -> Weight:
        sizes = zip("qkv", (keys, keys, values), strict=True)
        return Weight(tuple(Part(f"{at}{each}_{name}.weight", size) for each, size in sizes), columns)

    return DeltaNet(
        key_heads, value_heads, key_dim, value_dim,
        qkv=three("proj", h), conv=Conv(three("conv1d", taps), 2 * keys + values, taps),
        beta=matrix(at + "b_proj", value_heads, h), decay=matrix(at + "a_proj", value_heads, h),
        a_log=vector(at + "A_log", value_heads, "neg_exp"), dt_bias=vector(at + "dt_bias", value_heads),
        gate=matrix(at + "g_proj", values, h), norm=rms(at + "o_norm", value_dim, 1e-5),  # whatever rms_norm_eps says
        o=matrix(at + "o_proj", h, values), beta_scale=2.0 if c.flag("linear_allow_neg_eigval", True) else 1.0,
    )  # fmt: skip
