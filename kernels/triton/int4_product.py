"""Products of 4-bit weights, with a scale and a zero point for each group of a row, with 16-bit activations.

As in `fp8_product.py`, a program computes the transpose of its tile and widens the weights in registers. number - zero
is an exact integer, and the scale multiplies the float32 sum of its group. The low halves of a tile's bytes are
multiplied by one half of the rows' columns and the high halves by the other (`Int4Weight`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .epilogue import store_product
from .fp8_product import ROWS, tile
from .product import check
from .tuned import tuned
from .variant import Plan, Variant, shaped


@triton.jit
def _widened(numbers, zeros, DTYPE: tl.constexpr):
    """numbers - zeros, uint8 ≤ 16 → DTYPE, bf16 or fp16. As the low mantissa bits of 128 (bf16) or 1024 (fp16), an
    integer n is the float 128 + n or 1024 + n, so the difference is exact."""
    base: tl.constexpr = 0x4300 if DTYPE.is_bf16() else 0x6400
    numbers = (numbers.to(tl.int16) | base).to(DTYPE, bitcast=True)
    return numbers - (zeros.to(tl.int16) + base).to(DTYPE, bitcast=True)


@triton.jit(do_not_specialize=["rows"])
def _int4_product(
    x,
    packed,
    scales,
    zeros,
    out,
    bias,
    residual,
    rows,
    x_stride,
    out_stride,
    residual_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    GATED: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    dtype: tl.constexpr = x.dtype.element_ty
    first_m = tl.program_id(0) * BLOCK_M
    first_n = tl.program_id(1) * BLOCK_N
    # Indices beyond the end read the last row, which costs less than a mask, and are not stored.
    m = tl.minimum(first_m + tl.arange(0, BLOCK_M), rows - 1).to(tl.int64)[None, :]
    n = tl.minimum(first_n + tl.arange(0, BLOCK_N), N - 1).to(tl.int64)
    byte = tl.arange(0, HALF)
    sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for first in range(0, K, 2 * HALF):
        pairs = tl.load(packed + n[:, None] * (K // 2) + (first // 2 + byte)[None, :])
        low_x = tl.load(x + m * x_stride + (first + byte)[:, None])
        high_x = tl.load(x + m * x_stride + (first + HALF + byte)[:, None])
        group = first // GROUP * N + n
        zero = tl.load(zeros + group)[:, None]
        scale = tl.load(scales + group).to(tl.float32)[:, None]
        part = tl.dot(_widened(pairs & 15, zero, dtype), low_x)
        if GROUP % (2 * HALF) == 0:
            sums += tl.dot(_widened(pairs >> 4, zero, dtype), high_x, part) * scale
        else:
            sums += part * scale
            group = (first + HALF) // GROUP * N + n
            zero = tl.load(zeros + group)[:, None]
            scale = tl.load(scales + group).to(tl.float32)[:, None]
            sums += tl.dot(_widened(pairs >> 4, zero, dtype), high_x) * scale
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


def int4_product(
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    zeros: Tensor,
    out: Tensor,
    *,
    half: int,
    order: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    is_gated: bool = False,
) -> None:
    """out = x · weightᵀ [+ bias] [+ residual], or silu(gate) · up of it.

    x: [rows, k] bf16 or fp16; packed, scales, zeros, half and order are those of an `Int4Weight` [n, k]. bias: [n];
    residual: [rows, n], may be out; out: [rows, n], of x's type or, without a residual, float32. With `is_gated` the
    even rows of the weight are gates, the odd ones ups (`Int4Weight.interleave`), and out is [rows, n / 2]. Rows may
    have any stride.

    The tile depends on the number of rows (≤ 16, ≤ 64, more); within one of these ranges a row's bits depend on that
    row alone.
    """
    n, k = packed.shape[0], 2 * packed.shape[1]
    rows = x.shape[0]
    check(x, out, residual, n, k, is_gated)
    group = k // scales.shape[0]
    assert packed.is_contiguous() and scales.is_contiguous() and zeros.is_contiguous()
    assert scales.shape == zeros.shape == (k // group, n) and group % half == 0, (scales.shape, zeros.shape, half)
    assert x.dtype in (torch.bfloat16, torch.float16) and (order is None or order.shape == (k,)), x.dtype
    if rows == 0:
        return
    if order is not None:  # once, instead of in each program
        x = x.index_select(1, order)
    options = _options(rows, n, k, group, half)
    _int4_product[triton.cdiv(rows, options["BLOCK_M"]), triton.cdiv(n, options["BLOCK_N"])](
        x,
        packed,
        scales,
        zeros,
        out,
        bias,
        residual,
        rows,
        x.stride(0),
        out.stride(0),
        0 if residual is None else residual.stride(0),
        GATED=is_gated,
        **options,
    )


def _options(rows: int, n: int, k: int, group: int, half: int) -> dict[str, int]:
    """The compile-time options."""
    tiles = tile(rows, n)
    tiles = tuned("int4_product", tiles["BLOCK_M"], n, k, **tiles)
    return {"N": n, "K": k, "GROUP": group, "HALF": half, "num_stages": _num_stages(rows), **tiles}


def _num_stages(rows: int) -> int:
    """One more than the tiles in flight; more do not fit into the shared memory of sm_89."""
    return 4 if rows <= 64 else 3


def _variant(
    name: str,
    rows: tuple[int, ...],
    n: int,
    k: int,
    *,
    group: int = 128,
    residual: bool = False,
    is_gated: bool = False,
) -> Variant:
    def launch(rows: int) -> None:
        out = shaped(rows, n // 2 if is_gated else n)
        int4_product(
            shaped(rows, k),
            shaped(n, k // 2, dtype=torch.uint8),
            shaped(k // group, n, dtype=torch.float16),
            shaped(k // group, n, dtype=torch.uint8),
            out,
            half=min(64, group),
            residual=out if residual else None,
            is_gated=is_gated,
        )

    plan = Plan(
        sm_80=("HMMA", "LDGSTS"),
        sm_90=("HGMMA" if tile(rows[0], n)["BLOCK_N"] >= 64 else "HMMA", "LDGSTS"),
        buffers=_num_stages(rows[0]) - 1,
    )
    return Variant(
        name=f"int4_product bf16 {name} {n}x{k} group {group} M{rows[0]}",
        launch=launch,
        rows=rows,
        plans={"_int4_product": plan},
    )


# Llama-3.1-8B and Qwen3-0.6B.
VARIANTS = tuple(
    variant
    for rows in ROWS
    for variant in (
        _variant("qkv", rows, 6144, 4096),
        _variant("out", rows, 4096, 4096, residual=True, group=32),
        _variant("gate_up", rows, 28672, 4096, is_gated=True),
        _variant("down", rows, 1024, 3072, residual=True),
    )
)
