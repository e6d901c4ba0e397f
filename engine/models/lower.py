"""Turns a description into a program. The only place that knows the order of operations."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from math import prod
from typing import Literal

from ...kernels.lanes import LANES
from .description import (
    AltUp,
    Aside,
    Attention,
    Block,
    Body,
    Branch,
    Conv,
    Decoder,
    DeltaNet,
    Encoder,
    LatentAttention,
    Lightning,
    LowRank,
    Mamba1,
    Mamba2,
    Mlp,
    Moe,
    Norm,
    Part,
    PerLayerEmbedding,
    PerLayerInput,
    Reach,
    ShortConv,
    Streams,
    Sublayer,
    Weight,
)
from .parts import halves, rows
from .program import (
    Activate,
    Add,
    AllReduce,
    Args,
    Attend,
    AttendLatent,
    Clip,
    Convolve,
    Embed,
    GatedNormalize,
    GatedProduct,
    Glu,
    Heat,
    Keep,
    MatchMagnitude,
    Matrix,
    MeanSquares,
    MixStreams,
    Mixture,
    Multiply,
    Normalize,
    Op,
    Positions,
    Product,
    Program,
    Rotate,
    Scale,
    ScanDelta,
    ScanLightning,
    ScanMamba1,
    ScanMamba2,
    Spread,
    State,
    States,
    Store,
    Tile,
    Use,
    Vector,
    View,
)

_TILE_BYTES = 1 << 15  # small tiles fill pages better, and large ones are fewer


def latent_width(rank: int, rope_dim: int) -> int:
    """Numbers of a position in the cache of multi-head latent attention: a multiple of 16, which kernels take at
    once."""
    return -(-(rank + rope_dim) // 16) * 16


def lower(decoder: Decoder, *, ranks: int = 1, first_id: int = 0, has_domains: bool = False) -> Program:
    """decoder: whole, or a rank's part of one (`cut.py`), whose rows of the vocabulary begin with `first_id`.
    has_domains: each rank is a KV domain, so the ranks exchange tokens for the feed-forward layers alone."""
    return _Lowering(decoder, ranks, first_id, has_domains=has_domains).program()


class _Lowering:
    def __init__(
        self, decoder: Decoder, ranks: int, first_id: int, *, has_domains: bool = False, prefix: str = ""
    ) -> None:
        """prefix: of the keys of its weights."""
        self._decoder = decoder
        self._prefix = prefix
        self._ranks, self._first_id = 1 if has_domains else ranks, first_id
        self._num_domains = ranks if has_domains else 1
        self._shared: set[int] = set()
        self._is_shared = False  # operations are on the tokens of all domains
        self._ops: list[Op] = []
        self._widths: list[int] = []
        self._tiles: list[Tile] = []
        self._tile_of: dict[int, int] = {}  # layer → its tile
        self._states: list[State] = []
        self._layer = -1
        self._delayed: list[tuple[int, View]] = []  # (sublayer, what is added to the stream there)
        self._num_sublayers = 0
        self._inputs: View | None = None  # of all layers, beside each other
        self._beside: View | None = None  # the stream, and the embedding beside it
        self._matrices: dict[tuple[tuple[Weight, ...], Use], Matrix] = {}
        self._vectors: dict[tuple[tuple[Weight, ...], bool], Vector] = {}
        self._crossing: list[tuple[Attend, Attention]] = []  # those that read the encoder

    def program(self) -> Program:
        decoder, x = self._decoder, self._body_of()
        encoder = None
        if decoder.encoder is not None:
            encoder = self._lowered(decoder.encoder)
        return self._finished(x, encoder)

    def _body_of(self) -> View:
        """The operations before the head."""
        decoder, x = self._decoder, self._embed()
        if decoder.streams is not None:
            x = self._split(decoder.streams, x)
        for layer, block in enumerate(decoder.blocks):
            self._layer = layer
            x = self._block(block, x)
        self._layer = len(decoder.blocks)
        left = sum(due >= self._num_sublayers for due, _ in self._delayed)
        assert not left, f"{left} branches are delayed beyond the last sublayer"
        if decoder.streams is not None:
            x = self._join(decoder.streams, x)
        if decoder.norm is not None:
            x = self._norm(decoder.norm, x, "norm")
        return x

    def _lowered(self, encoder: Encoder) -> Program:
        """The encoder, and the keys and values that the decoder's layers read of its result."""
        assert self._ranks == 1 and self._num_domains == 1, "an encoder cannot be divided"
        alone = replace(
            self._decoder, embedding=encoder.embedding, blocks=encoder.blocks, norm=encoder.norm, encoder=None
        )
        lowering = _Lowering(alone, 1, 0, prefix="encoder.")
        x = lowering._body_of()
        for attend, a in self._crossing:
            assert a.k is not None and a.v is not None, "cross-attention without keys and values"
            views = lowering._projections(f"cross.{attend.layer}.", x, {"k": a.k, "v": a.v})
            lowering._op(Store(attend.tile, a.kv_heads), (views["k"], views["v"]), (views["k"],))
        return replace(lowering._finished(x, None), has_head=False)

    def _finished(self, x: View, encoder: Program | None) -> Program:
        decoder, head = self._decoder, self._decoder.head
        table = self._table(decoder.embedding.table)
        bias = None if head.bias is None else self._vector("head.bias", head.bias)
        return Program(
            ops=tuple(self._ops),
            widths=tuple(self._widths),
            result=x,
            head=table if head.weight is None else Matrix("head", _bare(head.weight), "table"),
            head_bias=bias if head.weight is None else self._bias("head.bias", head.weight),
            head_scale=head.scale,
            head_softcap=head.softcap,
            head_project=None if head.project is None else Matrix("head_project", (head.project,)),
            tiles=tuple(self._tiles),
            hidden=decoder.hidden,
            vocab=decoder.vocab,
            states=tuple(self._states),
            regime_limit=decoder.regime_limit,
            shared=frozenset(self._shared),
            encoder=encoder,
        )

    # Registers and operations.

    def _register(self, width: int) -> View:
        self._widths.append(width)
        if self._is_shared:
            self._shared.add(len(self._widths) - 1)
        return View(len(self._widths) - 1, 0, width)

    def _op(self, args: Args, ins: tuple[View, ...], outs: tuple[View, ...]) -> None:
        self._ops.append(Op(self._layer, args, ins, outs))

    def _key(self, name: str) -> str:
        is_in_layer = 0 <= self._layer < len(self._decoder.blocks)
        return f"{self._prefix}{self._layer}.{name}" if is_in_layer else self._prefix + name

    def _table(self, weight: Weight) -> Matrix:
        return Matrix("embedding", (weight,), "table")

    def _vector(self, name: str, *weights: Weight, is_float32: bool = False) -> Vector:
        return self._vectors.setdefault((weights, is_float32), Vector(self._key(name), weights, is_float32))

    def _matrix(self, name: str, weights: tuple[Weight, ...], use: Use) -> Matrix:
        """What several layers share is loaded once, under the key of the first."""
        return self._matrices.setdefault((weights, use), Matrix(self._key(name), weights, use))

    def _products(self, name: str, x: View, weights: tuple[Weight, ...], use: Use = "product") -> list[View]:
        """The products of x with weights that all have a bias, or none, as columns of one register."""
        bias = None
        if weights[0].bias:
            bias = self._vector(name + ".bias", *(Weight(weight.bias) for weight in weights))
        matrix = self._matrix(name, _bare(*weights), use)
        whole = self._register(matrix.rows)
        views, first = [], 0
        for weight in weights:
            views.append(View(whole.register, first, weight.rows))
            first += weight.rows
        self._op(Product(matrix, bias), (x,), tuple(views))
        return views

    def _product(self, name: str, x: View, weight: Weight, use: Use = "product") -> View:
        return self._products(name, x, (weight,), use)[0]

    def _norm(self, norm: Norm, x: View, name: str, *, in_place: bool = False, mean: View | None = None) -> View:
        """mean: of the squares of a norm over several ranks (`_norms`)."""
        out = x if in_place else self._register(x.width)
        weight, is_float32 = None, norm.weight is not None and norm.weight.map == "plus_one"
        if norm.weight is not None:
            weight = self._vector(name, norm.weight, is_float32=is_float32)
        bias = None if norm.bias is None else self._vector(name + ".bias", norm.bias, is_float32=is_float32)
        assert (mean is None) == (norm.ranks == 1), "only a norm over several ranks needs the mean of all"
        self._op(Normalize(norm, weight, bias), (x,) if mean is None else (x, mean), (out,))
        return out

    def _norms(self, norms: list[tuple[Norm, View, str]]) -> None:
        """In place. Those over several ranks share a sum."""
        means = iter(self._means([(norm, view) for norm, view, _ in norms if norm.ranks > 1]))
        for norm, view, name in norms:
            self._norm(norm, view, name, in_place=True, mean=next(means) if norm.ranks > 1 else None)

    def _means(self, norms: list[tuple[Norm, View]]) -> list[View]:
        """The means of squares of norms over several ranks."""
        found: list[View] = []
        if norms:
            whole = self._register(sum(norm.groups for norm, _ in norms))
            parts = _columns(whole, *(norm.groups for norm, _ in norms))
            for (norm, view), part in zip(norms, parts, strict=True):
                assert norm.size == view.width, f"a norm of {norm.size} elements of {view.width}"
                self._op(MeanSquares(norm.size * norm.ranks, norm.group, norm.groups), (view,), (part,))
                found.append(View(part.register, part.first + norm.group, 1))
            self._all_reduce(whole)
        return found

    def _scale(self, x: View, factor: float) -> None:
        if factor != 1.0:
            self._op(Scale(factor), (x,), (x,))

    def _all_reduce(self, x: View) -> None:
        if self._ranks > 1 or self._is_shared:
            self._op(AllReduce(), (x,), (x,))

    def _spread(self, x: View) -> View:
        """The tokens of all domains."""
        out = self._register(x.width)
        self._op(Spread(), (x,), (out,))
        self._all_reduce(out)
        return out

    def _of_all_domains(self, body: Mlp | Moe, y: View, stream: View, at: str) -> View:
        """A feed-forward layer of which each domain's ranks hold a part, and which has the tokens of all."""
        self._is_shared = True
        if isinstance(body, Moe):
            whole = self._spread(y)
            asked = self._spread(stream) if body.router.reads_stream else whole
            found = self._moe(body, whole, asked, at)
        else:
            found = self._mlp(body, self._spread(y), at)
        self._all_reduce(found)
        self._is_shared = False
        out = self._register(found.width)
        self._op(Keep(), (found,), (out,))
        return out

    # Parts of a decoder.

    def _embed(self) -> View:
        embedding = self._decoder.embedding
        x = self._register(embedding.table.columns)
        table = self._table(embedding.table)
        self._op(Embed(table, self._first_id, embedding.scale), (), (x,))
        self._all_reduce(x)
        if embedding.project is not None:
            x = self._product("embedding.project", x, embedding.project)
        if embedding.positions is not None:
            positions = Matrix(self._prefix + "positions", (embedding.positions,), "table")
            self._op(Positions(positions, embedding.offset), (), (x,))
        if embedding.norm is not None:
            x = self._norm(embedding.norm, x, "embedding.norm")
        if embedding.per_layer is not None:
            self._inputs = self._per_layer_embedding(embedding.per_layer, x)
        if any(sublayer.aside is not None for block in self._decoder.blocks for sublayer in block.sublayers):
            self._beside = self._register(2 * x.width)
            self._op(Scale(), (x,), (_columns(self._beside, x.width, x.width)[1],))
        return x

    def _per_layer_embedding(self, inputs: PerLayerEmbedding, x: View) -> View:
        """The inputs of all layers. Every rank has the whole table."""
        found = self._register(inputs.table.columns)
        self._op(Embed(Matrix("per_layer.table", (inputs.table,), "table"), 0, inputs.table_scale, True), (), (found,))
        projected = self._product("per_layer.projection", x, inputs.projection)
        self._scale(projected, inputs.projection_scale)
        self._norm(inputs.norm, projected, "per_layer.norm", in_place=True)
        self._op(Add(inputs.scale, inputs.scale), (projected, found), (projected,))
        return projected

    def _split(self, streams: Streams, x: View) -> View:
        """All streams, beside each other."""
        found = self._register(streams.num * x.width)
        first, *others = _columns(found, *[x.width] * streams.num)
        self._op(Scale(), (x,), (first,))
        for product, stream in zip(self._products("streams.split", x, streams.split), others, strict=True):
            self._op(MatchMagnitude(streams.floor), (product, x), (stream,))
        return found

    def _join(self, streams: Streams, x: View) -> View:
        first, *others = _columns(x, *[x.width // streams.num] * streams.num)
        total = self._register(first.width)
        self._op(Scale(), (first,), (total,))
        for number, (stream, weight) in enumerate(zip(others, streams.join, strict=True)):
            part = self._product(f"streams.{number}.join", stream, weight)
            self._op(MatchMagnitude(streams.floor), (part, first), (part,))
            self._op(Add(), (total, part), (total,))
        self._scale(total, 1 / streams.num)
        return total

    def _block(self, block: Block, x: View) -> View:
        if block.altup is not None:
            return self._altup(block, block.altup, x)
        x = self._sublayers(block, x)
        if block.extra is not None:
            self._op(Add(), (x, self._per_layer_input(block.extra, x)), (x,))
        if block.out_scale is not None:
            self._op(Scale(vector=self._vector("out_scale", Weight((block.out_scale,)))), (x,), (x,))
        return x

    def _sublayers(self, block: Block, x: View) -> View:
        for number, sublayer in enumerate(block.sublayers):
            x = self._sublayer(sublayer, x, f"{number}.")
        return x

    def _altup(self, block: Block, altup: AltUp, streams: View) -> View:
        assert block.out_scale is None, "a factor of several streams"
        num = altup.correct.rows
        size = streams.width // num
        predictions = self._register(streams.width)
        weights = self._of_active(altup, _columns(streams, *[size] * num)[altup.active], "predict", altup.predict)
        self._op(MixStreams(size), (streams, streams, weights), (predictions,))
        parts = _columns(predictions, *[size] * num)
        active, x = parts[altup.active], self._register(size)
        self._op(Scale(), (active,), (x,))
        x = self._sublayers(block, x)
        weights = self._of_active(altup, x, "correct", altup.correct)
        self._op(Add(1.0, -1.0), (x, active), (x,))
        self._op(MixStreams(size, 1.0), (predictions, x, weights), (predictions,))
        if block.extra is not None:
            added = self._per_layer_input(block.extra, active)
            for part in parts[1:]:
                self._op(Add(), (part, added), (part,))
        return predictions

    def _of_active(self, altup: AltUp, x: View, name: str, weight: Weight) -> View:
        """A token's weights of streams."""
        routed = self._product("altup.router", self._norm(altup.norm, x, "altup.norm"), altup.router, "router")
        self._scale(routed, altup.router_scale)
        self._op(Activate("tanh"), (routed,), (routed,))
        return self._product(f"altup.{name}", routed, weight, "router")

    def _per_layer_input(self, extra: PerLayerInput, x: View) -> View:
        """What is added to the stream."""
        assert self._inputs is not None, "a decoder whose embedding has no inputs for layers"
        if extra.scale is not None:
            scaled = self._register(x.width)
            self._op(Scale(vector=self._vector("extra.scale", Weight((extra.scale,)))), (x,), (scaled,))
            x = scaled
        hidden = self._product("extra.gate", x, extra.gate)
        own = View(self._inputs.register, self._layer * hidden.width, hidden.width)
        gated = self._register(hidden.width)
        self._op(Glu(extra.act), (hidden, own), (gated,))
        return self._norm(extra.norm, self._product("extra.up", gated, extra.up), "extra.norm")

    def _sublayer(self, sublayer: Sublayer, x: View, at: str) -> View:
        y = x if sublayer.aside is None else self._aside(sublayer.aside, x, at + "aside.")
        y = y if sublayer.norm is None else self._norm(sublayer.norm, y, at + "norm")
        total: View | None = None
        for number, branch in enumerate(sublayer.branches):
            part = self._branch(branch, y, x, f"{at}{number}." if number else at)
            if branch.delay:
                self._delayed.append((self._num_sublayers + branch.delay, part))
            elif total is None:
                total = part
            else:
                self._op(Add(), (total, part), (total,))
        if total is not None:
            if sublayer.post is not None:
                total = self._norm(sublayer.post, total, at + "post_norm")
            kept = x if sublayer.keep == "stream" else y
            self._op(Add(sublayer.alpha, sublayer.beta), (kept, total), (x,))
        for due, part in self._delayed:
            if due == self._num_sublayers:
                self._op(Add(), (x, part), (x,))
        self._num_sublayers += 1
        if sublayer.after is not None:
            x = self._norm(sublayer.after, x, at + "after_norm")
        return x

    def _aside(self, aside: Aside, x: View, at: str) -> View:
        """The stream and what is read besides, added."""
        assert self._beside is not None
        self._op(Scale(), (x,), (_columns(self._beside, x.width, x.width)[0],))
        y = self._beside
        for number, branch in enumerate(aside.branches):
            y = self._branch(branch, y, y, f"{at}{number}.")
        added = self._product(at + "out", y, aside.out)
        out = self._register(x.width)
        self._op(Add(), (x, added), (out,))
        return out

    def _branch(self, branch: Branch, y: View, stream: View, at: str) -> View:
        if branch.pre is not None:
            y = self._norm(branch.pre, y, at + "pre_norm")
        if branch.in_scale != 1.0:
            scaled = self._register(y.width)
            self._op(Scale(branch.in_scale), (y,), (scaled,))
            y = scaled
        out = self._body(branch.body, y, stream, at)
        if branch.post is not None:
            out = self._norm(branch.post, out, at + "branch_norm")
        self._scale(out, branch.out_scale)
        if branch.adds_input:
            self._op(Add(), (out, y), (out,))
        return out

    def _body(self, body: Body, y: View, stream: View, at: str) -> View:
        is_exchanged = isinstance(body, Moe) and body.is_exchanged
        if self._num_domains > 1 and isinstance(body, Mlp | Moe) and not is_exchanged:
            return self._of_all_domains(body, y, stream, at)
        match body:
            case Attention():
                out = self._attention(body, y, at)
            case LatentAttention():
                out = self._latent_attention(body, y, at)
            case Mlp():
                out = self._mlp(body, y, at)
            case Moe():
                out = self._moe(body, y, stream, at)
            case DeltaNet():
                out = self._delta_net(body, y, at)
            case Mamba1():
                out = self._mamba1(body, y, at)
            case Mamba2():
                out = self._mamba2(body, y, at)
            case ShortConv():
                out = self._short_conv(body, y, at)
            case Lightning():
                out = self._lightning(body, y, at)
            case LowRank():
                return self._low_rank(at + "low_rank", y, body)  # every rank has the whole
        self._all_reduce(out)
        return out

    def _attention(self, a: Attention, x: View, at: str) -> View:
        a = _with_halves(a)
        names = ("q", "gate") if a.reach.kind == "cross" else ("q", "k", "v", "gate")
        weights = {name: weight for name in names if (weight := getattr(a, name)) is not None}
        views = self._projections(at, x, weights)
        q, k, v, gate = (views.get(name) for name in ("q", "k", "v", "gate"))
        assert q is not None
        if a.low is not None:
            self._add_low_ranks(at, x, [views[name] for name in ("q", "k", "v")], a.low)
        if a.clip:
            for view in views.values():
                self._op(Clip(a.clip), (view,), (view,))
        if k is not None and v is None:
            v = self._register(a.kv_heads * a.value_dim)
            self._op(Scale(), (k,), (v,))
        if v is not None and a.v_norm is not None:
            self._norms([(a.v_norm, v, at + "v_norm")])
        self._turn(a, q, k, at)
        out = self._register(a.heads * a.value_dim)
        ins = (q,) if k is None or v is None else (q, k, v)
        attend = self._attend(a, at)
        self._op(attend, ins, (out,))
        if a.reach.kind == "cross":
            self._crossing.append((attend, a))
        if gate is not None:
            self._op(Multiply("sigmoid"), (out, gate), (out,))
        return self._product(at + "o", out, a.o)

    def _turn(self, a: Attention, q: View, k: View | None, at: str) -> None:
        """Norms, rotates and scales queries and keys."""
        both = [(q, a.q_norm, a.heads, "q_norm")]
        if k is not None:
            both.append((k, a.k_norm, a.kv_heads, "k_norm"))
            self._scale(k, a.key_scale)
        norms = [(norm, view, at + name) for view, norm, _, name in both if norm is not None]
        if not a.norm_after_rope:
            self._norms(norms)
        if a.rope is not None:
            for view, _, heads, _ in both:
                self._op(Rotate(a.rope, heads), (view,), (view,))
        if a.norm_after_rope:
            self._norms(norms)
        if a.temperature is not None:
            self._op(Heat(a.temperature), (q,), (q,))

    def _projections(self, at: str, x: View, weights: dict[str, Weight]) -> dict[str, View]:
        """One product of those that have a bias, and one of the others."""
        views: dict[str, View] = {}
        for has_bias in (False, True):
            some = {name: weight for name, weight in weights.items() if bool(weight.bias) == has_bias}
            if some:
                found = self._products(at + "".join(some), x, tuple(some.values()))
                views |= dict(zip(some, found, strict=True))
        return views

    def _add_low_ranks(self, at: str, x: View, views: Sequence[View], lows: tuple[LowRank, ...]) -> None:
        """Adds the product of x with each of `lows` to its view. Those may share the first of their two matrices."""
        assert all(low.norm is None for low in lows), "norms within added projections"
        downs = tuple(dict.fromkeys(low.down for low in lows))
        inner = dict(zip(downs, self._products(at + "low.down", x, downs), strict=True))
        for number, (view, low) in enumerate(zip(views, lows, strict=True)):
            self._op(Add(), (view, self._product(f"{at}low.{number}.up", inner[low.down], low.up)), (view,))

    def _attend(self, a: Attention, at: str) -> Attend:
        return Attend(
            layer=self._layer,
            tile=self._tile(a),
            heads=a.heads,
            kv_heads=a.kv_heads,
            head_dim=a.head_dim,
            value_dim=a.value_dim,
            scale=a.scale,
            reach=a.reach,
            softcap=a.softcap,
            sinks=None if a.sinks is None else self._vector(at + "sinks", Weight((a.sinks,)), is_float32=True),
            alibi=a.alibi,
            relative=a.relative,
            relative_table=None
            if a.relative is None
            else self._vector(at + "relative", a.relative.table, is_float32=True),
        )

    def _tile(self, a: Attention) -> int:
        if a.reach.kind == "whole":
            return -1
        if a.shared is not None:
            self._tile_of[self._layer] = self._tile_of[a.shared]
            return self._tile_of[self._layer]
        self._tiles.append(Tile(a.kv_heads, a.head_dim, a.value_dim, a.reach))
        if a.reach.kind != "cross":
            self._tile_of[self._layer] = len(self._tiles) - 1
        return len(self._tiles) - 1

    def _latent_attention(self, a: LatentAttention, x: View, at: str) -> View:
        a = _latent_with_halves(a)
        q = self._low_rank(at + "q", x, a.q)
        (whole,) = self._products(at + "kv_a", x, (a.kv_a,))
        latent, key = View(whole.register, 0, a.rank), View(whole.register, a.rank, a.rope_dim)
        self._norm(a.kv_norm, latent, at + "kv_norm", in_place=True)
        self._scale(q, a.q_scale)
        self._scale(latent, a.kv_scale)
        if a.rope is not None:
            self._op(Rotate(a.rope, a.heads, a.nope_dim), (q,), (q,))
            self._op(Rotate(a.rope, 1), (key,), (key,))
        if a.temperature is not None:
            self._op(Heat(a.temperature), (q,), (q,))
        out = self._register(a.heads * a.value_dim)
        self._tile_of[self._layer] = len(self._tiles)
        self._tiles.append(Tile(1, latent_width(a.rank, a.rope_dim), 0, Reach()))
        each = a.nope_dim + a.value_dim
        keys = tuple(_rows_of_heads(a.kv_b, a.heads, each, 0, a.nope_dim))
        values = tuple(_rows_of_heads(a.kv_b, a.heads, each, a.nope_dim, a.value_dim))
        args = AttendLatent(
            layer=self._layer,
            tile=self._tile_of[self._layer],
            heads=a.heads,
            nope_dim=a.nope_dim,
            rope_dim=a.rope_dim,
            value_dim=a.value_dim,
            rank=a.rank,
            scale=a.scale,
            keys=Matrix(self._key(at + "kv_b.keys"), keys, "heads, transposed", a.heads),
            values=Matrix(self._key(at + "kv_b.values"), values, "heads", a.heads),
        )
        self._op(args, (q, latent, key), (out,))
        return self._product(at + "o", out, a.o)

    def _state_tiles(self, units: int, shape: tuple[int, ...]) -> States:
        """Tiles for the states of `units` units."""
        per_tile = max(1, min(units, _TILE_BYTES // (4 * prod(shape))))
        first, count = len(self._states), -(-units // per_tile)
        self._states += (State((min(per_tile, units - i * per_tile), *shape)) for i in range(count))
        return States(first, count, per_tile)

    def _convolve(self, conv: Conv, x: View, at: str) -> View:
        out = self._register(conv.channels)
        args = Convolve(
            states=self._state_tiles(1, (conv.taps - 1, conv.channels)),
            taps=conv.taps,
            weight=self._float32(at + "conv", conv.weight),
            bias=None if conv.bias is None else self._float32(at + "conv.bias", conv.bias),
            act=conv.act or "none",
        )
        self._op(args, (x,), (out,))
        return out

    def _delta_net(self, d: DeltaNet, x: View, at: str) -> View:
        if isinstance(d.gate, Weight):
            qkv, gate = self._products(at + "qkv_gate", x, (d.qkv, d.gate))
        else:
            qkv, gate = self._product(at + "qkv", x, d.qkv), self._low_rank(at + "gate", x, d.gate)
        if isinstance(d.decay, Weight):
            beta, decay = self._products(at + "beta_decay", x, (d.beta, d.decay))
        else:
            beta, decay = self._product(at + "beta", x, d.beta), self._low_rank(at + "decay", x, d.decay)
        keys, values = d.key_heads * d.key_dim, d.value_heads * d.value_dim
        q, k, v = _columns(self._convolve(d.conv, qkv, at), keys, keys, values)
        out = self._register(values)
        scan = ScanDelta(
            states=self._state_tiles(d.value_heads, (d.key_dim, d.value_dim)),
            key_heads=d.key_heads,
            value_heads=d.value_heads,
            key_dim=d.key_dim,
            value_dim=d.value_dim,
            a=self._float32(at + "a", d.a_log),
            dt_bias=self._float32(at + "dt_bias", d.dt_bias),
            decay_per=d.decay_per,
            beta_scale=d.beta_scale,
        )
        self._op(scan, (q, k, v, beta, decay), (out,))
        self._gated_norm(d.norm, out, gate, at, act=d.gate_act)
        return self._product(at + "o", out, d.o)

    def _mamba1(self, m: Mamba1, x: View, at: str) -> View:
        inner, gate = _columns(self._product(at + "xz", x, m.xz), m.channels, m.channels)
        inner = self._convolve(m.conv, inner, at)
        low = self._product(at + "x", inner, m.x)
        self._all_reduce(low)
        low, b, c = _columns(low, m.dt_rank, m.state_dim, m.state_dim)
        for norm, view, name in ((m.dt_norm, low, "dt_norm"), (m.b_norm, b, "b_norm"), (m.c_norm, c, "c_norm")):
            if norm is not None:
                self._norm(norm, view, at + name, in_place=True)
        dt = self._product(at + "dt", low, replace(m.dt, bias=()))
        out = self._register(m.channels)
        scan = ScanMamba1(
            states=self._state_tiles(-(-m.channels // LANES), (m.state_dim, LANES)),
            channels=m.channels,
            state_dim=m.state_dim,
            a=self._float32(at + "a", m.a_log),
            dt_bias=self._float32(at + "dt.bias", Weight(m.dt.bias)) if m.dt.bias else None,
            d=self._float32(at + "d", m.d),
        )
        self._op(scan, (inner, dt, b, c), (out,))
        self._gated_norm(None, out, gate, at)
        return self._product(at + "out", out, m.out)

    def _mamba2(self, m: Mamba2, x: View, at: str) -> View:
        inner, of_groups = m.heads * m.head_dim, m.groups * m.state_dim
        whole = self._product(at + "zxbcdt", x, m.zxbcdt)
        sizes = (inner, inner, of_groups, of_groups, m.heads)
        for view, factor in zip(_columns(whole, *sizes), m.scales, strict=True):
            self._scale(view, factor)
        gate, mixed, dt = _columns(whole, inner, inner + 2 * of_groups, m.heads)
        inner_x, b, c = _columns(self._convolve(m.conv, mixed, at), inner, of_groups, of_groups)
        out = self._register(inner)
        scan = ScanMamba2(
            states=self._state_tiles(m.heads, (m.state_dim, m.head_dim)),
            heads=m.heads,
            head_dim=m.head_dim,
            state_dim=m.state_dim,
            groups=m.groups,
            a=self._float32(at + "a", m.a_log),
            dt_bias=self._float32(at + "dt_bias", m.dt_bias),
            d=self._float32(at + "d", m.d),
            dt_limits=m.dt_limits,
        )
        self._op(scan, (inner_x, b, c, dt), (out,))
        self._gated_norm(m.norm, out, gate, at, gate_first=not m.norm_first)
        return self._product(at + "out", out, m.out)

    def _short_conv(self, s: ShortConv, x: View, at: str) -> View:
        channels = s.conv.channels
        b, c, inner = _columns(self._product(at + "bcx", x, s.bcx), channels, channels, channels)
        self._op(Multiply(""), (inner, b), (inner,))
        mixed = self._convolve(s.conv, inner, at)
        self._op(Multiply(""), (mixed, c), (mixed,))
        return self._product(at + "out", mixed, s.out)

    def _lightning(self, n: Lightning, x: View, at: str) -> View:
        width = n.heads * n.head_dim
        qkv, gate = self._products(at + "qkv_gate", x, (n.qkv, n.gate))
        self._op(Activate("silu"), (qkv,), (qkv,))
        out = self._register(width)
        states = self._state_tiles(n.heads, (n.head_dim, n.head_dim))
        self._op(ScanLightning(states, n.heads, n.head_dim, n.decay), _columns(qkv, width, width, width), (out,))
        self._gated_norm(n.norm, out, gate, at, act="sigmoid")
        return self._product(at + "out", out, n.out)

    def _gated_norm(
        self, norm: Norm | None, x: View, gate: View, at: str, *, act: Literal["silu", "sigmoid"] = "silu",
        gate_first: bool = False,
    ) -> None:  # fmt: skip
        if norm is not None and norm.ranks > 1:
            if gate_first:
                self._op(Multiply(act), (x, gate), (x,))
            self._norms([(norm, x, at + "gated_norm")])
            if not gate_first:
                self._op(Multiply(act), (x, gate), (x,))
            return
        weight = None if norm is None or norm.weight is None else self._float32(at + "gated_norm", norm.weight)
        self._op(GatedNormalize(norm, weight, act, gate_first), (x, gate), (x,))

    def _float32(self, name: str, weight: Weight) -> Vector:
        return self._vector(name, weight, is_float32=True)

    def _low_rank(self, name: str, x: View, weight: Weight | LowRank) -> View:
        if isinstance(weight, Weight):
            return self._product(name, x, weight)
        inner = self._product(name + ".down", x, weight.down)
        if weight.norm is not None:
            inner = self._norm(weight.norm, inner, name + ".norm")
        return self._product(name + ".up", inner, weight.up)

    def _mlp(self, mlp: Mlp, x: View, at: str) -> View:
        if mlp.gate is None:
            hidden = self._product(at + "up", x, mlp.up)
            weights = None if mlp.act_weights is None else self._float32(at + "act", mlp.act_weights)
            self._op(Activate(mlp.act, weights), (hidden,), (hidden,))
        elif mlp.act == "silu" and mlp.gate_scale == 1.0 and not mlp.sparsity and mlp.low is None:
            hidden = self._register(mlp.up.rows)
            matrix = self._matrix(at + "gate_up", _bare(mlp.gate, mlp.up), "gated")
            self._op(GatedProduct(matrix, self._bias(at + "gate_up.bias", mlp.gate, mlp.up)), (x,), (hidden,))
        else:
            gate, up = self._products(at + "gate_up", x, (mlp.gate, mlp.up))
            if mlp.low is not None:
                self._add_low_ranks(at, x, (gate, up), mlp.low)
            hidden = self._register(up.width)
            args = Glu(mlp.act, mlp.limit, mlp.sharpness, mlp.gate_scale, mlp.sparsity, mlp.ranks)
            self._op(args, (gate, up), (hidden,))
        out = self._product(at + "down", hidden, mlp.down)
        self._scale(out, mlp.out_scale)
        return out

    def _moe(self, moe: Moe, x: View, stream: View, at: str) -> View:
        router, experts = moe.router, moe.experts
        asked = stream if router.reads_stream else x
        if router.norm is not None:
            asked = self._norm(router.norm, asked, at + "router_norm")
        if router.scale_in != 1.0:
            scaled = self._register(asked.width)
            self._op(Scale(router.scale_in), (asked,), (scaled,))
            asked = scaled
        logits = self._product(at + "router", asked, router.weight, "router")
        inner = x if moe.latent is None else self._product(at + "latent_down", x, moe.latent.down)
        out = self._register(experts.down.rows)
        first = (experts.up,) if experts.gate is None else (experts.gate, experts.up)
        is_gated = experts.gate is not None and experts.act == "silu"
        self._op(
            Mixture(
                router=router,
                num_experts=moe.num_experts,
                gate_up=Matrix(
                    self._key(at + "experts.gate_up"), _bare(*first), "gated experts" if is_gated else "experts"
                ),
                down=Matrix(self._key(at + "experts.down"), _bare(experts.down), "experts"),
                act=experts.act,
                limit=experts.limit,
                sharpness=experts.sharpness,
                has_gate=experts.gate is not None,
                gate_up_bias=self._bias(at + "experts.gate_up.bias", *first),
                down_bias=self._bias(at + "experts.down.bias", experts.down),
                correction=self._optional(at + "correction", router.correction, is_float32=True),
                expert_scale=self._optional(at + "expert_scale", router.expert_scale),
                places=moe.places,
                num_replicas=moe.num_replicas,
                is_exchanged=moe.is_exchanged,
            ),
            (inner, logits),
            (out,),
        )
        if moe.latent is not None:
            out = self._product(at + "latent_up", out, moe.latent.up)
        if moe.shared is not None:
            part = self._mlp(moe.shared, x, at + "shared.")
            if moe.shared_gate is not None:
                gate = self._product(at + "shared_gate", x, moe.shared_gate, "router")
                self._op(Multiply("sigmoid"), (part, gate), (part,))
            self._op(Add(), (out, part), (out,))
        return out

    def _bias(self, name: str, *weights: Weight) -> Vector | None:
        if not weights[0].bias:
            return None
        biases = (Weight(weight.bias, experts=weight.experts, only=weight.only) for weight in weights)
        return self._vector(name, *biases)

    def _optional(self, name: str, part: Part | None, *, is_float32: bool = False) -> Vector | None:
        return None if part is None else self._vector(name, Weight((part,)), is_float32=is_float32)


def _columns(view: View, *widths: int) -> tuple[View, ...]:
    """Adjacent columns of these widths."""
    firsts = accumulate(widths, initial=view.first)
    return tuple(View(view.register, first, width) for first, width in zip(firsts, widths, strict=False))


def _bare(*weights: Weight) -> tuple[Weight, ...]:
    """The weights without their biases, which are vectors of their own."""
    return tuple(replace(weight, bias=()) for weight in weights)


def _with_halves(a: Attention) -> Attention:
    """Executors rotate the features i and i + dims / 2 of a head; other pairs become a permutation of weights."""
    rope = a.rope
    if rope is None or rope.pairs == "halves":
        return a
    return replace(
        a,
        rope=replace(rope, pairs="halves"),
        q=halves(a.q, a.heads, a.head_dim, rope.dims),
        low=None if a.low is None else _low_with_halves(a, a.low, rope.dims),
        k=None if a.k is None else halves(a.k, a.kv_heads, a.head_dim, rope.dims),
        q_norm=_norm_of_halves(a.q_norm, a.heads, a.head_dim, rope.dims),
        k_norm=_norm_of_halves(a.k_norm, a.kv_heads, a.head_dim, rope.dims),
    )


def _low_with_halves(
    a: Attention, low: tuple[LowRank, LowRank, LowRank], dims: int
) -> tuple[LowRank, LowRank, LowRank]:
    q, k, v = low
    return (
        replace(q, up=halves(q.up, a.heads, a.head_dim, dims)),
        replace(k, up=halves(k.up, a.kv_heads, a.head_dim, dims)),
        v,
    )


def _latent_with_halves(a: LatentAttention) -> LatentAttention:
    rope = a.rope
    if rope is None or rope.pairs == "halves":
        return a
    each = a.nope_dim + a.rope_dim
    if isinstance(a.q, LowRank):
        q: Weight | LowRank = replace(a.q, up=halves(a.q.up, a.heads, each, rope.dims, first=a.nope_dim))
    else:
        q = halves(a.q, a.heads, each, rope.dims, first=a.nope_dim)
    kv_a = halves(a.kv_a, 1, a.rank + a.rope_dim, rope.dims, first=a.rank)
    return replace(a, rope=replace(rope, pairs="halves"), q=q, kv_a=kv_a)


def _rows_of_heads(weight: Weight, heads: int, each: int, first: int, count: int) -> list[Weight]:
    """The rows [first, first + count) of each head, which has `each` rows."""
    return [rows(weight, head * each + first, head * each + first + count) for head in range(heads)]


def _norm_of_halves(norm: Norm | None, heads: int, dim: int, dims: int) -> Norm | None:
    if norm is None or norm.weight is None:
        return norm
    num = heads if norm.weight.rows > dim else 1
    bias = None if norm.bias is None else halves(norm.bias, num, dim, dims)
    return replace(norm, weight=halves(norm.weight, num, dim, dims), bias=bias)
