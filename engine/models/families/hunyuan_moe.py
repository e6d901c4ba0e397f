"""Hunyuan with experts: queries and keys are normed after they turn, and one more expert serves all tokens."""

from ..description import Attention, Block, Decoder, Moe, Rope, Router
from ..fields import Fields, NotDescribedError
from ..pieces import activation, decoder, heads_of, matrix, mlp, num_layers, prenorm, qkvo, rms, rope
from ..registry import family


@family("HunYuanMoEV1ForCausalLM")
def hunyuan_moe(c: Fields) -> Decoder:
    h, eps = c.size("hidden_size"), c.number("rms_norm_eps", 1e-5)
    heads, kv_heads, dim = heads_of(c)
    turn, act, bias = _rope(c, dim), activation(c, "silu"), c.flag("attention_bias", False)
    width = c.size("intermediate_size", default=11008)
    nums, chosen = _each(c, "num_experts"), _each(c, "moe_topk")

    def block(layer: int) -> Block:
        at = f"layers.{layer}."
        attention, moe, num_experts = at + "self_attn.", at + "mlp.", nums[layer]
        router = Router(
            matrix(moe + "gate.wg", num_experts, h), chosen[layer], renorm=True, is_float32=True, rounds_weights=False
        )
        return prenorm(
            (
                rms(at + "input_layernorm", h, eps),
                Attention(
                    heads, kv_heads, dim, dim, dim**-0.5, **qkvo(attention, h, heads, kv_heads, dim, bias),
                    rope=turn,
                    q_norm=rms(attention + "query_layernorm", dim, eps),
                    k_norm=rms(attention + "key_layernorm", dim, eps),
                    norm_after_rope=True,
                ),
            ),
            (
                rms(at + "post_attention_layernorm", h, eps),
                Moe(
                    num_experts,
                    router,
                    mlp(moe + "experts.{e}.", h, width, act, experts=num_experts),
                    mlp(moe + "shared_mlp.", h, width, act),
                ),
            ),
        )  # fmt: skip

    return decoder(c, block, rms("norm", h, eps))


def _each(c: Fields, name: str) -> tuple[int, ...]:
    """A field that has a number for all layers or one for each."""
    value = c.raw.get(name)
    if not isinstance(value, list):
        return (c.size(name, default=1),) * num_layers(c)
    found = c.integers(name) or ()
    if len(found) != num_layers(c) or min(found, default=0) < 1:
        raise NotDescribedError(f"{len(found)} {name}, which are not those of its layers")
    return found


def _rope(c: Fields, dim: int) -> Rope:
    given = c.part("rope_parameters") or c.part("rope_scaling")
    kind = "" if given is None else given.text("rope_type", given.text("type", ""))
    if given is None or kind not in ("dynamic", "ntk_alpha") or "alpha" not in given:
        return rope(c, dim)
    theta = given.number("rope_theta", c.number("rope_theta", 10_000.0))
    return Rope(dim, theta, "ntk_alpha", given.number("alpha", 1.0))
