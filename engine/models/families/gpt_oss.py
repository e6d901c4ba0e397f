"""gpt-oss (arXiv 2508.10925): a window in every second layer, sinks, biases everywhere, and experts with clamped
activations."""

from dataclasses import replace

from ..description import Attention, Block, Decoder, Moe, Part, Reach, Rope, Router, Weight
from ..fields import Fields
from ..pieces import (
    decoder,
    experts_of,
    heads_of,
    layer_types,
    matrix,
    prenorm,
    qkvo,
    rms,
    rope,
    stacked_experts,
    window_of,
)
from ..registry import family


@family("GptOssForCausalLM")
def gpt_oss(c: Fields) -> Decoder:
    h, eps, width = c.size("hidden_size"), c.number("rms_norm_eps", 1e-5), c.size("intermediate_size", default=2880)
    heads, kv_heads, dim = heads_of(c, dim=64)
    num_experts, top_k = experts_of(c, "num_local_experts", "num_experts", default=128, top_k=4)
    turn, bias = _rope(c, dim), c.flag("attention_bias", True)
    kinds = layer_types(c, lambda layer: "full_attention" if layer % 2 else "sliding_attention")
    window = window_of(c)

    def block(layer: int) -> Block:
        at = f"layers.{layer}."
        attention, moe = at + "self_attn.", at + "mlp."
        experts = stacked_experts(
            moe + "experts.gate_up_proj",
            moe + "experts.down_proj",
            h,
            width,
            num_experts,
            "swiglu_clamped",
            biases=(moe + "experts.gate_up_proj_bias", moe + "experts.down_proj_bias"),
            is_transposed=True,
            in_turn=True,
        )
        stored = moe + "experts.{e}."  # of a checkpoint in MXFP4, by expert and not transposed
        gate, up, down = (
            Weight((Part(stored + name, *rows),), columns, experts=num_experts)
            for name, rows, columns in (
                ("gate_up_proj.weight", (1, 0, 2, width), h),
                ("gate_up_proj.weight", (1, 1, 2, width), h),
                ("down_proj.weight", (h,), width),
            )
        )
        assert experts.gate is not None
        experts = replace(
            experts,
            gate=replace(experts.gate, other=gate),
            up=replace(experts.up, other=up),
            down=replace(experts.down, other=down),
        )
        limit, sharpness = c.number("swiglu_limit", 7.0), c.number("swiglu_alpha", 1.702)
        return prenorm(
            (
                rms(at + "input_layernorm", h, eps),
                Attention(
                    heads, kv_heads, dim, dim, dim**-0.5, **qkvo(attention, h, heads, kv_heads, dim, bias),
                    rope=turn, reach=window if kinds[layer] == "sliding_attention" else Reach(),
                    sinks=Part(attention + "sinks", heads),
                ),
            ),
            (
                rms(at + "post_attention_layernorm", h, eps),
                Moe(
                    num_experts,
                    Router(matrix(moe + "router", num_experts, h, bias=True), top_k, "softmax_of_chosen"),
                    replace(experts, limit=limit, sharpness=sharpness),
                ),
            ),
        )  # fmt: skip

    return decoder(c, block, rms("norm", h, eps))


def _rope(c: Fields, dim: int) -> Rope:
    if "rope_parameters" in c or "rope_scaling" in c:
        return rope(c, dim, theta=150_000.0)
    return Rope(dim, 150_000.0, "yarn", 32.0, 4096, truncate=False, cos_scale=1.3465735902799727)
