"""The pieces that families' pages are written with."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Literal, TypedDict

from ...errors import ConfigError
from .description import (
    Activation,
    Attention,
    Block,
    Body,
    Branch,
    Conv,
    Decoder,
    Embedding,
    Head,
    Mamba1,
    Mamba2,
    Mlp,
    Norm,
    Part,
    Reach,
    Rope,
    Router,
    Sublayer,
    Temperature,
    Weight,
)
from .fields import MAX_EXPERTS, MAX_LAYERS, MAX_POSITIONS, Fields, NotDescribedError

FULL = Reach()

# Tensors of vision and audio towers, which a text model does not read.
TOWERS = (r"(.*\.)?(visual|vision_(tower|model|encoder)|multi_modal_projector|audio_tower|embed_(vision|audio))\..*",)

# What the text model's names are under in models that also see or hear.
WRAPPED = ("model.language_model.", "language_model.model.", "model.text_model.", "language_model.", "model.")

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
}


def activation(c: Fields, default: str, *names: str) -> Activation:
    """The activation under the first of `names` that is present; hidden_act without names."""
    found = next((c.text(name, "") for name in names or ("hidden_act",) if name in c), default)
    if found not in _ACTIVATIONS:
        raise NotDescribedError(f"the activation {found!r}")
    return _ACTIVATIONS[found]


def matrix(
    name: str, rows: int, columns: int, bias: bool = False, *, experts: int = 0, is_transposed: bool = False
) -> Weight:
    """The whole tensor `name`.weight, and `name`.bias."""
    return Weight(
        (Part(name + ".weight", rows),),
        columns,
        bias=(Part(name + ".bias", rows),) if bias else (),
        experts=experts,
        is_transposed=is_transposed,
    )


def rows_of(
    name: str, count: int, columns: int, *, first: int = 0, every: int = 0, times: int = 1, bias: bool = False,
    is_transposed: bool = False,
) -> Weight:  # fmt: skip
    """Some rows of `name`.weight and of `name`.bias; see `Part`."""
    return Weight(
        (Part(name + ".weight", count, first, every, times),),
        columns,
        bias=(Part(name + ".bias", count, first, every, times),) if bias else (),
        is_transposed=is_transposed,
    )


def vector(name: str, size: int, map: Literal["", "plus_one", "neg_exp"] = "") -> Weight:
    """The whole tensor `name`."""
    return Weight((Part(name, size),), map=map)


def rms(name: str, size: int, eps: float, map: Literal["", "plus_one"] = "", *, total: int = 0) -> Norm:
    """total: elements of the weight, if each group of `size` has weights of its own."""
    return Norm(size, vector(name + ".weight", total or size, map), eps=eps)


def layer_norm(name: str, size: int, eps: float, *, bias: bool = True, map: Literal["", "plus_one"] = "") -> Norm:
    found = vector(name + ".bias", size) if bias else None
    return Norm(size, vector(name + ".weight", size, map), found, "layer", eps)


class Qkvo(TypedDict):
    """The projections of an `Attention`."""

    q: Weight
    k: Weight
    v: Weight
    o: Weight


def qkvo(
    at: str, hidden: int, heads: int, kv_heads: int, dim: int, bias: bool = False, *, out_bias: bool | None = None,
    out: str = "o_proj",
) -> Qkvo:  # fmt: skip
    """Four matrices of their own. out_bias: of the last; None: as `bias`."""
    return Qkvo(
        q=matrix(at + "q_proj", heads * dim, hidden, bias),
        k=matrix(at + "k_proj", kv_heads * dim, hidden, bias),
        v=matrix(at + "v_proj", kv_heads * dim, hidden, bias),
        o=matrix(at + out, hidden, heads * dim, bias if out_bias is None else out_bias),
    )


def fused_qkv(
    name: str, hidden: int, heads: int, kv_heads: int, dim: int, bias: bool = False, *, out: str,
    out_bias: bool | None = None, is_transposed: bool = False,
) -> Qkvo:  # fmt: skip
    """One tensor `name`: the rows of all queries, then of all keys, then of all values. out: the name of the last
    projection."""
    num, each = heads * dim, kv_heads * dim

    def some(first: int, count: int) -> Weight:
        return rows_of(name, count, hidden, first=first, bias=bias, is_transposed=is_transposed)

    last = matrix(out, hidden, num, bias if out_bias is None else out_bias, is_transposed=is_transposed)
    return Qkvo(q=some(0, num), k=some(num, each), v=some(num + each, each), o=last)


def grouped_qkv(name: str, hidden: int, heads: int, kv_heads: int, dim: int, bias: bool = False, *, out: str) -> Qkvo:
    """One tensor `name`: for each key/value head the rows of its queries, its key and its value."""
    num = heads // kv_heads

    def some(first: int, count: int) -> Weight:
        every = (num + 2) * dim
        return rows_of(name, count * dim, hidden, first=first * dim, every=every, times=kv_heads, bias=bias)

    return Qkvo(q=some(0, num), k=some(num, 1), v=some(num + 1, 1), o=matrix(out, hidden, heads * dim, bias))


def attention(
    sizes: tuple[int, int, int], weights: Qkvo, *, scale: float | None = None, rope: Rope | None = None,
    reach: Reach = FULL, q_norm: Norm | None = None, k_norm: Norm | None = None,
) -> Attention:  # fmt: skip
    """sizes: of `heads_of`. scale: of scores; None: 1 / √(head size)."""
    heads, kv_heads, dim = sizes
    factor = dim**-0.5 if scale is None else scale
    return Attention(heads, kv_heads, dim, dim, factor, **weights, rope=rope, reach=reach, q_norm=q_norm, k_norm=k_norm)


def plain_mlp(
    at: str, hidden: int, width: int, act: Activation, *, names: tuple[str, str] = ("up_proj", "down_proj"),
    bias: bool = False, is_transposed: bool = False,
) -> Mlp:  # fmt: skip
    """Without gates."""
    up, down = names
    return Mlp(
        width,
        up=matrix(at + up, width, hidden, bias, is_transposed=is_transposed),
        down=matrix(at + down, hidden, width, bias, is_transposed=is_transposed),
        act=act,
    )


def fused_mlp(at: str, hidden: int, width: int, act: Activation) -> Mlp:
    """Gated; gates and ups are halves of gate_up_proj."""
    return Mlp(
        width,
        gate=rows_of(at + "gate_up_proj", width, hidden),
        up=rows_of(at + "gate_up_proj", width, hidden, first=width),
        down=matrix(at + "down_proj", hidden, width),
        act=act,
    )


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """The slopes of arXiv 2108.12409, for any number of heads."""
    power = 2 ** int(math.log2(heads))
    first = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    between = [2 ** (-4 * (2 * i + 1) / power) for i in range(heads - power)]
    return (*first, *between)


def mlp(
    at: str,
    hidden: int,
    width: int,
    act: Activation = "silu",
    *,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    bias: bool = False,
    experts: int = 0,
) -> Mlp:
    """Gated, of three matrices of their own. at: with `{e}` for experts."""
    gate, up, down = names
    return Mlp(
        width,
        gate=matrix(at + gate, width, hidden, bias, experts=experts),
        up=matrix(at + up, width, hidden, bias, experts=experts),
        down=matrix(at + down, hidden, width, bias, experts=experts),
        act=act,
    )


def stacked_experts(
    gate_up: str,
    down: str,
    hidden: int,
    width: int,
    experts: int,
    act: Activation = "silu",
    *,
    biases: tuple[str, str] | None = None,
    is_transposed: bool = False,
    in_turn: bool = False,
) -> Mlp:
    """Two tensors for all experts: [experts, 2 · width, hidden] and [experts, hidden, width], or if is_transposed with
    the last two dimensions the other way round. biases: the names of theirs. in_turn: the rows of gate and up follow
    each other in turn, instead of first all of gate."""
    first, every = (1, 2) if in_turn else (width, 0)

    def half(begin: int) -> Weight:
        def part(name: str) -> Part:
            return Part(name, 1, begin, every, width) if in_turn else Part(name, width, begin)

        bias = () if biases is None else (part(biases[0]),)
        return Weight((part(gate_up),), hidden, bias=bias, experts=experts, is_transposed=is_transposed)

    return Mlp(
        width,
        gate=half(0),
        up=half(first),
        down=Weight(
            (Part(down, hidden),),
            width,
            bias=() if biases is None else (Part(biases[1], hidden),),
            experts=experts,
            is_transposed=is_transposed,
        ),
        act=act,
    )


def conv(name: str, channels: int, taps: int, *, bias: bool = False, act: Literal["", "silu"] = "silu") -> Conv:
    return Conv(matrix(name, channels, taps), channels, taps, act, vector(name + ".bias", channels) if bias else None)


def mixer_activation(c: Fields, *names: str) -> None:
    """Raises NotDescribedError if the activation of a mixer's convolution and gate is not silu."""
    if (act := activation(c, "silu", *names)) != "silu":
        raise NotDescribedError(f"{act} in recurrent layers")


