"""What a decoder computes, as data: a family's page turns a config.json into a `Decoder`, `lower.py` turns that into a
list of operations, and executors run the list. An encoder that it reads is a part of it.

Sizes count elements; positions are tokens; scales are factors. A name of a tensor is relative to the model's body, so
that files which put the body under different prefixes share a page; a name that begins with "/" is one at the root of
the file. No torch here.
"""

import math
from dataclasses import dataclass
from typing import Literal, dataclass_transform


@dataclass_transform(frozen_default=True)
class Data:
    """Base of the records. Every subclass is a frozen dataclass: it can be compared, hashed and printed."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True)(cls)


class Part(Data):
    """Rows of one tensor of the file: first + i · every + j for i < times and j < count, in this order; of a vector its
    elements. `{e}` in the name: one tensor for each expert."""

    name: str
    count: int
    first: int = 0
    every: int = 0
    times: int = 1

    @property
    def rows(self) -> int:
        return self.count * self.times


class Weight(Data):
    """A matrix [rows, columns], or a vector (columns 0), whose rows are those of the parts in order."""

    parts: tuple[Part, ...]
    columns: int = 0
    first_column: int = 0  # of the file's; the others belong to other ranks
    bias: tuple[Part, ...] = ()
    experts: int = 0  # more than 0: so many matrices, stacked
    only: tuple[int, ...] = ()  # of the file's experts, which these matrices are, in order; empty: all
    is_transposed: bool = False  # the file has [columns, rows], or [experts, columns, rows]
    map: Literal["", "plus_one", "neg_exp"] = ""  # applied in float32 when it is loaded
    other: "Weight | None" = None  # taken if the tensors of `parts` are not in the file

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)


class Norm(Data):
    """A norm over groups of `size` adjacent elements. A weight longer than `size` has a row for each group."""

    size: int
    weight: Weight | None = None
    bias: Weight | None = None
    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-6
    ranks: int = 1  # more than 1: so many ranks share a group; this one has `size` elements of it
    group: int = 0  # that this rank has a part of,
    groups: int = 1  # of so many on all ranks


class LowRank(Data):
    """up(norm(down(x)))"""

    down: Weight
    up: Weight
    norm: Norm | None = None


class Rope(Data):
    """Rotary position embedding of the first `dims` features of a head. Fields that a kind does not use keep their
    defaults."""

    dims: int
    theta: float = 10_000.0
    kind: Literal["default", "linear", "dynamic", "ntk_alpha", "llama3", "yarn", "longrope", "proportional"] = "default"
    factor: float = 1.0  # ntk_alpha: alpha
    original: int = 0  # positions of the first training
    low: float = 1.0  # llama3
    high: float = 4.0  # llama3; proportional: the share of the dims that turns
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: the ramp's bounds are whole dimensions
    cos_scale: float = 1.0  # cosines and sines are multiplied by it: yarn, longrope
    divisors: tuple[
        float, ...
    ] = ()  # of the frequency of each pair, for any kind; longrope: up to `original` positions
    long_divisors: tuple[float, ...] = ()  # longrope: beyond `original` positions
    pairs: Literal["halves", "adjacent"] = "halves"  # which features turn together


class Reach(Data):
    """The positions that a query reads. window: itself and the positions − 1 before it; chunk: those of its chunk of so
    many positions, up to itself; whole: all of its text, also behind it, of an encoder's layers; cross: all of the
    encoder's, whose result gives the keys and values."""

    kind: Literal["full", "window", "chunk", "whole", "cross"] = "full"
    positions: int = 0


class Temperature(Data):
    """The query at position p is multiplied by 1 + scale · ln(1 + ⌊(p + shift) / every⌋)."""

    scale: float
    every: int
    shift: int = 0


class Alibi(Data):
    """slope · (position of the key − that of the query) is added to the scores of a head. is_rounded: the product is
    rounded to bfloat16; before_scale: it is added before the scores are scaled (both Falcon)."""

    slopes: tuple[float, ...]
    is_rounded: bool = False
    before_scale: bool = False


