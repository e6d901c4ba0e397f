"""Mixture of experts: each token goes through the `top_k` experts with the best router scores.

There are five launches, and none waits for the host. `_route_kernel` picks the experts of a token. `_align_kernel`
sorts the (token, choice) pairs, called assignments, by expert, and pads each expert's last block of rows.
`_gate_up_kernel` and `_product_kernel` multiply a block of rows with its expert's weights; grids have the worst-case
size, and programs without a block return at once. `_sum_kernel` adds a token's results in the order of its choices.
There are no atomics and each output row is the product of one input row, so a token's bits depend only on the rows of a
block, which follow from the number of tokens of the launch.

Blocks of one expert are adjacent, and programs that differ only in the block start one after another: the weights of an
expert are read once, and its other blocks find them in the cache.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .order import REMOVED, to_ordinal
from .silu_mul import gated
from .tuned import tuned
from .variant import WIDE, Plan, Variant, shaped

_ROWS = (16, 64, 128)  # of a block; 16 is the least that tensor cores take
_PAIRS = 1024  # assignments that `_align_kernel` reads at a time
_SUMMED = 1024  # columns per program of `_sum_kernel`


@dataclass(frozen=True, kw_only=True)
class MoeWorkspace:
    """Scratch memory between the launches, from `workspace_moe`; shared by the layers, which run one after another."""

    weights: Tensor  # [tokens, top_k] float32
    experts: Tensor  # [tokens, top_k] int32; -1 for padding tokens
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
    """Columns of the activations per step of a product."""
    assert width % 32 == 0, f"{width} columns, which is no multiple of 32"
    return 64 if width % 64 == 0 else 32


@triton.jit
def _route_kernel(
    weights,
    experts,
    logits,
    logits_stride,
    num_tokens,
    NUM_EXPERTS: tl.constexpr,
    LANES: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
):
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
    tl.store(experts + at, tl.where(token < tl.load(num_tokens), lane, -1), mask=choice >= 0)


@triton.jit(do_not_specialize=["num_assigned"])
def _align_kernel(
    assignments,
    block_experts,
    num_blocks,
    experts,
    num_assigned,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """One program per expert: each counts all experts' assignments and places its own, in their order."""
    expert = tl.program_id(0)
    pair = tl.arange(0, PAIRS)
    counts = tl.zeros((LANES,), tl.int32)
    for first in range(0, num_assigned, PAIRS):
        ids = tl.load(experts + first + pair, mask=first + pair < num_assigned, other=-1)
        counts += tl.histogram(ids, LANES, mask=ids >= 0)
    blocks = (counts + (ROWS - 1)) // ROWS
    lane = tl.arange(0, LANES)
    first_block = tl.sum(tl.where(lane < expert, blocks, 0), axis=0)
    own_blocks = tl.sum(tl.where(lane == expert, blocks, 0), axis=0)
    if expert == 0:
        tl.store(num_blocks, tl.sum(blocks, axis=0))
    for first in range(0, own_blocks, PAIRS):
        tl.store(block_experts + first_block + first + pair, expert, mask=first + pair < own_blocks)

    place = first_block * ROWS
    for first in range(0, num_assigned, PAIRS):
        ids = tl.load(experts + first + pair, mask=first + pair < num_assigned, other=-1)
        own = (ids == expert).to(tl.int32)
        tl.store(assignments + place + tl.cumsum(own, axis=0) - 1, first + pair, mask=own > 0)
        place += tl.sum(own, axis=0)
    rest = place + tl.arange(0, ROWS)
    tl.store(assignments + rest, num_assigned, mask=rest < (first_block + own_blocks) * ROWS)


