"""Bamba: Mamba 2 in most layers, attention in the others, and a feed-forward part in each."""

from ..description import Block, Decoder
from ..fields import Fields
from ..pieces import (
    activation,
    attention,
    decoder,
    heads_of,
    limits,
    mamba2,
    mamba2_sizes,
    mixer_activation,
    mlp,
    prenorm,
    qkvo,
    rms,
    rope,
)
from ..registry import family


@family("BambaForCausalLM")
def bamba(c: Fields) -> Decoder:
    h, eps, width = c.size("hidden_size"), c.number("rms_norm_eps", 1e-5), c.size("intermediate_size", default=14336)
    sizes, act, bias = heads_of(c), activation(c, "silu"), c.flag("attention_bias", False)
    inner = c.size("mamba_expand", default=2) * h
    of_mamba, turn = mamba2_sizes(c, inner), rope(c, sizes[2], share=0.5)
    attending = c.integers("attn_layer_indices") or ()
    mixer_activation(c)

    def block(layer: int) -> Block:
        at = f"layers.{layer}."
        mixer = (
            attention(sizes, qkvo(at + "self_attn.", h, *sizes, bias), rope=turn)
            if layer in attending
            else mamba2(
                at + "mamba.", h, *of_mamba,
                norm=rms(at + "mamba.norm", inner // of_mamba[3], eps, total=inner), limits=limits(c),
                bias=c.flag("mamba_proj_bias", False), conv_bias=c.flag("mamba_conv_bias", True),
            )
        )  # fmt: skip
        return prenorm(
            (rms(at + "input_layernorm", h, eps), mixer),
            (
                rms(at + "pre_ff_layernorm", h, eps),
                mlp(at + "feed_forward.", h, width, act, bias=c.flag("mlp_bias", False)),
            ),
        )

    return decoder(c, block, rms("final_layernorm", h, eps))