def mamba1(
    at: str, hidden: int, channels: int, state: int, rank: int, taps: int, *, norms: tuple[Norm | None, ...],
    bias: bool = False, conv_bias: bool = True,
) -> Mamba1:  # fmt: skip
    """state: numbers for each channel. rank: of the time steps. norms: of time steps, B and C."""
    dt_norm, b_norm, c_norm = norms
    return Mamba1(
        channels, state, rank,
        xz=matrix(at + "in_proj", 2 * channels, hidden, bias),
        conv=conv(at + "conv1d", channels, taps, bias=conv_bias),
        x=matrix(at + "x_proj", rank + 2 * state, channels), dt=matrix(at + "dt_proj", channels, rank, True),
        a_log=Weight((Part(at + "A_log", channels),), state, map="neg_exp"), d=vector(at + "D", channels),
        out=matrix(at + "out_proj", hidden, channels, bias), dt_norm=dt_norm, b_norm=b_norm, c_norm=c_norm,
    )  # fmt: skip


def mamba2(
    at: str, hidden: int, heads: int, dim: int, state: int, groups: int, taps: int, *, norm: Norm | None,
    bias: bool = False, out_bias: bool | None = None, conv_bias: bool = True, norm_first: bool = False,
    limits: tuple[float, float] = (0.0, math.inf), scales: tuple[float, ...] = (1.0,) * 5,
) -> Mamba2:  # fmt: skip
    """state: numbers for each feature of a head. out_bias: of the last projection; None: as `bias`."""
    inner, of_groups = heads * dim, groups * state
    channels = inner + 2 * of_groups
    return Mamba2(
        heads, dim, state, groups,
        zxbcdt=matrix(at + "in_proj", inner + channels + heads, hidden, bias),
        conv=conv(at + "conv1d", channels, taps, bias=conv_bias),
        a_log=vector(at + "A_log", heads, "neg_exp"), d=vector(at + "D", heads), dt_bias=vector(at + "dt_bias", heads),
        out=matrix(at + "out_proj", hidden, inner, bias if out_bias is None else out_bias),
        norm=norm, norm_first=norm_first, dt_limits=limits, scales=scales,
    )  # fmt: skip


