"""The gated norm behind a recurrent mixer, with the arguments of `reference_scans.gated_norm`.

One program per group of a token, so a group's bits do not depend on the batch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference_scans import Act
from .variant import Plan, Variant, shaped

_ACTS = {"none": 0, "silu": 1, "sigmoid": 2}
_BLOCK = 1024  # numbers of a program if there is no norm


@triton.jit
def _gated_norm(
    x, z, weight, out, x_stride, z_stride, width, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ACT: tl.constexpr, GATE_FIRST: tl.constexpr, IS_WIDE: tl.constexpr,
):  # fmt: skip
    token, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * SIZE
    columns = tl.arange(0, BLOCK)
    inside = (columns < SIZE) & (first + columns < width)
    values = tl.load(x + token * x_stride + first + columns, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(z + token * z_stride + first + columns, mask=inside, other=0.0).to(tl.float32)
    if ACT == 1:
        gate *= tl.sigmoid(gate)
    elif ACT == 2:
        gate = tl.sigmoid(gate)
    if GATE_FIRST:
        values *= gate
    if weight is not None:
        values *= tl.rsqrt(tl.sum(values * values, axis=0) / SIZE + eps)
        at = columns + first if IS_WIDE else columns
        values *= tl.load(weight + at, mask=inside, other=0.0)
    if not GATE_FIRST:
        values *= gate
    tl.store(out + token * width + first + columns, values, mask=inside)


def gated_norm(
    x: Tensor, z: Tensor, weight: Tensor | None, size: int, eps: float, act: Act, gate_first: bool
) -> Tensor:
    """The result has the type of x."""
    tokens, width = x.shape
    assert x.stride(1) == z.stride(1) == 1 and x.shape == z.shape, (x.shape, x.stride(), z.shape, z.stride())
    out = torch.empty((tokens, width), dtype=x.dtype, device=x.device)
    part = _BLOCK if weight is None else size
    if tokens:
        _gated_norm[(tokens, triton.cdiv(width, part))](
            x, z, weight, out, x.stride(0), z.stride(0), width, eps,
            SIZE=part, BLOCK=triton.next_power_of_2(part), ACT=_ACTS[act], GATE_FIRST=gate_first,
            IS_WIDE=weight is not None and weight.numel() > size,
            num_warps=min(max(triton.next_power_of_2(part) // 256, 1), 16),
        )  # fmt: skip
    return out


def _launch(rows: int) -> None:
    x = shaped(rows, 32 * 128)
    gated_norm(x, x, shaped(128, dtype=torch.float32), 128, 1e-6, "silu", False)


VARIANTS = (Variant(name="gated_norm bf16 32x128", launch=_launch, plans={"_gated_norm": Plan()}),)