class Relative(Data):
    """A number of the table is added to the scores of a head: that of the bucket of the distance between query and key
    (T5, arXiv 1910.10683). Half of the buckets are for one distance each, the others for ranges that grow up to
    `longest`. Two-sided: half of all buckets are for keys behind the query."""

    table: Weight  # [buckets, heads]
    longest: int
    is_two_sided: bool = False

    @property
    def buckets(self) -> int:
        return self.table.rows


class Attention(Data):
    """Grouped-query attention. Order: products, clip, norms and rope of queries and keys, scores."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    q: Weight
    k: Weight | None  # None: `shared`
    v: Weight | None  # None without `shared`: the product of k is also the value (Gemma 4)
    o: Weight
    rope: Rope | None = None
    reach: Reach = Reach()
    q_norm: Norm | None = None  # its size: a head's, or that of all heads
    k_norm: Norm | None = None
    v_norm: Norm | None = None
    norm_after_rope: bool = False
    clip: float = 0.0  # of the products, at ± clip
    softcap: float = 0.0  # scores become softcap · tanh(score / softcap)
    key_scale: float = 1.0
    sinks: Part | None = None  # a logit for each head that takes part in the softmax and has no value
    alibi: Alibi | None = None
    relative: Relative | None = None
    temperature: Temperature | None = None
    gate: Weight | None = None  # the heads' outputs are multiplied by sigmoid(gate) before o
    low: tuple[LowRank, LowRank, LowRank] | None = None  # added to the products of q, k and v
    shared: int | None = None  # the layer whose keys and values this layer reads


class LatentAttention(Data):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): the cache holds kv_norm(latent) and the rotated key
    that all heads share, rank + rope_dim numbers a position."""

    heads: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    rank: int
    scale: float
    q: Weight | LowRank
    kv_a: Weight  # [rank + rope_dim, hidden]
    kv_norm: Norm
    kv_b: Weight  # [heads · (nope_dim + value_dim), rank]
    o: Weight
    rope: Rope | None = None
    temperature: Temperature | None = None
    q_scale: float = 1.0
    kv_scale: float = 1.0


class Conv(Data):
    """A depthwise, causal convolution over positions. Its state: taps − 1 rows of `channels`."""

    weight: Weight  # [channels, taps]
    channels: int
    taps: int
    act: Literal["", "silu"] = "silu"
    bias: Weight | None = None


