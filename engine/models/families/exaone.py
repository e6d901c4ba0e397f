"""EXAONE 4: norms of what a sublayer adds, and of the heads of queries and keys. Where some layers have windows, the
others have no position embedding."""

from ..description import Block, Decoder
from ..fields import Fields
from ..pieces import (
    FULL,
    activation,
    attention,
    decoder,
    heads_of,
    layer_types,
    mlp,
    postnorm,
    qkvo,
    rms,
    rope,
    window_of,
)
from ..registry import family


@family("Exaone4ForCausalLM")
def exaone4(c: Fields) -> Decoder:
    h, eps, sizes = c.size("hidden_size"), c.number("rms_norm_eps", 1e-5), heads_of(c)
    act, width, dim = activation(c, "silu"), c.size("intermediate_size"), sizes[2]
    has_windows = "sliding_window" in c
    every = _pattern(c) if has_windows else 1
    kinds = layer_types(c, lambda layer: "sliding_attention" if (layer + 1) % every else "full_attention")

    def block(layer: int) -> Block:
        at, is_near = f"layers.{layer}.", kinds[layer] == "sliding_attention"
        mixer = attention(
            sizes,
            qkvo(at + "self_attn.", h, *sizes),
            rope=rope(c, dim) if is_near or not has_windows else None,
            reach=window_of(c) if is_near else FULL,
            q_norm=rms(at + "self_attn.q_norm", dim, eps),
            k_norm=rms(at + "self_attn.k_norm", dim, eps),
        )
        return postnorm(
            (mixer, rms(at + "post_attention_layernorm", h, eps)),
            (mlp(at + "mlp.", h, width, act), rms(at + "post_feedforward_layernorm", h, eps)),
        )

    return decoder(c, block, rms("norm", h, eps))


def _pattern(c: Fields) -> int:
    """Each so manyth layer is full: a number, or a text such as LLLG."""
    given = c.raw.get("sliding_window_pattern")
    return len(given) if isinstance(given, str) and given else c.size("sliding_window_pattern", default=4)
