"""Gemma 3n: several residual streams of which a layer computes one (AltUp), a residual of low rank (LAuReL), inputs for
each layer, sparse activations in the first layers, and last layers that read the keys and values of earlier ones."""

import math
from dataclasses import replace

from ....errors import ConfigError
from ..description import (
    AltUp,
    Attention,
    Block,
    Branch,
    Decoder,
    Embedding,
    LowRank,
    Norm,
    Part,
    PerLayerEmbedding,
    PerLayerInput,
    Rope,
    Streams,
    Sublayer,
    Weight,
)
from ..fields import Fields
from ..pieces import (
    FULL,
    TOWERS,
    activation,
    head,
    heads_of,
    layer_types,
    layers,
    matrix,
    mlp,
    num_layers,
    qkvo,
    rms,
    rope,
    window_of,
)
from ..registry import family

_PREFIXES = ("model.", "model.language_model.", "language_model.model.", "")
_FULL, _NEAR = "full_attention", "sliding_attention"


@family("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration")
def gemma3n(c: Fields) -> Decoder:
    h, eps, vocab, count = c.size("hidden_size"), c.number("rms_norm_eps", 1e-6), c.size("vocab_size"), num_layers(c)
    act, bias = activation(c, "gelu_pytorch_tanh", "hidden_activation"), c.flag("attention_bias", False)
    heads, kv_heads, dim = heads_of(c, dim=256)
    kinds = layer_types(c, lambda layer: _NEAR if (layer + 1) % 5 else _FULL)
    first_shared = count - c.count("num_kv_shared_layers", 15)
    widths, sparsities = _widths(c), _sparsities(c)
    per_layer = c.size("hidden_size_per_layer_input", default=256)
    num, active = c.size("altup_num_inputs", default=4), c.count("altup_active_idx")
    if active >= num or first_shared < 1:
        raise ConfigError(
            f"{c.file} has altup_active_idx = {active} of {num} streams, and {max(0, first_shared)} of {count} layers "
            "with keys and values of their own."
        )
    turns, window = _ropes(c, dim), window_of(Fields({"sliding_window": 512} | c.raw, c.file))
    has_scale = c.flag("altup_correct_scale", True)

    def norm(name: str, size: int = h) -> Norm:
        return rms(name, size, eps)

    def mixer(at: str, layer: int) -> Attention:
        kind, weights = kinds[layer], qkvo(at, h, heads, kv_heads, dim, bias)
        is_shared = layer >= first_shared
        own = [each for each in range(first_shared) if kinds[each] == kind]
        if is_shared and not own:
            raise ConfigError(f"{c.file} has no {kind} among the {first_shared} layers whose keys others read.")
        return Attention(
            heads,
            kv_heads,
            dim,
            dim,
            1.0,
            q=weights["q"],
            k=None if is_shared else weights["k"],
            v=None if is_shared else weights["v"],
            o=weights["o"],
            rope=turns[kind],
            reach=FULL if kind == _FULL else window,
            q_norm=norm(at + "q_norm", dim),
            k_norm=None if is_shared else norm(at + "k_norm", dim),
            v_norm=None if is_shared else Norm(dim, eps=eps),
            shared=own[-1] if is_shared else None,
        )

    def block(layer: int) -> Block:
        at = f"layers.{layer}."
        rank = c.size("laurel_rank", default=64)
        left, right = matrix(at + "laurel.linear_left", rank, h), matrix(at + "laurel.linear_right", h, rank)
        laurel = Branch(LowRank(left, right), post=norm(at + "laurel.post_laurel_norm"), adds_input=True)
        attention = Branch(mixer(at + "self_attn.", layer), post=norm(at + "post_attention_layernorm"))
        dense = replace(mlp(at + "mlp.", h, widths[layer], act), sparsity=sparsities[layer])
        half = math.sqrt(0.5)
        return Block(
            (
                Sublayer((attention, laurel), norm(at + "input_layernorm"), alpha=half, beta=half),
                Sublayer(
                    (Branch(dense),), norm(at + "pre_feedforward_layernorm"), norm(at + "post_feedforward_layernorm")
                ),
            ),
            extra=PerLayerInput(
                matrix(at + "per_layer_input_gate", per_layer, h),
                matrix(at + "per_layer_projection", h, per_layer),
                norm(at + "post_per_layer_input_norm"),
                act,
                scale=Part(at + "altup.correct_output_scale", h) if has_scale else None,
            ),
            altup=AltUp(
                active,
                router=matrix(at + "altup.modality_router", num, h),
                norm=norm(at + "altup.router_norm"),
                router_scale=1 / h,
                predict=matrix(at + "altup.prediction_coefs", num * num, num),
                correct=matrix(at + "altup.correction_coefs", num, num),
            ),
        )

    inputs = PerLayerEmbedding(
        per_layer,
        table=Weight(
            (Part("embed_tokens_per_layer.weight", c.size("vocab_size_per_layer_input", default=262144)),),
            count * per_layer,
        ),
        projection=matrix("per_layer_model_projection", count * per_layer, h),
        norm=norm("per_layer_projection_norm", per_layer),
        table_scale=math.sqrt(per_layer),
        projection_scale=h**-0.5,
        scale=math.sqrt(0.5),
    )
    streams = Streams(
        split=tuple(matrix(f"altup_projections.{i}", h, h) for i in range(num - 1)),
        join=tuple(matrix(f"altup_unembed_projections.{i}", h, h) for i in range(num - 1)),
    )
    # null says that there is none.
    softcap = c.number("final_logit_softcapping", 0.0 if "final_logit_softcapping" in c.raw else 30.0)
    shared = "|".join(str(layer) for layer in range(first_shared, count)) or "none"
    unread = [rf"(.*\.)?layers\.({shared})\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\..*"]
    if not has_scale:
        unread.append(r"(.*\.)?altup\.correct_output_scale")
    return Decoder(
        h,
        vocab,
        Embedding(matrix("embed_tokens", vocab, h), math.sqrt(h), per_layer=inputs),
        layers(c, block),
        norm("norm"),
        head(c, tied=True, softcap=softcap),
        _PREFIXES,
        (*TOWERS, *unread),
        streams,
    )


