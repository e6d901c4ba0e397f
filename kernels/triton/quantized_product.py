"""Products of weights of 8 and 4 bits with 16-bit activations: at most 16 rows may be fused with the norm before them
and the residual sum or gate after them (`small_product.py`), and any number of rows takes the same kernel.

Numbers of a group share a scale that multiplies a float32 sum, so a group of 32 is multiplied by itself; the scales of
NVFP4, for 16 numbers each, are multiplied with the numbers, which is exact. The low halves of a tile's bytes of 4 bits
are multiplied by one half of the rows' columns and the high halves by the other (`Int4Weight`).
"""

import torch
from torch import Tensor

from ..quantized_weight import Int4Weight, Int8Weight, QuantizedWeight
from .product import FEW_ROWS, Workspace, multiply
from .small_product import narrow_tiling
from .tuned import tuned
from .variant import Plan, Variant, shaped
from .widen import Operand, operand_of, shaped_weights


def quantized_product(
    x: Tensor,
    weight: QuantizedWeight,
    out: Tensor,
    workspace: Workspace | None = None,
    *,
    norm: tuple[Tensor, float] | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    is_gated: bool = False,
) -> None:
    """out = [norm(x)] · weightᵀ [+ bias] [+ residual], or silu(gate) · up of it.

    x: [rows, k] bf16 or fp16; weight: [n, k]; its blocks and groups are powers of two or multiples of 16 columns; bias:
    [n]; residual: [rows, n], may be out; out: [rows, n], of x's type or, without a residual, float32. With `is_gated`
    the even rows of the weight are gates, the odd ones ups (`interleave`), and out is [rows, n / 2]. Rows may have any
    stride. norm: as in `small_product`. workspace: of `workspace_small_product`; without one no sum is split.

    The tile depends on the number of rows (≤ 16, ≤ 64, more); within one of these ranges a row's bits depend on that
    row alone.
    """
    assert x.dtype in (torch.bfloat16, torch.float16), x.dtype
    order = weight.order if isinstance(weight, Int4Weight | Int8Weight) else None
    if order is not None:  # once, instead of in each program
        x = x.index_select(1, order)
        norm = None if norm is None else (norm[0].index_select(0, order), norm[1])
    operand = operand_of(weight)
    options = _options(x.shape[0], operand, is_split=workspace is not None)
    multiply(x, operand, out, options, workspace=workspace, norm=norm, bias=bias, residual=residual, is_gated=is_gated)


def tile(rows: int, operand: Operand) -> dict[str, int]:
    """Rows of activations and of the weight per program, and its warps. Few rows are bound by reading the weight: as
    many programs as there are multiprocessors for. The scales of NVFP4 take so many registers that some would spill
    in the largest tile."""
    if rows > 64 and operand.form != "nvfp4":
        return {"BLOCK_M": 128, "BLOCK_N": 128, "num_warps": 8}
    if rows > FEW_ROWS:
        return {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4}
    return {"BLOCK_M": FEW_ROWS, "BLOCK_N": narrow_tiling(*operand.shape).block_n, "num_warps": 4}


def _options(rows: int, operand: Operand, *, is_split: bool) -> dict[str, int]:
    """The compile-time options."""
    n, k = operand.shape
    tiles = tile(rows, operand)
    if operand.half is not None:
        block_k = 2 * operand.half
    else:
        block_k = 128 if rows <= 64 else 64
        if operand.scales is not None:
            block_k = min(block_k, operand.scale_k & -operand.scale_k)  # a tile's columns share their scales
            assert block_k >= 16, operand.scale_k
    return {
        "BLOCK_K": block_k,
        "SPLITS": narrow_tiling(n, k).splits if is_split and rows <= FEW_ROWS else 1,
        "num_stages": _num_stages(rows, operand),
        **tuned(f"{kernel_of(operand)}_product", tiles["BLOCK_M"], n, k, **tiles),
    }


def kernel_of(operand: Operand) -> str:
    """The name under which its options are tuned."""
    return "int4" if operand.half is not None else "fp8"


def _num_stages(rows: int, operand: Operand) -> int:
    """One more than the tiles in flight; more do not fit into the shared memory of sm_89."""
    return 3 if operand.half is not None and rows > 64 else 4


ROWS = ((16, 1, 2, 5), (64, 17), (128, 65, 1000))
"""Numbers of rows, grouped by the tile they use."""


def _variant(
    name: str,
    kind: str,
    rows: tuple[int, ...],
    n: int,
    k: int,
    *,
    norm: bool = False,
    residual: bool = False,
    is_gated: bool = False,
) -> Variant:
    """norm: for few rows, which take it."""
    weight = shaped_weights(n, k)[kind]
    has_norm = norm and rows[0] <= FEW_ROWS

    def launch(rows: int) -> None:
        out = shaped(rows, n // 2 if is_gated else n)
        quantized_product(
            shaped(rows, k),
            weight,
            out,
            Workspace(shaped(1, dtype=torch.float32), shaped(1, dtype=torch.int32)),
            norm=(shaped(k), 1e-6) if has_norm else None,
            residual=out if residual else None,
            is_gated=is_gated,
        )

    operand = operand_of(weight)
    wide = tile(rows[0], operand)["BLOCK_N"] >= 64
    plan = Plan(
        sm_80=("HMMA", "LDGSTS"),
        sm_90=("HGMMA" if wide else "HMMA", "LDGSTS"),
        buffers=_num_stages(rows[0], operand) - 1,
        loops=1,
    )
    return Variant(
        name=f"quantized_product bf16 {kind} {name} {n}x{k} M{rows[0]}",
        launch=launch,
        rows=rows,
        plans={"_product": plan},
    )


# Llama-3.1-8B and Qwen3-0.6B.
VARIANTS = tuple(
    variant
    for rows in ROWS
    for variant in (
        _variant("qkv", "fp8 rows", rows, 6144, 4096, norm=True),
        _variant("out", "fp8 blocks", rows, 4096, 4096, residual=True),
        _variant("gate_up", "fp8 blocks", rows, 28672, 4096, norm=True, is_gated=True),
        _variant("down", "int8", rows, 1024, 3072, residual=True),
        _variant("qkv", "int4", rows, 6144, 4096, norm=True),
        _variant("gate_up", "int4", rows, 28672, 4096, norm=True, is_gated=True),
        _variant("out", "mxfp4", rows, 4096, 4096, residual=True),
        _variant("down", "nvfp4", rows, 1024, 3072, residual=True),
    )
)
