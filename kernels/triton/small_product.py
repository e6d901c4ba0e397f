"""Products of at most 16 rows, fused with the norm before them and the residual sum or gate after them: few rows are
bound by reading the weight and by the number of launches.

A program owns BLOCK_N columns of the result. Where that leaves much of the GPU idle, the sum over k is split between
programs: each stores its partial sum, and the last to arrive adds them up in their order. `tiling` chooses by the shape
of the weight alone, so a row's bits depend neither on the number of rows nor on which program was last.

Rounding follows transformers: the normed row, the product and silu(gate) are rounded to the type of the activations.
Every program computes the norm itself, from rows that are in the L2 cache.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .product import PROCESSORS, check
from .silu_mul import gated
from .tuned import tuned
from .variant import Plan, Variant, shaped

MAX_ROWS = 16  # the M of the smallest tensor core instruction
_IN_FLIGHT = 96 << 10  # bytes of tiles: a little less than the shared memory per program of sm_89, which has the least
_BUSY = 0.9  # the share of multiprocessor time that a tiling should use


@triton.jit(do_not_specialize=["rows"])
def _small_product(
    x,
    weight,
    out,
    norm,
    bias,
    residual,
    partials,
    arrivals,
    rows,
    x_stride,
    out_stride,
    residual_stride,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
):
    SPAN: tl.constexpr = (K + SPLITS * BLOCK_K - 1) // (SPLITS * BLOCK_K) * BLOCK_K  # one program's share of k
    EVEN: tl.constexpr = K == SPLITS * SPAN  # then no mask over k is left: x | True is True
    tile = tl.program_id(0)
    split = tl.program_id(1)
    m = tl.arange(0, BLOCK_M)[:, None]
    column = tl.arange(0, BLOCK_N)[None, :]
    n = tile * BLOCK_N + column
    used = m < rows
    dtype = x.dtype.element_ty
    x_rows = x + m * x_stride
    columns = weight + tile.to(tl.int64) * (BLOCK_N * K) + column * K

    if norm is not None:
        squares = tl.zeros((BLOCK_M,), tl.float32)
        for first in tl.range(0, K, BLOCK_K, num_stages=5):
            k = first + tl.arange(0, BLOCK_K)
            part = tl.load(x_rows + k[None, :], mask=used & ((k < K)[None, :] | EVEN), other=0.0).to(tl.float32)
            squares += tl.sum(part * part, axis=1)
        factor = tl.rsqrt(squares / K + eps)[:, None]

    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(split * SPAN, (split + 1) * SPAN, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        inside = (k < K) | EVEN
        left = tl.load(x_rows + k[None, :], mask=used & inside[None, :], other=0.0)
        if norm is not None:
            normed = left.to(tl.float32) * factor
            if norm.dtype.element_ty == dtype:  # see rms_norm.py
                normed = normed.to(dtype).to(tl.float32)
            left = (normed * tl.load(norm + k, mask=inside, other=0.0).to(tl.float32)[None, :]).to(dtype)
        right = tl.load(columns + k[:, None], mask=inside[:, None], other=0.0)
        sums = tl.dot(left, right, sums, input_precision="ieee")

    if SPLITS > 1:
        address = partials + tile * (BLOCK_M * BLOCK_N) + m * BLOCK_N + column
        tl.store(address + split * (BLOCK_M * N), sums, mask=used)
        # All threads must have stored before the arrival is counted. The load below must bypass the L1 cache, which
        # does not see the stores of other multiprocessors.
        tl.debug_barrier()
        if tl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu") != SPLITS - 1:
            return
        tl.store(arrivals + tile, 0)
        sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for other in tl.static_range(SPLITS):
            sums += tl.load(address + other * (BLOCK_M * N), mask=used, other=0.0, cache_modifier=".cg")

    if bias is not None:
        sums += tl.load(bias + n).to(tl.float32)
    if GATED:
        gate, up = tl.split(tl.reshape(sums, (BLOCK_M, BLOCK_N // 2, 2)))
        half = tile * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)[None, :]
        result = gated(gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32), dtype)
        tl.store(out + m * out_stride + half, result, mask=used)
    else:
        if residual is not None:
            sums = sums.to(dtype).to(tl.float32)
            sums += tl.load(residual + m * residual_stride + n, mask=used, other=0.0).to(tl.float32)
        tl.store(out + m * out_stride + n, sums.to(out.dtype.element_ty), mask=used)


class Tiling(NamedTuple):
    block_n: int
    block_k: int
    splits: int


class Workspace(NamedTuple):
    """Scratch memory of products that split their sum, from `workspace_small_product`."""

    partials: Tensor  # float32
    arrivals: Tensor  # int32, zero between products


def tiling(n: int, k: int) -> Tiling:
    """How the weight [n, k] is divided. The untuned rule: the fewest splits and the widest tiles that keep the
    multiprocessors busy. Programs run in waves of one tile per multiprocessor."""

    def busy(candidate: Tiling) -> float:
        tiles = n // candidate.block_n * candidate.splits
        return tiles / (-(-tiles // PROCESSORS) * PROCESSORS)

    candidates = [
        Tiling(block_n, 256 if block_n < 64 else 128, splits)
        for splits in (1, 2, 4)
        for block_n in (64, 32, 16)
        if n % block_n == 0 and (splits == 1 or k % (splits * 256) == 0)
    ]
    assert candidates, f"a weight of {n} rows, which is no multiple of 16"
    rule = next((candidate for candidate in candidates if busy(candidate) >= _BUSY), max(candidates, key=busy))
    return Tiling(**tuned("small_product", n, k, **rule._asdict()))


def workspace_small_product(shapes: Iterable[tuple[int, int]], device: torch.device | str) -> Workspace:
    """Serves products with weights of all these shapes [n, k], one after another on one stream."""
    split = [(n, tiling(n, k)) for n, k in shapes]
    partials = max((MAX_ROWS * n * t.splits for n, t in split if t.splits > 1), default=0)
    arrivals = max((n // t.block_n for n, t in split if t.splits > 1), default=0)
    return Workspace(
        torch.empty(partials, dtype=torch.float32, device=device),
        torch.zeros(arrivals, dtype=torch.int32, device=device),
    )


def small_product(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    workspace: Workspace,
    *,
    norm: tuple[Tensor, float] | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    is_gated: bool = False,
) -> None:
    """out = [norm(x)] · weightᵀ [+ bias] [+ residual], or silu(gate) · up of it.

    x: [rows ≤ 16, k]; weight: [n, k] contiguous; norm: weight [k] and epsilon of an RMSNorm over x; bias: [n];
    residual: [rows, n], may be out; out: [rows, n], of x's type or, without a residual, float32. With `is_gated` the
    even columns of the product are gates, the odd ones ups, and out is [rows, n / 2]. Rows may have any stride.
    """
    n, k = weight.shape
    rows = x.shape[0]
    check(x, out, residual, n, k, is_gated)
    assert rows <= MAX_ROWS and weight.is_contiguous(), (rows, weight.stride())
    if rows == 0:
        return
    options = _options(n, k)
    _small_product[n // options["BLOCK_N"], options["SPLITS"]](
        x,
        weight,
        out,
        None if norm is None else norm[0],
        bias,
        residual,
        workspace.partials,
        workspace.arrivals,
        rows,
        x.stride(0),
        out.stride(0),
        0 if residual is None else residual.stride(0),
        0.0 if norm is None else norm[1],
        GATED=is_gated,
        **options,
    )


def _stages(tiling: Tiling) -> int:
    """Five stages keep four tiles in flight, if they fit."""
    tile = (MAX_ROWS + tiling.block_n) * tiling.block_k * 2  # bytes, with 16 bits per value
    return 5 if 4 * tile < _IN_FLIGHT else 4


def _options(n: int, k: int) -> dict[str, int]:
    """The compile-time options for a weight of this shape."""
    tiles = tiling(n, k)
    return {
        "N": n,
        "K": k,
        "BLOCK_M": MAX_ROWS,
        "BLOCK_N": tiles.block_n,
        "BLOCK_K": tiles.block_k,
        "SPLITS": tiles.splits,
        "num_warps": 4,
        "num_stages": _stages(tiles),
    }


def _variant(
    name: str, n: int, k: int, *, norm: bool = False, residual: bool = False, is_gated: bool = False, head: bool = False
) -> Variant:
    def launch(rows: int) -> None:
        out = shaped(rows, n // 2 if is_gated else n, dtype=torch.float32 if head else torch.bfloat16)
        small_product(
            shaped(rows, k),
            shaped(n, k),
            out,
            workspace_small_product([(n, k)], "meta"),
            norm=(shaped(k), 1e-6) if norm else None,
            residual=out if residual else None,
            is_gated=is_gated,
        )

    opcodes = ("HMMA", "LDGSTS.E.BYPASS.128")
    return Variant(
        name=f"small_product bf16 {name} {n}x{k}",
        launch=launch,
        plans={"_small_product": Plan(sm_80=opcodes, sm_90=opcodes, buffers=_stages(tiling(n, k)) - 1)},
    )


# Qwen3-0.6B and Llama-3.1-8B: the products of a layer, and the head.
VARIANTS = (
    _variant("qkv", 4096, 1024, norm=True),
    _variant("out", 1024, 2048, residual=True),
    _variant("gate_up", 6144, 1024, norm=True, is_gated=True),
    _variant("down", 1024, 3072, residual=True),
    _variant("head", 151936, 1024, norm=True, head=True),
    _variant("qkv", 6144, 4096, norm=True),
    _variant("out", 4096, 4096, residual=True),
    _variant("gate_up", 28672, 4096, norm=True, is_gated=True),
    _variant("down", 4096, 14336, residual=True),
    _variant("head", 128256, 4096, norm=True, head=True),
)
