"""BART, PLBART, mBART and Blenderbot: an encoder and a decoder with learned positions and LayerNorm, before or after
each part of a layer."""

from ..description import (
    Attention,
    Block,
    Body,
    Branch,
    Decoder,
    Embedding,
    Encoder,
    Head,
    Norm,
    Reach,
    Sublayer,
)
from ..fields import MAX_LAYERS, MAX_POSITIONS, Fields
from ..pieces import FULL, activation, layer_norm, matrix, plain_mlp, prenorm, qkvo, vector
from ..registry import family

_CROSS, _WHOLE = Reach("cross"), Reach("whole")
_EPS = 1e-5
_IGNORED = (r"(model\.)?(encoder|decoder)\.embed_tokens\.weight", r"(model\.)?(encoder|decoder)\.version")


@family("BartForConditionalGeneration", "PLBartForConditionalGeneration")
def bart(c: Fields) -> Decoder:
    return _described(c, is_before=False, norms_embedding=True, offset=2, scales=c.text("model_type", "") == "plbart")


@family("MBartForConditionalGeneration")
def mbart(c: Fields) -> Decoder:
    return _described(c, is_before=True, norms_embedding=True, offset=2)


@family("BlenderbotForConditionalGeneration")
def blenderbot(c: Fields) -> Decoder:
    return _described(c, is_before=True, norms_embedding=False, offset=0)


def _described(c: Fields, *, is_before: bool, norms_embedding: bool, offset: int, scales: bool = False) -> Decoder:
    """is_before: norms are before what is added to the stream, and one is behind all layers. norms_embedding: the
    embeddings, with the positions, have one as well. offset: of the first position in the table. scales: the default of
    scale_embedding."""
    h, vocab, act = c.size("d_model", default=1024), c.size("vocab_size"), activation(c, "gelu", "activation_function")
    factor = h**0.5 if c.flag("scale_embedding", scales) else 1.0
    num_positions = c.size("max_position_embeddings", default=1024, most=MAX_POSITIONS) + offset

    def attention(side: str, at: str, reach: Reach) -> Attention:
        heads = c.size(f"{side}_attention_heads", default=16)
        dim = c.divided("hidden numbers", h, "attention heads", heads)
        return Attention(heads, heads, dim, dim, dim**-0.5, **qkvo(at, h, heads, heads, dim, True, out="out_proj"),
                         reach=reach)  # fmt: skip

    def block(side: str, layer: int) -> Block:
        at = f"{side}.layers.{layer}."
        pairs: list[tuple[Norm, Body]] = [
            (
                layer_norm(at + "self_attn_layer_norm", h, _EPS),
                attention(side, at + "self_attn.", _WHOLE if side == "encoder" else FULL),
            )
        ]
        if side == "decoder":
            norm = layer_norm(at + "encoder_attn_layer_norm", h, _EPS)
            pairs.append((norm, attention(side, at + "encoder_attn.", _CROSS)))
        width = c.size(f"{side}_ffn_dim", default=4096)
        feed_forward = plain_mlp(at, h, width, act, names=("fc1", "fc2"), bias=True)
        pairs.append((layer_norm(at + "final_layer_norm", h, _EPS), feed_forward))
        if is_before:
            return prenorm(*pairs)
        return Block(tuple(Sublayer((Branch(body),), after=norm) for norm, body in pairs))

    def blocks(side: str) -> tuple[Block, ...]:
        return tuple(block(side, layer) for layer in range(c.size(f"{side}_layers", default=12, most=MAX_LAYERS)))

    def embedding(side: str) -> Embedding:
        return Embedding(
            matrix("shared", vocab, h),
            factor,
            layer_norm(f"{side}.layernorm_embedding", h, _EPS) if norms_embedding else None,
            positions=matrix(f"{side}.embed_positions", num_positions, h),
            offset=offset,
        )

    def last(side: str) -> Norm | None:
        return layer_norm(f"{side}.layer_norm", h, _EPS) if is_before else None

    tied = c.flag("tie_word_embeddings", True)
    return Decoder(
        h,
        vocab,
        embedding("decoder"),
        blocks("decoder"),
        last("decoder"),
        Head(None if tied else matrix("/lm_head", vocab, h), bias=vector("/final_logits_bias", vocab)),
        ("model.", ""),
        _IGNORED,
        encoder=Encoder(embedding("encoder"), blocks("encoder"), last("encoder")),
    )
