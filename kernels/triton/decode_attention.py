"""Decode attention over the paged KV cache, for rows with one new token each: split along the keys, one launch a layer.

A row's keys are cut into chunks of positions, and some adjacent chunks make a run. Where the cuts are depends on the
row's own length only. The bits of a result follow from these cuts: a softmax runs through the keys of a chunk, the
chunks of a run are folded in their order, and then the runs. So a row has the same bits in any batch and every run.

`plan_decode` lists the pieces of work, once a step and on the device: the host need not know the rows' lengths. A piece
is a run, or a chunk where runs would leave programs idle: in the last round, which is the only one if there are few
rows. `decode_attention` starts a fixed number of programs, which take the (piece, heads) pairs in turn. The program
that finishes the last piece of a row folds all of them. Both ways give the same bits, because the same function folds
the same numbers in the same order.

Pages are head-major, [pages, kv_heads, block_size, head_dim], any distance apart, and already hold this step's keys and
values. A tile is a page, or the part of one that fits into shared memory, so its keys are contiguous. In latent
attention the values are the first numbers of the keys, so a tile is read once for both. `extend_attention.py` shares
the arithmetic of a tile.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .dependent_launch import await_previous, dependent
from .tuned import tuned
from .variant import FEW_BYTES, GRID, NO_TENSOR_CORES, Plan, Variant, pages_shaped, shaped

CHUNK = 64  # positions; doubled until a row has at most as many runs as `cuts_of` says
TILE_ROWS = 16  # query heads of a program: the fewest rows that tensor cores take
DOUBLINGS = tl.constexpr(8)
NUM_WARPS, NUM_STAGES = 4, 3
_TILE_BYTES = 32 << 10  # of the keys and values of a tile
_SHARED_BYTES = 96 << 10  # of a program: GPUs have at least 99 KiB, and the compiler adds a little
_WIDE_HEADS = 256  # numbers; partial results of wider heads take much memory
_FIELDS = tl.constexpr(6)  # of a piece, see `DecodeWorkspace`
_COUNT_SHIFT = tl.constexpr(16)
_LOG2_E = tl.constexpr(math.log2(math.e))


def cuts_of(head_dim: int) -> tuple[int, int]:
    """(chunks of a run, most runs of a row). Their product bounds how many programs share one long row; the number of
    runs bounds the memory for the partial results of many long rows."""
    return (4, 64) if head_dim <= _WIDE_HEADS else (16, 8)


@dataclass(frozen=True, kw_only=True)
class DecodeWorkspace:
    """Scratch memory of the layers that share a window, which run one after another; from `workspace_decode`."""

    # [max pieces, 6] int32: row, first position, end, index of the piece in its row + 2^16 · pieces of the row,
    # positions of a chunk, and whether it is the last piece of its run
    items: Tensor
    num_items: Tensor  # [1] int32
    partials: Tensor  # [max pieces, heads, head_dim] float32: Σ weight · value of a piece
    sums: Tensor  # [max pieces, 2, heads] float32: log2 of the weight that counts as 1, and Σ weight
    arrivals: Tensor  # [rows, programs of a piece] int32: finished pieces; zero between launches
    window: int | None
    is_chunked: bool
    chunk: int
    num_programs: int

    @property
    def units(self) -> int:
        """Programs of a piece."""
        return self.arrivals.shape[1]

    @property
    def nbytes(self) -> int:
        kept = (self.items, self.num_items, self.partials, self.sums, self.arrivals)
        return sum(tensor.nbytes for tensor in kept)


class Slopes(NamedTuple):
    """ALiBi: `values` · (key position - query position) · scale is added to the scores of a head. values: [heads]
    float32. is_rounded: the sum is values · key position · scale, and the first product is rounded to bfloat16, as are
    the key positions."""

    values: Tensor
    scale: float = 1.0
    is_rounded: bool = False


def workspace_decode(
    *,
    rows: int,
    max_context: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    num_programs: int,
    window: int | None = None,
    is_chunked: bool = False,
    chunk: int | None = None,
    device: torch.device | str,
) -> DecodeWorkspace:
    """For up to `rows` rows of up to `max_context` positions. head_dim: of the values. num_programs: as many as the
    device holds at once, three per multiprocessor with head_dim 128; no bit of a result depends on it. chunk: a
    power of two, at least the positions of a tile; None: the tuned size. is_chunked: rows see the
    positions since a multiple of `window`, instead of the last `window` ones."""
    chunk = chunk or tuned("decode_attention", head_dim, chunk=CHUNK)["chunk"]
    chunks, most_runs = cuts_of(head_dim)
    assert max_context <= (chunk * chunks << DOUBLINGS.value) * most_runs, (max_context, chunk)
    span = max_context if window is None else min(window, max_context)
    units = kv_heads * -(-(heads // kv_heads) // TILE_ROWS)
    max_runs = rows * min(most_runs, -(-span // (chunk * chunks)) + 1)  # one more: a window may begin inside a run
    in_chunks = min(max_runs, _round_of(num_programs, units))
    max_items = max_runs + (chunks - 1) * in_chunks
    assert max_items * heads * head_dim < 2**31, f"{max_items} pieces of {heads} heads overflow 32-bit offsets"
    return DecodeWorkspace(
        items=torch.empty((max_items, _FIELDS.value), dtype=torch.int32, device=device),
        num_items=torch.zeros(1, dtype=torch.int32, device=device),
        partials=torch.empty((max_items, heads, head_dim), device=device),
        sums=torch.empty((max_items, 2, heads), device=device),
        arrivals=torch.zeros((rows, units), dtype=torch.int32, device=device),
        window=window,
        is_chunked=is_chunked,
        chunk=chunk,
        num_programs=num_programs,
    )


def _round_of(num_programs: int, units: int) -> int:
    """Pieces that the programs compute at once."""
    return max(1, num_programs // units)


def plan_decode(context_lens: Tensor, workspace: DecodeWorkspace) -> None:
    """Lists the pieces of a step's rows in `workspace`. context_lens: [rows] int32, keys of each row, its new token
    included; rows of 0 keys have no pieces."""
    (rows,), max_rows = context_lens.shape, workspace.arrivals.shape[0]
    assert rows <= max_rows, (rows, max_rows)
    chunks, most_runs = cuts_of(workspace.partials.shape[2])
    _plan_kernel[(1,)](
        workspace.items,
        workspace.num_items,
        context_lens,
        rows,
        workspace.window,
        _round_of(workspace.num_programs, workspace.units),
        IS_CHUNKED=workspace.is_chunked,
        CHUNK=workspace.chunk,
        CHUNKS=chunks,
        MAX_RUNS=most_runs,
        ROWS=triton.next_power_of_2(max_rows),
        num_warps=NUM_WARPS,
    )


def decode_attention(
    out: Tensor,
    query: Tensor,
    k_pages: Tensor,
    v_pages: Tensor | None,
    block_table: Tensor,
    workspace: DecodeWorkspace,
    *,
    scale: float,
    query_rope: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    slopes: Slopes | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Attention of the rows that `workspace` was planned for. The outputs of rows with a context of 0 are not written.

    out, query: [rows, heads, head_dim], rows of any stride; k_pages, v_pages: [pages, kv_heads, block_size, head_dim],
    pages of one stride, of the queries' type or float8_e4m3fn, which `k_scale` and `v_scale` multiply; block_table:
    [rows, max blocks] int32, with any values beyond a row's own blocks. sinks: [heads] float32, a score that takes part
    in the softmax and has no value. slopes: of ALiBi. Values may have another dimension than keys.

    Without v_pages the values are the first head_dim numbers of the keys. The numbers after them are multiplied with
    query_rope, [rows, heads, rope_dim], of any strides; k_pages may be wider than both.
    """
    layout = tile_layout(query, query_rope, k_pages, v_pages)
    tiles = workspace.chunk // layout["KEYS"]
    assert tiles * layout["KEYS"] == workspace.chunk and tiles.bit_count() == 1, (workspace.chunk, layout)
    assert query.stride()[1:] == (query.shape[2], 1) and out.stride()[1:] == (layout["VALUE_DIM"], 1), out.stride()
    score_scale, cap = score_factors(scale * k_scale, softcap)
    _decode_kernel[(workspace.num_programs,)](
        out,
        query,
        query_rope,
        k_pages,
        v_pages,
        block_table,
        workspace.items,
        workspace.num_items,
        workspace.partials,
        workspace.sums,
        workspace.arrivals,
        sinks,
        None if slopes is None else slopes.values,
        0.0 if slopes is None else slopes.scale * _LOG2_E.value,
        score_scale,
        cap,
        v_scale,
        out.stride(0),
        query.stride(0),
        None if query_rope is None else query_rope.stride(0),
        block_table.stride(0),
        stride_of_pages(k_pages, v_pages),
        TILE_ROWS=TILE_ROWS,
        ROUNDS_SLOPES=slopes is not None and slopes.is_rounded,
        **layout,
        **_options(layout, query.element_size()),
    )


