"""Products of 8-bit weights (float8 e4m3) with 16-bit activations: the weights are widened in registers.

A program computes the transpose of its tile, weights · rowsᵀ, so that the widened weights go from registers into the
tensor cores as the first operand, and few rows are a narrow second operand. The scale multiplies float32 sums: the sum
of a block of k, or the whole sum where each row of the weight has one scale.

Widening is exact and needs no instruction of sm_89: shifted to their place in a 16-bit float, exponent and mantissa are
those of the value divided by a power of two, subnormals included. The code of e4m3's NaN, which no weight has, gives
480.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .epilogue import store_product
from .product import PROCESSORS, check
from .tuned import tuned
from .variant import Plan, Variant, shaped

_NUM_STAGES = 4  # three tiles in flight


@triton.jit
def _widened(codes, DTYPE: tl.constexpr):
    """codes: uint8, float8 e4m3 → DTYPE, bf16 or fp16."""
    high = codes.to(tl.int16) << 8
    if DTYPE.is_bf16():
        value, factor = (high >> 4) & -0x7810, 2.0**120
    else:
        value, factor = (high >> 1) & -0x4080, 2.0**8
    # The compiler folds this constant; one made by a bitcast would send the widened values through shared memory.
    return value.to(DTYPE, bitcast=True) * tl.full(codes.shape, factor, tl.float32).to(DTYPE)


@triton.jit(do_not_specialize=["rows"])
def _fp8_product(
    x,
    weight,
    scale,
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
    SCALE_N: tl.constexpr,
    SCALE_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """SCALE_N, SCALE_K: rows and columns of the weight that share a scale; SCALE_K None: one scale per row."""
    EVEN: tl.constexpr = K % BLOCK_K == 0  # then no mask is left: x | True is True
    dtype: tl.constexpr = x.dtype.element_ty
    first_m = tl.program_id(0) * BLOCK_M
    first_n = tl.program_id(1) * BLOCK_N
    # Indices beyond the end read the last row, which costs less than a mask, and are not stored.
    m = tl.minimum(first_m + tl.arange(0, BLOCK_M), rows - 1).to(tl.int64)[None, :]
    n = tl.minimum(first_n + tl.arange(0, BLOCK_N), N - 1).to(tl.int64)
    if SCALE_K is not None:
        if GATED:  # gates and ups alternate, and so do their scales
            scales = scale + (n // 2 // SCALE_N * 2 + n % 2) * tl.cdiv(K, SCALE_K)
        else:
            scales = scale + n // SCALE_N * tl.cdiv(K, SCALE_K)
    sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for first in range(0, K, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        inside = (k < K) | EVEN
        codes = tl.load(weight + n[:, None] * K + k[None, :], mask=inside[None, :], other=0)
        right = tl.load(x + m * x_stride + k[:, None], mask=inside[:, None], other=0.0)
        left = _widened(codes, dtype)
        if SCALE_K is None:
            sums = tl.dot(left, right, sums)
        else:
            sums += tl.dot(left, right) * tl.load(scales + first // SCALE_K)[:, None]
    if SCALE_K is None:
        sums *= tl.load(scale + n)[:, None]
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


def fp8_product(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    out: Tensor,
    *,
    block: Sequence[int] = (128, 128),
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    is_gated: bool = False,
) -> None:
    """out = x · (weight · scale)ᵀ [+ bias] [+ residual], or silu(gate) · up of it.

    x: [rows, k] bf16 or fp16; weight: [n, k] float8_e4m3fn contiguous; scale: float32, [n], or contiguous with one for
    each block of `block` rows and columns, which are powers of two, at least 16 columns. bias: [n]; residual: [rows,
    n], may be out; out: [rows, n], of x's type or, without a residual, float32. With `is_gated` the even rows of the
    weight are gates, the odd ones ups (`Fp8Weight.interleave`), and out is [rows, n / 2]. Rows may have any stride.

    The tile depends on the number of rows (≤ 16, ≤ 64, more); within one of these ranges a row's bits depend on that
    row alone.
    """
    n, k = weight.shape
    rows = x.shape[0]
    check(x, out, residual, n, k, is_gated)
    assert weight.is_contiguous() and scale.is_contiguous() and weight.dtype == torch.float8_e4m3fn, weight.dtype
    assert x.dtype in (torch.bfloat16, torch.float16), x.dtype
    if scale.dim() == 1:
        options = _options(rows, n, k, None)
        assert scale.shape == (n,), scale.shape
    else:
        options = _options(rows, n, k, (block[0], block[1]))
        groups = 2 * triton.cdiv(n // 2, block[0]) if is_gated else triton.cdiv(n, block[0])
        assert scale.shape == (groups, triton.cdiv(k, block[1])), (scale.shape, block)
    if rows == 0:
        return
    _fp8_product[triton.cdiv(rows, options["BLOCK_M"]), triton.cdiv(n, options["BLOCK_N"])](
        x,
        weight.view(torch.uint8),
        scale,
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


def tile(rows: int, n: int) -> dict[str, int]:
    """Rows of activations and of the weight per program, and its warps. Few rows are bound by reading the weight: as
    many programs as there are multiprocessors for."""
    if rows > 64:
        return {"BLOCK_M": 128, "BLOCK_N": 128, "num_warps": 8}
    if rows > 16:
        return {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4}
    return {"BLOCK_M": 16, "BLOCK_N": 32 if n // 32 >= PROCESSORS else 16, "num_warps": 4}


def _options(rows: int, n: int, k: int, block: tuple[int, int] | None) -> dict[str, int | None]:
    """The compile-time options."""
    block_k = 128 if rows <= 64 else 64
    tiles = tile(rows, n)
    if block is not None:
        block_k = min(block_k, block[1])
        assert block_k >= 16 and block_k & (block_k - 1) == 0 and block[1] % block_k == 0, block
    return {
        "N": n,
        "K": k,
        "SCALE_N": None if block is None else block[0],
        "SCALE_K": None if block is None else block[1],
        "BLOCK_K": block_k,
        "num_stages": _NUM_STAGES,
        **tuned("fp8_product", tiles["BLOCK_M"], n, k, **tiles),
    }


ROWS = ((16, 1, 2, 5), (64, 17), (128, 65, 1000))
"""Numbers of rows, grouped by the tile they use."""


def _variant(
    name: str,
    rows: tuple[int, ...],
    n: int,
    k: int,
    *,
    by_row: bool = False,
    residual: bool = False,
    is_gated: bool = False,
) -> Variant:
    def launch(rows: int) -> None:
        out = shaped(rows, n // 2 if is_gated else n)
        scale = shaped(n, dtype=torch.float32) if by_row else shaped(n // 128, k // 128, dtype=torch.float32)
        weight = shaped(n, k, dtype=torch.float8_e4m3fn)
        fp8_product(shaped(rows, k), weight, scale, out, residual=out if residual else None, is_gated=is_gated)

    block_n, copies = tile(rows[0], n)["BLOCK_N"], "LDGSTS.E.BYPASS.128"
    plan = Plan(sm_80=("HMMA", copies), sm_90=("HGMMA" if block_n >= 64 else "HMMA", copies), buffers=_NUM_STAGES - 1)
    return Variant(
        name=f"fp8_product bf16 {'rows' if by_row else 'blocks'} {name} {n}x{k} M{rows[0]}",
        launch=launch,
        rows=rows,
        plans={"_fp8_product": plan},
    )


# Llama-3.1-8B and Qwen3-0.6B.
VARIANTS = tuple(
    variant
    for rows in ROWS
    for variant in (
        _variant("qkv", rows, 6144, 4096, by_row=True),
        _variant("out", rows, 4096, 4096, residual=True),
        _variant("gate_up", rows, 28672, 4096, is_gated=True),
        _variant("down", rows, 1024, 3072, residual=True),
    )
)
