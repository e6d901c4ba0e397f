"""GLM and GLM-4 (dense): adjacent features turn in half of each head, and gates and ups are one tensor. GLM-4 also
norms what a sublayer adds."""

from dataclasses import replace

from ..description import Block, Decoder
from ..fields import Fields
from ..pieces import (
    TOWERS,
    WRAPPED,
    activation,
    attention,
    decoder,
    fused_mlp,
    heads_of,
    later_layers,
    prenorm,
    qkvo,
    rms,
    rope,
    sandwich,
)
from ..registry import family


@family("GlmForCausalLM")
def glm(c: Fields) -> Decoder:
    return _glm(c, is_sandwich=False)


@family("Glm4ForCausalLM")
def glm4(c: Fields) -> Decoder:
    return _glm(c, is_sandwich=True)


@family("Glm4vForConditionalGeneration", "Glm46VForConditionalGeneration", "GlmOcrForConditionalGeneration")
def glm4v(c: Fields) -> Decoder:
    """The text part, with heads of another default size."""
    each = c.divided("hidden numbers", c.size("hidden_size"), "heads", c.size("num_attention_heads"))
    bias = c.text("model_type", "") != "glm_ocr_text"
    fields = {"head_dim": each, "rms_norm_eps": 1e-5, "attention_bias": bias, "partial_rotary_factor": 1.0}
    found = _glm(Fields(fields | c.raw, c.file), is_sandwich=True)
    return replace(found, prefixes=WRAPPED, ignored=(*TOWERS, later_layers(c)))


def _glm(c: Fields, *, is_sandwich: bool) -> Decoder:
    h, eps, sizes = c.size("hidden_size"), c.number("rms_norm_eps", 1.5625e-7), heads_of(c, dim=128)
    act, width, bias = activation(c, "silu"), c.size("intermediate_size"), c.flag("attention_bias", True)
    turn = rope(c, sizes[2], share=0.5, pairs="adjacent")

    def block(layer: int) -> Block:
        at = f"layers.{layer}."
        first, second = rms(at + "input_layernorm", h, eps), rms(at + "post_attention_layernorm", h, eps)
        mixer = attention(sizes, qkvo(at + "self_attn.", h, *sizes, bias, out_bias=False), rope=turn)
        feed_forward = fused_mlp(at + "mlp.", h, width, act)
        if not is_sandwich:
            return prenorm((first, mixer), (second, feed_forward))
        return sandwich(
            (first, mixer, rms(at + "post_self_attn_layernorm", h, eps)),
            (second, feed_forward, rms(at + "post_mlp_layernorm", h, eps)),
        )

    return decoder(c, block, rms("norm", h, eps))
