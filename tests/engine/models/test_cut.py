"""The parts of all ranks are together the whole model."""

from dataclasses import replace
from itertools import pairwise

import pytest
from claims import claims, shapes, sources
from decoders import bodies, decoders, llama, of_checkpoint
from hypothesis import HealthCheck, given, settings

from pagewire.engine.models.cut import cut, share
from pagewire.engine.models.description import Attention, Branch, Decoder, Mamba2, Mlp, Moe, Sublayer
from pagewire.engine.models.lower import lower
from pagewire.engine.models.pieces import layer_norm, rms
from pagewire.errors import ConfigError

# Of attention, feed-forward parts, experts, and each recurrent layer.
KINDS = (
    "llama", "llama-biased", "qwen2", "qwen3", "qwen3_moe", "mixtral", "bamba", "jamba", "lfm2", "mamba2", "minimax"
)  # fmt: skip
# Each number of these belongs to one rank.
WHOLE = (
    "embed.weight", "head.weight", ".o.weight", ".down.weight", "o_proj.weight", "x_proj.weight", "dt_proj.weight",
    "out_proj.weight", "A_log", ".D", "output_gate.weight", "qkv_proj.weight",
)  # fmt: skip
OF_HEADS = "q_norm", "k_norm", ".mamba.norm", ".mixer.norm", ".self_attn.norm", ".linear_attn.norm"


def shareable(decoder: Decoder) -> set[int]:
    """Numbers of what several ranks may share."""
    kv_heads = {body.kv_heads for body in bodies(decoder) if isinstance(body, Attention)}
    return kv_heads | {body.groups for body in bodies(decoder) if isinstance(body, Mamba2)}


def check(decoder: Decoder, size: int) -> None:
    """Every number of the checkpoint is read by one rank, by all, or, of key/value heads and groups of Mamba, by those
    that share one."""
    whole = lower(decoder)
    expected = shapes(decoder, whole)
    assert all((counts == 1).all() for counts in claims(sources(decoder, whole), expected).values())
    parts = [cut(decoder, rank, size) for rank in range(size)]
    counts = [claims(sources(part, lower(part)), expected) for part in parts]
    replicated = {size, *(max(1, size // num) for num in shareable(decoder))}
    for name in expected:
        total = sum(count[name] for count in counts)
        assert set(total.flatten().tolist()) <= {1, *replicated}, name
        if name.endswith((".o.bias", ".down.bias", "o_proj.bias", "down_proj.bias")):
            assert (total == 1).all() and counts[0][name].all(), "one rank adds the bias"
        elif name.endswith(WHOLE):
            assert (total == 1).all(), "no number twice"
        elif "norm" in name and not any(part in name for part in OF_HEADS):
            assert (total == size).all(), "every rank has the whole stream"
    for a, b in pairwise(parts):
        assert [type(op.args) for op in lower(a).ops] == [type(op.args) for op in lower(b).ops]
    for body, *cuts in zip(bodies(decoder), *map(bodies, parts), strict=True):
        if isinstance(body, Attention):
            assert sum(part.heads for part in cuts if isinstance(part, Attention)) == body.heads
        if isinstance(body, Mlp):
            assert sum(part.width for part in cuts if isinstance(part, Mlp)) == body.width
        if isinstance(body, Moe):
            assert sum(part.experts.width for part in cuts if isinstance(part, Moe)) == body.experts.width


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(decoders())
def test_the_parts_of_a_random_decoder_are_the_whole(decoder: Decoder) -> None:
    for size in (1, 2, 4):
        check(decoder, size)


@pytest.mark.parametrize(
    ("kind", "size"),
    [*((kind, size) for kind in KINDS for size in (2, 4)), ("qwen3_5", 2), ("mamba2", 8)],
)
def test_the_parts_of_a_family_are_the_whole(kind: str, size: int) -> None:
    decoder = of_checkpoint(kind)
    assert decoder is not None
    check(decoder, size)


def test_one_rank_has_the_whole() -> None:
    assert cut(llama(), 0, 1) is llama() or cut(llama(), 0, 1) == llama()


def test_shares_are_in_order_and_complete() -> None:
    for num, size in ((320, 4), (5, 2), (7, 3), (151936, 8)):
        parts = [share(num, rank, size) for rank in range(size)]
        assert parts[0][0] == 0 and parts[-1][1] == num
        assert all(a[1] == b[0] for a, b in pairwise(parts))


@pytest.mark.parametrize(
    ("size", "fields", "why"),
    [
        (3, {}, "4 attention heads cannot be divided evenly"),
        (8, {}, "4 attention heads cannot be divided evenly"),
        (4, {"intermediate_size": 94}, "94 feed-forward columns cannot be divided evenly"),
        (4, {"num_attention_heads": 12, "num_key_value_heads": 3}, "3 key/value heads: one must divide the other"),
        (4, {"vocab_size": 6}, "the last of 4 ranks would get none of the model's 6 tokens"),
    ],
)
def test_models_that_cannot_be_divided_are_refused(size: int, fields: dict[str, int], why: str) -> None:
    for rank in range(size):
        with pytest.raises(ConfigError, match=rf"--tensor-parallel-size {size}.*{why}"):
            cut(llama(**fields), rank, size)


def test_layer_norms_over_all_heads_are_refused() -> None:
    (first, *_) = llama().blocks
    attention = next(body for body in bodies(llama()) if isinstance(body, Attention))
    wide = replace(attention, q_norm=layer_norm("q_norm", 64, 1e-6))
    blocks = (replace(first, sublayers=(Sublayer((Branch(wide),)),)),)
    with pytest.raises(ConfigError, match="layer norms over all heads cannot be divided among ranks"):
        cut(replace(llama(), blocks=blocks), 0, 2)


def test_a_norm_over_all_heads_counts_the_elements_of_other_ranks() -> None:
    (first, *_) = llama().blocks
    attention = next(body for body in bodies(llama()) if isinstance(body, Attention))
    width = attention.heads * attention.head_dim
    wide = replace(attention, q_norm=rms("q_norm", width, 1e-6))
    whole = replace(llama(), blocks=(replace(first, sublayers=(Sublayer((Branch(wide),)),)),))
    for rank in range(2):
        norm = next(body for body in bodies(cut(whole, rank, 2)) if isinstance(body, Attention)).q_norm
        assert norm is not None and norm.weight is not None and (norm.size, norm.ranks) == (width // 2, 2)
        (part,) = norm.weight.parts
        assert (part.first, part.rows) == (rank * width // 2, width // 2)
