"""Products with activations of 8 bits too (W8A8), by a library, for prompts: each row of activations is rounded to 8
bits with a scale of its own, and the sums of integers are scaled, with everything that may follow a product."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .epilogue import store_product
from .variant import Plan, Variant, shaped

_BLOCK = 2048
_TINY = tl.constexpr(1e-30)  # rows below count as zero


@triton.jit
def _round_rows(x, codes, scales, x_stride, K: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x += row * x_stride
    greatest = tl.zeros((BLOCK,), tl.float32)
    is_bad = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, K, BLOCK):
        k = first + tl.arange(0, BLOCK)
        size = tl.abs(tl.load(x + k, mask=k < K, other=0.0).to(tl.float32))
        is_bad |= tl.where(size < float("inf"), 0, 1)  # NaN too
        greatest = tl.where(size > greatest, size, greatest)
    most = tl.max(greatest, axis=0)
    factor = tl.where(most > _TINY, MOST / most, 0.0)
    bad = tl.max(is_bad, axis=0) > 0
    tl.store(scales + row, tl.where(bad, float("nan"), most / MOST))
    factor = tl.where(bad, 0.0, factor)
    for first in range(0, K, BLOCK):
        k = first + tl.arange(0, BLOCK)
        values = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32) * factor
        values = tl.where(bad, 0.0, values)
        if codes.dtype.element_ty == tl.int8:
            values = (values + 12582912.0) - 12582912.0  # to the nearest integer, ties to even
        tl.store(codes + row * K + k, values.to(codes.dtype.element_ty), mask=k < K)


def round_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x: [rows, k], rows of any stride → ([rows, k] of dtype, int8 or float8_e4m3fn; float32 [rows]), whose product is
    nearest to x. The scale of a row with a number that is not finite is NaN."""
    rows, k = x.shape
    assert x.stride(1) == 1, x.stride()
    codes = torch.empty((rows, k), dtype=dtype, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        most = 127.0 if dtype == torch.int8 else 448.0
        _round_rows[(rows,)](x, codes, scales, x.stride(0), K=k, MOST=most, BLOCK=_BLOCK, num_warps=8)
    return codes, scales


@triton.jit(do_not_specialize=["rows"])
def _scale_sums(
    sums,
    row_scales,
    column_scales,
    out,
    bias,
    rows,
    out_stride,
    N: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    first_m, first_n = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    m = first_m + tl.arange(0, BLOCK_M)
    n = first_n + tl.arange(0, BLOCK_N)
    inside = (m < rows)[:, None] & (n < N)[None, :]
    tile = tl.load(sums + m.to(tl.int64)[:, None] * N + n[None, :], mask=inside, other=0).to(tl.float32)
    tile *= tl.load(column_scales + n, mask=n < N, other=0.0)[None, :]
    tile *= tl.load(row_scales + m, mask=m < rows, other=0.0)[:, None]
    dtype: tl.constexpr = out.dtype.element_ty
    store_product(tile, out, bias, None, rows, out_stride, 0, first_m, first_n, N, GATED, dtype, BLOCK_M, BLOCK_N)


def scale_sums(
    sums: Tensor,
    row_scales: Tensor,
    column_scales: Tensor,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    is_gated: bool = False,
) -> None:
    """out = sums · scales [+ bias], or silu(gate) · up of it. sums: int32 [rows, n]; row_scales: float32 [rows];
    column_scales: float32 [n]; bias, out and is_gated: as in `product.product`."""
    rows, n = sums.shape
    assert sums.is_contiguous() and out.shape == (rows, n // 2 if is_gated else n), (sums.shape, out.shape)
    if rows == 0:
        return
    tile = {"BLOCK_M": 16, "BLOCK_N": 128}
    _scale_sums[triton.cdiv(rows, tile["BLOCK_M"]), triton.cdiv(n, tile["BLOCK_N"])](
        sums, row_scales, column_scales, out, bias, rows, out.stride(0), N=n, GATED=is_gated, **tile, num_warps=4
    )


def _rounding(dtype: torch.dtype, architecture: int) -> Variant:
    def launch(rows: int) -> None:
        round_rows(shaped(rows, 4096), dtype)

    name = str(dtype).removeprefix("torch.")
    return Variant(name=f"round_rows {name}", launch=launch, plans={"_round_rows": Plan()}, architecture=architecture)


def _scaling(*, is_gated: bool) -> Variant:
    def launch(rows: int) -> None:
        sums, out = shaped(rows, 4096, dtype=torch.int32), shaped(rows, 2048 if is_gated else 4096)
        of_rows, of_columns = (shaped(size, dtype=torch.float32) for size in (rows, 4096))
        scale_sums(sums, of_rows, of_columns, out, is_gated=is_gated)

    return Variant(name=f"scale_sums{' gated' if is_gated else ''}", launch=launch, plans={"_scale_sums": Plan()})


VARIANTS = (
    _rounding(torch.int8, 80), _rounding(torch.float8_e4m3fn, 89), _scaling(is_gated=False), _scaling(is_gated=True)
)  # fmt: skip
