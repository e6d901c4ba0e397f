"""OLMoE (arXiv 2409.02060): queries and keys are normed over all heads, and every layer has experts."""

from ..description import Attention, Block, Decoder, Moe, Router
from ..fields import Fields, NotDescribedError
from ..pieces import activation, decoder, experts_of, heads_of, matrix, mlp, prenorm, qkvo, rms, rope
from ..registry import family


@family("OlmoeForCausalLM")
def olmoe(c: Fields) -> Decoder:
    if "clip_qkv" in c:
        raise NotDescribedError("queries and keys that are clipped after their norms")
    h, eps = c.size("hidden_size"), c.number("rms_norm_eps", 1e-5)
    heads, kv_heads, dim = heads_of(c)
    num_experts, top_k = experts_of(c, "num_experts", "num_local_experts", default=64, top_k=8)
    turn, act, width = rope(c, dim), activation(c, "silu"), c.size("intermediate_size", default=2048)
    bias, renorm = c.flag("attention_bias", False), c.flag("norm_topk_prob", False)

    def block(layer: int) -> Block:
        at = f"layers.{layer}."
        attention, moe = at + "self_attn.", at + "mlp."
        return prenorm(
            (
                rms(at + "input_layernorm", h, eps),
                Attention(
                    heads, kv_heads, dim, dim, dim**-0.5, **qkvo(attention, h, heads, kv_heads, dim, bias), rope=turn,
                    q_norm=rms(attention + "q_norm", heads * dim, eps),
                    k_norm=rms(attention + "k_norm", kv_heads * dim, eps),
                ),
            ),
            (
                rms(at + "post_attention_layernorm", h, eps),
                Moe(
                    num_experts,
                    Router(matrix(moe + "gate", num_experts, h), top_k, renorm=renorm),
                    mlp(moe + "experts.{e}.", h, width, act, experts=num_experts),
                ),
            ),
        )  # fmt: skip

    return decoder(c, block, rms("norm", h, eps))
