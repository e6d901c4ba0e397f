"""Operations on a token's numbers that need the mean of their row: equal magnitudes and sparse gates.

One program per row, computed in float32 and rounded once.
"""

from statistics import NormalDist

import triton
import triton.language as tl
from torch import Tensor

from .variant import Plan, Variant, shaped


@triton.jit
def _match_magnitude(x, to, out, x_stride, to_stride, out_stride, floor, DIM: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < DIM
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    wanted = tl.load(to + row * to_stride + columns, mask=inside, other=0.0).to(tl.float32)
    own = tl.maximum(tl.sum(values * values, axis=0) / DIM, floor)
    values *= tl.sqrt(tl.sum(wanted * wanted, axis=0) / DIM / own)
    tl.store(out + row * out_stride + columns, values.to(out.dtype.element_ty), mask=inside)


def match_magnitude(x: Tensor, to: Tensor, out: Tensor, floor: float) -> None:
    """out = x · the root mean square of to / that of x, whose mean square counts as `floor` at least. All [tokens,
    dim], rows of any stride; out may be x."""
    assert x.shape == to.shape == out.shape and _are_rows(x, to, out), (x.shape, to.shape, out.shape)
    if len(x):
        strides = (x.stride(0), to.stride(0), out.stride(0))
        _match_magnitude[(len(x),)](x, to, out, *strides, float(floor), **_options(x.shape[1]))


@triton.jit
def _sparse(x, out, x_stride, out_stride, deviations, DIM: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < DIM
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    centered = values - tl.sum(values, axis=0) / DIM
    squares = tl.where(inside, centered * centered, 0.0)
    centered -= tl.sqrt(tl.sum(squares, axis=0) / DIM) * deviations
    found = tl.where(centered < 0, 0.0, centered)  # a NaN stays one
    tl.store(out + row * out_stride + columns, found.to(out.dtype.element_ty), mask=inside)


def sparse(x: Tensor, out: Tensor, share: float) -> None:
    """What the numbers of a row exceed its quantile `share` by, if they are normally distributed; at least 0. Both
    [tokens, dim], rows of any stride; out may be x."""
    assert x.shape == out.shape and _are_rows(x, out), (x.shape, out.shape)
    if len(x):
        deviations = NormalDist().inv_cdf(share)
        _sparse[(len(x),)](x, out, x.stride(0), out.stride(0), deviations, **_options(x.shape[1]))


def _are_rows(*tensors: Tensor) -> bool:
    return all(each.stride(1) == 1 for each in tensors)


def _options(dim: int) -> dict[str, int]:
    block = triton.next_power_of_2(dim)
    return {"DIM": dim, "BLOCK": block, "num_warps": min(max(block // 512, 1), 16)}


def _launch_match(rows: int) -> None:
    x = shaped(rows, 2048)
    match_magnitude(x, shaped(rows, 2048), x, 1e-5)


def _launch_sparse(rows: int) -> None:
    x = shaped(rows, 16384)
    sparse(x, x, 0.95)


# The sizes of Gemma 3n.
VARIANTS = (
    Variant(name="match_magnitude bf16 2048", launch=_launch_match, plans={"_match_magnitude": Plan()}),
    Variant(name="sparse bf16 16384", launch=_launch_sparse, plans={"_sparse": Plan()}),
)
