"""One kernel for all products of activations with a weight, whatever its format (`widen.py`), and its use for products
of any number of rows in which a row's bits depend on that row alone, for `--deterministic`.

A program computes the transpose of its tile, weight · rowsᵀ. So weights that are widened in registers go from there
into the tensor cores as the first operand, and few rows are a narrow second operand. Scales multiply float32 sums: that
of a group of columns, or the whole sum where each row of the weight has one.

The norm before a product takes no pass of its own over the rows, so the weight's first tiles are loaded at once: the
rows are multiplied by the norm's weight, the sum of their squares grows beside that of the product, and 1 / rms(x)
multiplies the float32 sum. Only of float16, which may overflow so, the squares are summed before. Rounding follows
transformers where there is any: products, residual sums and silu(gate) are rounded to the type of the activations.

The sum over k may be split between programs: each stores its partial sum, and the last to arrive adds them up in their
order, so a row's bits do not depend on which program was last.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .dependent_launch import await_previous, dependent
from .epilogue import store_product
from .tuned import tuned
from .variant import Plan, Variant, shaped
from .widen import Operand, nvfp4_scales, operand_of, scale_row, widened, widened_half

_BLOCK_M = 64
_BLOCK_K = 64
_NUM_STAGES = 4  # three tiles in flight
PROCESSORS = 132  # of an H100 or H200; a constant, so that tiles and splits are the same on every GPU
FEW_ROWS = 16  # of a tile whose unused rows are not read, and whose weights are read once


class Workspace(NamedTuple):
    """Scratch memory of products that split their sum, which may share it one after another on one stream."""

    partials: Tensor  # float32
    arrivals: Tensor  # int32, zero between products


@triton.jit
def _columns(address, k, inside, used, norm, before, squares, MASKED: tl.constexpr):
    """([k, rows] of the activations [times the norm's weight], squares + theirs). address: pointers [1, rows]; before:
    1 / rms(x) [1, rows] if it is known."""
    if MASKED:
        right = tl.load(address + k[:, None], mask=inside[:, None] & used, other=0.0)
    else:
        right = tl.load(address + k[:, None], mask=inside[:, None], other=0.0)
    if norm is not None:
        wide = right.to(tl.float32)
        by = tl.load(norm + k, mask=inside, other=0.0).to(tl.float32)[:, None]
        if before is None:
            squares += wide * wide
        else:
            by *= before
        right = (wide * by).to(right.dtype)
    return right, squares


@triton.jit
def _packed_sums(
    sums,
    pairs,
    low,
    high,
    scales,
    zeros,
    scale,
    first,
    FORM: tl.constexpr,
    SCALE_K: tl.constexpr,
    GROUP_STRIDE: tl.constexpr,
    HALF: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """sums + a tile of 4 bits · its columns. pairs: uint8 [n, HALF]; low, high: [HALF, rows]; scale: of each row of the
    weight; first: column."""
    if FORM == "nvfp4":
        by_low = nvfp4_scales(scales + scale[:, None], first, GROUP_STRIDE, HALF, DTYPE)
        by_high = nvfp4_scales(scales + scale[:, None], first + HALF, GROUP_STRIDE, HALF, DTYPE)
        sums = tl.dot(widened(pairs & 15, "fp4", DTYPE) * by_low, low, sums)
        sums = tl.dot(widened(pairs >> 4, "fp4", DTYPE) * by_high, high, sums)
    else:
        group = scale + first // SCALE_K * GROUP_STRIDE
        zero = None
        if zeros is not None:
            zero = tl.load(zeros + group)[:, None]
        by = tl.load(scales + group).to(tl.float32)[:, None]
        part = tl.dot(widened_half(pairs & 15, zero, FORM, DTYPE), low)
        if SCALE_K % (2 * HALF) == 0:
            sums += tl.dot(widened_half(pairs >> 4, zero, FORM, DTYPE), high, part) * by
        else:
            sums += part * by
            group = scale + (first + HALF) // SCALE_K * GROUP_STRIDE
            if zeros is not None:
                zero = tl.load(zeros + group)[:, None]
            by = tl.load(scales + group).to(tl.float32)[:, None]
            sums += tl.dot(widened_half(pairs >> 4, zero, FORM, DTYPE), high) * by
    return sums


@triton.jit
def _arrive(sums, of_rows, address, beside, arrival, split, norm, TILE: tl.constexpr, ROWS: tl.constexpr):
    """Stores the program's part of the sums, and counts it. Returns how many came before it."""
    tl.store(address + split * TILE, sums)
    if norm is not None:
        tl.store(beside + split * ROWS, of_rows)
    # All threads must have stored before the arrival is counted.
    tl.debug_barrier()
    return tl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu")


@triton.jit
def _merged(sums, of_rows, address, beside, norm, SPLITS: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr):
    """The sums of all parts, in their order. The loads must bypass the L1 cache, which does not see the stores of other
    multiprocessors."""
    sums = tl.zeros_like(sums)
    of_rows = tl.zeros_like(of_rows)
    for other in tl.static_range(SPLITS):
        sums += tl.load(address + other * TILE, cache_modifier=".cg")
        if norm is not None:
            of_rows += tl.load(beside + other * ROWS, cache_modifier=".cg")
    return sums, of_rows


@dependent(do_not_specialize=["rows"])
def _product(
    x,
    weight,
    scales,
    zeros,
    factor,
    out,
    norm,
    bias,
    residual,
    partials,
    arrivals,
    rows,
    x_stride,
    out_stride,
    residual_stride,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    FORM: tl.constexpr,
    SCALE_N: tl.constexpr,
    SCALE_K: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    GROUP_STRIDE: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    FEW: tl.constexpr,
):
    """The weight's arguments are those of `Operand`. FEW: rows beyond the last are not read; else they are the last row
    again, which costs less than a mask. Neither is stored."""
    await_previous()
    SPAN: tl.constexpr = (K + SPLITS * BLOCK_K - 1) // (SPLITS * BLOCK_K) * BLOCK_K  # one program's share of k
    EVEN: tl.constexpr = K == SPLITS * SPAN  # then no mask over k is left: x | True is True
    WIDTH: tl.constexpr = K if HALF is None else K // 2  # bytes or numbers of the weight's rows
    SHARE: tl.constexpr = BLOCK_K if HALF is None else HALF  # columns of one multiplication
    TILE: tl.constexpr = BLOCK_N * BLOCK_M
    dtype: tl.constexpr = x.dtype.element_ty
    first_m = tl.program_id(0) * BLOCK_M
    tile = tl.program_id(1)
    split = tl.program_id(2)
    first_n = tile * BLOCK_N
    m = tl.arange(0, BLOCK_M)
    used = (first_m + m < rows)[None, :]
    if not FEW:
        m = tl.minimum(m, rows - 1 - first_m)
    n = tl.arange(0, BLOCK_N)
    if N % BLOCK_N != 0:
        n = tl.minimum(n, N - 1 - first_n)
    x_rows = x + first_m.to(tl.int64) * x_stride + (m * x_stride)[None, :]
    columns = weight + first_n.to(tl.int64) * WIDTH + (n * WIDTH)[:, None]
    scale = scale_row(first_n + n, SCALE_N, INTERLEAVED) * ROW_STRIDE

    squares = tl.zeros((SHARE, BLOCK_M), tl.float32)
    before = None
    if norm is not None and dtype == tl.float16:
        for first in range(0, K, SHARE):
            k = first + tl.arange(0, SHARE)
            part = tl.load(x_rows + k[:, None], mask=used & (k < K)[:, None], other=0.0).to(tl.float32)
            squares += part * part
        before = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)[None, :]

    sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for first in range(split * SPAN, (split + 1) * SPAN, BLOCK_K):
        k = first + tl.arange(0, SHARE)
        inside = (k < K) | EVEN
        if HALF is None:
            codes = tl.load(columns + k[None, :], mask=inside[None, :], other=0)
            right, squares = _columns(x_rows, k, inside, used, norm, before, squares, FEW)
            left = widened(codes, FORM, dtype)
            if scales is None:
                sums = tl.dot(left, right, sums, input_precision="ieee")
            else:
                group = scale + first // SCALE_K * GROUP_STRIDE
                sums += tl.dot(left, right) * tl.load(scales + group).to(tl.float32)[:, None]
        else:
            pairs = tl.load(columns + (first // 2 + tl.arange(0, HALF))[None, :])
            low, squares = _columns(x_rows, k, inside, used, norm, before, squares, FEW)
            high, squares = _columns(x_rows, HALF + k, inside, used, norm, before, squares, FEW)
            sums = _packed_sums(
                sums, pairs, low, high, scales, zeros, scale, first, FORM, SCALE_K, GROUP_STRIDE, HALF, dtype
            )

    of_rows = tl.sum(squares, axis=0)
    if SPLITS > 1:
        in_tile = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        address = partials + tile * (SPLITS * TILE) + in_tile
        beside = partials + tl.num_programs(1) * (SPLITS * TILE) + tile * (SPLITS * BLOCK_M) + tl.arange(0, BLOCK_M)
        if _arrive(sums, of_rows, address, beside, arrivals + tile, split, norm, TILE, BLOCK_M) != SPLITS - 1:
            return
        tl.store(arrivals + tile, 0)
        sums, of_rows = _merged(sums, of_rows, address, beside, norm, SPLITS, TILE, BLOCK_M)

    if factor is not None:
        sums *= tl.load(factor + first_n + n).to(tl.float32)[:, None]
    if norm is not None and before is None:
        sums *= tl.rsqrt(of_rows / K + eps)[None, :]
    store_product(
        tl.trans(sums),
        out,
        bias,
        residual,
        rows,
        out_stride,
        residual_stride,
        first_m,
        first_n,
        N,
        GATED,
        dtype,
        BLOCK_M,
        BLOCK_N,
    )


def multiply(
    x: Tensor,
    operand: Operand,
    out: Tensor,
    options: Mapping[str, int],
    *,
    workspace: Workspace | None = None,
    norm: tuple[Tensor, float] | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    is_gated: bool = False,
) -> None:
    """Launches the kernel. options: BLOCK_M, BLOCK_N, BLOCK_K, SPLITS, num_warps and num_stages; with splits, which
    have one tile of rows, there is a workspace. The rest as in `product`, and the norm of `small_product`."""
    n, k = operand.shape
    rows = x.shape[0]
    assert x.shape[1] == k and out.shape == (rows, n // 2 if is_gated else n), (x.shape, out.shape)
    assert x.stride(1) == out.stride(1) == 1 and not (is_gated and n % 2), (x.stride(), out.stride(), n)
    assert residual is None or (residual.shape == out.shape and residual.stride(1) == 1 and not is_gated)
    assert operand.values.is_contiguous(), operand.values.stride()
    if rows == 0:
        return
    splits, few = options["SPLITS"], options["BLOCK_M"] <= FEW_ROWS
    assert splits == 1 or (workspace is not None and rows <= options["BLOCK_M"]), (rows, options)
    _product[triton.cdiv(rows, options["BLOCK_M"]), triton.cdiv(n, options["BLOCK_N"]), splits](
        x,
        operand.values,
        operand.scales,
        operand.zeros,
        operand.factor,
        out,
        None if norm is None else norm[0],
        bias,
        residual,
        None if workspace is None or splits == 1 else workspace.partials,
        None if workspace is None or splits == 1 else workspace.arrivals,
        rows,
        x.stride(0),
        out.stride(0),
        0 if residual is None else residual.stride(0),
        0.0 if norm is None else norm[1],
        **operand.constants(),
        GATED=is_gated,
        FEW=few,
        **options,
    )


def product(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    is_gated: bool = False,
) -> None:
    """out = x · weightᵀ [+ bias] [+ residual], or silu(gate) · up of it.

    x: [rows, k]; weight: [n, k] contiguous; bias: [n]; residual: [rows, n], may be out; out: [rows, n], of x's type or,
    without a residual, float32. With `is_gated` the even columns of the product are gates, the odd ones ups, and out is
    [rows, n / 2]. Rows may have any stride.

    The tile has 64 rows however few are used, and the sum over k is never split and always takes the same steps. A
    library's product may choose another kernel, and so another order of summation, for each number of rows.
    """
    options = _options(*weight.shape)
    multiply(x, operand_of(weight), out, options, bias=bias, residual=residual, is_gated=is_gated)


def _options(n: int, k: int) -> dict[str, int]:
    """The compile-time options for a weight of this shape. The untuned rule: the widest tiles that occupy a third of
    the multiprocessors at one row."""
    block_n = next((block for block in (128, 64) if n // block >= PROCESSORS // 3), 32)
    return {
        "BLOCK_M": _BLOCK_M,
        "BLOCK_K": _BLOCK_K,
        "SPLITS": 1,
        **tuned("product", n, k, BLOCK_N=block_n, num_warps=4),
        "num_stages": _NUM_STAGES,
    }


def _variant(
    name: str, n: int, k: int, *, residual: bool = False, is_gated: bool = False, head: bool = False
) -> Variant:
    def launch(rows: int) -> None:
        out = shaped(rows, n // 2 if is_gated else n, dtype=torch.float32 if head else torch.bfloat16)
        product(shaped(rows, k), shaped(n, k), out, residual=out if residual else None, is_gated=is_gated)

    copies, wide = "LDGSTS.E.BYPASS.128", _options(n, k)["BLOCK_N"] >= 64  # wgmma takes at least 64 rows of the weight
    plan = Plan(sm_80=("HMMA", copies), sm_90=("HGMMA" if wide else "HMMA", copies), buffers=_NUM_STAGES - 1)
    return Variant(name=f"product bf16 {name} {n}x{k}", launch=launch, rows=(16, 1, 64, 1000), plans={"_product": plan})


# Qwen3-0.6B and Llama-3.1-8B: the products of a layer, and the head.
VARIANTS = (
    _variant("out", 1024, 2048, residual=True),
    _variant("gate_up", 6144, 1024, is_gated=True),
    _variant("qkv", 6144, 4096),
    _variant("out", 4096, 4096, residual=True),
    _variant("gate_up", 28672, 4096, is_gated=True),
    _variant("head", 128256, 4096, head=True),
)
