"""Products of any number of rows in which a row's bits depend on that row alone, for `--deterministic`.

The tile has 64 rows (which wgmma needs) however few are used, and the sum over k is never split and always takes the
same steps. A library's product may choose another kernel, and so another order of summation, for each number of rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .epilogue import store_product
from .tuned import tuned
from .variant import Plan, Variant, shaped

_BLOCK_M = 64
_BLOCK_K = 64
_NUM_STAGES = 4  # three tiles in flight
PROCESSORS = 132  # of an H100 or H200; a constant, so that tiles and splits are the same on every GPU


@triton.jit(do_not_specialize=["rows"])
def _product(
    x,
    weight,
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    EVEN: tl.constexpr = K % BLOCK_K == 0  # then no mask is left: x | True is True
    first_m = tl.program_id(0) * BLOCK_M
    first_n = tl.program_id(1) * BLOCK_N
    # Indices beyond the end read the last row, which costs less than a mask, and are not stored.
    m = tl.minimum(first_m + tl.arange(0, BLOCK_M), rows - 1).to(tl.int64)[:, None]
    n = tl.minimum(first_n + tl.arange(0, BLOCK_N), N - 1).to(tl.int64)[None, :]
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, K, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        inside = (k < K) | EVEN
        left = tl.load(x + m * x_stride + k[None, :], mask=inside[None, :], other=0.0)
        right = tl.load(weight + n * K + k[:, None], mask=inside[:, None], other=0.0)
        sums = tl.dot(left, right, sums, input_precision="ieee")
    dtype: tl.constexpr = x.dtype.element_ty
    store_product(
        sums,
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
    """
    n, k = weight.shape
    rows = x.shape[0]
    check(x, out, residual, n, k, is_gated)
    assert weight.is_contiguous(), weight.stride()
    if rows == 0:
        return
    options = _options(n, k)
    _product[triton.cdiv(rows, _BLOCK_M), triton.cdiv(n, options["BLOCK_N"])](
        x,
        weight,
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


def check(x: Tensor, out: Tensor, residual: Tensor | None, n: int, k: int, is_gated: bool) -> None:
    """Asserts that the shapes fit a product with a weight [n, k]."""
    assert x.shape[1] == k and out.shape == (x.shape[0], n // 2 if is_gated else n), (x.shape, out.shape)
    assert x.stride(1) == out.stride(1) == 1 and not (is_gated and n % 2), (x.stride(), out.stride(), n)
    assert residual is None or (residual.shape == out.shape and residual.stride(1) == 1 and not is_gated)


def _options(n: int, k: int) -> dict[str, int]:
    """The compile-time options for a weight of this shape. The untuned rule: the widest tiles that occupy half of the
    multiprocessors at one row."""
    block_n = next((block for block in (128, 64) if n // block >= PROCESSORS // 2), 32)
    return {
        "N": n,
        "K": k,
        "BLOCK_M": _BLOCK_M,
        "BLOCK_K": _BLOCK_K,
        **tuned("product", n, k, BLOCK_N=block_n, num_warps=4),
        "num_stages": _NUM_STAGES,
    }


def _variant(
    name: str, n: int, k: int, *, residual: bool = False, is_gated: bool = False, head: bool = False
) -> Variant:
    def launch(rows: int) -> None:
        out = shaped(rows, n // 2 if is_gated else n, dtype=torch.float32 if head else torch.bfloat16)
        product(shaped(rows, k), shaped(n, k), out, residual=out if residual else None, is_gated=is_gated)

    copies = "LDGSTS.E.BYPASS.128"
    return Variant(
        name=f"product bf16 {name} {n}x{k}",
        launch=launch,
        rows=(16, 1, 64, 1000),
        plans={"_product": Plan(sm_80=("HMMA", copies), sm_90=("HGMMA", copies), buffers=_NUM_STAGES - 1)},
    )


# Qwen3-0.6B and Llama-3.1-8B: the products of a layer, and the head.
VARIANTS = (
    _variant("out", 1024, 2048, residual=True),
    _variant("gate_up", 6144, 1024, is_gated=True),
    _variant("qkv", 6144, 4096),
    _variant("out", 4096, 4096, residual=True),
    _variant("gate_up", 28672, 4096, is_gated=True),
    _variant("head", 128256, 4096, head=True),
)
