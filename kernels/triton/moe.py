"""Mixture of experts: each token goes through the `top_k` experts with the best router scores.

No launch waits for the host. `_route_kernel` picks the experts of a token. `_align_kernel` sorts the (token, choice)
pairs, called assignments, by expert, and pads each expert's last block of rows; if there are many, `_count_kernel`
counts them before, part by part, so that each is read twice however many experts there are. `_gate_up_kernel` and
`_product_kernel` multiply a block of rows with its expert's weights; grids have the worst-case size, and programs
without a block return at once. `_sum_kernel` adds a token's results in the order of its choices. There are no atomics,
assignments of an expert keep their order, and each output row is the product of one input row, so a token's bits depend
only on the rows of a block, which follow from the number of tokens of the launch.

Blocks of one expert are adjacent, and programs that differ only in the block start one after another: the weights of an
expert are read once, and its other blocks find them in the cache.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .activations import activation, glu_of
from .order import REMOVED, to_ordinal
from .tuned import tuned
from .variant import WIDE, Plan, Variant, shaped

_ROWS = (16, 64, 128)  # of a block; 16 is the least that tensor cores take
_PAIRS = 1024  # assignments of a part, which one program counts and places
_STEP = 128  # assignments that it places at a time: it compares each with each
_PARTS = 16  # whose counts a program adds at a time
_SUMMED = 1024  # columns per program of `_sum_kernel`


@dataclass(frozen=True, kw_only=True)
class MoeWorkspace:
    """Scratch memory between the launches, from `workspace_moe`; shared by the layers, which run one after another."""

    weights: Tensor  # [tokens, top_k] float32
    experts: Tensor  # [tokens, top_k] int32; -1 for padding tokens; from num_experts on: experts without weights
    counts: Tensor  # [max parts, experts, padded] int32, assignments of a part by expert
    assignments: Tensor  # [max rows] int32, token · top_k + choice, by expert; tokens · top_k marks padding rows
    block_experts: Tensor  # [max blocks] int32
    num_blocks: Tensor  # [1] int32
    gated: Tensor  # [tokens · top_k, inter], of the activations' type
    parts: Tensor  # [tokens · top_k, hidden], of the activations' type: weighted results, to be added


def workspace_moe(
    *,
    max_tokens: int,
    num_experts: int,
    top_k: int,
    hidden: int,
    inter: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> MoeWorkspace:
    """For up to `max_tokens` tokens a launch."""
    num_assigned = max_tokens * top_k

    def buffer(shape: tuple[int, ...], of: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=of, device=device)

    return MoeWorkspace(
        weights=buffer((max_tokens, top_k), torch.float32),
        experts=buffer((max_tokens, top_k), torch.int32),
        counts=buffer((-(-num_assigned // _PAIRS), triton.next_power_of_2(num_experts)), torch.int32),
        assignments=buffer((max(_max_blocks(num_assigned, num_experts, rows) * rows for rows in _ROWS),), torch.int32),
        block_experts=buffer((_max_blocks(num_assigned, num_experts, _ROWS[0]),), torch.int32),
        num_blocks=buffer((1,), torch.int32),
        gated=buffer((num_assigned, inter), dtype),
        parts=buffer((num_assigned, hidden), dtype),
    )


def _max_blocks(num_assigned: int, num_experts: int, rows: int) -> int:
    """The most blocks of `rows` assignments: every expert that has any may waste part of its last block."""
    return min(num_assigned, num_assigned // rows + num_experts)


class _Tiles(NamedTuple):
    """The tiles of a product."""

    rows: int
    columns: int
    num_warps: int
    num_stages: int


def _tiles(num_assigned: int, num_experts: int) -> _Tiles:
    """About as many rows per block as an expert has on average, so that little padding is needed."""
    if num_assigned <= 16 * num_experts:
        rule = _Tiles(16, 128, 4, 4)
    elif num_assigned <= 256 * num_experts:
        rule = _Tiles(64, 128, 4, 3)
    else:
        rule = _Tiles(128, 128, 8, 3)
    return _Tiles(**tuned("moe", rule.rows, **rule._asdict()))


def _depth(width: int) -> int:
    """Columns of the activations per step of a product. The last step may have fewer."""
    return 64 if width % 64 == 0 or width > 1024 else 32


@triton.jit
def _route_kernel(
    weights,
    experts,
    logits,
    logits_stride,
    num_tokens,
    places,
    positions,
    NUM_EXPERTS: tl.constexpr,
    LANES: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
):
    """places: slot, turn and turns of each expert, if other ranks have some of them."""
    token = tl.program_id(0)
    lane = tl.arange(0, LANES)
    x = tl.load(logits + token * logits_stride + lane, mask=lane < NUM_EXPERTS, other=float("-inf")).to(tl.float32)
    weight = tl.exp(x - tl.max(x, axis=0))
    # Ordinals give even a row of NaN valid experts; its weights are NaN.
    ordinals = tl.where(lane < NUM_EXPERTS, to_ordinal(x), REMOVED)
    choice = tl.full((LANES,), -1, tl.int32)
    for i in range(TOP_K):
        best = tl.argmax(ordinals, axis=0)
        choice = tl.where(lane == best, i, choice)
        ordinals = tl.where(lane == best, REMOVED, ordinals)
    if RENORMALIZE:
        weight = weight / tl.sum(tl.where(choice >= 0, weight, 0.0), axis=0)
    else:
        weight = weight / tl.sum(weight, axis=0)
    at = token * TOP_K + choice
    tl.store(weights + at, weight, mask=choice >= 0)
    slot = lane
    if places is not None:
        place = places + 3 * lane
        turns = tl.load(place + 2, mask=choice >= 0, other=1)
        is_own = tl.load(positions + token) % turns == tl.load(place + 1, mask=choice >= 0, other=0)
        slot = tl.where(is_own, tl.load(place, mask=choice >= 0, other=-1), -1)
    tl.store(experts + at, tl.where(token < tl.load(num_tokens), slot, -1), mask=choice >= 0)


@triton.jit(do_not_specialize=["num_assigned"])
def _count_kernel(counts, experts, num_assigned, NUM_EXPERTS: tl.constexpr, LANES: tl.constexpr, PAIRS: tl.constexpr):
    """A part: how many of its assignments each expert has."""
    part = tl.program_id(0)
    pair = part * PAIRS + tl.arange(0, PAIRS)
    ids = tl.load(experts + pair, mask=pair < num_assigned, other=-1)
    found = tl.histogram(ids, LANES, mask=(ids >= 0) & (ids < NUM_EXPERTS))
    tl.store(counts + part * LANES + tl.arange(0, LANES), found)


@triton.jit(do_not_specialize=["num_assigned"])
def _align_kernel(
    assignments,
    block_experts,
    num_blocks,
    experts,
    counts,
    load,
    num_assigned,
    NUM_EXPERTS: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    STEP: tl.constexpr,
    PARTS: tl.constexpr,
):
    """The first programs place the assignments of a part each, the others name the blocks of an expert each and pad its
    last one. Without counts there is one part, and the programs of experts place their own assignments in it. load:
    [experts], to which each expert's assignments are added."""
    program = tl.program_id(0)
    lane = tl.arange(0, LANES)
    total = tl.zeros((LANES,), tl.int32)
    before = tl.zeros((LANES,), tl.int32)  # assignments of earlier parts
    pair = tl.arange(0, PAIRS)
    num_parts = 0
    if counts is None:
        ids = tl.load(experts + pair, mask=pair < num_assigned, other=-1)
        total = tl.histogram(ids, LANES, mask=(ids >= 0) & (ids < NUM_EXPERTS))
    else:
        num_parts = tl.cdiv(num_assigned, PAIRS)
        for first in range(0, num_parts, PARTS):
            part = (first + tl.arange(0, PARTS))[:, None]
            found = tl.load(counts + part * LANES + lane[None, :], mask=part < num_parts, other=0)
            total += tl.sum(found, axis=0)
            before += tl.sum(tl.where(part < program, found, 0), axis=0)
    blocks = (total + (ROWS - 1)) // ROWS
    first_row = (tl.cumsum(blocks, axis=0) - blocks) * ROWS

    if program >= num_parts:
        expert = program - num_parts
        own_first = tl.sum(tl.where(lane == expert, first_row, 0), axis=0)
        own_blocks = tl.sum(tl.where(lane == expert, blocks, 0), axis=0)
        own_total = tl.sum(tl.where(lane == expert, total, 0), axis=0)
        if expert == 0:
            tl.store(num_blocks, tl.sum(blocks, axis=0))
        if load is not None:
            tl.store(load + expert, tl.load(load + expert) + own_total)
        for first in range(0, own_blocks, PAIRS):
            tl.store(block_experts + own_first // ROWS + first + pair, expert, mask=first + pair < own_blocks)
        rest = own_total + tl.arange(0, ROWS)
        tl.store(assignments + own_first + rest, num_assigned, mask=rest < own_blocks * ROWS)
        if counts is None:
            own = (ids == expert).to(tl.int32)
            tl.store(assignments + own_first + tl.cumsum(own, axis=0) - 1, pair, mask=own > 0)
    elif counts is not None:
        place = first_row + before  # of the next assignment of each expert
        number = tl.arange(0, STEP)
        is_before = number[None, :] < number[:, None]
        for first in range(program * PAIRS, (program + 1) * PAIRS, STEP):
            ids = tl.load(experts + first + number, mask=first + number < num_assigned, other=-1)
            real = (ids >= 0) & (ids < NUM_EXPERTS)
            rank = tl.sum(((ids[:, None] == ids[None, :]) & is_before).to(tl.int32), axis=1)
            at = tl.gather(place, tl.where(real, ids, 0), 0) + rank
            tl.store(assignments + at, first + number, mask=real)
            place += tl.histogram(ids, LANES, mask=real)


@triton.jit(do_not_specialize=["num_assigned"])
def _gate_up_kernel(
    out,
    x,
    x_stride,
    gate_up,
    bias,
    assignments,
    block_experts,
    num_blocks,
    num_assigned,
    hidden,
    inter,
    limit,
    sharpness,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    IS_EVEN: tl.constexpr,
    ACT: tl.constexpr,
):
    """out[assignment] = act(gate) · up of its token. A program computes the same columns of gate and up. bias:
    [experts, 2 · inter]; IS_EVEN: hidden is a multiple of DEPTH."""
    block = tl.program_id(0)
    if block >= tl.load(num_blocks):
        return
    dtype = x.dtype.element_ty
    rows = tl.load(assignments + block * ROWS + tl.arange(0, ROWS))
    real = rows < num_assigned
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < inter
    steps = tl.arange(0, DEPTH)
    expert = tl.load(block_experts + block).to(tl.int64)
    x_at = x + (rows // TOP_K).to(tl.int64)[:, None] * x_stride + steps[None, :]
    gate_at = gate_up + expert * 2 * inter * hidden + columns[None, :] * hidden + steps[:, None]
    up_at = gate_at + inter * hidden
    gate = tl.zeros((ROWS, COLUMNS), tl.float32)
    up = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, hidden, DEPTH):
        left = (first + steps < hidden) | IS_EVEN  # then no mask over the depth is left: x | True is True
        used = inside[None, :] & left[:, None]
        values = tl.load(x_at, mask=real[:, None] & left[None, :], other=0.0)
        gate = tl.dot(values, tl.load(gate_at, mask=used, other=0.0), gate, input_precision="ieee")
        up = tl.dot(values, tl.load(up_at, mask=used, other=0.0), up, input_precision="ieee")
        x_at += DEPTH
        gate_at += DEPTH
        up_at += DEPTH
    if bias is not None:
        of_gate = bias + expert * 2 * inter + columns
        gate += tl.load(of_gate, mask=inside, other=0.0).to(tl.float32)[None, :]
        up += tl.load(of_gate + inter, mask=inside, other=0.0).to(tl.float32)[None, :]
    result = glu_of(gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32), limit, sharpness, ACT, dtype)
    out_at = out + rows.to(tl.int64)[:, None] * inter + columns[None, :]
    tl.store(out_at, result, mask=real[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["num_assigned"])
def _product_kernel(
    out,
    x,
    x_stride,
    weight,
    bias,
    scales,
    assignments,
    block_experts,
    num_blocks,
    num_assigned,
    n,
    k,
    PER: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    IS_EVEN: tl.constexpr,
    ACT: tl.constexpr,
):
    """out[assignment] = [act of] (x[assignment // PER] · its expert's weightᵀ [+ bias]) [· its scale]. weight:
    [experts, n, k]; bias: [experts, n]; IS_EVEN: k is a multiple of DEPTH."""
    block = tl.program_id(0)
    if block >= tl.load(num_blocks):
        return
    rows = tl.load(assignments + block * ROWS + tl.arange(0, ROWS))
    real = rows < num_assigned
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < n
    steps = tl.arange(0, DEPTH)
    expert = tl.load(block_experts + block).to(tl.int64)
    x_at = x + (rows // PER).to(tl.int64)[:, None] * x_stride + steps[None, :]
    weight_at = weight + expert * n * k + columns[None, :] * k + steps[:, None]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, k, DEPTH):
        left = (first + steps < k) | IS_EVEN
        values = tl.load(x_at, mask=real[:, None] & left[None, :], other=0.0)
        used = inside[None, :] & left[:, None]
        total = tl.dot(values, tl.load(weight_at, mask=used, other=0.0), total, input_precision="ieee")
        x_at += DEPTH
        weight_at += DEPTH
    if bias is not None:
        total += tl.load(bias + expert * n + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    if ACT is not None:
        total = activation(total.to(out.dtype.element_ty).to(tl.float32), ACT)
    if scales is not None:
        total *= tl.load(scales + rows, mask=real, other=0.0)[:, None]
    out_at = out + rows.to(tl.int64)[:, None] * n + columns[None, :]
    tl.store(out_at, total.to(out.dtype.element_ty), mask=real[:, None] & inside[None, :])


@triton.jit
def _sum_kernel(
    out, out_stride, parts, experts, x, x_stride, scales, zero_scale, hidden,
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < hidden
    dtype = out.dtype.element_ty
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(TOP_K):
        at = token * TOP_K + i
        expert = tl.load(experts + at)
        computed = (expert >= 0) & (expert < NUM_EXPERTS)
        total += tl.load(parts + at * hidden + columns, mask=inside & computed, other=0.0).to(tl.float32)
        if zero_scale is not None:
            is_zero = expert >= NUM_EXPERTS
            same = tl.load(x + token * x_stride + columns, mask=inside & is_zero, other=0.0).to(tl.float32)
            same = (same * zero_scale).to(dtype).to(tl.float32)
            total += same * tl.load(scales + at, mask=is_zero, other=0.0)
    tl.store(out + token * out_stride + columns, total.to(dtype), mask=inside)


def route(
    router_logits: Tensor, num_tokens: Tensor, workspace: MoeWorkspace, *, top_k: int, renormalize: bool,
    places: Tensor | None = None, positions: Tensor | None = None,
) -> None:  # fmt: skip
    """Fills `workspace.weights` and `.experts`: the softmax over all experts at the `top_k` best, best first, equal
    scores by index; with `renormalize` divided by their sum.

    router_logits: [tokens, experts], rows of any stride. num_tokens: [1] int32; tokens beyond it are padding, which no
    expert computes. places: [experts, 3] int32, if ranks share out the experts: the slot of each among this rank's, or
    -1; and turn and turns of the ranks that have the same expert, by positions, [tokens] int32.
    """
    tokens, num_experts = router_logits.shape
    assert top_k <= num_experts and router_logits.stride(1) == 1, (top_k, router_logits.shape)
    _route_kernel[(tokens,)](
        workspace.weights,
        workspace.experts,
        router_logits,
        router_logits.stride(0),
        num_tokens,
        places,
        positions,
        NUM_EXPERTS=num_experts,
        LANES=triton.next_power_of_2(num_experts),
        TOP_K=top_k,
        RENORMALIZE=renormalize,
        num_warps=1,
    )


def align(
    workspace: MoeWorkspace, *, num_assigned: int, num_experts: int, num_all: int = 0, load: Tensor | None = None
) -> None:
    """Fills `workspace.assignments`, `.block_experts` and `.num_blocks` from `.experts`, and adds to `load`, [experts]
    int64, how many assignments each has. num_all: experts of all ranks, if there are more than `num_experts`."""
    lanes, num_parts = triton.next_power_of_2(num_experts), triton.cdiv(num_assigned, _PAIRS)
    counts = None
    if num_parts > 1:
        counts = workspace.counts
        _count_kernel[(num_parts,)](
            counts, workspace.experts, num_assigned, NUM_EXPERTS=num_experts, LANES=lanes, PAIRS=_PAIRS, num_warps=4
        )
    _align_kernel[((num_parts if num_parts > 1 else 0) + num_experts,)](
        workspace.assignments,
        workspace.block_experts,
        workspace.num_blocks,
        workspace.experts,
        counts,
        load,
        num_assigned,
        NUM_EXPERTS=num_experts,
        LANES=lanes,
        ROWS=_tiles(num_assigned, num_all or num_experts).rows,
        PAIRS=_PAIRS,
        STEP=_STEP,
        PARTS=_PARTS,
        num_warps=4,
    )


def product(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scales: Tensor | None,
    workspace: MoeWorkspace,
    *,
    num_assigned: int,
    per: int,
    act: str | None = None,
    num_all: int = 0,
) -> None:
    """out[assignment] = [act of] (x[assignment // per] · its expert's weightᵀ [+ bias]) [· its scale], of the
    assignments that `align` has sorted. out: [≥ num_assigned, n]; weight: [experts, n, k]; bias: [experts, n]; scales:
    [num_assigned] float32."""
    num_experts, n, k = weight.shape
    tiles = _tiles(num_assigned, num_all or num_experts)
    _product_kernel[(_max_blocks(num_assigned, num_experts, tiles.rows), triton.cdiv(n, tiles.columns))](
        out,
        x,
        x.stride(0),
        weight,
        bias,
        scales,
        workspace.assignments,
        workspace.block_experts,
        workspace.num_blocks,
        num_assigned,
        n,
        k,
        PER=per,
        COLUMNS=tiles.columns,
        ACT=act,
        **_depths(k),
        **_options(tiles),
    )


def _depths(width: int) -> dict[str, int | bool]:
    depth = _depth(width)
    return {"DEPTH": depth, "IS_EVEN": width % depth == 0}


def _options(tiles: _Tiles) -> dict[str, int]:
    return {"ROWS": tiles.rows, "num_warps": tiles.num_warps, "num_stages": tiles.num_stages}


def moe(
    out: Tensor,
    x: Tensor,
    router_logits: Tensor,
    gate_up: Tensor,
    down: Tensor,
    num_tokens: Tensor,
    workspace: MoeWorkspace,
    *,
    top_k: int,
    renormalize: bool,
) -> None:
    """`route`, then `experts`: out[token] = the sum over its experts of weight · down(silu(gate(x)) · up(x)); 0 for
    padding tokens."""
    assert x.shape[0] <= workspace.experts.shape[0] and top_k == workspace.experts.shape[1], (x.shape, top_k)
    if x.shape[0] == 0:
        return
    route(router_logits, num_tokens, workspace, top_k=top_k, renormalize=renormalize)
    experts(out, x, gate_up, down, workspace)


def experts(
    out: Tensor,
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    workspace: MoeWorkspace,
    *,
    act: str = "silu",
    has_gate: bool = True,
    limit: float = 0.0,
    sharpness: float = 1.702,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    is_weighted: bool = True,
    zero_scale: float | None = None,
    num_all: int = 0,
    load: Tensor | None = None,
) -> None:
    """out[token] = the sum over its experts of weight · down(act(gate(x)) · up(x)), or of weight · down(act(up(x))).
    `workspace.experts` of these tokens says which, and `workspace.weights` has the weights, unless they are all 1
    because not is_weighted. zero_scale: experts from num_experts on have no weights and return x · zero_scale. Experts
    of -1 are those of other ranks, which with these are num_all. load: see `align`.

    out: [tokens, hidden]; x: [tokens, hidden], or [tokens · top_k, hidden] if the input of each expert is another; rows
    of any stride; gate_up: [experts, 2 · inter, hidden] contiguous, the gates first, or without gates [experts, inter,
    hidden]; down: [experts, hidden, inter] contiguous; biases: [experts, rows]. Weights and activations have one type.
    """
    (tokens, hidden), top_k = out.shape, workspace.experts.shape[1]
    num_experts, _, inter = down.shape
    num_assigned = tokens * top_k
    per = num_assigned // max(1, x.shape[0])
    width = (2 if has_gate else 1) * inter
    assert x.shape in ((tokens, hidden), (num_assigned, hidden)) and tokens <= workspace.experts.shape[0], x.shape
    assert gate_up.shape == (num_experts, width, hidden) and down.shape[1] == hidden, (gate_up.shape, down.shape)
    assert gate_up.is_contiguous() and down.is_contiguous() and x.stride(1) == out.stride(1) == 1
    assert zero_scale is None or (is_weighted and len(x) == tokens), "experts without weights have a token's input"
    if tokens == 0:
        return
    align(workspace, num_assigned=num_assigned, num_experts=num_experts, num_all=num_all, load=load)
    inner = workspace.gated
    if has_gate:
        tiles = _tiles(num_assigned, num_all or num_experts)
        _gate_up_kernel[(_max_blocks(num_assigned, num_experts, tiles.rows), triton.cdiv(width, tiles.columns))](
            inner,
            x,
            x.stride(0),
            gate_up,
            gate_up_bias,
            workspace.assignments,
            workspace.block_experts,
            workspace.num_blocks,
            num_assigned,
            hidden,
            inter,
            float(limit),
            float(sharpness),
            TOP_K=per,
            COLUMNS=tiles.columns // 2,
            ACT=act,
            **_depths(hidden),
            **_options(tiles),
        )
    else:
        product(
            inner, x, gate_up, gate_up_bias, None, workspace, num_assigned=num_assigned, per=per, act=act,
            num_all=num_all,
        )  # fmt: skip
    scales = workspace.weights if is_weighted else None
    product(
        workspace.parts, inner, down, down_bias, scales, workspace, num_assigned=num_assigned, per=1, num_all=num_all
    )
    _sum_kernel[(tokens, triton.cdiv(hidden, _SUMMED))](
        out,
        out.stride(0),
        workspace.parts,
        workspace.experts,
        x,
        x.stride(0),
        scales,
        None if zero_scale is None else float(zero_scale),
        hidden,
        NUM_EXPERTS=num_experts,
        TOP_K=top_k,
        BLOCK=_SUMMED,
        num_warps=4,
    )


def _variant(model: str, num_experts: int, top_k: int, hidden: int, inter: int, tokens: tuple[int, int]) -> Variant:
    def launch(rows: int) -> None:
        workspace = workspace_moe(
            max_tokens=rows,
            num_experts=num_experts,
            top_k=top_k,
            hidden=hidden,
            inter=inter,
            dtype=torch.bfloat16,
            device="meta",
        )
        x, num_tokens = shaped(rows, hidden), shaped(1, dtype=torch.int32)
        gate_up, down = shaped(num_experts, 2 * inter, hidden), shaped(num_experts, hidden, inter)
        logits = shaped(rows, num_experts)
        moe(x, x, logits, gate_up, down, num_tokens, workspace, top_k=top_k, renormalize=True)

    block = _tiles(tokens[0] * top_k, num_experts).rows
    opcodes = ("HMMA", "LDGSTS")
    product = Plan(sm_80=opcodes, sm_90=opcodes if block < 64 else ("HGMMA", "LDGSTS"))
    return Variant(
        name=f"moe bf16 {model} {block}" + (" parts" if tokens[0] * top_k > _PAIRS else ""),
        launch=launch,
        rows=tokens,
        plans={
            "_route_kernel": Plan(),
            **({"_count_kernel": Plan()} if tokens[0] * top_k > _PAIRS else {}),
            "_align_kernel": Plan(),
            "_gate_up_kernel": product,
            "_product_kernel": product,
            "_sum_kernel": WIDE,
        },
    )


def _experts_variant(model: str, num_experts: int, top_k: int, hidden: int, inter: int, tokens: int) -> Variant:
    """Experts with biases and bounds."""

    def launch(rows: int) -> None:
        workspace = workspace_moe(
            max_tokens=rows, num_experts=num_experts, top_k=top_k, hidden=hidden, inter=inter, dtype=torch.bfloat16,
            device="meta",
        )  # fmt: skip
        gate_up, down = shaped(num_experts, 2 * inter, hidden), shaped(num_experts, hidden, inter)
        x, biases = shaped(rows, hidden), (shaped(num_experts, 2 * inter), shaped(num_experts, hidden))
        experts(
            x, x, gate_up, down, workspace, act="swiglu_clamped", limit=7.0, gate_up_bias=biases[0],
            down_bias=biases[1],
        )  # fmt: skip

    plan = Plan(sm_80=("HMMA", "LDGSTS"), sm_90=("HMMA", "LDGSTS"))
    return Variant(
        name=f"moe bf16 {model} swiglu_clamped",
        launch=launch,
        rows=(1, tokens),
        plans={
            "_align_kernel": Plan(), "_gate_up_kernel": plan, "_product_kernel": plan, "_sum_kernel": WIDE,
        },
    )  # fmt: skip


def _product_variant(model: str, num_experts: int, top_k: int, hidden: int, n: int, tokens: int, act: str) -> Variant:
    """The first product of experts without gates."""

    def launch(rows: int) -> None:
        workspace = workspace_moe(
            max_tokens=rows, num_experts=num_experts, top_k=top_k, hidden=hidden, inter=n, dtype=torch.bfloat16,
            device="meta",
        )  # fmt: skip
        x, weight = shaped(rows, hidden), shaped(num_experts, n, hidden)
        product(workspace.gated, x, weight, None, None, workspace, num_assigned=rows * top_k, per=top_k, act=act)

    plan = Plan(sm_80=("HMMA", "LDGSTS"), sm_90=("HMMA", "LDGSTS"))
    return Variant(
        name=f"moe bf16 {model} {act} product", launch=launch, rows=(1, tokens), plans={"_product_kernel": plan}
    )


# Numbers of tokens for blocks of 16, 64 and 128 rows, and for one part of assignments or more.
VARIANTS = (
    *(
        _variant("Qwen3-30B-A3B", 128, 8, 2048, 768, tokens)
        for tokens in ((1, 128), (129, 256), (257, 4096), (4097, 8192))
    ),
    *(
        _variant("Mixtral-8x7B", 8, 2, 4096, 14336, tokens)
        for tokens in ((1, 64), (65, 512), (513, 1024), (1025, 8192))
    ),
    _experts_variant("gpt-oss-20b", 32, 4, 2880, 2880, 128),
    _product_variant("Nemotron-3-Nano", 128, 6, 2688, 1856, 128, "relu2"),
)
