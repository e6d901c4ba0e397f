"""A native decoder on the Triton kernels, with buffers at fixed addresses, so that its steps can be recorded.

All inputs of a step are on the device when it begins: the packet, and the state of the rows. The order of operations is
that of the program. A layer of up to 16 tokens takes six launches: norm and
QKV projection, rotary embedding and KV write, attention, output projection and residual, norm and gates, down
projection and residual. More tokens take cuBLAS and a norm that adds the residual.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ...kernels.reference import TorchMatrix
from ...kernels.triton.decode_attention import DecodeWorkspace, decode_attention, plan_decode, workspace_decode
from ...kernels.triton.extend_attention import extend_attention, max_tiles, tile_tokens
from ...kernels.triton.moe import MoeWorkspace, workspace_moe
from ...kernels.triton.norm_rotary_write import norm_rotary_write, rotary_table
from ...kernels.triton.prepare_step import prepare_step
from ...kernels.triton.rms_norm import rms_norm
from ...kernels.triton.small_product import workspace_small_product
from ..attention.kv_cache import KvCache, KvShape
from ..executors.reference import Reference
from ..executors.rotary import inverse_frequencies
from ..executors.vocabulary import Vocabulary
from ..executors.weights import Weights
from ..models.program import Embed, GatedProduct, Normalize, Program
from ..models.program import Product as ProductOp
from ..parallel.collectives import Group
from .feed_forward import AddFeedForward, FeedForward, GatedFeedForward, MoeFeedForward
from .layers import Chosen, Gated, Layer, layers_of
from .packet import Limits, Packet
from .products import (
    DenseProduct,
    FusedProduct,
    InvariantMatrix,
    InvariantProduct,
    Norm,
    Product,
    QuantizedProduct,
    interleave,
)
from .shapes import StepShape
from .state import RowState
from .weights import Loaded

DRAFT_ROWS = 16  # attention tile rows for steps in which rows have a few tokens,
PROMPT_ROWS = 128  # for steps with prompts,
INVARIANT_ROWS = 64  # and for all steps of `--deterministic`: the fewest rows that wgmma takes


@dataclass(frozen=True)
class _Layer:
    input_norm: Norm
    qkv: Product
    head_norms: tuple[Tensor, Tensor] | None
    out: Product
    post_norm: Norm
    feed_forward: FeedForward
    window: int | None

    def fused(self, tokens: int) -> tuple[FusedProduct, FusedProduct, AddFeedForward] | None:
        """The fused forms of qkv, out and feed_forward, if all three have one for this number of tokens."""
        qkv, out, add = self.qkv.fused(tokens), self.out.fused(tokens), self.feed_forward.fused(tokens)
        return None if qkv is None or out is None or add is None else (qkv, out, add)


class TritonDecoder:
    """`open` comes before the first `run`. One step runs at a time."""

    def __init__(
        self,
        program: Program,
        loaded: Loaded,
        *,
        shape: KvShape,
        group: Group,
        max_len: int,
        limits: Limits,
        dtype: torch.dtype,
        num_programs: int,
        is_deterministic: bool,
    ) -> None:
        """program: one whose `layers_of` are known. loaded: its weights, which it takes. num_programs: of decode
        attention, as many as the device holds at once. is_deterministic: a token's bits depend on its own request
        only."""
        self.kv_shape = shape
        self._ranks = group
        self._limits = limits
        self._num_programs = num_programs
        self.weights = loaded.num_bytes
        layers = layers_of(program)
        attend, embed = layers[0].attend, program.ops[0].args
        final = program.ops[-1].args
        assert isinstance(embed, Embed) and isinstance(final, Normalize)
        self._heads, self._dim, self._kv_heads = attend.heads, attend.head_dim, attend.kv_heads
        self.group = self._heads // self._kv_heads  # query heads per kv head
        self._scale = attend.scale
        self._eps = 0.0 if layers[0].head_norms is None else layers[0].head_norms[0].norm.eps

        def norm(args: Normalize) -> Norm:
            weight = loaded.vector(args.weight)
            assert weight is not None
            return Norm(weight, args.norm.eps)

        self._norm = norm(final)
        self.device = device = loaded.device
        shapes = {
            (matrix.rows, matrix.columns)
            for matrix in program.matrices
            if matrix.use in ("product", "gated", "router") and matrix.rows % 16 == 0
        }
        workspace = workspace_small_product(shapes, device)

        def product(args: ProductOp | GatedProduct) -> Product:
            is_gated = isinstance(args, GatedProduct)
            bias, weight = loaded.vector(args.bias), loaded.take(args.matrix)
            if is_gated and bias is not None:
                bias = interleave(bias)
            if not isinstance(weight, Tensor):
                return QuantizedProduct(weight.interleave() if is_gated else weight, bias)
            weight = interleave(weight) if is_gated else weight
            return InvariantProduct(weight, bias) if is_deterministic else DenseProduct(weight, bias, workspace)

        self._moe: MoeWorkspace | None = None

        def feed_forward(part: Gated | Chosen) -> FeedForward:
            if isinstance(part, Gated):
                gate_up, down = product(part.gate_up), product(part.down)
                return GatedFeedForward(gate_up, down, part.down.matrix.columns)
            args = part.experts
            self._moe = self._moe or workspace_moe(
                max_tokens=limits.tokens,
                num_experts=args.num_experts,
                top_k=args.router.top_k,
                hidden=args.down.rows,
                inter=args.down.columns,
                dtype=dtype,
                device=device,
            )
            stacks = loaded.values(args.gate_up), loaded.values(args.down)
            how = args.router
            return MoeFeedForward(product(part.router), *stacks, self._moe, top_k=how.top_k, renormalize=how.renorm)

        def head_norms(layer: Layer) -> tuple[Tensor, Tensor] | None:
            if layer.head_norms is None:
                return None
            return norm(layer.head_norms[0]).weight, norm(layer.head_norms[1]).weight

        self._layers = [
            _Layer(
                input_norm=norm(layer.input_norm),
                qkv=product(layer.qkv),
                head_norms=head_norms(layer),
                out=product(layer.out),
                post_norm=norm(layer.post_norm),
                feed_forward=feed_forward(layer.feed_forward),
                window=layer.attend.reach.positions or None,
            )
            for layer in layers
        ]
        matrix = InvariantMatrix if is_deterministic else TorchMatrix
        tables = Weights()
        for table in dict.fromkeys((embed.table, program.head)):
            tables.matrices[table.key] = (matrix(loaded.values(table)),)
        reference = Reference(
            program, tables, max_len=1, dtype=dtype, weight_dtype=dtype, device=device, group=group
        )  # fmt: skip
        self._reference, self._table = reference, embed  # not a bound function: sleep follows attributes to tensors
        self._vocabulary = Vocabulary(program, tables, group)
        hidden = program.hidden

        def integers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        rope = layers[0].rope
        self._rotary = rotary_table(inverse_frequencies(rope).to(device), rope.cos_scale, max_len)
        self._ids, self._positions = integers(limits.tokens), integers(limits.tokens)
        self._slots, self._context_lens = integers(limits.tables, limits.tokens), integers(limits.rows)
        self._tables = integers(limits.tables, limits.rows, limits.blocks)
        self._stream = torch.zeros((limits.tokens, hidden), dtype=dtype, device=device)  # the residual stream
        self._windows: dict[int | None, DecodeWorkspace] = {
            window: workspace_decode(
                rows=limits.rows,
                max_context=max_len,
                heads=self._heads,
                kv_heads=self._kv_heads,
                head_dim=self._dim,
                window=window,
                device=device,
            )
            for window in {layer.window for layer in self._layers}
        }
        self._cache: KvCache | None = None

    @property
    def num_ranks(self) -> int:
        return self._ranks.size

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers that are kept between steps."""
        kept = [self._rotary, self._ids, self._positions, self._slots, self._context_lens, self._tables, self._stream]
        if self._moe is not None:
            kept += [getattr(self._moe, field.name) for field in fields(self._moe)]
        for workspace in self._windows.values():
            kept += [workspace.items, workspace.partials, workspace.lses, workspace.arrivals]
        return sum(tensor.nbytes for tensor in kept)

    def open(self, cache: KvCache) -> None:
        """cache: head-major."""
        assert cache.groups.num_tables - cache.groups.state_pages == self._limits.tables, (cache.groups, self._limits)
        self._cache = cache

    def run(self, packet: Packet, state: RowState, shape: StepShape) -> None:
        """Runs the packet's tokens through the layers; `hidden` and `logits` then give the results."""
        cache = self._cache
        assert cache is not None, "run before open"
        tokens, rows = shape.tokens, min(shape.tokens, self._limits.rows)
        ids, positions, slots = self._ids[:tokens], self._positions[:tokens], self._slots[:, :tokens]
        lens, tables = self._context_lens[:rows], self._tables[:, :rows]
        block_size = cache.block_size
        prepare_step(packet.step, state.last_ids, state.tables, ids, positions, slots, lens, tables, block_size)
        decode_lens = packet.decode_lens[:rows]
        for workspace in self._windows.values():
            plan_decode(decode_lens, workspace)
        tiles = None
        if shape.tile_rows:
            per_tile = tile_tokens(self.group, shape.tile_rows)
            tiles = packet.tiles[: max_tiles(tokens, rows, per_tile)]

        stream = self._stream[:tokens]
        stream.copy_(self._reference.embed(self._table, ids))
        dtype, device = stream.dtype, stream.device
        qkv = torch.empty((tokens, (self._heads + 2 * self._kv_heads) * self._dim), dtype=dtype, device=device)
        query = torch.empty((tokens, self._heads, self._dim), dtype=dtype, device=device)
        attended = torch.empty_like(query)
        flat = attended.view(tokens, -1)
        num_tokens = packet.step[1:2]

        def attend(number: int, layer: _Layer) -> None:
            (k_pages, v_pages), table = cache.pages[number], cache.tables[number]
            own = slots[table]
            norm_rotary_write(qkv, layer.head_norms, self._eps, self._rotary, positions, own, query, k_pages, v_pages)
            decode_attention(
                attended[:rows],
                query[:rows],
                k_pages,
                v_pages,
                tables[table],
                self._windows[layer.window],
                scale=self._scale,
                num_programs=self._num_programs,
            )
            if tiles is not None:  # last, because decode attention writes zeros for the other rows
                extend_attention(
                    attended,
                    query,
                    k_pages,
                    v_pages,
                    tables[table],
                    lens,
                    tiles,
                    scale=self._scale,
                    window=layer.window,
                    tile_rows=shape.tile_rows,
                )

        fused = [layer.fused(tokens) for layer in self._layers] if self._ranks.size == 1 else [None]
        if None not in fused:
            for number, (layer, parts) in enumerate(zip(self._layers, fused, strict=True)):
                assert parts is not None
                qkv_of, out_of, add_feed_forward = parts
                qkv_of(stream, qkv, norm=layer.input_norm)
                attend(number, layer)
                out_of(flat, stream, residual=stream)
                add_feed_forward(stream, layer.post_norm, num_tokens)
            return
        normed, delta = torch.empty_like(stream), torch.zeros_like(stream)
        for number, layer in enumerate(self._layers):
            _add_norm(delta, stream, layer.input_norm, normed)
            layer.qkv(normed, qkv)
            attend(number, layer)
            layer.out(flat, delta)
            self._ranks.all_reduce(delta)
            _add_norm(delta, stream, layer.post_norm, normed)
            layer.feed_forward(normed, delta, num_tokens)
            self._ranks.all_reduce(delta)
        stream.add_(delta)

    def hidden(self, tokens: Tensor) -> Tensor:
        """The normed states of tokens of the step, the input of `logits`. tokens: [n] int32 → [n, hidden]."""
        picked = self._stream.index_select(0, tokens)
        rms_norm(picked, self._norm.weight, self._norm.eps, picked)
        return picked

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, vocab] float32."""
        return self._vocabulary.logits(hidden)


def _add_norm(delta: Tensor, stream: Tensor, norm: Norm, out: Tensor) -> None:
    """stream += delta; out = norm(stream)."""
    rms_norm(delta, norm.weight, norm.eps, out, residual=stream)