def mamba2_sizes(c: Fields, inner: int) -> tuple[int, int, int, int, int]:
    """(heads, head size, state, groups, taps) of the fields `mamba_…`. inner: numbers of all heads."""
    heads, groups = c.size("mamba_n_heads", default=128), c.size("mamba_n_groups", default=1)
    dim = c.divided("channels of Mamba", inner, "heads", heads)
    if c.raw.get("mamba_d_head") not in (None, "auto", dim):
        raise ConfigError(f"{c.file} has mamba_d_head = {c.raw['mamba_d_head']!r}, but {inner} / {heads} is {dim}.")
    c.divided("heads of Mamba", heads, "groups", groups)
    return heads, dim, c.size("mamba_d_state", default=256), groups, c.size("mamba_d_conv", default=4)


def limits(c: Fields, name: str = "time_step_limit") -> tuple[float, float]:
    """Of Mamba 2's time steps: two numbers, of which the second may be infinite."""
    value = c.raw.get(name)
    if value is None:
        return 0.0, math.inf
    found = [_float(each) for each in value] if isinstance(value, list) else []
    if len(found) != 2 or any(math.isnan(each) for each in found):
        raise ConfigError(f"{c.file} has {name} = {value!r}, which should be two numbers.")
    return found[0], found[1]


