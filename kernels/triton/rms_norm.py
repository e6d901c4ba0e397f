"""RMSNorm and LayerNorm over rows or over groups of adjacent columns, optionally of the sum with the residual stream.

One program per group of a row, so its bits do not depend on the batch. Rounding follows transformers: the sum is
rounded to the type of the activations before the norm, and x / rms(x) is rounded before it is multiplied by the weight.
LayerNorm is rounded once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .dependent_launch import await_previous, dependent
from .variant import WIDE, Plan, Variant, shaped


@dependent
def _norm(
    x, residual, weight, bias, mean_squares, out, x_stride, out_stride, mean_stride, eps,
    DIM: tl.constexpr, BLOCK: tl.constexpr, IS_LAYER: tl.constexpr, IS_WIDE: tl.constexpr,
):  # fmt: skip
    await_previous()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < DIM
    first = tl.program_id(1) * DIM
    dtype = x.dtype.element_ty
    values = tl.load(x + row * x_stride + first + columns, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        address = residual + row * DIM + columns
        total = (values + tl.load(address, mask=inside, other=0.0).to(tl.float32)).to(dtype)
        tl.store(address, total, mask=inside)
        values = total.to(tl.float32)
    if IS_LAYER:
        values = tl.where(inside, values - tl.sum(values, axis=0) / DIM, 0.0)
    if mean_squares is None:
        mean = tl.sum(values * values, axis=0) / DIM
    else:
        mean = tl.load(mean_squares + row * mean_stride).to(tl.float32)
    normed = values * tl.rsqrt(mean + eps)
    if weight is not None:
        if weight.dtype.element_ty == dtype and not IS_LAYER:  # those of float32 are applied before rounding
            normed = normed.to(dtype).to(tl.float32)
        at = first + columns if IS_WIDE else columns
        normed *= tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
        if bias is not None:
            normed += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + first + columns, normed.to(dtype), mask=inside)


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    out: Tensor,
    residual: Tensor | None = None,
    *,
    size: int | None = None,
    mean_squares: Tensor | None = None,
) -> None:
    """out = norm(x) · weight, or with `residual`: residual += x, out = norm(residual) · weight.

    x, out: [tokens, dim], whose rows may have any stride; out may be x. size: of a group of columns; None: dim, which
    `residual` needs. residual: [tokens, dim] contiguous. weight: [size], or [dim] with a row for each group. All of one
    type, but the weight may be float32. mean_squares: [tokens, 1], the mean of the squares of a row, of which x may be
    a part; None: that of x.
    """
    _launch(x, weight, None, eps, out, residual, size, mean_squares, is_layer=False)


def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    out: Tensor,
    residual: Tensor | None = None,
    *,
    size: int | None = None,
) -> None:
    """The same with LayerNorm, and a bias of the weight's shape."""
    assert bias is None or (weight is not None and bias.shape == weight.shape), "a bias beside no weight"
    _launch(x, weight, bias, eps, out, residual, size, None, is_layer=True)


def _launch(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, out: Tensor, residual: Tensor | None,
    size: int | None, mean_squares: Tensor | None, *, is_layer: bool,
) -> None:  # fmt: skip
    tokens, dim = x.shape
    size = size or dim
    assert x.stride(1) == out.stride(1) == 1 and dim % size == 0, (x.shape, x.stride(), out.stride(), size)
    assert weight is None or (weight.is_contiguous() and weight.numel() in (size, dim)), (weight.shape, size)
    assert residual is None or (residual.is_contiguous() and size == dim)
    if tokens == 0:
        return
    is_wide = weight is not None and weight.numel() > size
    _norm[(tokens, dim // size)](
        x, residual, weight, bias, mean_squares, out, x.stride(0), out.stride(0),
        0 if mean_squares is None else mean_squares.stride(0), eps, IS_LAYER=is_layer, IS_WIDE=is_wide,
        **_options(size),
    )  # fmt: skip


def _options(dim: int) -> dict[str, int]:
    """The compile-time options for this dimension: 8 values per thread, which are the 16 bytes of one load."""
    block = triton.next_power_of_2(dim)
    return {"DIM": dim, "BLOCK": block, "num_warps": min(max(block // 256, 1), 16)}


def _variant(dim: int, *, with_residual: bool, weight: torch.dtype = torch.bfloat16) -> Variant:
    def launch(rows: int) -> None:
        x = shaped(rows, dim)
        rms_norm(x, shaped(dim, dtype=weight), 1e-6, x, x if with_residual else None)

    name = f"rms_norm bf16 {dim}" + " residual" * with_residual + " float32 weight" * (weight == torch.float32)
    return Variant(name=name, launch=launch, plans={"_norm": WIDE})


def _layer_variant(dim: int, *, with_residual: bool = False, with_bias: bool = False) -> Variant:
    def launch(rows: int) -> None:
        x, weight = shaped(rows, dim), shaped(dim)
        layer_norm(x, weight, weight if with_bias else None, 1e-5, x, x if with_residual else None)

    name = f"layer_norm bf16 {dim}" + " residual" * with_residual + " bias" * with_bias
    return Variant(name=name, launch=launch, plans={"_norm": WIDE})


def _of_heads(rows: int) -> None:
    x = shaped(rows, 6144)[:, :1024]
    rms_norm(x, None, 1e-6, x, size=128)


# The hidden sizes of Qwen3-0.6B and Llama-3.1-8B; Gemma 2 multiplies by 1 + weight in float32.
VARIANTS = (
    *(_variant(dim, with_residual=r) for dim in (1024, 4096) for r in (False, True)),
    _variant(2304, with_residual=True, weight=torch.float32),
    _layer_variant(8192),  # Command R
    _layer_variant(6144, with_residual=True, with_bias=True),  # Starcoder 2
    Variant(name="rms_norm bf16 heads of 128", launch=_of_heads, plans={"_norm": Plan()}),
)