class DeltaNet(Data):
    """The gated delta rule (arXiv 2412.06464). State: value_heads × key_dim × value_dim float32."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    qkv: Weight
    conv: Conv
    beta: Weight
    decay: Weight | LowRank
    a_log: Weight
    dt_bias: Weight
    gate: Weight | LowRank
    norm: Norm
    o: Weight
    decay_per: Literal["head", "channel"] = "head"  # channel: Kimi Delta Attention
    gate_act: Literal["silu", "sigmoid"] = "silu"
    beta_scale: float = 1.0  # of sigmoid(beta); 2: the state may have negative eigenvalues (OLMo Hybrid)


class Mamba1(Data):
    """State: channels × state_dim float32 (arXiv 2312.00752)."""

    channels: int
    state_dim: int
    dt_rank: int
    xz: Weight
    conv: Conv
    x: Weight
    dt: Weight
    a_log: Weight
    d: Weight
    out: Weight
    dt_norm: Norm | None = None
    b_norm: Norm | None = None
    c_norm: Norm | None = None


class Mamba2(Data):
    """State: heads × head_dim × state_dim float32 (arXiv 2405.21060)."""

    heads: int
    head_dim: int
    state_dim: int
    groups: int
    zxbcdt: Weight
    conv: Conv
    a_log: Weight
    d: Weight
    dt_bias: Weight
    out: Weight
    norm: Norm | None
    norm_first: bool = False  # norm(y) · silu(z); else norm(y · silu(z))
    dt_limits: tuple[float, float] = (0.0, math.inf)
    scales: tuple[float, ...] = (1.0,) * 5  # of z, x, B, C and dt


class ShortConv(Data):
    """out(C · conv(B · x)) (LFM2)."""

    bcx: Weight
    conv: Conv
    out: Weight


class Lightning(Data):
    """Linear attention with a constant decay for each head (MiniMax-01, arXiv 2501.08313). State: heads × head_dim ×
    head_dim float32."""

    heads: int
    head_dim: int
    qkv: Weight
    decay: tuple[float, ...]
    norm: Norm
    gate: Weight
    out: Weight


Activation = Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "tanh", "swiglu_clamped", "xielu"]


class Mlp(Data):
    """down(act(gate(x)) · up(x)); without a gate down(act(up(x)))."""

    width: int
    up: Weight
    down: Weight
    gate: Weight | None = None
    act: Activation = "silu"
    limit: float = 0.0  # of swiglu_clamped
    sharpness: float = 1.702  # of swiglu_clamped
    gate_scale: float = 1.0  # of the gate's product
    out_scale: float = 1.0
    sparsity: float = 0.0  # the share of the gate's product that is set to 0 (Gemma 3n)
    low: tuple[LowRank, LowRank] | None = None  # added to the products of gate and up
    ranks: int = 1  # that have a part of the columns; the sparsity is that of all
    act_weights: Weight | None = None  # of xielu: alpha_p, alpha_n


class Router(Data):
    """How a token's experts are chosen and weighted."""

    weight: Weight
    top_k: int
    score: Literal["softmax", "sigmoid", "softmax_of_chosen", "sparsemixer"] = "softmax"
    correction: Part | None = None  # added to the scores for the choice only
    groups: int = 1  # experts are in so many groups,
    top_groups: int = 1  # of which so many are chosen first,
    group_by: Literal["max", "top2"] = "top2"  # by their best expert or the sum of their two best
    renorm: bool = False  # weights are divided by their sum, which
    floor: float = 0.0
    floor_by: Literal["add", "max"] = "add"  # is increased by `floor`, or is at least `floor`
    scale: float = 1.0  # of the weights
    expert_scale: Part | None = None
    on: Literal["output", "input"] = "output"  # what the weight is multiplied with
    jitter: float = 0.0  # sparsemixer
    reads_stream: bool = False  # the residual stream instead of the sublayer's normed input
    norm: Norm | None = None  # before the router
    scale_in: float = 1.0
    zero_experts: int = 0  # the last ones return their input (LongCat)
    zero_scale: float = 1.0  # of these inputs: 0 on ranks where another adds them
    is_float32: bool = False  # the router's product is computed in float32
    rounds_weights: bool = True  # expert weights are rounded to the activations' type


class Place(Data):
    """Where a rank has an expert. Several ranks may have it; they take turns by the tokens' positions."""

    slot: int  # among this rank's matrices; -1: other ranks compute the expert
    turn: int = 0  # this rank computes it for the tokens at positions p with p mod turns = turn
    turns: int = 1


class Moe(Data):
    """A mixture of experts: the weights of `experts` are stacked."""

    num_experts: int
    router: Router
    experts: Mlp
    shared: Mlp | None = None
    shared_gate: Weight | None = None
    latent: LowRank | None = None
    places: tuple[Place, ...] = ()  # of each expert; empty: this rank has (a part of) all
    num_replicas: int = 0  # for which this rank has slots besides
    is_exchanged: bool = False  # ranks have tokens of their own, and send each other those that their experts compute


Body = Attention | LatentAttention | DeltaNet | Mamba1 | Mamba2 | ShortConv | Lightning | Mlp | Moe | LowRank


class Branch(Data):
    """out_scale · post(body(in_scale · pre(y))), and with adds_input + y"""

    body: Body
    pre: Norm | None = None
    post: Norm | None = None
    in_scale: float = 1.0
    out_scale: float = 1.0
    delay: int = 0  # added to the stream so many sublayers later
    adds_input: bool = False


class Aside(Data):
    """out(the branches, one after the other). The first branch reads the stream and the embedding beside it, 2 · hidden
    numbers (Zamba 2)."""

    branches: tuple[Branch, ...]
    out: Weight


class Sublayer(Data):
    """y = norm(x + aside(x)); x = after(alpha · (x or y) + beta · post(the sum of the branches of y))"""

    branches: tuple[Branch, ...]
    norm: Norm | None = None
    post: Norm | None = None
    after: Norm | None = None
    keep: Literal["stream", "normed"] = "stream"
    alpha: float = 1.0
    beta: float = 1.0
    aside: Aside | None = None


