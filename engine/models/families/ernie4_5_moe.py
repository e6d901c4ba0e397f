"""ERNIE 4.5 with experts: adjacent features turn together, and the choice of experts is corrected."""

from ..description import Attention, Block, Decoder, Mlp, Moe, Part, Router
from ..fields import Fields
from ..pieces import activation, decoder, experts_of, heads_of, matrix, mlp, num_layers, prenorm, qkvo, rms, rope
from ..registry import family


@family("Ernie4_5_MoeForCausalLM")
def ernie4_5_moe(c: Fields) -> Decoder:
    bias, is_tied = c.flag("use_bias", False), c.flag("tie_word_embeddings", True)
    h, eps = c.size("hidden_size"), c.number("rms_norm_eps", 1e-5)
    heads, kv_heads, dim = heads_of(c)
    num_experts, top_k = experts_of(c, "moe_num_experts", "num_experts", top="moe_k", default=64, top_k=6)
    turn, act = rope(c, dim, theta=500_000.0, pairs="adjacent"), activation(c, "silu")
    width, num_shared = c.size("moe_intermediate_size", default=1536), c.count("moe_num_shared_experts", 2)
    interval, first = c.size("moe_layer_interval", default=1), c.count("moe_layer_start_index", 1)
    last = num_layers(c) - 1 if c.raw.get("moe_layer_end_index") in (None, -1) else c.count("moe_layer_end_index")
    floor = c.number("moe_norm_min", 1e-12)

    def feed_forward(at: str, layer: int) -> Mlp | Moe:
        if (layer + 1) % interval or not first <= layer <= last:
            return mlp(at, h, c.size("intermediate_size"), act, bias=bias)
        router = Router(
            matrix(at + "gate", num_experts, h),
            top_k,
            correction=Part(at + "moe_statics.e_score_correction_bias", num_experts),
            renorm=True,
            floor=floor,
            floor_by="max",
            is_float32=True,
        )
        experts = mlp(at + "experts.{e}.", h, width, act, experts=num_experts)
        shared = mlp(at + "shared_experts.", h, width * num_shared, act, bias=bias) if num_shared else None
        return Moe(num_experts, router, experts, shared)

    def block(layer: int) -> Block:
        at = f"layers.{layer}."
        return prenorm(
            (
                rms(at + "input_layernorm", h, eps),
                Attention(
                    heads, kv_heads, dim, dim, dim**-0.5, **qkvo(at + "self_attn.", h, heads, kv_heads, dim, bias),
                    rope=turn,
                ),
            ),
            (rms(at + "post_attention_layernorm", h, eps), feed_forward(at + "mlp.", layer)),
        )  # fmt: skip

    return decoder(c, block, rms("norm", h, eps), tied=is_tied, head_bias=bias, ignored=(r"(.*\.)?mtp_.*",))
