"""Descriptions of small decoders: one of each family's page, and random ones."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import checkpoints
import transformers
from hypothesis import strategies as st

from pagewire.engine.models.description import (
    Activation,
    Aside,
    Attention,
    Block,
    Body,
    Branch,
    Decoder,
    Embedding,
    Head,
    LowRank,
    Mlp,
    Moe,
    Norm,
    Part,
    Reach,
    Rope,
    Router,
    Sublayer,
    Temperature,
    Weight,
)
from pagewire.engine.models.families import describe
from pagewire.engine.models.fields import Fields, NotDescribedError
from pagewire.engine.models.pieces import layer_norm, matrix, rms, rows_of

HIDDEN = 16


def llama(**fields: object) -> Decoder:
    """Of two layers."""
    raw = {
        "vocab_size": 90,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    return describe("LlamaForCausalLM", Fields({**raw, **fields}, Path("config.json")))


def bodies(decoder: Decoder) -> Iterator[Body]:
    yield from decoder.bodies


def of_checkpoint(kind: str) -> Decoder | None:
    """The description of a kind of `checkpoints.KINDS`, without a file; None: it has none."""
    config_class, own = checkpoints.KINDS[kind]
    config = getattr(transformers, config_class)(**{**checkpoints.common(kind), **own})
    raw = json.loads(config.to_json_string(use_diff=False))
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    )

    names = (
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES if config.is_encoder_decoder else MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    )
    try:
        return describe(names[config.model_type], Fields(raw, Path("config.json")))
    except NotDescribedError:
        return None


# Random decoders. Sizes are multiples of 4, so that 2 and 4 ranks can divide them.


@st.composite
def norms(draw: st.DrawFn, name: str, size: int, total: int = 0) -> Norm:
    if draw(st.booleans()):
        return rms(name, size, 1e-6, draw(st.sampled_from(["", "plus_one"])), total=total)
    if total or draw(st.booleans()):
        return Norm(size)
    return layer_norm(name, size, 1e-5, bias=draw(st.booleans()))


@st.composite
def low_ranks(draw: st.DrawFn, at: str, rows: int, columns: int = HIDDEN) -> LowRank:
    rank = draw(st.sampled_from([2, 3]))
    return LowRank(matrix(at + "low_down", rank, columns), matrix(at + "low_up", rows, rank))


@st.composite
def attentions(draw: st.DrawFn, at: str, columns: int = HIDDEN) -> Attention:
    kv_heads = draw(st.sampled_from([1, 2, 4]))
    heads, dim = kv_heads * draw(st.sampled_from([4, 8])), draw(st.sampled_from([2, 4]))
    bias, fused = draw(st.booleans()), draw(st.booleans())
    n, m = heads * dim, kv_heads * dim
    if fused:  # query heads of a group, then its key and its value
        group = heads // kv_heads
        every = (group + 2) * dim
        parts = ((group * dim, 0), (dim, group * dim), (dim, (group + 1) * dim))
        q, k, v = (
            rows_of(at + "qkv", count, columns, first=first, every=every, times=kv_heads, bias=bias)
            for count, first in parts
        )
    else:
        q, k, v = (matrix(at + name, count, columns, bias) for name, count in (("q", n), ("k", m), ("v", m)))
    rope = None
    if not fused and draw(st.booleans()):
        rope = Rope(draw(st.sampled_from([2, dim])), pairs=draw(st.sampled_from(["halves", "adjacent"])))
    own = draw(st.booleans())
    has_norms = draw(st.booleans())
    return Attention(
        heads,
        kv_heads,
        dim,
        dim,
        0.5,
        q,
        k,
        v,
        matrix(at + "o", HIDDEN, n, draw(st.booleans())),
        rope=rope,
        reach=draw(st.sampled_from([Reach(), Reach("window", 8), Reach("chunk", 8)])),
        q_norm=draw(norms(at + "q_norm", dim, n if own else 0)) if has_norms else None,
        k_norm=draw(norms(at + "k_norm", dim, m if own else 0)) if has_norms else None,
        norm_after_rope=draw(st.booleans()),
        clip=draw(st.sampled_from([0.0, 2.0])),
        sinks=Part(at + "sinks", heads) if draw(st.booleans()) else None,
        temperature=draw(st.sampled_from([None, Temperature(0.5, 4)])),
        gate=matrix(at + "gate", n, columns) if draw(st.booleans()) else None,
        low=(
            draw(low_ranks(at + "q.", n, columns)),
            draw(low_ranks(at + "k.", m, columns)),
            draw(low_ranks(at + "v.", m, columns)),
        )
        if draw(st.booleans())
        else None,
    )


@st.composite
def mlps(draw: st.DrawFn, at: str, *, experts: int = 0) -> Mlp:
    width, bias = draw(st.sampled_from([4, 8, 12])), draw(st.booleans())
    act: Activation = draw(st.sampled_from(["silu", "gelu", "relu2"]))
    gated = bool(experts) or draw(st.booleans())
    up = matrix(at + "up", width, HIDDEN, bias, experts=experts)
    gate = matrix(at + "gate", width, HIDDEN, bias, experts=experts) if gated else None
    if gated and draw(st.booleans()):  # one tensor of gates and ups
        gate, up = (Weight((Part(at + "gate_up", width, first),), HIDDEN, experts=experts) for first in (0, width))
    down = matrix(at + "down", HIDDEN, width, bias, experts=experts)
    low = None
    if gate is not None and not experts and draw(st.booleans()):
        first = matrix(at + "both_down", 2, HIDDEN)
        low = LowRank(first, matrix(at + "gate_low", width, 2)), LowRank(first, matrix(at + "up_low", width, 2))
    return Mlp(width, up, down, gate, act, out_scale=draw(st.sampled_from([1.0, 0.5])), low=low)


@st.composite
def moes(draw: st.DrawFn, at: str) -> Moe:
    stacked = draw(st.booleans())
    experts = draw(mlps(at + "experts." if stacked else at + "experts.{e}.", experts=3))
    router = Router(matrix(at + "router", 3, HIDDEN), 2, correction=Part(at + "correction", 3) if stacked else None)
    shared = draw(mlps(at + "shared.")) if draw(st.booleans()) else None
    gate = matrix(at + "shared_gate", 1, HIDDEN) if shared is not None and draw(st.booleans()) else None
    return Moe(3, router, experts, shared, gate)


@st.composite
def sublayers(draw: st.DrawFn, at: str) -> Sublayer:
    branches = []
    for number in range(draw(st.integers(1, 2))):
        own = f"{at}{number}."
        first = st.one_of(attentions(own), mlps(own), moes(own), low_ranks(own, HIDDEN))
        body: Body = draw(first if number == 0 else mlps(own))
        pre = draw(norms(own + "pre", HIDDEN)) if draw(st.booleans()) else None
        post = draw(norms(own + "post", HIDDEN)) if draw(st.booleans()) else None
        delay = draw(st.sampled_from([0, 1])) if number else 0
        scales = draw(st.sampled_from([(1.0, 1.0), (2.0, 0.5)]))
        branches.append(Branch(body, pre, post, *scales, delay, adds_input=draw(st.booleans())))
    before, after, last = (
        draw(norms(at + name, HIDDEN)) if draw(st.booleans()) else None for name in ("norm", "post_norm", "after")
    )
    keep: Literal["stream", "normed"] = "normed" if before is not None and draw(st.booleans()) else "stream"
    alpha, beta = draw(st.sampled_from([(1.0, 1.0), (1.0, 0.25), (2.0, 1.0)]))
    aside = None
    if draw(st.booleans()):
        beside = Branch(draw(attentions(at + "aside.", 2 * HIDDEN)), draw(norms(at + "aside_norm", 2 * HIDDEN)))
        aside = Aside((beside, Branch(draw(mlps(at + "aside.mlp.")))), matrix(at + "aside.out", HIDDEN, HIDDEN))
    return Sublayer(tuple(branches), before, after, last, keep, alpha, beta, aside)


@st.composite
def decoders(draw: st.DrawFn) -> Decoder:
    """Every tensor of it is used by one weight."""
    blocks = []
    for layer in range(draw(st.integers(1, 3))):
        numbers = range(draw(st.integers(1, 2)))
        out_scale = Part(f"layers.{layer}.scale", 1) if draw(st.booleans()) else None
        parts = tuple(draw(sublayers(f"layers.{layer}.{number}.")) for number in numbers)
        blocks.append(Block(parts, out_scale=out_scale))
    # Nothing can be added after the last sublayer.
    *before, last_one = blocks[-1].sublayers
    at_once = replace(last_one, branches=tuple(replace(branch, delay=0) for branch in last_one.branches))
    blocks[-1] = replace(blocks[-1], sublayers=(*before, at_once))
    vocab = draw(st.sampled_from([8, 13]))
    positions = matrix("positions", 20, HIDDEN) if draw(st.booleans()) else None
    embedding = Embedding(matrix("embed", vocab, HIDDEN), draw(st.sampled_from([1.0, 4.0])), positions=positions)
    head = Head(matrix("/head", vocab, HIDDEN) if draw(st.booleans()) else None)
    last = draw(norms("norm", HIDDEN)) if draw(st.booleans()) else None
    return Decoder(HIDDEN, vocab, embedding, tuple(blocks), last, head, ("",))