class PerLayerInput(Data):
    """x += norm(up(act(gate(scale · x)) · the layer's input)) (Gemma 3n, 4). With AltUp x is every stream but the
    first, and the gate reads the active one."""

    gate: Weight
    up: Weight
    norm: Norm
    act: Activation = "gelu_tanh"
    scale: Part | None = None  # [hidden]


class AltUp(Data):
    """Alternating updates (arXiv 2301.13310) of several streams, of which the active one goes through the layer. Before
    it, each stream becomes a prediction: itself + the sum of all streams by the token's weights. After it, each
    prediction is increased by (1 + the token's weight) · (the layer's result − the active prediction). Weights are the
    products of `predict` and `correct` with tanh(router_scale · router(norm(y))); y is the active stream, or the
    result."""

    active: int
    router: Weight  # [streams, hidden]
    norm: Norm
    router_scale: float
    predict: Weight  # [streams · streams, streams]
    correct: Weight  # [streams, streams]


class Block(Data):
    """A layer."""

    sublayers: tuple[Sublayer, ...]
    extra: PerLayerInput | None = None
    out_scale: Part | None = None
    altup: AltUp | None = None


class PerLayerEmbedding(Data):
    """Inputs of every layer (Gemma 3n, 4): (norm(projection(embedding) · projection_scale) + table[id] · table_scale) ·
    scale, `size` elements for each layer."""

    size: int
    table: Weight
    projection: Weight
    norm: Norm
    table_scale: float
    projection_scale: float
    scale: float


class Embedding(Data):
    table: Weight
    scale: float = 1.0
    norm: Norm | None = None
    project: Weight | None = None
    positions: Weight | None = None  # learned positions, the first of them for position −offset
    offset: int = 0
    per_layer: PerLayerEmbedding | None = None


class Head(Data):
    weight: Weight | None = None  # None: the embedding's table
    scale: float = 1.0
    softcap: float = 0.0
    project: Weight | None = None
    bias: Weight | None = None  # [vocab], beside the embedding's table; other heads have it in their weight


class Streams(Data):
    """Several residual streams: the embedding, and its products with `split`, scaled to its root mean square. After the
    last layer all but the first are multiplied with `join` and scaled to the root mean square of the first; then the
    mean of all is the stream."""

    split: tuple[Weight, ...]
    join: tuple[Weight, ...]
    floor: float = 1e-5  # least mean square of what is scaled

    @property
    def num(self) -> int:
        return 1 + len(self.split)


class Encoder(Data):
    """Reads a whole text. Its layers have attention of the reach `whole`."""

    embedding: Embedding  # with the decoder's table
    blocks: tuple[Block, ...]
    norm: Norm | None


class Decoder(Data):
    """A language model that generates."""

    hidden: int
    vocab: int
    embedding: Embedding
    blocks: tuple[Block, ...]
    norm: Norm | None
    head: Head
    prefixes: tuple[str, ...]  # of the body's names; the first under which the embedding's table exists
    ignored: tuple[str, ...] = ()  # regular expressions of tensors that this model does not read
    streams: Streams | None = None
    # Longrope: all positions of a sequence of more tokens have the `long_divisors`, and a sequence that grows beyond is
    # computed again. None: such sequences are not served.
    regime_limit: int | None = None
    encoder: Encoder | None = None  # that attention of the reach `cross` reads

    @property
    def bodies(self) -> tuple[Body, ...]:
        """Of all branches of all layers."""
        sublayers = [sublayer for block in self.blocks for sublayer in block.sublayers]
        branches = [branch for sublayer in sublayers for branch in sublayer.branches]
        branches += [branch for sublayer in sublayers if sublayer.aside for branch in sublayer.aside.branches]
        return tuple(branch.body for branch in branches)

    @property
    def is_recurrent(self) -> bool:
        """No layer attends."""
        return not any(isinstance(body, Attention | LatentAttention) for body in self.bodies)

    @property
    def most_positions(self) -> int | None:
        """The longest sequence that can be served where longrope uses other frequencies for longer ones, and the model
        does not say when it changes them; None: of any length."""
        if self.regime_limit is not None:
            return None
        ropes = (body.rope for body in self.bodies if isinstance(body, Attention | LatentAttention))
        limits = {rope.original for rope in ropes if rope is not None and rope.kind == "longrope"}
        return min(limits, default=None)