def stride_of_pages(k_pages: Tensor, v_pages: Tensor | None) -> int:
    """Numbers from a page to the next. k_pages, v_pages: [pages, kv_heads, block_size, head_dim or value_dim]."""
    if v_pages is not None:
        assert k_pages.shape[:3] == v_pages.shape[:3] and k_pages.stride(0) == v_pages.stride(0), (
            k_pages.shape, v_pages.shape, k_pages.stride(), v_pages.stride(),
        )  # fmt: skip
        assert v_pages[0].is_contiguous(), v_pages.stride()
    assert k_pages[0].is_contiguous(), k_pages.stride()
    return k_pages.stride(0)


def tile_layout(query: Tensor, query_rope: Tensor | None, k_pages: Tensor, v_pages: Tensor | None) -> dict[str, int]:
    """The compile-time sizes of a tile, of `_decode_kernel` and `_extend_kernel`. KEYS follows from the sizes and the
    type alone, because the bits of a result follow from it."""
    _, heads, head_dim = query.shape
    _, kv_heads, block_size, width = k_pages.shape
    rope_dim, rope_stride = 0, 0
    if query_rope is not None:
        assert query_rope.dtype == query.dtype and query_rope.stride(2) == 1, (query_rope.dtype, query_rope.stride())
        rope_dim, rope_stride = query_rope.shape[2], query_rope.stride(1)
    assert (v_pages is None) == (query_rope is not None), (
        "keys that hold the values have further numbers, and no others"
    )
    assert width >= head_dim + rope_dim, (k_pages.shape, query.shape, rope_dim)
    value_dim = head_dim if v_pages is None else v_pages.shape[3]
    dim_block, value_block = (max(16, triton.next_power_of_2(dim)) for dim in (head_dim, value_dim))
    assert v_pages is not None or dim_block == head_dim, f"latents of {head_dim} numbers"
    fitting = _TILE_BYTES // ((dim_block + (0 if v_pages is None else value_block)) * query.element_size())
    return {
        "KV_HEADS": kv_heads,
        "GROUP": heads // kv_heads,
        "HEAD_DIM": head_dim,
        "DIM_BLOCK": dim_block,
        "VALUE_DIM": value_dim,
        "VALUE_BLOCK": value_block,
        "ROPE_DIM": rope_dim,
        "ROPE_STRIDE": rope_stride,
        "WIDTH": width,
        "BLOCK_SIZE": block_size,
        "KEYS": min(block_size, max(16, 1 << (fitting.bit_length() - 1))),
    }


