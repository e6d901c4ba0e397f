"""Zamba 2 (arXiv 2411.15242): Mamba 2 in all layers. In some it also reads what a transformer block makes of the stream
and the embedding beside it. A few such blocks take turns; each use has low-rank matrices of its own."""

from ..description import Aside, Attention, Block, Branch, Decoder, LowRank, Mlp, Sublayer
from ..fields import Fields, NotDescribedError
from ..pieces import activation, decoder, mamba2, matrix, rms, rope, rows_of
from ..registry import family

_MAMBA = ("linear_attention", "mamba", "mamba2")


@family("Zamba2ForCausalLM")
def zamba2(c: Fields) -> Decoder:
    kinds = c.texts("layers_block_type") or c.texts("layer_types") or ()
    if not kinds or any(kind not in ("hybrid", *_MAMBA) for kind in kinds):
        raise NotDescribedError(f"layers of the kinds {', '.join(sorted({*kinds})) or 'that no field names'}")
    c = Fields({**c.raw, "num_hidden_layers": len(kinds)}, c.file)
    h, eps, bias = c.size("hidden_size"), c.number("rms_norm_eps", 1e-5), c.flag("add_bias_linear", False)
    uses, num_blocks = [i for i, kind in enumerate(kinds) if kind == "hybrid"], c.size("num_mem_blocks", default=1)

    is_tied = c.flag("tie_word_embeddings", True)  # else transformers has the blocks of all layers apart, too
    inner, groups = c.size("mamba_expand", default=2) * h, c.size("mamba_ngroups", default=1)
    heads = c.size("n_mamba_heads", default=8)
    dim = c.divided("channels of Mamba", inner, "heads", heads)
    c.divided("heads of Mamba", heads, "groups", groups)
    state, taps = c.size("mamba_d_state", default=64), c.size("mamba_d_conv", default=4)
    limits = c.number("time_step_min", 0.001), float("inf")

    def aside(layer: int) -> Aside:
        use = uses.index(layer)
        first = uses[use % num_blocks] if is_tied else layer  # the layer that uses the block first
        at = f"layers.{first}.shared_transformer."
        return Aside(
            (
                Branch(_attention(c, at + "self_attn.", use), rms(at + "input_layernorm", 2 * h, eps)),
                Branch(_feed_forward(c, at + "feed_forward.", use), rms(at + "pre_ff_layernorm", h, eps)),
            ),
            out=matrix(f"layers.{layer}.linear", h, h),
        )

    def block(layer: int) -> Block:
        is_hybrid = kinds[layer] == "hybrid"
        at = f"layers.{layer}.{'mamba_decoder.' if is_hybrid else ''}"
        norm = rms(at + "mamba.norm", inner // groups, 1e-5, total=inner)
        mixer = mamba2(at + "mamba.", h, heads, dim, state, groups, taps, norm=norm, bias=bias, limits=limits)
        before = rms(at + "input_layernorm", h, eps)
        return Block((Sublayer((Branch(mixer),), before, aside=aside(layer) if is_hybrid else None),))

    at = r"(.*\.)?layers\.{}\.shared_transformer\."
    if is_tied:  # copies
        ignored = [at.format(layer) + ".*" for layer in uses[num_blocks:]]
    else:  # the low-rank matrices of other uses
        ignored = [at.format(layer) + rf".*_adapter_list\.(?!{use}\.).*" for use, layer in enumerate(uses)]
    return decoder(c, block, rms("final_layernorm", h, eps), tied=True, ignored=tuple(ignored))


def _attention(c: Fields, at: str, use: int) -> Attention:
    wide, heads = 2 * c.size("hidden_size"), c.size("num_attention_heads", default=32)
    kv_heads = c.size("num_key_value_heads", default=heads)
    c.divided("attention heads", heads, "key/value heads", kv_heads)
    dim, rank = c.divided("numbers of the stream and the embedding", wide, "heads", heads), _rank(c)

    def low(name: str, rows: int) -> LowRank:
        own = f"{at}linear_{name}_adapter_list.{use}."
        return LowRank(matrix(own + "0", rank, wide), matrix(own + "1", rows, rank))

    sizes = {"q": heads * dim, "k": kv_heads * dim, "v": kv_heads * dim}
    q, k, v = (matrix(f"{at}{name}_proj", rows, wide) for name, rows in sizes.items())
    return Attention(
        heads,
        kv_heads,
        dim,
        dim,
        (dim / 2) ** -0.5,
        q,
        k,
        v,
        o=matrix(at + "o_proj", wide // 2, heads * dim),
        rope=rope(c, dim) if c.flag("use_mem_rope", False) else None,
        low=(low("q", sizes["q"]), low("k", sizes["k"]), low("v", sizes["v"]))
        if c.flag("use_shared_attention_adapter", False)
        else None,
    )


def _feed_forward(c: Fields, at: str, use: int) -> Mlp:
    h, bias, rank = c.size("hidden_size"), c.flag("add_bias_linear", False), _rank(c)
    width, own = c.size("intermediate_size", default=4 * h), f"{at}gate_up_proj_adapter_list.{use}."
    down = matrix(own + "0", rank, h)
    return Mlp(
        width,
        gate=rows_of(at + "gate_up_proj", width, h, bias=bias),
        up=rows_of(at + "gate_up_proj", width, h, first=width, bias=bias),
        down=matrix(at + "down_proj", h, width, bias),
        act=activation(c, "gelu"),
        low=(
            LowRank(down, rows_of(own + "1", width, rank)),
            LowRank(down, rows_of(own + "1", width, rank, first=width)),
        ),
    )


def _rank(c: Fields) -> int:
    return c.size("adapter_rank", default=128)
