"""A decoder's forward pass as a list of operations on registers, which executors run in order.

A register holds numbers for each token of a step, [tokens, width], of the activations' type. A `View` is some adjacent
columns of one. An operation may write to a view that it reads only where its docstring says so.

With KV domains a rank has the tokens of its own domain, but the ranks of all domains compute feed-forward layers
together: `Spread` and `AllReduce` give each rank the tokens of all, in registers that are `shared`, and `Keep` takes
back what belongs to its own. An exchanged `Mixture` sends the tokens by itself.
"""

from collections.abc import Iterable, Sequence
from typing import Literal

from .description import Activation, Alibi, Data, Norm, Place, Reach, Relative, Rope, Router, Temperature, Weight

Use = Literal["product", "gated", "table", "router", "experts", "gated experts", "heads", "heads, transposed"]


class Matrix(Data):
    """A weight in memory: the rows of `weights`, one weight after the other.

    Uses: product: only for products; gated: the first half of the rows are gates and the second half ups, only for
    `GatedProduct`; table: of the vocabulary, for look-ups and the head; router: a product that keeps the weight's
    precision; experts, gated experts: a stack of the matrices of all experts; heads: `heads` matrices of equal size,
    one after the other; heads, transposed: the same, and products are with their transposes."""

    key: str
    weights: tuple[Weight, ...]
    use: Use = "product"
    heads: int = 0

    @property
    def rows(self) -> int:
        return sum(weight.rows for weight in self.weights)

    @property
    def columns(self) -> int:
        return self.weights[0].columns

    @property
    def experts(self) -> int:
        return self.weights[0].experts


class Vector(Data):
    """Numbers of the activations' type, or float32: the elements of `weights`, one weight after the other; of weights
    with columns their rows."""

    key: str
    weights: tuple[Weight, ...]
    is_float32: bool = False


class View(Data):
    register: int
    first: int
    width: int


class Embed(Data):
    """outs[0] = rows of the table · scale. The scale is rounded to the activations' type first."""

    table: Matrix
    first_id: int = 0  # of the rows that this rank holds
    scale: float = 1.0
    is_whole: bool = False  # every rank holds all rows; ids that the table lacks have its first row


class Positions(Data):
    """outs[0] += rows of the table at position + offset."""

    table: Matrix
    offset: int


class Normalize(Data):
    """outs[0] = the norm of ins[0], which may be the same view. ins[1]: the mean of the squares, of a norm over several
    ranks."""

    norm: Norm
    weight: Vector | None
    bias: Vector | None


class MeanSquares(Data):
    """This rank's part of norms over several ranks: outs[0][group] = the sum of the squares of ins[0] / count, and the
    other columns are 0. The sum over the ranks is the mean of each group."""

    count: int
    group: int
    groups: int


class Product(Data):
    """outs = the columns of ins[0] · matrixᵀ + bias, in order."""

    matrix: Matrix
    bias: Vector | None = None


class GatedProduct(Data):
    """outs[0] = silu(gate) · up of the product of ins[0] with a gated matrix."""

    matrix: Matrix
    bias: Vector | None = None


class Add(Data):
    """outs[0] = alpha · ins[0] + beta · ins[1]; outs[0] may be ins[0]."""

    alpha: float = 1.0
    beta: float = 1.0


class Scale(Data):
    """outs[0] = ins[0] · factor, or · the vector [1 or width]; may be the same view."""

    factor: float = 1.0
    vector: Vector | None = None


class Activate(Data):
    """outs[0] = act(ins[0]); may be the same view. weights: of xielu."""

    act: Activation
    weights: Vector | None = None


class Glu(Data):
    """outs[0] = act(gate · gate_scale) · up. ins: gate, up."""

    act: Activation
    limit: float = 0.0
    sharpness: float = 1.702
    gate_scale: float = 1.0
    sparsity: float = 0.0
    ranks: int = 1  # that have a part of the gate, whose sparsity is that of the whole


class Multiply(Data):
    """outs[0] = ins[0] · act(ins[1]); may be ins[0]. ins[1] may have one column, or one for each group of columns."""

    act: Literal["sigmoid", "silu", ""] = "sigmoid"


class MixStreams(Data):
    """Streams are `size` adjacent columns. Stream k of outs[0] = that of ins[0] + the sum over p of (weight[k][p] +
    shift) · stream p of ins[1]. ins[2]: the weights, row after row. outs[0] may be ins[0], if ins[1] is another."""

    size: int
    shift: float = 0.0


class MatchMagnitude(Data):
    """outs[0] = ins[0] · the root mean square of ins[1] / its own; may be ins[0]."""

    floor: float  # least mean square of ins[0]


class Clip(Data):
    """outs[0] = ins[0] between ± limit; may be the same view."""

    limit: float


