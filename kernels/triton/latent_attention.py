"""Multi-head latent attention (MLA) over the paged KV cache, always in its absorbed form, as in `reference_latent.py`.

A position of the cache is one vector: the latent, which is both key and value of all heads, the rotated key, and zeros.
So this is attention with one kv head whose values are part of its keys, which `decode_attention` and `extend_attention`
compute. This file writes the cache, has the two products of each head around attention, and joins the parts
(`attend_latent`).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .decode_attention import NUM_STAGES, DecodeWorkspace, decode_attention, workspace_decode
from .extend_attention import TILE_ROWS, extend_attention
from .variant import FEW_BYTES, GRID, NO_TENSOR_CORES, Plan, Variant, shaped

NUM_WARPS = 4


def supports_latent(rank: int, rope_dim: int) -> bool:
    """Whether the kernels have latents of this rank and rotated keys of this size."""
    return all(size >= 16 and size & (size - 1) == 0 for size in (rank, rope_dim))


def write_latent(latent: Tensor, key: Tensor, pages: Tensor, slots: Tensor) -> None:
    """Writes the step's latents, after their norm, and rotated keys to the cache.

    latent: [tokens, rank], key: [tokens, rope_dim], rows of any stride; pages: [pages, 1, block_size, width], pages of
    any stride; their numbers beyond rank + rope_dim become zero; slots: [tokens] int32, page · block_size + offset, or
    -1 for a token that is not written.
    """
    (tokens, rank), rope_dim, (_, kv_heads, block_size, width) = latent.shape, key.shape[1], pages.shape
    assert kv_heads == 1 and rank + rope_dim <= width, (latent.shape, key.shape, pages.shape)
    assert latent.stride(1) == key.stride(1) == 1 and pages[0].is_contiguous(), (latent.stride(), key.stride())
    if tokens == 0:
        return
    _write_latent[(tokens,)](
        latent,
        key,
        pages,
        slots,
        latent.stride(0),
        key.stride(0),
        pages.stride(0),
        RANK=rank,
        ROPE_DIM=rope_dim,
        WIDTH=width,
        BLOCK_SIZE=block_size,
        LATENT_BLOCK=triton.next_power_of_2(rank),
        REST_BLOCK=triton.next_power_of_2(width - rank),
        num_warps=NUM_WARPS,
    )


@triton.jit
def _write_latent(
    latent,
    key,
    pages,
    slots,
    latent_stride,
    key_stride,
    page_stride,
    RANK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LATENT_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
):
    """One token."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    target = pages + slot // BLOCK_SIZE * page_stride + slot % BLOCK_SIZE * WIDTH
    column = tl.arange(0, LATENT_BLOCK)
    numbers = tl.load(latent + token * latent_stride + column, mask=column < RANK, other=0.0)
    tl.store(target + column, numbers.to(pages.dtype.element_ty), mask=column < RANK)
    column = tl.arange(0, REST_BLOCK)
    numbers = tl.load(key + token * key_stride + column, mask=column < ROPE_DIM, other=0.0)
    tl.store(target + RANK + column, numbers.to(pages.dtype.element_ty), mask=column < WIDTH - RANK)


def absorb(query: Tensor, keys: Tensor, out: Tensor) -> None:
    """out = the queries in the space of latents, [tokens, heads, rank]. query: [tokens, heads, nope_dim], of any
    strides but the last; keys: [heads, nope_dim, rank]."""
    torch.bmm(query.transpose(0, 1), keys, out=out.transpose(0, 1))


def expand(attended: Tensor, values: Tensor, out: Tensor) -> None:
    """out = the heads' results, [tokens, heads, value_dim]. attended: [tokens, heads, rank], what attention gives;
    values: [heads, value_dim, rank]."""
    torch.bmm(attended.transpose(0, 1), values.transpose(1, 2), out=out.transpose(0, 1))


@dataclass(frozen=True, kw_only=True)
class LatentLayer:
    """The weights and sizes of a layer's attention. `AttendLatent` has the sizes; heads are those of this rank."""

    keys: Tensor  # [heads, nope_dim, rank]
    values: Tensor  # [heads, value_dim, rank]
    rope_dim: int
    scale: float

    def workspace(self, *, rows: int, max_context: int, num_programs: int) -> DecodeWorkspace:
        """Layers of equal sizes share one. `plan_decode` fills it for each step."""
        heads, _, rank = self.keys.shape
        return workspace_decode(
            rows=rows,
            max_context=max_context,
            heads=heads,
            kv_heads=1,
            head_dim=rank,
            num_programs=num_programs,
            device=self.keys.device,
        )