def _float(value: object) -> float:
    """transformers 5 writes infinity as an object."""
    if isinstance(value, dict):
        value = value.get("__float__")
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        try:
            return float(value)
        except ValueError:
            pass
    return math.nan


def either(first: Mlp, second: Mlp) -> Mlp:
    """The same part with two layouts in files: the second is taken where the tensors of the first are absent."""
    gate = None if first.gate is None else replace(first.gate, other=second.gate)
    return replace(first, gate=gate, up=replace(first.up, other=second.up), down=replace(first.down, other=second.down))


def prenorm(*pairs: tuple[Norm, Body]) -> Block:
    """A sublayer for each pair: the norm, and what reads its output and is added to the stream."""
    return Block(tuple(Sublayer((Branch(body),), norm) for norm, body in pairs))


def sandwich(*triples: tuple[Norm, Body, Norm]) -> Block:
    """Two norms a sublayer: one of what it reads, one of what it adds to the stream."""
    return Block(tuple(Sublayer((Branch(body),), norm, post) for norm, body, post in triples))


def postnorm(*pairs: tuple[Body, Norm]) -> Block:
    """A sublayer for each pair: what reads the stream, and the norm of what is added to it."""
    return Block(tuple(Sublayer((Branch(body),), None, post) for body, post in pairs))


def parallel(norm: Norm, *bodies: Body) -> Block:
    """One sublayer, whose bodies read the same normed stream."""
    return Block((Sublayer(tuple(Branch(body) for body in bodies), norm),))


def num_layers(c: Fields) -> int:
    return c.size("num_hidden_layers", "n_layer", "n_layers", "num_layers", most=MAX_LAYERS)


def layers(c: Fields, block: Callable[[int], Block]) -> tuple[Block, ...]:
    return tuple(block(layer) for layer in range(num_layers(c)))


def layer_types(c: Fields, default: Callable[[int], str], name: str = "layer_types") -> tuple[str, ...]:
    """The kind of each layer, by the field or by a rule. default: layer → kind. name: empty: the rule alone."""
    count = num_layers(c)
    found = c.texts(name) if name else None
    if found is None:
        return tuple(default(layer) for layer in range(count))
    if len(found) != count:
        raise ConfigError(f"{c.file} has {count} layers but {len(found)} {name}.")
    return found


def head(
    c: Fields, *, tied: bool, scale: float = 1.0, softcap: float = 0.0, name: str = "/lm_head", bias: bool = False
) -> Head:
    """tied: the default of tie_word_embeddings."""
    vocab = c.size("vocab_size")
    if c.flag("tie_word_embeddings", tied):
        return Head(scale=scale, softcap=softcap, bias=vector(name + ".bias", vocab) if bias else None)
    return Head(matrix(name, vocab, c.size("hidden_size", "n_embd", "d_model"), bias), scale, softcap)


def heads_of(c: Fields, *, dim: int | None = None) -> tuple[int, int, int]:
    """(query heads, key/value heads, head size). dim: the default of head_dim; None: hidden_size / heads."""
    heads = c.size("num_attention_heads", "n_head", "n_heads", "num_heads")
    kv_heads = c.size("num_key_value_heads", "num_kv_heads", default=heads)
    c.divided("attention heads", heads, "key/value heads", kv_heads)
    default = c.size("hidden_size", "n_embd", "d_model") // heads if dim is None else dim
    size = c.size("head_dim", default=default)
    if size % 2:
        raise ConfigError(f"{c.file} has a head_dim of {size}, which is odd.")
    return heads, kv_heads, size


