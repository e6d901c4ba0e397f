"""Causal attention over the paged KV cache for rows with any number of new tokens: prompts, chunks of prompts after a
cached prefix, decode rows and draft tokens to verify, in one launch.

The host cuts the rows' new tokens into tiles (`extend_work`). A program takes a tile and a kv head, and reads the row's
keys once for all tokens and query heads of the tile. The keys of a row are not split: long rows with few tokens are
left to `decode_attention.py`, which also describes the layout of pages.

The length of a row is read on the device, so the host need not know it. A token has the same bits however its prompt is
cut into steps and tiles: its sums run over the same pages, and masked keys change no bit.
"""

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from .decode_attention import score_factors, softmax_step, stride_of_pages, tile_scores
from .tuned import tuned
from .variant import Plan, Variant, shaped

TILE_ROWS = 128  # (token, query head) pairs per tile of a prompt; 16 suits steps with draft tokens only
NUM_STAGES = 3
_FIELDS = tl.constexpr(4)  # per tile, see `extend_work`
_LOG2_E = tl.constexpr(1.4426950408889634)


def tile_tokens(group: int, tile_rows: int = TILE_ROWS) -> int:
    """Tokens per tile. group: query heads per kv head."""
    return tile_rows // group


def max_tiles(tokens: int, rows: int, per_tile: int) -> int:
    """The most tiles that `tokens` tokens of `rows` rows can make."""
    return (tokens + rows * (per_tile - 1)) // per_tile