def attend_latent(
    out: Tensor,
    query: Tensor,
    latent: Tensor,
    key: Tensor,
    layer: LatentLayer,
    pages: Tensor,
    slots: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    workspace: DecodeWorkspace,
    work: Tensor | None,
    *,
    tile_rows: int = TILE_ROWS,
    per_tile: int | None = None,
    take: Callable[[tuple[int, ...], torch.dtype], Tensor] | None = None,
) -> None:
    """One layer of a step: writes the cache, and attends. Its arguments are the registers of `AttendLatent` and those
    of a step's other attention.

    out: [tokens, heads · value_dim]; query: [tokens, heads · (nope_dim + rope_dim)], the last rope_dim numbers of a
    head rotated; latent, key, pages, slots: as in `write_latent`, and pages are the keys of the layer's tile in a
    head-major cache. The rows that decode attention takes come first. block_table: [rows, max blocks] int32;
    context_lens: [rows] int32, for `work`; workspace: of `LatentLayer.workspace`, planned with `plan_decode` for the
    rows of one token; work: the tiles of the other rows (see `extend_attention`), of a group of all heads or of
    `per_tile` tokens; None: there are no other rows. take: memory for two tensors [tokens, heads, rank]; None: new
    memory.
    """
    heads, nope_dim, _ = layer.keys.shape
    write_latent(latent, key, pages, slots)
    by_head = query.view(len(query), heads, nope_dim + layer.rope_dim)
    query_rope, shape = by_head[..., nope_dim:], (len(query), heads, layer.keys.shape[2])
    in_latents, attended = (query.new_empty(shape) if take is None else take(shape, query.dtype) for _ in range(2))
    absorb(by_head[..., :nope_dim], layer.keys, in_latents)
    rows = min(len(block_table), len(query))
    decode_attention(
        attended[:rows],
        in_latents[:rows],
        pages,
        None,
        block_table,
        workspace,
        scale=layer.scale,
        query_rope=query_rope[:rows],
    )
    if work is not None:
        extend_attention(
            attended,
            in_latents,
            pages,
            None,
            block_table,
            context_lens,
            work,
            scale=layer.scale,
            num_programs=workspace.num_programs,
            query_rope=query_rope,
            tile_rows=tile_rows,
            per_tile=per_tile,
        )
    expand(attended, layer.values, out.view(len(out), heads, layer.values.shape[1]))


_RANK, _ROPE_DIM, _NOPE_DIM = 512, 64, 128  # DeepSeek-V2 and V3, Kimi-K2, GLM-4.7-Flash


def _queries(rows: int, heads: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(in the space of latents, rotated part, pages)."""
    whole = shaped(rows, heads, _NOPE_DIM + _ROPE_DIM, dtype=dtype)
    pages = shaped(4, 1, 64, _RANK + _ROPE_DIM, dtype=dtype)
    return shaped(rows, heads, _RANK, dtype=dtype), whole[..., _NOPE_DIM:], pages


def _workspace(heads: int) -> DecodeWorkspace:
    return workspace_decode(
        rows=256, max_context=32768, heads=heads, kv_heads=1, head_dim=_RANK, num_programs=132, device="meta"
    )


def _decode_variant(name: str, heads: int, dtype: torch.dtype = torch.bfloat16) -> Variant:
    def launch(rows: int) -> None:
        query, query_rope, pages = _queries(rows, heads, dtype)
        decode_attention(
            query,
            query,
            pages,
            None,
            shaped(rows, 33, dtype=torch.int32),
            _workspace(heads),
            scale=_NOPE_DIM**-0.5,
            query_rope=query_rope,
        )

    opcodes = ("HMMA", "LDGSTS")
    plan = Plan(sm_80=opcodes, sm_90=opcodes, buffers=NUM_STAGES - 1, stack=FEW_BYTES)
    return Variant(
        name=f"latent decode {name} H{heads}",
        launch=launch,
        plans={"_decode_kernel": plan if dtype.itemsize == 2 else NO_TENSOR_CORES},
        architectures=GRID,
    )


def _extend_variant(name: str, heads: int, dtype: torch.dtype = torch.bfloat16, tile_rows: int = TILE_ROWS) -> Variant:
    def launch(rows: int) -> None:
        query, query_rope, pages = _queries(rows, heads, dtype)
        extend_attention(
            query,
            query,
            pages,
            None,
            shaped(rows, 33, dtype=torch.int32),
            shaped(rows, dtype=torch.int32),
            shaped(1 + rows, 4, dtype=torch.int32),
            scale=_NOPE_DIM**-0.5,
            num_programs=132,
            query_rope=query_rope,
            tile_rows=tile_rows,
        )

    opcodes = ("HMMA", "LDGSTS")
    plan = Plan(sm_80=opcodes, sm_90=opcodes, stack=FEW_BYTES)
    return Variant(
        name=f"latent extend {name} H{heads}",
        launch=launch,
        plans={"_extend_kernel": plan if dtype.itemsize == 2 else NO_TENSOR_CORES},
        architectures=GRID,
    )


def _write_variant(name: str, dtype: torch.dtype) -> Variant:
    def launch(rows: int) -> None:
        whole = shaped(rows, _RANK + _ROPE_DIM)
        write_latent(
            whole[:, :_RANK],
            whole[:, _RANK:],
            shaped(4, 1, 64, _RANK + _ROPE_DIM, dtype=dtype),
            shaped(rows, dtype=torch.int32),
        )

    return Variant(
        name=f"latent write {name}",
        launch=launch,
        plans={"_write_latent": Plan()},
        architecture=89 if dtype.itemsize == 1 else 80,
    )


VARIANTS: tuple[Variant, ...] = (
    _decode_variant("bf16", 16),  # DeepSeek-V2-Lite, and DeepSeek-V3 on eight ranks
    _decode_variant("bf16", 20),  # GLM-4.7-Flash
    _decode_variant("fp32", 16, torch.float32),
    _extend_variant("bf16", 16),
    _extend_variant("bf16 draft", 16, tile_rows=16),
    _extend_variant("fp32", 16, torch.float32),
    _write_variant("bf16", torch.bfloat16),
    _write_variant("bf16 fp8 pages", torch.float8_e4m3fn),
)
