"""Causal attention over the paged KV cache for rows with any number of new tokens: prompts, chunks of prompts after a
cached prefix, decode rows and draft tokens to verify, in one launch.

The host cuts the rows' new tokens into tiles (`extend_work`). Their number is data on the device, so a recorded launch
does no work for tiles that its step does not have. The programs take the kv heads of the tiles in turn, the longest
first, or parts of their (token, query head) pairs if all of these do not fit into shared memory. A program reads the
row's keys once for these pairs. The keys of a row are not split: long rows with few tokens are left to
`decode_attention.py`, which also describes the layout of pages.

The length of a row is read on the device, so the host need not know it. A token has the same bits however its prompt is
cut into steps and tiles: its sums run over the same keys, and masked keys change no bit.
"""

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from .decode_attention import (
    Slopes,
    add_tile,
    alibi,
    first_seen,
    load_rows,
    score_factors,
    stages_of,
    stride_of_pages,
    tile_layout,
)
from .tuned import tuned
from .variant import FEW_BYTES, GRID, NO_TENSOR_CORES, Plan, Variant, pages_shaped, shaped

TILE_ROWS = 128  # (token, query head) pairs per tile of a prompt; 16 suits steps with draft tokens only
_QUERY_BYTES = 32 << 10  # of the queries of a program
_LOOPING_DIM = 128  # wider heads leave no registers for a loop over tiles
_FIELDS = tl.constexpr(4)  # per tile, see `extend_work`
_LOG2_E = tl.constexpr(1.4426950408889634)


