"""Phi-1 to 4. In Phi-3 and 4, projections that read the same input are one tensor."""

from dataclasses import replace

from ..description import Block, Decoder
from ..fields import Fields, NotDescribedError
from ..pieces import (
    activation,
    attention,
    decoder,
    fused_mlp,
    fused_qkv,
    heads_of,
    layer_norm,
    parallel,
    plain_mlp,
    prenorm,
    qkvo,
    rms,
    rope,
    window_of,
)
from ..registry import family


@family("PhiForCausalLM")
def phi(c: Fields) -> Decoder:
    """Phi-1 and 2: attention and feed-forward read one norm, and everything has a bias."""
    if c.flag("qk_layernorm", False):
        raise NotDescribedError("norms of queries and keys")
    h, eps, sizes = c.size("hidden_size"), c.number("layer_norm_eps", 1e-5), heads_of(c)
    act, width, turn = activation(c, "gelu_new"), c.size("intermediate_size"), rope(c, sizes[2], share=0.5)

    def block(layer: int) -> Block:
        at = f"layers.{layer}."
        weights = qkvo(at + "self_attn.", h, *sizes, True, out="dense")
        feed_forward = plain_mlp(at + "mlp.", h, width, act, names=("fc1", "fc2"), bias=True)
        return parallel(layer_norm(at + "input_layernorm", h, eps), attention(sizes, weights, rope=turn), feed_forward)

    return decoder(c, block, layer_norm("final_layernorm", h, eps), head_bias=True)


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

    made = decoder(c, block, rms("norm", h, eps))
    # transformers computes a sequence again once it is longer than the original length.
    return replace(made, regime_limit=turn.original) if turn.kind == "longrope" else made
