"""Falcon, BLOOM and MPT: LayerNorm, plain feed-forward layers, and position biases of scores (ALiBi), which
Falcon has in place of rotary embeddings."""

from dataclasses import replace

from ..description import Alibi, Attention, Block, Branch, Decoder, Embedding, Norm, Sublayer
from ..fields import Fields, NotDescribedError
from ..pieces import (
    Qkvo,
    activation,
    alibi_slopes,
    attention,
    decoder,
    equal_heads,
    fused_qkv,
    grouped_qkv,
    layer_norm,
    parallel,
    plain_mlp,
    prenorm,
    rope,
)
from ..registry import family

_FEED_FORWARD = ("dense_h_to_4h", "dense_4h_to_h")


@family("FalconForCausalLM")
def falcon(c: Fields) -> Decoder:
    h, eps, bias = c.size("hidden_size"), c.number("layer_norm_epsilon", 1e-5), c.flag("bias", False)
    (heads, _, dim), is_new = equal_heads(c), c.flag("new_decoder_architecture", False)
    is_multi_query, is_parallel = c.flag("multi_query", True), is_new or c.flag("parallel_attn", True)
    kv_heads = c.size("num_kv_heads", default=heads) if is_new else 1 if is_multi_query else heads
    sizes, has_alibi = (heads, kv_heads, dim), c.flag("alibi", False)
    act, width = activation(c, "gelu", "activation"), c.size("ffn_hidden_size", default=4 * h)
    has_two_norms = is_new and c.size("num_ln_in_parallel_attn", default=2) == 2
    turn = None if has_alibi else rope(c, dim)
    bent = Alibi(alibi_slopes(heads), is_rounded=True, before_scale=True) if has_alibi else None

    def block(layer: int) -> Block:
        at = f"h.{layer}."
        name, out = at + "self_attention.query_key_value", at + "self_attention.dense"
        split = grouped_qkv if is_new or not is_multi_query else fused_qkv
        weights: Qkvo = split(name, h, *sizes, bias, out=out)
        mixer: Attention = replace(attention(sizes, weights, rope=turn), alibi=bent)
        feed_forward = plain_mlp(at + "mlp.", h, width, act, names=_FEED_FORWARD, bias=bias)
        if has_two_norms:
            first, second = layer_norm(at + "ln_attn", h, eps), layer_norm(at + "ln_mlp", h, eps)
            return Block((Sublayer((Branch(mixer, first), Branch(feed_forward, second))),))
        first = layer_norm(at + "input_layernorm", h, eps)
        if is_parallel:
            return parallel(first, mixer, feed_forward)
        return prenorm((first, mixer), (layer_norm(at + "post_attention_layernorm", h, eps), feed_forward))

    last, prefixes = layer_norm("ln_f", h, eps), ("transformer.", "")
    return decoder(c, block, last, tied=True, name="word_embeddings", prefixes=prefixes)


@family("BloomForCausalLM")
def bloom(c: Fields) -> Decoder:
    h, eps, sizes = c.size("hidden_size", "n_embed"), c.number("layer_norm_epsilon", 1e-5), equal_heads(c)
    keep = "normed" if c.flag("apply_residual_connection_post_layernorm", False) else "stream"
    bent = Alibi(alibi_slopes(sizes[0]))

    def block(layer: int) -> Block:
        at = f"h.{layer}."
        name, out = at + "self_attention.query_key_value", at + "self_attention.dense"
        mixer = replace(attention(sizes, grouped_qkv(name, h, *sizes, True, out=out)), alibi=bent)
        feed_forward = plain_mlp(at + "mlp.", h, 4 * h, "gelu_tanh", names=_FEED_FORWARD, bias=True)
        found = prenorm(
            (layer_norm(at + "input_layernorm", h, eps), mixer),
            (layer_norm(at + "post_attention_layernorm", h, eps), feed_forward),
        )
        return found if keep == "stream" else Block(tuple(replace(each, keep="normed") for each in found.sublayers))

    last, prefixes = layer_norm("ln_f", h, eps), ("transformer.", "")
    found = decoder(c, block, last, tied=True, name="word_embeddings", prefixes=prefixes)
    embedding: Embedding = replace(found.embedding, norm=layer_norm("word_embeddings_layernorm", h, eps))
    return replace(found, embedding=embedding)


@family("MptForCausalLM")
def mpt(c: Fields) -> Decoder:
    h, eps, sizes = c.size("d_model"), c.number("layer_norm_epsilon", 1e-5), equal_heads(c)
    given = c.part("attn_config") or Fields({}, c.file)
    for name, is_so in (
        ("no ALiBi", not given.flag("alibi", True)),
        ("norms of queries and keys", given.flag("qk_ln", False)),
        ("a prefix that is read in both directions", given.flag("prefix_lm", False)),
        ("a key/value head for all heads", given.text("attn_type", "") == "multiquery_attention"),
        ("biases", not c.flag("no_bias", True)),
    ):
        if is_so:
            raise NotDescribedError(name)
    bent = Alibi(_mpt_slopes(sizes[0], given.number("alibi_bias_max", 8.0)))
    clip, scale = given.number("clip_qkv", 0.0), given.number("softmax_scale", sizes[2] ** -0.5)

    def norm(name: str) -> Norm:
        return layer_norm(name, h, eps, bias=False)

    def block(layer: int) -> Block:
        at = f"blocks.{layer}."
        weights = fused_qkv(at + "attn.Wqkv", h, *sizes, out=at + "attn.out_proj")
        mixer = replace(attention(sizes, weights, scale=scale), alibi=bent, clip=clip)
        feed_forward = plain_mlp(at + "ffn.", h, c.size("expansion_ratio", default=4) * h, "gelu")
        return prenorm((norm(at + "norm_1"), mixer), (norm(at + "norm_2"), feed_forward))

    return decoder(c, block, norm("norm_f"), tied=True, name="wte", prefixes=("transformer.", ""))


def _mpt_slopes(heads: int, most: float) -> tuple[float, ...]:
    """For a number of heads that is no power of 2, those of the next power: first each second one."""
    power = 1 << (heads - 1).bit_length()
    slopes = [2 ** (-most * (i + 1) / power) for i in range(power)]
    return tuple(slopes if power == heads else [*slopes[1::2], *slopes[::2]][:heads])