def _ropes(c: Fields, dim: int) -> dict[str, Rope]:
    """By the kind of layer. In older files `rope_scaling` is that of full layers."""
    near = c
    if c.part("rope_parameters") is None:
        near = Fields({**c.raw, "rope_scaling": None, "rope_theta": c.number("rope_local_base_freq", 1e4)}, c.file)
    return {_FULL: rope(c, dim, kind=_FULL, theta=1e6), _NEAR: rope(near, dim, kind=_NEAR, theta=1e4)}


def _widths(c: Fields) -> tuple[int, ...]:
    """Of the feed-forward part of each layer: one number, or a list."""
    count = num_layers(c)
    if not isinstance(c.raw.get("intermediate_size"), list):
        return (c.size("intermediate_size", default=16384),) * count
    found = c.integers("intermediate_size") or ()
    if len(found) != count or min(found) < 1:
        raise ConfigError(f"{c.file} has {count} layers, but intermediate_size is not as many positive numbers.")
    return found


def _sparsities(c: Fields) -> tuple[float, ...]:
    count, given = num_layers(c), c.raw.get("activation_sparsity_pattern")
    if given is None:
        return tuple(0.95 if layer < 10 < count else 0.0 for layer in range(count))
    found = [float(each) for each in given if isinstance(each, int | float)] if isinstance(given, list) else []
    if len(found) != count or not all(0 <= each < 1 for each in found):
        raise ConfigError(
            f"{c.file} has {count} layers, but activation_sparsity_pattern is not as many shares from 0 to less than 1."
        )
    return tuple(found)
