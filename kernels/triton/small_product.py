"""Products of at most 16 rows, fused with the norm before them and the residual sum or gate after them: few rows are
bound by reading the weight and by the number of launches.

A program owns BLOCK_N columns of the result. Where that leaves much of the GPU idle, the sum over k is split between
programs. `tiling` chooses by the shape of the weight alone, so a row's bits depend neither on the number of rows nor on
which program was last. Every program takes the norm of its rows, which are in the L2 cache.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from .product import FEW_ROWS, PROCESSORS, Workspace, multiply
from .tuned import tuned
from .variant import Plan, Variant, shaped
from .widen import operand_of

MAX_ROWS = FEW_ROWS  # the least N of a tensor core instruction in two halves
_IN_FLIGHT = 96 << 10  # bytes of tiles: a little less than the shared memory per program of sm_89, which has the least
_BUSY = 0.9  # the share of multiprocessor time that a tiling should use
_SPLITS = (1, 2, 4)
_STEP = 256  # columns: parts of a sum are multiples of it, which all tiles divide


class Tiling(NamedTuple):
    block_n: int
    block_k: int
    splits: int


def tiling(n: int, k: int) -> Tiling:
    """How the weight [n, k] is divided. The untuned rule: the fewest splits and the widest tiles that keep the
    multiprocessors busy."""
    candidates = [
        Tiling(block_n, 256 if block_n < 64 else 128, splits)
        for splits in _SPLITS
        for block_n in (64, 32, 16)
        if n % block_n == 0 and (splits == 1 or k % (splits * _STEP) == 0)
    ]
    assert candidates, f"a weight of {n} rows, which is no multiple of 16"
    return Tiling(**tuned("small_product", n, k, **busiest(candidates, n)._asdict()))


def narrow_tiling(n: int, k: int) -> Tiling:
    """The same for a weight of 8 or 4 bits, of any number of rows. `block_k` is an upper limit."""
    candidates = [
        Tiling(block_n, 128, splits)
        for splits in _SPLITS
        for block_n in (32, 16)
        if splits == 1 or k % (splits * _STEP) == 0
    ]
    return busiest(candidates, n)


def busiest(candidates: Sequence[Tiling], n: int) -> Tiling:
    """The first that keeps the multiprocessors busy, else the one that does it best. Programs run in waves of one tile
    per multiprocessor."""

    def busy(candidate: Tiling) -> float:
        tiles = -(-n // candidate.block_n) * candidate.splits
        return tiles / (-(-tiles // PROCESSORS) * PROCESSORS)

    return next((candidate for candidate in candidates if busy(candidate) >= _BUSY), max(candidates, key=busy))


def workspace_small_product(
    shapes: Iterable[tuple[int, int]], device: torch.device | str, *, narrow: Iterable[tuple[int, int]] = ()
) -> Workspace:
    """Serves products with weights of all these shapes [n, k], one after another on one stream. narrow: of weights of
    8 or 4 bits."""
    found = [(n, tiling(n, k)) for n, k in shapes] + [(n, narrow_tiling(n, k)) for n, k in narrow]
    split = [(triton.cdiv(n, t.block_n), t) for n, t in found if t.splits > 1]
    partials = max((tiles * t.splits * (t.block_n + 1) * MAX_ROWS for tiles, t in split), default=0)
    arrivals = max((tiles for tiles, _ in split), default=0)
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
    assert x.shape[0] <= MAX_ROWS, x.shape
    multiply(
        x, operand_of(weight), out, _options(*weight.shape), workspace=workspace, norm=norm, bias=bias,
        residual=residual, is_gated=is_gated,
    )  # fmt: skip


def _stages(tiling: Tiling) -> int:
    """Five stages keep four tiles in flight, if they fit."""
    tile = (MAX_ROWS + tiling.block_n) * tiling.block_k * 2  # bytes, with 16 bits per value
    return 5 if 4 * tile < _IN_FLIGHT else 4


def _options(n: int, k: int) -> dict[str, int]:
    """The compile-time options for a weight of this shape."""
    tiles = tiling(n, k)
    return {
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

    copies = "LDGSTS.E.BYPASS.128"
    plan = Plan(
        sm_80=("HMMA", copies),
        sm_90=("HGMMA" if tiling(n, k).block_n >= 64 else "HMMA", copies),
        buffers=_stages(tiling(n, k)) - 1,
        loops=1,
    )
    return Variant(name=f"small_product bf16 {name} {n}x{k}", launch=launch, plans={"_product": plan})


# Qwen3-0.6B and Llama-3.1-8B: the products of a layer, and the head.
VARIANTS = (
    _variant("qkv", 4096, 1024, norm=True),
    _variant("out", 1024, 2048, residual=True),
    _variant("gate_up", 6144, 1024, norm=True, is_gated=True),
    _variant("down", 1024, 3072, residual=True),
    _variant("head", 151936, 1024, head=True),
    _variant("qkv", 6144, 4096, norm=True),
    _variant("out", 4096, 4096, residual=True),
    _variant("gate_up", 28672, 4096, norm=True, is_gated=True),
    _variant("down", 4096, 14336, residual=True),
    _variant("head", 128256, 4096, head=True),
)
