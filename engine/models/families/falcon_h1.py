"""Falcon-H1: attention and Mamba 2 side by side in every layer, and factors almost everywhere."""

from dataclasses import replace

from ..description import Block, Branch, Decoder, Sublayer
from ..fields import Fields, NotDescribedError
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
    qkvo,
    rms,
    rope,
)
from ..registry import family


@family("FalconH1ForCausalLM")
def falcon_h1(c: Fields) -> Decoder:
    h, eps, width = c.size("hidden_size"), c.number("rms_norm_eps", 1e-5), c.size("intermediate_size", default=14336)
    sizes, act, bias = heads_of(c), activation(c, "silu"), c.flag("attention_bias", False)
    inner = c.size("mamba_d_ssm", default=c.size("mamba_expand", default=2) * h)
    of_mamba, turn = mamba2_sizes(c, inner), rope(c, sizes[2])
    gate_scale, down_scale = _factors(c, "mlp_multipliers", 2)
    scales, has_norm = _factors(c, "ssm_multipliers", 5), c.flag("mamba_rms_norm", False)
    mixer_activation(c)

    def block(layer: int) -> Block:
        at = f"layers.{layer}."
        attending = attention(sizes, qkvo(at + "self_attn.", h, *sizes, bias), rope=turn)
        mixer = mamba2(
            at + "mamba.", h, *of_mamba,
            norm=rms(at + "mamba.norm", inner // of_mamba[3], eps, total=inner) if has_norm else None,
            norm_first=c.flag("mamba_norm_before_gate", True), limits=limits(c), scales=scales,
            bias=c.flag("mamba_proj_bias", False), out_bias=c.flag("projectors_bias", False),
            conv_bias=c.flag("mamba_conv_bias", True),
        )  # fmt: skip
        mixers = (
            Branch(mixer, in_scale=c.number("ssm_in_multiplier", 1.0), out_scale=c.number("ssm_out_multiplier", 1.0)),
            Branch(
                replace(attending, key_scale=c.number("key_multiplier", 1.0)),
                in_scale=c.number("attention_in_multiplier", 1.0),
                out_scale=c.number("attention_out_multiplier", 1.0),
            ),
        )
        feed_forward = mlp(at + "feed_forward.", h, width, act, bias=c.flag("mlp_bias", False))
        feed_forward = replace(feed_forward, gate_scale=gate_scale, out_scale=down_scale)
        return Block(
            (
                Sublayer(mixers, rms(at + "input_layernorm", h, eps)),
                Sublayer((Branch(feed_forward),), rms(at + "pre_ff_layernorm", h, eps)),
            )
        )

    scale, head_scale = c.number("embedding_multiplier", 1.0), c.number("lm_head_multiplier", 1.0)
    return decoder(c, block, rms("final_layernorm", h, eps), scale=scale, head_scale=head_scale)


def _factors(c: Fields, name: str, count: int) -> tuple[float, ...]:
    found = c.numbers(name) or (1.0,) * count
    if len(found) != count:
        raise NotDescribedError(f"{len(found)} {name} in place of {count}")
    return found
