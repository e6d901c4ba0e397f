"""GPT-2, GPT-BigCode, GPT-J, GPT-NeoX and OPT: LayerNorm, plain feed-forward layers, learned or rotary positions."""

from collections.abc import Callable
from dataclasses import replace

from ..description import Attention, Block, Branch, Decoder, Embedding, Head, Norm, Rope, Sublayer
from ..fields import Fields, NotDescribedError
from ..pieces import (
    Qkvo,
    activation,
    attention,
    decoder,
    equal_heads,
    fused_qkv,
    grouped_qkv,
    layer_norm,
    layers,
    matrix,
    parallel,
    plain_mlp,
    prenorm,
    qkvo,
    rope,
)
from ..registry import family

_MASKS = (r"(.*\.)?(attn|attention)\.(bias|masked_bias)",)  # buffers in old files


@family("GPT2LMHeadModel")
def gpt2(c: Fields) -> Decoder:
    h, sizes = c.size("n_embd", "hidden_size", default=768), equal_heads(c)
    is_by_layer = c.flag("scale_attn_by_inverse_layer_idx", False)
    scale = sizes[2] ** -0.5 if c.flag("scale_attn_weights", True) else 1.0

    def mixer(at: str, layer: int) -> Attention:
        weights = fused_qkv(at + "attn.c_attn", h, *sizes, True, out=at + "attn.c_proj", is_transposed=True)
        return attention(sizes, weights, scale=scale / (layer + 1) if is_by_layer else scale)

    return _gpt2(c, mixer, "gelu_new", is_transposed=True)


@family("GPTBigCodeForCausalLM")
def gpt_bigcode(c: Fields) -> Decoder:
    h, (heads, _, dim) = c.size("n_embd", "hidden_size", default=768), equal_heads(c)
    is_multi_query = c.flag("multi_query", True)
    sizes = (heads, 1 if is_multi_query else heads, dim)
    scale = dim**-0.5 if c.flag("scale_attn_weights", True) else 1.0

    def mixer(at: str, layer: int) -> Attention:
        name, out = at + "attn.c_attn", at + "attn.c_proj"
        weights = (fused_qkv if is_multi_query else grouped_qkv)(name, h, *sizes, True, out=out)
        return attention(sizes, weights, scale=scale)

    return _gpt2(c, mixer, "gelu_pytorch_tanh", is_transposed=False)


def _gpt2(c: Fields, mixer: Callable[[str, int], Attention], act_name: str, *, is_transposed: bool) -> Decoder:
    if c.flag("add_cross_attention", False):
        raise NotDescribedError("cross-attention")
    h, eps = c.size("n_embd", "hidden_size", default=768), c.number("layer_norm_epsilon", 1e-5)
    act, width = activation(c, act_name, "activation_function"), c.size("n_inner", default=4 * h)

    def block(layer: int) -> Block:
        at = f"h.{layer}."
        feed_forward = plain_mlp(
            at + "mlp.", h, width, act, names=("c_fc", "c_proj"), bias=True, is_transposed=is_transposed
        )
        return prenorm(
            (layer_norm(at + "ln_1", h, eps), mixer(at, layer)), (layer_norm(at + "ln_2", h, eps), feed_forward)
        )

    found = decoder(
        c, block, layer_norm("ln_f", h, eps), tied=True, name="wte", prefixes=("transformer.", ""), ignored=_MASKS
    )
    positions = matrix("wpe", c.size("n_positions", default=1024), h)
    return replace(found, embedding=replace(found.embedding, positions=positions))