def equal_heads(c: Fields) -> tuple[int, int, int]:
    """(query heads, key/value heads, head size) where both are as many and the size is hidden_size / heads."""
    h, heads = c.size("hidden_size", "n_embd", "n_embed", "d_model"), c.size("num_attention_heads", "n_head", "n_heads")
    return heads, heads, c.divided("hidden numbers", h, "attention heads", heads)


def later_layers(c: Fields) -> str:
    """A pattern of the tensors of layers beyond the last: a draft head (MTP)."""
    return rf"(.*\.)?layers\.({'|'.join(str(num_layers(c) + i) for i in range(8))})\..*"


def rope(
    c: Fields,
    dims: int,
    *,
    kind: str | None = None,
    theta: float = 10_000.0,
    share: float = 1.0,
    pairs: Literal["halves", "adjacent"] = "halves",
) -> Rope:
    """Of `rope_parameters`, into which transformers 5 writes all fields, or of the older `rope_theta` and
    `rope_scaling`. kind: of layer, where `rope_parameters` has an object for each. dims: of a head, before
    `partial_rotary_factor`, whose default is `share`."""
    given = c.part("rope_parameters") or c.part("rope_scaling") or Fields({}, c.file)
    if kind is not None and any(isinstance(value, dict) for value in given.raw.values()):
        given = given.part(kind) or Fields({}, c.file)
    elif any(isinstance(value, dict) for value in given.raw.values()):
        raise NotDescribedError("rotary embeddings for several kinds of layers")
    form = given.text("rope_type", given.text("type", "default"))
    share = given.number("partial_rotary_factor", c.number("partial_rotary_factor", share))
    longest = c.size("max_position_embeddings", "n_positions", default=2048, most=MAX_POSITIONS)
    field = "original_max_position_embeddings"
    original = c.size(field, default=given.size(field, default=longest, most=MAX_POSITIONS), most=MAX_POSITIONS)
    base = given.number("rope_theta", c.number("rope_theta", theta))
    low, high = given.number("low_freq_factor", 1.0), given.number("high_freq_factor", 4.0)
    for name, value, least in (("rope_theta", base, 1.0), ("high_freq_factor", high, low)):
        if value <= least:
            raise ConfigError(f"{c.file} has {name} = {value:g}, which should be more than {least:g}.")
    turned = dims if form == "proportional" else int(dims * share)
    divisors = c.numbers("rope_divisors") or ()  # of GGUF files
    match form:
        case "default" | "mrope":
            return Rope(turned, base, divisors=divisors, pairs=pairs)
        case "dynamic" if "alpha" in given:
            return Rope(turned, base, "ntk_alpha", given.number("alpha", 1.0), original, pairs=pairs)
        case "linear" | "dynamic":
            factor = given.number("factor", 1.0)
            return Rope(turned, base, form, factor, original, divisors=divisors, pairs=pairs)
        case "llama3":
            factor = given.number("factor", 1.0)
            return Rope(turned, base, "llama3", factor, original, low, high, divisors=divisors, pairs=pairs)
        case "yarn":
            factor = given.number("factor", longest / original)
            return Rope(
                turned,
                base,
                "yarn",
                factor,
                original,
                beta_fast=given.number("beta_fast", 32.0),
                beta_slow=given.number("beta_slow", 1.0),
                truncate=given.flag("truncate", True),
                cos_scale=_yarn_scale(given, factor),
                divisors=divisors,
                pairs=pairs,
            )
        case "longrope" | "su":
            return _longrope(c, given, turned, base, longest, original)
        case "proportional":
            return Rope(turned, base, "proportional", given.number("factor", 1.0), original, high=share, pairs=pairs)
    raise NotDescribedError(f"{form} position embeddings")


def _yarn_scale(given: Fields, factor: float) -> float:
    """How much yarn sharpens attention (arXiv 2309.00071, section 3.4; mscale is DeepSeek's refinement)."""
    if given.raw.get("mscale") and given.raw.get("mscale_all_dim"):
        weights = given.number("mscale", 1.0), given.number("mscale_all_dim", 1.0)
        derived = yarn_mscale(factor, weights[0]) / yarn_mscale(factor, weights[1])
    else:
        derived = yarn_mscale(factor, 1.0)
    return given.number("attention_factor", derived)


