"""Apertus (arXiv 2509.14233): Llama's layers with norms of queries and keys, and a feed-forward part without gates. Its
activation has two learned factors in each layer."""

from dataclasses import replace

from ..description import Block, Decoder, Mlp, Part, Weight
from ..fields import Fields
from ..pieces import activation, attention, decoder, heads_of, plain_mlp, prenorm, qkvo, rms, rope
from ..registry import family

_ROPE = {
    "rope_type": "llama3", "rope_theta": 12e6, "factor": 8.0, "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip


@family("ApertusForCausalLM")
def apertus(c: Fields) -> Decoder:
    if c.part("rope_parameters") is None and c.part("rope_scaling") is None:
        c = Fields({**c.raw, "rope_parameters": _ROPE}, c.file)
    h, eps, sizes = c.size("hidden_size"), c.number("rms_norm_eps", 1e-5), heads_of(c)
    turn, width = rope(c, sizes[2], theta=12e6), c.size("intermediate_size", default=14336)
    bias = c.flag("attention_bias", False)
    has_factors = c.text("hidden_act", "xielu") == "xielu"

    def feed_forward(at: str) -> Mlp:
        if not has_factors:
            return plain_mlp(at, h, width, activation(c, "xielu"))
        factors = Weight((Part(at + "act_fn.alpha_p", 1), Part(at + "act_fn.alpha_n", 1)))
        return replace(plain_mlp(at, h, width, "xielu"), act_weights=factors)

    def block(layer: int) -> Block:
        at = f"layers.{layer}."
        norms = tuple(rms(f"{at}self_attn.{name}_norm", sizes[2], eps) for name in "qk")
        mixer = attention(sizes, qkvo(at + "self_attn.", h, *sizes, bias), rope=turn, q_norm=norms[0], k_norm=norms[1])
        return prenorm(
            (rms(at + "attention_layernorm", h, eps), mixer),
            (rms(at + "feedforward_layernorm", h, eps), feed_forward(at + "mlp.")),
        )

    # Constants that files have beside the factors: 0.5 and -1e-6.
    return decoder(c, block, rms("norm", h, eps), ignored=(r"(.*\.)?mlp\.act_fn\.(beta|eps)",))
