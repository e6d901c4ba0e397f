"""RMSNorm over rows, optionally of the sum with the residual stream.

One program per row, so a row's bits do not depend on the batch. Rounding follows transformers: the sum is rounded to
the type of the activations before the norm, and x / rms(x) is rounded before it is multiplied by the weight.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .variant import WIDE, Variant, shaped


@triton.jit
def _rms_norm(x, residual, weight, out, x_stride, out_stride, eps, DIM: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < DIM
    dtype = x.dtype.element_ty
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        address = residual + row * DIM + columns
        total = (values + tl.load(address, mask=inside, other=0.0).to(tl.float32)).to(dtype)
        tl.store(address, total, mask=inside)
        values = total.to(tl.float32)
    factor = tl.rsqrt(tl.sum(values * values, axis=0) / DIM + eps)
    normed = values * factor
    if weight.dtype.element_ty == dtype:  # weights of float32 beside narrower states are applied before rounding
        normed = normed.to(dtype).to(tl.float32)
    scaled = normed * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + columns, scaled.to(dtype), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor, residual: Tensor | None = None) -> None:
    """out = norm(x) · weight, or with `residual`: residual += x, out = norm(residual) · weight.

    x, out: [tokens, dim], whose rows may have any stride; out may be x. residual: [tokens, dim] contiguous.
    weight: [dim]. All of one type, but the weight may be float32.
    """
    tokens, dim = x.shape
    assert x.stride(1) == out.stride(1) == 1 and weight.is_contiguous(), (x.stride(), out.stride())
    assert residual is None or residual.is_contiguous()
    if tokens == 0:
        return
    _rms_norm[(tokens,)](x, residual, weight, out, x.stride(0), out.stride(0), eps, **_options(dim))


def _options(dim: int) -> dict[str, int]:
    """The compile-time options for this dimension: 8 values per thread, which are the 16 bytes of one load."""
    block = triton.next_power_of_2(dim)
    return {"DIM": dim, "BLOCK": block, "num_warps": min(max(block // 256, 1), 16)}


def _variant(dim: int, *, with_residual: bool, weight: torch.dtype = torch.bfloat16) -> Variant:
    def launch(rows: int) -> None:
        x = shaped(rows, dim)
        rms_norm(x, shaped(dim, dtype=weight), 1e-6, x, x if with_residual else None)

    name = f"rms_norm bf16 {dim}" + " residual" * with_residual + " float32 weight" * (weight == torch.float32)
    return Variant(name=name, launch=launch, plans={"_rms_norm": WIDE})


# The hidden sizes of Qwen3-0.6B and Llama-3.1-8B; Gemma 2 multiplies by 1 + weight in float32.
VARIANTS = (
    *(_variant(dim, with_residual=r) for dim in (1024, 4096) for r in (False, True)),
    _variant(2304, with_residual=True, weight=torch.float32),
)
