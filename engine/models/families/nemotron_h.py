"""Nemotron-H (arXiv 2504.03624): a layer is Mamba 2, attention without positions, a feed-forward part, or experts."""

from ..description import Block, Body, Branch, Decoder, LowRank, Mlp, Moe, Sublayer
from ..fields import Fields, NotDescribedError
from ..pieces import (
    activation,
    attention,
    decoder,
    experts_of,
    heads_of,
    mamba2,
    matrix,
    mixer_activation,
    plain_mlp,
    qkvo,
    rms,
    sigmoid_router,
)
from ..registry import family

_KINDS = {
    "M": "linear_attention", "mamba": "linear_attention", "*": "full_attention", "attention": "full_attention",
    "-": "mlp", "E": "moe",
}  # fmt: skip


@family("NemotronHForCausalLM")
def nemotron_h(c: Fields) -> Decoder:
    kinds = _kinds(c)
    c = Fields({**c.raw, "num_hidden_layers": len(kinds)}, c.file)
    h, eps, act = c.size("hidden_size"), c.number("layer_norm_epsilon", 1e-5), activation(c, "relu2", "mlp_hidden_act")
    sizes, bias = heads_of(c, dim=128), c.flag("mlp_bias", False)
    mixer_activation(c, "mamba_hidden_act")

    def feed_forward(at: str, width: int) -> Mlp:
        return plain_mlp(at, h, width, act, bias=bias)

    def moe(at: str) -> Moe:
        num_experts, top_k = experts_of(c, "n_routed_experts", "num_local_experts", default=8, top_k=2)
        low, width = c.count("moe_latent_size"), c.size("moe_intermediate_size", default=7688)
        latent = None
        if low:
            down, up = matrix(at + "fc1_latent_proj", low, h, bias), matrix(at + "fc2_latent_proj", h, low, bias)
            latent = LowRank(down, up)
        experts = Mlp(
            width,
            up=matrix(at + "experts.{e}.up_proj", width, low or h, experts=num_experts),
            down=matrix(at + "experts.{e}.down_proj", low or h, width, experts=num_experts),
            act=act,
        )
        shared = feed_forward(at + "shared_experts.", c.size("moe_shared_expert_intermediate_size", default=7688))
        return Moe(num_experts, sigmoid_router(c, at, num_experts, top_k), experts, shared, latent=latent)

    def body(at: str, kind: str) -> Body:
        match kind:
            case "linear_attention":
                return _mamba2(c, at)
            case "full_attention":
                return attention(sizes, qkvo(at, h, *sizes))
            case "moe":
                return moe(at)
        return feed_forward(at, c.size("intermediate_size", default=21504))

    def block(layer: int) -> Block:
        at = f"layers.{layer}."
        return Block((Sublayer((Branch(body(at + "mixer.", kinds[layer])),), rms(at + "norm", h, eps)),))

    prefixes, ignored = ("backbone.", "model.", ""), (r"(.*\.)?mtp\..*",)
    return decoder(c, block, rms("norm_f", h, eps), name="embeddings", prefixes=prefixes, ignored=ignored)


def _mamba2(c: Fields, at: str) -> Body:
    heads, dim = c.size("mamba_num_heads", default=128), c.size("mamba_head_dim", default=64)
    groups = c.size("n_groups", "mamba_n_groups", default=8)
    c.divided("heads of Mamba", heads, "groups", groups)
    least = c.number("time_step_min", c.number("mamba_dt_min", 0.001))
    conv_bias = c.flag("use_conv_bias", c.flag("mamba_conv_bias", True))
    eps = c.number("layer_norm_epsilon", 1e-5)
    return mamba2(
        at, c.size("hidden_size"), heads, dim, c.size("ssm_state_size", default=128), groups,
        c.size("conv_kernel", "mamba_d_conv", default=4),
        norm=rms(at + "norm", heads * dim // groups, eps, total=heads * dim), limits=(least, float("inf")),
        bias=c.flag("use_bias", False), conv_bias=conv_bias,
    )  # fmt: skip


def _kinds(c: Fields) -> tuple[str, ...]:
    """Of the layers; older files have a text with one letter for each."""
    found = c.texts("layers_block_type") or c.texts("layer_types") or tuple(c.text("hybrid_override_pattern", ""))
    if not found:
        raise NotDescribedError("a config without layers_block_type")
    kinds = tuple(_KINDS.get(kind, kind) for kind in found)
    for kind in kinds:
        if kind not in _KINDS.values():
            raise NotDescribedError(f"layers of the kind {kind!r}")
    return kinds
