"""Weights of 8 and 4 bits as the 16-bit numbers that they stand for: in the registers of a product (`product.py`), and
as a whole into scratch memory, for products of many rows by a library.

Widening is exact and needs no instruction of newer GPUs. Shifted to their place in a 16-bit float, the exponent and the
mantissa of a smaller float are those of the value divided by a power of two, subnormal numbers included. (The code of
e4m3's NaN, which no weight has, gives 480.) As the low mantissa bits of 128 (bf16) or 1024 (fp16), an integer n is the
float 128 + n or 1024 + n.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..quantized_weight import Fp4Weight, Fp8Weight, Int4Weight, Int8Weight, QuantizedWeight
from .variant import Plan, Variant, shaped

Form = Literal["dense", "fp8", "int8", "int4", "fp4", "nvfp4"]
"""dense: of the activations' type, not quantized."""


@dataclass(frozen=True)
class Operand:
    """A weight [n, k] as the kernels take it. A scale is at row · row_stride + group · group_stride."""

    form: Form
    values: Tensor  # [n, k], or [n, k / 2] of 4 bits
    scales: Tensor | None = None
    zeros: Tensor | None = None  # zero points of int4, beside the scales
    factor: Tensor | None = None  # [n]: multiplies a row of the product
    scale_n: int = 1  # rows that share a scale
    scale_k: int = 0  # columns that share a scale
    row_stride: int = 0
    group_stride: int = 0
    half: int | None = None  # of 4 bits
    is_interleaved: bool = False  # the rows of scales alternate as those of the weight do

    @property
    def shape(self) -> tuple[int, int]:
        """(n, k)"""
        n, width = self.values.shape
        return n, width if self.half is None else 2 * width

    def constants(self) -> dict[str, object]:
        """The compile-time arguments of a kernel."""
        n, k = self.shape
        return {
            "N": n,
            "K": k,
            "FORM": self.form,
            "SCALE_N": self.scale_n,
            "SCALE_K": self.scale_k,
            "ROW_STRIDE": self.row_stride,
            "GROUP_STRIDE": self.group_stride,
            "HALF": self.half,
            "INTERLEAVED": self.is_interleaved,
        }


def operand_of(weight: Tensor | QuantizedWeight) -> Operand:
    """weight: contiguous."""
    match weight:
        case Tensor():
            return Operand("dense", weight)
        case Fp8Weight(block=None):
            return Operand("fp8", weight.values.view(torch.uint8), factor=weight.scale)
        case Fp8Weight(block=(rows, columns)):
            return Operand(
                "fp8", weight.values.view(torch.uint8), weight.scale, scale_n=rows, scale_k=columns,
                row_stride=weight.scale.shape[1], group_stride=1, is_interleaved=weight.is_interleaved,
            )  # fmt: skip
        case Int8Weight() if weight.scales.shape[0] == 1:
            return Operand("int8", weight.values, factor=weight.scales[0])
        case Int8Weight():
            values, scales = weight.values, weight.scales
            return Operand(
                "int8", values, scales, scale_k=weight.group_size, row_stride=1, group_stride=scales.shape[1]
            )
        case Int4Weight() | Fp4Weight():
            form: Form = "int4"
            scales, zeros, factor = weight.scales, None, None
            if isinstance(weight, Int4Weight):
                zeros = weight.zeros
            else:
                form, factor = "fp4", weight.factor
            if scales.dtype == torch.float8_e4m3fn:
                form, scales = "nvfp4", scales.view(torch.uint8)
            return Operand(
                form, weight.packed, scales, zeros, factor, scale_k=weight.group_size, row_stride=1,
                group_stride=scales.shape[1], half=weight.half,
            )  # fmt: skip
    raise AssertionError(weight)


@triton.jit
def widened(codes, FORM: tl.constexpr, DTYPE: tl.constexpr):
    """The numbers of codes, exactly. codes: uint8, or int8; below 16 of fp4; DTYPE: bf16 or fp16."""
    if FORM == "fp8":
        high = codes.to(tl.int16) << 8
        if DTYPE.is_bf16():
            value, factor = (high >> 4) & -0x7810, 2.0**120
        else:
            value, factor = (high >> 1) & -0x4080, 2.0**8
    elif FORM == "fp4":
        bits = codes.to(tl.int16)
        if DTYPE.is_bf16():
            value, factor = ((bits & 8) << 12) | ((bits & 7) << 6), 2.0**126
        else:
            value, factor = ((bits & 8) << 12) | ((bits & 7) << 9), 2.0**14
    if FORM == "int8" or FORM == "dense":
        result = codes.to(DTYPE)
    else:
        # The compiler folds this constant; one made by a bitcast would send the values through shared memory.
        result = value.to(DTYPE, bitcast=True) * tl.full(codes.shape, factor, tl.float32).to(DTYPE)
    return result


@triton.jit
def widened_half(codes, zeros, FORM: tl.constexpr, DTYPE: tl.constexpr):
    """The same for half of a tile of 4 bits. int4: numbers - zeros; zeros: uint8 ≤ 16, else None."""
    if FORM == "int4":
        base: tl.constexpr = 0x4300 if DTYPE.is_bf16() else 0x6400
        numbers = (codes.to(tl.int16) | base).to(DTYPE, bitcast=True)
        result = numbers - (zeros.to(tl.int16) + base).to(DTYPE, bitcast=True)
    else:
        result = widened(codes, "fp4", DTYPE)
    return result


