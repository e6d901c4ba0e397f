"""Starcoder2, StableLM and Nemotron: Llama's names with LayerNorm."""

from ..description import Block, Branch, Decoder, Norm, Part, Sublayer, Weight
from ..fields import Fields
from ..pieces import (
    activation,
    attention,
    decoder,
    heads_of,
    layer_norm,
    mlp,
    parallel,
    plain_mlp,
    prenorm,
    qkvo,
    rope,
    window_of,
)
from ..registry import family


@family("Starcoder2ForCausalLM")
def starcoder2(c: Fields) -> Decoder:
    h, eps, sizes, bias = c.size("hidden_size"), c.number("norm_epsilon", 1e-5), heads_of(c), c.flag("use_bias", True)
    act, width, turn = activation(c, "gelu_pytorch_tanh"), c.size("intermediate_size"), rope(c, sizes[2])

    def block(layer: int) -> Block:
        at = f"layers.{layer}."
        mixer = attention(sizes, qkvo(at + "self_attn.", h, *sizes, bias), rope=turn, reach=window_of(c))
        feed_forward = plain_mlp(at + "mlp.", h, width, act, names=("c_fc", "c_proj"), bias=bias)
        return prenorm(
            (layer_norm(at + "input_layernorm", h, eps), mixer),
            (layer_norm(at + "post_attention_layernorm", h, eps), feed_forward),
        )

    return decoder(c, block, layer_norm("norm", h, eps), tied=True)


@family("StableLmForCausalLM")
def stablelm(c: Fields) -> Decoder:
    h, eps, sizes = c.size("hidden_size"), c.number("layer_norm_eps", 1e-5), heads_of(c)
    heads, kv_heads, dim = sizes
    act, width, turn = activation(c, "silu"), c.size("intermediate_size"), rope(c, dim, share=0.25)
    bias, has_norms = c.flag("use_qkv_bias", False), c.flag("qk_layernorm", False)

    def norm(name: str, num: int) -> Norm | None:
        parts = tuple(Part(f"{name}.norms.{head}.weight", dim) for head in range(num))
        return Norm(dim, Weight(parts), kind="layer", eps=eps) if has_norms else None

    def block(layer: int) -> Block:
        at = f"layers.{layer}."
        mixer = attention(
            sizes,
            qkvo(at + "self_attn.", h, *sizes, bias, out_bias=False),
            rope=turn,
            q_norm=norm(at + "self_attn.q_layernorm", heads),
            k_norm=norm(at + "self_attn.k_layernorm", kv_heads),
        )
        first, feed_forward = layer_norm(at + "input_layernorm", h, eps), mlp(at + "mlp.", h, width, act)
        if c.flag("use_parallel_residual", False):
            return parallel(first, mixer, feed_forward)
        return prenorm((first, mixer), (layer_norm(at + "post_attention_layernorm", h, eps), feed_forward))

    return decoder(c, block, layer_norm("norm", h, eps))


@family("NemotronForCausalLM")
def nemotron(c: Fields) -> Decoder:
    """Norms multiply by 1 + weight."""
    h, eps, sizes = c.size("hidden_size"), c.number("norm_eps", 1e-5), heads_of(c)
    act, width, turn = activation(c, "relu2"), c.size("intermediate_size"), rope(c, sizes[2], share=0.5)
    bias, mlp_bias = c.flag("attention_bias", False), c.flag("mlp_bias", False)

    def norm(name: str) -> Norm:
        return layer_norm(name, h, eps, map="plus_one")

    def block(layer: int) -> Block:
        at = f"layers.{layer}."
        bodies = (
            ("input_layernorm", attention(sizes, qkvo(at + "self_attn.", h, *sizes, bias), rope=turn)),
            ("post_attention_layernorm", plain_mlp(at + "mlp.", h, width, act, bias=mlp_bias)),
        )
        return Block(tuple(Sublayer((Branch(body),), norm(at + name)) for name, body in bodies))

    return decoder(c, block, norm("norm"))
