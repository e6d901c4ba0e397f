"""The rotary embedding of heads in place, where no launch that writes keys can take it.

The rotation is computed in float32 from a float32 table and rounded once, as in `norm_rotary_write.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .variant import Plan, Variant, shaped

_NUMBERS = 1024  # pairs of a program


@triton.jit
def _rotate(
    x, rotary, positions, x_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, FIRST: tl.constexpr, PAIRS: tl.constexpr, HEAD_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)[:, None]
    pair = tl.arange(0, BLOCK)[None, :]
    turns = pair < PAIRS
    angles = rotary + tl.load(positions + token).to(tl.int64) * (2 * PAIRS) + pair
    cos = tl.load(angles, mask=turns, other=0.0)
    sin = tl.load(angles + PAIRS, mask=turns, other=0.0)
    at = x + token * x_stride + head * DIM + FIRST + pair
    inside = (head < HEADS) & turns
    low = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(at + PAIRS, mask=inside, other=0.0).to(tl.float32)
    dtype = x.dtype.element_ty
    tl.store(at, (low * cos - high * sin).to(dtype), mask=inside)
    tl.store(at + PAIRS, (high * cos + low * sin).to(dtype), mask=inside)


def rotate(x: Tensor, rotary: Tensor, positions: Tensor, *, heads: int, first: int = 0) -> None:
    """x: [tokens, heads · dim], rows of any stride; rotary: [max_len, turning], see `norm_rotary_write.rotary_table`;
    positions: [tokens] int32. The features [first, first + turning) of each head turn."""
    tokens, width = x.shape
    turning = rotary.shape[1]
    assert x.stride(1) == 1 and width % heads == 0 and rotary.is_contiguous(), (x.shape, x.stride(), heads)
    assert first + turning <= width // heads and turning % 2 == 0, (first, turning, width // heads)
    if tokens == 0:
        return
    block = triton.next_power_of_2(turning // 2)
    at_once = min(triton.next_power_of_2(heads), max(1, _NUMBERS // block))
    _rotate[(tokens, triton.cdiv(heads, at_once))](
        x, rotary, positions, x.stride(0), HEADS=heads, DIM=width // heads, FIRST=first, PAIRS=turning // 2,
        HEAD_BLOCK=at_once, BLOCK=block, num_warps=4,
    )  # fmt: skip


def _variant(name: str, heads: int, dim: int, turning: int, first: int) -> Variant:
    def launch(rows: int) -> None:
        table, positions = shaped(1000, turning, dtype=torch.float32), shaped(rows, dtype=torch.int32)
        rotate(shaped(rows, heads * dim), table, positions, heads=heads, first=first)

    return Variant(name=f"rotate bf16 {name}", launch=launch, plans={"_rotate": Plan()})


# The queries of DeepSeek V3, and its rotated keys, which lie beside the latents.
VARIANTS = (
    _variant("128 heads of 192", 128, 192, 64, 128),
    _variant("1 head of 64", 1, 64, 64, 0),
)
