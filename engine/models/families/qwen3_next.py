"""Qwen3-Next and Qwen3.5: three of four layers compute the gated delta rule, and the fourth attends with a gate on its
output. Weights of norms are stored less 1, but for that of the delta rule's gated norm."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from ..description import Attention, Block, Decoder, DeltaNet, Mlp, Moe, Norm, Router, Weight
from ..fields import Fields
from ..pieces import (
    TOWERS,
    activation,
    attention,
    conv,
    decoder,
    either,
    experts_of,
    heads_of,
    layer_types,
    matrix,
    mixer_activation,
    mlp,
    prenorm,
    qkvo,
    rms,
    rope,
    rows_of,
    stacked_experts,
    vector,
)
from ..registry import family

_DRAFT = (r"(.*\.)?mtp\..*",)
FeedForward = Callable[[str, int], Mlp | Moe]


@family("Qwen3NextForCausalLM")
def qwen3_next(c: Fields) -> Decoder:
    """The rows of each key head's queries, keys, values and gates follow each other, and so do those of beta and
    decay."""
    h, sizes = c.size("hidden_size"), _Sizes.of(c)
    keys, values, share = sizes.key_dim, sizes.values_of_key, sizes.value_heads // sizes.key_heads

    def projections(at: str) -> _Projections:
        def wide(first: int, count: int) -> Weight:
            every = 2 * keys + 2 * values
            return rows_of(at + "in_proj_qkvz", count, h, first=first, every=every, times=sizes.key_heads)

        def narrow(first: int) -> Weight:
            return rows_of(at + "in_proj_ba", share, h, first=first, every=2 * share, times=sizes.key_heads)

        q, k, v = wide(0, keys), wide(keys, keys), wide(2 * keys, values)
        qkv = Weight((*q.parts, *k.parts, *v.parts), h)
        return _Projections(qkv, wide(2 * keys + values, values), narrow(0), narrow(share))

    return _decoder(c, sizes, projections, _experts(c, num_experts=512, top_k=10, is_stacked=False))


@family("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration")
def qwen3_5(c: Fields) -> Decoder:
    h, act, width = c.size("hidden_size"), activation(c, "silu"), c.size("intermediate_size", default=12288)
    sizes = _Sizes.of(c)
    return _decoder(c, sizes, partial(_apart, h, sizes), lambda at, layer: mlp(at, h, width, act))


@family("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration")
def qwen3_5_moe(c: Fields) -> Decoder:
    sizes = _Sizes.of(c)
    feed_forward = _experts(c, num_experts=256, top_k=8, is_stacked=True)
    return _decoder(c, sizes, partial(_apart, c.size("hidden_size"), sizes), feed_forward)


@dataclass(frozen=True)
class _Sizes:
    """Of the delta rule."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @classmethod
    def of(cls, c: Fields) -> "_Sizes":
        keys, values = c.size("linear_num_key_heads", default=16), c.size("linear_num_value_heads", default=32)
        c.divided("value heads", values, "key heads", keys)
        dims = c.size("linear_key_head_dim", default=128), c.size("linear_value_head_dim", default=128)
        return cls(keys, values, *dims)

    @property
    def values_of_key(self) -> int:
        """Rows of values that share a key head."""
        return self.value_heads // self.key_heads * self.value_dim

    @property
    def wide(self) -> int:
        """Channels of queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True)
class _Projections:
    qkv: Weight
    gate: Weight
    beta: Weight
    decay: Weight


def _apart(h: int, sizes: _Sizes, at: str) -> _Projections:
    return _Projections(
        matrix(at + "in_proj_qkv", sizes.wide, h),
        matrix(at + "in_proj_z", sizes.value_heads * sizes.value_dim, h),
        matrix(at + "in_proj_b", sizes.value_heads, h),
        matrix(at + "in_proj_a", sizes.value_heads, h),
    )


def _experts(c: Fields, *, num_experts: int, top_k: int, is_stacked: bool) -> FeedForward:
    """The numbers are defaults. is_stacked: files have the experts in two tensors, or one by one."""
    h, act = c.size("hidden_size"), activation(c, "silu")
    dense = c.integers("mlp_only_layers") or ()
    step = c.size("decoder_sparse_step", default=1)
    num_experts, top_k = experts_of(c, "num_experts", default=num_experts, top_k=top_k)
    width, common = (c.size(name, default=512) for name in ("moe_intermediate_size", "shared_expert_intermediate_size"))

    def feed_forward(at: str, layer: int) -> Mlp | Moe:
        if layer in dense or (layer + 1) % step:
            return mlp(at, h, c.size("intermediate_size"), act)
        experts = mlp(at + "experts.{e}.", h, width, act, experts=num_experts)
        if is_stacked:
            names = at + "experts.gate_up_proj", at + "experts.down_proj"
            experts = either(stacked_experts(*names, h, width, num_experts, act), experts)
        router = Router(matrix(at + "gate", num_experts, h), top_k, renorm=c.flag("norm_topk_prob", True))
        shared = mlp(at + "shared_expert.", h, common, act)
        return Moe(num_experts, router, experts, shared, matrix(at + "shared_expert_gate", 1, h))

    return feed_forward


def _decoder(
    c: Fields, sizes: _Sizes, projections: Callable[[str], _Projections], feed_forward: FeedForward
) -> Decoder:
    h, eps, taps = c.size("hidden_size"), c.number("rms_norm_eps", 1e-6), c.size("linear_conv_kernel_dim", default=4)
    heads, kv_heads, dim = heads_of(c, dim=256)
    bias, turn = c.flag("attention_bias", False), rope(c, dim, share=0.25)
    every = c.size("full_attention_interval", default=4)
    kinds = layer_types(c, lambda layer: "linear_attention" if (layer + 1) % every else "full_attention")
    mixer_activation(c)

    def norm(name: str, size: int) -> Norm:
        return rms(name, size, eps, "plus_one")

    def full(at: str) -> Attention:
        def half(first: int) -> Weight:
            return rows_of(at + "q_proj", dim, h, first=first, every=2 * dim, times=heads, bias=bias)

        weights = qkvo(at, h, heads, kv_heads, dim, bias)
        weights["q"] = half(0)
        norms = norm(at + "q_norm", dim), norm(at + "k_norm", dim)
        found = attention((heads, kv_heads, dim), weights, rope=turn, q_norm=norms[0], k_norm=norms[1])
        return replace(found, gate=half(dim))

    def delta(at: str) -> DeltaNet:
        found, values = projections(at), sizes.value_heads * sizes.value_dim
        return DeltaNet(
            sizes.key_heads, sizes.value_heads, sizes.key_dim, sizes.value_dim,
            qkv=found.qkv, gate=found.gate, beta=found.beta, decay=found.decay,
            conv=conv(at + "conv1d", sizes.wide, taps),
            a_log=vector(at + "A_log", sizes.value_heads, "neg_exp"), dt_bias=vector(at + "dt_bias", sizes.value_heads),
            norm=rms(at + "norm", sizes.value_dim, eps), o=matrix(at + "out_proj", h, values),
        )  # fmt: skip

    def block(layer: int) -> Block:
        at = f"layers.{layer}."
        mixer = full(at + "self_attn.") if kinds[layer] == "full_attention" else delta(at + "linear_attn.")
        return prenorm(
            (norm(at + "input_layernorm", h), mixer),
            (norm(at + "post_attention_layernorm", h), feed_forward(at + "mlp.", layer)),
        )

    prefixes = ("model.language_model.", "model.", "")
    return decoder(c, block, norm("norm", h), prefixes=prefixes, ignored=(*TOWERS, *_DRAFT))