@triton.jit(do_not_specialize=["num_assigned"])
def _gate_up_kernel(
    out,
    x,
    x_stride,
    gate_up,
    assignments,
    block_experts,
    num_blocks,
    num_assigned,
    hidden,
    inter,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """out[assignment] = silu(gate) · up of its token. A program computes the same columns of gate and up."""
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
    for _ in range(0, hidden, DEPTH):
        values = tl.load(x_at, mask=real[:, None], other=0.0)
        gate = tl.dot(values, tl.load(gate_at, mask=inside[None, :], other=0.0), gate, input_precision="ieee")
        up = tl.dot(values, tl.load(up_at, mask=inside[None, :], other=0.0), up, input_precision="ieee")
        x_at += DEPTH
        gate_at += DEPTH
        up_at += DEPTH
    result = gated(gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32), dtype)
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
):
    """out[assignment] = (x[assignment // PER] · its expert's weightᵀ [+ bias]) [· its scale]. weight: [experts, n, k];
    bias: [experts, n]."""
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
    for _ in range(0, k, DEPTH):
        values = tl.load(x_at, mask=real[:, None], other=0.0)
        total = tl.dot(values, tl.load(weight_at, mask=inside[None, :], other=0.0), total, input_precision="ieee")
        x_at += DEPTH
        weight_at += DEPTH
    if bias is not None:
        total += tl.load(bias + expert * n + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    if scales is not None:
        total *= tl.load(scales + rows, mask=real, other=0.0)[:, None]
    out_at = out + rows.to(tl.int64)[:, None] * n + columns[None, :]
    tl.store(out_at, total.to(out.dtype.element_ty), mask=real[:, None] & inside[None, :])


@triton.jit
def _sum_kernel(out, out_stride, parts, experts, hidden, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < hidden
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(TOP_K):
        at = token * TOP_K + i
        computed = tl.load(experts + at) >= 0
        total += tl.load(parts + at * hidden + columns, mask=inside & computed, other=0.0).to(tl.float32)
    tl.store(out + token * out_stride + columns, total.to(out.dtype.element_ty), mask=inside)


def route(router_logits: Tensor, num_tokens: Tensor, workspace: MoeWorkspace, *, top_k: int, renormalize: bool) -> None:
    """Fills `workspace.weights` and `.experts`: the softmax over all experts at the `top_k` best, best first, equal
    scores by index; with `renormalize` divided by their sum.

    router_logits: [tokens, experts], rows of any stride. num_tokens: [1] int32; tokens beyond it are padding, which no
    expert computes.
    """
    tokens, num_experts = router_logits.shape
    assert top_k <= num_experts and router_logits.stride(1) == 1, (top_k, router_logits.shape)
    _route_kernel[(tokens,)](
        workspace.weights,
        workspace.experts,
        router_logits,
        router_logits.stride(0),
        num_tokens,
        NUM_EXPERTS=num_experts,
        LANES=triton.next_power_of_2(num_experts),
        TOP_K=top_k,
        RENORMALIZE=renormalize,
        num_warps=1,
    )


def align(workspace: MoeWorkspace, *, num_assigned: int, num_experts: int) -> None:
    """Fills `workspace.assignments`, `.block_experts` and `.num_blocks` from `.experts`."""
    _align_kernel[(num_experts,)](
        workspace.assignments,
        workspace.block_experts,
        workspace.num_blocks,
        workspace.experts,
        num_assigned,
        LANES=triton.next_power_of_2(num_experts),
        ROWS=_tiles(num_assigned, num_experts).rows,
        PAIRS=_PAIRS,
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
) -> None:
    """out[assignment] = (x[assignment // per] · its expert's weightᵀ [+ bias]) [· its scale], of the assignments that
    `align` has sorted. out: [≥ num_assigned, n]; weight: [experts, n, k]; bias: [experts, n]; scales: [num_assigned]
    float32."""
    num_experts, n, k = weight.shape
    tiles = _tiles(num_assigned, num_experts)
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
        DEPTH=_depth(k),
        **_options(tiles),
    )


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
    act: Callable[[Tensor], Tensor] | None = None,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    is_weighted: bool = True,
) -> None:
    """out[token] = the sum over its experts of weight · down(act(gate_up(x))). `workspace.experts` of these tokens says
    which, and `workspace.weights` has the weights, unless they are all 1 because not is_weighted.

    out: [tokens, hidden]; x: [tokens, hidden], or [tokens · top_k, hidden] if the input of each expert is another; rows
    of any stride; down: [experts, hidden, inter] contiguous. act None: silu(gate) · up in the product's launch, with
    gate_up [experts, 2 · inter, hidden] contiguous, the gates first; else a torch function of the products
    [tokens · top_k, rows of gate_up] that gives [tokens · top_k, inter]. Biases: [experts, rows]; gate_up_bias needs an
    act. Weights and activations have one type, bfloat16 or float16; hidden and inter are multiples of 32.
    """
    (tokens, hidden), top_k = out.shape, workspace.experts.shape[1]
    num_experts, _, inter = down.shape
    num_assigned = tokens * top_k
    per = num_assigned // max(1, x.shape[0])
    width = gate_up.shape[1]
    assert x.shape in ((tokens, hidden), (num_assigned, hidden)) and tokens <= workspace.experts.shape[0], x.shape
    assert gate_up.shape == (num_experts, width, hidden) and down.shape[1] == hidden, (gate_up.shape, down.shape)
    assert act is not None or (width == 2 * inter and gate_up_bias is None), (width, inter)
    assert gate_up.is_contiguous() and down.is_contiguous() and x.stride(1) == out.stride(1) == 1
    if tokens == 0:
        return
    align(workspace, num_assigned=num_assigned, num_experts=num_experts)
    if act is None:
        inner = workspace.gated
        tiles = _tiles(num_assigned, num_experts)
        _gate_up_kernel[(_max_blocks(num_assigned, num_experts, tiles.rows), triton.cdiv(width, tiles.columns))](
            inner,
            x,
            x.stride(0),
            gate_up,
            workspace.assignments,
            workspace.block_experts,
            workspace.num_blocks,
            num_assigned,
            hidden,
            inter,
            TOP_K=per,
            COLUMNS=tiles.columns // 2,
            DEPTH=_depth(hidden),
            **_options(tiles),
        )
    else:
        products = torch.empty((num_assigned, width), dtype=x.dtype, device=x.device)
        product(products, x, gate_up, gate_up_bias, None, workspace, num_assigned=num_assigned, per=per)
        inner = act(products)
    scales = workspace.weights if is_weighted else None
    product(workspace.parts, inner, down, down_bias, scales, workspace, num_assigned=num_assigned, per=1)
    _sum_kernel[(tokens, triton.cdiv(hidden, _SUMMED))](
        out, out.stride(0), workspace.parts, workspace.experts, hidden, TOP_K=top_k, BLOCK=_SUMMED, num_warps=4
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
        name=f"moe bf16 {model} {block}",
        launch=launch,
        rows=tokens,
        plans={
            "_route_kernel": Plan(),
            "_align_kernel": Plan(),
            "_gate_up_kernel": product,
            "_product_kernel": product,
            "_sum_kernel": WIDE,
        },
    )


