"""Kimi Linear (arXiv 2510.26692): the delta rule with a decay for each channel in three of four layers, and latent
attention without positions in the fourth; and experts. Some fields have two spellings."""

from ..description import Block, Conv, Decoder, DeltaNet, LatentAttention, LowRank, Mlp, Moe, Part, Weight
from ..fields import Fields
from ..pieces import (
    activation,
    decoder,
    either,
    experts_of,
    layer_types,
    matrix,
    mixer_activation,
    mlp,
    prenorm,
    rms,
    sigmoid_router,
    vector,
)
from ..registry import family

_SPELLINGS = {
    "num_expert_group": "n_group", "moe_renormalize": "norm_topk_prob", "num_experts": "num_local_experts",
    "num_experts_per_token": "num_experts_per_tok", "num_shared_experts": "n_shared_experts",
}  # fmt: skip


@family("KimiLinearForCausalLM")
def kimi_linear(c: Fields) -> Decoder:
    c = Fields({_SPELLINGS.get(name, name): value for name, value in c.raw.items()}, c.file)
    h, eps = c.size("hidden_size"), c.number("rms_norm_eps", 1e-5)
    of_linear = c.part("linear_attn_config") or Fields({}, c.file)
    attending = of_linear.integers("full_attn_layers")  # counted from 1

    def kind(layer: int) -> str:
        is_full = layer + 1 in attending if attending is not None else layer > 0 and layer % 4 == 0
        return "full_attention" if is_full else "linear_attention"

    first = c.count("first_k_dense_replace", 1)
    kinds = layer_types(c, kind)
    feed_forwards = layer_types(c, lambda layer: "sparse" if layer >= first else "dense", "mlp_layer_types")
    mixer_activation(c)

    def block(layer: int) -> Block:
        at = f"layers.{layer}."
        inner, is_full = at + "self_attn.", kinds[layer] == "full_attention"
        mixer = _latent_attention(c, inner) if is_full else _delta_net(c, of_linear, inner)
        return prenorm(
            (rms(at + "input_layernorm", h, eps), mixer),
            (rms(at + "post_attention_layernorm", h, eps), _feed_forward(c, at, feed_forwards[layer] == "sparse")),
        )

    return decoder(c, block, rms("norm", h, eps))


def _delta_net(c: Fields, of_linear: Fields, at: str) -> DeltaNet:
    h, eps = c.size("hidden_size"), c.number("rms_norm_eps", 1e-5)
    heads = of_linear.size("num_heads", default=c.size("linear_num_heads", default=32))
    dim = of_linear.size("head_dim", default=c.size("linear_head_dim", default=128))
    taps = of_linear.size("short_conv_kernel_size", default=c.size("linear_conv_kernel_dim", default=4))
    width = heads * dim

    def three(name: str, columns: int) -> Weight:
        return Weight(tuple(Part(f"{at}{each}_{name}.weight", width) for each in "qkv"), columns)

    def low_rank(name: str) -> LowRank:
        return LowRank(matrix(f"{at}{name}_a_proj", dim, h), matrix(f"{at}{name}_b_proj", width, dim))

    return DeltaNet(
        heads, heads, dim, dim,
        qkv=three("proj", h), conv=Conv(three("conv1d", taps), 3 * width, taps), beta=matrix(at + "b_proj", heads, h),
        decay=low_rank("f"), decay_per="channel", a_log=vector(at + "A_log", heads, "neg_exp"),
        dt_bias=vector(at + "dt_bias", width), gate=low_rank("g"), gate_act="sigmoid",
        norm=rms(at + "o_norm", dim, eps), o=matrix(at + "o_proj", h, width),
    )  # fmt: skip


def _latent_attention(c: Fields, at: str) -> LatentAttention:
    h, bias = c.size("hidden_size"), c.flag("attention_bias", False)
    heads, rank, low = c.size("num_attention_heads"), c.size("kv_lora_rank", default=512), c.count("q_lora_rank")
    nope, shared = c.size("qk_nope_head_dim", default=128), c.size("qk_rope_head_dim", default=64)
    value, width = c.size("v_head_dim", default=128), heads * (nope + shared)
    q: Weight | LowRank = matrix(at + "q_proj", width, h)
    if low:
        norm = rms(at + "q_a_layernorm", low, 1e-6)
        q = LowRank(matrix(at + "q_a_proj", low, h, bias), matrix(at + "q_b_proj", width, low), norm)
    return LatentAttention(
        heads, nope, shared, value, rank, (nope + shared) ** -0.5,
        q=q, kv_a=matrix(at + "kv_a_proj_with_mqa", rank + shared, h, bias),
        kv_norm=rms(at + "kv_a_layernorm", rank, 1e-6),  # whatever rms_norm_eps says
        kv_b=matrix(at + "kv_b_proj", heads * (nope + value), rank), o=matrix(at + "o_proj", h, heads * value, bias),
    )  # fmt: skip


def _feed_forward(c: Fields, at: str, is_sparse: bool) -> Mlp | Moe:
    h, act, inner = c.size("hidden_size"), activation(c, "silu"), at + "block_sparse_moe."
    if not is_sparse:  # transformers writes it under the experts' name
        width = c.size("intermediate_size", default=9216)
        return either(mlp(at + "mlp.", h, width, act), mlp(inner, h, width, act))
    num_experts, top_k = experts_of(c, "num_local_experts", default=256, top_k=8)
    width = c.size("moe_intermediate_size", default=1024)
    experts = mlp(inner + "experts.{e}.", h, width, act, names=("w1", "w3", "w2"), experts=num_experts)
    shared = mlp(inner + "shared_experts.", h, width * c.size("n_shared_experts", default=1), act)
    return Moe(num_experts, sigmoid_router(c, inner, num_experts, top_k, scale=2.446), experts, shared)