@triton.jit
def nvfp4_scales(rows, first, GROUP_STRIDE: tl.constexpr, HALF: tl.constexpr, DTYPE: tl.constexpr):
    """The e4m3 scales of half a tile as [n, HALF]. A number of e2m1 times one of e4m3 has six significant bits at most,
    so their product is exact in 16 bits. rows: pointers [n, 1] to the first scale of each row; first: column."""
    groups = first // 16 + tl.arange(0, HALF // 16)
    scales = widened(tl.load(rows + (groups * GROUP_STRIDE)[None, :]), "fp8", DTYPE)
    spread = tl.broadcast_to(scales[:, :, None], (rows.shape[0], HALF // 16, 16))
    return tl.reshape(spread, (rows.shape[0], HALF))


@triton.jit
def scale_row(n, SCALE_N: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The row of scales for row n of the weight. Interleaved: gates and ups alternate, and so do their scales."""
    if SCALE_N == 1:
        row = n
    elif INTERLEAVED:
        row = n // 2 // SCALE_N * 2 + n % 2
    else:
        row = n // SCALE_N
    return row


@triton.jit
def _widen(
    weight,
    scales,
    zeros,
    factor,
    out,
    N: tl.constexpr,
    K: tl.constexpr,
    FORM: tl.constexpr,
    SCALE_N: tl.constexpr,
    SCALE_K: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    GROUP_STRIDE: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The program's tile of the weight; of 4 bits BLOCK_K is twice HALF. Rounded once, from float32."""
    dtype: tl.constexpr = out.dtype.element_ty
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.program_id(1) * BLOCK_K
    n_inside = (n < N)[:, None]
    n = tl.minimum(n, N - 1)
    row = scale_row(n, SCALE_N, INTERLEAVED) * ROW_STRIDE
    by_row = 1.0
    if factor is not None:
        by_row = tl.load(factor + n).to(tl.float32)[:, None]
    n = n.to(tl.int64)[:, None]
    if HALF is not None:
        byte = tl.arange(0, HALF)
        pairs = tl.load(weight + n * (K // 2) + (first // 2 + byte)[None, :])
        for high in tl.static_range(2):
            column = first + high * HALF
            codes = (pairs >> 4) if high else (pairs & 15)
            if FORM == "nvfp4":
                by_group = nvfp4_scales(scales + row[:, None], column, GROUP_STRIDE, HALF, dtype).to(tl.float32)
                numbers = widened(codes, "fp4", dtype)
            else:
                group = row + column // SCALE_K * GROUP_STRIDE
                by_group = tl.load(scales + group).to(tl.float32)[:, None]
                zero = None
                if zeros is not None:
                    zero = tl.load(zeros + group)[:, None]
                numbers = widened_half(codes, zero, FORM, dtype)
            values = numbers.to(tl.float32) * (by_group * by_row)
            tl.store(out + n * K + (column + byte)[None, :], values.to(dtype), mask=n_inside)
    else:
        k = first + tl.arange(0, BLOCK_K)
        inside = k < K
        codes = tl.load(weight + n * K + k[None, :], mask=inside[None, :], other=0)
        values = widened(codes, FORM, dtype).to(tl.float32) * by_row
        if scales is not None:
            group = (k // SCALE_K * GROUP_STRIDE)[None, :]
            values *= tl.load(scales + row[:, None] + group, mask=inside[None, :], other=0.0).to(tl.float32)
        tl.store(out + n * K + k[None, :], values.to(dtype), mask=n_inside & inside[None, :])


def widen(weight: QuantizedWeight, out: Tensor) -> None:
    """out = the weight, with the columns in its own order. out: [n, k] contiguous, bf16 or fp16."""
    operand = operand_of(weight)
    n, k = operand.shape
    assert out.shape == (n, k) and out.is_contiguous() and out.dtype in (torch.bfloat16, torch.float16), out.shape
    block_n, block_k = 16, 128 if operand.half is None else 2 * operand.half
    _widen[triton.cdiv(n, block_n), triton.cdiv(k, block_k)](
        operand.values,
        operand.scales,
        operand.zeros,
        operand.factor,
        out,
        **operand.constants(),
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=4,
    )


def _variant(name: str, weight: QuantizedWeight) -> Variant:
    def launch(rows: int) -> None:
        widen(weight, shaped(*weight.shape))

    return Variant(name=f"widen bf16 {name}", launch=launch, rows=(1,), plans={"_widen": Plan()})


def shaped_weights(n: int, k: int) -> dict[str, QuantizedWeight]:
    """A weight of each kind without memory: groups of 128, MXFP4 and NVFP4 as they are."""
    packed, values = shaped(n, k // 2, dtype=torch.uint8), shaped(n, k, dtype=torch.float8_e4m3fn)
    zeros, narrow = shaped(k // 128, n, dtype=torch.uint8), shaped(k // 16, n, dtype=torch.float8_e4m3fn)
    return {
        "fp8 rows": Fp8Weight(values, shaped(n, dtype=torch.float32)),
        "fp8 blocks": Fp8Weight(values, shaped(n // 128, k // 128, dtype=torch.float32), (128, 128)),
        "int8": Int8Weight(shaped(n, k, dtype=torch.int8), shaped(1, n, dtype=torch.float32)),
        "int4": Int4Weight(packed, shaped(k // 128, n, dtype=torch.float16), zeros, 64),
        "mxfp4": Fp4Weight(packed, shaped(k // 32, n), 32),
        "nvfp4": Fp4Weight(packed, narrow, 64, shaped(n, dtype=torch.float32)),
    }


VARIANTS = tuple(_variant(name, weight) for name, weight in shaped_weights(4096, 4096).items())
