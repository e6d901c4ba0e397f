"""Gemma 4: layers with windows and full layers with larger heads, of which the last may read the keys and values of
earlier layers, inputs for each layer, and in some models experts beside the dense feed-forward layers."""

import math

from ..description import (
    Attention,
    Block,
    Branch,
    Decoder,
    Embedding,
    Moe,
    Norm,
    Part,
    PerLayerEmbedding,
    PerLayerInput,
    Rope,
    Router,
    Sublayer,
    Weight,
)
from ..fields import Fields, NotDescribedError
from ..pieces import (
    FULL,
    TOWERS,
    activation,
    experts_of,
    head,
    layer_types,
    layers,
    matrix,
    mlp,
    num_layers,
    qkvo,
    rms,
    rope,
    stacked_experts,
    vector,
    window_of,
)
from ..registry import family

_PREFIXES = ("model.", "model.language_model.", "language_model.model.", "")
_FULL = "full_attention"


@family("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration")
def gemma4(c: Fields) -> Decoder:
    if c.raw.get("use_bidirectional_attention") == "all":
        raise NotDescribedError("bidirectional attention")
    h, eps, vocab = c.size("hidden_size"), c.number("rms_norm_eps", 1e-6), c.size("vocab_size")
    act, width = activation(c, "gelu_pytorch_tanh", "hidden_activation"), c.size("intermediate_size")
    heads, bias, count = c.size("num_attention_heads", default=8), c.flag("attention_bias", False), num_layers(c)
    kinds = layer_types(c, lambda layer: _FULL if layer % 6 == 5 else "sliding_attention")
    kinds = (*kinds[:-1], _FULL)  # as transformers, whatever the field says
    first_shared = count - c.count("num_kv_shared_layers")
    is_wide, per_layer = c.flag("use_double_wide_mlp", False), c.count("hidden_size_per_layer_input", 256)
    has_experts = c.flag("enable_moe_block", False)

    def norm(name: str, size: int = h) -> Norm:
        return rms(name, size, eps)

    def mixer(at: str, layer: int) -> Attention:
        kind = kinds[layer]
        kv_heads, dim = _sizes(c, layer, is_full=kind == _FULL)
        weights = qkvo(at, h, heads, kv_heads, dim, bias)
        is_shared = layer >= first_shared
        own = [each for each in range(first_shared) if kinds[each] == kind]
        is_key_value = kind == _FULL and c.flag("attention_k_eq_v", False)
        return Attention(
            heads,
            kv_heads,
            dim,
            dim,
            1.0,
            q=weights["q"],
            k=None if is_shared else weights["k"],
            v=None if is_shared or is_key_value else weights["v"],
            o=weights["o"],
            rope=_rope(c, dim, kind),
            reach=FULL if kind == _FULL else window_of(c),
            q_norm=norm(at + "q_norm", dim),
            k_norm=None if is_shared else norm(at + "k_norm", dim),
            v_norm=None if is_shared else Norm(dim, eps=eps),
            shared=own[-1] if is_shared else None,
        )

    def extra(at: str) -> PerLayerInput:
        return PerLayerInput(
            matrix(at + "per_layer_input_gate", per_layer, h),
            matrix(at + "per_layer_projection", h, per_layer),
            norm(at + "post_per_layer_input_norm"),
            act,
        )

    def experts(at: str) -> Moe:
        """The router reads the stream, with a norm of its own."""
        num_experts, top_k = experts_of(c, "num_experts", top="top_k_experts", default=128, top_k=8)
        inner = c.size("moe_intermediate_size", "expert_intermediate_size")
        router = Router(
            matrix(at + "router.proj", num_experts, h),
            top_k,
            renorm=True,
            expert_scale=Part(at + "router.per_expert_scale", num_experts),
            reads_stream=True,
            norm=Norm(h, vector(at + "router.scale", h), eps=eps),
            scale_in=h**-0.5,
            rounds_weights=False,
        )
        name = at + "experts."
        return Moe(
            num_experts, router, stacked_experts(name + "gate_up_proj", name + "down_proj", h, inner, num_experts, act)
        )

    def block(layer: int) -> Block:
        at = f"layers.{layer}."
        wide = 2 * width if is_wide and layer >= first_shared else width
        before, after = norm(at + "pre_feedforward_layernorm"), norm(at + "post_feedforward_layernorm")
        dense = mlp(at + "mlp.", h, wide, act)
        if has_experts:
            first, second = (norm(f"{at}post_feedforward_layernorm_{i}") for i in (1, 2))
            with_experts = Branch(experts(at), norm(at + "pre_feedforward_layernorm_2"), second)
            feed_forward = Sublayer((Branch(dense, before, first), with_experts), post=after)
        else:
            feed_forward = Sublayer((Branch(dense),), before, after)
        first_norm, post = norm(at + "input_layernorm"), norm(at + "post_attention_layernorm")
        mixed = Sublayer((Branch(mixer(at + "self_attn.", layer)),), first_norm, post)
        return Block((mixed, feed_forward), extra(at) if per_layer else None, Part(at + "layer_scalar", 1))

    inputs = None
    if per_layer:
        inputs = PerLayerEmbedding(
            per_layer,
            table=Weight(
                (Part("embed_tokens_per_layer.weight", c.size("vocab_size_per_layer_input", default=vocab)),),
                count * per_layer,
            ),
            projection=matrix("per_layer_model_projection", count * per_layer, h),
            norm=norm("per_layer_projection_norm", per_layer),
            table_scale=math.sqrt(per_layer),
            projection_scale=h**-0.5,
            scale=2**-0.5,
        )
    embedding = Embedding(matrix("embed_tokens", vocab, h), math.sqrt(h), per_layer=inputs)
    last = head(c, tied=True, softcap=c.number("final_logit_softcapping", 0.0))
    shared = "|".join(str(layer) for layer in range(first_shared, count)) or "none"
    unread = rf"(.*\.)?layers\.({shared})\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\..*"
    return Decoder(h, vocab, embedding, layers(c, block), norm("norm"), last, _PREFIXES, (*TOWERS, unread))


def _sizes(c: Fields, layer: int, *, is_full: bool) -> tuple[int, int]:
    """(key/value heads, head size)"""
    kv_heads, dim = c.size("num_key_value_heads", default=4), c.size("head_dim", default=256)
    overrides = c.part("per_layer_config")
    if overrides is not None:
        own = overrides.part(str(layer)) or Fields({}, c.file)
        return own.size("num_key_value_heads", default=kv_heads), own.size("head_dim", default=dim)
    if not is_full:
        return kv_heads, dim
    if c.flag("attention_k_eq_v", False):
        kv_heads = c.size("num_global_key_value_heads", default=kv_heads)
    return kv_heads, c.size("global_head_dim", default=512)


def _rope(c: Fields, dim: int, kind: str) -> Rope:
    if "rope_parameters" in c:
        return rope(c, dim, kind=kind)
    if kind == _FULL:
        return Rope(dim, 1e6, "proportional", high=0.25)
    return Rope(dim, 10_000.0)