@family("GPTJForCausalLM")
def gptj(c: Fields) -> Decoder:
    h, eps, sizes = c.size("n_embd", "hidden_size"), c.number("layer_norm_epsilon", 1e-5), equal_heads(c)
    act, width = activation(c, "gelu_new", "activation_function"), c.size("n_inner", default=4 * h)
    turn = Rope(c.size("rotary_dim", default=sizes[2]), pairs="adjacent")

    def block(layer: int) -> Block:
        at = f"h.{layer}."
        mixer = attention(sizes, qkvo(at + "attn.", h, *sizes, out="out_proj"), rope=turn)
        feed_forward = plain_mlp(at + "mlp.", h, width, act, names=("fc_in", "fc_out"), bias=True)
        return parallel(layer_norm(at + "ln_1", h, eps), mixer, feed_forward)

    last = layer_norm("ln_f", h, eps)
    found = decoder(c, block, last, name="wte", prefixes=("transformer.", ""), ignored=_MASKS)
    if found.head.weight is None:
        raise NotDescribedError("a head with a bias whose matrix is the embedding's")
    return replace(found, head=replace(found.head, weight=matrix("/lm_head", found.vocab, h, True)))


@family("GPTNeoXForCausalLM")
def gpt_neox(c: Fields) -> Decoder:
    h, eps, sizes = c.size("hidden_size"), c.number("layer_norm_eps", 1e-5), equal_heads(c)
    act, width, bias = activation(c, "gelu"), c.size("intermediate_size"), c.flag("attention_bias", True)
    theta, share = c.number("rotary_emb_base", 10_000.0), c.number("rotary_pct", 0.25)
    turn = rope(c, sizes[2], theta=theta, share=share)

    def block(layer: int) -> Block:
        at = f"layers.{layer}."
        weights = grouped_qkv(at + "attention.query_key_value", h, *sizes, bias, out=at + "attention.dense")
        mixer = attention(sizes, weights, rope=turn)
        feed_forward = plain_mlp(at + "mlp.", h, width, act, names=("dense_h_to_4h", "dense_4h_to_h"), bias=True)
        first = layer_norm(at + "input_layernorm", h, eps)
        second = layer_norm(at + "post_attention_layernorm", h, eps)
        if c.flag("use_parallel_residual", True):
            return Block((Sublayer((Branch(mixer, first), Branch(feed_forward, second))),))
        return prenorm((first, mixer), (second, feed_forward))

    last = layer_norm("final_layer_norm", h, eps)
    found = decoder(c, block, last, name="embed_in", prefixes=("gpt_neox.", ""), ignored=_MASKS)
    weight = matrix("/embed_out", found.vocab, h) if found.head.weight is not None else None
    return replace(found, head=replace(found.head, weight=weight))


@family("OPTForCausalLM")
def opt(c: Fields) -> Decoder:
    h, bias, sizes = c.size("hidden_size"), c.flag("enable_bias", True), equal_heads(c)
    act, width = activation(c, "relu", "activation_function"), c.size("ffn_dim")
    is_before, has_weights = c.flag("do_layer_norm_before", True), c.flag("layer_norm_elementwise_affine", True)
    word, vocab = c.size("word_embed_proj_dim", default=h), c.size("vocab_size")

    def norm(name: str) -> Norm:
        return layer_norm(name, h, 1e-5) if has_weights else Norm(h, kind="layer", eps=1e-5)

    def block(layer: int) -> Block:
        at = f"layers.{layer}."
        weights: Qkvo = qkvo(at + "self_attn.", h, *sizes, bias, out="out_proj")
        bodies = (
            (norm(at + "self_attn_layer_norm"), attention(sizes, weights)),
            (norm(at + "final_layer_norm"), plain_mlp(at, h, width, act, names=("fc1", "fc2"), bias=bias)),
        )
        if is_before:
            return prenorm(*bodies)
        return Block(tuple(Sublayer((Branch(body),), after=after) for after, body in bodies))

    embedding = Embedding(
        matrix("embed_tokens", vocab, word),
        project=None if word == h else matrix("project_in", h, word),
        positions=matrix("embed_positions", c.size("max_position_embeddings", default=2048) + 2, h),
        offset=2,
    )
    head = Head(
        None if c.flag("tie_word_embeddings", True) else matrix("/lm_head", vocab, word),
        project=None if word == h else matrix("project_out", word, h),
    )
    last = norm("final_layer_norm") if is_before and not c.flag("_remove_final_layer_norm", False) else None
    return Decoder(h, vocab, embedding, layers(c, block), last, head, ("model.decoder.", "decoder.", ""))