class Rotate(Data):
    """Rotates the features [first, first + rope.dims) of each head of ins[0] in place."""

    rope: Rope
    heads: int
    first: int = 0


class Heat(Data):
    """Multiplies ins[0] by `temperature` in place."""

    temperature: Temperature


class Attend(Data):
    """Writes keys and values to a tile of the cache, unless they are shared or the encoder's, and attends. ins:
    queries, keys, values, or queries only; outs[0]: the heads' results."""

    layer: int
    tile: int  # −1: the reach is `whole`, and nothing is kept
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    reach: Reach
    softcap: float = 0.0
    sinks: Vector | None = None
    alibi: Alibi | None = None
    relative: Relative | None = None
    relative_table: Vector | None = None  # that of `relative`


class Store(Data):
    """An encoder's: writes keys and values to a tile of the cache. ins: keys, values; outs[0]: ins[0], unchanged."""

    tile: int
    kv_heads: int


class AttendLatent(Data):
    """Multi-head latent attention in its absorbed form: writes latents and rotated keys to a tile of the cache and
    attends. ins: queries, of whose heads the last rope_dim features are rotated; latents after their norm; rotated
    keys. outs[0]: the heads' results."""

    layer: int
    tile: int
    heads: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    rank: int
    scale: float
    keys: Matrix  # a matrix [nope_dim, rank] for each head
    values: Matrix  # a matrix [value_dim, rank] for each head


class Mixture(Data):
    """outs[0] = the weighted sum over each token's experts. ins: hidden states, the router's product.

    With `places` it is the sum over those experts that this rank computes, of whose matrices the stacks consist. If it
    is exchanged, it is the sum over all experts, for the tokens of this rank's KV domain: the ranks of all domains
    compute it together, and those without tokens take part."""

    router: Router
    num_experts: int  # that have weights, on any rank
    gate_up: Matrix  # or only up
    down: Matrix
    act: Activation
    limit: float
    sharpness: float = 1.702
    has_gate: bool = True
    gate_up_bias: Vector | None = None
    down_bias: Vector | None = None
    correction: Vector | None = None
    expert_scale: Vector | None = None
    places: tuple[Place, ...] = ()  # of each expert that has weights; empty: the stacks have all
    num_replicas: int = 0  # slots behind those of the stacks, which get experts while the program is in use
    is_exchanged: bool = False  # only if there are KV domains

    @property
    def num_slots(self) -> int:
        return self.down.experts + self.num_replicas


class States(Data):
    """The states of one operation: `Program.states` [first, first + count). A unit is a head, 16 channels, or all
    of a convolution; `per_tile` units follow each other in a tile, and the last tile may have fewer."""

    first: int
    count: int
    per_tile: int


class Convolve(Data):
    """outs[0] = act(causal, depthwise convolution of ins[0] + bias), in a register of its own."""

    states: States
    taps: int
    weight: Vector  # [channels, taps]
    bias: Vector | None
    act: Literal["none", "silu"]


class ScanDelta(Data):
    """The gated delta rule. ins: queries, keys, values, beta, decay; outs[0]: the heads' results."""

    states: States
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    a: Vector  # [value heads], -exp(A_log)
    dt_bias: Vector  # of the decay's width
    decay_per: Literal["head", "channel"] = "head"
    beta_scale: float = 1.0


class ScanMamba1(Data):
    """The selective scan of Mamba. ins: x, dt, B, C; outs[0]: as x."""

    states: States
    channels: int
    state_dim: int
    a: Vector  # [channels, state_dim], -exp(A_log)
    dt_bias: Vector | None
    d: Vector


class ScanMamba2(Data):
    """The scan of Mamba 2. ins: x, B, C, dt; outs[0]: as x."""

    states: States
    heads: int
    head_dim: int
    state_dim: int
    groups: int
    a: Vector  # [heads], -exp(A_log)
    dt_bias: Vector
    d: Vector
    dt_limits: tuple[float, float]


class ScanLightning(Data):
    """Linear attention with constant decays. ins: queries, keys, values; outs[0]: the heads' results."""

    states: States
    heads: int
    head_dim: int
    decay: tuple[float, ...]  # of each head


class GatedNormalize(Data):
    """outs[0] = norm(ins[0]) · act(ins[1]), or with gate_first norm(ins[0] · act(ins[1])); may be ins[0]."""

    norm: Norm | None  # None: the product alone
    weight: Vector | None
    act: Literal["silu", "sigmoid"]
    gate_first: bool = False


class AllReduce(Data):
    """outs[0] = the sum of ins[0], the same view, over the ranks."""


class Spread(Data):
    """outs[0] = ins[0] at the places of this domain's tokens among those of all domains, and zeros at the others."""


