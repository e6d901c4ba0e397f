"""MiniMax-M2: queries and keys are normed over all heads, and experts are chosen by corrected sigmoid scores."""

from ..description import Attention, Block, Decoder, Moe, Part, Router
from ..fields import Fields
from ..pieces import activation, decoder, experts_of, heads_of, matrix, mlp, prenorm, qkvo, rms, rope
from ..registry import family


@family("MiniMaxM2ForCausalLM")
def minimax_m2(c: Fields) -> Decoder:
    h, eps = c.size("hidden_size"), c.number("rms_norm_eps", 1e-6)
    heads, kv_heads, dim = heads_of(c, dim=128)
    num_experts, top_k = experts_of(c, "num_local_experts", "num_experts", default=256, top_k=8)
    # Released files have rotary_dim in place of a share of the head.
    share = {"partial_rotary_factor": c.size("rotary_dim") / dim} if "rotary_dim" in c else {}
    turn, act = rope(Fields(share | c.raw, c.file), dim, theta=5e6), activation(c, "silu")
    width = c.size("intermediate_size", default=1536)

    def block(layer: int) -> Block:
        at = f"layers.{layer}."
        attention, moe = at + "self_attn.", at + "block_sparse_moe."
        router = Router(
            matrix(moe + "gate", num_experts, h),
            top_k,
            "sigmoid",
            correction=Part(moe + "e_score_correction_bias", num_experts),
            renorm=True,
            rounds_weights=False,
        )
        experts = mlp(moe + "experts.{e}.", h, width, act, names=("w1", "w3", "w2"), experts=num_experts)
        return prenorm(
            (
                rms(at + "input_layernorm", h, eps),
                Attention(
                    heads, kv_heads, dim, dim, dim**-0.5, **qkvo(attention, h, heads, kv_heads, dim), rope=turn,
                    q_norm=rms(attention + "q_norm", heads * dim, eps),
                    k_norm=rms(attention + "k_norm", kv_heads * dim, eps),
                ),
            ),
            (rms(at + "post_attention_layernorm", h, eps), Moe(num_experts, router, experts)),
        )  # fmt: skip

    return decoder(c, block, rms("norm", h, eps), ignored=(r"(.*\.)?mtp.*",))
