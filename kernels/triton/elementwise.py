"""Operations on each number of a token's columns: sums, products, factors and bounds.

Rounding follows transformers: every product is rounded to the type of the activations before it is added.
All tensors are [tokens, width] with rows of any stride, and the result may be an operand.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .variant import WIDE, Plan, Variant, shaped

_BLOCK = 1024


@triton.jit
def _add(x, y, out, x_stride, y_stride, out_stride, dim, alpha, beta, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < dim
    dtype = out.dtype.element_ty
    left = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(y + row * y_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if alpha is not None:
        left = (left * alpha).to(dtype).to(tl.float32)
    if beta is not None:
        right = (right * beta).to(dtype).to(tl.float32)
    tl.store(out + row * out_stride + columns, (left + right).to(dtype), mask=inside)


def add(x: Tensor, y: Tensor, out: Tensor, *, alpha: float = 1.0, beta: float = 1.0) -> None:
    """out = alpha · x + beta · y"""
    assert x.shape == y.shape == out.shape, (x.shape, y.shape, out.shape)
    if len(x):
        factors = (None if factor == 1.0 else float(factor) for factor in (alpha, beta))
        _add[_grid(out)](x, y, out, *_strides(x, y, out), out.shape[1], *factors, BLOCK=_BLOCK, num_warps=4)


@triton.jit
def _scale(x, factors, out, x_stride, out_stride, dim, factor, limit, ONE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < dim
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if factors is not None:
        if ONE:
            values *= tl.load(factors).to(tl.float32)
        else:
            values *= tl.load(factors + columns, mask=inside, other=0.0).to(tl.float32)
    if factor is not None:
        values *= factor
    if limit is not None:  # a NaN stays one
        values = tl.where(values > limit, limit, tl.where(values < -limit, -limit, values))
    tl.store(out + row * out_stride + columns, values.to(out.dtype.element_ty), mask=inside)


def scale(x: Tensor, out: Tensor, factor: float | Tensor) -> None:
    """out = x · factor. A tensor has one number, or one for each column."""
    numbers = factor if isinstance(factor, Tensor) else None
    _scaled(x, out, numbers, None if isinstance(factor, Tensor) or factor == 1.0 else float(factor), None)


def clip(x: Tensor, out: Tensor, limit: float) -> None:
    """out = x between ± limit."""
    _scaled(x, out, None, None, float(limit))


def _scaled(x: Tensor, out: Tensor, factors: Tensor | None, factor: float | None, limit: float | None) -> None:
    width = x.shape[1]
    assert x.shape == out.shape, (x.shape, out.shape)
    assert factors is None or (factors.is_contiguous() and factors.numel() in (1, width)), (factors.shape, width)
    if len(x):
        _scale[_grid(out)](
            x, factors, out, *_strides(x, out), width, factor, limit,
            ONE=factors is not None and factors.numel() == 1, BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip


@triton.jit
def _multiply(
    x, by, out, x_stride, by_stride, out_stride, dim, SIZE: tl.constexpr, ACT: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < dim
    dtype = out.dtype.element_ty
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(by + row * by_stride + columns // SIZE, mask=inside, other=0.0).to(tl.float32)
    if ACT == "sigmoid":
        factor = tl.sigmoid(factor).to(dtype).to(tl.float32)
    elif ACT == "silu":
        factor = (factor * tl.sigmoid(factor)).to(dtype).to(tl.float32)
    tl.store(out + row * out_stride + columns, (values * factor).to(dtype), mask=inside)


def multiply(x: Tensor, by: Tensor, out: Tensor, act: str = "") -> None:
    """out = x · act(by). act: sigmoid, silu or none. by: [tokens, groups], a number for each group of adjacent
    columns of x."""
    width, groups = x.shape[1], by.shape[1]
    assert x.shape == out.shape and width % groups == 0, (x.shape, by.shape, out.shape)
    if len(x):
        _multiply[_grid(out)](
            x, by, out, *_strides(x, by, out), width, SIZE=width // groups, ACT=act, BLOCK=_BLOCK, num_warps=4
        )


@triton.jit
def _heat(x, out, positions, x_stride, out_stride, dim, shift, every, factor, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < dim
    dtype = out.dtype.element_ty
    steps = ((tl.load(positions + row) + shift) // every).to(tl.float32)
    heat = (tl.log(1.0 + steps) * factor + 1.0).to(dtype).to(tl.float32)
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + columns, (values * heat).to(dtype), mask=inside)


def heat(x: Tensor, out: Tensor, positions: Tensor, *, factor: float, every: int, shift: int = 0) -> None:
    """out = x · (1 + factor · ln(1 + ⌊(position + shift) / every⌋)). positions: [tokens] int32."""
    assert x.shape == out.shape and len(positions) == len(x), (x.shape, out.shape, positions.shape)
    if len(x):
        _heat[_grid(out)](
            x, out, positions, *_strides(x, out), x.shape[1], shift, every, float(factor), BLOCK=_BLOCK, num_warps=4
        )


@triton.jit
def _add_rows(x, table, positions, x_stride, dim, offset, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < dim
    place = (tl.load(positions + row) + offset).to(tl.int64)
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    values += tl.load(table + place * dim + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(x + row * x_stride + columns, values.to(x.dtype.element_ty), mask=inside)


def add_rows(x: Tensor, table: Tensor, positions: Tensor, offset: int = 0) -> None:
    """x += the table's row position + offset. table: [rows, width] contiguous; positions: [tokens] int32."""
    assert table.is_contiguous() and table.shape[1] == x.shape[1] and len(positions) == len(x), (table.shape, x.shape)
    if len(x):
        _add_rows[_grid(x)](x, table, positions, *_strides(x), x.shape[1], offset, BLOCK=_BLOCK, num_warps=4)