class Keep(Data):
    """outs[0] = the rows of ins[0] that are this domain's tokens."""


Args = (
    MixStreams | MatchMagnitude
    | Embed | Positions | Normalize | Product | GatedProduct | Add | Scale | Activate | Glu | Multiply | Clip | Rotate
    | Heat | Attend | Store | AttendLatent | Mixture | AllReduce | Convolve | ScanDelta | ScanMamba1 | ScanMamba2
    | ScanLightning | GatedNormalize | MeanSquares | Spread | Keep
)  # fmt: skip


class Op(Data):
    layer: int  # −1: before the first layer; their number: after the last
    args: Args
    ins: tuple[View, ...]
    outs: tuple[View, ...]


class Tile(Data):
    """Keys and values of one layer in the cache."""

    kv_heads: int
    head_dim: int
    value_dim: int  # 0: the values are part of the keys
    reach: Reach


class State(Data):
    """A part of a row's recurrent state: numbers of float32."""

    shape: tuple[int, ...]


class Program(Data):
    """The pass over a step's tokens, from ids to the states that the head takes."""

    ops: tuple[Op, ...]
    widths: tuple[int, ...]  # of the registers
    result: View
    head: Matrix
    head_bias: Vector | None
    head_scale: float
    head_softcap: float
    head_project: Matrix | None
    tiles: tuple[Tile, ...]
    hidden: int
    vocab: int
    states: tuple[State, ...] = ()
    regime_limit: int | None = None  # of the decoder
    has_head: bool = True  # False: of a stage before the last one, which does not load the head
    receives: tuple[View, ...] = ()  # of a stage after the first: what the stage before it has computed,
    sends: tuple[View, ...] = ()  # and of a stage before the last: what the next one needs, beside each other
    # Registers of the tokens of all KV domains, one domain after the other; the others have those of the rank's own.
    shared: frozenset[int] = frozenset()
    encoder: "Program | None" = None  # that gives the tiles of the reach `cross` their keys and values; without a head

    @property
    def passed(self) -> frozenset[int]:
        """The registers with columns that stages pass on."""
        return frozenset(view.register for view in (*self.receives, *self.sends))

    @property
    def received_width(self) -> int:
        """Columns that a stage receives."""
        return sum(view.width for view in self.receives)

    @property
    def sent_width(self) -> int:
        """Columns that a stage sends."""
        return sum(view.width for view in self.sends)

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """All, in the order of their use, each once."""
        return tuple(dict.fromkeys(found for found in _parts(self) if isinstance(found, Matrix)))

    @property
    def vectors(self) -> tuple[Vector, ...]:
        return tuple(dict.fromkeys(found for found in _parts(self) if isinstance(found, Vector)))

    @property
    def targets(self) -> tuple[Matrix | Vector, ...]:
        """All that is loaded."""
        return (*self.matrices, *self.vectors)

    @property
    def attention(self) -> tuple[Attend, ...]:
        return tuple(op.args for op in self.ops if isinstance(op.args, Attend))


def _parts(program: Program) -> list[Matrix | Vector]:
    found = [value for op in program.ops for value in vars(op.args).values() if isinstance(value, Matrix | Vector)]
    if program.encoder is not None:
        found += _parts(program.encoder)
    if not program.has_head:
        return found
    found.append(program.head)
    if program.head_bias is not None:
        found.append(program.head_bias)
    if program.head_project is not None:
        found.append(program.head_project)
    return found


class Layout(Data):
    """Where registers lie in one array while they are in use: offsets in numbers for each token."""

    offsets: tuple[int, ...]
    size: int  # numbers for each token


def layout(program: Program) -> Layout:
    """Registers that are in use at different times share memory."""
    uses = [[view.register for view in (*op.ins, *op.outs)] for op in program.ops]
    received, sent = ([view.register for view in views] for views in (program.receives, program.sends))
    return placed([received, *uses, [program.result.register, *sent]], program.widths)


def placed(uses: Sequence[Iterable[int]], widths: Sequence[int]) -> Layout:
    """Each register gets the first place where it fits beside those that are in use at the same time. uses: the
    registers of each launch, in order; all those of one launch are in use together. widths: of all registers."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for number, registers in enumerate(uses):
        for register in registers:
            first.setdefault(register, number)
            last[register] = number
    offsets: dict[int, int] = {}
    for register in sorted(first, key=lambda each: first[each]):
        width, at = widths[register], 0
        in_use = sorted((offsets[other], widths[other]) for other in offsets if last[other] >= first[register])
        for begin, taken in in_use:
            if at + width <= begin:
                break
            at = max(at, begin + taken)
        offsets[register] = at
    size = max((at + widths[register] for register, at in offsets.items()), default=0)
    return Layout(tuple(offsets.get(register, 0) for register in range(len(widths))), size)
