"""DeepSeek V2 and V3 (arXiv 2405.04434, 2412.19437), also Kimi-K2 and Moonlight, GLM-4.7-Flash and Mistral 4:
multi-head latent attention, and experts of which some serve all tokens. Youtu and MiniCPM3 have no experts."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from ..description import Block, Decoder, LatentAttention, LowRank, Mlp, Moe, Router, Weight
from ..fields import Fields, NotDescribedError
from ..pieces import (
    activation,
    decoder,
    experts_of,
    later_layers,
    layer_types,
    matrix,
    mlp,
    num_layers,
    prenorm,
    rms,
    rope,
    sigmoid_router,
    stacked_experts,
    temperature,
    yarn_mscale,
)
from ..registry import family


@family("DeepseekV2ForCausalLM")
def deepseek_v2(c: Fields) -> Decoder:
    num_experts, top_k = experts_of(c, "n_routed_experts", "num_experts", default=64, top_k=6)
    method = c.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise NotDescribedError(f"experts chosen by {method}")
    groups, top_groups = (c.size("n_group"), c.size("topk_group")) if method == "group_limited_greedy" else (1, 1)
    c.divided("experts", num_experts, "groups", groups)
    scale, h = c.number("routed_scaling_factor", 1.0), c.size("hidden_size")

    def router(at: str) -> Router:
        return Router(
            matrix(at + "gate", num_experts, h),
            top_k,
            groups=groups,
            top_groups=top_groups,
            group_by="max",
            scale=scale,
            is_float32=True,
            rounds_weights=False,
        )

    first = c.count("first_k_dense_replace")
    feed_forward = _experts(c, router, num_experts, 1407, 2, lambda layer: layer >= first)
    return _decoder(c, feed_forward, (1536, 512, 128, 64, 128), is_adjacent=True)


@family("DeepseekV3ForCausalLM")
def deepseek_v3(c: Fields) -> Decoder:
    num_experts, top_k = experts_of(c, "n_routed_experts", "num_local_experts", default=256, top_k=8)

    def router(at: str) -> Router:
        return sigmoid_router(c, at, num_experts, top_k, groups=8, top_groups=4, scale=2.5)

    first = c.count("first_k_dense_replace", 3)
    feed_forward = _experts(c, router, num_experts, 2048, 1, lambda layer: layer >= first)
    return _decoder(c, feed_forward, (1536, 512, 128, 64, 128), is_adjacent=c.flag("rope_interleave", True))


@family("Glm4MoeLiteForCausalLM")
def glm4_moe_lite(c: Fields) -> Decoder:
    num_experts, top_k = experts_of(c, "n_routed_experts", "num_local_experts", default=64, top_k=4)

    def router(at: str) -> Router:
        return sigmoid_router(c, at, num_experts, top_k, scale=1.8)

    first = c.count("first_k_dense_replace", 1)  # older files have this in place of a kind for each layer
    kinds = layer_types(c, lambda layer: "sparse" if layer >= first else "dense", "mlp_layer_types")
    feed_forward = _experts(c, router, num_experts, 1536, 1, lambda layer: kinds[layer] == "sparse")
    return _decoder(c, feed_forward, (768, 512, 192, 64, 256), is_adjacent=c.flag("rope_interleave", True))


@family("Mistral4ForCausalLM")
def mistral4(c: Fields) -> Decoder:
    num_experts, top_k = experts_of(c, "n_routed_experts", "num_local_experts", default=128, top_k=4)

    def router(at: str) -> Router:
        """The routing of DeepSeek-V3 with other scores and no correction."""
        found = sigmoid_router(c, at, num_experts, top_k)
        return replace(found, score="softmax", correction=None, is_float32=False)

    first = c.count("first_k_dense_replace")
    feed_forward = _experts(c, router, num_experts, 2048, 1, lambda layer: layer >= first, is_stacked=True)
    sizes, is_adjacent = (1024, 256, 64, 64, 128), c.flag("rope_interleave", True)
    return _decoder(c, feed_forward, sizes, is_adjacent=is_adjacent, is_heated=True)


@family("YoutuForCausalLM")
def youtu(c: Fields) -> Decoder:
    """No experts."""
    is_adjacent = c.flag("rope_interleave", True)
    return _decoder(_tied(c), _dense(c), (1536, 512, 128, 64, 128), is_adjacent=is_adjacent)


@family("MiniCPM3ForCausalLM")
def minicpm3(c: Fields) -> Decoder:
    """No experts; factors of embeddings, of what is added to the stream, and of logits."""
    h, heads, count = c.size("hidden_size"), c.size("num_attention_heads"), num_layers(c)
    c = _tied(Fields({"rms_norm_eps": 1e-5} | c.raw, c.file))
    found = _decoder(c, _dense(c), (768, 256, 64, 32, h // heads), is_adjacent=False)
    # null says that there is no factor.
    beta = c.number("scale_depth", math.sqrt(count) if "scale_depth" in c.raw else 1.4) / math.sqrt(count)
    base = c.number("dim_model_base", h if "dim_model_base" in c.raw else 256)
    blocks = (replace(b, sublayers=tuple(replace(each, beta=beta) for each in b.sublayers)) for b in found.blocks)
    return replace(
        found,
        blocks=tuple(blocks),
        embedding=replace(found.embedding, scale=c.number("scale_emb", 12.0)),
        head=replace(found.head, scale=base / h),
    )


def _tied(c: Fields) -> Fields:
    """The same, with tied heads by default."""
    return Fields({"tie_word_embeddings": True} | c.raw, c.file)


def _dense(c: Fields) -> Callable[[str, int], Mlp]:
    h, act, width = c.size("hidden_size"), activation(c, "silu"), c.size("intermediate_size")
    return lambda at, _: mlp(at, h, width, act, bias=c.flag("mlp_bias", False))


def _experts(
    c: Fields,
    router: Callable[[str], Router],
    num_experts: int,
    width: int,
    num_shared: int,
    has_experts: Callable[[int], bool],
    *,
    is_stacked: bool = False,
) -> Callable[[str, int], Mlp | Moe]:
    """width, num_shared: defaults of the fields. is_stacked: a tensor holds all experts."""
    h, act, bias = c.size("hidden_size"), activation(c, "silu"), c.flag("mlp_bias", False)
    width = c.size("moe_intermediate_size", default=width)
    shared = width * c.size("n_shared_experts", default=num_shared)

    def feed_forward(at: str, layer: int) -> Mlp | Moe:
        if not has_experts(layer):
            return mlp(at, h, c.size("intermediate_size"), act, bias=bias)
        if is_stacked:
            name = at + "experts."
            experts = stacked_experts(name + "gate_up_proj", name + "down_proj", h, width, num_experts, act)
        else:
            experts = mlp(at + "experts.{e}.", h, width, act, experts=num_experts)
        return Moe(
            num_experts,
            router(at),
            experts,
            mlp(at + "shared_experts.", h, shared, act, bias=bias),
        )

    return feed_forward


def latent_attention(
    c: Fields, sizes: tuple[int, int, int, int, int], *, is_adjacent: bool, is_heated: bool = False, theta: float = 1e4
) -> Callable[[str], LatentAttention]:
    """That of the tensors under a name. sizes: defaults of the ranks of queries and of the cache, and of the parts of a
    head: without positions, with positions, value. is_heated: queries grow with their positions (Mistral 4), whose rope
    fields count a whole head. theta: the default of rope_theta."""
    h, bias, heads = c.size("hidden_size"), c.flag("attention_bias", False), c.size("num_attention_heads")
    # null says that queries have no low rank.
    low = 0 if "q_lora_rank" in c.raw and c.raw["q_lora_rank"] is None else c.size("q_lora_rank", default=sizes[0])
    rank = c.size("kv_lora_rank", default=sizes[1])
    nope, turned = c.size("qk_nope_head_dim", default=sizes[2]), c.size("qk_rope_head_dim", default=sizes[3])
    value, width = c.size("v_head_dim", default=sizes[4]), heads * (nope + turned)
    pairs: Literal["adjacent", "halves"] = "adjacent" if is_adjacent else "halves"
    each = nope + turned
    dims, share = (each, turned / each) if is_heated else (turned, 1.0)
    turn = rope(c, dims, theta=theta, share=share, pairs=pairs)

    def queries(at: str) -> Weight | LowRank:
        if not low:
            return matrix(at + "q_proj", width, h)
        down, up = matrix(at + "q_a_proj", low, h, bias), matrix(at + "q_b_proj", width, low)
        return LowRank(down, up, rms(at + "q_a_layernorm", low, 1e-6))

    def attention(at: str) -> LatentAttention:
        return LatentAttention(
            heads,
            nope,
            turned,
            value,
            rank,
            (nope + turned) ** -0.5 * _sharpness(c),
            q=queries(at),
            kv_a=matrix(at + "kv_a_proj_with_mqa", rank + turned, h, bias),
            kv_norm=rms(at + "kv_a_layernorm", rank, 1e-6),  # whatever rms_norm_eps says
            kv_b=matrix(at + "kv_b_proj", heads * (nope + value), rank),
            o=matrix(at + "o_proj", h, heads * value, bias),
            rope=turn,
            temperature=temperature(c) if is_heated else None,
        )

    return attention


def _decoder(
    c: Fields,
    feed_forward: Callable[[str, int], Mlp | Moe],
    sizes: tuple[int, int, int, int, int],
    *,
    is_adjacent: bool,
    is_heated: bool = False,
) -> Decoder:
    """sizes, is_adjacent, is_heated: of `latent_attention`."""
    h, eps = c.size("hidden_size"), c.number("rms_norm_eps", 1e-6)
    attention = latent_attention(c, sizes, is_adjacent=is_adjacent, is_heated=is_heated)

    def block(layer: int) -> Block:
        at = f"layers.{layer}."
        return prenorm(
            (rms(at + "input_layernorm", h, eps), attention(at + "self_attn.")),
            (rms(at + "post_attention_layernorm", h, eps), feed_forward(at + "mlp.", layer)),
        )

    return decoder(c, block, rms("norm", h, eps), ignored=(later_layers(c),))


def _sharpness(c: Fields) -> float:
    """What yarn multiplies scores with besides the cosines and sines."""
    given = c.part("rope_parameters") or c.part("rope_scaling")
    if given is None or given.text("rope_type", given.text("type", "default")) == "default":
        return 1.0
    if not given.raw.get("mscale_all_dim"):
        return 1.0
    return yarn_mscale(given.number("factor", 1.0), given.number("mscale_all_dim", 1.0)) ** 2
