"""MiniMax-01 (arXiv 2501.08313): lightning attention in most layers, softmax attention in the others, and experts. The
residual stream continues with what a sublayer's norm returns. MiniMax-Text-01 and M1 have the fields that their
authors gave them, MiniMax-Text-01-hf those of transformers."""

import math

from ..description import Block, Branch, Decoder, Lightning, Moe, Router, Sublayer, Weight
from ..fields import Fields, NotDescribedError
from ..pieces import (
    activation,
    attention,
    decoder,
    experts_of,
    heads_of,
    layer_types,
    matrix,
    mixer_activation,
    mlp,
    num_layers,
    qkvo,
    rms,
    rope,
    rows_of,
    window_of,
)
from ..registry import family

_BUFFERS = (r"(.*\.)?(slope_rate|query_decay|key_decay|diagonal_decay)",)


@family("MiniMaxForCausalLM")
def minimax(c: Fields) -> Decoder:
    return _decoder(c, heads_of(c)[2])


@family("MiniMaxText01ForCausalLM", "MiniMaxM1ForCausalLM")
def minimax_text_01(c: Fields) -> Decoder:
    """Only the first `rotary_dim` features of a head turn."""
    if not c.flag("postnorm", False):
        raise NotDescribedError("a residual stream that goes around its norms (postnorm = false)")
    if c.count("shared_intermediate_size"):
        raise NotDescribedError("shared experts beside lightning attention")
    kinds = c.integers("attn_type_list")
    if kinds is None or len(kinds) != num_layers(c):
        raise NotDescribedError("no attn_type_list with a number for each layer")
    names = {
        f"{kind}_{name}_factor": f"layernorm_{long}_{name}"
        for kind, long in (("full_attn", "full_attention"), ("linear_attn", "linear_attention"), ("mlp", "mlp"))
        for name in ("alpha", "beta")
    }
    raw = {
        **c.raw,
        **{name: c.raw.get(own) for name, own in names.items()},
        "layer_types": ["full_attention" if kind else "linear_attention" for kind in kinds],
    }
    return _decoder(Fields(raw, c.file), c.size("rotary_dim", default=heads_of(c)[2]))


def _decoder(c: Fields, rotary_dim: int) -> Decoder:
    h, eps, width = c.size("hidden_size"), c.number("rms_norm_eps", 1e-5), c.size("intermediate_size", default=14336)
    sizes, act, reach = heads_of(c), activation(c, "silu"), window_of(c)
    heads, _, dim = sizes
    num_experts, top_k = experts_of(c, "num_local_experts", "num_experts", default=8, top_k=2)
    turn = rope(c, rotary_dim, theta=1e6)
    kinds = layer_types(c, lambda layer: "linear_attention" if layer % 2 else "full_attention")
    mixer_activation(c)

    def lightning(at: str, layer: int) -> Lightning:
        def some(first: int) -> Weight:
            return rows_of(at + "qkv_proj", dim, h, first=first * dim, every=3 * dim, times=heads)

        parts = tuple(part for first in range(3) for part in some(first).parts)
        return Lightning(
            heads, dim,
            qkv=Weight(parts, h), decay=_decays(heads, layer, num_layers(c)),
            norm=rms(at + "norm", heads * dim, 1e-6), gate=matrix(at + "output_gate", heads * dim, h),
            out=matrix(at + "out_proj", h, heads * dim),
        )  # fmt: skip

    def sublayer(body: Branch, norm: str, kind: str) -> Sublayer:
        alpha, beta = (c.number(f"{kind}_{name}_factor", 1.0) for name in ("alpha", "beta"))
        return Sublayer((body,), rms(norm, h, eps), keep="normed", alpha=alpha, beta=beta)

    def block(layer: int) -> Block:
        at = f"layers.{layer}."
        a, m, is_linear = at + "self_attn.", at + "block_sparse_moe.", kinds[layer] == "linear_attention"
        mixer = lightning(a, layer) if is_linear else attention(sizes, qkvo(a, h, *sizes), rope=turn, reach=reach)
        router = Router(matrix(m + "gate", num_experts, h), top_k, renorm=True, rounds_weights=False)
        experts = mlp(m + "experts.{e}.", h, width, act, names=("w1", "w3", "w2"), experts=num_experts)
        return Block(
            (
                sublayer(Branch(mixer), at + "input_layernorm", "linear_attn" if is_linear else "full_attn"),
                sublayer(Branch(Moe(num_experts, router, experts)), at + "post_attention_layernorm", "mlp"),
            )
        )

    return decoder(c, block, rms("norm", h, eps), ignored=_BUFFERS)


def _decays(heads: int, layer: int, layers: int) -> tuple[float, ...]:
    """Slower in later heads and layers."""
    factor = 1 - layer / (layers - 1 + 1e-5) + 1e-5
    return tuple(math.exp(-(2 ** (-8 / heads * (head + 1))) * factor) for head in range(heads))
