"""T5, FLAN-T5, mT5 and UMT5: an encoder and a decoder with relative positions, RMS norms, and scores that are not
scaled."""

from dataclasses import replace

from ..description import Attention, Block, Decoder, Embedding, Encoder, Head, Mlp, Reach, Relative
from ..fields import MAX_LAYERS, Fields, NotDescribedError
from ..pieces import FULL, activation, matrix, mlp, plain_mlp, prenorm, rms
from ..registry import family

_CROSS, _WHOLE = Reach("cross"), Reach("whole")
# Copies of the embedding, and a table that old files have and nobody reads.
_IGNORED = (
    r"(encoder|decoder)\.embed_tokens\.weight",
    r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
)


@family("T5ForConditionalGeneration")
def t5(c: Fields) -> Decoder:
    return _t5(c, has_tables=False, scales=_scales(c))


@family("MT5ForConditionalGeneration")
def mt5(c: Fields) -> Decoder:
    return _t5(c, has_tables=False, scales=False)


@family("UMT5ForConditionalGeneration")
def umt5(c: Fields) -> Decoder:
    return _t5(c, has_tables=True, scales=_scales(c))


def _scales(c: Fields) -> bool:
    """Whether the head's input is scaled: in the first T5, whose head is the embedding."""
    return c.flag("scale_decoder_outputs", c.flag("tie_word_embeddings", True))


def _t5(c: Fields, *, has_tables: bool, scales: bool) -> Decoder:
    """has_tables: each layer has relative positions of its own; otherwise those of the first layer serve all. scales:
    see `_scales`. Without it the head has weights of its own, unless the file leaves them out."""
    h, heads, dim = c.size("d_model", default=512), c.size("num_heads", default=8), c.size("d_kv", default=64)
    eps, inner, vocab = c.number("layer_norm_epsilon", 1e-6), heads * dim, c.size("vocab_size")
    buckets = c.size("relative_attention_num_buckets", default=32)
    longest = c.size("relative_attention_max_distance", default=128)

    def attention(at: str, kind: Reach, relative: Relative | None) -> Attention:
        q, k, v = (matrix(at + name, inner, h) for name in "qkv")
        return Attention(
            heads, heads, dim, dim, 1.0, q, k, v, matrix(at + "o", h, inner), reach=kind, relative=relative
        )

    def positions(side: str, layer: int) -> Relative:
        at = f"{side}.block.{layer if has_tables else 0}.layer.0.SelfAttention.relative_attention_bias"
        return Relative(matrix(at, buckets, heads), longest, is_two_sided=side == "encoder")

    def encoding(layer: int) -> Block:
        at = f"encoder.block.{layer}.layer."
        reader = attention(at + "0.SelfAttention.", _WHOLE, positions("encoder", layer))
        return prenorm(
            (rms(at + "0.layer_norm", h, eps), reader),
            (rms(at + "1.layer_norm", h, eps), _feed_forward(c, at + "1.DenseReluDense.", h)),
        )

    def decoding(layer: int) -> Block:
        at = f"decoder.block.{layer}.layer."
        return prenorm(
            (rms(at + "0.layer_norm", h, eps), attention(at + "0.SelfAttention.", FULL, positions("decoder", layer))),
            (rms(at + "1.layer_norm", h, eps), attention(at + "1.EncDecAttention.", _CROSS, None)),
            (rms(at + "2.layer_norm", h, eps), _feed_forward(c, at + "2.DenseReluDense.", h)),
        )

    num = c.size("num_layers", default=6, most=MAX_LAYERS)
    table = Embedding(matrix("shared", vocab, h))
    return Decoder(
        h,
        vocab,
        table,
        tuple(decoding(layer) for layer in range(c.size("num_decoder_layers", default=num, most=MAX_LAYERS))),
        rms("decoder.final_layer_norm", h, eps),
        Head(scale=h**-0.5) if scales else Head(replace(matrix("lm_head", vocab, h), other=table.table)),
        ("",),
        _IGNORED,
        encoder=Encoder(table, tuple(encoding(layer) for layer in range(num)), rms("encoder.final_layer_norm", h, eps)),
    )


def _feed_forward(c: Fields, at: str, h: int) -> Mlp:
    width, name = c.size("d_ff", default=2048), c.text("feed_forward_proj", "relu")
    gate, _, act = name.rpartition("-")
    if gate not in ("", "gated"):
        raise NotDescribedError(f"the feed-forward layer {name!r}")
    if name == "gated-gelu":
        act = "gelu_new"
    known = activation(Fields({"act": act}, c.file), act, "act")
    if gate:
        return mlp(at, h, width, known, names=("wi_0", "wi_1", "wo"))
    return plain_mlp(at, h, width, known, names=("wi", "wo"))