@triton.jit
def _mix_streams(
    x, others, weights, out, x_stride, others_stride, weights_stride, out_stride, shift,
    SIZE: tl.constexpr, NUM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    stream = tl.program_id(1)
    columns = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    total = tl.load(x + row * x_stride + stream * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    for number in tl.static_range(NUM):
        weight = tl.load(weights + row * weights_stride + stream * NUM + number).to(tl.float32) + shift
        other = tl.load(others + row * others_stride + number * SIZE + columns, mask=inside, other=0.0)
        total += weight * other.to(tl.float32)
    tl.store(out + row * out_stride + stream * SIZE + columns, total.to(out.dtype.element_ty), mask=inside)


def mix_streams(x: Tensor, others: Tensor, weights: Tensor, out: Tensor, *, size: int, shift: float = 0.0) -> None:
    """Stream k of out = that of x + the sum over p of (weights[k][p] + shift) · stream p of others. Streams are `size`
    adjacent columns; weights: row after row. out may be x, if others is another."""
    streams, num = x.shape[1] // size, others.shape[1] // size
    assert x.shape == out.shape and weights.shape[1] == streams * num, (x.shape, others.shape, weights.shape, size)
    if len(x):
        _mix_streams[(len(x), streams, triton.cdiv(size, _BLOCK))](
            x, others, weights, out, *_strides(x, others, weights, out), float(shift), SIZE=size, NUM=num,
            BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip


def _grid(out: Tensor) -> tuple[int, int]:
    return (out.shape[0], triton.cdiv(out.shape[1], _BLOCK))


def _strides(*tensors: Tensor) -> list[int]:
    assert all(each.shape[1] == 1 or each.stride(1) == 1 for each in tensors), [each.stride() for each in tensors]
    return [each.stride(0) for each in tensors]


def _launch_heat(rows: int) -> None:
    x = shaped(rows, 4096)
    heat(x, x, shaped(rows, dtype=torch.int32), factor=0.1, every=16384)


def _launch_rows(rows: int) -> None:
    add_rows(shaped(rows, 2048), shaped(2050, 2048), shaped(rows, dtype=torch.int32), 2)


def _launch_gate(rows: int) -> None:
    x = shaped(rows, 2048)
    multiply(x, shaped(rows, 1), x, "sigmoid")


def _launch_add(rows: int) -> None:
    x = shaped(rows, 4096)
    add(x, x, x, beta=0.22)


def _launch_scale(rows: int) -> None:
    x = shaped(rows, 4096)
    scale(x, x, 0.5)


def _launch_mix(rows: int) -> None:
    x = shaped(rows, 4 * 2048)
    mix_streams(x, x, shaped(rows, 16), shaped(rows, 4 * 2048), size=2048)


VARIANTS = (
    Variant(name="add bf16", launch=_launch_add, plans={"_add": WIDE}),
    Variant(name="scale bf16", launch=_launch_scale, plans={"_scale": WIDE}),
    Variant(name="multiply bf16 one gate", launch=_launch_gate, plans={"_multiply": Plan()}),
    Variant(name="mix_streams bf16 4x2048", launch=_launch_mix, plans={"_mix_streams": WIDE}),
    Variant(name="heat bf16", launch=_launch_heat, plans={"_heat": WIDE}),
    Variant(name="add_rows bf16", launch=_launch_rows, plans={"_add_rows": WIDE}),
)
