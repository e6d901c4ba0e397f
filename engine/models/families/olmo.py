"""OLMo 1 to 3: OLMo 1 has norms without weights; 2 and 3 norm queries and keys over all heads, and what a sublayer
adds in place of what it reads; 3 has windows."""

from dataclasses import replace

from ..description import Block, Decoder, Norm, Rope
from ..fields import Fields
from ..pieces import (
    FULL,
    activation,
    attention,
    decoder,
    heads_of,
    layer_types,
    mlp,
    postnorm,
    prenorm,
    qkvo,
    rms,
    rope,
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