def yarn_mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def temperature(c: Fields) -> Temperature | None:
    """How queries grow with their positions (Ministral 3, Mistral 4)."""
    given = c.part("rope_parameters") or c.part("rope_scaling") or Fields({}, c.file)
    if "llama_4_scaling_beta" not in given:
        return None
    original = given.size("original_max_position_embeddings", most=MAX_POSITIONS)
    return Temperature(given.number("llama_4_scaling_beta", 0.1), original)


def _longrope(c: Fields, given: Fields, dims: int, base: float, longest: int, original: int) -> Rope:
    """arXiv 2402.13753; frequencies are divided by other numbers beyond the original length."""
    short, long = given.numbers("short_factor"), given.numbers("long_factor")
    for name, factors in (("short_factor", short), ("long_factor", long)):
        if factors is None or len(factors) != dims // 2:
            raise ConfigError(f"{c.file} has a {name} that is not {dims // 2} numbers.")
    assert short is not None and long is not None
    factor = longest / original if original != longest else given.number("factor", 1.0)
    derived = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    scale = given.number("attention_factor", derived)
    return Rope(dims, base, "longrope", factor, original, cos_scale=scale, divisors=short, long_divisors=long)


def experts_of(c: Fields, *names: str, top: str = "num_experts_per_tok", default: int, top_k: int) -> tuple[int, int]:
    """(the number of experts, how many a token chooses), with their defaults."""
    num = c.size(*names, default=default)
    chosen = c.size(top, default=top_k)
    if num * num_layers(c) > MAX_EXPERTS:
        raise ConfigError(f"{c.file} has {num} experts in each of {num_layers(c)} layers; the limit is {MAX_EXPERTS}.")
    if chosen > num:
        raise ConfigError(f"{c.file} has {top} = {chosen}, but there are {num} experts.")
    return num, chosen


def sigmoid_router(
    c: Fields, at: str, num_experts: int, top_k: int, *, groups: int = 1, top_groups: int = 1, scale: float = 1.0
) -> Router:
    """DeepSeek-V3's: sigmoid scores, corrected for the choice, groups by their two best. The last three: defaults of
    the fields."""
    groups, top_groups = c.size("n_group", default=groups), c.size("topk_group", default=top_groups)
    each = c.divided("experts", num_experts, "groups", groups)
    if top_groups > groups or top_groups * each < top_k:
        raise ConfigError(
            f"{c.file} has {top_k} experts for a token, but {top_groups} of {groups} groups to choose in."
        )
    return Router(
        matrix(at + "gate", num_experts, c.size("hidden_size")),
        top_k,
        "sigmoid",
        correction=Part(at + "gate.e_score_correction_bias", num_experts),
        groups=groups,
        top_groups=top_groups,
        renorm=c.flag("norm_topk_prob", True),
        floor=1e-20,
        scale=c.number("routed_scaling_factor", scale),
        is_float32=True,
        rounds_weights=False,
    )


def window_of(c: Fields) -> Reach:
    """That of `sliding_window`, or all positions."""
    return Reach("window", c.size("sliding_window", most=2**31 - 1)) if "sliding_window" in c else Reach()


def decoder(
    c: Fields,
    block: Callable[[int], Block],
    norm: Norm,
    *,
    tied: bool = False,
    scale: float = 1.0,
    head_scale: float = 1.0,
    softcap: float = 0.0,
    name: str = "embed_tokens",
    head_bias: bool = False,
    prefixes: tuple[str, ...] = ("model.", ""),
    ignored: tuple[str, ...] = (),
) -> Decoder:
    """name: of the embedding. tied: the default of tie_word_embeddings. scale: of embeddings."""
    h, vocab = c.size("hidden_size", "n_embd", "d_model"), c.size("vocab_size")
    embedding = Embedding(matrix(name, vocab, h), scale)
    last = head(c, tied=tied, scale=head_scale, softcap=softcap, bias=head_bias)
    return Decoder(h, vocab, embedding, layers(c, block), norm, last, prefixes, ignored)
