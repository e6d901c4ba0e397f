"""The epilogue of a matrix product: bias, residual sum or gate, and the store, in the product's own kernel.

Rounding follows transformers: the product and silu(gate) are rounded to the type of the activations.
"""

import triton
import triton.language as tl

from .silu_mul import gated


@triton.jit
def store_product(
    sums,
    out,
    bias,
    residual,
    rows,
    out_stride,
    residual_stride,
    first_m,
    first_n,
    N: tl.constexpr,
    GATED: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Stores the tile `sums` [BLOCK_M, BLOCK_N] float32 of a product [rows, N], whose first element is (first_m,
    first_n). DTYPE: type of the activations. The other arguments are those of `product.product`."""
    m = (first_m + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    n = first_n + tl.arange(0, BLOCK_N)[None, :]
    inside = (m < rows) & ((n < N) | (N % BLOCK_N == 0))
    if bias is not None:
        sums += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    if GATED:
        gate, up = tl.split(tl.reshape(sums, (BLOCK_M, BLOCK_N // 2, 2)))
        half = first_n // 2 + tl.arange(0, BLOCK_N // 2)[None, :]
        result = gated(gate.to(DTYPE).to(tl.float32), up.to(DTYPE).to(tl.float32), DTYPE)
        inside = (m < rows) & ((half < N // 2) | (N % BLOCK_N == 0))
        tl.store(out + m * out_stride + half, result.to(out.dtype.element_ty), mask=inside)
    else:
        if residual is not None:
            sums = sums.to(DTYPE).to(tl.float32)
            sums += tl.load(residual + m * residual_stride + n, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + m * out_stride + n, sums.to(out.dtype.element_ty), mask=inside)
