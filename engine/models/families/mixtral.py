"""Mixtral: Mistral with experts in every layer."""

from ..description import Attention, Block, Decoder, Moe, Router
from ..fields import Fields
from ..pieces import activation, decoder, experts_of, heads_of, matrix, mlp, prenorm, qkvo, rms, rope, window_of
from ..registry import family


@family("MixtralForCausalLM")
def mixtral(c: Fields) -> Decoder:
    h, eps = c.size("hidden_size"), c.number("rms_norm_eps", 1e-5)
    heads, kv_heads, dim = heads_of(c)
    num_experts, top_k = experts_of(c, "num_local_experts", "num_experts", default=8, top_k=2)
    reach = window_of(c)
    turn, act, width = rope(c, dim, theta=1e6), activation(c, "silu"), c.size("intermediate_size")

    def block(layer: int) -> Block:
        at = f"layers.{layer}."
        experts = at + "block_sparse_moe."
        router = Router(matrix(experts + "gate", num_experts, h), top_k, renorm=True, rounds_weights=False)
        return prenorm(
            (
                rms(at + "input_layernorm", h, eps),
                Attention(
                    heads, kv_heads, dim, dim, dim**-0.5, **qkvo(at + "self_attn.", h, heads, kv_heads, dim),
                    rope=turn, reach=reach,
                ),
            ),
            (
                rms(at + "post_attention_layernorm", h, eps),
                Moe(
                    num_experts,
                    router,
                    mlp(experts + "experts.{e}.", h, width, act, names=("w1", "w3", "w2"), experts=num_experts),
                ),
            ),
        )  # fmt: skip

    return decoder(c, block, rms("norm", h, eps))
