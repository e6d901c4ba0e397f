"""Phi-3 and Phi-4: projections that read the same input are one tensor."""

from ..description import Block, Decoder
from ..fields import Fields
from ..pieces import activation, attention, decoder, fused_mlp, fused_qkv, heads_of, prenorm, rms, rope, window_of
from ..registry import family


@family("Phi3ForCausalLM")
def phi3(c: Fields) -> Decoder:
    h, eps, sizes = c.size("hidden_size"), c.number("rms_norm_eps", 1e-5), heads_of(c)
    act, width, turn, reach = activation(c, "silu"), c.size("intermediate_size"), rope(c, sizes[2]), window_of(c)

    def block(layer: int) -> Block:
        at = f"layers.{layer}."
        weights = fused_qkv(at + "self_attn.qkv_proj", h, *sizes, out=at + "self_attn.o_proj")
        return prenorm(
            (rms(at + "input_layernorm", h, eps), attention(sizes, weights, rope=turn, reach=reach)),
            (rms(at + "post_attention_layernorm", h, eps), fused_mlp(at + "mlp.", h, width, act)),
        )

    return decoder(c, block, rms("norm", h, eps))