def _product_variant(model: str, num_experts: int, top_k: int, hidden: int, n: int, tokens: int) -> Variant:
    """The first product of experts with biases, whose activation torch computes."""

    def launch(rows: int) -> None:
        workspace = workspace_moe(
            max_tokens=rows, num_experts=num_experts, top_k=top_k, hidden=hidden, inter=n // 2, dtype=torch.bfloat16,
            device="meta",
        )  # fmt: skip
        weight, bias = shaped(num_experts, n, hidden), shaped(num_experts, n)
        out = shaped(rows * top_k, n)
        product(out, shaped(rows, hidden), weight, bias, None, workspace, num_assigned=rows * top_k, per=top_k)

    plan = Plan(sm_80=("HMMA", "LDGSTS"), sm_90=("HMMA", "LDGSTS"))
    return Variant(
        name=f"moe bf16 {model} biased product", launch=launch, rows=(1, tokens), plans={"_product_kernel": plan}
    )


# Numbers of tokens for blocks of 16, 64 and 128 rows.
VARIANTS = (
    *(_variant("Qwen3-30B-A3B", 128, 8, 2048, 768, tokens) for tokens in ((1, 256), (257, 4096), (4097, 8192))),
    *(_variant("Mixtral-8x7B", 8, 2, 4096, 14336, tokens) for tokens in ((1, 64), (65, 1024), (1025, 8192))),
    _product_variant("gpt-oss-20b", 32, 4, 2880, 5760, 128),
)
