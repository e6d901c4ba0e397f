"""LongCat-Flash (arXiv 2509.01322): a layer has two latent attentions and two dense feed-forward parts. Its experts
read what the first dense part reads, and are added after the second. Some experts return their input."""

import math
from dataclasses import replace

from ..description import Block, Branch, Decoder, LatentAttention, LowRank, Moe, Part, Router, Sublayer
from ..fields import MAX_LAYERS, Fields, NotDescribedError
from ..pieces import activation, decoder, experts_of, matrix, mlp, rms
from ..registry import family
from .deepseek import latent_attention


@family("LongcatFlashForCausalLM")
def longcat_flash(c: Fields) -> Decoder:
    if (kind := c.text("zero_expert_type", "identity")) != "identity":
        raise NotDescribedError(f"experts without weights of the kind {kind!r}")
    count = c.size("num_layers", default=c.size("num_hidden_layers", default=56) // 2, most=MAX_LAYERS // 2)
    c = Fields({**c.raw, "num_hidden_layers": 2 * count}, c.file)  # blocks with one attention each
    h, eps, act = c.size("hidden_size"), c.number("rms_norm_eps", 1e-5), activation(c, "silu")
    wide = c.size("ffn_hidden_size", "intermediate_size", default=12288)
    width = c.size("expert_ffn_hidden_size", "moe_intermediate_size", default=2048)
    num_experts, top_k = experts_of(c, "n_routed_experts", "num_local_experts", top="moe_topk", default=512, top_k=12)
    zero = c.count("zero_expert_num", 256)
    attention = latent_attention(c, (1536, 512, 128, 64, 128), is_adjacent=True, theta=1e7)

    def mixer(at: str) -> LatentAttention:
        found = attention(at)
        low = found.q.down.rows if isinstance(found.q, LowRank) else h
        return replace(
            found,
            q_scale=math.sqrt(h / low) if c.flag("mla_scale_q_lora", True) else 1.0,
            kv_scale=math.sqrt(h / found.rank) if c.flag("mla_scale_kv_lora", True) else 1.0,
        )

    def experts(at: str) -> Moe:
        router = Router(
            matrix(at + "router.classifier", num_experts + zero, h),
            top_k,
            correction=Part(at + "router.e_score_correction_bias", num_experts + zero),
            scale=c.number("routed_scaling_factor", 6.0),
            zero_experts=zero,
            is_float32=True,
            rounds_weights=False,
        )
        return Moe(num_experts, router, mlp(at + "experts.{e}.", h, width, act, experts=num_experts))

    def block(number: int) -> Block:
        layer, half = divmod(number, 2)
        at = f"layers.{layer}."
        parts = [Branch(mlp(f"{at}mlps.{half}.", h, wide, act))]
        if half == 0:
            parts.append(Branch(experts(at + "mlp."), delay=2))
        return Block(
            (
                Sublayer((Branch(mixer(f"{at}self_attn.{half}.")),), rms(f"{at}input_layernorm.{half}", h, eps)),
                Sublayer(tuple(parts), rms(f"{at}post_attention_layernorm.{half}", h, eps)),
            )
        )

    # The draft head; a bias that the router does not add; weights that transformers writes for experts without weights.
    without = "|".join(str(num_experts + i) for i in range(zero)) or "none"
    ignored = (r"(.*\.)?mtp\..*", r"(.*\.)?router\.classifier\.bias", rf"(.*\.)?mlp\.experts\.({without})\..*")
    return decoder(c, block, rms("norm", h, eps), ignored=ignored)