def tile_tokens(group: int, tile_rows: int = TILE_ROWS) -> int:
    """Tokens per tile. group: query heads per kv head; of latent attention: all heads."""
    return max(1, tile_rows // group)


def max_tiles(tokens: int, rows: int, per_tile: int) -> int:
    """The most tiles that `tokens` tokens of `rows` rows can make."""
    return (tokens + rows * (per_tile - 1)) // per_tile


def extend_work(query_lens: NDArray[np.int64], context_lens: NDArray[np.int64], per_tile: int) -> NDArray[np.int32]:
    """The list of a step's tiles, [1 + tiles, 4]. First their number and zeros; then of each its row, first token
    (counted over all rows), number of tokens, tokens of the row from the first one on.

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
    order = np.argsort(-keys, kind="stable")
    work = np.zeros((1 + len(row), _FIELDS.value), np.int32)
    work[0, 0] = len(row)
    work[1:] = np.stack((row, token, number, remaining), axis=1)[order]
    return work


def extend_attention(
    out: Tensor,
    query: Tensor,
    k_pages: Tensor,
    v_pages: Tensor | None,
    block_table: Tensor,
    context_lens: Tensor,
    work: Tensor,
    *,
    scale: float,
    num_programs: int,
    query_rope: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    slopes: Slopes | None = None,
    is_chunked: bool = False,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    tile_rows: int = TILE_ROWS,
    per_tile: int | None = None,
) -> None:
    """Attention of the tokens that `work` lists; the output of other tokens is not written.

    out, query: [tokens, heads, head_dim]; context_lens: [rows] int32, 0: the row's outputs are zeros; work: [1 + tiles,
    4] int32 on the device, which begins with an `extend_work` of tiles of `per_tile` tokens; None:
    `tile_tokens(heads // kv_heads, tile_rows)`. What follows the list is not read, so its length can always be that of
    `max_tiles`. num_programs: the most programs to start; the result does not depend on it. With `window` w a token
    sees itself and the w - 1 tokens before it, or if is_chunked those since a multiple of w. Other arguments as in
    `decode_attention`.
    """
    layout = tile_layout(query, query_rope, k_pages, v_pages)
    group = layout["GROUP"]
    assert work.is_contiguous()
    assert query.stride()[1:] == (query.shape[2], 1) and out.stride()[1:] == (layout["VALUE_DIM"], 1), out.stride()
    options = _options(layout, tile_rows, query.element_size())
    parts = triton.cdiv((per_tile or tile_tokens(group, tile_rows)) * group, options["TILE_ROWS"])
    score_scale, cap = score_factors(scale * k_scale, softcap)
    units = max(1, (work.shape[0] - 1) * layout["KV_HEADS"] * parts)
    loops = max(layout["DIM_BLOCK"], layout["VALUE_BLOCK"]) <= _LOOPING_DIM and query_rope is None
    _extend_kernel[(min(num_programs, units) if loops else units,)](
        out,
        query,
        query_rope,
        k_pages,
        v_pages,
        block_table,
        context_lens,
        work,
        sinks,
        None if slopes is None else slopes.values,
        0.0 if slopes is None else slopes.scale * _LOG2_E.value,
        score_scale,
        cap,
        v_scale,
        window,
        out.stride(0),
        query.stride(0),
        None if query_rope is None else query_rope.stride(0),
        block_table.stride(0),
        stride_of_pages(k_pages, v_pages),
        PARTS=parts,
        IS_CHUNKED=is_chunked,
        ROUNDS_SLOPES=slopes is not None and slopes.is_rounded,
        LOOPS=loops,
        **layout,
        **options,
    )


def _options(layout: dict[str, int], tile_rows: int, itemsize: int) -> dict[str, int]:
    """The compile-time options. Those of 16-bit types are tuned."""
    head_dim = layout["HEAD_DIM"]
    rows = min(tile_rows, max(16, _QUERY_BYTES // (max(layout["DIM_BLOCK"], layout["VALUE_BLOCK"]) * itemsize)))
    num_warps = 8 if rows >= 128 else 4  # 128 rows and four warps do not fit into registers
    rule = {"TILE_ROWS": rows, "num_warps": num_warps, "num_stages": stages_of(rows, layout, itemsize)}
    return tuned("extend_attention", head_dim, tile_rows, **rule) if itemsize == 2 else rule


@triton.jit
def _add_tiles(
    acc,
    most,
    total,
    q,
    q_rope,
    position,
    k_pages,
    v_pages,
    kv_head,
    table,
    first,
    last,
    stop,
    window,
    slope,
    slope_scale,
    score_scale,
    cap,
    page_stride,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    IS_CHUNKED: tl.constexpr,
    ROUNDS_SLOPES: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Adds the tiles [first, last) of a row's keys to a running softmax (see `softmax_step`). position: [rows] of the
    queries; stop: end of the keys that any of them sees. Without MASKED every query sees all keys of these tiles."""
    TILES: tl.constexpr = BLOCK_SIZE // KEYS  # of a page
    # One iteration ahead, see `_decode_kernel`.
    next_block = tl.load(table + first // TILES, mask=first < last, other=0)
    for tile in range(first, last):
        page = next_block.to(tl.int64) * page_stride
        at = page + tile % TILES * (KEYS * WIDTH)
        v_at = page + tile % TILES * (KEYS * VALUE_DIM)
        next_block = tl.load(table + (tile + 1) // TILES, mask=tile + 1 < last, other=0)
        written = None
        seen = None
        bias = None
        key = tile * KEYS + tl.arange(0, KEYS)
        if MASKED:
            written = key < stop
            seen = key[None, :] <= position[:, None]
            if window is not None:
                seen = seen & (key[None, :] >= first_seen(position[:, None], window, IS_CHUNKED))
        if slope is not None:
            bias = alibi(slope, slope_scale, key[None, :], position[:, None], ROUNDS_SLOPES)
        acc, most, total = add_tile(
            acc, most, total, q, q_rope, k_pages, v_pages, at, v_at, kv_head * BLOCK_SIZE, written, seen, bias,
            score_scale, cap, HEAD_DIM, DIM_BLOCK, VALUE_DIM, VALUE_BLOCK, ROPE_DIM, WIDTH, KEYS,
        )  # fmt: skip
    return acc, most, total


@triton.jit
def _add_unit(
    unit,
    end_unit,
    out,
    query,
    query_rope,
    k_pages,
    v_pages,
    block_table,
    context_lens,
    work,
    sinks,
    slopes,
    slope_scale,
    score_scale,
    cap,
    v_scale,
    window,
    out_stride,
    query_stride,
    rope_stride,
    table_stride,
    page_stride,
    PARTS: tl.constexpr,
    IS_CHUNKED: tl.constexpr,
    ROUNDS_SLOPES: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    ROPE_STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Attention of one part of a kv head of a tile; of none, if there is no such unit. The parts of a tile are
    neighbours, and so are their pages in memory."""
    part = unit % PARTS
    kv_head = unit // PARTS % KV_HEADS
    fields = work + (1 + unit // (PARTS * KV_HEADS)) * _FIELDS
    number = tl.load(fields + 2, mask=unit < end_unit, other=0)
    before = part * TILE_ROWS // GROUP  # tokens of the tile before the first of this part
    if before < number:
        row = tl.load(fields)
        token = tl.load(fields + 1)
        context = tl.load(context_lens + row)
        begin = context - tl.load(fields + 3)  # position of the tile's first token
        start = begin + before
        stop = begin + tl.minimum(number, (part * TILE_ROWS + TILE_ROWS - 1) // GROUP + 1)

        pair = part * TILE_ROWS + tl.arange(0, TILE_ROWS)
        of_tile = pair // GROUP
        head = kv_head * GROUP + pair % GROUP
        real = of_tile < number
        position = begin + of_tile
        first_token = token.to(tl.int64)  # the tokens of a step may have more than 2^31 numbers, those of a tile do not
        of_token = of_tile[:, None]
        in_query = of_token * query_stride + head[:, None] * HEAD_DIM
        queries = query + first_token * query_stride
        q = load_rows(queries, in_query, tl.arange(0, DIM_BLOCK)[None, :], real, HEAD_DIM, DIM_BLOCK)
        if k_pages.dtype.element_ty.is_fp8():
            q = q.to(tl.float16)
        q_rope = None
        if query_rope is not None:
            in_rope = head[:, None] * ROPE_STRIDE + tl.arange(0, ROPE_DIM)[None, :]
            in_rope += of_token * rope_stride
            ropes = query_rope + first_token * rope_stride
            q_rope = tl.load(ropes + in_rope, mask=real[:, None], other=0.0).to(q.dtype)
        slope = None
        if slopes is not None:
            slope = tl.load(slopes + head, mask=real, other=0.0)[:, None]
        most = tl.full([TILE_ROWS], -1e30, tl.float32)
        total = tl.zeros([TILE_ROWS], tl.float32)
        if sinks is not None:
            most = tl.load(sinks + head, mask=real, other=0.0) * _LOG2_E
            total = tl.full([TILE_ROWS], 1.0, tl.float32)
        acc = tl.zeros([TILE_ROWS, VALUE_BLOCK], tl.float32)

        table = block_table + row * table_stride
        # The tiles before `full` end at or before the first token: all tokens see them, unless a window ends
        # earlier. The maxima with 0 are for rows whose context is 0.
        full = tl.maximum(start + 1, 0) // KEYS
        last = tl.cdiv(tl.maximum(stop, 0), KEYS)
        opened = 0
        if window is not None:
            first = first_seen(start, window, IS_CHUNKED) // KEYS
            opened = tl.minimum(tl.cdiv(first_seen(stop - 1, window, IS_CHUNKED), KEYS), full)
            acc, most, total = _add_tiles(
                acc, most, total, q, q_rope, position, k_pages, v_pages, kv_head, table, first, opened, stop,
                window, slope, slope_scale, score_scale, cap, page_stride, HEAD_DIM, DIM_BLOCK, VALUE_DIM, VALUE_BLOCK,
                ROPE_DIM, WIDTH, BLOCK_SIZE, KEYS, IS_CHUNKED, ROUNDS_SLOPES, True,
            )  # fmt: skip
        acc, most, total = _add_tiles(
            acc, most, total, q, q_rope, position, k_pages, v_pages, kv_head, table, opened, full, stop, window,
            slope, slope_scale, score_scale, cap, page_stride, HEAD_DIM, DIM_BLOCK, VALUE_DIM, VALUE_BLOCK,
            ROPE_DIM, WIDTH, BLOCK_SIZE, KEYS, IS_CHUNKED, ROUNDS_SLOPES, False,
        )  # fmt: skip
        acc, most, total = _add_tiles(
            acc, most, total, q, q_rope, position, k_pages, v_pages, kv_head, table, full, last, stop, window,
            slope, slope_scale, score_scale, cap, page_stride, HEAD_DIM, DIM_BLOCK, VALUE_DIM, VALUE_BLOCK,
            ROPE_DIM, WIDTH, BLOCK_SIZE, KEYS, IS_CHUNKED, ROUNDS_SLOPES, True,
        )  # fmt: skip

        result = acc * (v_scale / tl.where(total > 0, total, 1.0))[:, None]
        value_dims = tl.arange(0, VALUE_BLOCK)[None, :]
        stored = real[:, None]
        if VALUE_BLOCK > VALUE_DIM:
            stored = stored & (value_dims < VALUE_DIM)
        target = out + first_token * out_stride + (of_token * out_stride + head[:, None] * VALUE_DIM + value_dims)
        tl.store(target, result.to(out.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=["window", "table_stride"])
def _extend_kernel(
    out,
    query,
    query_rope,
    k_pages,
    v_pages,
    block_table,
    context_lens,
    work,
    sinks,
    slopes,
    slope_scale,
    score_scale,
    cap,
    v_scale,
    window,
    out_stride,
    query_stride,
    rope_stride,
    table_stride,
    page_stride,
    PARTS: tl.constexpr,
    IS_CHUNKED: tl.constexpr,
    ROUNDS_SLOPES: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    ROPE_STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    LOOPS: tl.constexpr,
):
    """LOOPS: the programs take the units in turn, and in every second round in reverse order, so the program that got
    the longest of a round gets the shortest of the next. Otherwise there is a program for each unit that may be."""
    programs = tl.num_programs(0)
    end_unit = tl.load(work) * (KV_HEADS * PARTS)
    if LOOPS:
        for begin in range(0, end_unit, programs):
            unit = begin + tl.program_id(0)
            if (begin // programs) % 2 == 1:
                unit = begin + programs - 1 - tl.program_id(0)
            _add_unit(
                unit, end_unit, out, query, query_rope, k_pages, v_pages, block_table, context_lens, work, sinks,
                slopes, slope_scale, score_scale, cap, v_scale, window, out_stride, query_stride, rope_stride,
                table_stride, page_stride, PARTS, IS_CHUNKED, ROUNDS_SLOPES, KV_HEADS, GROUP, TILE_ROWS, HEAD_DIM,
                DIM_BLOCK, VALUE_DIM, VALUE_BLOCK, ROPE_DIM, ROPE_STRIDE, WIDTH, BLOCK_SIZE, KEYS,
            )  # fmt: skip
    else:
        _add_unit(
            tl.program_id(0), end_unit, out, query, query_rope, k_pages, v_pages, block_table, context_lens, work,
            sinks, slopes, slope_scale, score_scale, cap, v_scale, window, out_stride, query_stride, rope_stride,
            table_stride, page_stride, PARTS, IS_CHUNKED, ROUNDS_SLOPES, KV_HEADS, GROUP, TILE_ROWS, HEAD_DIM,
            DIM_BLOCK, VALUE_DIM, VALUE_BLOCK, ROPE_DIM, ROPE_STRIDE, WIDTH, BLOCK_SIZE, KEYS,
        )  # fmt: skip


def _variant(
    name: str,
    heads: int,
    kv_heads: int,
    *,
    head_dim: int = 128,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    fp8: bool = False,
    tile_rows: int = TILE_ROWS,
    window: int | None = None,
    softcap: float | None = None,
    has_slopes: bool = False,
    is_chunked: bool = False,
    architectures: tuple[int, ...] = (),
) -> Variant:
    """value_dim: None: head_dim."""
    of_values = value_dim or head_dim
    pages = pages_shaped(4, kv_heads, 64, head_dim, of_values, dtype=torch.float8_e4m3fn if fp8 else dtype)
    layout = tile_layout(shaped(1, heads, head_dim, dtype=dtype), None, *pages)

    def launch(rows: int) -> None:
        query = shaped(rows, heads, head_dim, dtype=dtype)
        extend_attention(
            shaped(rows, heads, of_values, dtype=dtype),
            query,
            *pages,
            shaped(rows, 33, dtype=torch.int32),
            shaped(rows, dtype=torch.int32),
            shaped(1 + rows, _FIELDS.value, dtype=torch.int32),
            scale=head_dim**-0.5,
            num_programs=132,
            window=window,
            softcap=softcap,
            slopes=Slopes(shaped(heads, dtype=torch.float32)) if has_slopes else None,
            is_chunked=is_chunked,
            tile_rows=tile_rows,
        )

    opcodes = ("HMMA", "LDGSTS")
    wide = _options(layout, tile_rows, dtype.itemsize)["TILE_ROWS"] >= 64  # the fewest rows that wgmma takes
    plan = Plan(
        sm_80=opcodes,
        sm_90=("HGMMA", "LDGSTS") if wide else opcodes,
        buffers=_options(layout, tile_rows, dtype.itemsize)["num_stages"] - 1,
        stack=FEW_BYTES,
    )
    return Variant(
        name=f"extend_attention {name} {heads}/{kv_heads} D{head_dim}" + (f"/{value_dim}" if value_dim else ""),
        launch=launch,
        plans={"_extend_kernel": plan if dtype.itemsize == 2 else NO_TENSOR_CORES},
        architecture=89 if fp8 else 80,
        architectures=architectures,
    )


VARIANTS: tuple[Variant, ...] = (
    _variant("bf16", 16, 8),  # Qwen3-0.6B
    _variant("bf16", 32, 8),  # Llama-3.1-8B
    _variant("bf16", 32, 4),  # Qwen3-30B-A3B
    _variant("bf16 draft", 32, 8, tile_rows=16),
    _variant("fp8", 32, 8, fp8=True),
    _variant("bf16 window softcap", 32, 8, window=4096, softcap=30.0),
    _variant("bf16", 16, 2, head_dim=256, architectures=GRID),  # Qwen3-Next, Qwen3.5
    _variant("bf16 draft", 16, 2, head_dim=256, tile_rows=16, architectures=GRID),
    _variant("fp16", 16, 2, head_dim=256, dtype=torch.float16, architectures=GRID),
    _variant("fp32", 16, 2, head_dim=256, dtype=torch.float32, architectures=GRID),
    _variant("fp32", 16, 8, dtype=torch.float32, architectures=GRID),
    _variant("bf16", 32, 32, head_dim=80),  # StableLM 3B
    _variant("bf16", 32, 8, head_dim=96),  # Phi 3
    _variant("bf16", 64, 4, head_dim=192, value_dim=128, architectures=GRID),  # MiMo V2 Flash
    _variant("bf16", 8, 1, head_dim=512, architectures=GRID),  # Gemma 4
    _variant("bf16 ALiBi", 32, 32, has_slopes=True),  # MPT
    _variant("bf16 chunk", 40, 8, window=8192, is_chunked=True),  # Llama 4
)