def stages_of(rows: int, layout: dict[str, int], itemsize: int) -> int:
    """Pipelining stages whose buffers fit into any GPU's shared memory, beside the queries of `rows` rows."""
    dim, value_dim, rope_dim, keys = (layout[name] for name in ("DIM_BLOCK", "VALUE_BLOCK", "ROPE_DIM", "KEYS"))
    buffer = keys * (dim + (rope_dim or value_dim))  # keys, and values if they are not part of the keys
    weights = rows * keys if rows < value_dim or itemsize > 2 else 0  # otherwise they stay in registers
    needed = ((NUM_STAGES - 1) * buffer + rows * (dim + rope_dim) + weights) * itemsize
    return NUM_STAGES if needed <= _SHARED_BYTES else NUM_STAGES - 1


def _options(layout: dict[str, int], itemsize: int) -> dict[str, int]:
    """The compile-time options. Those of 16-bit types are tuned."""
    warps = NUM_WARPS if layout["VALUE_BLOCK"] <= 256 else 2 * NUM_WARPS  # the result is spread over their registers
    rule = {"num_warps": warps, "num_stages": stages_of(TILE_ROWS, layout, itemsize)}
    if layout["HEAD_DIM"] <= 128:  # three programs fit into the registers of a multiprocessor
        rule["maxnreg"] = 168
    return tuned("decode_attention", layout["HEAD_DIM"], **rule) if itemsize == 2 else rule


