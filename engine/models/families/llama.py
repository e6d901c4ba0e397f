"""Llama 1 to 3, and models with the same layers: Mistral has a sliding window."""

from ..description import Attention, Block, Decoder, Reach
from ..fields import Fields
from ..pieces import activation, decoder, heads_of, mlp, prenorm, qkvo, rms, rope, window_of
from ..registry import family


@family("LlamaForCausalLM", "MistralForCausalLM")
def llama(c: Fields) -> Decoder:
    h, eps = c.size("hidden_size"), c.number("rms_norm_eps", 1e-6)
    heads, kv_heads, dim = heads_of(c)
    bias, mlp_bias = c.flag("attention_bias", False), c.flag("mlp_bias", False)
    reach = window_of(c) if c.text("model_type", "") == "mistral" else Reach()
    turn, act, width = rope(c, dim), activation(c, "silu"), c.size("intermediate_size", default=4 * h)

    def block(layer: int) -> Block:
        at = f"layers.{layer}."
        return prenorm(
            (
                rms(at + "input_layernorm", h, eps),
                Attention(
                    heads, kv_heads, dim, dim, dim**-0.5, **qkvo(at + "self_attn.", h, heads, kv_heads, dim, bias),
                    rope=turn, reach=reach,
                ),
            ),
            (rms(at + "post_attention_layernorm", h, eps), mlp(at + "mlp.", h, width, act, bias=mlp_bias)),
        )  # fmt: skip

    return decoder(c, block, rms("norm", h, eps))
