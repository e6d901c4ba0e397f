"""A native decoder on the Triton kernels, with buffers at fixed addresses, so that its steps can be recorded.

All inputs of a step are on the device when it begins: the packet, and the state of the rows. The order of operations is
that of `engine/models/decoder.py`, whose weights it uses. A layer of up to 16 tokens takes six launches: norm and
QKV projection, rotary embedding and KV write, attention, output projection and residual, norm and gates, down
projection and residual. More tokens take cuBLAS and a norm that adds the residual.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import cast

import torch
from torch import Tensor

from ...kernels.ops import reference_ops
from ...kernels.reference import TorchMatrix
from ...kernels.triton.decode_attention import DecodeWorkspace, decode_attention, plan_decode, workspace_decode
from ...kernels.triton.extend_attention import extend_attention, max_tiles, tile_tokens
from ...kernels.triton.moe import MoeWorkspace, workspace_moe
from ...kernels.triton.norm_rotary_write import norm_rotary_write, rotary_table
from ...kernels.triton.prepare_step import prepare_step
from ...kernels.triton.rms_norm import rms_norm
from ...kernels.triton.small_product import workspace_small_product
from ..attention.kv_cache import KvCache
from ..layers.linear import Linear
from ..layers.mlp import GatedMlp
from ..layers.moe import MoeMlp
from ..layers.norm import RmsNorm
from ..layers.rotary import inverse_frequencies
from ..models.decoder import Decoder, DecoderLayer
from .feed_forward import AddFeedForward, FeedForward, GatedFeedForward, MoeFeedForward
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
        self, decoder: Decoder, *, limits: Limits, dtype: torch.dtype, num_programs: int, is_deterministic: bool
    ) -> None:
        """decoder: loaded and not packed; it gives its weights away. num_programs: of decode attention, as many as the
        device holds at once. is_deterministic: a token's bits depend on its own request only."""
        self.kv_shape = decoder.kv_shape
        self._decoder = decoder
        self._ranks = decoder.group
        self._limits = limits
        self._num_programs = num_programs
        body = decoder.model
        layers = [cast(DecoderLayer, layer) for layer in body.layers]
        modules = [module for layer in layers for module in layer.modules() if isinstance(module, Linear)]
        narrow = sum(module.quantized.nbytes for module in modules if module.quantized is not None)
        self.weights = narrow + sum(parameter.nbytes for parameter in decoder.parameters())  # bytes
        attention = layers[0].self_attn
        tile = self.kv_shape.layers[0]
        self._heads, self._dim, self._kv_heads = attention.heads, tile.head_dim, tile.kv_heads
        self.group = self._heads // self._kv_heads  # query heads per kv head
        self._scale = attention.attention.scale
        self._eps = attention.eps
        self._norm = _norm(body.norm)
        self.device = device = self._norm.weight.device
        shapes = {module.shape for module in modules if module.shape[0] % 16 == 0}
        workspace = workspace_small_product(shapes, device)

        def product(module: Linear, rearrange: Callable[[Tensor], Tensor] = lambda x: x) -> Product:
            bias = None if module.bias is None else rearrange(module.bias.data)
            if module.quantized is None:
                weight = rearrange(module.take())
                return InvariantProduct(weight, bias) if is_deterministic else DenseProduct(weight, bias, workspace)
            is_gated = rearrange is interleave
            return QuantizedProduct(module.quantized.interleave() if is_gated else module.quantized, bias)

        moe: MoeWorkspace | None = None

        def feed_forward(module: GatedMlp | MoeMlp) -> FeedForward:
            nonlocal moe
            if isinstance(module, GatedMlp):
                gate_up, down = product(module.gate_up_proj, interleave), product(module.down_proj)
                return GatedFeedForward(gate_up, down, decoder.intermediate_size)
            stacks = module.take()
            moe = moe or _moe_workspace(module, stacks[1], limits.tokens, dtype)
            return MoeFeedForward(
                product(module.gate), *stacks, moe, top_k=module.top_k, renormalize=module.renormalize
            )

        self._layers = [
            _Layer(
                input_norm=_norm(layer.input_layernorm),
                qkv=product(layer.self_attn.qkv_proj),
                head_norms=_head_norms(layer.self_attn.q_norm, layer.self_attn.k_norm),
                out=product(layer.self_attn.o_proj),
                post_norm=_norm(layer.post_attention_layernorm),
                feed_forward=feed_forward(layer.mlp),
                window=layer.self_attn.attention.window,
            )
            for layer in layers
        ]
        self._moe = moe
        matrix = InvariantMatrix if is_deterministic else TorchMatrix
        for vocabulary in decoder.vocabularies:
            vocabulary.pack(replace(reference_ops(), matrix=matrix, table=matrix))
        hidden = self._norm.weight.shape[0]

        def integers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        rope = decoder.rope
        self._rotary = rotary_table(
            inverse_frequencies(rope, self._dim).to(device), rope.attention_factor, decoder.max_len
        )
        self._ids, self._positions = integers(limits.tokens), integers(limits.tokens)
        self._slots, self._context_lens = integers(limits.tables, limits.tokens), integers(limits.rows)
        self._tables = integers(limits.tables, limits.rows, limits.blocks)
        self._stream = torch.zeros((limits.tokens, hidden), dtype=dtype, device=device)  # the residual stream
        self._windows: dict[int | None, DecodeWorkspace] = {
            window: workspace_decode(
                rows=limits.rows,
                max_context=decoder.max_len,
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
        assert cache.groups.num_tables == self._limits.tables, (cache.groups, self._limits)
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
        stream.copy_(self._decoder.model.embed_tokens(ids))
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
        return self._decoder.logits(hidden)


def _add_norm(delta: Tensor, stream: Tensor, norm: Norm, out: Tensor) -> None:
    """stream += delta; out = norm(stream)."""
    rms_norm(delta, norm.weight, norm.eps, out, residual=stream)


def _moe_workspace(module: MoeMlp, down: Tensor, max_tokens: int, dtype: torch.dtype) -> MoeWorkspace:
    return workspace_moe(
        max_tokens=max_tokens,
        num_experts=module.num_experts,
        top_k=module.top_k,
        hidden=down.shape[1],
        inter=down.shape[2],
        dtype=dtype,
        device=down.device,
    )


def _norm(module: RmsNorm) -> Norm:
    return Norm(module.weight.data, module.eps)


def _head_norms(q_norm: RmsNorm | None, k_norm: RmsNorm | None) -> tuple[Tensor, Tensor] | None:
    return None if q_norm is None or k_norm is None else (q_norm.weight.data, k_norm.weight.data)