def score_factors(scale: float, softcap: float | None) -> tuple[float, float | None]:
    """(score_scale, cap) of `tile_scores`. Scores are in units of log2(e), so that exp2 replaces exp.

    With a softcap c they are c · tanh(x / c) = c · (2 / (1 + exp(-2x / c)) - 1): Triton has no tanh without libdevice.
    """
    if softcap is None:
        return scale * _LOG2_E.value, None
    return -2 * scale / softcap * _LOG2_E.value, softcap * _LOG2_E.value


@triton.jit
def first_seen(position, window, IS_CHUNKED: tl.constexpr):
    """The first position that a query sees: window - 1 before its own, or with IS_CHUNKED a multiple of window."""
    return tl.maximum(position // window * window if IS_CHUNKED else position + 1 - window, 0)


@triton.jit(do_not_specialize=["rows", "window", "round_size"])
def _plan_kernel(
    items,
    num_items,
    context_lens,
    rows,
    window,
    round_size,
    IS_CHUNKED: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    MAX_RUNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One program. round_size: pieces that the programs of `_decode_kernel` compute at once."""
    row = tl.arange(0, ROWS)
    context = tl.load(context_lens + row, mask=row < rows, other=0)
    start = tl.zeros([ROWS], tl.int32)
    if window is not None:
        start = first_seen(context - 1, window, IS_CHUNKED)
    size = tl.full([ROWS], CHUNK, tl.int32)
    for _ in tl.static_range(DOUBLINGS):
        run = size * CHUNKS
        size = tl.where(tl.cdiv(context, run) - start // run > MAX_RUNS, size * 2, size)
    run = size * CHUNKS
    first_run = start // run
    num_runs = tl.where(context > 0, tl.cdiv(context, run) - first_run, 0)
    end_run = tl.cumsum(num_runs, 0)
    total = tl.max(end_run, 0)
    # Complete rounds take whole runs. The runs of the last round, which are the last in the list, are cut.
    whole = total // round_size * round_size
    num_whole = num_runs - tl.minimum(num_runs, tl.maximum(end_run - whole, 0))
    first_chunk = tl.maximum((first_run + num_whole) * CHUNKS, start // size)
    num_chunks = tl.where(num_whole < num_runs, tl.cdiv(context, size) - first_chunk, 0)
    count = num_whole + num_chunks
    end = tl.cumsum(count, 0)
    tl.store(num_items, tl.max(end, 0))
    for number in range(tl.max(count, 0)):
        item = items + (end - count + number) * _FIELDS
        chunk = first_chunk + (number - num_whole)
        is_whole = number < num_whole
        begin = tl.where(is_whole, (first_run + number) * run, chunk * size)
        length = tl.where(is_whole, run, size)
        is_last = is_whole | ((chunk + 1) % CHUNKS == 0) | (number + 1 == count)
        real = number < count
        tl.store(item, row, mask=real)
        tl.store(item + 1, tl.maximum(begin, start), mask=real)
        tl.store(item + 2, tl.minimum(begin + length, context), mask=real)
        tl.store(item + 3, number + (count << _COUNT_SHIFT), mask=real)
        tl.store(item + 4, size, mask=real)
        tl.store(item + 5, is_last.to(tl.int32), mask=real)


@triton.jit
def alibi(slope, slope_scale, key, query, IS_ROUNDED: tl.constexpr):
    """What is added to the scores. slope: [rows, 1]; key: [1, keys]; query: positions [rows, 1], or one."""
    if IS_ROUNDED:
        found = (slope * key.to(tl.float32).to(tl.bfloat16).to(tl.float32)).to(tl.bfloat16).to(tl.float32)
    else:
        found = slope * (key - query).to(tl.float32)
    return found * slope_scale


@triton.jit
def tile_scores(q, q_rope, k, k_rope, score_scale, cap):
    """Scores in units of log2(e). q: [rows, dim]; k: [keys, dim]; q_rope, k_rope: further numbers of both, or None;
    score_scale and cap: see `score_factors`."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if q_rope is not None:
        scores = tl.dot(q_rope, tl.trans(k_rope), scores, input_precision="ieee")
    scores = scores * score_scale
    if cap is not None:
        scores = cap * (2.0 / (1.0 + tl.exp2(scores)) - 1.0)
    return scores


@triton.jit
def softmax_step(acc, most, total, scores, v):
    """Adds a tile to a running softmax: acc [rows, dim] = Σ 2^(score - most) · v, total [rows] the sum of the weights.

    `most` starts at -1e30: a row may see no key of its first tiles, and -inf - -inf is NaN. Masked keys have a score of
    -inf and change no bit of the sums.
    """
    grown = tl.maximum(most, tl.max(scores, 1))
    weights = tl.exp2(scores - grown[:, None])
    shrink = tl.exp2(most - grown)
    total = total * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return acc, grown, total


@triton.jit
def load_tile(pages, at, inside, written, dtype: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Numbers of a tile. inside: [keys, BLOCK] offsets from `at`; written: [keys] which keys to load; None: all. Of the
    BLOCK columns the first DIM are loaded, and the others are 0."""
    columns = tl.arange(0, BLOCK)[None, :]
    if written is None:
        if BLOCK == DIM:
            numbers = tl.load(pages + (at + inside))
        else:
            numbers = tl.load(pages + (at + inside), mask=columns < DIM, other=0.0)
    else:
        if BLOCK == DIM:
            numbers = tl.load(pages + (at + inside), mask=written[:, None], other=0.0)
        else:
            numbers = tl.load(pages + (at + inside), mask=written[:, None] & (columns < DIM), other=0.0)
    return numbers.to(dtype)


@triton.jit
def load_rows(numbers, at, columns, real, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """[rows, BLOCK], of which the first DIM columns are loaded. at: [rows, 1]; columns: [1, BLOCK]."""
    if BLOCK == DIM:
        found = tl.load(numbers + at + columns, mask=real[:, None], other=0.0)
    else:
        found = tl.load(numbers + at + columns, mask=real[:, None] & (columns < DIM), other=0.0)
    return found


@triton.jit
def add_tile(
    acc,
    most,
    total,
    q,
    q_rope,
    k_pages,
    v_pages,
    at,
    v_at,
    first_line,
    written,
    seen,
    bias,
    score_scale,
    cap,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Adds a tile to a running softmax (see `softmax_step`). at, v_at: where keys and values of its page begin, and
    those of its part of the page; first_line: the first key of the head in a page. bias: added to the scores, or None.

    written: [KEYS], keys that any query sees; others are not loaded, since a NaN in a stale page would spoil the sums
    even with a weight of 0. seen: [rows or 1, KEYS]. Both None: every query sees all keys."""
    lines = first_line + tl.arange(0, KEYS)[:, None]
    line = lines * WIDTH
    inside = line + tl.arange(0, DIM_BLOCK)[None, :]
    k = load_tile(k_pages, at, inside, written, q.dtype, HEAD_DIM, DIM_BLOCK)
    k_rope = None
    if q_rope is not None:
        in_rope = line + HEAD_DIM + tl.arange(0, ROPE_DIM)[None, :]
        k_rope = load_tile(k_pages, at, in_rope, written, q.dtype, ROPE_DIM, ROPE_DIM)
    scores = tile_scores(q, q_rope, k, k_rope, score_scale, cap)
    if bias is not None:
        scores += bias
    if seen is not None:
        scores = tl.where(seen, scores, float("-inf"))
    v = k
    if v_pages is not None:
        inside = lines * VALUE_DIM + tl.arange(0, VALUE_BLOCK)[None, :]
        v = load_tile(v_pages, v_at, inside, written, q.dtype, VALUE_DIM, VALUE_BLOCK)
    return softmax_step(acc, most, total, scores, v)


@triton.jit
def fold(acc, most, total, of_acc, of_most, of_total):
    """Adds a softmax over other keys, of_*, to one: see `softmax_step` for the three numbers. The products and sums are
    written out, so that they have the same bits in every kernel that folds."""
    grown = tl.maximum(most, of_most)
    kept = tl.exp2(most - grown)
    share = tl.exp2(of_most - grown)
    total = tl.fma(total, kept, of_total * share)
    acc = tl.fma(acc, tl.broadcast_to(kept[:, None], acc.shape), of_acc * share[:, None])
    return acc, grown, total


@dependent(do_not_specialize=["table_stride"])
def _decode_kernel(
    out,
    query,
    query_rope,
    k_pages,
    v_pages,
    block_table,
    items,
    num_items,
    partials,
    sums,
    arrivals,
    sinks,
    slopes,
    slope_scale,
    score_scale,
    cap,
    v_scale,
    out_stride,
    query_stride,
    rope_stride,
    table_stride,
    page_stride,
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
    ROUNDS_SLOPES: tl.constexpr,
):
    """The rows of a tile are query heads of one kv head, in some tiles if there are more than TILE_ROWS."""
    await_previous()
    HEADS: tl.constexpr = KV_HEADS * GROUP
    HEAD_TILES: tl.constexpr = (GROUP + TILE_ROWS - 1) // TILE_ROWS
    UNITS: tl.constexpr = KV_HEADS * HEAD_TILES
    TILES: tl.constexpr = BLOCK_SIZE // KEYS  # of a page
    member = tl.arange(0, TILE_ROWS)
    dims = tl.arange(0, DIM_BLOCK)[None, :]
    value_dims = tl.arange(0, VALUE_BLOCK)[None, :]
    offsets = tl.arange(0, KEYS)
    programs = tl.num_programs(0)
    end_work = tl.load(num_items) * UNITS
    fields = items + tl.program_id(0) // UNITS * _FIELDS
    more = tl.program_id(0) < end_work
    next_row = tl.load(fields, mask=more, other=0)
    next_start = tl.load(fields + 1, mask=more, other=0)
    next_stop = tl.load(fields + 2, mask=more, other=0)
    for work in range(tl.program_id(0), end_work, programs):
        item = work // UNITS
        unit = work % UNITS
        kv_head = unit // HEAD_TILES
        of_group = unit % HEAD_TILES * TILE_ROWS + member
        real = of_group < GROUP
        row = next_row
        start = next_start
        stop = next_stop
        index = tl.load(items + item * _FIELDS + 3)
        in_chunk = tl.load(items + item * _FIELDS + 4) // KEYS - 1  # tiles of a chunk are a power of two
        # The next piece is known before this one is computed.
        fields = items + (work + programs) // UNITS * _FIELDS
        more = work + programs < end_work
        next_row = tl.load(fields, mask=more, other=0)
        next_start = tl.load(fields + 1, mask=more, other=0)
        next_stop = tl.load(fields + 2, mask=more, other=0)

        head = kv_head * GROUP + of_group
        q = load_rows(query + row * query_stride, head[:, None] * HEAD_DIM, dims, real, HEAD_DIM, DIM_BLOCK)
        in_row = head[:, None] * VALUE_DIM + value_dims
        stored = real[:, None]
        if VALUE_BLOCK > VALUE_DIM:
            stored = stored & (value_dims < VALUE_DIM)
        slope = None
        if slopes is not None:
            slope = tl.load(slopes + head, mask=real, other=0.0)[:, None]
            index = tl.load(items + item * _FIELDS + 3)
            last_piece = item - (index & 0xFFFF) + (index >> _COUNT_SHIFT) - 1
            context = tl.load(items + last_piece * _FIELDS + 2)
        if k_pages.dtype.element_ty.is_fp8():
            q = q.to(tl.float16)  # every e4m3 is an fp16, and one instruction converts two
        q_rope = None
        if query_rope is not None:
            in_rope = head[:, None] * ROPE_STRIDE + tl.arange(0, ROPE_DIM)[None, :]
            q_rope = tl.load(query_rope + row * rope_stride + in_rope, mask=real[:, None], other=0.0).to(q.dtype)
        # Of the chunk, and of the chunks before it in the piece.
        most = tl.full([TILE_ROWS], -1e30, tl.float32)
        total = tl.zeros([TILE_ROWS], tl.float32)
        if sinks is not None:
            sink = tl.load(sinks + head, mask=real, other=0.0) * _LOG2_E
            is_first = (index & 0xFFFF) == 0
            most = tl.where(is_first, sink, most)
            total = tl.where(is_first, 1.0, total)
        acc = tl.zeros([TILE_ROWS, VALUE_BLOCK], tl.float32)
        run_most = tl.full([TILE_ROWS], -1e30, tl.float32)
        run_total = tl.zeros([TILE_ROWS], tl.float32)
        run_acc = tl.zeros([TILE_ROWS, VALUE_BLOCK], tl.float32)

        table = block_table + row * table_stride
        first = start // KEYS
        last = tl.cdiv(stop, KEYS)
        # The next page's id is loaded one iteration ahead: a load of keys that depends on a load of the same one is
        # not pipelined.
        next_block = tl.load(table + first // TILES, mask=first < last, other=0)
        for tile in range(first, last):
            page = next_block.to(tl.int64) * page_stride
            at = page + tile % TILES * (KEYS * WIDTH)
            v_at = page + tile % TILES * (KEYS * VALUE_DIM)
            next_block = tl.load(table + (tile + 1) // TILES, mask=tile + 1 < last, other=0)
            position = tile * KEYS + offsets
            seen = (position >= start) & (position < stop)
            bias = None
            if slope is not None:
                bias = alibi(slope, slope_scale, position[None, :], context - 1, ROUNDS_SLOPES)
            acc, most, total = add_tile(
                acc, most, total, q, q_rope, k_pages, v_pages, at, v_at, kv_head * BLOCK_SIZE, seen, seen[None, :],
                bias, score_scale, cap, HEAD_DIM, DIM_BLOCK, VALUE_DIM, VALUE_BLOCK, ROPE_DIM, WIDTH, KEYS,
            )  # fmt: skip
            if (((tile + 1) & in_chunk) == 0) | (tile + 1 == last):
                run_acc, run_most, run_total = fold(run_acc, run_most, run_total, acc, most, total)
                acc = tl.zeros([TILE_ROWS, VALUE_BLOCK], tl.float32)
                most = tl.full([TILE_ROWS], -1e30, tl.float32)
                total = tl.zeros([TILE_ROWS], tl.float32)

        number = index & 0xFFFF
        count = index >> _COUNT_SHIFT
        target = out + row * out_stride + in_row
        if count == 1:
            result = run_acc * (v_scale / run_total)[:, None]
            tl.store(target, result.to(out.dtype.element_ty), mask=stored)
        else:
            tl.store(partials + item * (HEADS * VALUE_DIM) + in_row, run_acc, mask=stored)
            tl.store(sums + item * (2 * HEADS) + head, run_most, mask=real)
            tl.store(sums + item * (2 * HEADS) + HEADS + head, run_total, mask=real)
            tl.debug_barrier()  # all threads store before one of them counts the arrival
            arrival = arrivals + row * UNITS + unit
            if tl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu") == count - 1:
                run_most = tl.full([TILE_ROWS], -1e30, tl.float32)
                run_total = tl.zeros([TILE_ROWS], tl.float32)
                run_acc = tl.zeros([TILE_ROWS, VALUE_BLOCK], tl.float32)
                most = run_most
                total = run_total
                acc = run_acc
                for other in tl.range(item - number, item - number + count, num_stages=1):
                    # Bypasses the L1, which does not see the stores of other multiprocessors.
                    of_most = tl.load(sums + other * (2 * HEADS) + head, mask=real, other=0.0, cache_modifier=".cg")
                    of_total = tl.load(
                        sums + other * (2 * HEADS) + HEADS + head, mask=real, other=0.0, cache_modifier=".cg"
                    )
                    partial = tl.load(
                        partials + other * (HEADS * VALUE_DIM) + in_row, mask=stored, other=0.0,
                        cache_modifier=".cg",
                    )  # fmt: skip
                    run_acc, run_most, run_total = fold(run_acc, run_most, run_total, partial, of_most, of_total)
                    if tl.load(items + other * _FIELDS + 5) != 0:
                        acc, most, total = fold(acc, most, total, run_acc, run_most, run_total)
                        run_most = tl.full([TILE_ROWS], -1e30, tl.float32)
                        run_total = tl.zeros([TILE_ROWS], tl.float32)
                        run_acc = tl.zeros([TILE_ROWS, VALUE_BLOCK], tl.float32)
                result = acc * (v_scale / total)[:, None]
                tl.store(target, result.to(out.dtype.element_ty), mask=stored)
                tl.store(arrival, 0)


def _workspace(heads: int, kv_heads: int, head_dim: int = 128, window: int | None = None) -> DecodeWorkspace:
    """256 rows: the default number of concurrent requests. 396 programs: three on each multiprocessor of an H100."""
    return workspace_decode(
        rows=256, max_context=32768, heads=heads, kv_heads=kv_heads, head_dim=head_dim, num_programs=396, window=window,
        device="meta",
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
    softcap: float | None = None,
    sinks: bool = False,
    has_slopes: bool = False,
    architectures: tuple[int, ...] = (),
) -> Variant:
    """value_dim: None: head_dim."""
    of_values = value_dim or head_dim
    pages = pages_shaped(4, kv_heads, 64, head_dim, of_values, dtype=torch.float8_e4m3fn if fp8 else dtype)
    layout = tile_layout(shaped(1, heads, head_dim, dtype=dtype), None, *pages)

    def launch(rows: int) -> None:
        query = shaped(rows, heads, head_dim, dtype=dtype)
        decode_attention(
            shaped(rows, heads, of_values, dtype=dtype),
            query,
            *pages,
            shaped(rows, 33, dtype=torch.int32),
            _workspace(heads, kv_heads, of_values),
            scale=head_dim**-0.5,
            softcap=softcap,
            sinks=shaped(heads, dtype=torch.float32) if sinks else None,
            slopes=Slopes(shaped(heads, dtype=torch.float32)) if has_slopes else None,
        )

    opcodes = ("HMMA", "LDGSTS")
    buffers = _options(layout, dtype.itemsize)["num_stages"] - 1
    plan = (
        Plan(sm_80=opcodes, sm_90=opcodes, buffers=buffers, stack=FEW_BYTES) if dtype.itemsize == 2 else NO_TENSOR_CORES
    )
    return Variant(
        name=f"decode_attention {name} {heads}/{kv_heads} D{head_dim}" + (f"/{value_dim}" if value_dim else ""),
        launch=launch,
        plans={"_decode_kernel": plan},
        architecture=89 if fp8 else 80,
        architectures=architectures,
    )


def _plan_variant(window: int | None) -> Variant:
    def launch(rows: int) -> None:
        plan_decode(shaped(rows, dtype=torch.int32), _workspace(16, 8, window=window))

    return Variant(name="plan_decode" + " window" * bool(window), launch=launch, plans={"_plan_kernel": Plan()})


VARIANTS: tuple[Variant, ...] = (
    _variant("bf16", 16, 8),  # Qwen3-0.6B
    _variant("bf16", 32, 8),  # Llama-3.1-8B
    _variant("bf16", 32, 4),  # Qwen3-30B-A3B
    _variant("fp8", 32, 8, fp8=True),
    _variant("bf16 softcap sinks", 32, 8, softcap=30.0, sinks=True),
    _variant("bf16", 16, 2, head_dim=256, architectures=GRID),  # Qwen3-Next, Qwen3.5
    _variant("fp16", 16, 2, head_dim=256, dtype=torch.float16, architectures=GRID),
    _variant("fp32", 16, 2, head_dim=256, dtype=torch.float32, architectures=GRID),
    _variant("fp32", 16, 8, dtype=torch.float32, architectures=GRID),
    _variant("bf16", 32, 32, head_dim=80),  # StableLM 3B
    _variant("bf16", 32, 8, head_dim=96),  # Phi 3
    _variant("bf16", 64, 4, head_dim=192, value_dim=128, architectures=GRID),  # MiMo V2 Flash
    _variant("bf16", 8, 1, head_dim=512, architectures=GRID),  # Gemma 4
    _variant("bf16 ALiBi", 32, 32, has_slopes=True),  # MPT
    _plan_variant(None),
    _plan_variant(4096),
)