def extend_work(query_lens: NDArray[np.int64], context_lens: NDArray[np.int64], per_tile: int) -> NDArray[np.int32]:
    """The tiles of a step, [tiles, 4]: row, first token (counted over all rows), number of tokens, tokens of the row
    from the first one on.

    query_lens: [rows] new tokens; context_lens: [rows] keys, the new tokens included, as far as the host knows. These
    only decide the order: the longest tile first, so that none starts last. per_tile: `tile_tokens`.
    """
    tiles = -(-query_lens // per_tile)
    row = np.repeat(np.arange(len(tiles)), tiles)
    first = (np.arange(len(row)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * per_tile
    remaining = query_lens[row] - first
    number = np.minimum(remaining, per_tile)
    token = (np.cumsum(query_lens) - query_lens)[row] + first
    keys = context_lens[row] - remaining + number
    work = np.stack((row, token, number, remaining), axis=1).astype(np.int32)
    return work[np.argsort(-keys, kind="stable")]


def extend_attention(
    out: Tensor,
    query: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    work: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    tile_rows: int = TILE_ROWS,
) -> None:
    """Attention of the tokens that `work` lists; the output of other tokens is not written.

    out, query: [tokens, heads, head_dim]; context_lens: [rows] int32, 0: the row's outputs are zeros; work: [tiles, 4]
    int32 on the device, from `extend_work` with tiles of `tile_tokens(heads // kv_heads, tile_rows)` tokens. Tiles of 0
    tokens at its end cost next to nothing, so its length can always be `max_tiles`. With `window` w a token sees
    itself and the w - 1 tokens before it. Other arguments as in `decode_attention`.
    """
    _, heads, head_dim = query.shape
    _, kv_heads, block_size, _ = k_pages.shape
    group = heads // kv_heads
    assert group <= tile_rows, (group, tile_rows)
    assert work.is_contiguous()
    assert query.stride()[1:] == out.stride()[1:] == (head_dim, 1)
    score_scale, cap = score_factors(scale * k_scale, softcap)
    _extend_kernel[(work.shape[0] * kv_heads,)](
        out,
        query,
        k_pages,
        v_pages,
        block_table,
        context_lens,
        work,
        sinks,
        score_scale,
        cap,
        v_scale,
        window,
        out.stride(0),
        query.stride(0),
        block_table.stride(0),
        stride_of_pages(k_pages, v_pages),
        KV_HEADS=kv_heads,
        GROUP=group,
        TILE_ROWS=tile_rows,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        **_options(head_dim, tile_rows),
    )


def _options(head_dim: int, tile_rows: int) -> dict[str, int]:
    """The tuned compile-time options."""
    num_warps = 8 if tile_rows >= 128 else 4  # 128 rows and four warps do not fit into registers
    return tuned("extend_attention", head_dim, tile_rows, num_warps=num_warps, num_stages=NUM_STAGES)


@triton.jit
def _add_pages(
    acc,
    most,
    total,
    q,
    position,
    k_head,
    v_head,
    table,
    first_page,
    last_page,
    stop,
    window,
    score_scale,
    cap,
    page_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Adds pages of a row to a running softmax (see `softmax_step`). position: [rows] of the queries; stop: end of the
    keys that any of them sees. Without MASKED every query sees all keys of these pages."""
    offsets = tl.arange(0, BLOCK_SIZE)
    in_page = offsets[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    # One iteration ahead, see `_decode_kernel`.
    next_block = tl.load(table + first_page, mask=first_page < last_page, other=0)
    for page in range(first_page, last_page):
        at = next_block.to(tl.int64) * page_stride
        next_block = tl.load(table + page + 1, mask=page + 1 < last_page, other=0)
        if MASKED:
            key = page * BLOCK_SIZE + offsets
            written = (key < stop)[:, None]  # a NaN in a stale slot would spoil the sums even with a weight of 0
            k = tl.load(k_head + at + in_page, mask=written, other=0.0).to(q.dtype)
            scores = tile_scores(q, k, score_scale, cap)
            seen = key[None, :] <= position[:, None]
            if window is not None:
                seen = seen & (key[None, :] > position[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
            v = tl.load(v_head + at + in_page, mask=written, other=0.0).to(q.dtype)
        else:
            k = tl.load(k_head + at + in_page).to(q.dtype)
            scores = tile_scores(q, k, score_scale, cap)
            v = tl.load(v_head + at + in_page).to(q.dtype)
        acc, most, total = softmax_step(acc, most, total, scores, v)
    return acc, most, total


@triton.jit(do_not_specialize=["window", "table_stride"])
def _extend_kernel(
    out,
    query,
    k_pages,
    v_pages,
    block_table,
    context_lens,
    work,
    sinks,
    score_scale,
    cap,
    v_scale,
    window,
    out_stride,
    query_stride,
    table_stride,
    page_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """One tile and one kv head per program; the kv heads of a tile are neighbours, and so are their pages in memory."""
    fields = work + (tl.program_id(0) // KV_HEADS) * _FIELDS
    kv_head = tl.program_id(0) % KV_HEADS
    number = tl.load(fields + 2)
    if number == 0:
        return
    row = tl.load(fields)
    token = tl.load(fields + 1)
    context = tl.load(context_lens + row)
    start = context - tl.load(fields + 3)  # position of the tile's first token
    stop = start + number

    pair = tl.arange(0, TILE_ROWS)
    of_tile = pair // GROUP
    head = kv_head * GROUP + pair % GROUP
    real = of_tile < number
    position = start + of_tile
    in_row = head[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    q = tl.load(query + (token + of_tile)[:, None] * query_stride + in_row, mask=real[:, None], other=0.0)
    if k_pages.dtype.element_ty.is_fp8():
        q = q.to(tl.float16)
    most = tl.full([TILE_ROWS], -1e30, tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    if sinks is not None:
        most = tl.load(sinks + head, mask=real, other=0.0) * _LOG2_E
        total = tl.full([TILE_ROWS], 1.0, tl.float32)
    acc = tl.zeros([TILE_ROWS, HEAD_DIM], tl.float32)

    k_head = k_pages + kv_head * (BLOCK_SIZE * HEAD_DIM)
    v_head = v_pages + kv_head * (BLOCK_SIZE * HEAD_DIM)
    table = block_table + row * table_stride
    # The pages before `full` end at or before the first token: all tokens see them, unless a window ends earlier. The
    # maxima with 0 are for rows whose context is 0.
    full = tl.maximum(start + 1, 0) // BLOCK_SIZE
    last_page = tl.cdiv(tl.maximum(stop, 0), BLOCK_SIZE)
    open_page = 0
    if window is not None:
        first_page = tl.maximum(start + 1 - window, 0) // BLOCK_SIZE
        open_page = tl.minimum(tl.cdiv(tl.maximum(stop - window, 0), BLOCK_SIZE), full)
        acc, most, total = _add_pages(
            acc, most, total, q, position, k_head, v_head, table, first_page, open_page, stop, window, score_scale, cap,
            page_stride, HEAD_DIM, BLOCK_SIZE, True,
        )  # fmt: skip
    acc, most, total = _add_pages(
        acc, most, total, q, position, k_head, v_head, table, open_page, full, stop, window, score_scale, cap,
        page_stride, HEAD_DIM, BLOCK_SIZE, False,
    )  # fmt: skip
    acc, most, total = _add_pages(
        acc, most, total, q, position, k_head, v_head, table, full, last_page, stop, window, score_scale, cap,
        page_stride, HEAD_DIM, BLOCK_SIZE, True,
    )  # fmt: skip

    result = acc * (v_scale / tl.where(total > 0, total, 1.0))[:, None]
    target = out + (token + of_tile)[:, None] * out_stride + in_row
    tl.store(target, result.to(out.dtype.element_ty), mask=real[:, None])


def _variant(
    name: str,
    heads: int,
    kv_heads: int,
    *,
    fp8: bool = False,
    tile_rows: int = TILE_ROWS,
    window: int | None = None,
    softcap: float | None = None,
) -> Variant:
    def launch(rows: int) -> None:
        query = shaped(rows, heads, 128)
        pages = shaped(4, kv_heads, 64, 128, dtype=torch.float8_e4m3fn if fp8 else torch.bfloat16)
        extend_attention(
            query,
            query,
            pages,
            pages,
            shaped(rows, 33, dtype=torch.int32),
            shaped(rows, dtype=torch.int32),
            shaped(rows, _FIELDS.value, dtype=torch.int32),
            scale=128**-0.5,
            window=window,
            softcap=softcap,
            tile_rows=tile_rows,
        )

    opcodes = ("HMMA", "LDGSTS")
    wide = tile_rows >= 64  # the fewest rows that wgmma takes
    plan = Plan(
        sm_80=opcodes,
        sm_90=("HGMMA", "LDGSTS") if wide else opcodes,
        buffers=_options(128, tile_rows)["num_stages"] - 1,
    )
    return Variant(
        name=f"extend_attention {name} {heads}/{kv_heads} D128",
        launch=launch,
        plans={"_extend_kernel": plan},
        architecture=89 if fp8 else 80,
    )


VARIANTS: tuple[Variant, ...] = (
    _variant("bf16", 16, 8),  # Qwen3-0.6B
    _variant("bf16", 32, 8),  # Llama-3.1-8B
    _variant("bf16", 32, 4),  # Qwen3-30B-A3B
    _variant("bf16 draft", 32, 8, tile_rows=16),
    _variant("fp8", 32, 8, fp8=True),
    _variant("bf16 window softcap", 32, 8, window=4096, softcap=30.0),
)
